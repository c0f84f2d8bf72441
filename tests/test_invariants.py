# SPDX-License-Identifier: Apache-2.0
"""The invariants, against a model that keeps every state in memory.

Random sequences of marks or none, saves, failed writes, abandoned processes, rollbacks, retention,
compactions and restores: whatever happens, each committed step restores to the state that was
given to it, the newest committed step is the one that restores, and kept steps keep their chains.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import model
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import deltackpt
from deltackpt import compact
from deltackpt.errors import DeltackptError, SaveFailed, StepGone
from deltackpt.storage import arrays

POLICIES = (
    deltackpt.Consecutive(max_chain=4),
    deltackpt.OneShot(max_chain=3),
    deltackpt.Intermittent(max_chain=6),
)


class ManagerMachine(RuleBasedStateMachine):
    """Drives a CheckpointManager beside a dict of step to state."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        retention=st.sampled_from([None, 1, 2]),
        staging_bytes=st.sampled_from([1, 1 << 24]),
        codec=st.sampled_from(["raw", "raw", "lossless", "adaptive4", "bf16"]),
        bases=st.sampled_from(["periodic", "compacted"]),
        tracking=st.sampled_from(["marks", "fingerprints"]),
    )
    def start(self, policy, retention, staging_bytes, codec, bases, tracking):
        self.root = Path(tempfile.mkdtemp(prefix="deltackpt-test-"))
        self.options = deltackpt.ManagerOptions(
            tracking=tracking,
            policy=policy,
            bases=bases,
            retention=retention,
            staging_bytes=staging_bytes,
            durability="process",
        )
        self.codec = codec
        self.saved: dict[int, dict] = {}
        self.step = 0
        self.seed = 0
        self.state = model.initial()
        self.touched = model.new_touched(self.state)
        self.open()

    def open(self):
        tables = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS, codec=self.codec)
        self.manager = deltackpt.CheckpointManager(
            self.root, handlers={"embeddings": tables}, options=self.options
        )

    def teardown(self):
        if hasattr(self, "manager"):
            self.manager.close()
            shutil.rmtree(self.root)

    def check(self, found: dict, step: int):
        model.assert_same_or_decoded(found, self.saved[step], self.codec)

    def committed(self) -> dict[int, dict]:
        return {step: self.saved[step] for step in self.manager.all_steps()}

    @rule(steps=st.integers(1, 3), rows=st.sampled_from([0, 5, 400]))
    def train(self, steps, rows):
        for _ in range(steps):
            self.step += 1
            self.seed += 1
            self.state, self.touched = model.train(self.state, self.touched, self.seed, rows=rows)

    def marks(self) -> deltackpt.TouchState | None:
        return self.touched if self.options.tracking == "marks" else None

    @rule(force_base=st.booleans())
    def save(self, force_base):
        self.step += 1
        self.manager.save(self.step, self.state, touched=self.marks(), force_base=force_base)
        self.saved[self.step] = self.state

    @rule()
    def wait(self):
        self.manager.wait()
        newest = max(self.saved, default=None)
        assert self.manager.latest_step() == newest

    @rule(after=st.integers(0, 3))
    def failed_write(self, after):
        """A save whose storage fails part way: typed error, nothing lost."""
        self.manager.wait()
        self.step += 1
        real, calls = arrays.write_array, iter(range(100))

        def failing(*args, **kwargs):
            if next(calls) >= after:
                raise OSError(5, "injected")
            return real(*args, **kwargs)

        with mock.patch.object(arrays, "write_array", failing):
            self.manager.save(self.step, self.state, touched=self.marks())
            try:
                self.manager.wait()
                self.saved[self.step] = self.state
            except SaveFailed as error:
                assert str(self.step) in str(error)

    @precondition(lambda self: hasattr(self, "manager") and len(self.saved) > 0)
    @rule(data=st.data(), workers=st.integers(1, 2))
    def compact(self, data, workers):
        """Beside a save in flight, like anybody."""
        step = data.draw(st.sampled_from(self.manager.all_steps()))
        with contextlib.suppress(StepGone):
            compact.compact(self.root, step=step, workers=workers)

    @rule()
    def crash_and_restart(self):
        """A new process finds what was committed; the old manager never finishes."""
        self.manager.wait()
        self.manager.close()
        self.open()
        self.restore_newest()

    @rule()
    def restore_newest(self):
        result = self.manager.restore_latest(self.state)
        if not self.saved:
            assert result is None
            return
        assert result is not None and result.step == max(self.saved)
        self.check(result.state, result.step)
        self.adopt(result)

    @precondition(lambda self: hasattr(self, "manager") and len(self.saved) > 0)
    @rule(data=st.data())
    def roll_back(self, data):
        self.manager.wait()
        step = data.draw(st.sampled_from(self.manager.all_steps()))
        result = self.manager.restore(step, self.state)
        self.check(result.state, step)
        self.adopt(result)
        self.step = step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.save(False)
        self.saved = {s: v for s, v in self.saved.items() if s <= step or s == self.step}

    def adopt(self, result):
        self.state, self.touched = result.state, result.touched
        self.step = max(self.step, result.step)

    @invariant()
    def every_committed_step_restores(self):
        if not hasattr(self, "manager"):
            return
        self.manager.wait()
        steps = self.manager.all_steps()
        assert set(steps) <= set(self.saved)
        self.saved = self.committed()
        options = deltackpt.ManagerOptions(read_only=True)
        tables = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)
        with deltackpt.CheckpointManager(
            self.root, handlers={"embeddings": tables}, options=options
        ) as reader:
            for step in steps[-3:]:
                try:
                    result = reader.restore(step, self.state)
                except DeltackptError as error:
                    raise AssertionError(f"step {step} of {steps} does not restore") from error
                self.check(result.state, step)


ManagerMachine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestManager = ManagerMachine.TestCase
