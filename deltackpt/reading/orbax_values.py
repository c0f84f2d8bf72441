# SPDX-License-Identifier: Apache-2.0
"""The dense item of a base, as Orbax laid it out: values of its database and files, verified.

Orbax's data carries no checksum: before the first value is read, the files of the item are checked
against the digests of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts

from deltackpt.errors import Damaged
from deltackpt.format import names
from deltackpt.reading.saves import StoredSave, check_dense
from deltackpt.storage import digests
from deltackpt.storage.kv_store import reachable
from deltackpt.storage.store import Spot

#: Values that are asked for at once.
_AT_ONCE = 64


class OrbaxValues:
    """Values and files of an item."""

    def __init__(self, step_dir: Spot, item_dir: Spot, *, checked: bool):
        """Reads nothing yet.

        Args:
          step_dir: whose digests cover the item.
          item_dir: of the item.
          checked: whether there are digests.
        """
        self._step_dir = step_dir
        self._item_dir = item_dir
        self._checked = not checked
        self._opened: Any = None

    @property
    def name(self) -> str:
        """How errors name it."""
        return self._item_dir.shown(2)

    def keys(self) -> list[tuple[bool, str]]:
        """All keys of the database, and the files beside it."""
        found = [(False, key.decode()) for key in self._store().list().result()]
        return [*((True, name) for name in self._files()), *found]

    def read(self, keys: Sequence[tuple[bool, str]]) -> Mapping[tuple[bool, str], memoryview]:
        """The values of some keys; those that there are.

        Raises:
          Damaged: a file of the item is missing or altered.
        """
        self._check()
        found: dict[tuple[bool, str], memoryview] = {}
        present = set(self._files())
        for file, key in keys:
            if file and key in present:
                found[True, key] = memoryview((self._item_dir / key).read())
        wanted = [key for file, key in keys if not file]
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            reads = [self._store().read(key) for key in some]
            for key, pending in zip(some, reads, strict=True):
                try:
                    value = pending.result()
                except (ValueError, OSError) as error:
                    raise Damaged(self.name, f"a value of {key}", str(error)) from error
                if value.state == "value":
                    found[False, key] = memoryview(value.value)
        return found

    def _files(self) -> list[str]:
        """Files beside the database."""
        return [
            name
            for name in self._item_dir.keys()
            if not (name.startswith(("d/", "ocdbt.process_", "nodes/")) or name == "manifest.ocdbt")
        ]

    def _check(self) -> None:
        if self._checked:
            return
        prefix = f"{self._item_dir.below(self._step_dir)}/"
        damage = digests.check_step_files(
            self._step_dir, wanted=lambda name: name.startswith(prefix)
        )
        if damage:
            raise damage[0]
        self._checked = True

    def _store(self) -> Any:
        if self._opened is None:
            found = reachable(self._item_dir)
            base = dict(found.spec)
            base["path"] = f"{base.get('path', '').rstrip('/')}/" if base.get("path") else ""
            spec = {"driver": "ocdbt", "base": base}
            try:
                self._opened = ts.KvStore.open(spec, context=found.context).result()
            except (ValueError, OSError) as error:
                raise Damaged(self.name, "a database of dense leaves", str(error)) from error
        return self._opened


def of_save(save: StoredSave, *, verified: bool = True) -> OrbaxValues:
    """The dense item of a save that has one.

    Args:
      save: the save.
      verified: whether its files are, before the first value is read.

    Raises:
      Damaged, ForeignDirectory: as ``check_dense``.
    """
    beside = save.item_dir.parent / names.DENSE_ITEM
    if save.compacted and beside.is_dir():
        return OrbaxValues(save.item_dir.parent, beside, checked=verified)
    check_dense(save)
    checked = verified and "step" in save.head.digests
    return OrbaxValues(save.step_dir, save.step_dir / names.DENSE_ITEM, checked=checked)
