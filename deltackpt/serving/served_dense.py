# SPDX-License-Identifier: Apache-2.0
"""The followed dense leaves of one step or recovery point; they never change."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deltackpt.errors import Damaged, OptionError
from deltackpt.format import dtypes, naming
from deltackpt.format.manifest import (
    DenseEntry,
    KeyPath,
    Layout,
    SaveId,
    nested_at,
    path_name,
)
from deltackpt.format.naming import PyTree
from deltackpt.reading.orbax_values import ARRAY_METADATAS, key_impls
from deltackpt.reading.stored_dense import DenseValues
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.standby.loaded_state import HeldState
from deltackpt.storage.ocdbt import ZARRAY, chunk_key


def chosen(layout: Layout, patterns: Sequence[str]) -> tuple[DenseEntry, ...]:
    """Returns the dense leaves that a glob matches; raises ``OptionError`` if there are none."""
    found = tuple(
        leaf
        for leaf in layout.dense
        if any(naming.matches(one, path_name(leaf.path)) for one in patterns)
    )
    if not found:
        slots = (path_name(path) for table in layout.tables for path in table.leaves.values())
        tables = [name for name in slots if any(naming.matches(one, name) for one in patterns)]
        what = f"only tables and slots\n{naming.listed(tables)}" if tables else "none"
        raise OptionError(
            f"leaves: expected {list(patterns)} to match dense leaves, found {what}\n"
            "the dense leaves are\n"
            f"{naming.listed(path_name(leaf.path) for leaf in layout.dense)}\n"
            "tables and slots are not followed; read them with inspect.open(directory).at(step)"
        )
    counts = collections.Counter(path_name(leaf.path) for leaf in found)
    if clashes := [name for name, count in counts.items() if count > 1]:
        raise OptionError(
            f"leaves: expected a unique path for each leaf, found several with\n"
            f"{naming.listed(clashes)}\n"
            "a key that contains '/' looks like two keys; rename it, or choose other leaves"
        )
    return found


def name_of(leaf: DenseEntry) -> str:
    """Returns the name of a leaf in Orbax's database."""
    return ".".join(leaf.key)


@dataclasses.dataclass(frozen=True)
class LeafArray:
    """The layout of a leaf's array."""

    name: str  # In Orbax's database.
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]  # Shape of each chunk, which is one value and padded at the edges.

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
            chunk = tuple(slice(start, start + size) for start, size in zip(starts, self.chunks))
            out = found[chunk]
            out[...] = self._chunk(values[key])[tuple(slice(size) for size in out.shape)]
        found.flags.writeable = False
        return found

    def _chunk(self, data: memoryview) -> np.ndarray:
        held = np.frombuffer(data.toreadonly(), np.uint8)[: self.chunk_bytes]
        return held.view(self.dtype).reshape(self.chunks)

    def _indices(self) -> Iterator[tuple[int, ...]]:
        counts = [-(-size // piece) for size, piece in zip(self.shape, self.chunks)]
        return itertools.product(*map(range, counts))


def described(name: str, text: bytes | memoryview | None, shown: str) -> LeafArray | None:
    """Parses a leaf's ``.zarray``; None if there is none, or values are not plain in C order."""
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
        dtype = dtypes.dtype_of(written) if dtypes.is_known(written) else np.dtype(written)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(
            f"{shown}, {name}/{ZARRAY}", "Zarr metadata of an array", str(error)
        ) from error
    return LeafArray(name, shape, dtype, chunks) if dtype.isnative else None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedLeaves(HeldState):
    """Dense leaves in memory."""

    dense: DenseValues  # Values, their Zarr metadata, and Orbax's files; never written.
    numbers: Mapping[str, int]  # Value to a number, equal in two versions only if the value is.
    leaves: Mapping[DenseEntry, LeafArray]
    accepts_deltas: bool  # Whether a delta of the step can be applied.
    bytes_read: int  # Of stored arrays and values, for this state.


class ServedLeaves(Mapping[str, np.ndarray]):
    """The followed dense leaves at one step or recovery point, by '/'-joined path.

    Arrays are read-only and never change. A leaf that is sharded in storage is assembled on first
    access; others are not copied.
    """

    def __init__(self, held: LoadedLeaves):
        self._held = held
        self._leaves = {path_name(leaf.path): found for leaf, found in held.leaves.items()}
        self._arrays: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def is_of(self, held: LoadedLeaves | None) -> bool:
        """Returns whether these are the leaves in some memory."""
        return self._held is held

    @property
    def step(self) -> int:
        """The training step."""
        return self._held.save.save_id.step if self.point is None else self.point.step

    @property
    def save_id(self) -> SaveId:
        """Id of the save, or of the recovery point's WAL record."""
        return self._held.save.save_id if self.point is None else self.point.save_id

    @property
    def point(self) -> RecoveryPoint | None:
        """The recovery point; None for a step."""
        return self._held.point

    @property
    def unix_secs(self) -> float:
        """Time of the step's commit, or of the recovery point, in seconds since 1970."""
        return self._held.unix_secs

    @property
    def bytes_read(self) -> int:
        """Bytes of stored arrays and values that were read for these leaves."""
        return self._held.bytes_read

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self._leaves.values())

    def __getitem__(self, path: str) -> np.ndarray:
        if path not in self._leaves:
            raise KeyError(f"expected one of {sorted(self._leaves)}, found {path!r}")
        with self._lock:
            if path not in self._arrays:
                self._arrays[path] = self._leaves[path].of(self._held.dense.values)
            return self._arrays[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return f"<ServedLeaves of step {self.step}: {len(self)} leaves>"

    def tree(self) -> PyTree:
        """Returns the leaves in nested dicts and lists, with the structure of the state."""
        return nested_at((path, self[path_name(path)]) for path in self.paths)

    @property
    def paths(self) -> tuple[KeyPath, ...]:
        """Typed key paths of the leaves in the state."""
        return tuple(leaf.path for leaf in self._held.leaves)

    @functools.cached_property
    def prng_impls(self) -> Mapping[str, str]:
        """Implementation of each typed PRNG key among the leaves, such as ``threefry2x32``.

        The array of such a leaf is its key data; get the keys from
        ``jax.random.wrap_key_data(dense[path], impl=dense.prng_impls[path])``.
        """
        impls: dict[str, str] = {}
        for name, data in self._held.dense.files.items():
            if not name.startswith(f"{ARRAY_METADATAS}/process_"):
                continue
            try:
                impls |= key_impls(json.loads(bytes(data)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                shown = f"step {self._held.save.save_id.step}, {name}"
                raise Damaged(shown, "a file of Orbax's about arrays", str(error)) from error
        return {path: impls[leaf.name] for path, leaf in self._leaves.items() if leaf.name in impls}

    def content(self, path: str) -> tuple[int, ...]:
        """Returns an id of a leaf's contents: equal in two versions only if the leaf is equal."""
        leaf, numbers = self._leaves[path], self._held.numbers
        return tuple(
            numbers[key] for key in (f"{leaf.name}/{ZARRAY}", *leaf.keys) if key in numbers
        )
