# SPDX-License-Identifier: Apache-2.0
"""Processes that write one step together; synthetic manifests, a service in memory, no waits."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from unittest import mock

import google_crc32c
import made_up_saves
import pytest
from job import MemoryService, coordinators, step_writers
from made_up_saves import WIDTH

from deltackpt.errors import (
    Damaged,
    Disagreement,
    OptionError,
    OutOfSpace,
    ProcessFailed,
    ProcessMissing,
    TrackingError,
)
from deltackpt.format import manifest, naming
from deltackpt.format.manifest import ParentRef, SaveId
from deltackpt.handlers.items import HandlerItem
from deltackpt.save.commit import StepWriters
from deltackpt.storage.batch import FileBatch

SAVE_ID = SaveId("run", 3, 1)
HEAD = f"{naming.EMBEDDINGS_ITEM}/{naming.manifest_name(0)}"


class Job:
    """Processes that write their shards of step 3; by default each an equal share of the rows."""

    def __init__(self, tmp_path: Path, count: int, *, shared_fs: bool = True):
        self.count, self.shared_fs = count, shared_fs
        self.service = MemoryService()
        self.coordinators = coordinators(self.service, count, 0.0)
        self.folders = [tmp_path if shared_fs else tmp_path / f"node{i}" for i in range(count)]
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
        self.temporary = self.folders[0] / "3.orbax-checkpoint-tmp"
        self.item = self.temporary / naming.EMBEDDINGS_ITEM
        self.item.mkdir(parents=True)

    def at(self, process: int, **changes) -> StepWriters:
        temporary = self.folders[process] / self.temporary.name
        given = {"shared_fs": self.shared_fs, "fsync": False}
        return step_writers(self.coordinators[process], temporary, **given | changes)

    def shard(self, process: int, **changes):
        rows = made_up_saves.ROWS // self.count
        given = {
            "process": process,
            "process_count": self.count,
            "owned_cells": {"g0": rows * WIDTH},
            "covers": (made_up_saves.cover(),),
            "plan_crc32c": 5,
        }
        made = made_up_saves.record(SAVE_ID, rows=rows, **given)
        return dataclasses.replace(made, **changes)

    def write(self, process: int, **changes) -> bytes:
        at = self.at(process)
        item = at.temporary / naming.EMBEDDINGS_ITEM
        data = made_up_saves.write(item, self.shard(process, **changes))
        at.report("written", at.records([item / naming.manifest_name(process)]))
        return data

    def collect(self, **changes):
        at = self.at(0)
        at.wait("written")
        return at.collect(self.item, self.shard(0, **changes))


@pytest.fixture(params=[True, False], ids=["shared", "nodes"])
def job(request, tmp_path) -> Job:
    """Four processes, with or without a shared file system."""
    return Job(tmp_path, 4, shared_fs=request.param)


def test_the_index_names_every_shard_with_the_digest_of_its_manifest(job):
    written = {process: job.write(process) for process in (3, 1, 2)}
    index = job.collect()
    assert [shard.process for shard in index] == [0, 1, 2, 3]
    assert [shard.crc32c for shard in index] == [
        0,
        *(google_crc32c.value(written[process]) for process in (1, 2, 3)),
    ]
    assert {shard.nbytes for shard in index} == {25 * made_up_saves.ROW_BYTES}
    assert all(shard.covers == (made_up_saves.cover(),) for shard in index)


def test_process_0_names_the_processes_whose_shards_are_missing(job):
    job.write(2)
    with pytest.raises(ProcessMissing, match=r"step 3: expected process 1, 3 to write its files"):
        job.collect()


def test_an_error_names_a_few_of_many_missing_processes(tmp_path):
    with pytest.raises(ProcessMissing, match=r"process 1, 2, .*, 8 and 11 more to") as caught:
        Job(tmp_path, 20).collect()
    assert caught.value.processes == tuple(range(1, 20))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("save_id", SaveId("run", 3, 2)),
        ("kind", "delta"),
        ("parent", ParentRef(save_id=SaveId("run", 2, 1), step_dir="2")),
        ("process_count", 5),
        ("restores", 1),
        ("plan_crc32c", 6),
    ],
)
def test_shards_of_another_save_are_refused(job, field, value):
    for process in (1, 2, 3):
        job.write(process, **({field: value} if process == 2 else {}))
    with pytest.raises(Disagreement, match=f"expected process 2 to agree .* on {field}"):
        job.collect()


def test_a_shard_that_was_altered_is_damage(job):
    data, name = job.write(1), naming.manifest_name(1)
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    (job.item / name).write_bytes(damaged)
    if not job.shared_fs:
        job.at(1).report("written", {f"{naming.EMBEDDINGS_ITEM}/{name}": damaged})
    for process in (2, 3):
        job.write(process)
    with pytest.raises(Damaged, match="manifest.1.msgpack"):
        job.collect()


@pytest.mark.parametrize("cells", [0, 50 * WIDTH])
def test_cells_that_no_process_or_two_processes_write_are_refused(job, cells):
    for process in (1, 2, 3):
        job.write(process, **({"owned_cells": {"g0": cells}} if process == 3 else {}))
    with pytest.raises(Disagreement, match=r"tables \['t'\]: expected 400 cells"):
        job.collect()


def test_processes_that_hold_the_same_rows_must_have_marked_the_same(job):
    job.write(1, shared_stamps={"t[0:50]@": 1})
    job.write(2, shared_stamps={"t[0:50]@": 1, "t[50:100]@opt": 3})
    job.write(3, shared_stamps={"t[50:100]@opt": 4})
    with pytest.raises(TrackingError, match=r"t\[50:100\]: expected processes 2 and 3.*at opt"):
        job.collect(shared_stamps={"t[0:50]@": 1})
    job.write(3, shared_stamps={"t[50:100]@opt": 3})
    assert len(job.collect(shared_stamps={"t[0:50]@": 1})) == 4


def test_a_failure_is_raised_at_once_without_a_wait(job):
    job.at(2).fail(OutOfSpace("no room"))
    with pytest.raises(ProcessFailed, match="process 2 failed: OutOfSpace: no room") as caught:
        job.collect()
    assert not caught.value.leaves_doubt
    with pytest.raises(ProcessFailed):
        job.at(0).wait("written")


def test_a_process_that_fails_after_it_reported_prevents_the_commit(job):
    for process in (1, 2, 3):
        job.write(process)
        job.at(process).report("written", {})
    job.at(1).fail(ProcessMissing("it waited for process 0", (0,)))
    with pytest.raises(ProcessMissing, match="process 1 failed: .* it waited for process 0"):
        job.at(0).wait("written")


def test_either_process_0_decides_to_commit_or_a_process_gives_up(job):
    job.at(1).give_up(ProcessMissing("it waited for process 0", (0,)))
    assert job.at(2).give_up(OutOfSpace("no room"))
    with pytest.raises(ProcessMissing, match="process 1 failed: .* it waited for process 0"):
        job.at(0).decide()
    job.at(0, key="run-2").decide()
    assert not job.at(1, key="run-2").give_up(OutOfSpace("no room"))
    job.service.refuses = True
    assert not job.at(1, key="run-3").give_up(OutOfSpace("no room"))


def test_wrong_touched_rows_of_one_process_leave_doubt_on_all(job):
    job.at(1).fail(TrackingError("rows were not marked"))
    with pytest.raises(ProcessFailed) as caught:
        job.collect()
    assert caught.value.leaves_doubt


def test_processes_hear_from_process_0_who_is_missing_but_not_that_they_are(job):
    job.write(2)
    with pytest.raises(ProcessMissing) as missing:
        job.collect()
    job.at(0).fail(missing.value)
    for process, others in ((1, (3,)), (2, (1, 3)), (3, (1,))):
        with pytest.raises(ProcessMissing) as caught:
            job.at(process).wait("done")
        assert caught.value.processes == others


def test_processes_listen_only_to_process_0(job):
    job.at(2).fail(OutOfSpace("no room"))
    with pytest.raises(ProcessMissing, match="step 3: expected process 0 to commit the step") as e:
        job.at(1).wait("done")
    assert e.value.processes == (0,)
    job.at(0).report("done", {})
    job.at(1).wait("done")


def test_a_lone_process_sends_nothing(tmp_path):
    job = Job(tmp_path, 1)
    job.at(0).fail(OutOfSpace("no room"))
    job.at(0).report("done", {})
    job.at(0).expire()
    assert not job.service.values


def test_a_failure_that_cannot_be_reported_raises_no_second_error(job):
    job.service.refuses = True
    job.at(1).fail(OutOfSpace("no room"))


def test_process_0_waits_for_everything_that_processes_write_of_a_step(job):
    for process in (1, 3):
        job.at(process).report("written", {})
    with pytest.raises(ProcessMissing, match="expected process 2 to write its files of the step"):
        job.at(0).wait("written")
    job.at(2).report("written", {})
    job.at(0).wait("written")


def test_an_error_shows_the_timeout(tmp_path):
    job = Job(tmp_path, 4)
    for coordinator in job.coordinators:
        coordinator.timeout_secs = 0.01
    with pytest.raises(ProcessMissing, match=r"within 0.01 s \(timeouts.processes_secs is 0.01\)"):
        job.collect()


def test_messages_of_earlier_saves_are_removed(tmp_path):
    job = Job(tmp_path, 2)
    for attempt in range(6):
        writing = [job.at(process, key=f"run-{attempt}") for process in range(2)]
        writing[1].report("written", {})
        writing[0].wait("written")
        writing[0].report("done", {})
        writing[1].wait("done")
        for each in writing:
            each.expire()
        found = (key.split("/") for key in job.service.values)
        kept = {key for _, kind, key, *_ in found if kind == "save"}
        assert kept == {f"run-{number}" for number in range(max(0, attempt - 2), attempt + 1)}


# Without a shared file system.


@pytest.fixture
def nodes(tmp_path) -> Job:
    """Four processes, each with its own directory."""
    return Job(tmp_path, 4, shared_fs=False)


def test_process_0_stores_the_files_that_the_others_send(nodes):
    for process in (1, 2, 3):
        nodes.at(process).report("written", {naming.step_digests_name(process): b"digests"})
    nodes.at(0).wait("written")
    for process in (1, 2, 3):
        assert (nodes.temporary / naming.step_digests_name(process)).read_bytes() == b"digests"


def test_all_processes_get_the_manifest_of_process_0_once_the_step_is_committed(nodes):
    head = manifest.to_bytes(made_up_saves.record(SAVE_ID)) + os.urandom(5 << 20)
    nodes.at(0).report("done", {HEAD: head})
    for process in (1, 2, 3):
        at = nodes.at(process)
        at.wait("done")
        assert (at.temporary / HEAD).read_bytes() == head


def test_arrays_that_orbax_wrote_on_several_processes_are_refused(nodes):
    at = nodes.at(1)
    item_dir = at.temporary / "other"
    (item_dir / naming.dense_process_dir(1)).mkdir(parents=True)
    batch = FileBatch(at.temporary, fsync=False)
    with pytest.raises(OptionError, match=r"item other: .*Tiers\(shared=False\)"):
        HandlerItem(mock.Mock(), item_dir, None, at.runtime).write(item_dir, batch, at)


def test_files_of_a_handler_belong_to_the_process_that_wrote_them(nodes):
    for process in range(2):
        at = nodes.at(process)
        item_dir = at.temporary / "position"
        item_dir.mkdir(parents=True)
        (item_dir / f"of.{process}").write_bytes(b"abc")
        batch = FileBatch(at.temporary, fsync=False)
        HandlerItem(mock.Mock(), item_dir, None, at.runtime).write(item_dir, batch, at)
        assert [*batch.digests] == ([] if process == 0 else ["position/of.1"])
