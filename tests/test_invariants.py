# SPDX-License-Identifier: Apache-2.0
"""Checks the invariants against a model that keeps every state in memory.

Draws random sequences of training loop actions: train, save with or without waiting, calls that
fail, kills in the middle of a save, rollbacks on disk and in memory, tracking that restarts or is
forgotten, restores of older steps, retention, compactions, restarts. No rule waits for a save
unless waiting is its purpose, so each runs with saves in flight. In all cases, each committed step
restores to the state that was given to it, finished saves stay, and the newest committed step is
the one that restores.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import model
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from user_contexts import CONTEXTS, MESHES, InContext

import deltackpt
from deltackpt import touched
from deltackpt.errors import DeltackptError, SaveFailed, StepGone, StepNotFound, StorageError
from deltackpt.maintenance import compact
from deltackpt.testing import Disk
from deltackpt.touched import TouchState, TrackState

POLICIES = (
    deltackpt.policies.Consecutive(max_chain=4),
    deltackpt.policies.OneShot(max_chain=3),
    deltackpt.policies.Intermittent(max_chain=6),
)
#: How touched rows are tracked: a TouchState given to ``save``, one in the state as ``track`` keeps
#: it, both (each with only some of the rows), or none.
TRACKING = ("given", "in the state", "both", "fingerprints")
#: Whether deltas hold all dense leaves, or only changed blocks, with or without room for
#: references.
DENSE = (
    deltackpt.Dense(),
    deltackpt.Dense(deltas="blocks"),
    deltackpt.Dense(deltas="blocks", max_reference_bytes=1),
)
#: Placements of tables and slots.
PLACEMENTS = (
    "uncommitted",
    "uncommitted",
    jax.sharding.SingleDeviceSharding(jax.devices()[2]),
    jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
    jax.sharding.NamedSharding(MESHES["Auto"], jax.sharding.PartitionSpec()),
)
#: Values of a dense leaf stored as blocks; a step changes one of them.
WEIGHTS = 3000
#: Selects one of several steps. Their number depends on what is in flight, and a Hypothesis draw
#: must not.
WHICH = st.integers(0, 7)
ROWS = st.sampled_from([0, 5, 400])
#: A save changes the directory in dozens of calls, a removal in more.
CALLS = st.one_of(st.integers(0, 60), st.integers(0, 300))
#: Calls that may fail: those of our writers, and the commit. If Orbax cannot make a directory, its
#: own threads wait for one another for a minute.
OURS = r"embeddings[^/]*/.|\d+$"


class ManagerMachine(RuleBasedStateMachine):
    """Drives a CheckpointManager beside a dict of the states that each step may hold.

    If a kill cuts off a save of a step number that already exists, either state may be there.
    """

    manager: InContext | None = None

    @initialize(
        policy=st.sampled_from(POLICIES),
        retention=st.sampled_from([None, None, 1, 2]),
        staging_bytes=st.sampled_from([1, 1 << 24]),
        codec=st.sampled_from(["raw", "raw", "lossless", "adaptive4", "bf16"]),
        bases=st.sampled_from(["periodic", "compacted"]),
        when_busy=st.sampled_from(["wait", "wait", "skip", "coalesce"]),
        tracking=st.sampled_from(TRACKING),
        auto=st.booleans(),
        dense=st.sampled_from(DENSE),
        tables_lie=st.sampled_from(PLACEMENTS),
        context=st.sampled_from(["none", *CONTEXTS]),
    )
    def start(
        self,
        policy,
        retention,
        staging_bytes,
        codec,
        bases,
        when_busy,
        tracking,
        auto,
        dense,
        tables_lie,
        context,
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="deltackpt-test-"))
        self.roots = 0
        self.tracking = tracking
        #: Placement of tables and slots, and the context in which the program calls a manager.
        self.placement = tables_lie
        self.context = CONTEXTS.get(context, contextlib.nullcontext)
        self.options = deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(
                tracking=tracking_named(tracking == "fingerprints", auto),
                policy=policy,
                bases=bases,
            ),
            writes=deltackpt.WriteOptions(
                staging_bytes=staging_bytes, when_busy=when_busy, durability="process"
            ),
            dense=dense,
            max_to_keep=retention,
        )
        self.codec = codec
        #: Step to the states of which one must be found there; no other step may exist.
        self.given: dict[int, list[dict]] = {}
        #: Committed steps that only retention may have removed.
        self.sure: set[int] = set()
        #: The save that is in flight, or was.
        self.pending: int | None = None
        self.seed = self.identities = 0
        self.open(self.folder / "0")
        self.start_training()

    def open(self, root):
        self.root, self.disk = root, Disk(root)
        self.disk.__enter__()
        #: Number of reported disk failures, and whether the process was killed.
        self.reported, self.killed = 0, False
        self.manager = self.new_manager(self.codec, self.options)
        self.reader = self.new_manager("raw", deltackpt.ManagerOptions(access="read"))
        #: TouchStates that the manager created or committed a save of. ``looked`` is the step that
        #: it restored since its last save, with the TouchState that it created then.
        self.known: set[int] = set()
        #: A failed save that only a restore has warned of so far.
        self.untold: int | None = None
        self.looked: tuple[int, int] | None = None

    @property
    def fired(self) -> bool:
        """Whether a failed call is not reported yet."""
        return self.killed or len(self.disk.failures) > self.reported

    def new_manager(self, codec, options):
        tables = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS, codec=codec)
        manager = deltackpt.CheckpointManager(
            self.root, handlers={"embeddings": tables}, options=options
        )
        return InContext(manager, self.context)

    def teardown(self):
        if self.manager is None:
            return
        try:
            self.settle()
            for step in self.manager.all_steps():
                self.check(self.reader.restore(step, self.state).state, step)
        finally:
            self.close()
            shutil.rmtree(self.folder)

    def close(self):
        try:
            self.manager.close()
        except (DeltackptError, OSError):
            assert self.fired
        finally:
            self.reader.close()
            self.disk.__exit__()

    # Training.

    def start_training(self):
        self.step = 0
        self.touched: TouchState | None = None
        self.state = {**model.initial(), "weights": jnp.zeros(WEIGHTS)}
        if self.placement != "uncommitted":
            pieces = {name: self.state[name] for name in ("tables", "slots")}
            self.state |= jax.device_put(pieces, self.placement)
        self.track_anew()
        self.remember()

    @rule(steps=st.integers(1, 3), rows=ROWS)
    def train(self, steps, rows):
        for _ in range(steps):
            self.move(rows)

    def move(self, rows, *, forgotten=False):
        """Trains one step; if ``forgotten``, the TouchStates stay as before."""
        self.step += 1
        self.seed += 1
        self.state, ids = model.move(self.state, self.seed, rows=rows)
        weights = self.state["weights"].at[self.seed % WEIGHTS].add(1)
        self.state = {**self.state, "weights": weights}
        if forgotten:
            return
        first = second = ids
        if self.tracking == "both":
            # Each has only some of the rows.
            first = {name: rows[: len(rows) // 2] for name, rows in ids.items()}
            second = {name: rows[len(rows) // 2 :] for name, rows in ids.items()}
        if self.touched is not None:
            self.touched = touched.mark(self.touched, first)
        if "opt" in self.state:
            marked = touched.mark(self.state["opt"].touched, second)
            self.state = {**self.state, "opt": TrackState(marked, ())}

    def track_anew(self, *, jitted=False):
        tables = {f"tables/{name}": table for name, table in self.state["tables"].items()}
        init = jax.jit(touched.init) if jitted else touched.init
        if self.tracking in ("given", "both"):
            self.touched = init(tables)
        if self.tracking in ("in the state", "both"):
            self.state = {**self.state, "opt": TrackState(init(tables), ())}
        # Under jit all identities are equal, so they distinguish nothing.
        self.identity = 0 if jitted else self.new_identity()

    def new_identity(self) -> int:
        self.identities += 1
        return self.identities

    @rule(steps=st.integers(0, 6), rows=ROWS, jitted=st.booleans())
    def track_from_here(self, steps, rows, jitted):
        """Like a loop that calls ``touched.init`` at each epoch."""
        self.track_anew(jitted=jitted)
        for _ in range(steps):
            self.move(rows)
        self.take()

    @rule(rows=ROWS)
    def forget(self, rows):
        """Discards the step's TouchState but keeps the state."""
        self.move(rows, forgotten=True)
        self.take()

    @rule()
    def remember(self):
        self.kept = (self.state, self.touched, self.identity)

    @rule(steps=st.integers(0, 6), rows=ROWS)
    def go_back_in_memory(self, steps, rows):
        """Like after a NaN loss; the step count continues."""
        self.state, self.touched, self.identity = self.kept
        for _ in range(steps):
            self.move(rows)
        self.take()

    # Saving.

    @rule(force_base=st.booleans())
    def save(self, force_base):
        self.take(force_base=force_base)

    @rule(rows=ROWS, at=st.integers(0, 60))
    def save_and_fail(self, rows, at):
        """A call of this or a later save fails: a typed error, nothing lost."""
        self.move(rows)
        self.disk.fail(path=OURS, after=at)
        self.take()

    @rule()
    def save_if_due(self):
        self.take(self.manager.save_if_due)

    @rule()
    def wait(self):
        self.settle()

    def take(self, save=None, **arguments):
        """Saves, and records what may be found from now on."""
        self.step += 1
        before = self.given.get(self.step, [])
        self.given[self.step] = [*before, without_tracking(self.state)]
        behind = self.goes_back_to()
        if behind is not None:
            self.sure -= {step for step in self.sure if step > behind}
        try:
            saved = (save or self.manager.save)(
                self.step, self.state, touched=self.touched, **arguments
            )
        except SaveFailed as error:
            assert self.fired, error
            failed = self.pending if self.untold is None else self.untold
            assert failed is not None and f"step {failed} failed" in str(error)
            self.pending, self.untold, saved = None, None, error.saved
        except (DeltackptError, OSError) as error:
            # It failed before it was in flight, and also reports the earlier failure.
            assert self.fired, error
            self.look_for_pending()
            self.untold = None
            return
        if saved is None or saved.kind is None:
            self.given[self.step] = before
            return
        assert self.untold is None, f"nobody was told that step {self.untold} failed"
        self.keep_pending()
        if behind is not None:
            self.given = {step: found for step, found in self.given.items() if step <= behind}
        self.given[self.step] = [without_tracking(self.state)]
        self.pending, self.looked = self.step, None
        self.pending_identity = self.identity
        self.look_beside()

    def goes_back_to(self) -> int | None:
        """The step after which a save moves later steps aside, or may do so."""
        if self.looked is None:
            return None
        step, identity = self.looked
        goes_on = self.identity in self.known - {0, identity}
        return None if goes_on and self.tracking != "fingerprints" else step

    def settle(self):
        self.disk.clear()
        try:
            self.manager.wait_until_finished()
        except SaveFailed as error:
            assert self.fired, error
            self.pending = self.untold = None
        assert self.untold is None, f"nobody was told that step {self.untold} failed"
        self.keep_pending()
        self.reported = len(self.disk.failures)
        self.check_listed()

    def keep_pending(self):
        """Records that the save in flight is committed."""
        if self.pending is not None:
            self.known.add(self.pending_identity)
            # A save committed after a kill is not there.
            if self.disk.image is None:
                self.sure.add(self.pending)
            self.pending = None

    def look_for_pending(self):
        """Records whether the save in flight is committed; a failure is not reported yet."""
        if self.pending in self.manager.all_steps():
            self.keep_pending()
        assert self.pending is None or self.fired
        if self.pending is not None:
            self.untold = self.pending
        self.pending = None

    # Checks and restores.

    def check(self, found, step) -> dict:
        assert step in self.given, f"step {step} was never committed"
        *others, last = self.given[step]
        for state in others:
            with contextlib.suppress(AssertionError):
                model.assert_same_or_decoded(without_tracking(found), state, self.codec)
                return state
        model.assert_same_or_decoded(without_tracking(found), last, self.codec)
        return last

    def check_listed(self):
        """Checks that committed steps exist, unless retention removed them."""
        listed = set(self.manager.all_steps())
        assert listed <= self.given.keys()
        if self.options.max_to_keep is None:
            assert self.sure <= listed, f"{self.sure - listed} are gone"
        assert max(listed, default=0) >= max(self.sure, default=0), f"of {self.sure}: {listed}"
        return listed

    def look_beside(self):
        """Checks what another process finds while a save is in flight."""
        for step in self.reader.all_steps()[-2:]:
            try:
                found = self.reader.restore(step, self.state)
            except (StepGone, StepNotFound):
                assert step not in self.reader.all_steps()
            else:
                self.check(found.state, step)

    def restored(self, which):
        """Restores an older step with the manager that continues to save."""
        self.disk.clear()
        listed = self.manager.all_steps()
        if not listed:
            return None
        try:
            result = self.manager.restore(listed[which % len(listed)], self.state)
        except (StepGone, StepNotFound):
            result = None
        self.look_for_pending()
        if result is not None:
            self.came_back(result)
        return result

    def came_back(self, result):
        self.check(result.state, result.step)
        found, template = without_tracking(result.state), without_tracking(self.state)
        assert model.placements(found) == model.placements(template)
        self.looked = (result.step, self.new_identity())
        self.known.add(self.identities)

    def adopt(self, result):
        self.state, self.step = result.state, result.step
        self.touched = result.touched if self.tracking in ("given", "both") else None
        self.identity = self.identities

    @rule(which=WHICH)
    def look(self, which):
        """Restores a step; training continues with the state in memory."""
        self.restored(which)

    @rule(which=WHICH, rows=ROWS)
    def roll_back(self, which, rows):
        result = self.restored(which)
        if result is not None:
            self.adopt(result)
            self.move(rows)
            self.take()

    @rule()
    def restore_newest(self):
        self.disk.clear()
        result = self.manager.restore_latest(self.state)
        self.look_for_pending()
        if result is not None:
            assert result.step == max(self.check_listed())
            assert not result.skipped
            self.came_back(result)
            self.adopt(result)

    @rule(which=WHICH, workers=st.integers(1, 2))
    def compact(self, which, workers):
        """Compacts beside a save in flight."""
        self.disk.clear()
        self.run_compaction(which, workers)
        self.look_beside()

    def run_compaction(self, which, workers):
        listed = self.manager.all_steps()
        if listed:
            with contextlib.suppress(StepGone, StepNotFound):
                compact.compact(self.root, step=listed[which % len(listed)], workers=workers)

    # Restarts and kills.

    @rule()
    def restart(self):
        self.settle()
        self.close()
        self.find(self.root)

    @rule(
        rows=ROWS,
        at=CALLS,
        which=WHICH,
        during=st.sampled_from(["save", "saves", "rollback", "compaction", "start"]),
    )
    def kill(self, rows, at, which, during):
        """Ends saves in flight with the process; continues from a copy of the directory."""
        result = self.restored(which) if during == "rollback" else None
        self.roots += 1
        before = dict(self.given)
        root = self.folder / str(self.roots)
        self.disk.copy(root, after=at)
        if result is not None:
            self.adopt(result)
        elif during == "compaction":
            try:
                self.run_compaction(which, 1)
            except StorageError as error:
                # A fault that no save has reached.
                assert self.fired, error
        for _ in range(2 if during == "saves" else 1):
            self.move(rows)
            self.take()
        if during == "start":
            try:
                self.manager.wait_until_finished()
            except SaveFailed as error:
                # An earlier fault hit this save.
                assert self.fired, error
                self.pending = self.untold = None
            self.keep_pending()
            self.new_manager(self.codec, self.options).close()
        self.disk.copy_now(root)
        for step, states in before.items():
            self.given[step] = [*states, *self.given.get(step, [])]
        self.killed = True
        self.close()
        self.find(root)

    def find(self, root):
        """Starts a new process, which continues from the steps it finds."""
        self.open(root)
        listed = self.check_listed()
        self.sure, self.pending = set(listed), None
        self.given = {step: self.given[step] for step in listed}
        for step in listed:
            self.given[step] = [self.check(self.reader.restore(step, self.state).state, step)]
        self.start_training()
        self.restore_newest()


def tracking_named(fingerprints: bool, auto: bool) -> str:
    """The option for a run with or without TouchStates."""
    if auto:
        return "auto"
    return "fingerprints" if fingerprints else "touched"


def without_tracking(state: dict) -> dict:
    return {name: piece for name, piece in state.items() if name != "opt"}


ManagerMachine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class TestManager(ManagerMachine.TestCase):
    """Runs the model."""


# Rollbacks, failed background saves and failed audits are reported as warnings.
TestManager.pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(900),
]
