# SPDX-License-Identifier: Apache-2.0
"""A trainer against a bucket, in a process that a test kills; its states say how they came about.

A state holds which branch of training made each of its steps, and all else follows from that: a
state that was put together from two branches, or lacks rows, is told by replaying its history.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import deltackpt
from deltackpt import touched
from deltackpt.errors import FencedError, SaveFailed
from deltackpt.options import DeltaOptions, ManagerOptions, Tiers, Timeouts

ROWS, WIDTH = 300, 4
#: Steps that a state can remember.
MOST = 4000
HANDLERS = {"embeddings": deltackpt.Tables(select="tables/*")}


def rows_of(step: int) -> np.ndarray:
    """The rows that a step changes."""
    return (np.arange(6) * 37 + step * 11) % ROWS


def replayed(history: np.ndarray) -> np.ndarray:
    """The table that a history makes: whole numbers, so that their order does not matter."""
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


def trained(state: dict[str, Any], marks: Any, step: int, branch: int) -> tuple[Any, Any]:
    """One step of a branch."""
    rows = jnp.asarray(rows_of(step))
    words = state["tables"]["words"].at[rows].add(1.0 + (branch * 31 + step) % 97)
    history = state["history"].at[step].set(branch)
    return {"tables": {"words": words}, "history": history}, touched.mark(marks, {"words": rows})


def check(state: Any, step: int) -> list[int]:
    """The history of a state of a step, which must be what its rows say."""
    history = np.asarray(state["history"])
    assert (history[step + 1 :] == -1).all() and history[step] >= 0, (step, history[: step + 2])
    words = np.asarray(state["tables"]["words"])
    assert np.array_equal(words, replayed(history)), f"step {step} is not what its history makes"
    return history[: step + 1].tolist()


def options(stage: str, endpoint: str, wait_for: Any) -> ManagerOptions:
    """Of a trainer: bases are frequent, and few steps stay."""
    return ManagerOptions(
        deltas=DeltaOptions(policy=deltackpt.Consecutive(max_chain=3), sampled_proof=False),
        retention=5,
        tiers=Tiers(stage=stage, endpoint=endpoint, keep_local=1, wait_for=wait_for),
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
) -> None:
    """Goes on from the newest step, or an older one, until it is killed, or has made some steps.

    Args:
      url: of the root.
      endpoint: of its server.
      stage: of the node.
      journal: a file for what was done and acknowledged, a line of JSON each.
      environment: with credentials.
      branch: what tells this training from all others.
      seed: of what is drawn.
      steps: how many to make; None for as many as it comes to.
    """
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    draw = random.Random(seed)
    with open(journal, "ab", 0) as told:

        def tell(what: str, **more: Any) -> None:
            told.write(json.dumps({"what": what, "branch": branch, **more}).encode() + b"\n")

        wait_for = "root" if draw.random() < 0.7 else "stage"
        with contextlib.ExitStack() as stack:
            try:
                manager = stack.enter_context(
                    deltackpt.CheckpointManager(
                        url, handlers=HANDLERS, options=options(stage, endpoint, wait_for)
                    )
                )
                tell("opened", steps=manager.all_steps())
                _train(manager, draw, branch, steps, tell, wait_for)
                tell("done")
            except (FencedError, SaveFailed) as error:
                if not isinstance(error.__cause__ or error, FencedError):
                    raise
                tell("fenced")
                os._exit(3)


def _train(
    manager: Any, draw: random.Random, branch: int, steps: int | None, tell: Any, wait_for: str
) -> None:
    template = jax.eval_shape(fresh)
    found = manager.restore_latest(template)
    back = draw.random() < 0.15 and steps is None
    if found is not None and back and len(manager.all_steps()) > 1:
        older = draw.choice(manager.all_steps()[:-1])
        found = manager.restore(older, template)
    state = fresh() if found is None else found.state
    step = 0 if found is None else found.step + 1
    if found is not None:
        history = check(state, found.step)
        # Said before anything follows from it.
        tell("goes on", step=found.step, history=history, back=back)
    else:
        tell("begins")
    marks = touched.init(state["tables"]) if found is None else found.touched
    made = 0
    while steps is None or made < steps:
        if step >= MOST - 1:
            return
        state, marks = trained(state, marks, step, branch)
        manager.save(step, state, touched=marks)
        tell("saved", step=step)
        made += 1
        if draw.random() < 0.3:
            manager.wait()
            if wait_for == "root":
                tell("acked", step=step, history=np.asarray(state["history"])[: step + 1].tolist())
        elif draw.random() < 0.3:
            time.sleep(draw.random() * 0.05)
        step += 1
    manager.wait()
