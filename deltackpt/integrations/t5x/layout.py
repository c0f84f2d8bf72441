# SPDX-License-Identifier: Apache-2.0
"""T5X's names: which of its leaves are tables and slots, and how it finds steps. Needs no t5x.

T5X finds what to resume by listing ``<model_dir>/checkpoint_<step>``. Each step of ours stands in
``<model_dir>/deltackpt/<step>``, and a symbolic link gives it T5X's name::

    <model_dir>/
      deltackpt/0/, deltackpt/1000/, ...   the directory of deltackpt.CheckpointManager
      checkpoint_0 -> deltackpt/0
      checkpoint_1000 -> deltackpt/1000

A link is made before its save is committed, so that T5X finds every committed step wherever the
process was killed. It leads nowhere where the save was cut off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import traverse_util

from deltackpt.format import globs
from deltackpt.state.choice import Tables
from deltackpt.state.groups import CodecOption
from deltackpt.storage import files

#: The directory of our steps in T5X's model directory.
ROOT = "deltackpt"
#: Of a T5X state dict: the parameters, and the optimizer's state.
_TARGET = "target/"
_STATE = "state/"
#: Statistics that T5X's Adafactor moves for every row at each step; its momentum ``m`` stays
#: zero until a row has a gradient.
_ALWAYS = frozenset({"v", "v_row", "v_col"})
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")


def tables_of(
    state: Mapping[str, Any],
    select: Sequence[str],
    *,
    codec: CodecOption = "raw",
    slot_codec: CodecOption = "raw",
) -> Tables:
    """The tables of a T5X state dict, with their slots.

    A slot is what a T5X optimizer keeps of a table below ``state/param_states/<table>/``, or what
    an optax optimizer keeps in a tree that has the names of the parameters, if its first axis is
    the table's. What is not found stays dense: whole, and right.

    Args:
      state: ``train_state.state_dict()`` with leaves that have a shape.
      select: path patterns of the tables.
      codec: how the tables' rows are stored, as for ``Tables``.
      slot_codec: how their slots' rows are stored.

    Example:
      >>> import jax.numpy as jnp
      >>> kept = {"v_row": jnp.zeros(4), "v_col": jnp.zeros(2), "v": jnp.zeros(1)}
      >>> state = {
      ...     "target": {"token_embedder": {"embedding": jnp.zeros((4, 2))}},
      ...     "state": {"param_states": {"token_embedder": {"embedding": kept}}},
      ... }
      >>> found = tables_of(state, ["target/**/embedding"])
      >>> {table: list(slots) for table, slots in found.slots.items()}, found.always
      ({'target/token_embedder/embedding': ['v_row']}, ['v_row'])
    """
    leaves: dict[str, Any] = traverse_util.flatten_dict(state, sep="/")
    params = {name.removeprefix(_TARGET) for name in leaves if name.startswith(_TARGET)}
    chosen = [
        param
        for param in sorted(params)
        if any(globs.matches(pattern, _TARGET + param) for pattern in select)
    ]
    mirrors = _mirrors(leaves, params)
    slots: dict[str, dict[str, str]] = {}
    for param in chosen:
        own = f"{_STATE}param_states/{param}/"
        kept = {name.removeprefix(own): name for name in leaves if name.startswith(own)}
        kept |= {mirror.removeprefix(_STATE): f"{mirror}/{param}" for mirror in mirrors}
        rows = leaves[_TARGET + param].shape[:1]
        slots[_TARGET + param] = {
            slot: name
            for slot, name in kept.items()
            if getattr(leaves[name], "shape", ())[:1] == rows
        }
    names = {slot for kept in slots.values() for slot in kept}
    return Tables(
        select=tuple(select),
        slots=slots,
        always=sorted(name for name in names if name.rpartition("/")[2] in _ALWAYS),
        codec=codec,
        slot_codec=slot_codec,
    )


def _mirrors(leaves: Mapping[str, Any], params: Collection[str]) -> list[str]:
    """Parts of the optimizer's state that have a leaf for every parameter, and no other leaf."""
    first = min(params, default="")
    ends = (name for name in leaves if name.startswith(_STATE) and name.endswith(f"/{first}"))
    found = []
    for mirror in (end.removesuffix(f"/{first}") for end in ends):
        below = {
            name.removeprefix(f"{mirror}/") for name in leaves if name.startswith(f"{mirror}/")
        }
        if below == params:
            found.append(mirror)
    return found


def model_dir_of(directory: str | os.PathLike[str]) -> Path:
    """The model directory where T5X may have given one of its checkpoints."""
    path = Path(directory)
    return path.parent if _CHECKPOINT.fullmatch(path.name) else path


class StepLinks:
    """T5X's names for the steps below ``<model_dir>/deltackpt``.

    Whatever else has a name of T5X's, such as a checkpoint of its own, is left alone.
    """

    def __init__(self, model_dir: str | os.PathLike[str]):
        """Touches nothing.

        Args:
          model_dir: T5X's model directory.
        """
        self.model_dir = Path(model_dir)

    @property
    def root(self) -> Path:
        """The directory of our steps."""
        return self.model_dir / ROOT

    def steps(self) -> list[int]:
        """Steps that have a link, ascending; they need not be committed."""
        return [step for step in self._named() if self._is_link(step)]

    def others(self) -> list[int]:
        """Steps whose name of T5X's is something else's, ascending: its own checkpoints."""
        return [
            step for step in self._named() if self._path(step).is_dir() and not self._is_link(step)
        ]

    def newest_of(self, steps: Collection[int]) -> int | None:
        """The newest of these steps that has a link; None where none has.

        Args:
          steps: the committed steps.
        """
        return max(set(self.steps()) & set(steps), default=None)

    def add(self, step: int) -> None:
        """Makes a step's link, durably; a name that is taken stays.

        Raises:
          StorageError: the store refused.
        """
        path = self._path(step)
        if os.path.lexists(path):
            return
        with files.typed_errors(path, "make a link"):
            path.symlink_to(f"{ROOT}/{step}")
            files.fsync_path(self.model_dir)

    def match(self, steps: Collection[int]) -> None:
        """Gives each of these steps a link, and removes those of others.

        Args:
          steps: the committed steps, and the one in flight.

        Raises:
          StorageError: the store refused.
        """
        for step in set(self.steps()) - set(steps):
            with files.typed_errors(self._path(step), "remove a link"):
                self._path(step).unlink(missing_ok=True)
        for step in steps:
            self.add(step)

    def _path(self, step: int) -> Path:
        return self.model_dir / f"checkpoint_{step}"

    def _is_link(self, step: int) -> bool:
        try:
            return os.readlink(self._path(step)) == f"{ROOT}/{step}"
        except OSError:  # No link; or the trainer beside this reader has removed it.
            return False

    def _named(self) -> list[int]:
        if not self.model_dir.is_dir():
            return []
        with files.typed_errors(self.model_dir, "list"):
            found = map(_CHECKPOINT.fullmatch, os.listdir(self.model_dir))
        return sorted(int(match[1]) for match in found if match)
