# SPDX-License-Identifier: Apache-2.0
"""The log against a model that keeps every state in memory.

Random sequences of what loops do with marks and saves: train, log by stamps or by ids, save, fail
to write or to force either, end without a word, tear or damage what was logged last, restore the
newest or an older step or point, start again. Whatever happens, what restores is a state that was
given to that very step on the line of training that goes on, and nothing that was acknowledged is
lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
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
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import deltackpt
from deltackpt import touched
from deltackpt.errors import (
    DeltackptError,
    LogFailed,
    NoIntactStep,
    RestoreError,
    SaveFailed,
    StepNotFound,
)
from deltackpt.reading.stretches import LogPoint
from deltackpt.storage import writer

POLICIES = (
    deltackpt.Consecutive(max_chain=4),
    deltackpt.Rolling(window=3),
    deltackpt.OneShot(max_chain=4),
    deltackpt.Intermittent(max_chain=6),
)
WHICH = st.integers(0, 11)
ROWS = st.sampled_from([0, 5, 400])


def _with(half: np.ndarray, seed: int) -> np.ndarray:
    """Some numbers changed."""
    half[np.random.default_rng(seed).integers(0, half.size, 30)] = seed
    return half


class LogMachine(RuleBasedStateMachine):
    """Drives a manager with a log beside a dict of step to the states that it may hold."""

    manager: deltackpt.CheckpointManager | None = None

    @initialize(
        policy=st.sampled_from(POLICIES),
        dense=st.sampled_from(["whole", "delta", "soft"]),
        every=st.sampled_from([1, 1, 3]),
        codec=st.sampled_from(["raw", "raw", "lossless", "adaptive4", "bf16"]),
        log_codec=st.sampled_from([None, None, "int8"]),
        segment_bytes=st.sampled_from([1, 1 << 16, 1 << 28]),
        bases=st.sampled_from(["periodic", "compacted"]),
        fingerprints=st.sampled_from([False, False, True]),
        retention=st.sampled_from([None, None, 1]),
        durability=st.sampled_from(["process", "power"]),
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
        retention,
        durability,
    ):
        if isinstance(policy, deltackpt.Rolling):
            bases, retention = "periodic", None
        self.folder = Path(tempfile.mkdtemp(prefix="deltackpt-test-"))
        self.fingerprints = fingerprints
        self.codecs = {codec, log_codec or codec}
        self.codec = codec
        self.options = deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(
                policy=policy, bases=bases, tracking="fingerprints" if fingerprints else "marks"
            ),
            writes=deltackpt.WriteOptions(durability=durability),
            retention=retention,
            log=deltackpt.LogOptions(
                dense=dense,
                dense_every=every,
                codec=log_codec,
                backend=deltackpt.LocalLog(segment_bytes=segment_bytes),
            ),
        )
        self.number = self.seed = self.step = 0
        self.open(self.folder / "0")
        self.begin()

    def open(self, root):
        self.root = root
        tables = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS, codec=self.codec)
        self.manager = deltackpt.CheckpointManager(
            root, handlers={"embeddings": tables}, options=self.options
        )

    def begin(self):
        """Training from the beginning; its steps are counted on, as those of the log are."""
        weights = {"whole": jnp.zeros(1500), "half": jnp.zeros(3000, jnp.bfloat16)}
        self.state = model.initial() | {"weights": weights}
        self.touched = None if self.fingerprints else model.new_touched(self.state)
        #: Step to what may be found there.
        self.given: dict[int, list[dict]] = {}
        #: The newest step that must be found, or a later one.
        self.sure = 0
        self.ids: dict[str, set[int]] = {name: set() for name in model.SLOTS}
        self.behind: int | None = None

    def teardown(self):
        if self.manager is not None:
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
            # Of the one blocks change as a whole or not at all, of the other some numbers.
            at = self.seed * 300 % 1500
            self.state["weights"] = {
                "whole": jnp.asarray(np.array(weights["whole"]) + (np.arange(1500) >= at)),
                "half": jnp.asarray(_with(np.array(weights["half"]), self.seed)),
            }
            if self.touched is not None:
                self.touched = touched.mark(self.touched, ids)
            for name, rows_of in ids.items():
                self.ids[name] |= {*np.asarray(rows_of).tolist()}

    def gives(self):
        """The state is given to the manager: what training left is not found any more."""
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

    @rule(rows=ROWS, call=st.sampled_from(["writev", "fdatasync"]), by_ids=st.booleans())
    def log_and_fail(self, rows, call, by_ids):
        """The disk refuses once; nothing is lost."""
        real, failed = getattr(os, call), []

        def fails(*arguments):
            if not failed:
                failed.append(True)
                raise OSError(errno.ENOSPC, "injected")
            return real(*arguments)

        with mock.patch.object(os, call, fails):
            self.log(rows, by_ids, full=True)
            self.quietly(self.manager.wait_logged)
        self.log(rows, by_ids, full=True)
        self.wait_logged()

    def mark(self, by_ids, full):
        self.gives()
        ids = None
        if by_ids and not self.fingerprints:
            ids = {name: np.array(sorted(rows), np.int64) for name, rows in self.ids.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                logged = self.manager.log(
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
        self.gave()
        self.ids = {name: set() for name in self.ids}
        self.knows(None if logged is None else logged.recovery)

    def knows(self, recovery):
        """What is said to be there must be found."""
        if recovery is not None:
            step = recovery.step if isinstance(recovery, LogPoint) else recovery
            assert step in self.given
            self.sure = max(self.sure, step)

    @rule()
    def wait_logged(self):
        with contextlib.suppress(LogFailed, SaveFailed):
            self.knows(self.manager.wait_logged())

    @rule(rows=ROWS)
    def save(self, rows):
        self.train(1, rows)
        self.take()

    @rule(rows=ROWS)
    def save_and_fail(self, rows):
        self.train(1, rows)
        failing = mock.patch.object(writer, "write_array", side_effect=OSError(28, "injected"))
        with failing:
            self.take()
            self.quietly(self.manager.wait)

    def take(self):
        self.gives()
        with warnings.catch_warnings(), contextlib.suppress(SaveFailed):
            # Later steps are moved aside, which is told.
            warnings.simplefilter("ignore")
            self.manager.save(self.step, self.state, touched=self.touched)
        self.gave()

    @rule()
    def wait(self):
        step = self.step
        try:
            self.manager.wait()
        except (SaveFailed, LogFailed):
            return
        if self.manager.latest_step() == step and step in self.given:
            self.sure = max(self.sure, step)

    # Ends, and what comes after.

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
        """Each row is as it was given, or as one of the codecs has it."""
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

    @rule(torn=st.integers(0, 3), seed=st.integers(0, 99))
    def end_without_a_word(self, torn, seed):
        """As a kill: the files as they are, of the newest segment perhaps not all."""
        self.quietly(self.manager.wait)
        self.number += 1
        copy = self.folder / str(self.number)
        while True:
            # Files go meanwhile that nothing needs any more.
            with contextlib.suppress(shutil.Error):
                shutil.copytree(self.root, copy)
                break
            shutil.rmtree(copy)
        self.quietly(self.manager.close)
        shutil.rmtree(self.root)
        if torn == 1:
            self.sure = 0
            self.tear(copy, random.Random(seed))
        self.open(copy)
        self.restore_newest()

    def tear(self, root, rng):
        segments = sorted(root.glob("log/*/0/*.seg"), key=lambda path: path.stat().st_mtime_ns)
        if segments:
            data = segments[-1].read_bytes()
            at = rng.randrange(len(data) + 1)
            if rng.random() < 0.5:
                data = data[:at]
            elif data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            segments[-1].write_bytes(data)

    @rule(log=st.sampled_from(["auto", "auto", None]))
    def restore_newest(self, log="auto"):
        template = self.state
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = self.manager.restore_latest(template, log=log)
            except NoIntactStep:
                raise
            except RestoreError:
                # The head that says what counts is damaged.
                result = self.manager.restore_latest(template, log=None)
        if result is None:
            assert self.sure == 0
            self.begin()
            return
        self.check(result)
        if log == "auto":
            assert result.step >= self.sure, f"{result.step} is not as new as {self.sure}"
        self.adopt(result)

    @rule(which=WHICH)
    def restore_older(self, which):
        """A step, or a point; training goes on from there."""
        listed = [*self.manager.all_steps(), *self.manager.points()]
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

    @rule()
    def points_are_given(self):
        for point in self.manager.points():
            assert point.step in self.given


TestLog = LogMachine.TestCase
TestLog.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)
