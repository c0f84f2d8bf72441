# SPDX-License-Identifier: Apache-2.0
"""Checks the WAL against a model that keeps every state in memory.

Draws random sequences of training loop actions: train, append by stamps or by ids, forget to mark a
row, pass invalid arguments, lose access to the checkpoint directory, save, fail to write or to
fsync, end without closing, tear or damage the newest records, restore the newest or an older step
or recovery point, return to a state in memory, train without a WAL, start again. In all cases, a
restore returns a state that was given to that step in the current lineage, and nothing that was
acknowledged is lost. Another process finds every step and recovery point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from damages import HOWS, damage
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from test_invariants import tracking_named
from test_wal_disk import assert_no_seq_twice, assert_nothing_is_tried_again
from user_contexts import CONTEXTS, InContext

import deltackpt
from deltackpt import RecoveryPoint, inspect, touched, vocab
from deltackpt.errors import (
    AppendFailed,
    DeltackptError,
    NoIntactStep,
    OptionError,
    OutOfSpace,
    RestoreError,
    SaveFailed,
    StepNotFound,
    StorageError,
)
from deltackpt.maintenance.verify import verify_root
from deltackpt.testing import Disk, failing_saves, paused_saves
from deltackpt.wal import audit

POLICIES = (
    deltackpt.policies.Consecutive(max_chain=4),
    deltackpt.policies.OneShot(max_chain=4),
    deltackpt.policies.Intermittent(max_chain=6),
)
WHICH = st.integers(0, 11)
ROWS = st.sampled_from([0, 5, 400])
#: Parts of the state that the WAL audits one after the other: one for each table.
SLICES = len(model.ROWS)
#: Segments, and the directories whose fsync makes their names durable.
LOG = r"/log(/[^/]+){0,2}$|[.]seg$"
#: Steps and recovery points that another process restores at once.
MOST_READ = 3


def _with(half: np.ndarray, seed: int) -> np.ndarray:
    """Changes some values."""
    half[np.random.default_rng(seed).integers(0, half.size, 30)] = seed
    return half


class LogMachine(RuleBasedStateMachine):
    """Drives a manager with a WAL beside a dict of the states that each step may hold."""

    manager: InContext | None = None

    @initialize(
        policy=st.sampled_from(POLICIES),
        codec=st.sampled_from(["raw", "raw", "lossless", "adaptive4", "bf16"]),
        wal=st.fixed_dictionaries(
            {
                "dense": st.sampled_from(["whole", "delta", "soft"]),
                "dense_every": st.sampled_from([1, 1, 3]),
                "codec": st.sampled_from([None, None, "int8"]),
                "buffer_bytes": st.sampled_from([1 << 30, 1 << 30, 1]),
                "when_full": st.sampled_from(["wait", "coalesce"]),
                "on_failure": st.sampled_from(["save", "save", "raise"]),
                "max_wal_ratio": st.sampled_from([1.0, 1.0, 1.0, 1e-9]),
            }
        ),
        segment_bytes=st.sampled_from([1, 1 << 16, 1 << 28]),
        apart=st.sampled_from([False, False, True]),
        bases=st.sampled_from(["periodic", "compacted"]),
        tracking=st.sampled_from(["touched", "touched", "fingerprints", "ids"]),
        auto=st.booleans(),
        retention=st.sampled_from([None, None, 1]),
        durability=st.sampled_from(["process", "power"]),
        context=st.sampled_from(["none", *CONTEXTS]),
        keyed=st.booleans(),
    )
    def start(
        self,
        policy,
        codec,
        wal,
        segment_bytes,
        apart,
        bases,
        tracking,
        auto,
        retention,
        durability,
        context,
        keyed,
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="deltackpt-test-"))
        # Every record audits all rows of a table.
        self.patch = mock.patch.multiple(audit, _EVERY=1, _ROWS=1 << 20)
        self.patch.start()
        self.fingerprints, self.by_ids = tracking == "fingerprints", tracking == "ids"
        self.keyed = keyed
        self.context = CONTEXTS.get(context, contextlib.nullcontext)
        self.codecs = {codec, wal["codec"] or codec}
        self.codec = codec
        self.apart = self.folder / "apart" if apart else None
        backend = deltackpt.wal.LocalWal(
            directory=None if self.apart is None else str(self.apart), segment_bytes=segment_bytes
        )
        named = tracking_named(self.fingerprints, auto and not self.by_ids)
        self.options = deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=policy, bases=bases, tracking=named),
            writes=deltackpt.WriteOptions(durability=durability),
            max_to_keep=retention,
            wal=deltackpt.WalOptions(backend=backend, **wal),
        )
        self.number = self.seed = self.step = 0
        #: Whether files of the WAL were damaged.
        self.torn = self.removed = False
        self.open(self.folder / "0")
        self.begin()

    def open(self, root):
        self.root = root
        self.manager = InContext(self.manager_of(self.options), self.context)

    def manager_of(self, options):
        """Opens another manager of the directory."""
        tables = deltackpt.Tables(
            select=model.SELECT,
            slots=model.SLOTS,
            key={"tables/users": "keys/users"} if self.keyed else None,
            codec=self.codec,
        )
        return deltackpt.CheckpointManager(
            self.root, handlers={"embeddings": tables}, options=options
        )

    def begin(self):
        """Restarts training; the step count continues, as that of the WAL does."""
        weights = {"whole": jnp.zeros(1500), "half": jnp.zeros(3000, jnp.bfloat16)}
        self.state = model.initial() | {"weights": weights}
        if self.keyed:
            column = vocab.column_of(np.arange(model.ROWS["users"]), np.uint32)
            self.state["keys"] = {"users": jnp.asarray(column)}
        untracked = self.fingerprints or self.by_ids
        self.touched = None if untracked else model.new_touched(self.state)
        #: Step to the states that may be found there.
        self.given: dict[int, list[dict]] = {}
        #: This step or a later one must be found.
        self.sure = 0
        #: Full records that were appended since a failure, and those that are durable.
        self.pending: set[int] = set()
        self.durable: set[int] = set()
        self.ids: dict[str, set[int]] = {name: set() for name in model.SLOTS}
        self.behind: int | None = None
        self.resumed: int | None = None

    def teardown(self):
        if self.manager is not None:
            self.patch.stop()
            self.quietly(self.manager.close)
            shutil.rmtree(self.folder)

    def quietly(self, call):
        with warnings.catch_warnings(), contextlib.suppress(DeltackptError):
            warnings.simplefilter("ignore")
            return call()

    # Training.

    @rule(steps=st.integers(1, 3), rows=ROWS)
    def train(self, steps, rows):
        for _ in range(steps):
            self.step += 1
            self.seed += 1
            weights = self.state["weights"]
            self.state, ids = model.move(self.state, self.seed, rows=rows)
            if self.keyed:
                ids["tables/users"] = self.exchange(ids.get("tables/users", np.empty(0, int)))
            # In "whole", blocks change completely or not at all; in "half", some values change.
            at = self.seed * 300 % 1500
            self.state["weights"] = {
                "whole": jnp.asarray(np.array(weights["whole"]) + (np.arange(1500) >= at)),
                "half": jnp.asarray(_with(np.array(weights["half"]), self.seed)),
            }
            if self.touched is not None:
                self.touched = touched.mark(self.touched, ids)
            for name, rows_of in ids.items():
                self.ids[name] |= {*np.asarray(rows_of).tolist()}

    def exchange(self, moved):
        """Evicts some ids of a table, and assigns new ones; returns all its rows that moved."""
        drawn = np.random.default_rng(self.seed)
        keys = vocab.RowKeys.index(np.asarray(self.state["keys"]["users"]))
        # Few evicted rows are stored as others are.
        evicted = keys.evict(rows=drawn.integers(0, keys.capacity, drawn.choice([0, 9, 400])))
        new = keys.assign(1000 * self.seed + np.arange(drawn.integers(0, keys.free + 1))).new
        for kind in ("tables", "slots"):
            rows = np.array(self.state[kind]["users"])
            rows[evicted] = 0
            self.state = {**self.state, kind: {**self.state[kind], "users": jnp.asarray(rows)}}
        column = jnp.asarray(keys.column(np.uint32))
        self.state = {**self.state, "keys": {"users": column}}
        # The number of ids is constant: each other shape would be compiled anew.
        every = np.concatenate([moved, evicted, new])
        return jnp.asarray(np.resize(every, 2048), jnp.int32) if len(every) else jnp.asarray(every)

    def gives(self):
        """Gives the state to the manager: an abandoned lineage is no longer found."""
        self.step += 1
        if self.behind is not None:
            self.left = {s: found for s, found in self.given.items() if s > self.behind}
            self.given = {s: found for s, found in self.given.items() if s <= self.behind}
            self.sure = min(self.sure, self.behind)
            self.durable = {step for step in self.durable if step <= self.behind}
            self.pending = {step for step in self.pending if step <= self.behind}
        self.given.setdefault(self.step, []).append(self.state)

    def gave(self):
        self.behind = None

    @rule(rows=ROWS, by_ids=st.booleans(), full=st.sampled_from([None, None, True, False]))
    def log(self, rows, by_ids, full):
        self.train(1, rows)
        self.mark(by_ids, full)

    @rule(rows=ROWS)
    def log_each_step(self, rows):
        for _ in range(5):
            self.log(rows, by_ids=False, full=None)

    @rule(
        rows=ROWS,
        by_ids=st.booleans(),
        call=st.sampled_from(["write", "fdatasync", "fsync"]),
        error=st.sampled_from([errno.ENOSPC, errno.EIO]),
        after=st.integers(0, 2),
        times=st.sampled_from([1, 1, None]),
        short=st.sampled_from([None, 1, 100]),
    )
    def log_and_fail(self, rows, by_ids, call, error, after, times, short):
        """The disk refuses calls; nothing is lost, and nothing is written or fsynced again."""
        with Disk(self.folder) as disk:
            if short is not None:
                disk.shorten(short, "[.]seg$", times=8)
            disk.fail(call, LOG, errno=error, after=after, times=times)
            for _ in range(3):
                self.log(rows, by_ids, full=True)
                self.wait_appended(OutOfSpace if error == errno.ENOSPC else StorageError)
        assert_nothing_is_tried_again(disk)
        self.log(rows, by_ids, full=True)
        self.find_newest()

    @rule(rows=ROWS, by_ids=st.booleans(), what=st.sampled_from(["step", "items", "leaf", "ids"]))
    def log_in_vain(self, rows, by_ids, what):
        """A call with an invalid argument fails; the next record has its rows."""
        if self.behind is not None:
            return
        self.train(1, rows)
        given = {"step": self.step + 1, "state": self.state, "ids": self.named(by_ids)}
        given |= {
            "step": {"step": -1},
            "items": {"items": {"at": object()}},
            "leaf": {"state": {**self.state, "bad": object()}},
            "ids": {"ids": {"users": [-1]}},
        }[what]
        self.pending.clear()
        if what != "ids" or not self.fingerprints:
            with pytest.raises(DeltackptError):
                self.manager.append(**given, touched=self.touched)
            self.ids = {name: set() for name in self.ids}
        self.log(rows, by_ids=True, full=True)
        self.find_newest()

    @rule(row=st.integers(0, 699), by_ids=st.booleans())
    def log_and_forget(self, row, by_ids):
        """An unmarked row changes: the WAL saves a base, which ends the recovery points."""
        # Saves instead of records contain the row if it was marked since the save before.
        if self.fingerprints or self.by_ids or self.options.wal.max_wal_ratio < 1:
            return
        # The audit allows changes of a row that was marked since it was last checked.
        for _ in range(SLICES):
            self.mark(by_ids, None)
            self.wait_appended()
        users = self.state["tables"]["users"].at[row].add(1.0)
        self.state = {**self.state, "tables": {**self.state["tables"], "users": users}}
        for _ in range(2 * SLICES):
            if self.mark(by_ids, None, sure=False):
                break
            self.wait_appended()
        else:
            raise AssertionError("no record has found the row")
        self.durable.clear()
        self.sure = min(self.sure, self.manager.latest_step() or 0)
        self.wait()

    @rule(rows=ROWS, removed=st.booleans(), by_ids=st.booleans())
    def log_while_files_are_gone(self, rows, removed, by_ids):
        """The checkpoint directory is away for a while, or the WAL is removed for good."""
        self.log(rows, by_ids, full=None)
        self.quietly(self.manager.wait_until_finished)
        elsewhere = self.folder / "elsewhere"
        if removed:
            shutil.rmtree(self.root / "log", ignore_errors=True)
            self.removed = True
            self.durable.clear()
            self.sure = min(self.sure, self.manager.latest_step() or 0)
        else:
            self.root.rename(elsewhere)
        for number in range(6):
            if number == 3 and not removed:
                assert not self.root.exists()
                elsewhere.rename(self.root)
            self.train(1, rows)
            with contextlib.suppress(DeltackptError):
                self.mark(by_ids, full=None, sure=False)
            with contextlib.suppress(DeltackptError):
                self.manager.wait_appended()
            self.pending.clear()

    def named(self, by_ids):
        """The rows to pass as ids, if any; the next call names those touched since this one."""
        if self.fingerprints or not (by_ids or self.by_ids):
            return None
        return {name: np.array(sorted(rows), np.int64) for name, rows in self.ids.items()}

    def mark(self, by_ids, full, *, sure=True):
        """Appends the state; returns whether that saved a base instead."""
        self.gives()
        logged = None
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                logged = self.manager.append(
                    self.step,
                    self.state,
                    touched=self.touched,
                    ids=self.named(by_ids),
                    items=self.items(self.step),
                    full=full,
                )
        except (SaveFailed, AppendFailed) as error:
            assert "step" in str(error)
        except StorageError:  # The header of the WAL epoch cannot be written.
            if not sure:
                raise
        finally:
            self.ids = {name: set() for name in self.ids}
        if logged is None or any("append of step" in str(one.message) for one in caught):
            self.pending.clear()
        if logged is not None and logged.kind == "full":
            self.pending.add(self.step)
        self.gave()
        if sure:
            self.knows(None if logged is None else logged.recovery)
        return logged is not None and logged.saved is not None and logged.saved.kind == "base"

    def items(self, step):
        return {"at": step, "bytes": bytes([step % 256])}

    def knows(self, recovery):
        """Requires a reported step or recovery point to be found."""
        if recovery is not None:
            step = recovery.step if isinstance(recovery, RecoveryPoint) else recovery
            assert step in self.given
            self.sure = max(self.sure, step)

    @rule()
    def wait_appended(self, cause=StorageError):
        try:
            self.knows(self.manager.wait_appended())
        except AppendFailed as error:
            assert isinstance(error.__cause__, cause), error
        except SaveFailed:
            pass
        else:
            self.durable |= self.pending
        self.pending.clear()

    @rule(rows=ROWS)
    def save(self, rows):
        self.train(1, rows)
        self.take()

    @rule(rows=ROWS)
    def save_and_fail(self, rows):
        self.train(1, rows)
        with failing_saves(self.root, errno.ENOSPC):
            self.take()
            self.quietly(self.manager.wait_until_finished)

    def take(self):
        self.gives()
        with warnings.catch_warnings(), contextlib.suppress(SaveFailed):
            # A warning reports that later steps are moved aside.
            warnings.simplefilter("ignore")
            self.manager.save(self.step, self.state, touched=self.touched)
        self.gave()

    @rule()
    def wait(self):
        step = self.step
        try:
            self.manager.wait_until_finished()
        except (SaveFailed, AppendFailed):
            self.pending.clear()
            return
        if self.manager.latest_step() == step and step in self.given:
            self.sure = max(self.sure, step)

    # Kills and restores.

    def check(self, result):
        assert result.step in self.given, f"step {result.step} was never given"
        if result.point is not None:
            assert result.items == self.items(result.step)
        found = {name: value for name, value in result.state.items() if name != "touch"}
        for state in self.given[result.step]:
            with contextlib.suppress(AssertionError):
                return self.same(found, state)
        return self.same(found, self.given[result.step][-1])

    def same(self, found, state):
        """Checks that each row is as given, or as one of the codecs decodes it."""
        rows_of = {name: np.asarray(table) for name, table in state["tables"].items()}
        tables = {}
        for name, rows in rows_of.items():
            restored = np.asarray(found["tables"][name])
            allowed = (restored.view(np.uint8) == rows.view(np.uint8)).reshape(len(rows), -1).all(1)
            for codec in self.codecs - {"raw", "lossless"}:
                coded = model.decoded(codec, rows)
                allowed |= (restored == coded).all(axis=1)
            assert allowed.all(), f"{name}: {np.flatnonzero(~allowed)[:5]}"
            tables[name] = found["tables"][name]
        model.assert_same(found, {**state, "tables": tables})

    def adopt(self, result):
        self.state, self.step, self.touched = result.state, result.step, result.touched
        if self.fingerprints or self.by_ids:
            self.touched = None
        self.ids = {name: set() for name in self.ids}
        self.behind = result.step
        self.resumed = result.step if result.point is None else None

    @rule(torn=st.integers(0, 3), seed=st.integers(0, 99))
    def end_without_a_word(self, torn, seed):
        """Like a kill: keeps the files as they are, or damages one of the WAL."""
        self.quietly(self.manager.wait_until_finished)
        self.restart_in(self.copied(), torn == 1, random.Random(seed))

    @rule(rows=ROWS, by_ids=st.booleans())
    def end_during_the_save_of_another_leaf(self, rows, by_ids):
        """Like a kill after records that continue from a save in flight."""
        if self.options.wal.max_wal_ratio < 1:
            return  # The second call would save, too, and wait for the save.
        self.wait()
        self.wait_appended()
        with paused_saves(self.root, errno.EIO):
            for _ in range(2):
                self.train(1, rows)
                self.state = {**self.state, "more": jnp.zeros(3)}
                self.mark(by_ids, full=True)
            copy = self.copied()
            self.verify()
        self.state = {name: part for name, part in self.state.items() if name != "more"}
        self.restart_in(copy)
        self.verify()
        # The next epoch does not continue from the records above the lost save.
        self.log(rows, by_ids, full=True)

    def verify(self):
        """Checks that nothing is reported as damage unless files were damaged or removed."""
        # A WAL directory of its own keeps the records of removed headers.
        if not (self.torn or self.removed) and self.manager.all_steps():
            assert (report := verify_root(self.root)).intact, report.problems

    def copied(self):
        """Returns a copy of the root."""
        self.number += 1
        copy = self.folder / str(self.number)
        while True:
            # Unneeded files may be removed during the copy.
            with contextlib.suppress(shutil.Error):
                shutil.copytree(self.root, copy)
                return copy
            shutil.rmtree(copy)

    def restart_in(self, copy, harmed=False, rng=None):
        self.quietly(self.manager.close)
        shutil.rmtree(self.root)
        promised = self.sure
        self.pending.clear()
        if harmed:
            self.sure, self.torn = 0, True
            self.durable.clear()
            self.harm(copy, rng)
        self.open(copy)
        found = self.newest()
        # Everything acknowledged is there, or its loss is reported.
        assert promised == 0 or (found is not None and (found.step >= promised or found.skipped))

    def harm(self, root, rng):
        """Damages one file of the WAL, often the newest segment."""
        places = [root / "log", *([] if self.apart is None else [self.apart])]
        files = [path for at in places for path in sorted(at.rglob("*")) if path.is_file()]
        if files and rng.random() < 0.5:
            damage(rng.choice(files), rng.choice(HOWS))
        else:
            self.tear(root, rng)

    def tear(self, root, rng):
        places = root.glob("log/*/0/*.seg") if self.apart is None else self.apart.rglob("*.seg")
        segments = sorted(places, key=lambda path: (int(path.parts[-3]), path.name))
        if segments:
            data = segments[-1].read_bytes()
            at = rng.randrange(len(data) + 1)
            if rng.random() < 0.5:
                data = data[:at]
            elif data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            segments[-1].write_bytes(data)

    @rule(log=st.sampled_from([True, True, False]))
    def restore_newest(self, log):
        self.newest(log)

    def newest(self, log="auto"):
        template = self.state
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = self.manager.restore_latest(template, wal=log)
            except NoIntactStep:
                if self.manager.all_steps():
                    raise
                result = None  # The damaged records build on a step that was deleted.
            except RestoreError:
                # The epoch header that determines what is valid is damaged.
                if not self.torn:
                    raise
                result = self.manager.restore_latest(template, wal=False)
        self.pending.clear()
        if result is None:
            assert self.sure == 0
            self.begin()
            return None
        self.check(result)
        if log == "auto":
            assert result.step >= self.sure, f"{result.step} is not as new as {self.sure}"
        self.adopt(result)
        return result

    @rule(which=WHICH)
    def restore_older(self, which):
        """Restores a step or recovery point; training continues from there."""
        if (result := self.older(which)) is not None:
            self.adopt(result)

    @rule(which=WHICH)
    def glance_at_older(self, which):
        """Restores a step or recovery point; training continues with the state in memory."""
        if self.touched is not None:
            self.older(which)

    def older(self, which):
        listed = [*self.manager.all_steps(), *self.manager.recovery_points()]
        return self.read(self.manager, listed[which % len(listed)]) if listed else None

    def read(self, manager, at, **template):
        """Checks a step or recovery point; None if it was removed or damaged meanwhile."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = manager.restore(at, **{"abstract_state": self.state} | template)
            except RestoreError:
                listed = [*manager.all_steps(), *manager.recovery_points()]
                assert self.torn or at not in listed
                return None
        self.check(result)
        return result

    @rule(rows=ROWS, by_ids=st.booleans(), logged=st.booleans())
    def return_to_earlier_state(self, rows, by_ids, logged):
        """Training continues with a state that is older than the last record or save."""
        if self.touched is None or self.behind is not None:
            return
        kept = self.state, self.touched
        self.train(2, rows)
        if logged:
            self.mark(by_ids, full=True)
        else:
            self.take()
        self.quietly(self.manager.wait_until_finished)
        self.show()
        self.state, self.touched = kept
        # All rows may differ from those of the last call.
        self.ids = {name: {*range(model.ROWS[name.rpartition("/")[2]])} for name in self.ids}
        if logged:
            self.take()
            self.show()
            # The clock passes that of the last record.
            self.train(3, rows)
        for _ in range(2):
            self.log(rows, by_ids, full=True)
        self.find_newest()

    def show(self):
        """Lets followers, if there are any, see what was written."""

    def find_newest(self):
        """Another process restores the newest step or recovery point."""
        self.wait()
        self.wait_appended()
        with self.reader() as reader, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(*[RestoreError] * self.torn):
                if (found := reader.restore_latest(self.state)) is not None:
                    self.check(found)
                    assert self.torn or found.step >= self.sure

    def reader(self):
        return self.manager_of(deltackpt.ManagerOptions(access="read", multiprocess=False))

    @rule(rows=ROWS)
    def train_without_a_wal(self, rows):
        """A run without a WAL resumes from a recovery point, and a run with one from its step."""
        self.quietly(self.manager.close)
        self.pending.clear()
        options, self.options = self.options, dataclasses.replace(self.options, wal=None)
        self.open(self.root)
        self.newest()
        for _ in range(2):
            self.save(rows)
        self.wait()
        self.quietly(self.manager.close)
        self.options = options
        self.open(self.root)
        self.newest()

    @rule(sharded=st.booleans())
    def read_all(self, sharded):
        """Another process finds what the manager lists, and restores it on other devices."""
        self.wait()
        self.wait_appended()
        # First, because it waits until trimming has ended.
        listed = None if self.torn else self.manager.recovery_points()
        with self.reader() as reader:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    steps, points = reader.all_steps(), reader.recovery_points()
                except RestoreError:
                    assert self.torn
                    return
            assert self.torn or listed == points
            newest = max(steps, default=0)
            missing = {step for step in self.durable if step > newest}
            assert self.torn or missing <= {point.step for point in points}, missing
            if not steps:
                return
            report = verify_root(self.root)
            if not self.torn:
                assert report.intact, report.problems
                assert_no_seq_twice(self.root)
                assert all(one.restorable for one in report.points)
                shown = [one for one in inspect.open(self.root).recovery_points() if one.full]
                assert [one.point for one in report.points][::-1] == points == shown
            verdicts = {one.point: one.restorable for one in report.points}
            for at in [*points[:MOST_READ], *steps[-MOST_READ:]]:
                found = self.read(
                    reader, at, **({"abstract_state": self.split()} if sharded else {})
                )
                assert found is not None or at in steps or not verdicts.get(at, False), at
                assert found is None or verdicts.get(at, True), at
                if found is not None and at == next(iter(points), None):
                    self.compare(inspect.open(self.root).at(at), found)

    def split(self):
        """A template whose tables are sharded over two devices, if their rows are even."""
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        tables = {
            name: table
            if len(table) % 2
            else jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=rows)
            for name, table in self.state["tables"].items()
        }
        return {**self.state, "tables": tables}

    def compare(self, shown, found):
        """Checks that inspection shows the bits that were restored."""
        for name, table in found.state["tables"].items():
            assert shown.tables[f"tables/{name}"][:].tobytes() == np.asarray(table).tobytes(), name
        kernel = np.asarray(found.state["dense"]["kernel"])
        assert shown["dense/kernel"][:].tobytes() == kernel.tobytes()

    @rule(which=WHICH)
    def delete(self, which):
        """Deletes a step unless other steps or the newest recovery points need it."""
        steps = self.manager.all_steps()
        if not steps:
            return
        step = steps[which % len(steps)]
        # Retention may have deleted it since.
        with contextlib.suppress(OptionError, StepNotFound):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # A save in flight may have failed.
                self.manager.delete(step)
                self.durable.clear()
            if step == self.sure or (step > self.sure and step == self.resumed):
                # If training resumed from the step, that ended the points before it.
                left = [
                    *self.manager.all_steps(),
                    *(one.step for one in self.manager.recovery_points()),
                ]
                self.sure = max((one for one in left if one < step), default=0)


TestLog = LogMachine.TestCase
#: From the collector of an earlier save, if its files were away at the time.
COLLECTOR = pytest.mark.filterwarnings("ignore:unneeded files could not be removed")
TestLog.pytestmark = [COLLECTOR]
TestLog.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=[*HealthCheck]
)
