# SPDX-License-Identifier: Apache-2.0
"""The rows that a save captures from the training state: copied, or held.

Copied rows are still being copied when the training thread continues; afterwards nothing refers to
the training state. Held rows are views of it, or copies on their devices, until they are written.
Call the methods of both kinds in this order: ``wait`` in the training thread, ``land`` in the
background, then ``pieces`` for each field, and finally ``release``, even after an error.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.codecs import Codec
from deltackpt.format.blocks import RowBlock, Rows
from deltackpt.resources.staging import Staging
from deltackpt.save import extract
from deltackpt.save.extract import SegmentSource
from deltackpt.save.pieces import DevicePiece, HostPiece, Piece, piece_rows
from deltackpt.state import contexts
from deltackpt.storage import arrays

#: Rows of held state are encoded in pieces of about this size.
_HELD_PIECE_BYTES = arrays.CHUNK_BYTES
#: Fewer bytes are copied faster than another thread begins.
_INLINE_BYTES = 1 << 20
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
        staging: Staging,
    ):
        """Starts the copies.

        Args:
          segments: what to copy.
          codecs_of: returns a segment's codecs by field name; lossy ones encode on accelerators.
          staging: whose memory holds them, and whose threads copy.
        """
        self.released = threading.Event()
        self._staging = staging
        self._coming: list[Copying | Dispatched] = []
        self._landed: list[Landed] = []
        try:
            for segment in segments:
                if segment.on_host:
                    self._coming.append(copying(segment, staging))
                else:
                    self._coming.append(dispatched(segment, codecs_of(segment)))
        except BaseException:
            self.release()
            raise
        self.segments = [segment.detached() for segment in segments]

    def wait(self) -> None:
        """Waits for the reads of the training state."""
        for rows in self._coming:
            rows.wait()
        self.released.set()

    def land(self) -> None:
        """Waits for the copies."""
        self.wait()
        while self._coming:
            self._landed.append(self._coming[0].landed(self._staging))
            del self._coming[0]

    def pieces(self, number: int, field: str, codec: Codec) -> Iterator[Piece]:
        """See ``TakenRows``: lossless fields in one piece."""
        landed = self._landed[number]
        if codec.lossless:
            return landed.pieces(field, max(1, len(landed.block.rows)))
        return landed.pieces(field, piece_rows(self.segments[number].fields[field].trailing))

    def release(self) -> None:
        """Releases the staging memory, once nothing writes to it."""
        self.wait()
        while self._landed:
            self._landed.pop().give_back(self._staging)
        while self._coming:
            self._coming.pop().give_back(self._staging)


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


@dataclasses.dataclass(frozen=True, eq=False)
class Landed:
    """Rows that are independent of the training state.

    Attributes:
      block: fields in staging memory.
      on_device: the other fields: gathered on accelerators, encoded there.
    """

    block: RowBlock
    on_device: Mapping[str, Sequence[DevicePiece]]

    def pieces(self, field: str, limit_rows: int) -> Iterator[Piece]:
        """Yields rows of a field in order; rows in host memory at most ``limit_rows`` at a time."""
        if field in self.on_device:
            yield from self.on_device[field]
            return
        rows = self.block.fields[field]
        for start in range(0, len(rows), limit_rows):
            yield HostPiece(rows[start : start + limit_rows])

    def give_back(self, staging: Staging) -> None:
        """Releases the staging memory."""
        for buffer in self.block.fields.values():
            staging.give_back(buffer)


@dataclasses.dataclass(eq=False)
class Copying:
    """Rows that threads copy into staging memory; see ``copying``."""

    block: RowBlock
    futures: list[concurrent.futures.Future[None]]

    def wait(self) -> None:
        """Waits until the training state is no longer read."""
        concurrent.futures.wait(self.futures)

    def landed(self, staging: Staging) -> Landed:
        """Waits for the copies; raises their errors."""
        for future in self.futures:
            future.result()
        return Landed(self.block, {})

    def give_back(self, staging: Staging) -> None:
        """Releases the staging memory, once nothing writes to it."""
        self.wait()
        Landed(self.block, {}).give_back(staging)


@dataclasses.dataclass(eq=False)
class Dispatched:
    """Rows that the devices gather and send to the host; see ``dispatched``.

    ``fields`` maps a field to the pieces of its rows in order; those in ``lossy`` stay on the
    devices until they are written, since a wider codec may be needed.
    """

    group: str
    columns: tuple[int, int]
    rows: Rows
    fields: dict[str, list[DevicePiece]]
    lossy: frozenset[str]

    def wait(self) -> None:
        """Does nothing: the gather was dispatched before later steps."""

    def give_back(self, staging: Staging) -> None:
        """Does nothing: the rows are on the devices."""

    def landed(self, staging: Staging) -> Landed:
        """Waits for the transfers and puts lossless fields into staging memory."""
        fields = {}
        for name, pieces in self.fields.items():
            if name in self.lossy:
                continue
            first = pieces[0].rows
            out = staging.take((len(self.rows), *first.shape[1:]), np.dtype(first.dtype))
            start = 0
            for piece in pieces:
                out[start : start + piece.count] = piece.host()
                start += piece.count
            fields[name] = out
        block = RowBlock(self.group, self.rows, self.columns, fields)
        return Landed(block, {name: self.fields[name] for name in self.lossy})


def copying(segment: SegmentSource, staging: Staging) -> Copying:
    """Starts to copy rows into staging memory, on the pool's threads.

    numpy copies without the interpreter's lock, so that the training thread can start Orbax's part
    of the save at the same time.
    """
    fields, futures = {}, []
    for name, source in segment.fields.items():
        out = staging.take((len(segment.rows), *source.trailing), source.dtype)
        fields[name] = out
        # Threads that copy many small pieces would wait for each other's turn to run Python.
        if out.nbytes <= max(_INLINE_BYTES, _INLINE_PIECE_BYTES * len(source.shards)):
            source.gather(segment.rows, out)
            continue
        share = max(_LEAST_SHARE, -(-len(segment.rows) // staging.THREADS))
        for start in range(0, len(segment.rows), share):
            part = slice(start, start + share)
            futures.append(staging.submit(source.gather, segment.rows[part], out[part]))
    return Copying(RowBlock(segment.group, segment.rows, segment.columns, fields), futures)


def dispatched(segment: SegmentSource, codec_of: Mapping[str, Codec]) -> Dispatched:
    """Starts to copy rows from the devices, independently of the training state.

    Args:
      segment: the rows.
      codec_of: field name to codec; lossy ones encode on the devices.
    """
    fields = {
        name: source.dispatch(segment.rows, codec_of[name])
        for name, source in segment.fields.items()
    }
    lossy = frozenset(name for name in fields if not codec_of[name].lossless)
    return Dispatched(segment.group, segment.columns, segment.rows, fields, lossy)


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
