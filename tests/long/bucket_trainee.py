# SPDX-License-Identifier: Apache-2.0
"""A trainer with a bucket, in a process that a test kills; its states record their history.

A state records which branch of training made each of its steps, and all else follows from that.
Replaying the history detects a state that mixes two branches or lacks rows.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import surroundings
from surroundings import Surroundings

import deltackpt
from deltackpt import touched
from deltackpt.errors import DeltackptError, FencedError, SaveFailed
from deltackpt.options import DeltaOptions, ManagerOptions, Tiers, Timeouts
from deltackpt.storage import buckets
from deltackpt.storage.store import Unanswered

ROWS, WIDTH = 300, 4
#: Until a trainer that waits only for staging notices that the root was emptied.
_NOTICED_SECS = 60
#: Most steps that a state can record.
MOST = 4000
HANDLERS = {"embeddings": deltackpt.Tables(select="tables/*")}


def rows_of(step: int) -> np.ndarray:
    """The rows that a step changes."""
    return (np.arange(6) * 37 + step * 11) % ROWS


def replayed(history: np.ndarray) -> np.ndarray:
    """The table that a history produces: integers, so that the order does not matter."""
    words = np.zeros((ROWS, WIDTH), np.float32)
    for step, branch in enumerate(history):
        if branch >= 0:
            words[rows_of(step)] += np.float32(1 + (branch * 31 + step) % 97)
    return words


def fresh() -> dict[str, Any]:
    """The state before the first step."""
    return {
        "tables": {"words": jnp.zeros((ROWS, WIDTH), jnp.float32)},
        "history": jnp.full(MOST, -1, jnp.int32),
    }


def trained(state: Any, marks: Any, step: int, branch: int, around: Surroundings) -> Any:
    """The state and marks after one step of a branch."""
    rows = rows_of(step)
    words, history = np.array(state["tables"]["words"]), np.array(state["history"])
    words[rows] += np.float32(1 + (branch * 31 + step) % 97)
    history[step] = branch
    state = around.placed({"tables": {"words": words}, "history": history})
    return state, touched.mark(marks, {"words": jnp.asarray(rows)})


def check(state: Any, step: int) -> list[int]:
    """Returns the history of a state after checking its rows against it."""
    history = np.asarray(state["history"])
    assert (history[step + 1 :] == -1).all() and history[step] >= 0, (step, history[: step + 2])
    words = np.asarray(state["tables"]["words"])
    assert np.array_equal(words, replayed(history)), f"step {step} is not what its history makes"
    return history[: step + 1].tolist()


def options(stage: str, endpoint: str, wait_for: Any) -> ManagerOptions:
    """Options of a trainer: frequent bases, and few steps kept."""
    return ManagerOptions(
        deltas=DeltaOptions(
            policy=deltackpt.policies.Consecutive(max_chain=3), tracking_audit=False
        ),
        max_to_keep=5,
        tiers=Tiers(staging_dir=stage, endpoint=endpoint, keep_local=1, wait_for=wait_for),
        timeouts=Timeouts(store_secs=10.0, close_secs=60.0, save_secs=60.0),
    )


def train(
    url: str,
    endpoint: str,
    stage: str,
    journal: str,
    environment: dict[str, str],
    branch: int,
    seed: int,
    steps: int | None,
    may_empty: bool,
) -> None:
    """Resumes from the newest step or an older one, until it is killed or has made some steps.

    Args:
      url: the remote directory.
      endpoint: of its server.
      stage: the staging directory.
      journal: a file of what was done and acknowledged, one JSON line each.
      environment: variables with credentials.
      branch: a number that identifies this training.
      seed: of the random draws.
      steps: how many to make; None for no limit.
      may_empty: whether it may remove every object of the root during the run.
    """
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    draw = random.Random(seed)
    with open(journal, "ab", 0) as told:

        def tell(what: str, **more: Any) -> None:
            # After the torn line of another trainer that was killed, it is a line of its own.
            told.write(f"\n{json.dumps({'what': what, 'branch': branch, **more})}\n".encode())

        wait_for = "remote" if draw.random() < 0.7 else "staging"
        with contextlib.ExitStack() as stack:
            try:
                drawn = surroundings.draw(draw)
                around = Surroundings(**drawn)
                with around.entered():
                    manager = deltackpt.CheckpointManager(
                        url, handlers=HANDLERS, options=options(stage, endpoint, wait_for)
                    )
                stack.enter_context(manager)
                tell("opened", steps=manager.all_steps(), surroundings=drawn)
                train_on = Training(around.around(manager), around, draw, branch, Path(stage), tell)
                train_on.empty_root = functools.partial(empty, url, endpoint) if may_empty else None
                train_on.train(steps, wait_for)
                tell("done")
            except StageLost:
                tell("lost its stage")
                os._exit(4)
            except RootEmptied:
                tell("emptied")
                os._exit(5)
            except Unanswered:  # The server is too busy; what was acknowledged is remote.
                tell("no answer")
                os._exit(6)
            except DeltackptError as error:
                if not is_fenced(error):
                    raise
                tell("fenced")
                os._exit(3)


class StageLost(Exception):
    """The staging directory of a trainer was removed."""


class RootEmptied(Exception):
    """Every object of the root was removed, and the trainer reported that."""


def empty(url: str, endpoint: str) -> None:
    """Removes every object of a root until a listing is empty."""
    store = buckets.locate(url, endpoint=endpoint).open().store
    while keys := store.keys(""):
        store.delete(keys)


def is_fenced(error: DeltackptError) -> bool:
    """Whether another trainer took over the root."""
    cause = error.__cause__ if isinstance(error, SaveFailed) else None
    return isinstance(cause or error, FencedError)


def away_of(stage: Path) -> Path:
    """The path to which a staging directory is moved away."""
    return stage.with_name(f"{stage.name}.away")


class Training:
    """A loop that saves and journals its actions."""

    def __init__(
        self,
        manager: Any,
        around: Surroundings,
        draw: random.Random,
        branch: int,
        stage: Path,
        tell: Any,
    ):
        self._manager: deltackpt.CheckpointManager = manager
        self._around, self._draw, self._branch = around, draw, branch
        self._stage, self._tell = stage, tell
        self.empty_root: Callable[[], None] | None = None
        self._step, self._state, self._marks = -1, around.placed(fresh()), None

    def train(self, steps: int | None, wait_for: str) -> None:
        """Resumes from the newest step or an older one, and makes some."""
        draw = self._draw
        self._begin(may_go_back=steps is None)
        made = 0
        while (steps is None or made < steps) and self._step < MOST - 2:
            self._save()
            made += 1
            if draw.random() < 0.3:
                self._manager.wait_until_finished()
                if wait_for == "remote":
                    history = np.asarray(self._state["history"])[: self._step + 1].tolist()
                    self._tell("acked", step=self._step, history=history)
            elif draw.random() < 0.3:
                time.sleep(draw.random() * 0.05)
            elif steps is None and draw.random() < 0.15:
                self._without_stage(removed=draw.random() < 0.3)
            elif self.empty_root is not None and draw.random() < 0.1:
                self._without_root(wait_for)
        self._manager.wait_until_finished()

    def _begin(self, *, may_go_back: bool) -> None:
        manager, draw = self._manager, self._draw
        template = self._around.abstract(fresh())
        found = manager.restore_latest(template)
        back = draw.random() < 0.15 and may_go_back
        if found is not None and back and len(manager.all_steps()) > 1:
            older = draw.choice(manager.all_steps()[:-1])
            found = manager.restore(older, template)
        if found is None:
            self._tell("begins")
            with self._around.entered():
                self._marks = touched.init(self._state["tables"])
            return
        history = check(found.state, found.step)
        assert (wrong := self._around.misplaced(found.state)) is None, wrong
        # Journaled before anything that depends on it.
        self._tell("goes on", step=found.step, history=history, back=back)
        self._step, self._state, self._marks = found.step, found.state, found.touched

    def _save(self) -> None:
        self._step += 1
        self._state, self._marks = trained(
            self._state, self._marks, self._step, self._branch, self._around
        )
        self._manager.save(self._step, self._state, touched=self._marks)
        self._tell("saved", step=self._step)

    def _without_stage(self, *, removed: bool) -> None:
        """Asserts that saves fail while the staging directory is away and do not recreate it."""
        self._manager.wait_until_finished()
        away = away_of(self._stage)
        if removed:  # After a kill, what is left of it is not moved back.
            away = away.with_name(f"{away.name}.{self._branch}")
        self._stage.rename(away)
        self._tell("moves its stage", removed=removed)
        while removed and away.exists():  # Its uploader still removes files, too.
            shutil.rmtree(away, ignore_errors=True)
        try:
            assert not self._is_saved(), "a save is acknowledged without a stage"
            assert not self._stage.exists()
        finally:
            if not removed:
                away.rename(self._stage)
        if removed:
            raise StageLost("removed")
        assert any(self._is_saved() for _ in range(6)), "a stage that came back takes no save"

    def _without_root(self, wait_for: str) -> None:
        """Asserts that no save is acknowledged as remote after the root was emptied."""
        assert self.empty_root is not None
        self._tell("empties")
        self.empty_root()
        deadline = time.monotonic() + _NOTICED_SECS
        try:
            if self._draw.random() < 0.5:
                self._save()
            self._manager.wait_until_finished()
            assert wait_for != "remote", "a save is acknowledged in a root that was emptied"
            while time.monotonic() < deadline:
                self._save()
                self._manager.wait_until_finished()
                time.sleep(0.1)
        except DeltackptError as error:
            assert is_fenced(error), error
            raise RootEmptied from error
        raise AssertionError("training never learns that the root was emptied")

    def _is_saved(self) -> bool:
        try:
            self._save()
            self._manager.wait_until_finished()
        except DeltackptError as error:
            if is_fenced(error):
                raise
            return False
        return True
