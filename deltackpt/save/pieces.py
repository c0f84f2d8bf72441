# SPDX-License-Identifier: Apache-2.0
"""Splits the rows of a field into pieces, and encodes some in advance."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import jax
import numpy as np

from deltackpt.codecs.codec import Codec
from deltackpt.resources.runtime import Runtime, Task
from deltackpt.save import encode
from deltackpt.save.encode import Encoded
from deltackpt.state import contexts, placement

#: Bytes of float32 input that are encoded at once on the CPU: they stay in the cache (measured at
#: 64 columns: half of it costs a fifth of the speed, eight times as much three quarters).
PIECE_BYTES = 2 << 20
#: Pieces that are encoded while one is written: enough for two threads.
AHEAD = 2


class Piece(Protocol):
    """Consecutive rows of one field on their way to storage."""

    def host(self) -> np.ndarray:
        """Returns the rows in host memory, (n, *trailing)."""
        ...

    def encoded(self, codec: Codec) -> Encoded:
        """Returns the rows encoded by a lossy codec, in host memory."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class HostPiece:
    """Rows in host memory; at most ``piece_rows`` if they are encoded."""

    rows: np.ndarray

    def host(self) -> np.ndarray:
        """See ``Piece``."""
        return self.rows

    def encoded(self, codec: Codec) -> Encoded:
        """See ``Piece``."""
        return encode.on_host(codec, self.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class DevicePiece:
    """The first ``count`` rows of an array on an accelerator; only encoded rows reach the host.

    Rows of a table in host memory are numpy arrays. ``dispatched`` is the codec and the encoded
    rows, if the encoding has already started.
    """

    rows: jax.Array | np.ndarray
    count: int
    dispatched: tuple[Codec, Encoded] | None = None

    @classmethod
    @contexts.neutral()
    def dispatch(cls, codec: Codec, rows: jax.Array | np.ndarray, count: int) -> DevicePiece:
        """Encodes rows on their device and starts to copy the result to the host."""
        with contexts.beside(rows):
            encoded = encode.encode(codec, rows)
        return cls(rows, count, (codec, jax.tree.map(placement.host_copy, encoded)))

    @contexts.neutral()
    def host(self) -> np.ndarray:
        """See ``Piece``."""
        rows = self.rows
        if isinstance(rows, jax.Array):
            rows = placement.host_copy(rows)
        return np.asarray(rows)[: self.count]

    @contexts.neutral()
    def encoded(self, codec: Codec) -> Encoded:
        """See ``Piece``."""
        if self.dispatched is not None and self.dispatched[0] == codec:
            return encode.to_host(self.dispatched[1], self.count)
        with contexts.beside(self.rows):
            encoded = encode.encode(codec, self.rows)
        return encode.to_host(jax.tree.map(placement.host_copy, encoded), self.count)


class BusyClock:
    """Measures the time during which at least one thread works.

    Each thread enters it as a context while it works, which costs two microseconds.
    """

    def __init__(self):
        """Starts at zero."""
        self._lock = threading.Lock()
        self._threads = 0
        self._since = 0.0
        #: Wall time so far; without what is under way.
        self.seconds = 0.0

    def __enter__(self) -> BusyClock:
        with self._lock:
            if self._threads == 0:
                self._since = time.perf_counter()
            self._threads += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                self.seconds += time.perf_counter() - self._since

    def over(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yields the pieces; measures the time to produce each piece and to run its methods."""
        while True:
            with self:
                piece = next(pieces, None)
            if piece is None:
                return
            yield _ClockedPiece(piece, self)


@dataclasses.dataclass(frozen=True, eq=False)
class _ClockedPiece:
    """A piece whose methods count as work."""

    piece: Piece
    clock: BusyClock

    def host(self) -> np.ndarray:
        """See ``Piece``."""
        with self.clock:
            return self.piece.host()

    def encoded(self, codec: Codec) -> Encoded:
        """See ``Piece``."""
        with self.clock:
            return self.piece.encoded(codec)


def ahead(
    codec: Codec, pieces: Iterable[Piece], runtime: Runtime
) -> Iterator[tuple[Piece, Encoded]]:
    """Yields pieces in order with their encoded rows.

    A piece must stay valid until ``AHEAD`` more pieces were requested.
    """
    waiting: collections.deque[tuple[Piece, Task[Encoded]]] = collections.deque()
    for piece in pieces:
        waiting.append((piece, runtime.submit(piece.encoded, codec)))
        if len(waiting) > AHEAD:
            first, encoded = waiting.popleft()
            yield first, encoded.result()
    for first, encoded in waiting:
        yield first, encoded.result()


def piece_rows(trailing: tuple[int, ...]) -> int:
    """Returns the rows of a piece for ``on_host``: a power of two."""
    row_bytes = 4 * max(1, math.prod(trailing))
    return 1 << (max(encode.LEAST_ROWS, PIECE_BYTES // row_bytes).bit_length() - 1)
