# SPDX-License-Identifier: Apache-2.0
"""Whether a chain completes the dense leaves of a step that it holds as blocks.

Each save may be as it was written, and still lack what a later one goes on from: another base in
the place of its own, or a delta that was taken against what nobody has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deltackpt.errors import Damaged
from deltackpt.format.dense_blocks import Key
from deltackpt.reading import dense_values, orbax_values
from deltackpt.reading.dense_values import PartSource
from deltackpt.reading.orbax_values import OrbaxValues
from deltackpt.reading.saves import StoredSave
from deltackpt.storage import ocdbt
from deltackpt.storage.ocdbt import ZARRAY


class DenseChain(NamedTuple):
    """What a chain holds of the dense leaves of its last save.

    Attributes:
      name: how errors name that save.
      sources: blocks of its deltas, newest first; none where the last save has Orbax's item.
      base: the save that they go on from; None where the chain ends in a delta.
      missing: values that no delta completes, and their bytes: the item of the base has them.
    """

    name: str
    sources: list[list[PartSource]]
    base: StoredSave | None
    missing: dict[Key, int]

    @classmethod
    def of(cls, saves: Sequence[StoredSave]) -> DenseChain:
        """A chain, base first; row numbers are read, and no codes.

        Raises:
          Damaged: what it says cannot be.
        """
        name = saves[-1].name
        sources, base = dense_values.sources_of(saves)
        missing = dense_values.missing(sources, base, name) if sources else {}
        return cls(name, sources, base, missing)

    def check(self) -> None:
        """Checks that the base has what is missing, and that the step has all that it describes.

        The files of the base are taken to be as its digests say.

        Raises:
          Damaged: it has not; the item of the base is named, or the step.
        """
        if not self.sources:
            return
        item = self._item() if self.missing else None
        found = dense_values.values_of(self.sources, item, self.name, _describes)
        keys = {
            value.key
            for source in self.sources[0]
            for value in source.record.values
            if not value.file
        }
        check_keys(self.name, keys, found.values)

    def _item(self) -> OrbaxValues:
        """The item of the base, which has what is missing."""
        if self.base is None:
            shown = ", ".join(key for _, key in list(self.missing)[:3])
            raise Damaged(self.name, f"dense leaves down to a base: {shown}", "none")
        known = orbax_values.of_save(self.base)
        item = OrbaxValues(known.at, None, known.name)
        for key, nbytes in self.missing.items():
            if (found := item.nbytes(key)) != nbytes:
                expected = f"{nbytes} bytes of {key[1]}, from which {self.name} goes on"
                raise Damaged(item.name, expected, "none" if found is None else f"{found}")
        return item


def check_keys(name: str, keys: Iterable[str], values: Mapping[str, memoryview]) -> None:
    """Checks that there are the values which arrays imply.

    Args:
      name: how errors name the step.
      keys: all keys of the database.
      values: those that describe arrays, among others.

    Raises:
      Damaged: one is missing, or there are others.
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
