# SPDX-License-Identifier: Apache-2.0
"""Whether a chain completes the dense leaves of a step that it holds as blocks.

Each save may be as it was written, and still lack what a later one goes on from: another base in
the place of its own, or a delta that was taken against what nobody has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from deltackpt.errors import Damaged
from deltackpt.format import names
from deltackpt.reading import dense_values, orbax_values
from deltackpt.reading.dense_values import Key, PartSource
from deltackpt.reading.orbax_values import OrbaxValues
from deltackpt.reading.saves import StoredSave
from deltackpt.storage import ocdbt
from deltackpt.storage.ocdbt import ZARRAY

#: Values of an item that are read at a time to learn how long they are.
_READ_BYTES = 64 << 20

#: Where an item is, and a key of it, to the bytes of the value.
Lengths = dict[tuple[str, Key], int]


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
        missing = dense_values.missing(sources, name) if sources else {}
        return cls(name, sources, base, missing)

    def check(self, lengths: Lengths) -> None:
        """Checks that the base has what is missing, and that the step has all that it describes.

        Args:
          lengths: what is known of items whose files are as their digests say; more is added.

        Raises:
          Damaged: it has not; the item of the base is named, or the step.
        """
        if not self.sources:
            return
        item = None
        if self.missing:
            item = self._item()
            self._check_lengths(item, lengths)
        opened = None if item is None else (lambda: item)
        found = dense_values.values_of(self.sources, opened, self.name, _describes)
        keys = {
            value.key
            for source in self.sources[0]
            for value in source.record.values
            if not value.file
        }
        check_keys(self.name, keys, found.values)

    def _item(self) -> OrbaxValues:
        if self.base is None:
            shown = ", ".join(key for _, key in list(self.missing)[:3])
            raise Damaged(self.name, f"dense leaves down to a base: {shown}", "none")
        # Its files were checked, or will be.
        return OrbaxValues(orbax_values.of_save(self.base).at, None)

    def _check_lengths(self, item: OrbaxValues, lengths: Lengths) -> None:
        where = str(item.at)
        unknown = {key: size for key, size in self.missing.items() if (where, key) not in lengths}
        for keys in _in_pieces(unknown):
            found = item.read(keys)
            lengths |= {(where, key): value.nbytes for key, value in found.items()}
        for key, nbytes in self.missing.items():
            if (found := lengths.get((where, key))) != nbytes:
                expected = f"{nbytes} bytes of {key[1]}, from which {self.name} goes on"
                raise Damaged(self._item_name, expected, "none" if found is None else f"{found}")

    @property
    def _item_name(self) -> str:
        """How errors name the item of the base."""
        assert self.base is not None
        holder = self.base.name if self.base.compacted else self.base.step_dir.name
        return f"{holder}/{names.DENSE_ITEM}"


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


def _in_pieces(sizes: Mapping[Key, int]) -> Iterator[list[Key]]:
    piece, nbytes = list[Key](), 0
    for key, size in sizes.items():
        if piece and nbytes + size > _READ_BYTES:
            yield piece
            piece, nbytes = list[Key](), 0
        piece.append(key)
        nbytes += size
    if piece:
        yield piece
