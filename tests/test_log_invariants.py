# SPDX-License-Identifier: Apache-2.0
"""Checks the WAL against a model that keeps every state in memory.

Draws random sequences of training loop actions: train, append by stamps or by ids, forget to mark a
row, lose access to the checkpoint directory, save, fail to write or to fsync, end without closing,
tear or damage the newest records, restore the newest or an older step or recovery point, start
again. In all cases, a restore returns a state that was given to that step in the current lineage,
and nothing that was acknowledged is lost.
"""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import jax.numpy as jnp
import model
import numpy as np
import pytest
from damages import HOWS, damage
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from test_invariants import tracking_named
from user_contexts import CONTEXTS, InContext

import deltackpt
from deltackpt import RecoveryPoint, touched, vocab
from deltackpt.errors import (
    AppendFailed,
    DeltackptError,
    NoIntactStep,
    OptionError,
    RestoreError,
    SaveFailed,
    StepNotFound,
)
from deltackpt.testing import Disk, failing_saves
from deltackpt.wal import audit

POLICIES = (
    deltackpt.policies.Consecutive(max_chain=4),
    deltackpt.policies.Rolling(window=3),
    deltackpt.policies.OneShot(max_chain=4),
    deltackpt.policies.Intermittent(max_chain=6),
)
WHICH = st.integers(0, 11)
ROWS = st.sampled_from([0, 5, 400])
#: Parts of the state that the WAL audits one after the other: one for each table.
SLICES = len(model.ROWS)


def _with(half: np.ndarray, seed: int) -> np.ndarray:
    """Changes some values."""
    half[np.random.default_rng(seed).integers(0, half.size, 30)] = seed
    return half


class LogMachine(RuleBasedStateMachine):
    """Drives a manager with a WAL beside a dict of the states that each step may hold."""

    manager: InContext | None = None

    @initialize(
        policy=st.sampled_from(POLICIES),
        dense=st.sampled_from(["whole", "delta", "soft"]),
        every=st.sampled_from([1, 1, 3]),
        codec=st.sampled_from(["raw", "raw", "lossless", "adaptive4", "bf16"]),
        log_codec=st.sampled_from([None, None, "int8"]),
        segment_bytes=st.sampled_from([1, 1 << 16, 1 << 28]),
        bases=st.sampled_from(["periodic", "compacted"]),
        fingerprints=st.sampled_from([False, False, True]),
        auto=st.booleans(),
        retention=st.sampled_from([None, None, 1]),
        durability=st.sampled_from(["process", "power"]),
        context=st.sampled_from(["none", *CONTEXTS]),
        keyed=st.booleans(),
    )
    def start(
        self,
        policy,
        dense,
        every,
        codec,
        log_codec,
        segment_bytes,
        bases,
        fingerprints,
        auto,
        retention,
        durability,
        context,
        keyed,
    ):
        if isinstance(policy, deltackpt.policies.Rolling):
            bases, retention = "periodic", None
        self.folder = Path(tempfile.mkdtemp(prefix="deltackpt-test-"))
        # Every record audits all rows of a table.
        self.patch = mock.patch.multiple(audit, _EVERY=1, _ROWS=1 << 20)
        self.patch.start()
        self.fingerprints, self.keyed = fingerprints, keyed
        self.context = CONTEXTS.get(context, contextlib.nullcontext)
        self.codecs = {codec, log_codec or codec}
        self.codec = codec
        self.options = deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(
                policy=policy, bases=bases, tracking=tracking_named(fingerprints, auto)
            ),
            writes=deltackpt.WriteOptions(durability=durability),
            max_to_keep=retention,
            wal=deltackpt.WalOptions(
                dense=dense,
                dense_every=every,
                codec=log_codec,
                backend=deltackpt.wal.LocalWal(segment_bytes=segment_bytes),
            ),
        )
        self.number = self.seed = self.step = 0
        self.open(self.folder / "0")
        self.begin()

    def open(self, root):
        self.root = root
        tables = deltackpt.Tables(
            select=model.SELECT,
            slots=model.SLOTS,
            key={"tables/users": "keys/users"} if self.keyed else None,
            codec=self.codec,
        )
        manager = deltackpt.CheckpointManager(
            root, handlers={"embeddings": tables}, options=self.options
        )
        self.manager = InContext(manager, self.context)

    def begin(self):
        """Restarts training; the step count continues, as that of the WAL does."""
        weights = {"whole": jnp.zeros(1500), "half": jnp.zeros(3000, jnp.bfloat16)}
        self.state = model.initial() | {"weights": weights}
        if self.keyed:
            column = vocab.column_of(np.arange(model.ROWS["users"]), np.uint32)
            self.state["keys"] = {"users": jnp.asarray(column)}
        self.touched = None if self.fingerprints else model.new_touched(self.state)
        #: Step to the states that may be found there.
        self.given: dict[int, list[dict]] = {}
        #: This step or a later one must be found.
        self.sure = 0
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

    @rule(rows=ROWS, call=st.sampled_from(["write", "fdatasync"]), by_ids=st.booleans())
    def log_and_fail(self, rows, call, by_ids):
        """The disk refuses one call; nothing is lost."""
        with Disk(self.root) as disk:
            disk.fail(call, "[.]seg$", errno=errno.ENOSPC)
            self.log(rows, by_ids, full=True)
            self.quietly(self.manager.wait_appended)
        self.log(rows, by_ids, full=True)
        self.wait_appended()

    @rule(row=st.integers(0, 699), by_ids=st.booleans())
    def log_and_forget(self, row, by_ids):
        """An unmarked row changes: the WAL saves a base, which ends the recovery points."""
        if self.fingerprints:
            return
        # The audit allows changes of a row that was marked since it was last checked.
        for _ in range(SLICES):
            self.mark(by_ids, None)
        users = self.state["tables"]["users"].at[row].add(1.0)
        self.state = {**self.state, "tables": {**self.state["tables"], "users": users}}
        if not any(self.mark(by_ids, None, sure=False) for _ in range(2 * SLICES)):
            raise AssertionError("no record has found the row")
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

    def mark(self, by_ids, full, *, sure=True):
        """Appends the state; returns whether that saved a base instead."""
        self.gives()
        ids = None
        if by_ids and not self.fingerprints:
            ids = {name: np.array(sorted(rows), np.int64) for name, rows in self.ids.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                logged = self.manager.append(
                    self.step,
                    self.state,
                    touched=self.touched,
                    ids=ids,
                    items={"at": self.step},
                    full=full,
                )
        except SaveFailed as error:
            assert "step" in str(error)
            logged = None
        finally:
            # The next call names the rows touched since this one.
            self.ids = {name: set() for name in self.ids}
        self.gave()
        if sure:
            self.knows(None if logged is None else logged.recovery)
        return logged is not None and logged.saved is not None and logged.saved.kind == "base"

    def knows(self, recovery):
        """Requires a reported step or recovery point to be found."""
        if recovery is not None:
            step = recovery.step if isinstance(recovery, RecoveryPoint) else recovery
            assert step in self.given
            self.sure = max(self.sure, step)

    @rule()
    def wait_appended(self):
        with contextlib.suppress(AppendFailed, SaveFailed):
            self.knows(self.manager.wait_appended())

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
            return
        if self.manager.latest_step() == step and step in self.given:
            self.sure = max(self.sure, step)

    # Kills and restores.

    def check(self, result):
        assert result.step in self.given, f"step {result.step} was never given"
        if result.point is not None:
            assert result.items == {"at": result.step}
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
        if self.fingerprints:
            self.touched = None
        self.ids = {name: set() for name in self.ids}
        self.behind = result.step
        self.resumed = result.step if result.point is None else None

    @rule(torn=st.integers(0, 3), seed=st.integers(0, 99))
    def end_without_a_word(self, torn, seed):
        """Like a kill: keeps the files as they are, or damages one of the WAL."""
        self.quietly(self.manager.wait_until_finished)
        self.number += 1
        copy = self.folder / str(self.number)
        while True:
            # Unneeded files may be removed during the copy.
            with contextlib.suppress(shutil.Error):
                shutil.copytree(self.root, copy)
                break
            shutil.rmtree(copy)
        self.quietly(self.manager.close)
        shutil.rmtree(self.root)
        promised = self.sure
        if torn == 1:
            self.sure = 0
            self.harm(copy, random.Random(seed))
        self.open(copy)
        found = self.newest()
        # Everything acknowledged is there, or its loss is reported.
        assert promised == 0 or (found is not None and (found.step >= promised or found.skipped))

    def harm(self, root, rng):
        """Damages one file of the WAL, often the newest segment."""
        files = [path for path in sorted(root.glob("log/**/*")) if path.is_file()]
        if files and rng.random() < 0.5:
            damage(rng.choice(files), rng.choice(HOWS))
        else:
            self.tear(root, rng)

    def tear(self, root, rng):
        segments = sorted(
            root.glob("log/*/0/*.seg"), key=lambda path: (int(path.parts[-3]), path.name)
        )
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
                result = self.manager.restore_latest(template, wal=False)
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
        listed = [*self.manager.all_steps(), *self.manager.recovery_points()]
        if not listed:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = self.manager.restore(listed[which % len(listed)], self.state)
            except (StepNotFound, RestoreError):
                return
        self.check(result)
        self.adopt(result)

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
            if step == self.sure or (step > self.sure and step == self.resumed):
                # If training resumed from the step, that ended the points before it.
                left = [
                    *self.manager.all_steps(),
                    *(one.step for one in self.manager.recovery_points()),
                ]
                self.sure = max((one for one in left if one < step), default=0)

    @rule()
    def points_are_given(self):
        for point in self.manager.recovery_points():
            assert point.step in self.given


TestLog = LogMachine.TestCase
#: From the collector of an earlier save, if its files were away at the time.
COLLECTOR = pytest.mark.filterwarnings("ignore:unneeded files could not be removed")
TestLog.pytestmark = [COLLECTOR]
TestLog.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)
