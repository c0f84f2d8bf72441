# SPDX-License-Identifier: Apache-2.0
"""Reads dense leaves and additional items of committed steps, directly or with Orbax's handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from deltackpt import coordination
from deltackpt.errors import RestoreError, StorageError
from deltackpt.format import naming
from deltackpt.handlers import orbax_dense
from deltackpt.handlers.dense_leaves import DenseRead, StoredLeaves
from deltackpt.handlers.items import Items
from deltackpt.lazy_import import ocp
from deltackpt.ledger.steps import Steps
from deltackpt.reading import chains, orbax_values, stored_saves
from deltackpt.reading.orbax_values import OrbaxValues
from deltackpt.reading.stored_dense import StoredItem
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.restore.sources import DenseFiles, ItemFiles
from deltackpt.storage.store import FileStore, store_path


class OrbaxItems:
    """Reads items other than tables. All processes make the same calls in the same order."""

    def __init__(self, root: Steps, handlers: Mapping[str, Any]):
        """Reads nothing yet; ``handlers`` are those of additional items."""
        self._root = root
        self._handlers = handlers

    def dense(
        self,
        step: int,
        abstract: dict[str, Any] | None,
        files: ItemFiles | None = None,
        chain: Sequence[StoredSave] | None = None,
    ) -> DenseRead:
        """Reads the dense leaves of a committed step, with the shardings of ``abstract``.

        None reads everything as numpy arrays. All processes must call it; ``files`` replaces
        storage. ``chain`` is the step's if it is known.
        """
        if isinstance(files, DenseFiles):
            return _leaves(files, step).restored(abstract, step)
        if files is None and (chain := self._of_blocks(step, chain)) is not None:
            return chains.read_whole(
                chain, lambda chain: _leaves(StoredItem(chain), step).restored(abstract, step)
            )
        with self._item_dir(step, naming.DENSE_ITEM, files) as item_dir:
            if coordination.process_count() == 1:  # With several, Orbax's handler synchronizes.
                save = stored_saves.read_save(self._root.at(step), self._root.item)
                name = f"{save.name}/{naming.DENSE_ITEM}"
                values = OrbaxValues(store_path(Path(item_dir)), None, name)
                if (leaves := _straight(save, values, abstract, step)) is not None:
                    return leaves.restored(abstract, step)
            return DenseRead(orbax_dense.from_folder(item_dir, abstract, step))

    def straight(
        self, step: int, abstract: dict[str, Any] | None, *, verify: bool = True
    ) -> Callable[[], DenseRead] | None:
        """Returns a reader of the dense leaves of an Orbax item that needs no other process.

        None if the caller must verify the files and call ``dense``. ``verify``: the reader verifies
        them.
        """
        at = self._root.at(step)
        try:
            save = stored_saves.read_save(at, self._root.item)
            if save.head.dense_blocks is not None or "step" not in save.head.digests:
                return None
            if verify and at.kvstore() is None:
                # A look at the database would download it, too; the download is verified.
                return lambda: self.dense(step, abstract)
            values = orbax_values.open_values(save)
        except (RestoreError, StorageError):
            return None  # The full check reports the error.
        if not verify:
            values = values.at_copy(values.at, verify=False)
        leaves = _straight(save, values, abstract, step)
        if leaves is None:
            return None
        if isinstance(at.store, FileStore):
            return lambda: _read(leaves, values, abstract, step)

        def read() -> DenseRead:
            # One request per file, instead of one per value.
            with self._item_dir(step, naming.DENSE_ITEM) as item_dir:
                copy = values.at_copy(store_path(Path(item_dir)), verify=verify)
                own = _leaves(StoredItem([save], lambda _: copy), step)
                return _read(own, copy, abstract, step)

        return read

    def some(self, step: int, keys: Collection[tuple[str, ...]]) -> dict[str, Any]:
        """Returns some dense leaves on the host, verified; all if the item has no digests."""
        if (chain := self._own(step)) is None:
            return self.dense(step, None).leaves
        return chains.read_whole(
            chain, lambda chain: _leaves(StoredItem(chain), step).restored(None, step, keys)
        ).leaves

    def abstract(self, step: int) -> dict[str, Any]:
        """Returns shapes and dtypes of the dense leaves of a step, from metadata alone."""
        if (chain := self._own(step)) is not None:
            return chains.read_whole(
                chain, lambda chain: _leaves(StoredItem(chain), step).abstract()
            )
        with self._item_dir(step, naming.DENSE_ITEM) as item_dir:
            return orbax_dense.abstract(orbax_dense.handler().metadata(item_dir))

    def items(self, step: int, items: Items, files: ItemFiles | None = None) -> Mapping[str, Any]:
        """Reads additional items that a committed step holds, with all other processes."""
        return {name: self._item(step, name, args, files) for name, args in sorted(items.items())}

    def _item(self, step: int, name: str, args: Any, files: ItemFiles | None) -> Any:
        handler = self._handlers[name]
        if args is None:
            _, kind = ocp.args.get_registered_args_cls(handler)
            args = kind()
        with self._item_dir(step, name, files) as item_dir:
            return handler.restore(item_dir, args=args)

    def _of_blocks(
        self, step: int, chain: Sequence[StoredSave] | None = None
    ) -> Sequence[StoredSave] | None:
        """Returns the saves with the dense leaves of a delta's shards; None for Orbax's item."""
        step_dir, item = self._root.at(step), self._root.item
        save = stored_saves.read_save(step_dir, item)
        if save.head.dense_blocks is None:
            stored_saves.check_dense(save)
            return None
        if not save.needs_older_dense:
            return [save]
        return chain or chains.read_chain(step_dir, item)

    def _own(self, step: int) -> Sequence[StoredSave] | None:
        """Returns the chain with a step's dense leaves; None if it is another manager's."""
        if (chain := self._of_blocks(step)) is not None:
            return chain
        save = stored_saves.read_save(self._root.at(step), self._root.item)
        return [save] if "step" in save.head.digests else None

    @contextlib.contextmanager
    def _item_dir(
        self, step: int, name: str, files: ItemFiles | None = None
    ) -> Iterator[epath.Path]:
        if files is not None:
            yield epath.Path(files.folder(name))
            return
        with self._root.local(step, name) as item_dir:
            yield epath.Path(item_dir)


def _leaves(item: StoredItem | DenseFiles, step: int) -> StoredLeaves:
    return StoredLeaves(item, f"{step}/{naming.DENSE_ITEM}")


def _read(
    leaves: StoredLeaves, values: OrbaxValues, abstract: dict[str, Any] | None, step: int
) -> DenseRead:
    """Reads leaves from an item, and verifies its other files if digests cover them."""
    found = leaves.restored(abstract, step)
    values.check_rest()
    return found


def _straight(
    save: StoredSave, values: OrbaxValues, abstract: dict[str, Any] | None, step: int
) -> StoredLeaves | None:
    """Returns a reader of a save's Orbax item if nearly all of it can be read without Orbax."""
    try:
        leaves = _leaves(StoredItem([save], lambda _: values), step)
        return leaves if leaves.need_no_orbax(abstract, values) else None
    except (RestoreError, StorageError, LookupError, ValueError):
        return None  # Orbax, or a full check, reports the error.
