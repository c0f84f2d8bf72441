# SPDX-License-Identifier: Apache-2.0
"""Arrays of Orbax's database whose chunks are plain values, assembled without Orbax."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format.dtypes import dtype_of
from deltackpt.resources import host_memory
from deltackpt.storage.ocdbt import ZARRAY, check_chunks, chunk_key

#: Half-open ranges along each axis.
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ZarrArray:
    """An array with uncompressed chunks in C order, by its name in the database."""

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]  # shape of each chunk, which is one value and padded at the edges
    dtype: np.dtype
    is_number: bool = False  # whether it was saved as a Python number

    @property
    def whole(self) -> Box:
        """Returns the box of all elements."""
        return tuple((0, size) for size in self.shape)

    @property
    def chunk_bytes(self) -> int:
        """Returns the bytes of each chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def keys(self, boxes: Iterable[Box]) -> set[str]:
        """Returns keys of the chunks that intersect some boxes."""
        return {chunk_key(self.name, index) for box in boxes for index in self._indices(box)}

    def read(self, values: Mapping[str, memoryview], box: Box) -> np.ndarray:
        """Reads a box of the array; without a copy if the box is a chunk."""
        found = [*self._indices(box)]
        shape = tuple(stop - start for start, stop in box)
        if len(found) == 1 and shape == self.chunks:
            return self._chunk(values, found[0])
        out = host_memory.empty_buffer(shape, self.dtype)
        for index in found:
            chunk = self._chunk(values, index)
            into, of = [], []
            for at, size, (start, stop) in zip(index, self.chunks, box, strict=True):
                first, last = max(start, at * size), min(stop, (at + 1) * size)
                into.append(slice(first - start, last - start))
                of.append(slice(first - at * size, last - at * size))
            out[tuple(into)] = chunk[tuple(of)]
        return out

    def _indices(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Returns which chunks intersect a box."""
        ranges = [
            range(start // size, -(-stop // size))
            for (start, stop), size in zip(box, self.chunks, strict=True)
        ]
        return itertools.product(*ranges)

    def _chunk(self, values: Mapping[str, memoryview], index: tuple[int, ...]) -> np.ndarray:
        # A value in memory may have the padding of its last block.
        data = np.frombuffer(values[chunk_key(self.name, index)], np.uint8)[: self.chunk_bytes]
        return data.view(self.dtype).reshape(self.chunks)


def parsed(name: str, text: bytes | memoryview, *, is_number: bool = False) -> ZarrArray | None:
    """Returns an array by its ``.zarray``; None if its chunks are not plain values.

    Raises an error of the standard library if the text is not such a description.
    """
    described = json.loads(bytes(text))
    is_plain = (
        described["zarr_format"] == 2
        and described["compressor"] is None
        and not described["filters"]
        and described["order"] == "C"
        and described.get("dimension_separator", ".") == "."
    )
    dtype = described["dtype"]
    if not is_plain or not isinstance(dtype, str) or dtype.startswith(">"):
        return None
    check_chunks(described)
    shape, chunks = tuple(described["shape"]), tuple(described["chunks"])
    return ZarrArray(name, shape, chunks, dtype_in(dtype), is_number)


def described(name: str, text: memoryview | None, shown: str) -> ZarrArray | None:
    """Returns an array by its ``.zarray``; None without one, or if its chunks are not plain.

    Raises ``Damaged`` for an invalid description; ``shown`` names the item.
    """
    try:
        return None if text is None else parsed(name, text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = "Zarr metadata of an array"
        raise Damaged(f"{shown}, {name}/{ZARRAY}", what, str(error)) from error


def dtype_in(text: str) -> np.dtype:
    """Returns the dtype that a ``.zarray`` names."""
    return np.dtype(text) if text[:1] in "<|>" else dtype_of(text)
