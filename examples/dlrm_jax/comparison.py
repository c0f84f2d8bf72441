# SPDX-License-Identifier: Apache-2.0
"""Saves of one training state, by deltackpt and by stock Orbax, side by side."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Literal

import jax
import orbax.checkpoint as ocp

import deltackpt
from dlrm_jax import data, trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians over the rounds.

    Attributes:
      name: of the way to save.
      nbytes: bytes of one step directory.
      blocked_secs: how long ``save()`` kept the training thread.
      committed_secs: from ``save()`` until the step was committed.
    """

    name: str
    nbytes: float
    blocked_secs: float
    committed_secs: float


def against_orbax(
    sizes: trainer.ModelOptions,
    source: data.Source,
    state: trainer.TrainState,
    *,
    directory: Path,
    steps_between: int,
    rounds: int,
) -> list[Figures]:
    """Trains on, and after every ``steps_between`` steps saves the state in each way in turn.

    Args:
      sizes: of the model.
      source: of the batches.
      state: where to start.
      directory: an existing directory to save under.
      steps_between: steps between two rounds.
      rounds: of saves by each way.

    Returns:
      A delta with the durability of ``power``, one of ``process``, and full saves of Orbax with its
      defaults and without compression.
    """
    found: dict[str, list[tuple[int, float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=directory) as place:
        roots = {name: Path(place, str(i)) for i, name in enumerate(_WAYS)}
        ways = {name: make(roots[name]) for name, make in _WAYS.items()}
        step = trainer.train_step(sizes)
        for number in range(rounds + 1):
            for _ in range(steps_between):
                state, _, _ = step(state, source.batch(int(state.step)))
            jax.block_until_ready(state)
            for name, manager in ways.items():
                figures = _timed(manager, roots[name], number, state)
                # The first round is the base, and everybody's first call.
                if number:
                    found.setdefault(name, []).append(figures)
        for manager in ways.values():
            manager.close()
    return [
        Figures(
            name=name,
            nbytes=median(nbytes for nbytes, _, _ in rounds_of),
            blocked_secs=median(blocked for _, blocked, _ in rounds_of),
            committed_secs=median(committed for _, _, committed in rounds_of),
        )
        for name, rounds_of in found.items()
    ]


def _deltas(root: Path, durability: Literal["power", "process"]) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": trainer.checkpoint_tables()},
        options=deltackpt.ManagerOptions(durability=durability, retention=1),
    )


def _orbax(root: Path, compressed: bool) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        root,
        item_handlers=ocp.PyTreeCheckpointHandler(use_compression=compressed),
        options=ocp.CheckpointManagerOptions(max_to_keep=1),
    )


_WAYS: dict[str, Callable[[Path], deltackpt.CheckpointManager | ocp.CheckpointManager]] = {
    "deltackpt delta": functools.partial(_deltas, durability="power"),
    'deltackpt delta, durability="process"': functools.partial(_deltas, durability="process"),
    "Orbax full save, defaults": functools.partial(_orbax, compressed=True),
    "Orbax full save, use_compression=False": functools.partial(_orbax, compressed=False),
}


def _timed(
    manager: deltackpt.CheckpointManager | ocp.CheckpointManager,
    root: Path,
    step: int,
    state: trainer.TrainState,
) -> tuple[int, float, float]:
    """(bytes, blocked seconds, seconds until committed) of one save."""
    started = time.perf_counter()
    if isinstance(manager, deltackpt.CheckpointManager):
        manager.save(step, state)
        blocked = time.perf_counter() - started
        manager.wait()
    else:
        manager.save(step, args=ocp.args.PyTreeSave(state._replace(touched=())))
        blocked = time.perf_counter() - started
        manager.wait_until_finished()
    committed = time.perf_counter() - started
    return step_bytes(root / str(step)), blocked, committed


def step_bytes(step_dir: Path) -> int:
    """Bytes of all files of a step."""
    return sum(path.stat().st_size for path in step_dir.rglob("*") if path.is_file())
