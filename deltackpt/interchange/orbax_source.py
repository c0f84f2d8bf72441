# SPDX-License-Identifier: Apache-2.0
"""Finds and reads stock Orbax checkpoints written by either of Orbax's APIs.

Both APIs store a pytree in a directory with a ``_METADATA`` file. A v0 ``Checkpointer`` writes that
directory on its own; v0's ``CheckpointManager`` and v1 write it as an item of a step.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

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
from deltackpt.format import naming
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.handlers import orbax_dense
from deltackpt.inspect import DenseItem, DenseLeaf
from deltackpt.inspect.dense_items import METADATA
from deltackpt.reading.orbax_values import item_values
from deltackpt.state import paths, placement, touch_state
from deltackpt.storage import posix
from deltackpt.storage.store import store_path
from deltackpt.tracking.optimizer import TrackState

#: Orbax step names: a number, optionally with leading zeros and a prefix.
_STEP = re.compile(r"(?:.*_)?([0-9]+)")

_Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class OrbaxSource:
    """A pytree stored by Orbax; ``step`` if an enclosing directory names it."""

    path: Path
    step: int | None

    def read(self, template: PyTree = None) -> PyTree:
        """Restores the pytree; does not modify the source.

        The source need not hold the template's ``TouchState``, nor the ``TrackState`` around an
        optimizer state. Without a template, returns nested dicts and lists of numpy arrays.
        """
        before, template = _files(self.path), placement.resolved(template)
        try:
            with placement.neutral():
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

    def _read(self, template: PyTree) -> PyTree:
        path = epath.Path(self.path)
        if template is None:
            found = orbax_dense.from_folder(path, None, self.step or 0)
            item = item_values(store_path(self.path), None)
            described = DenseItem(self.path, lambda: item, exists=self.path.is_dir)
            return with_numbers(found, described)
        handler = orbax_dense.handler()
        try:
            stored = handler.metadata(path)
            leaves = _leaves(stored.tree)
            wanted = _wanted(template, leaves, self.path)
            templates = {one.key: one.leaf for one in wanted}
            abstract = tree_util.tree_map_with_path(
                lambda path, leaf: templates.get(_key(path), _as_stored(leaf)),
                stored.tree,
                is_leaf=_is_leaf,
            )
            orbax_dense.check(abstract, orbax_dense.described(stored), self.step or 0)
            args = orbax_dense.restore_args(abstract, stored)
            found = orbax_dense.restored(handler.restore(path, args=args), abstract, self.step or 0)
        finally:
            handler.close()
        values = _leaves(found)
        return _filled(template, {one.position: values[one.key] for one in wanted})

    def _raise_if_changed(
        self, before: dict[str, tuple[int, ...]], cause: Exception | None = None
    ) -> None:
        if _files(self.path) != before:
            raise StepGone(
                f"{self.path}: expected it not to change while it was read, found files changed or "
                "removed; import a step that no other process changes or removes"
            ) from cause


def locate(source: str | os.PathLike[str], *, item: str | None, step: int | None) -> OrbaxSource:
    """Finds the pytree of a pytree, a step (the pytree ``item``) or a directory of steps.

    ``item`` may be None if there is only one; ``step`` selects one of several, by default the
    newest.
    """
    path = posix.user_path(source)
    if not path.is_dir():
        raise StepNotFound(
            f"{path}: expected the directory of an Orbax checkpoint, found none; check the path"
        )
    if naming.TEMPORARY in str(path):
        raise ForeignDirectory(
            f"{path}: expected a committed Orbax checkpoint, found the directory of an interrupted "
            "save; import another step"
        )
    if not _is_pytree(path) and not _items(path):
        path = _step_of(path, step)
    if not _is_pytree(path):
        return OrbaxSource(_item_of(path, item), _number(path))
    is_item = (path.parent / naming.STEP_METADATA).is_file()
    return OrbaxSource(path, _number(path.parent if is_item else path))


def with_numbers(state: PyTree, stored: Mapping[str, DenseLeaf]) -> PyTree:
    """Converts the arrays that ``stored`` records as scalars to Python numbers."""
    scalars = {name for name, leaf in stored.items() if leaf.kind == "scalar"}

    def original(path: tree_util.KeyPath, leaf: Leaf) -> Leaf:
        return leaf.item() if "/".join(_key(path)) in scalars else leaf

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
            "in it, in its items or in its steps; pass the directory that Orbax wrote"
        )
    number = max(steps) if step is None else step
    if number not in steps:
        raise StepNotFound(
            f"{root}: expected step {number}, found {sorted(steps)}; import one of these"
        )
    return steps[number]


def _item_of(step_dir: Path, item: str | None) -> Path:
    found = _items(step_dir)
    if any((step_dir / name / naming.manifest_name(0)).exists() for name in os.listdir(step_dir)):
        raise ForeignDirectory(
            f"{step_dir}: expected a stock Orbax checkpoint, found one written by deltackpt; open "
            "its directory with deltackpt.CheckpointManager"
        )
    if item is None and len(found) > 1:
        raise OptionError(
            f"{step_dir}: expected one item that is a pytree, found {found}; pass item= with one "
            "of them"
        )
    if item is not None and item not in found:
        raise StepNotFound(
            f"{step_dir}: expected the item {item!r}, found {found}; pass one of them"
        )
    return step_dir / (item or found[0])


def _is_pytree(path: Path) -> bool:
    return (path / METADATA).is_file()


def _items(step_dir: Path) -> list[str]:
    """Returns the names of the pytrees in a step; empty if it is not a step."""
    found = sorted(path.parent.name for path in step_dir.glob(f"*/{METADATA}"))
    if (step_dir / naming.STEP_METADATA).is_file():
        return found
    # Older Orbax versions did not write that file. A directory of steps contains numbered names.
    is_step = _number(step_dir) is not None and all(_STEP.fullmatch(name) is None for name in found)
    return found if is_step else []


def _number(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def _files(directory: Path) -> dict[str, tuple[int, ...]]:
    """Returns sizes and times of all files, to detect changes."""
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


# Templates: leaves are matched by the keys that Orbax gives them.


class _RequestedLeaf(NamedTuple):
    """A leaf requested by a template: its position there, its key in the source, the leaf."""

    position: int
    key: _Key
    leaf: Leaf


def _wanted(template: PyTree, stored: Mapping[_Key, object], path: Path) -> list[_RequestedLeaf]:
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
            f"{_listed(missing)}\nand that it also has\n{_listed(further)}\n"
            "pass the state that was saved as the template"
        )
    return wanted


def _asked_for(template: PyTree) -> list[_RequestedLeaf]:
    flat = paths.flatten_with_paths(template, touch_state.is_touch_state)
    tracked = {i for place in touch_state.sites(flat) for i in place.positions}
    keyed = tree_util.tree_leaves_with_path(
        template, is_leaf=lambda node: paths.is_empty(node) or touch_state.is_touch_state(node)
    )
    return [
        _RequestedLeaf(i, _key(path), leaf)
        for i, (path, leaf) in enumerate(keyed)
        if i not in tracked and not paths.is_empty(leaf)
    ]


def _untracked(template: PyTree) -> PyTree:
    """Returns the template with optimizer states unwrapped from their ``TrackState``."""

    def is_track_state(node: object) -> bool:
        return isinstance(node, TrackState)

    return jax.tree.map(
        lambda node: node.inner if is_track_state(node) else node, template, is_leaf=is_track_state
    )


def _filled(template: PyTree, values: Mapping[int, object]) -> PyTree:
    leaves, treedef = paths.flatten(template, touch_state.is_touch_state)
    for position, value in values.items():
        leaves[position] = value
    return tree_util.tree_unflatten(treedef, leaves)


def _leaves(tree: PyTree) -> dict[_Key, Leaf]:
    """Returns the non-empty leaves of nested dicts and lists, by key."""
    found = tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf)
    return {_key(path): leaf for path, leaf in found if not paths.is_empty(leaf)}


def _is_leaf(node: object) -> bool:
    return not isinstance(node, (dict, list, tuple)) or not node


def _as_stored(leaf: object) -> Leaf:
    """Returns requests for the other leaves: Orbax restores all or nothing."""
    if isinstance(leaf, ocp.metadata.StringMetadata):
        return ""
    if isinstance(leaf, ocp.metadata.ScalarMetadata):
        return orbax_dense.a_number(leaf)
    if isinstance(leaf, ocp.metadata.ArrayMetadata):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


def _key(path: tree_util.KeyPath) -> _Key:
    return ocp.tree.str_keypath(path)


def _listed(keys: Iterable[_Key]) -> str:
    return paths.listed("/".join(key) for key in keys)
