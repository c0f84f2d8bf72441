# SPDX-License-Identifier: Apache-2.0
"""Maps a leaf to the values of the dense item, from its Zarr metadata."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deltackpt.errors import Damaged, OptionError
from deltackpt.format import dtypes, globs
from deltackpt.format.manifest import DenseLeaf, Layout, path_name
from deltackpt.storage.ocdbt import ZARRAY, chunk_key


def chosen(layout: Layout, patterns: Sequence[str]) -> tuple[DenseLeaf, ...]:
    """Returns the dense leaves whose path matches one of the globs.

    Raises:
      OptionError: no leaf matches, or two matching leaves have the same path.
    """
    found = tuple(
        leaf
        for leaf in layout.dense
        if any(globs.matches(one, path_name(leaf.path)) for one in patterns)
    )
    if not found:
        slots = (path_name(path) for table in layout.tables for path in table.leaves.values())
        tables = [name for name in slots if any(globs.matches(one, name) for one in patterns)]
        what = f"only tables and slots\n{globs.listed(tables)}" if tables else "none"
        raise OptionError(
            f"leaves: expected {list(patterns)} to match dense leaves, found {what}\n"
            f"the dense leaves are\n{globs.listed(path_name(leaf.path) for leaf in layout.dense)}\n"
            "tables and slots are not followed; read them with inspect.open(directory).at(step)"
        )
    counts = collections.Counter(path_name(leaf.path) for leaf in found)
    if clashes := [name for name, count in counts.items() if count > 1]:
        raise OptionError(
            f"leaves: expected a unique path for each leaf, found several with\n"
            f"{globs.listed(clashes)}\n"
            "a key that contains '/' looks like two keys; rename it, or choose other leaves"
        )
    return found


def name_of(leaf: DenseLeaf) -> str:
    """Returns the name of a leaf in Orbax's database."""
    return ".".join(leaf.key)


@dataclasses.dataclass(frozen=True)
class LeafArray:
    """The layout of a leaf's array.

    Attributes:
      name: name of the leaf in Orbax's database.
      shape: shape of the leaf.
      dtype: dtype of the leaf.
      chunks: shape of each chunk, which is one value; chunks at the edges are padded to it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]

    @property
    def keys(self) -> list[str]:
        """Keys of its values."""
        return [chunk_key(self.name, index) for index in self._indices()]

    @property
    def chunk_bytes(self) -> int:
        """Size of each value in bytes."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def of(self, values: Mapping[str, memoryview]) -> np.ndarray:
        """Returns the leaf, read-only: a view if it is a single value, else a copy."""
        keys = self.keys
        if len(keys) == 1 and self.chunks == self.shape:
            return self._chunk(values[keys[0]])
        found = np.empty(self.shape, self.dtype)
        for index, key in zip(self._indices(), keys):
            starts = [at * size for at, size in zip(index, self.chunks)]
            place = tuple(slice(start, start + size) for start, size in zip(starts, self.chunks))
            out = found[place]
            out[...] = self._chunk(values[key])[tuple(slice(size) for size in out.shape)]
        found.flags.writeable = False
        return found

    def _chunk(self, data: memoryview) -> np.ndarray:
        held = np.frombuffer(data.toreadonly(), np.uint8)[: self.chunk_bytes]
        return held.view(self.dtype).reshape(self.chunks)

    def _indices(self) -> Iterator[tuple[int, ...]]:
        counts = [-(-size // part) for size, part in zip(self.shape, self.chunks)]
        return itertools.product(*map(range, counts))


def described(name: str, text: bytes | memoryview | None, shown: str) -> LeafArray | None:
    """Parses the Zarr metadata of a leaf.

    Args:
      name: name of the leaf in Orbax's database.
      text: its ``.zarray``; None without one.
      shown: name of the step in errors.

    Returns:
      The array; None if its values are compressed, filtered, or not in native C order.

    Raises:
      Damaged: the metadata is invalid.
    """
    if text is None:
        return None
    try:
        found: dict[str, Any] = json.loads(bytes(text))
        shape = tuple(int(size) for size in found["shape"])
        chunks = tuple(int(size) for size in found["chunks"])
        written, plain = str(found["dtype"]), not (found["compressor"] or found["filters"])
        if len(shape) != len(chunks) or min((*shape, *chunks), default=1) < 1:
            raise ValueError(f"shape {shape} in chunks {chunks}")
        if not plain or found["order"] != "C" or found.get("dimension_separator", ".") != ".":
            return None
        dtype = dtypes.dtype_of(written) if written in dtypes.DTYPES else np.dtype(written)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(
            f"{shown}, {name}/{ZARRAY}", "Zarr metadata of an array", str(error)
        ) from error
    return LeafArray(name, shape, dtype, chunks) if dtype.isnative else None
