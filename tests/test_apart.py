# SPDX-License-Identifier: Apache-2.0
"""Processes of one save without a shared file system coordinate through a key-value store."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import google_crc32c
import made_up_saves
import pytest
from test_rendezvous import SAVE_ID, Job

from deltackpt.errors import (
    Disagreement,
    OptionError,
    OutOfSpace,
    ProcessFailed,
    ProcessMissing,
    StorageError,
    TrackingError,
)
from deltackpt.format import manifest, names
from deltackpt.handlers.foreign import HandlerItem
from deltackpt.save.apart import Apart, Meetings
from deltackpt.storage.batch import FileBatch

HEAD = f"{names.EMBEDDINGS_ITEM}/{names.manifest_name(0)}"


class MemoryMessages:
    """An in-memory key-value store."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        if key in self.held:
            raise StorageError(f"{key}: expected none, found one")
        assert len(data) <= 64 << 10
        self.held[key] = data

    def folder(self, key: str) -> dict[str, bytes]:
        return {k.removeprefix(key): v for k, v in self.held.items() if k.startswith(key)}

    def delete(self, key: str) -> None:
        self.held = {k: v for k, v in self.held.items() if not k.startswith(key)}


class Nodes(Job):
    """The same processes, each with its own directory."""

    def __init__(self, tmp_path: Path, count: int):
        super().__init__(tmp_path / "node0", count)
        self.messages, self.folder = MemoryMessages(), tmp_path
        for process in range(count):
            (tmp_path / f"node{process}").mkdir(exist_ok=True)

    def at(self, process: int) -> Apart:
        return Apart(
            temporary=self.folder / f"node{process}" / self.temporary.name,
            process=process,
            count=self.count,
            timeout_secs=0.0,
            messages=self.messages,
            fsync=False,
        )

    def write(self, process: int, **changes) -> bytes:
        data = made_up_saves.to_bytes(self.part(process, **changes))
        name = f"{names.EMBEDDINGS_ITEM}/{names.manifest_name(process)}"
        self.at(process).tell({name: data, names.step_digests_name(process): b"digests"})
        return data


@pytest.fixture
def job(tmp_path) -> Nodes:
    return Nodes(tmp_path, 4)


def test_process_0_receives_the_manifests_and_digests_of_all_parts(job):
    written = {process: job.write(process) for process in (3, 1, 2)}
    index = job.collect()
    assert [part.process for part in index] == [0, 1, 2, 3]
    assert [part.crc32c for part in index[1:]] == [
        google_crc32c.value(written[process]) for process in (1, 2, 3)
    ]
    assert [*job.at(0).await_written()] == [1, 2, 3]
    for process in (1, 2, 3):
        assert (job.temporary / names.step_digests_name(process)).read_bytes() == b"digests"


def test_process_0_names_the_processes_whose_parts_are_missing(job):
    job.write(2)
    with pytest.raises(ProcessMissing, match=r"step 3: expected process 1, 3 to write its shard"):
        job.collect()


def test_parts_that_do_not_fit_are_refused(job):
    for process in (1, 2, 3):
        job.write(process, **({"kind": "delta"} if process == 2 else {}))
    with pytest.raises(Disagreement, match="expected process 2 to agree .* on kind"):
        job.collect()


def test_the_first_failure_reaches_process_0_at_once_and_through_it_all_others(job):
    job.at(2).fail(OutOfSpace("no room"))
    job.at(2).fail(RuntimeError("what follows from it"))
    with pytest.raises(ProcessFailed, match="process 2 failed: OutOfSpace: no room") as caught:
        job.collect()
    with pytest.raises(ProcessMissing):
        job.at(1).await_commit(lambda: True)  # It listens only to process 0.
    job.at(0).fail(caught.value)
    with pytest.raises(ProcessFailed, match="process 0 failed: .*no room"):
        job.at(1).await_commit(lambda: True)


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
            job.at(process).await_commit(lambda: True)
        assert caught.value.processes == others


def test_all_processes_get_the_manifest_of_process_0_once_the_step_is_committed(job):
    head = manifest.to_bytes(made_up_saves.record(SAVE_ID)) + os.urandom(5 << 20)
    job.at(0).tell({HEAD: head})
    for process in (1, 2, 3):
        at = job.at(process)
        at.await_commit(lambda: False)
        assert (at.temporary / HEAD).read_bytes() == head


def test_a_failure_that_cannot_be_reported_raises_no_second_error(job):
    def refuse(key, data):
        raise StorageError("no answer")

    job.messages.put = refuse
    job.at(1).fail(OutOfSpace("no room"))


def test_entries_of_finished_saves_are_removed(tmp_path):
    messages = MemoryMessages()
    meetings = [Meetings(messages, process, 2, 1.0) for process in range(2)]
    for process in range(2):
        (tmp_path / f"{process}").mkdir()
    for step in range(6):
        made = [
            each.of(tmp_path / f"{process}" / f"{step}.tmp-run-{step}", fsync=False)
            for process, each in enumerate(meetings)
        ]
        made[1].tell({"x": b"abc"})
        made[0].tell({HEAD: b"head"})
        made[1].await_commit(lambda: True)
        steps = {key.split("/")[1].split(".")[0] for key in messages.held}
        assert steps == {str(number) for number in range(max(0, step - 2), step + 1)}


def test_arrays_that_orbax_wrote_on_several_processes_are_refused(job):
    at = job.at(1)
    item_dir = at.temporary / "other"
    (item_dir / names.dense_part(1)).mkdir(parents=True)
    batch = FileBatch(at.temporary, fsync=False)
    with pytest.raises(OptionError, match=r"item other: .*Tiers\(shared=False\)"):
        HandlerItem(object(), []).write(item_dir, batch, at)


def test_files_of_a_handler_belong_to_the_process_that_wrote_them(job):
    for process in range(2):
        at = job.at(process)
        item_dir = at.temporary / "position"
        item_dir.mkdir(parents=True)
        (item_dir / f"of.{process}").write_bytes(b"abc")
        batch = FileBatch(at.temporary, fsync=False)
        HandlerItem(object(), []).write(item_dir, batch, at)
        assert [*batch.digests] == ([] if process == 0 else ["position/of.1"])


def test_no_two_saves_have_the_same_key(job):
    first = job.at(0)
    other = dataclasses.replace(first, temporary=first.temporary.with_name("3.tmp-run-2"))
    assert first.key != other.key
