# SPDX-License-Identifier: Apache-2.0
"""One version of the followed leaves: whole, of one step or point, and never changed."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from deltackpt.format.chain import SaveInfo
from deltackpt.format.dense_blocks import Key
from deltackpt.format.manifest import DenseLeaf, KeyPath, Layout, SaveId, path_name
from deltackpt.reading.stretches import LogPoint
from deltackpt.serving.buffers import Buffer
from deltackpt.serving.leaves import LeafArray
from deltackpt.state import nesting


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """What a version is made of.

    Attributes:
      save: the step.
      layout: of its state.
      point: of the log above the step, where it is one.
      values: the values that the leaves are made of, and their descriptions.
      leaves: the leaves, each with how it lies in the values.
      goes_on: whether a delta of the step can be applied to the values.
      unix_secs: when the step was committed, or the point taken, in seconds since 1970.
      bytes_read: bytes of stored arrays, values and frames that were read for it.
    """

    save: SaveInfo
    layout: Layout
    point: LogPoint | None
    values: Mapping[Key, Buffer]
    leaves: Mapping[DenseLeaf, LeafArray]
    goes_on: bool
    unix_secs: float
    bytes_read: int

    def is_at(self, save_id: SaveId, point: LogPoint | None) -> bool:
        """Whether it is a step, or a point above one, and no other."""
        if self.save.save_id != save_id or (self.point is None) != (point is None):
            return False
        return self.point is None or self.point[:2] == (point and point[:2])


class Version(Mapping[str, np.ndarray]):
    """The followed leaves at one step, or point of the log, by their '/'-joined paths.

    Arrays are read-only, and stay what they are for as long as anybody refers to them. A leaf that
    is sharded in storage is put together when it is first asked for; others are not copied.
    """

    def __init__(self, held: Held):
        """Made by ``Live``."""
        self._held = held
        self._leaves = {path_name(leaf.path): found for leaf, found in held.leaves.items()}
        self._arrays: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def is_of(self, held: Held) -> bool:
        """Whether it is made of that."""
        return self._held is held

    @property
    def step(self) -> int:
        """The training step."""
        return self._held.save.save_id.step if self.point is None else self.point.step

    @property
    def save_id(self) -> SaveId:
        """Id of the save, or of the mark of the log."""
        return self._held.save.save_id if self.point is None else self.point.save_id

    @property
    def point(self) -> LogPoint | None:
        """The point of the log; None where it is a step."""
        return self._held.point

    @property
    def unix_secs(self) -> float:
        """When the step was committed, or the point taken, in seconds since 1970."""
        return self._held.unix_secs

    @property
    def bytes_read(self) -> int:
        """Bytes of stored arrays, values and frames that were read to come to it."""
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
                self._arrays[path] = self._leaves[path].of(self._held.values)
            return self._arrays[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return f"<Version of step {self.step}: {len(self)} leaves>"

    def tree(self) -> Any:
        """The leaves in nested dicts and lists, as they stand in the state."""
        return nesting.nested_at((path, self[path_name(path)]) for path in self.paths)

    @property
    def paths(self) -> tuple[KeyPath, ...]:
        """Typed key paths of the leaves in the state."""
        return tuple(leaf.path for leaf in self._held.leaves)

    def content(self, path: str) -> tuple[int, ...]:
        """What is the same in two versions of one ``Live`` only where a leaf is."""
        leaf = self._leaves[path]
        return tuple(self._held.values[key].number for key in leaf.keys)
