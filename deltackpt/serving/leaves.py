# SPDX-License-Identifier: Apache-2.0
"""Which values of the dense item make up a leaf, and how: what its description in Zarr says."""

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
from deltackpt.format.dense_blocks import Key
from deltackpt.format.manifest import DenseLeaf, path_name
from deltackpt.serving.buffers import Buffer
from deltackpt.storage.ocdbt import ZARRAY, chunk_key


def chosen(leaves: Sequence[DenseLeaf], patterns: Sequence[str]) -> tuple[DenseLeaf, ...]:
    """The leaves whose path one of some globs matches.

    Raises:
      OptionError: two of them have one path, by which one could not be told from the other.
    """
    found = tuple(
        leaf for leaf in leaves if any(globs.matches(one, path_name(leaf.path)) for one in patterns)
    )
    counts = collections.Counter(path_name(leaf.path) for leaf in found)
    if clashes := [name for name, count in counts.items() if count > 1]:
        raise OptionError(
            f"leaves: expected one leaf of each path, found several of\n{globs.listed(clashes)}\n"
            "a key that holds '/' reads like two; rename it, or choose other leaves"
        )
    return found


def name_of(leaf: DenseLeaf) -> str:
    """Name of a leaf in Orbax's database."""
    return ".".join(leaf.key)


@dataclasses.dataclass(frozen=True)
class LeafArray:
    """How a leaf lies in values.

    Attributes:
      name: in Orbax's database.
      shape: of the leaf.
      dtype: likewise.
      chunks: shape of a chunk: of each value, also of one at an edge.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]

    @property
    def keys(self) -> list[Key]:
        """Its values."""
        return [(False, chunk_key(self.name, index)) for index in self._indices()]

    @property
    def chunk_count(self) -> int:
        """Numbers of each value."""
        return math.prod(self.chunks)

    def of(self, values: Mapping[Key, Buffer]) -> np.ndarray:
        """The leaf, read-only: memory of the value itself where it is one, else a copy."""
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

    def _chunk(self, buffer: Buffer) -> np.ndarray:
        nbytes = self.chunk_count * self.dtype.itemsize
        return buffer.array()[:nbytes].view(self.dtype).reshape(self.chunks)

    def _indices(self) -> Iterator[tuple[int, ...]]:
        counts = [-(-size // part) for size, part in zip(self.shape, self.chunks)]
        return itertools.product(*map(range, counts))


def described(name: str, text: bytes | memoryview | None, shown: str) -> LeafArray | None:
    """The leaf that a description is of; None where its values are no plain numbers.

    Args:
      name: of the leaf in Orbax's database.
      text: its ``.zarray``; None where there is none.
      shown: how errors name the step.

    Raises:
      Damaged: it is no description.
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
            f"{shown}, {name}/{ZARRAY}", "what Zarr says of an array", str(error)
        ) from error
    return LeafArray(name, shape, dtype, chunks) if dtype.isnative else None
