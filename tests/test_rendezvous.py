# SPDX-License-Identifier: Apache-2.0
"""Processes of one save coordinate in its directory; synthetic manifests, no waits."""

from __future__ import annotations

import dataclasses
import shutil

import google_crc32c
import made_up_saves
import pytest
from made_up_saves import WIDTH

from deltackpt.errors import (
    Damaged,
    Disagreement,
    OutOfSpace,
    ProcessFailed,
    ProcessMissing,
    TrackingError,
)
from deltackpt.format import names
from deltackpt.format.manifest import ParentRef, SaveId
from deltackpt.save.rendezvous import Rendezvous

SAVE_ID = SaveId("run", 3, 1)


class Job:
    """Processes that write their parts of step 3; by default each an equal share of the rows."""

    def __init__(self, tmp_path, count: int):
        self.count = count
        self.temporary = tmp_path / "3.orbax-checkpoint-tmp"
        self.item = self.temporary / names.EMBEDDINGS_ITEM
        self.item.mkdir(parents=True)

    def at(self, process: int) -> Rendezvous:
        return Rendezvous(
            temporary=self.temporary, process=process, count=self.count, timeout_secs=0.0
        )

    def part(self, process: int, **changes):
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
        return made_up_saves.write(self.item, self.part(process, **changes))

    def collect(self, **changes):
        return self.at(0).collect(self.item, self.part(0, **changes))


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path, 4)


def test_the_index_names_every_part_with_the_digest_of_its_manifest(job):
    written = {process: job.write(process) for process in (3, 1, 2)}
    index = job.collect()
    assert [part.process for part in index] == [0, 1, 2, 3]
    assert [part.crc32c for part in index] == [
        0,
        *(google_crc32c.value(written[process]) for process in (1, 2, 3)),
    ]
    assert {part.nbytes for part in index} == {25 * made_up_saves.ROW_BYTES}
    assert all(part.covers == (made_up_saves.cover(),) for part in index)


def test_process_0_names_the_processes_whose_parts_are_missing(job):
    job.write(2)
    with pytest.raises(ProcessMissing, match=r"step 3: expected process 1, 3 to write its shard"):
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
def test_parts_of_another_save_are_refused(job, field, value):
    for process in (1, 2, 3):
        job.write(process, **({field: value} if process == 2 else {}))
    with pytest.raises(Disagreement, match=f"expected process 2 to agree .* on {field}"):
        job.collect()


def test_a_part_that_was_altered_is_damage(job):
    data = job.write(1)
    (job.item / names.manifest_name(1)).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
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
        job.at(0).await_written()


def test_only_the_first_failure_of_a_process_is_reported(job):
    job.at(1).fail(OutOfSpace("no room"))
    job.at(1).fail(RuntimeError("what follows from it"))
    with pytest.raises(ProcessFailed, match="no room"):
        job.collect()


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
            job.at(process).await_index(job.item)
        assert caught.value.processes == others


def test_processes_listen_only_to_process_0(job):
    job.at(2).fail(OutOfSpace("no room"))
    with pytest.raises(ProcessMissing):
        job.at(1).await_index(job.item)
    job.write(0)
    job.at(1).await_index(job.item)


def test_a_lone_process_leaves_no_note(tmp_path):
    job = Job(tmp_path, 1)
    job.at(0).fail(OutOfSpace("no room"))
    assert [path.name for path in job.temporary.iterdir()] == [names.EMBEDDINGS_ITEM]


def test_a_note_that_cannot_be_written_raises_no_second_error(job):
    shutil.rmtree(job.temporary)
    job.at(1).fail(OutOfSpace("no room"))


def test_an_item_that_was_finished_or_abandoned_needs_no_index(job):
    with pytest.raises(ProcessMissing, match="or the index"):
        job.at(1).await_index(job.item)
    shutil.rmtree(job.item)
    job.at(1).await_index(job.item)


def test_process_0_waits_for_everything_that_processes_write_of_a_step(job):
    for process in (0, 1, 3):
        (job.temporary / names.step_digests_name(process)).touch()
    with pytest.raises(ProcessMissing, match="expected process 2 to write its dense leaves"):
        job.at(0).await_written()
    (job.temporary / names.step_digests_name(2)).touch()
    job.at(0).await_written()


def test_a_step_that_is_gone_without_a_commit_was_abandoned(job):
    with pytest.raises(ProcessMissing, match="commit the step") as caught:
        job.at(1).await_commit(lambda: True)
    assert 0 in caught.value.processes
    shutil.rmtree(job.temporary)
    job.at(1).await_commit(lambda: True)
    with pytest.raises(ProcessFailed, match="step 3: expected process 0 to commit it"):
        job.at(1).await_commit(lambda: False)


def test_the_others_wait_twice_as_long_as_process_0(job):
    first, second = (dataclasses.replace(job.at(i), timeout_secs=0.01) for i in (0, 1))
    with pytest.raises(ProcessMissing, match=r"within 0.01 s \(timeouts.processes_secs is 0.01\)"):
        first.collect(job.item, job.part(0))
    with pytest.raises(ProcessMissing, match=r"within 0.02 s \(timeouts.processes_secs is 0.01\)"):
        second.await_index(job.item)
