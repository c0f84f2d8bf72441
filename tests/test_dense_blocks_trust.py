# SPDX-License-Identifier: Apache-2.0
"""Dense leaves as blocks: failed writes, kills, flipped bits and forged records."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import dense_states
import jax
import many_worker
import pytest
from dense_states import LOSSY, Loop, assert_close, assert_kept_as_stored, opened, own
from many import Job
from shown import dense_leaves
from test_hostile_records import MANIFEST, at, body_of, change, little_memory, read_all
from test_processes import saved as saved_by
from test_processes import started, step_numbers

import deltackpt
from deltackpt.errors import DeltackptError, SaveFailed
from deltackpt.save.pending_save import PendingSave
from deltackpt.testing import Disk

CODED = deltackpt.Dense(deltas="blocks", codec=LOSSY)
#: Calls of our writers, and the commit.
OURS = r"embeddings[^/]*/.|\d+$"


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def disk(root) -> Iterator[Disk]:
    with Disk(root) as found:
        yield found


def test_nothing_is_lost_if_a_delta_fails_at_any_write(root, disk):
    """A failed save's staged copy is not a reference: the next builds on the one before."""
    loop, committed = Loop(), []
    with opened(root, CODED) as saver:
        loop.steps(saver, 1, 2)
        for number in range(0, 400, 6):
            step, failed = 3 + number, len(disk.failures)
            disk.fail(path=OURS, after=number)
            loop.train()
            try:
                loop.save(saver, step)
                committed.append(step)
            except SaveFailed:
                assert len(disk.failures) > failed
            disk.clear()
            if len(disk.failures) == failed:
                break
            loop.steps(saver, step + 1)
            committed.append(step + 1)
        else:
            pytest.fail("every save failed")
        assert saver.all_steps() == [1, 2, *committed]
        assert len(saver._run.dense._kept) == 1
        assert_close(saver, loop, committed)
    deltas = [step for step in committed if own(root, step)]
    for step in deltas[:: max(1, len(deltas) // 5)]:
        assert_kept_as_stored(root, loop, step, dense=CODED)


def test_a_refused_save_returns_what_it_borrowed(tmp_path):
    loop = Loop({**dense_states.initial(), "large": jax.numpy.ones(1 << 20)})
    with opened(tmp_path) as saver:
        loop.steps(saver, 1, 2)
        memory = saver._run.dense.runtime.memory
        lent = len(memory._lent)
        for options in ({}, {"force_base": True}):
            with mock.patch.object(PendingSave, "wait_copied", side_effect=OSError(5, "injected")):
                with pytest.raises(OSError, match="injected"):
                    loop.save(saver, 3, **options)
            assert len(memory._lent) == lent
        loop.steps(saver, 4)
        assert len(memory._lent) == lent


# Accidental damage.


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    """A base and three deltas with blocks of every codec."""
    root = tmp_path_factory.mktemp("chain") / "root"
    loop = Loop()
    with opened(root, CODED) as saver:
        loop.steps(saver, 1, 2, 3, 4)
    return root


# Forged damage with correct checksums.


def first(list_name: str, is_wanted: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Returns a function that finds a value or a segment in a record."""
    return lambda body: next(one for one in body["dense_blocks"][list_name] if is_wanted(one))


def of_segment(wanted: str, *path: Any, to: Any) -> Callable[[Any], None]:
    """Sets a value of the first segment of dense blocks whose name starts with ``wanted``."""
    find = first("segments", lambda one: one["name"].startswith(wanted))
    return lambda body: at(*path, to=to)(find(body))


def of_value(wanted: str, *path: Any, to: Any) -> Callable[[Any], None]:
    """Sets a field of the value of a key."""
    find = first("values", lambda one: one["key"] == wanted)
    return lambda body: at(*path, to=to)(find(body))


def repeated(list_name: str) -> Callable[[Any], None]:
    """Repeats the last value or segment."""
    return lambda body: body["dense_blocks"][list_name].append(
        {**body["dense_blocks"][list_name][-1]}
    )


def swapped(body: Any) -> None:
    values = body["dense_blocks"]["values"]
    one, other, *_ = (n for n, value in enumerate(values) if value["group"] == "float32")
    values[one], values[other] = values[other], values[one]


def shared_blocks(body: Any) -> None:
    """Makes two segments hold the same blocks."""
    by_name = {one["name"]: one for one in body["dense_blocks"]["segments"]}
    start = by_name[EF4]["ranges"][0][0]
    by_name[INT8]["ranges"] = [[start, start + by_name[INT8]["count"]]]


def file_above(body: Any) -> None:
    """Makes a file of the item point outside of its directory."""
    find = first("values", lambda one: one["at"] is not None and one["group"] == "plain")
    find(body).update({"file": True, "key": "../../x"})


def without_an_array(body: Any) -> None:
    first("segments", lambda one: one["name"].startswith(EF4))(body)["arrays"].pop()


SPARSE, EF4, INT8 = "dense.int32.sparse", "dense.float32.ef4", "dense.float32.int8"
W = "params.w/0.0"
HUGE = 2**45
CASES: dict[str, Callable[[Any], Any]] = {
    "no record": at("dense_blocks", to=None),
    "no map": at("dense_blocks", to=[]),
    "nothing": at("dense_blocks", to={}),
    "no values": at("dense_blocks", "values", to=[]),
    "values swapped": swapped,
    "a value twice": repeated("values"),
    "a segment twice": repeated("segments"),
    "another dtype": of_value(W, "dtype", to="int32"),
    "a dtype of both": of_value(W, "dtype", to="object"),
    "another group": of_value(W, "group", to="bfloat16"),
    "a group that is not": of_segment(EF4, "group", to="float64"),
    "plain": of_value(W, "group", to="plain"),
    "no place": of_value(W, "at", to=None),
    "another place": of_value(W, "at", to=7),
    "negative place": of_value(W, "at", to=-1),
    "huge count": of_value(W, "count", to=2**62),
    "large count": of_value(W, "count", to=HUGE),
    "smaller count": of_value(W, "count", to=1000),
    "negative count": of_value(W, "count", to=-1),
    "a text as a count": of_value(W, "count", to="1"),
    "a file": of_value(W, "file", to=True),
    "blocks of two segments": shared_blocks,
    "a file that is written above": file_above,
    "a file above": of_value("_METADATA", "key", to="../../x"),
    "a file elsewhere": of_value("_METADATA", "key", to="/tmp/deltackpt-hostile"),
    "nul": of_value("_METADATA", "key", to="a\0b"),
    "an unknown codec": of_segment(EF4, "encodings", 0, "codec", to="ef5"),
    "another codec": of_segment(EF4, "encodings", 0, "codec", to="sparse"),
    "no codec": of_segment(EF4, "encodings", to=[]),
    "segment above": of_segment(EF4, "name", to="../.."),
    "count of blocks": of_segment(EF4, "count", to=3),
    "huge count of blocks": of_segment(EF4, "count", to=2**60),
    "ranges beyond": of_segment(INT8, "ranges", to=[[0, 2**40]]),
    "ranges back": of_segment(INT8, "ranges", to=[[5, 2]]),
    "ranges twice": of_segment(INT8, "ranges", to=[[0, 38], [0, 37]]),
    "no ranges": of_segment(INT8, "ranges", to=None),
    "no arrays": of_segment(EF4, "arrays", to=[]),
    "an array less": without_an_array,
    "huge shape": of_segment(EF4, "arrays", 0, "shape", 0, to=HUGE),
    "another shape": of_segment(EF4, "arrays", 0, "shape", to=[1]),
    "no chunk rows": of_segment(EF4, "arrays", 0, "chunk_rows", to=0),
    "another dtype of codes": of_segment(EF4, "arrays", 0, "dtype", to="int64"),
    "huge sparse": of_segment(SPARSE, "arrays", -1, "shape", 0, to=HUGE),
    "fewer sparse": of_segment(SPARSE, "arrays", -1, "shape", 0, to=0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_forged_record_of_dense_blocks_is_damage(case, chain, root, nobody_removes_steps):
    shutil.copytree(chain, root)
    sound = dense_leaves(chain, 4)
    change(root, 4, MANIFEST, CASES[case])
    assert body_of(root / "4" / MANIFEST) != body_of(chain / "4" / MANIFEST)
    with little_memory():
        read_all(root, "list", "verify")
        with pytest.raises(DeltackptError):
            # A smaller count shortens the leaf and never returns another leaf's data.
            assert dense_leaves(root, 4) != sound
            with opened(root, CODED) as saver:
                saver.restore(4, dense_states.initial())
    assert not Path("/tmp/deltackpt-hostile").exists()
    assert not (root.parent / "x").exists() and not (root / "x").exists()


# Several processes.


@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_a_job_resumes_with_another_number_of_processes(server, root, tmp_path, before, after):
    known = many_worker.Model(kernel=[256, 64])
    for count, first_step in ((before, 0), (after, 3)):
        with Job(server, tmp_path / f"jobs{count}", processes=count, devices=1, model=known) as job:
            place = {"mesh": [count, 1], "layout": "cut"}
            started(job, root, place, dense="blocks")
            if first_step:
                found = job.all("restore_latest", place=place, like=2)
                assert {(one["step"], one["wrong"]) for one in found} == {(2, None)}
            kinds = [saved_by(job, first_step + n)[0]["kind"] for n in range(3)]
            assert kinds == ["delta" if first_step else "base", "delta", "delta"]
            job.close()
    assert step_numbers(root) == [*range(6)]
    read = deltackpt.ManagerOptions(access="read")
    handlers = {"embeddings": many_worker.tables()}
    with deltackpt.CheckpointManager(root, handlers=handlers, options=read) as reader:
        for step in range(6):
            expected = known.at(step)
            assert many_worker.difference(reader.restore(step, expected).state, expected) is None
