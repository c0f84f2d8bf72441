# SPDX-License-Identifier: Apache-2.0
"""The dense item of a base, as Orbax laid it out: values of its database and files, verified.

Orbax's data carries no checksum: before the first value is read, the files of the item are checked
against the digests of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorstore as ts

from deltackpt.errors import Damaged
from deltackpt.format import names
from deltackpt.reading.saves import StoredSave, check_dense
from deltackpt.storage import digests
from deltackpt.storage.kv_store import reachable
from deltackpt.storage.store import Spot

#: Files of the item that the database consists of begin so.
_OF_DATABASE = ("d/", names.DENSE_NODES, "ocdbt.process_", "manifest.ocdbt")
#: Values that are asked for at once.
_AT_ONCE = 64


class OrbaxValues:
    """Values and files of an item."""

    def __init__(self, item_dir: Spot, damage: Callable[[], Sequence[Damaged]] | None):
        """Reads nothing yet.

        Args:
          item_dir: of the item.
          damage: what is wrong with its files; called before the first value is read. None where no
            digests cover it.
        """
        self._item_dir = item_dir
        self._damage = damage
        self._opened: Any = None

    @property
    def at(self) -> Spot:
        """Where it is."""
        return self._item_dir

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
        return [name for name in self._item_dir.keys() if not name.startswith(_OF_DATABASE)]

    def _check(self) -> None:
        if self._damage is None:
            return
        for damage in self._damage():
            raise damage
        self._damage = None

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


def of_save(save: StoredSave) -> OrbaxValues:
    """The dense item of a save that has one.

    Raises:
      Damaged, ForeignDirectory: as ``check_dense``.
    """
    check_dense(save)
    if names.DENSE_ITEM in save.head.digests:
        return OrbaxValues(save.item_dir / names.DENSE_ITEM, lambda: _damage_of_item(save))
    covered = "step" in save.head.digests
    if save.compacted:  # It says nothing of the step that it stands for.
        covered = (save.step_dir / names.STEP_DIGESTS).is_file()
    damage = (lambda: _damage_of_step(save.step_dir)) if covered else None
    return OrbaxValues(save.step_dir / names.DENSE_ITEM, damage)


def _damage_of_step(step_dir: Spot) -> list[Damaged]:
    """What is wrong with the item of a step."""
    return digests.check_step_files(step_dir, wanted=_is_dense)


def _damage_of_item(save: StoredSave) -> list[Damaged]:
    """What is wrong with the item in a compacted base."""
    known = digests.read_item_digests(save.item_dir, save.head)
    files = {name: known.digest(name) for name in known.files if _is_dense(name)}
    return digests.check_files(save.item_dir, files, shown=save.name)


def _is_dense(name: str) -> bool:
    """Whether a path is of the item of the dense leaves."""
    return name.startswith(f"{names.DENSE_ITEM}/")
