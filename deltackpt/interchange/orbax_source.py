# SPDX-License-Identifier: Apache-2.0
"""A stock Orbax checkpoint, found and read whichever of Orbax's APIs wrote it.

Both APIs keep a pytree in a directory with a ``_METADATA`` file. It stands alone where a v0
``Checkpointer`` wrote it, as an item of a step where v0's ``CheckpointManager`` or any of v1 did.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import tree_util

from deltackpt.errors import (
    Damaged,
    DeltackptError,
    ForeignDirectory,
    OptionError,
    StepGone,
    StepNotFound,
    TemplateMismatch,
)
from deltackpt.format import names
from deltackpt.handlers import dense
from deltackpt.inspect import DenseItem, DenseLeaf
from deltackpt.inspect.dense import METADATA
from deltackpt.state import paths, touch_state
from deltackpt.tracking.optimizer import TrackState

#: Orbax's step names: a number, with zeros and a prefix where the user asked for them.
_STEP = re.compile(r"(?:.*_)?([0-9]+)")

_Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """A pytree that Orbax stored.

    Attributes:
      path: the directory with its metadata.
      step: the training step, where a directory around it says so.
    """

    path: Path
    step: int | None

    def read(self, template: Any = None) -> Any:
        """Restores it; nothing in it is changed.

        Args:
          template: the state's structure, with arrays or ``jax.ShapeDtypeStruct`` leaves whose
            shardings are used. A ``TouchState`` in it is not looked for, and the state of an
            optimizer may stand in the source without the ``TrackState`` around it.

        Returns:
          The state, with the template's TouchState; without a template nested dicts and lists
          of numpy arrays.

        Raises:
          TemplateMismatch: the template has other leaves, shapes or dtypes than the source.
          Damaged: the source cannot be read.
          StepGone: it changed while it was read.
        """
        before = _files(self.path)
        try:
            found = self._read(template)
        except DeltackptError:
            raise
        except Exception as error:
            self._raise_if_changed(before, error)
            raise Damaged(
                os.fspath(self.path),
                "a checkpoint that Orbax can restore",
                f"{type(error).__name__}: {error}",
                "import another step, or another copy of it",
            ) from error
        self._raise_if_changed(before)
        return found

    def _read(self, template: Any) -> Any:
        handler, path = dense.handler(), epath.Path(self.path)
        try:
            stored = handler.metadata(path)
            if template is None:
                args = dense.restore_args(None, stored)
                found = dense.restored(handler.restore(path, args=args), None, self.step or 0)
                return of_their_kinds(found, self._described)
            leaves = _leaves(stored.tree)
            wanted = _wanted(template, leaves, self.path)
            templates = {one.key: one.leaf for one in wanted}
            abstract = tree_util.tree_map_with_path(
                lambda path, leaf: templates.get(_key(path), _as_stored(leaf)),
                stored.tree,
                is_leaf=_is_leaf,
            )
            dense.check(abstract, stored.tree, self.step or 0)
            args = dense.restore_args(abstract, stored)
            found = dense.restored(handler.restore(path, args=args), abstract, self.step or 0)
        finally:
            handler.close()
        values = _leaves(found)
        return _filled(template, {one.position: values[one.key] for one in wanted})

    @property
    def _described(self) -> DenseItem:
        """Its leaves, without their numbers."""
        return DenseItem(self.path, digests=False, stands=self.path.is_dir)

    def _raise_if_changed(self, before: dict[str, Any], cause: Exception | None = None) -> None:
        if _files(self.path) != before:
            raise StepGone(
                f"{self.path}: expected it to stay while it was read, found its files changed or "
                "removed; import a step that nothing writes to or removes"
            ) from cause


def find(source: str | os.PathLike[str], *, item: str | None, step: int | None) -> Source:
    """Finds the pytree of a checkpoint directory.

    Args:
      source: a pytree, a step, or a directory of steps.
      item: name of the pytree in its step; None where there is one only.
      step: which of several steps; the newest by default.

    Raises:
      StepNotFound: there is no such directory, step or item.
      ForeignDirectory: it is no stock Orbax checkpoint, or not a finished one.
      OptionError: there are several items: name one.
    """
    path = Path(source).absolute()
    if not path.is_dir():
        raise StepNotFound(
            f"{path}: expected the directory of an Orbax checkpoint, found none; check the path"
        )
    if names.TEMPORARY in str(path):
        raise ForeignDirectory(
            f"{path}: expected a checkpoint that Orbax has committed, found the directory of a "
            "save that was cut off; import another step"
        )
    if not _is_pytree(path) and not _items(path):
        path = _step_of(path, step)
    if not _is_pytree(path):
        return Source(_item_of(path, item), _number(path))
    is_item = (path.parent / names.STEP_METADATA).is_file()
    return Source(path, _number(path.parent if is_item else path))


def of_their_kinds(state: Any, stored: Mapping[str, DenseLeaf]) -> Any:
    """Makes typed PRNG keys and Python's numbers of what a restore without a template gives.

    Args:
      state: nested dicts and lists, with arrays in the place of both.
      stored: leaves by their '/'-joined paths, which say what they are.
    """
    kinds = {
        name: (leaf.kind, leaf.prng_impl)
        for name, leaf in stored.items()
        if leaf.kind in ("key", "scalar")
    }

    def original(path: Any, leaf: Any) -> Any:
        kind, impl = kinds.get("/".join(_key(path)), ("", None))
        if kind == "key":
            return jax.random.wrap_key_data(leaf, impl=impl)
        return leaf.item() if kind == "scalar" else leaf

    return tree_util.tree_map_with_path(original, state)


def _step_of(root: Path, step: int | None) -> Path:
    steps = {
        number: path
        for path in sorted(root.iterdir())
        if (number := _number(path)) is not None and (_is_pytree(path) or _items(path))
    }
    if not steps:
        raise ForeignDirectory(
            f"{root}: expected an Orbax checkpoint or a directory of them, found no {METADATA} "
            "in it, in its items or in its steps; give the directory that Orbax wrote"
        )
    number = max(steps) if step is None else step
    if number not in steps:
        raise StepNotFound(
            f"{root}: expected step {number}, found {sorted(steps)}; import one of these"
        )
    return steps[number]


def _item_of(step_dir: Path, item: str | None) -> Path:
    found = _items(step_dir)
    if any((step_dir / name / names.manifest_name(0)).exists() for name in os.listdir(step_dir)):
        raise ForeignDirectory(
            f"{step_dir}: expected a checkpoint of stock Orbax, found one that deltackpt wrote; "
            "open its directory with deltackpt.CheckpointManager"
        )
    if item is None and len(found) > 1:
        raise OptionError(
            f"{step_dir}: expected one item that is a pytree, found {found}; name one of them"
        )
    if item is not None and item not in found:
        raise StepNotFound(f"{step_dir}: expected the item {item!r}, found {found}; name another")
    return step_dir / (item or found[0])


def _is_pytree(path: Path) -> bool:
    return (path / METADATA).is_file()


def _items(step_dir: Path) -> list[str]:
    """Names of the pytrees in a step; none where it is no step."""
    found = sorted(path.parent.name for path in step_dir.glob(f"*/{METADATA}"))
    if (step_dir / names.STEP_METADATA).is_file():
        return found
    # Orbax has not always written that file. A directory of steps has numbers in it.
    is_step = _number(step_dir) is not None and all(_STEP.fullmatch(name) is None for name in found)
    return found if is_step else []


def _number(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def _files(directory: Path) -> dict[str, Any]:
    """Sizes and times of all files, to see whether they stay as they are."""
    found = {}
    for folder, _, inside in os.walk(directory):
        for name in inside:
            path = Path(folder, name)
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found[os.fspath(path)] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found


# Templates. Leaves are matched by the keys that Orbax gives them.


class _Wanted(NamedTuple):
    """A leaf that a template asks for: its position in it, its key in the source, itself."""

    position: int
    key: _Key
    leaf: Any


def _wanted(template: Any, stored: Mapping[_Key, Any], path: Path) -> list[_Wanted]:
    """What a template asks for, by the keys of the leaves that are stored.

    Raises:
      TemplateMismatch: one of them holds leaves that the other lacks.
    """
    own = _asked_for(template)
    for keyed in (own, _asked_for(_untracked(template))):
        wanted = [one._replace(key=other.key) for one, other in zip(own, keyed, strict=True)]
        if all(one.key in stored for one in wanted):
            break
    else:
        wanted = own
    touch_keys = {_key(keys) for keys, _ in tree_util.tree_leaves_with_path(template)}
    keys = {one.key for one in wanted}
    missing, further = keys - stored.keys(), stored.keys() - keys - touch_keys
    if missing or further:
        raise TemplateMismatch(
            f"{path}: expected the leaves of the template, found that the checkpoint lacks\n"
            f"{_listed(missing)}\nand that it has besides\n{_listed(further)}\n"
            "give the state that was saved as the template"
        )
    return wanted


def _asked_for(template: Any) -> list[_Wanted]:
    flat = paths.flatten_with_paths(template, touch_state.is_touch_state)
    tracked = {i for place in touch_state.sites(flat) for i in place.positions}
    keyed = tree_util.tree_leaves_with_path(
        template, is_leaf=lambda node: paths.is_empty(node) or touch_state.is_touch_state(node)
    )
    return [
        _Wanted(i, _key(path), leaf)
        for i, (path, leaf) in enumerate(keyed)
        if i not in tracked and not paths.is_empty(leaf)
    ]


def _untracked(template: Any) -> Any:
    """A template in which the states of optimizers stand without the ``TrackState`` around."""

    def is_track_state(node: Any) -> bool:
        return isinstance(node, TrackState)

    return jax.tree.map(
        lambda node: node.inner if is_track_state(node) else node, template, is_leaf=is_track_state
    )


def _filled(template: Any, values: Mapping[int, Any]) -> Any:
    leaves, treedef = paths.flatten(template, touch_state.is_touch_state)
    for position, value in values.items():
        leaves[position] = value
    return tree_util.tree_unflatten(treedef, leaves)


def _leaves(tree: Any) -> dict[_Key, Any]:
    """The leaves of nested dicts and lists that hold something, by their keys."""
    found = tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf)
    return {_key(path): leaf for path, leaf in found if not paths.is_empty(leaf)}


def _is_leaf(node: Any) -> bool:
    return not isinstance(node, (dict, list, tuple)) or not node


def _as_stored(leaf: Any) -> Any:
    """What asks for a leaf that no template asks for: Orbax restores all or nothing."""
    if isinstance(leaf, ocp.metadata.StringMetadata):
        return ""
    if isinstance(leaf, ocp.metadata.ScalarMetadata):
        return dense.a_number(leaf)
    if isinstance(leaf, ocp.metadata.ArrayMetadata):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


def _key(path: Any) -> _Key:
    return ocp.tree.str_keypath(path)


def _listed(keys: Iterable[_Key]) -> str:
    return paths.listed("/".join(key) for key in keys)
