# SPDX-License-Identifier: Apache-2.0
"""What the last saves' dense leaves decode to: bounded host memory, kept by save id.

A reference counts once its save is committed, and is kept while a delta may be taken against it.
Of leaves for which there is no room a 128-bit hash of each 64 KiB stands in: it tells what did not
change, a 4096th of the bytes, but nothing can be taken as a difference to it.
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
from deltackpt.resources.staging import Staging

#: Bytes that share a hash. A hash of 128 bits: two of any 2^50 differ but for odds of 2^-29.
HASHED_BYTES = 64 << 10

#: In host memory, or on an accelerator.
Array = np.ndarray | jax.Array
#: What values decode to: leaves as (blocks, 256) of their dtype, plain ones as (n,) uint8.
Decoded = Mapping[Key, Array]


class Hashes(NamedTuple):
    """What is known of a leaf that is not kept.

    Attributes:
      shape: of its blocks, (blocks, 256).
      dtype: of its numbers.
      digests: of each 64 KiB in turn, 16 bytes each; the last may have less.
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

    def changed(self, data: np.ndarray) -> np.ndarray:
        """Numbers of the blocks that are not known to be what was hashed, int64, ascending."""
        now = Hashes.of(data)
        if now.shape != self.shape or now.dtype != self.dtype:
            return np.arange(len(data))
        pairs = zip(now.digests, self.digests, strict=True)
        of_span = np.array([one != other for one, other in pairs], bool)
        per_span = HASHED_BYTES // (BLOCK * data.dtype.itemsize)
        return np.flatnonzero(np.repeat(of_span, per_span)[: len(data)])


@dataclasses.dataclass(frozen=True, eq=False)
class Left:
    """What a save left for those that are taken against it.

    Attributes:
      data: what its values decode to, as far as there is room.
      counts: numbers of each value, of plain ones bytes; those that fill up blocks do not count.
      hashes: of the leaves for which there is none.
    """

    data: Decoded = dataclasses.field(default_factory=dict)
    counts: Mapping[Key, int] = dataclasses.field(default_factory=dict)
    hashes: Mapping[Key, Hashes] = dataclasses.field(default_factory=dict)

    def of(self, counts: Mapping[Key, int]) -> Left:
        """What of it belongs to values that have as many numbers now.

        Args:
          counts: of the values now.
        """
        same = {key for key, count in counts.items() if self.counts.get(key) == count}
        return Left(
            {key: data for key, data in self.data.items() if key in same},
            {key: count for key, count in self.counts.items() if key in same},
            {key: hashes for key, hashes in self.hashes.items() if key in same},
        )


class References:
    """What saves left, and the memory that it lies in; thread-safe."""

    def __init__(self, most_bytes: int, *, hashed: bool):
        """Keeps nothing yet.

        Args:
          most_bytes: of all that is kept once a save stands.
          hashed: whether leaves for which there is no room are hashed.
        """
        self._most_bytes = most_bytes
        self._hashed = hashed
        self._staging = Staging(2 * most_bytes)
        #: Bytes of the copies of one save, kept for those of the next.
        self._copied_bytes = 0
        self._lock = threading.Lock()
        self._kept: dict[SaveId, Left] = {}
        self._lent: dict[int, np.ndarray] = {}

    @property
    def staging(self) -> Staging:
        """The memory."""
        return self._staging

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept, each array once; hashes aside."""
        with self._lock:
            return self._kept_bytes()

    def buffer(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Memory for a copy, to be kept or given to ``done_with``."""
        data = self._staging.take(shape, dtype)
        with self._lock:
            self._lent[id(data)] = data
        return data

    def copied(self, nbytes: int) -> None:
        """Says how large the copies of a save are: those of the next are like them."""
        with self._lock:
            self._copied_bytes = nbytes

    def of(self, save_id: SaveId | None) -> Left:
        """What a save left; nothing where it did not."""
        with self._lock:
            return Left() if save_id is None else self._kept.get(save_id, Left())

    def stage(self, save_id: SaveId, left: Left) -> None:
        """Keeps what a save leaves that is not committed yet."""
        with self._lock:
            self._kept[save_id] = left

    def committed(self, save_id: SaveId, parent: SaveId) -> None:
        """Keeps what the next delta is taken against alone, now that a save stands.

        Args:
          save_id: of the save.
          parent: what the next delta will be taken against, as far as is known; what the save left
            is kept where that left nothing.
        """
        with self._lock:
            chosen = parent if parent in self._kept else save_id
            dropped = [self._kept.pop(other) for other in self._kept.keys() - {chosen}]
            if chosen in self._kept and self._kept_bytes() > self._most_bytes:
                dropped.append(self._kept[chosen])
                self._kept[chosen] = self._fitting(self._kept[chosen])
        self.done_with(data for left in dropped for data in left.data.values())

    def failed(self, save_id: SaveId) -> None:
        """Drops what a save has staged that will never stand; safe to call again."""
        with self._lock:
            dropped = self._kept.pop(save_id, Left())
        self.done_with(dropped.data.values())

    def done_with(self, copies: Iterable[Array]) -> None:
        """Gives copies back that no save left."""
        with self._lock:
            held = {id(data) for left in self._kept.values() for data in left.data.values()}
            done = ({id(data) for data in copies} - held) & self._lent.keys()
            free = [self._lent.pop(at) for at in done]
            wanted = self._copied_bytes + sum(data.nbytes for data in self._lent.values())
            # Buffers are up to a fourth larger than what lies in them.
            self._staging.budget_bytes = min(2 * self._most_bytes, wanted * 5 // 4)
            for data in free:
                self._staging.give_back(data)

    def _fitting(self, left: Left) -> Left:
        """As much of it as there is room for, in the order of the leaves; hashes of the rest."""
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
