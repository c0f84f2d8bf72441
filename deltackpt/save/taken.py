# SPDX-License-Identifier: Apache-2.0
"""The rows that a save captures from the training state: copied, or held.

Copied rows are still being copied when the training thread continues; afterwards nothing refers to
the training state. Held rows are views of it, or copies on their devices, until they are written.
Call the methods of both kinds in this order: ``wait`` in the training thread, ``land`` in the
background, then ``pieces`` for each field, and finally ``release``, even after an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.codecs import Codec
from deltackpt.resources.runtime import Runtime, Task
from deltackpt.save import extract
from deltackpt.save.extract import SegmentSource
from deltackpt.save.pieces import DevicePiece, HostPiece, Piece, piece_rows
from deltackpt.state import contexts
from deltackpt.storage import arrays

#: Rows of held state are encoded in pieces of about this size.
_HELD_PIECE_BYTES = arrays.CHUNK_BYTES
#: Fewer bytes are copied faster than another thread begins.
_INLINE_BYTES = 4 << 20
_INLINE_PIECE_BYTES = 16 << 10
#: Fewer rows are not worth a thread.
_LEAST_SHARE = 4096


class TakenRows(Protocol):
    """The rows of one save, independent of later training steps."""

    #: Set as soon as nothing of the training state is referred to any more.
    released: threading.Event
    #: Whether what is written is the training state itself.
    held: bool

    @property
    def segments(self) -> Sequence[SegmentSource]:
        """Returns the captured segments."""
        ...

    def wait(self) -> None:
        """Waits until the copies allow training to continue."""
        ...

    def land(self) -> None:
        """Waits until ``pieces`` can be called; raises errors of the copies."""
        ...

    def pieces(self, number: int, field: str, codec: Codec) -> Iterator[Piece]:
        """Yields the rows of one field of a segment in order, in pieces suitable for a codec."""
        ...

    def release(self) -> None:
        """Releases all memory. Idempotent."""
        ...


class CopiedRows:
    """Rows being copied to their own memory; see ``TakenRows``."""

    held = False

    def __init__(
        self,
        segments: Sequence[SegmentSource],
        codecs_of: Callable[[SegmentSource], Mapping[str, Codec]],
        runtime: Runtime,
    ):
        """Starts the copies.

        Args:
          segments: what to copy.
          codecs_of: returns a segment's codecs by field name; lossy ones encode on accelerators.
          runtime: whose memory holds them, and whose threads copy.
        """
        self.released = threading.Event()
        self._runtime = runtime
        self._copies: list[RowCopy] = []
        try:
            for segment in segments:
                codec_of = None if segment.on_host else codecs_of(segment)
                self._copies.append(RowCopy(segment, codec_of, runtime))
        except BaseException:
            self.release()
            raise
        self.segments = [segment.detached() for segment in segments]

    def wait(self) -> None:
        """Waits for the reads of the training state."""
        for rows in self._copies:
            rows.wait()
        self.released.set()

    def land(self) -> None:
        """Waits for the copies."""
        self.wait()
        for rows in self._copies:
            rows.land()

    def pieces(self, number: int, field: str, codec: Codec) -> Iterator[Piece]:
        """See ``TakenRows``: lossless fields in one piece."""
        source = self.segments[number]
        limit = piece_rows(source.fields[field].trailing)
        if codec.lossless:
            limit = max(1, len(source.rows))
        return self._copies[number].pieces(field, limit)

    def release(self) -> None:
        """Releases the staging memory, once nothing writes to it."""
        self.wait()
        while self._copies:
            self._runtime.memory.give_back(self._copies.pop().fields.values())


class HeldRows:
    """Rows that are read from the training state until they are written; see ``TakenRows``."""

    held = True

    def __init__(self, segments: Sequence[SegmentSource]):
        """Makes them outlive donation: a device copy off the CPU, where views already do."""
        self.released = threading.Event()
        self.segments = list(segments)
        for segment in segments:
            _hold(segment)

    def wait(self) -> None:
        """Does nothing: views are valid, and device copies precede later steps."""

    def land(self) -> None:
        """Does nothing."""

    def pieces(self, number: int, field: str, codec: Codec) -> Iterator[Piece]:
        """See ``TakenRows``: contiguous raw rows are written without a copy."""
        rows, source = self.segments[number].rows, self.segments[number].fields[field]
        chunk_rows = max(1, _HELD_PIECE_BYTES // max(1, source.row_bytes))
        if not codec.lossless:
            on_host = piece_rows(source.trailing)
            return source.pieces(rows, on_host if source.on_host else chunk_rows)
        in_place = codec.name == "raw" and not isinstance(rows, np.ndarray)
        return source.pieces(rows, max(1, len(rows)) if in_place else chunk_rows)

    def release(self) -> None:
        """Drops the references to the training state."""
        self.segments = [segment.detached() for segment in self.segments]
        self.released.set()


class RowCopy:
    """Rows of one segment being copied, independently of the training state.

    Attributes:
      fields: fields in staging memory, (rows, *trailing).
    """

    def __init__(
        self, segment: SegmentSource, codec_of: Mapping[str, Codec] | None, runtime: Runtime
    ):
        """Starts to copy rows, on threads or on their devices.

        numpy copies without the interpreter's lock, so that the training thread can start Orbax's
        part of the save at the same time.

        Args:
          segment: the rows.
          codec_of: field name to codec; None if the rows are in host memory. Lossy codecs encode on
            the devices, and their fields stay there until they are written, since a wider codec may
            be needed.
          runtime: provides memory and threads.
        """
        self.fields: dict[str, np.ndarray] = {}
        self._memory = runtime.memory
        self._count = len(segment.rows)
        self._tasks: list[Task[None]] = []
        self._on_device: dict[str, list[DevicePiece]] = {}
        self._lossless: list[str] = []
        for name, source in segment.fields.items():
            if codec_of is not None:
                self._on_device[name] = source.dispatch(segment.rows, codec_of[name])
                if codec_of[name].lossless:
                    self._lossless.append(name)
                continue
            out = self._memory.take((self._count, *source.trailing), source.dtype)
            self.fields[name] = out
            # Threads that copy many small pieces would wait for each other's turn to run Python.
            if out.nbytes <= max(_INLINE_BYTES, _INLINE_PIECE_BYTES * len(source.shards)):
                source.gather(segment.rows, out)
                continue
            share = max(_LEAST_SHARE, -(-self._count // runtime.threads))
            for start in range(0, self._count, share):
                part = slice(start, start + share)
                self._tasks.append(runtime.submit(source.gather, segment.rows[part], out[part]))

    def wait(self) -> None:
        """Waits until the training state is no longer read; devices read it before later steps."""
        for task in self._tasks:
            task.wait()

    def land(self) -> None:
        """Waits for the copies, and puts lossless fields of devices into staging memory."""
        for task in self._tasks:
            task.result()
        while self._lossless:
            name = self._lossless.pop()
            pieces = self._on_device.pop(name)
            first, start = pieces[0].rows, 0
            out = self._memory.take((self._count, *first.shape[1:]), np.dtype(first.dtype))
            self.fields[name] = out
            for piece in pieces:
                out[start : start + piece.count] = piece.host()
                start += piece.count

    def pieces(self, field: str, limit_rows: int) -> Iterator[Piece]:
        """Yields rows of a field in order; rows in host memory at most ``limit_rows`` at a time."""
        if field in self._on_device:
            yield from self._on_device[field]
            return
        rows = self.fields[field]
        for start in range(0, len(rows), limit_rows):
            yield HostPiece(rows[start : start + limit_rows])


@jax.jit
def _device_copy(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def _hold(segment: SegmentSource) -> None:
    for source in segment.fields.values():
        for shard in source.shards:
            if isinstance(shard.data, jax.Array):
                if extract.on_host(shard.data):
                    shard.data = np.asarray(shard.data)
                else:
                    with contexts.beside(shard.data):
                        held = shard.data[shard.skip : shard.skip + shard.stop - shard.start]
                        [shard.data], shard.skip = _device_copy([held]), 0
