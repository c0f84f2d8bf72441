# SPDX-License-Identifier: Apache-2.0
"""Checks that a chain contains all dense leaves that it stores as blocks.

Each save may be intact by itself and still lack what a later one needs, for example if the base was
replaced by another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deltackpt.errors import Damaged
from deltackpt.format.dense_blocks import Key
from deltackpt.reading import orbax_values, stored_dense
from deltackpt.reading.orbax_values import OrbaxValues
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stored_dense import BaseItem, DensePlan, DenseShard
from deltackpt.storage import ocdbt
from deltackpt.storage.ocdbt import ZARRAY


class DenseChain(NamedTuple):
    """The dense leaves of a chain's last save.

    Attributes:
      name: name of that save in errors.
      sources: blocks of the deltas, newest first; empty if the last save has Orbax's item.
      base: the save that the deltas apply to; None if the chain has no base.
      missing: values that the deltas do not complete, and their bytes: the base must have them.
    """

    name: str
    sources: list[list[DenseShard]]
    base: StoredSave | None
    missing: dict[Key, int]

    @classmethod
    def of(cls, saves: Sequence[StoredSave]) -> DenseChain:
        """Analyses a chain, base first; reads block indices, but no data.

        Raises:
          Damaged: its records are inconsistent.
        """
        name = saves[-1].name
        sources, base = stored_dense.shards_of(saves)
        missing: dict[Key, int] = {}
        if saves[-1].needs_older_dense:
            item = None if base is None else BaseItem(base)
            plan = DensePlan.sized(sources, name, lambda key: True, item)
            missing = {key: value.nbytes for key, value in plan.missing.items()}
        return cls(name, sources, base, missing)

    def check(self) -> None:
        """Checks that the base has the missing values, and that every array is complete.

        Assumes that the files of the base match its digests.

        Raises:
          Damaged: a value is missing; the error names the base's item or the step.
        """
        if not self.sources:
            return
        item = self._item() if self.missing else None
        found = stored_dense.values_of(self.sources, item, self.name, _describes)
        keys = {
            value.key
            for source in self.sources[0]
            for value in source.record.values
            if not value.file
        }
        check_keys(self.name, keys, found.values)

    def _item(self) -> OrbaxValues:
        """The item of the base; checks that it has the missing values."""
        if self.base is None:
            shown = ", ".join(key for _, key in list(self.missing)[:3])
            raise Damaged(self.name, f"dense leaves down to a base: {shown}", "none")
        known = orbax_values.of_save(self.base)
        item = OrbaxValues(known.at, None, known.name)
        for key, nbytes in self.missing.items():
            if (found := item.nbytes(key)) != nbytes:
                expected = f"{nbytes} bytes of {key[1]}, which {self.name} builds on"
                raise Damaged(item.name, expected, "none" if found is None else f"{found}")
        return item


def check_keys(name: str, keys: Iterable[str], values: Mapping[str, memoryview]) -> None:
    """Checks that the values are exactly those that the arrays' metadata implies.

    Args:
      name: name of the step in errors.
      keys: all keys of the database.
      values: values by key, including the Zarr metadata of every array.

    Raises:
      Damaged: a value is missing, or there are unexpected ones.
    """
    described = {
        key.removesuffix(f"/{ZARRAY}"): bytes(data)
        for key, data in values.items()
        if _describes(key)
    }
    try:
        differing = sorted(ocdbt.implied(described).symmetric_difference(keys))
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise Damaged(name, "descriptions of arrays", f"{type(error).__name__}: {error}") from error
    if differing:
        expected = "the values of dense leaves that their arrays imply"
        raise Damaged(name, expected, f"a difference in {', '.join(differing[:3])}")


def _describes(key: str) -> bool:
    return key.endswith(f"/{ZARRAY}")
