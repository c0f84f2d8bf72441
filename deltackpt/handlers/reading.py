# SPDX-License-Identifier: Apache-2.0
"""Dense leaves and further items of committed steps: read straight, or by Orbax's handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from deltackpt.errors import RestoreError, StorageError
from deltackpt.format import names
from deltackpt.handlers import dense
from deltackpt.handlers.dense_leaves import DenseLeaves
from deltackpt.ledger.steps import Steps
from deltackpt.reading import chains, orbax_values, saves
from deltackpt.reading.dense_values import DenseItem
from deltackpt.reading.saves import StoredSave
from deltackpt.restore.step_files import DenseFiles, ItemFiles
from deltackpt.restore.steps import DenseRead, Items
from deltackpt.storage.store import FileStore


class OrbaxItems:
    """The ``ItemReader`` of a manager."""

    def __init__(self, root: Steps, handlers: Mapping[str, Any]):
        """Reads nothing yet.

        Args:
          root: of the steps.
          handlers: of further items, by name.
        """
        self._root = root
        self._handlers = handlers

    def dense(
        self, step: int, abstract: dict[str, Any] | None, files: ItemFiles | None = None
    ) -> DenseRead:
        """As ``ItemReader.dense``."""
        if isinstance(files, DenseFiles):
            return DenseLeaves(files).restored(abstract, step)
        if files is None and (chain := self._of_blocks(step)) is not None:
            return chains.read_whole(
                chain, lambda chain: DenseLeaves(DenseItem(chain)).restored(abstract, step)
            )
        handler = dense.handler()
        with self._item_dir(step, names.DENSE_ITEM, files) as item_dir:
            metadata = handler.metadata(item_dir)
            if abstract is not None:
                dense.check(abstract, metadata.tree, step)
            args = dense.restore_args(abstract, metadata)
            leaves = dense.restored(handler.restore(item_dir, args=args), abstract, step)
        return DenseRead(leaves)

    def straight(
        self, step: int, abstract: dict[str, Any] | None
    ) -> Callable[[], DenseRead] | None:
        """As ``ItemReader.straight``: of a step with Orbax's item, where that lies in files."""
        at = self._root.at(step)
        if not isinstance(at.store, FileStore):
            return None
        try:
            save = saves.read_save(at, self._root.item)
            if save.head.dense_blocks is not None or "step" not in save.head.digests:
                return None
            values = orbax_values.of_save(save)
            leaves = DenseLeaves(DenseItem([save], lambda _: values))
            if not leaves.need_no_orbax(abstract, values):
                return None
        except (RestoreError, StorageError, LookupError, ValueError):
            return None  # Who checks all of it says what is wrong.

        def read() -> DenseRead:
            found = leaves.restored(abstract, step)
            values.check_rest()
            return found

        return read

    def some(self, step: int, keys: Collection[tuple[str, ...]]) -> dict[str, Any]:
        """Some dense leaves on the host, and others where that is no more work.

        Args:
          step: its number.
          keys: of leaves that the step has.
        """
        if (chain := self._of_blocks(step)) is None:
            return self.dense(step, None).leaves
        return chains.read_whole(
            chain, lambda chain: DenseLeaves(DenseItem(chain)).some(keys, step)
        )

    def abstract(self, step: int) -> dict[str, Any]:
        """Shapes and dtypes of the dense leaves of a step, read from metadata alone."""
        if (chain := self._of_blocks(step)) is not None:
            return chains.read_whole(chain, lambda chain: DenseLeaves(DenseItem(chain)).abstract())
        with self._item_dir(step, names.DENSE_ITEM) as item_dir:
            return dense.abstract(dense.handler().metadata(item_dir))

    def items(self, step: int, items: Items, files: ItemFiles | None = None) -> Mapping[str, Any]:
        """As ``ItemReader.items``."""
        return {name: self._item(step, name, args, files) for name, args in sorted(items.items())}

    def _item(self, step: int, name: str, args: Any, files: ItemFiles | None) -> Any:
        handler = self._handlers[name]
        if args is None:
            _, kind = ocp.args.get_registered_args_cls(handler)
            args = kind()
        with self._item_dir(step, name, files) as item_dir:
            return handler.restore(item_dir, args=args)

    def _of_blocks(self, step: int) -> Sequence[StoredSave] | None:
        """The chain of a delta with dense leaves as blocks; None of a step that has the item."""
        step_dir, item = self._root.at(step), self._root.item
        if saves.read_save(step_dir, item).head.dense_blocks is None:
            return None
        return chains.read_chain(step_dir, item)

    @contextlib.contextmanager
    def _item_dir(
        self, step: int, name: str, files: ItemFiles | None = None
    ) -> Iterator[epath.Path]:
        if files is not None:
            yield epath.Path(files.folder(name))
            return
        with self._root.local(step, name) as item_dir:
            yield epath.Path(item_dir)
