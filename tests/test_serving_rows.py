# SPDX-License-Identifier: Apache-2.0
"""Served rows: each version is exactly one step or recovery point, for every reader.

The state machine is that of the WAL (``test_wal_invariants``), with followers that poll in between
and copies that apply their changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import jax
import model
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import rule
from test_follower import BESIDE, grown, wait_until
from test_follower_wal import FollowedMachine, Trainer, from_storage, logs_of, saved
from test_ids import Vocabulary
from test_ids import manager as ids_manager
from test_runtime import interrupted_at
from test_wal_invariants import COLLECTOR

import deltackpt
from deltackpt import serving, touched, vocab
from deltackpt.errors import (
    ClosedError,
    DamagedKeys,
    DamagedWal,
    DeltackptError,
    OptionError,
    ServiceUnavailable,
    StepNotFound,
    StorageError,
    TooLittleMemory,
    VersionExpired,
)
from deltackpt.format.manifest import SaveId
from deltackpt.policies import CodecChoice
from deltackpt.reading import reader
from deltackpt.serving import ChangeBatch, Changes, Live, Version
from deltackpt.serving import row_changes as changes_module
from deltackpt.serving import status as status_module
from deltackpt.serving.row_changes import NO_ROWS
from deltackpt.serving.rows import Rows, ServedField, ServedTable

#: Guards against hangs only.
HANG_SECS = 60.0
USERS = "tables/users"

pytestmark = pytest.mark.usefixtures("nobody_removes_steps")


def opened(root: Path, **options: Any) -> Live:
    return serving.follow(root, **{"tables": "**", "poll_secs": None, **options})


def rows_of(version: Version, table: str, slot: str | None = None) -> np.ndarray:
    """Returns all rows of a table that a version holds."""
    held = version.tables[table]
    values, found = version.lookup(table, np.arange(held.start, held.stop), slot=slot)
    assert found.all()
    return values


def assert_shows(live: Live, trainer: Trainer) -> None:
    """Asserts that the newest version equals the newest state of a trainer, bit for bit."""
    live.advance()
    with live.version() as version:
        assert version.step == trainer.step
        for name, table in trainer.state["tables"].items():
            held = version.tables[f"tables/{name}"]
            expected = np.asarray(table)[held.start : held.stop]
            assert_holds_rows(version, f"tables/{name}", expected)
        kernel = trainer.states[version.dense.step]["dense"]["kernel"]
        assert np.array_equal(version.dense["dense/kernel"], kernel)


def assert_holds_rows(version: Version, table: str, expected: Any, slot: str | None = None) -> None:
    assert rows_of(version, table, slot).tobytes() == np.asarray(expected).tobytes(), (table, slot)


def shown_rows(live: Live | serving.Attached, table: str = USERS) -> np.ndarray:
    with live.version() as version:
        return rows_of(version, table)


class Copy:
    """A consumer's copy of the tables, from changes alone."""

    def __init__(self, live: Live, after: Any = None, tables_held: Any = None, **options: Any):
        self.tables: dict[str, dict[int, bytes]] = tables_held or {}
        self.resets = 0
        self._changes: Changes = live.changes(wait_secs=0, after=after, **options)

    @property
    def position(self) -> Any:
        return self._changes.position

    def catch_up(self) -> list[ChangeBatch]:
        found = [*self._changes]
        for batch in found:
            self.resets += batch.reset
            assert len({*batch.rows.tolist()}) == len(batch.rows)
            table = self.tables.setdefault(batch.table, {})
            table.update(rows_by_index(batch.rows.tolist(), batch.values))
        return found

    def catch_up_with(self, live: Live) -> list[ChangeBatch]:
        """Applies the changes up to the newest version, and asserts that the rows are equal."""
        found = self.catch_up()
        with live.version() as version:
            assert self.position == version.position
            for table, held in version.tables.items():
                rows = rows_by_index(held, rows_of(version, table))
                assert self.tables.get(table, {}) == rows
        return found


def caught_up(live: Live, **options: Any) -> Copy:
    """A copy of the newest version."""
    copy = Copy(live, **options)
    copy.catch_up()
    copy.resets = 0
    return copy


def rows_by_index(indices: Iterable[int], rows: Any) -> dict[int, bytes]:
    return dict(zip(indices, map(np.ndarray.tobytes, np.asarray(rows)), strict=True))


@pytest.fixture
def trainer(tmp_path) -> Iterator[Trainer]:
    """A trainer that has saved step 1."""
    with saved(tmp_path / "root") as found:
        yield found


@pytest.fixture
def live(trainer) -> Live:
    """A follower that shows step 1 of the trainer."""
    found = opened(trainer.root)
    assert found.advance()
    return found


class ServedMachine(FollowedMachine):
    """Drives a trainer like ``FollowedMachine``; ``Live``s read its directory."""

    def __init__(self):
        super().__init__()
        #: Position and tables of the consumers of followers that were closed.
        self.stored = {}

    @rule(shard=st.sampled_from([(0, 1), (1, 2), (5, 7)]), soft=st.booleans())
    def restart(self, shard, soft):
        live, copy = self.followers.pop((shard, soft), (None, None))
        if live is not None and copy.position is not None:
            live.close()
            self.stored[shard, soft] = copy.position, copy.tables

    def opened(self, shard, soft):
        key = shard, soft
        if key not in self.followers:
            with contextlib.suppress(StorageError):
                number, shards = shard
                live = opened(self.root, slots="*", shard=number, shards=shards, soft=soft)
                after, tables = self.stored.pop(key, (None, {}))
                copy = Copy(live, after, tables, batch_rows=97)
                self.followers[key] = live, copy
        return self.followers.get(key)

    def is_healthy(self, one):
        return one[0].problem is None

    def held(self, one):
        with one[0].version() as version:
            return version._shown.save_id, version.point

    def advance(self, one) -> bool:
        live, copy = one
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.quietly(self.manager.wait_until_finished)
            with contextlib.suppress(DeltackptError):
                live.advance()
        try:
            with live.version(timeout_secs=0) as version:
                step = version._shown.save_id
                known = version.point is None or version.point in logs_of(self.root).read().points()
                # See ``FollowedMachine.advance``.
                with contextlib.suppress(FileNotFoundError, StepNotFound, DamagedWal):
                    if known:
                        self.assert_equal(version, from_storage(self.root, step, version.point))
                self.assert_dense_given(version)
        except ServiceUnavailable:
            return False
        copy.catch_up_with(live)
        return True

    def assert_equal(self, version, expected):
        for table, held in version.tables.items():
            for field, rows in expected.fields[table].items():
                slot = None if field == "values" else field.removeprefix("slot.")
                assert_holds_rows(version, table, rows[held.start : held.stop], slot)

    def assert_dense_given(self, version):
        """Asserts that the dense leaves are those of one state that was given at their step."""
        step = version.dense.step
        states = [*self.given.get(step, ()), *getattr(self, "left", {}).get(step, ())]
        assert not states or any(
            np.array_equal(version.dense["weights/whole"], state["weights"]["whole"])
            and np.array_equal(version.dense["weights/half"], state["weights"]["half"])
            for state in states
        )


TestServed = ServedMachine.TestCase
TestServed.pytestmark = [COLLECTOR]
TestServed.settings = settings(FollowedMachine.TestCase.settings, max_examples=8)


# Versions.


def test_without_soft_records_rows_and_dense_leaves_are_of_the_same_step(tmp_path):
    with saved(tmp_path, dense_every=3) as trainer, opened(tmp_path, soft=False) as live:
        for _ in range(7):
            trainer.log()
            live.advance()
            with live.version() as version:
                assert version.dense.step == version.step


def test_slots_are_held_only_if_they_are_asked_for(trainer):
    trainer.log()
    slots = opened(trainer.root, tables="users", slots="*")
    values = opened(trainer.root, tables="users")
    slots.advance()
    values.advance()
    with slots.version() as version:
        assert_holds_rows(version, USERS, trainer.state["slots"]["users"], "accumulator")
    with values.version() as version, pytest.raises(OptionError, match="slots"):
        version.lookup("users", [0], slot="accumulator")
    assert slots.status().tables[USERS].nbytes > values.status().tables[USERS].nbytes


def test_a_lookup_takes_indices_in_any_order_and_of_any_integer_dtype(trainer, live):
    table = np.asarray(trainer.state["tables"]["users"])
    with live.version() as version:
        for dtype in (np.int8, np.uint8, np.int32, np.uint64):
            asked = np.array([7, 3, 3, 100, 0], dtype)
            assert np.array_equal(version.lookup("users", asked)[0], table[asked])
        values, found = version.lookup("users", np.array([2**63 + 5, 1], np.uint64))
        assert found.tolist() == [False, True] and np.array_equal(values[1], table[1])
        assert version.lookup("users", np.empty(0, np.int64))[0].shape == (0, *table.shape[1:])
        for bad in (np.zeros(2), np.zeros((2, 2), int), np.array(["a"])):
            with pytest.raises(OptionError, match="integers in one dimension"):
                version.lookup("users", bad)
        with pytest.raises(OptionError, match="expected a followed table"):
            version.lookup("nothing", [0])
    with pytest.raises(ClosedError):
        version.lookup("users", [0])


def test_an_interrupted_reader_holds_no_lock(live):
    def look_up() -> None:
        with live.version() as version:
            version.lookup("users", [1])

    with live.version() as version:
        lock = version._shown.rows.memory.readers
    for number in itertools.count():
        is_interrupted = interrupted_at(number, look_up)
        assert lock._count == 0, number
        with open(f"/proc/self/fd/{lock._descriptor}", "rb") as other:
            # Raises if the lock is held.
            fcntl.flock(other, fcntl.LOCK_NB | fcntl.LOCK_EX)
        if not is_interrupted:
            break
    assert number > 5


@pytest.mark.parametrize("first", [0, 300, 2**31 + 5])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_a_shard_is_looked_up_with_indices_of_a_dtype_too_small_for_its_first_row(first, dtype):
    held = np.arange(10, 15)
    table = ServedTable(first + 9, (first, first + 5), {"values": ServedField(0, (), "int64")})
    rows = Rows(mock.Mock(array=lambda *_: held), {"users": table})
    asked = [row for row in (3, 120, first + 4, first + 5) if row <= np.iinfo(dtype).max]
    values, found = rows.gather("users", np.array(asked, dtype))
    assert found.tolist() == [first <= row < first + 5 for row in asked]
    assert values.tolist() == [10 + row - first if ok else 0 for row, ok in zip(asked, found)]
    assert rows.gather("users", [])[0].shape == (0,)
    inside = [row for row in asked if first <= row < first + 5]
    assert rows.gather("users", np.array(inside, dtype))[0].tolist() == [
        10 + row - first for row in inside
    ]


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_are_looked_up_by_id_in_each_version(tmp_path, shards):
    run = Vocabulary()
    with contextlib.ExitStack() as stack:
        saving = stack.enter_context(ids_manager(tmp_path, wal=deltackpt.WalOptions()))
        lives: list[Live] = []
        for number in range(1, 9):
            if number == 6:
                run.grow(2 * run.keys["users"].capacity)
            run.step(number, spare=40)
            write = saving.append if number in (3, 4, 7) else saving.save
            write(number, run.state, touched=run.touched)
            saving.wait_appended()
            saving.wait_until_finished()
            for shard in range(shards) if not lives else ():
                live = opened(tmp_path, leaves=(), slots="key", shard=shard, shards=shards)
                lives.append(stack.enter_context(live))
            column = run.keys["users"].column()
            asked = np.array([*column[column != -1], 999_999_999])
            found = np.full(len(asked), -1)
            for live in lives:
                live.advance()
                with live.version() as version:
                    assert version.step == number
                    found = np.maximum(found, version.rows_of("users", asked))
                    values, held = version.lookup("users", version.rows_of("users", asked))
                    rows = found[held]
                    np.testing.assert_array_equal(values[held], run.state["tables"]["users"][rows])
            np.testing.assert_array_equal(found, run.keys["users"].find(asked))


def test_ids_need_a_followed_key_column(tmp_path):
    run = Vocabulary()
    with ids_manager(tmp_path) as saving:
        run.step(1)
        saving.save(1, run.state, touched=run.touched)
    with opened(tmp_path) as live:
        live.advance()
        with live.version() as version, pytest.raises(OptionError, match=r"slots=.*'key'|'key'"):
            version.rows_of("users", [1])


@pytest.mark.parametrize("option", ["table", "slot"])
def test_missing_tables_and_slots_are_an_error(trainer, option):
    options, match = {f"{option}s": "nothing"}, f"'nothing' to match a {option}"
    with pytest.raises(OptionError, match=match):
        opened(trainer.root, **options).advance()
    with opened(trainer.root, poll_secs=0.01, **options) as live:
        with pytest.raises(OptionError, match=match):
            live.wait_ready(HANG_SECS)


@pytest.mark.parametrize(
    "options",
    [{"leaves": (), "tables": ()}, {"shard": 2, "shards": 2}, {"shard": -1}, {"reader_secs": 0}],
)
def test_options_without_meaning_are_refused(tmp_path, options):
    with pytest.raises(OptionError):
        opened(tmp_path, **options)


def test_tables_are_followed_without_dense_leaves(trainer):
    trainer.log()
    live = opened(trainer.root, leaves=())
    live.advance()
    with live.version() as version:
        assert_holds_rows(version, USERS, trainer.state["tables"]["users"])
        with pytest.raises(OptionError, match="dense"):
            _ = version.dense


def held_memory() -> int:
    """Returns the bytes of shared memory that this process has open."""
    files = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:deltackpt" in os.readlink(path):
                files[path.stat().st_ino] = path.stat().st_blocks * 512
    return sum(files.values())


def test_grown_tables_replace_the_old_ones_if_both_do_not_fit(trainer, tmp_path, monkeypatch):
    nbytes = sum(np.asarray(leaf).nbytes for leaf in trainer.state["tables"].values())
    live = opened(trainer.root, memory_bytes=BESIDE + nbytes * 3 // 2)
    live.share(tmp_path / "address")
    attached, copy = serving.attach(tmp_path / "address"), Copy(live)
    assert_shows(live, trainer)
    copy.catch_up_with(live)
    assert shown_rows(attached).tobytes() == shown_rows(live).tobytes()
    filled, real, before = [], reader.fill, held_memory()
    trainer.state = grown(trainer.state, 5)
    trainer.touched = model.new_touched(trainer.state)
    trainer.save()

    def fill(*how: Any, **named: Any) -> Any:
        filled.append(held_memory())
        with pytest.raises(ServiceUnavailable), live.version(timeout_secs=0):
            pass
        return real(*how, **named)

    monkeypatch.setattr(reader, "fill", fill)
    assert_shows(live, trainer)
    assert filled and filled[0] <= before - nbytes // 2
    copy.catch_up_with(live)
    assert shown_rows(attached).tobytes() == shown_rows(live).tobytes()


def test_a_version_is_stale_while_a_newer_one_does_not_fit(trainer):
    nbytes = sum(np.asarray(leaf).nbytes for leaf in trainer.state["tables"].values())
    live = opened(trainer.root, memory_bytes=BESIDE + nbytes + 200)
    live.advance()
    trainer.state = grown(trainer.state, 5)
    trainer.touched = model.new_touched(trainer.state)
    trainer.save()
    with pytest.raises(TooLittleMemory):
        live.advance()
    assert (live.staleness().steps, live.status().newest_step) == (1, trainer.step)


# Concurrent readers.


def test_an_open_version_delays_the_next_one(trainer):
    live = opened(trainer.root, reader_secs=HANG_SECS)
    live.advance()
    trainer.log()
    advancing = threading.Thread(target=live.advance)
    with live.version() as version:
        before = rows_of(version, USERS)
        advancing.start()
        for _ in range(20):
            time.sleep(0.005)
            assert_holds_rows(version, USERS, before)
        assert advancing.is_alive()
    advancing.join()
    assert_shows(live, trainer)


def test_a_version_that_is_open_for_too_long_expires(trainer):
    live = opened(trainer.root, reader_secs=0.01)
    live.advance()
    with live.version() as version:
        version.lookup("users", [1])
        dense = version.dense
        trainer.log()
        assert live.advance()
        with pytest.raises(VersionExpired):
            version.lookup("users", [1])
        assert version.dense is dense
    assert_shows(live, trainer)


def test_a_key_column_that_changes_while_it_is_indexed_is_not_damaged(tmp_path, monkeypatch):
    run = Vocabulary()
    with ids_manager(tmp_path) as saving:

        def save(step: int) -> None:
            run.step(step)
            saving.save(step, run.state, touched=run.touched)
            saving.wait_until_finished()

        def index(column: np.ndarray) -> None:
            raise DamagedKeys("key column", "one row for each id", "id 7 in rows 1 and 2")

        save(1)
        live = opened(tmp_path, leaves=(), slots="key", reader_secs=0.01)
        live.advance()
        monkeypatch.setattr(vocab.RowKeys, "index", index)
        with live.version() as version:
            with pytest.raises(DamagedKeys):
                version.rows_of("users", [7])
            save(2)
            live.advance()
            with pytest.raises(VersionExpired):
                version.rows_of("users", [7])


def process(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


READER = """
import json, sys, time
import numpy as np
from deltackpt import serving

path, rows, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
assert not {"jax", "ray", "orbax"} & {*sys.modules}
reader, steps, mixed, lookups = serving.attach(path), set(), 0, 0
rng = np.random.default_rng(rows)
while not steps or max(steps) < last:
    with reader.version() as version:
        seen = set()
        for table in ("users", "items", "users"):
            values, found = version.lookup(table, rng.integers(0, rows, 256))
            seen |= set(values[:, 0].tolist())
            lookups += 1
        mixed += seen != {float(version.step)}
        steps.add(version.step)
print(json.dumps([mixed, lookups, len(steps)]))
"""


def fill(trainer: Trainer, rows: int) -> None:
    """Sets every element of the first rows of two tables to the step."""
    trainer.step += 1
    tables = dict(trainer.state["tables"])
    for name in ("users", "items"):
        table = np.array(tables[name])
        table[:rows] = trainer.step
        tables[name] = jax.numpy.asarray(table)
    trainer.state = {**trainer.state, "tables": tables}
    ids = {f"tables/{name}": jax.numpy.arange(rows) for name in ("users", "items")}
    trainer.touched = touched.mark(trainer.touched, ids)
    trainer.states[trainer.step] = trainer.state


def test_other_processes_never_see_a_mixed_version(tmp_path):
    root, rows, last = tmp_path / "run", 200, 40
    with Trainer(root) as trainer:
        fill(trainer, rows)
        model.commit(trainer.manager, trainer.step, trainer.state, touched=trainer.touched)
        with opened(root, poll_secs=0.001) as live:
            live.wait_ready(HANG_SECS)
            live.share(tmp_path / "address")
            readers = [process(READER, tmp_path / "address", rows, last) for _ in range(2)]
            while trainer.step < last:
                fill(trainer, rows)
                trainer.mark()
            for reader in readers:
                out, _ = reader.communicate(timeout=2 * HANG_SECS)
                assert reader.returncode == 0
                mixed, lookups, steps = json.loads(out)
                assert mixed == 0 and lookups and steps


OPEN_READER = """
import sys
from deltackpt import serving
with serving.attach(sys.argv[1]).version() as version:
    version.lookup("users", [0])
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_killed_reader_does_not_stop_the_follower(trainer, tmp_path):
    live = opened(trainer.root, reader_secs=10 * HANG_SECS)
    live.advance()
    live.share(tmp_path / "address")
    reader = process(OPEN_READER, tmp_path / "address")
    assert reader.stdout is not None and reader.stdout.readline() == "open\n"
    trainer.log()
    advancing = threading.Thread(target=live.advance, daemon=True)
    advancing.start()
    time.sleep(0.05)
    assert advancing.is_alive()
    os.kill(reader.pid, signal.SIGKILL)
    advancing.join(HANG_SECS)
    assert not advancing.is_alive()
    reader.communicate()
    assert_shows(live, trainer)


FOLLOWER = """
import sys, time
from deltackpt import serving
live = serving.follow(sys.argv[1], tables="**", poll_secs=0.01)
live.wait_ready(60)
live.share(sys.argv[2])
assert not {"jax", "ray", "orbax"} & {*sys.modules}
print("ready", flush=True)
time.sleep(600)
"""


def test_readers_outlive_a_killed_follower_and_find_the_next_one(trainer, tmp_path):
    address = tmp_path / "address"
    reader = serving.attach(address)
    with pytest.raises(ServiceUnavailable, match="running follower"), reader.version():
        pass
    for _ in range(2):
        follower = process(FOLLOWER, trainer.root, address)
        try:
            assert follower.stdout is not None and follower.stdout.readline() == "ready\n"
            with reader.version() as version:
                assert version.step == trainer.step
            assert np.array_equal(shown_rows(reader), trainer.state["tables"]["users"])
        finally:
            follower.kill()
            follower.communicate()
        # Its memory is still mapped.
        assert np.array_equal(shown_rows(reader), trainer.state["tables"]["users"])
        trainer.log()


# Changes.


def test_changes_are_those_rows_that_changed(trainer, live):
    copy = Copy(live, tables=["users"])
    found = copy.catch_up()
    assert {batch.table for batch in found} == {USERS} and copy.resets
    assert [batch.complete for batch in found] == [False] * (len(found) - 1) + [True]
    copy.resets = 0
    for number in range(6):
        before = trainer.state
        trainer.save() if number == 2 else trainer.log()
        live.advance()
        found = {row for batch in copy.catch_up() for row in batch.rows.tolist()}
        assert found >= {*model.moved(before, trainer.state)["users"].tolist()}
        assert len(found) < 100
    assert not copy.resets


def test_consumers_have_positions_of_their_own_and_continue_after_them(trainer, live):
    fast, slow = (caught_up(live, consumer=name) for name in ("fast", "slow"))
    for _ in range(3):
        trainer.log()
        live.advance()
        fast.catch_up()
    continued = Copy(live, after=slow.position, tables_held=slow.tables)
    for copy in (fast, continued):
        copy.catch_up_with(live)
        assert not copy.resets
    assert live.status().consumers == {"fast": 0, "slow": 3, "changes": 0}


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_consumer_continues_after_its_position_when_the_follower_was_restarted(tmp_path, codec):
    with saved(tmp_path, codec=codec) as trainer:
        stored: list[tuple[str, dict]] = []
        for number in range(9):
            live = opened(tmp_path)
            live.advance()
            # Lossy records that are gone may have had rows that no delta has.
            for position, tables in stored[-4 if codec == "raw" else -2 :]:
                held = {name: dict(rows) for name, rows in tables.items()}
                copy = Copy(live, after=serving.Position.parse(position), tables_held=held)
                found = copy.catch_up_with(live)
                assert not copy.resets and sum(len(batch.rows) for batch in found) < 700
            whole = caught_up(live)
            stored.append((str(whole.position), whole.tables))
            trainer.save() if number in (3, 5) else trainer.log()


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_consumer_at_a_lossy_record_gets_the_bits_of_the_step(tmp_path, trimmed):
    """The record has rows that no later delta has, and the base before it has other bits."""
    codec = CodecChoice(delta="int8", base="raw")
    with Trainer(tmp_path, codec=codec) as trainer:
        trainer.log(2)
        trainer.save(force_base=True)
        trainer.log()
        live = opened(tmp_path)
        live.advance()
        copy = caught_up(live)
        assert copy.position.record is not None
        for _ in range(2 * trimmed + 1):
            trainer.save()
            trainer.log()
        restarted = opened(tmp_path)
        restarted.advance()
        again = Copy(restarted, copy.position, copy.tables)
        again.catch_up_with(restarted)
        assert bool(again.resets) == trimmed


def test_a_consumer_continues_after_its_table_has_grown_and_its_follower_was_restarted(trainer):
    """The delta does not contain unchanged rows that moved into the shard."""
    shards = [{"shard": shard, "shards": 3} for shard in range(3)]
    stored = []
    for which in shards:
        live = opened(trainer.root, **which)
        live.advance()
        stored.append(caught_up(live))
    trainer.state = grown(trainer.state, 5, "users")
    trainer.touched = touched.grow(trainer.touched, {USERS: trainer.state["tables"]["users"]})
    assert trainer.save().kind == "delta"
    for which, copy in zip(shards, stored):
        live = opened(trainer.root, **which)
        live.advance()
        again = Copy(live, copy.position, copy.tables)
        again.catch_up()
        with live.version() as version:
            for table, held in version.tables.items():
                rows = rows_by_index(held, rows_of(version, table))
                assert rows.items() <= again.tables[table].items()


def test_a_position_from_which_training_did_not_continue_sends_the_tables_whole(trainer):
    trainer.log(2)
    live = opened(trainer.root)
    live.advance()
    copy = caught_up(live)
    trainer.resume_from(2)
    trainer.log(2)
    restarted = opened(trainer.root)
    restarted.advance()
    held = {name: dict(rows) for name, rows in copy.tables.items()}
    again = Copy(restarted, after=copy.position, tables_held=held)
    again.catch_up_with(restarted)
    assert again.resets
    # The follower that has seen the abandoned records sends what differs.
    live.advance()
    copy.catch_up_with(live)


@pytest.mark.parametrize("text", ["", "run/1", "run/1/2+", "run/1/2+3", "a/1/2+3/b/4/5+6/c/7/8"])
def test_a_text_that_is_not_a_position_is_refused(text):
    with pytest.raises(OptionError, match="position"):
        serving.Position.parse(text)


def test_a_consumer_that_is_too_far_behind_gets_whole_tables_marked_as_resets(
    trainer, live, monkeypatch
):
    monkeypatch.setattr(changes_module, "_MOST_INDEX_BYTES", 10_000)
    copy = caught_up(live)
    trainer.log()
    live.advance()
    copy.catch_up()
    assert not copy.resets
    for _ in range(30):
        trainer.log()
        live.advance()
    found = copy.catch_up_with(live)
    assert all(batch.reset for batch in found)
    assert sum(len(batch.rows) for batch in found) == sum(
        map(len, trainer.state["tables"].values())
    )


@pytest.mark.parametrize("rows", [None, {}, {f"table{n}": NO_ROWS for n in range(50)}])
def test_versions_without_changed_rows_take_bounded_memory(monkeypatch, rows):
    monkeypatch.setattr(changes_module, "_MOST_INDEX_BYTES", 64 << 10)
    log = changes_module.ChangeLog()
    for number in range(1000):
        log.add(rows)
        log.complete(serving.Position(SaveId("run", number, number)))
    tables = 0 if rows is None else len(rows)
    assert 1 <= len(log._entries) <= 200 / (1 + tables / 10)
    assert log.since(999) == rows and log.since(1000 - len(log._entries)) == rows
    assert log.since(0) is None


def test_batches_are_bounded_and_complete_although_versions_change_in_between(
    trainer, live, monkeypatch
):
    monkeypatch.setattr(changes_module, "_PIECE_BYTES", 1000)
    tables, completed = {}, []
    for number, batch in enumerate(live.changes(wait_secs=0, batch_rows=50)):
        assert len(batch.rows) <= 50 and batch.values.nbytes <= 1000
        table = tables.setdefault(batch.table, {})
        table.update(rows_by_index(batch.rows.tolist(), batch.values))
        if number % 20 == 0 and trainer.step < 8:
            trainer.log()
            live.advance()
        if batch.complete:
            completed.append(batch.position.step)
            for name, rows in trainer.states[batch.position.step]["tables"].items():
                assert tables[f"tables/{name}"] == rows_by_index(range(len(rows)), rows)
    assert completed and completed[-1] == trainer.step


def test_values_that_changed_while_they_were_copied_are_copied_again(trainer, monkeypatch):
    live = opened(trainer.root, reader_secs=0.01)
    live.advance()
    real, updates = Rows.gather, [None, None]

    def gather(self: Rows, *how: Any) -> Any:
        found = real(self, *how)
        if updates:
            updates.pop()
            trainer.log()
            assert live.advance()
        return found

    monkeypatch.setattr(Rows, "gather", gather)
    Copy(live, batch_rows=100).catch_up_with(live)
    assert live.status().step == trainer.step and not updates


def test_changes_wait_for_a_version_and_end_when_the_follower_is_closed(tmp_path):
    with Trainer(tmp_path) as trainer:
        live = opened(tmp_path, poll_secs=0.01)
        found: list[ChangeBatch] = []
        consumer = threading.Thread(target=lambda: found.extend(live.changes()))
        consumer.start()
        trainer.save()
        live.wait_ready(HANG_SECS)
        wait_until(lambda: found and found[-1].complete)
        live.close()
        consumer.join(HANG_SECS)
        assert not consumer.is_alive()


# On devices.


@pytest.mark.parametrize("placed", [None, "columns", "unpinned_host"])
def test_a_table_on_devices_equals_each_version(trainer, live, placed):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = {
        None: None,
        "columns": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x")),
        "unpinned_host": jax.sharding.SingleDeviceSharding(
            jax.devices()[0], memory_kind="unpinned_host"
        ),
    }[placed]
    name = next(n for n in model.WIDTH if model.WIDTH[n] % 2 == 0)
    array, rows = None, b""
    for number in range(6):
        live.advance()
        before = array
        assert before is None or np.asarray(before).tobytes() == rows
        found = live.on_device(name, sharding)
        array = found.array
        rows = np.asarray(trainer.state["tables"][name]).tobytes()
        assert found.step == trainer.step
        assert np.asarray(array).tobytes() == rows
        assert sharding is None or array.sharding == sharding
        assert before is None or before.is_deleted()
        trainer.save() if number == 3 else trainer.log()


def test_all_rows_of_a_table_are_transferred_once(trainer, live):
    live.advance()
    name, transferred, real = next(iter(model.WIDTH)), [], jax.device_put

    def counted(value: Any, *arguments: Any, **options: Any) -> Any:
        transferred.append(len(value))
        return real(value, *arguments, **options)

    with mock.patch.object(jax, "device_put", counted):
        array = live.on_device(name).array
    assert sum(transferred) == len(array)


# Status.


def test_the_status_is_served_as_a_page_as_json_and_as_metrics(trainer):
    with opened(trainer.root) as live:
        url = live.serve_status()
        assert url.startswith("http://127.0.0.1:")
        assert json.loads(page(url + "status.json"))["step"] is None
        live.advance()
        trainer.log()
        live.advance()
        copy = Copy(live, consumer='a "cache"')
        with live.version() as version:
            version.lookup("users", [1, 2, 3])
        found = json.loads(page(url + "status.json"))
        assert found["step"] == trainer.step and found["problem"] is None
        assert found["tables"][USERS]["looked_up"] == 3
        assert found["tables"][USERS]["rows"] == model.ROWS["users"]
        metrics = page(url + "metrics")
        assert f"deltackpt_serving_step {float(trainer.step)}\n" in metrics
        assert f'deltackpt_serving_looked_up_rows_total{{table="{USERS}"}} 3.0\n' in metrics
        assert 'deltackpt_serving_consumer_behind{consumer="a \\"cache\\""}' in metrics
        assert "<!doctype html>" in page(url)
        with pytest.raises(urllib.error.HTTPError):
            page(url + "nothing")
        del copy
    with pytest.raises(urllib.error.URLError):
        page(url)


def test_clients_that_are_silent_or_leave_cost_no_thread_and_no_output(monkeypatch, capfd, caplog):
    monkeypatch.setattr(status_module, "_CLIENT_SECS", 0.2)
    broken = False

    def status() -> Any:
        if broken:
            raise ValueError("a fault of the follower")
        return empty

    before = threading.active_count()
    empty = status_module.FollowerStatus(
        directory="d" * (16 << 20),  # More than a socket buffers.
        position=None,
        step=None,
        newest_step=None,
        age_secs=None,
        versions=0,
        problem=None,
        unix_secs=0.0,
        tables={},
        dense_leaves=0,
        dense_bytes=0,
        consumers={},
    )
    server = status_module.StatusServer(status, "127.0.0.1", 0)
    at = urllib.parse.urlsplit(server.url)
    with contextlib.closing(server), contextlib.ExitStack() as stack:
        for sent in (b"", b"GET /status", b"GET /status.json HTTP/1.0\r\n\r\n"):
            client = socket.create_connection((at.hostname, at.port))
            stack.enter_context(client).sendall(sent)
        left = socket.create_connection((at.hostname, at.port))
        left.sendall(b"GET /status.json HTTP/1.0\r\n\r\n")
        left.close()
        time.sleep(0.1)  # So that the clients are accepted.
        wait_until(lambda: threading.active_count() <= before + 1)
        assert not caplog.records
        broken = True
        monkeypatch.setattr(status_module, "_CLIENT_SECS", HANG_SECS)
        patient = status_module.StatusServer(status, "127.0.0.1", 0)
        stack.enter_context(contextlib.closing(patient))
        with pytest.raises(http.client.RemoteDisconnected):
            page(patient.url + "status.json")
        wait_until(lambda: caplog.records)
        assert "a fault of the follower" in caplog.text
    assert capfd.readouterr() == ("", "")


def test_the_status_is_served_at_an_ipv6_address():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6")
    server = status_module.StatusServer(lambda: None, "::1", 0)
    with contextlib.closing(server):
        assert server.url.startswith("http://[::1]:")
        assert "<!doctype html>" in page(server.url)


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HANG_SECS) as answer:
        return answer.read().decode()


def test_a_browser_shows_the_page_without_complaint(trainer, live, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    with live:
        shown = subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
                *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"),
                *("--enable-logging=stderr", live.serve_status()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "HOME": str(tmp_path)},
        )
    assert shown.returncode == 0 and "CONSOLE" not in shown.stderr
    for text in (USERS, f"<td>{model.ROWS['users']}</td>", "rows looked up per second"):
        assert text in shown.stdout


def test_the_command_line_follows_and_shares_until_it_is_terminated(trainer, tmp_path):
    trainer.manager.close()
    command = [sys.executable, "-m", "deltackpt.cli", "follow", trainer.root, "--json"]
    follower = subprocess.Popen(
        [*command, "--tables", "**", "--share", tmp_path / "address", "--poll-secs", "0.01"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    url = json.loads("".join(iter(follower.stdout.readline, "}\n")) + "}")["url"]
    reader = serving.attach(tmp_path / "address")
    assert np.array_equal(shown_rows(reader), trainer.state["tables"]["users"])
    # Other processes see a version first.
    wait_until(lambda: json.loads(page(f"{url}status.json"))["step"] == trainer.step)
    follower.send_signal(signal.SIGTERM)
    follower.communicate(timeout=HANG_SECS)
    assert follower.returncode == 0
