# SPDX-License-Identifier: Apache-2.0
"""Rolling bases: any window of saves contains every row, and only the first is a base."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from flat_options import manager_options
from many import Job, Server

import deltackpt
import deltackpt.inspect
from deltackpt.errors import Damaged, OptionError, RestoreError
from deltackpt.format.chain import SaveInfo, live_set, restore_chain
from deltackpt.format.manifest import ParentRef, RollingShare, SaveId
from deltackpt.policies import Rolling
from deltackpt.reading import chains, reader, saves
from deltackpt.testing import failing_saves, stored_chunks
from deltackpt.upkeep import compact, verify

WINDOW = 3


def manager(root: Path, window: int = WINDOW, *, codec: Any = "raw", always=(), **options):
    tables = deltackpt.Tables(
        select=model.SELECT, slots=model.SLOTS, always=always, codec=codec, slot_codec="raw"
    )
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": tables},
        options=manager_options(
            durability="process", policy=deltackpt.policies.Rolling(window=window), **options
        ),
    )


class Loop:
    """A training loop that remembers the state of each save."""

    def __init__(self, state: dict | None = None, touched: deltackpt.TouchState | None = None):
        self.state = model.initial() if state is None else state
        self.touched = model.new_touched(self.state) if touched is None else touched
        self.states: dict[int, dict] = {}

    def save(self, one: deltackpt.CheckpointManager, *steps: int) -> list[deltackpt.Saved]:
        saved = []
        for step in steps:
            saved.append(one.save(step, self.state, touched=self.touched))
            self.states[step] = self.state
            self.state, self.touched = model.train(self.state, self.touched, step)
            one.wait_until_finished()
        return saved


def share_of(root: Path, step: int) -> RollingShare:
    found = saves.read_save(root / str(step)).head.rolling
    assert found is not None
    return found


def assert_equal(found: dict, expected: dict) -> None:
    left, right = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("always", [(), ("accumulator",)])
def test_every_step_restores_exactly_from_a_window_of_saves(tmp_path, always):
    loop = Loop()
    with manager(tmp_path, always=always) as one:
        kinds = [saved.kind for saved in loop.save(one, *range(8))]
        assert kinds == ["base"] + ["delta"] * 7
        for step, state in loop.states.items():
            result = one.restore(step, state)
            assert_equal(result.state, state)
            first = 0 if step < WINDOW else step - WINDOW + 1
            assert result.chain == tuple(range(first, step + 1))


def test_retention_keeps_the_window_and_nothing_else(tmp_path):
    loop = Loop()
    with manager(tmp_path, max_to_keep=1) as one:
        loop.save(one, *range(9))
        assert one.all_steps() == [6, 7, 8]
        assert_equal(one.restore(8, loop.state).state, loop.states[8])


def test_cursor_continues_after_a_restore(tmp_path):
    loop = Loop()
    with manager(tmp_path) as one:
        loop.save(one, *range(5))
    with manager(tmp_path) as two:
        restored = two.restore_latest(loop.state)
        assert restored is not None
        again = Loop(restored.state, restored.touched)
        assert [saved.kind for saved in again.save(two, 5, 6, 7)] == ["delta"] * 3
        for step, state in again.states.items():
            assert_equal(two.restore(step, state).state, state)
    numbers = [share_of(tmp_path, step).number for step in range(1, 8)]
    assert numbers == [0, 1, 2, 0, 1, 2, 0]


def test_failed_save_leaves_the_cursor_where_it_was(tmp_path):
    loop = Loop()
    with manager(tmp_path) as one:
        loop.save(one, *range(4))
        with failing_saves(tmp_path):
            one.save(4, loop.state, touched=loop.touched)
            with pytest.raises(deltackpt.errors.SaveFailed):
                one.wait_until_finished()
        loop.save(one, 5, 6, 7)
        for step, state in loop.states.items():
            assert_equal(one.restore(step, state).state, state)
    assert [share_of(tmp_path, step).number for step in (3, 5, 6, 7)] == [2, 0, 1, 2]


def test_another_window_size_starts_a_new_cycle(tmp_path):
    loop = Loop()
    with manager(tmp_path) as one:
        loop.save(one, *range(5))
    with manager(tmp_path, window=2) as two:
        restored = two.restore_latest(loop.state)
        assert restored is not None
        again = Loop(restored.state, restored.touched)
        again.save(two, 5, 6, 7)
        read = [two.restore(step, again.states[step]).chain for step in (5, 6, 7)]
        assert_equal(two.restore(7, again.states[7]).state, again.states[7])
    # Step 5 needs the window of its parent, step 4, until its own is full.
    assert read == [(2, 3, 4, 5), (5, 6), (6, 7)]


def test_plain_deltas_continue_from_a_window(tmp_path):
    loop = Loop()
    with manager(tmp_path) as one:
        loop.save(one, *range(5))
    tables = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)
    policy = deltackpt.policies.Consecutive(max_restore_ratio=1e9, max_delta_ratio=1e9)
    options = manager_options(durability="process", policy=policy)
    with deltackpt.CheckpointManager(
        tmp_path, handlers={"embeddings": tables}, options=options
    ) as two:
        restored = two.restore_latest(loop.state)
        assert restored is not None
        again = Loop(restored.state, restored.touched)
        again.save(two, 5, 6)
        result = two.restore(6, again.states[6])
        assert result.chain == (2, 3, 4, 5, 6)
        assert_equal(result.state, again.states[6])


def test_shares_are_stored_by_the_codec_of_bases(tmp_path):
    loop = Loop()
    codec = deltackpt.policies.CodecChoice(delta="int4", base="raw")
    with manager(tmp_path, codec=codec) as one:
        loop.save(one, *range(6))
    save = saves.read_save(tmp_path / "5")
    used = {
        (segment.ranges is not None, encoding.field): encoding.codec
        for part in save.parts()
        for segment in part.record.segments
        for encoding in segment.encodings
    }
    assert used[True, "values"] == "raw"
    assert used[False, "values"] == "int4"
    with manager(tmp_path, codec=codec, access="read") as reading:
        found = reading.restore(5, loop.states[5]).state
    rolling = share_of(tmp_path, 5)
    [table] = [table for table in save.head.tables if table.name.endswith("users")]
    first, last = (table.rows * n // WINDOW for n in (rolling.number, rolling.number + 1))
    exact = np.asarray(loop.states[5]["tables"]["users"])[first:last]
    assert np.asarray(found["tables"]["users"])[first:last].tobytes() == exact.tobytes()


def test_a_restore_that_lacks_a_share_is_refused(tmp_path):
    loop = Loop()
    with manager(tmp_path) as one:
        loop.save(one, *range(6))
    held = chains.read_chain(tmp_path / "5")
    wrong = dataclasses.replace(held[0].head, rolling=held[1].head.rolling)
    with pytest.raises(Damaged, match="cells"):
        reader.restore_tables((dataclasses.replace(held[0], head=wrong), *held[1:]))


def test_damage_in_the_window_is_found_and_older_steps_restore(tmp_path):
    loop = Loop()
    with manager(tmp_path) as one:
        loop.save(one, *range(7))
    max(stored_chunks(tmp_path / "5"), key=lambda chunk: chunk.nbytes).flip()
    with manager(tmp_path) as two:
        for step in (5, 6):
            with pytest.raises(RestoreError):
                two.restore(step, loop.state)
        with pytest.warns(UserWarning):
            result = two.restore_latest(loop.state)
        assert result is not None
        assert_equal(result.state, loop.states[4])


def test_verify_accepts_steps_that_only_a_window_needs(tmp_path):
    loop = Loop()
    with manager(tmp_path, max_to_keep=2) as one:
        loop.save(one, *range(9))
    report = verify.verify_root(tmp_path)
    assert report.intact
    restorable = {step.step: step.restorable for step in report.steps}
    assert restorable == {5: False, 6: False, 7: True, 8: True}


def test_compaction_merges_a_window(tmp_path):
    loop = Loop()
    with manager(tmp_path) as one:
        loop.save(one, *range(6))
        done = compact.compact(tmp_path)
        assert done is not None and done.deltas == WINDOW
        result = one.restore(5, loop.states[5])
        assert result.chain == (5,)
        assert_equal(result.state, loop.states[5])
        loop.save(one, 6, 7)
        assert_equal(one.restore(7, loop.states[7]).state, loop.states[7])
    assert verify.verify_root(tmp_path).intact


def test_rows_of_a_window_can_be_inspected(tmp_path):
    loop = Loop()
    with manager(tmp_path, max_to_keep=2) as one:
        loop.save(one, *range(9))
    ck = deltackpt.inspect.open(tmp_path)
    for step in (7, 8):
        expected = np.asarray(loop.states[step]["tables"]["users"])
        assert np.asarray(ck[step].tables["tables/users"][10:40]).tobytes() == (
            expected[10:40].tobytes()
        )
    assert list(ck.history("tables/users", [3, 600]).steps) == [7, 8]
    values = ck.history("tables/users", [3, 600]).values
    assert values[1].tobytes() == np.asarray(loop.states[8]["tables"]["users"])[[3, 600]].tobytes()
    lengths = {save.step: save.chain_length for save in ck.saves}
    assert lengths == {5: None, 6: None, 7: WINDOW, 8: WINDOW}


def test_rows_gathered_on_devices_are_those_of_the_share_too(tmp_path, monkeypatch):
    monkeypatch.setattr("deltackpt.save.extract.on_host", lambda _: False)
    loop = Loop()
    codec = deltackpt.policies.CodecChoice(delta="int8", base="raw")
    with manager(tmp_path, codec=codec) as one:
        loop.save(one, *range(5))
        found = one.restore(4, loop.states[4]).state
    with manager(tmp_path / "host", codec=codec) as two:
        again = Loop()
        again.save(two, *range(5))
    monkeypatch.undo()
    with manager(tmp_path / "host", codec=codec, access="read") as reading:
        assert_equal(found, reading.restore(4, again.states[4]).state)


def test_contradictory_options_are_refused():
    with pytest.raises(OptionError, match="at least 2"):
        Rolling(window=1)
    with pytest.raises(OptionError, match="compacted"):
        deltackpt.DeltaOptions(policy=Rolling(), bases="compacted")


def info(step: int, rolling: RollingShare | None = None) -> SaveInfo:
    parent = ParentRef(save_id=SaveId("a", step - 1, step), step_dir=str(step - 1))
    return SaveInfo(
        save_id=SaveId("a", step, step + 1),
        kind="delta" if step else "base",
        parent=parent if step else None,
        step_dir=str(step),
        nbytes=1,
        rolling=rolling,
    )


def test_live_set_ends_with_the_window():
    shares = [Rolling(window=3).share_after(None)]
    while len(shares) < 8:
        shares.append(Rolling(window=3).share_after(shares[-1]))
    infos = [info(0), *(info(step + 1, share) for step, share in enumerate(shares))]
    steps = {save.save_id: save.save_id.step for save in infos}

    def live(*keep: int) -> list[int]:
        return sorted(steps[found] for found in live_set([infos[n].save_id for n in keep], infos))

    assert live(8) == [6, 7, 8]
    assert live(8, 3) == [1, 2, 3, 6, 7, 8]
    assert live(8, 7) == [5, 6, 7, 8]
    assert live(2) == [0, 1, 2]
    by_dir = {save.step_dir: save for save in infos[4:]}
    assert [save.step_dir for save in restore_chain(infos[8], by_dir)] == ["6", "7", "8"]


@pytest.mark.processes
def test_several_processes_roll_alike_and_restore_on_another_mesh(tmp_path):
    root, server = tmp_path / "root", Server()
    try:
        with Job(server, tmp_path / "jobs", processes=2) as job:
            job.all("open", root=str(root), policy="rolling", bounds={"window": 2}, max_to_keep=1)
            job.all("start", place={"mesh": [2, 2]})
            for step in range(5):
                job.all("train", to=step)
                assert job.one("save")["kind"] == ("delta" if step else "base")
                job.all("wait")
            assert job.one("steps")["steps"] == [3, 4]
            for answer in job.all("restore_latest", place={"mesh": [1, 4]}, like=4):
                assert (answer["step"], answer["wrong"], answer["chain"]) == (4, None, [3, 4])
            # Both continue from the restored step's share.
            job.all("train", to=5)
            assert job.one("save")["kind"] == "delta"
            job.all("wait")
            job.close()
        assert share_of(root, 5).number == (share_of(root, 4).number + 1) % 2
        assert verify.verify_root(root).problems == ()
    finally:
        server.close()
