# SPDX-License-Identifier: Apache-2.0
"""The decoded dense leaves of the last saves: bounded host memory, by save id.

A reference becomes valid once its save is committed, and is kept as long as the save may be the
parent of a delta. Leaves that do not fit keep a 128-bit hash of each 64 KiB instead. Hashes detect
unchanged data with a 4096th of the memory, but cannot serve as a reference.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import xxhash

from deltackpt.format.dense_blocks import BLOCK, Key
from deltackpt.format.manifest import SaveId
from deltackpt.resources.runtime import Runtime

#: Bytes that share a hash. A hash of 128 bits: two of any 2^50 differ but for odds of 2^-29.
HASHED_BYTES = 64 << 10

#: In host memory, or on an accelerator.
Array = np.ndarray | jax.Array
#: What values decode to: leaves as (blocks, 256) of their dtype, plain ones as (n,) uint8.
Decoded = Mapping[Key, Array]


class Hashes(NamedTuple):
    """The hashes of a leaf whose values are not kept.

    Attributes:
      shape: shape of the blocks, (blocks, 256).
      dtype: dtype of its elements.
      digests: hash of each 64 KiB in order, 16 bytes each; the last may cover less.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    digests: Sequence[bytes]

    @classmethod
    def of(cls, data: np.ndarray) -> Hashes:
        """Hashes blocks, (blocks, 256) and contiguous."""
        flat = data.reshape(-1).view(np.uint8)
        starts = range(0, flat.size, HASHED_BYTES)
        digests = [xxhash.xxh3_128_digest(flat[at : at + HASHED_BYTES].data) for at in starts]
        return cls(data.shape, data.dtype, digests)

    def changed(self, data: np.ndarray) -> list[range]:
        """Returns ranges of the blocks that may have changed since then, ascending."""
        now = Hashes.of(data)
        if now.shape != self.shape or now.dtype != self.dtype:
            return [range(len(data))]
        pairs = enumerate(zip(now.digests, self.digests, strict=True))
        per_digest = HASHED_BYTES // (BLOCK * data.dtype.itemsize)
        found: list[range] = []
        for start in (number * per_digest for number, (one, other) in pairs if one != other):
            first = found.pop().start if found and found[-1].stop == start else start
            found.append(range(first, min(start + per_digest, len(data))))
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Left:
    """Data that a save keeps for its deltas.

    Attributes:
      data: its decoded values that fit into the memory.
      counts: number of elements of each value (bytes, if plain), without padding.
      hashes: hashes of the leaves that do not fit.
    """

    data: Decoded = dataclasses.field(default_factory=dict)
    counts: Mapping[Key, int] = dataclasses.field(default_factory=dict)
    hashes: Mapping[Key, Hashes] = dataclasses.field(default_factory=dict)


class References:
    """The references of saves, and their memory; thread-safe."""

    def __init__(self, most_bytes: int, runtime: Runtime, *, hashed: bool):
        """Keeps nothing yet.

        Args:
          most_bytes: memory limit, once a save is committed.
          runtime: threads for the copies of saves.
          hashed: whether to hash leaves that do not fit.
        """
        self._most_bytes = most_bytes
        self._hashed = hashed
        #: Memory of the references, and of the copies of saves in flight.
        self.runtime = runtime.part(2 * most_bytes)
        self._lock = threading.Lock()
        self._kept: dict[SaveId, Left] = {}

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all kept arrays, each counted once, without hashes."""
        with self._lock:
            return self._kept_bytes()

    def copied(self, nbytes: int) -> None:
        """Keeps memory for the next save's copies, whose size is similar to a save's."""
        # Buffers are up to a fourth larger than their contents.
        self.runtime.memory.max_kept_bytes = nbytes * 5 // 4

    def of(self, save_id: SaveId | None) -> Left:
        """Returns a save's reference; empty if it has none."""
        with self._lock:
            return Left() if save_id is None else self._kept.get(save_id, Left())

    def stage(self, save_id: SaveId, left: Left) -> None:
        """Keeps the reference of a save that is not committed yet."""
        with self._lock:
            self._kept[save_id] = left

    def committed(self, save_id: SaveId, parent: SaveId) -> None:
        """Keeps only the parent of the next delta, now that a save is committed.

        Args:
          save_id: id of the save.
          parent: the expected parent of the next delta. If it has no reference, the save itself is
            kept.
        """
        with self._lock:
            chosen = parent if parent in self._kept else save_id
            dropped = [self._kept.pop(other) for other in self._kept.keys() - {chosen}]
            if chosen in self._kept and self._kept_bytes() > self._most_bytes:
                dropped.append(self._kept[chosen])
                self._kept[chosen] = self._fitting(self._kept[chosen])
        self.release(data for left in dropped for data in left.data.values())

    def failed(self, save_id: SaveId) -> None:
        """Drops the reference that a failed save has staged. Idempotent."""
        with self._lock:
            dropped = self._kept.pop(save_id, Left())
        self.release(dropped.data.values())

    def release(self, copies: Iterable[Array]) -> None:
        """Releases copies that no save keeps."""
        with self._lock:
            kept = {id(data) for left in self._kept.values() for data in left.data.values()}
            self.runtime.memory.give_back(data for data in copies if id(data) not in kept)

    def _fitting(self, left: Left) -> Left:
        """Returns as much as there is room for, in the order of the leaves; hashes of the rest."""
        data, hashes, room = {}, dict(left.hashes), self._most_bytes
        for key, found in left.data.items():
            if found.nbytes <= room:
                data[key], room = found, room - found.nbytes
            elif self._hashed and found.ndim == 2:
                hashes[key] = Hashes.of(np.asarray(found))
        return Left(data, left.counts, hashes)

    def _kept_bytes(self) -> int:
        held = {
            id(data): data.nbytes for left in self._kept.values() for data in left.data.values()
        }
        return sum(held.values())
