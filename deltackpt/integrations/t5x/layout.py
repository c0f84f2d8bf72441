# SPDX-License-Identifier: Apache-2.0
"""T5X names: which leaves are tables and slots, and how T5X finds steps. Does not need t5x.

T5X lists ``<model_dir>/checkpoint_<step>`` to find what to resume. deltackpt stores each step in
``<model_dir>/deltackpt/<step>`` and adds a symbolic link with T5X's name::

    <model_dir>/
      deltackpt/0/, deltackpt/1000/, ...   the directory of deltackpt.CheckpointManager
      checkpoint_0 -> deltackpt/0
      checkpoint_1000 -> deltackpt/1000

A link is created before its save commits, so T5X finds every committed step even if the process is
killed. After an interrupted save the link dangles.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from flax import traverse_util

from deltackpt.errors import UnsupportedRoot
from deltackpt.format import naming
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.state.groups import CodecOption
from deltackpt.state.tables import Tables
from deltackpt.storage import posix
from deltackpt.storage.posix import fsync_path

#: The checkpoint directory below T5X's model directory.
ROOT = "deltackpt"
#: Keys of a T5X state dict: the parameters, and the optimizer state.
_TARGET = "target/"
_STATE = "state/"
#: Statistics that T5X's Adafactor updates for every row at each step. Its momentum ``m`` stays zero
#: until a row has a gradient.
_ALWAYS = frozenset({"v", "v_row", "v_col"})
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")


def tables_of(
    state: Mapping[str, PyTree],
    select: Sequence[str],
    *,
    codec: CodecOption = "raw",
    slot_codec: CodecOption = "raw",
) -> Tables:
    """Finds the tables of a T5X state dict, with their slots.

    A slot is a leaf of the optimizer state whose first axis is the table's. T5X optimizers keep it
    below ``state/param_states/<table>/``; optax optimizers keep it in a tree that mirrors the
    parameter names. A leaf that is not recognized is saved as a dense leaf: correct, but whole at
    every save.

    Args:
      state: ``train_state.state_dict()``; its leaves must have a shape.
      select: path patterns of the tables.
      codec: codec of the tables' rows, as for ``Tables``.
      slot_codec: codec of the slots' rows.

    Examples:
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
    leaves: dict[str, Leaf] = traverse_util.flatten_dict(state, sep="/")
    params = {name.removeprefix(_TARGET) for name in leaves if name.startswith(_TARGET)}
    chosen = [
        param
        for param in sorted(params)
        if any(naming.matches(pattern, _TARGET + param) for pattern in select)
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


def _mirrors(leaves: Mapping[str, Leaf], params: Collection[str]) -> list[str]:
    """Subtrees of the optimizer state with exactly one leaf per parameter."""
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
    """Returns the model directory; ``directory`` may be one of its checkpoints, but no URL."""
    if "://" in os.fspath(directory):
        raise UnsupportedRoot(
            f"{os.fspath(directory)}: expected a model directory in a file system, found a URL; "
            "T5X finds deltackpt steps by symbolic links, which object stores do not support. Set "
            "MODEL_DIR to a local or network directory"
        )
    path = Path(directory)
    return path.parent if _CHECKPOINT.fullmatch(path.name) else path


class StepLinks:
    """Manages the names of steps of a T5X model directory; leaves T5X's own checkpoints alone."""

    def __init__(self, model_dir: str | os.PathLike[str]):
        self.model_dir = Path(model_dir)

    @property
    def root(self) -> Path:
        """The checkpoint directory below the model directory."""
        return self.model_dir / ROOT

    def steps(self) -> list[int]:
        """Returns the steps that have a link, ascending; they need not be committed."""
        return [step for step in self._named() if self._is_link(step)]

    def others(self) -> list[int]:
        """Returns the steps that T5X itself wrote, whose names are not these links, ascending."""
        return [
            step for step in self._named() if self._path(step).is_dir() and not self._is_link(step)
        ]

    def newest_of(self, steps: Collection[int]) -> int | None:
        """Returns the newest of these steps that has a link, or None."""
        return max(set(self.steps()) & set(steps), default=None)

    def add(self, step: int) -> None:
        """Creates a step's link durably; an existing name is kept."""
        path = self._path(step)
        if os.path.lexists(path):
            return
        with posix.typed_errors(path, "make a link"):
            path.symlink_to(f"{ROOT}/{step}")
            fsync_path(self.model_dir)

    def match(self, steps: Collection[int]) -> None:
        """Links these steps, the committed ones and the one in flight; removes other links."""
        for step in set(self.steps()) - set(steps):
            with posix.typed_errors(self._path(step), "remove a link"):
                self._path(step).unlink(missing_ok=True)
        for step in steps:
            self.add(step)

    def _path(self, step: int) -> Path:
        return self.model_dir / f"checkpoint_{step}"

    def _is_link(self, step: int) -> bool:
        try:
            return os.readlink(self._path(step)) == f"{ROOT}/{step}"
        except OSError:  # Not a link, or the trainer removed it concurrently.
            return False

    def _named(self) -> list[int]:
        if not self.model_dir.is_dir():
            return []
        with posix.typed_errors(self.model_dir, "list"):
            found = map(_CHECKPOINT.fullmatch, os.listdir(self.model_dir))
        return sorted(int(match[1]) for match in found if match)
