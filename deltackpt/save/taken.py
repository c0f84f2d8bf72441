# SPDX-License-Identifier: Apache-2.0
"""The rows that a save captures from the training state: copied, or held.

Copied rows are still being copied when the training thread continues; afterwards nothing refers to
the training state. Held rows are views of it, or copies on their devices, until they are written.
Call the methods of both kinds in this order: ``wait`` in the training thread, ``land`` in the
background, then ``pieces`` for each field, and finally ``release``, even after an error.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt import vocab
from deltackpt.codecs import Codec
from deltackpt.format.blocks import Rows
from deltackpt.resources.runtime import Runtime, Task
from deltackpt.save import extract
from deltackpt.save.extract import FieldSource, SegmentSource
from deltackpt.save.pieces import DevicePiece, HostPiece, Piece, piece_rows
from deltackpt.state import contexts
from deltackpt.state.stacks import MemberRows
from deltackpt.storage import arrays

#: Rows of held state are encoded in pieces of about this size.
_HELD_PIECE_BYTES = arrays.CHUNK_BYTES
#: Fewer bytes are copied faster than another thread begins.
_INLINE_BYTES = 4 << 20
_INLINE_PIECE_BYTES = 16 << 10
#: Fewer rows are not worth a thread.
_LEAST_SHARE = 4096
#: Evicted rows with fewer bytes are stored like others: their segment would be as large.
_LEAST_EVICTED_BYTES = 4096


class CopiedRows:
    """Rows being copied to their own memory.

    Attributes:
      held: False.
      released: set as soon as nothing refers to the training state.
      segments: the captured segments.
    """

    held = False

    def __init__(
        self,
        segments: Sequence[SegmentSource],
        codecs_of: Callable[[SegmentSource], Mapping[str, Codec]],
        runtime: Runtime,
    ):
        """Starts to copy rows, on threads or on their devices.

        numpy copies without the interpreter's lock, so that the training thread can start Orbax's
        part of the save at the same time.

        Args:
          segments: what to copy.
          codecs_of: returns a segment's codecs by field name. Lossy ones encode on accelerators;
            those fields stay there until they are written, since a wider codec may be needed.
          runtime: whose memory holds the rows, and whose threads copy.
        """
        self.released = threading.Event()
        self._runtime = runtime
        self._tasks: list[Task[None]] = []
        #: Number of a segment and field to its rows in host memory, (rows, *trailing).
        self._on_host: dict[tuple[int, str], np.ndarray] = {}
        self._on_device: dict[tuple[int, str], list[DevicePiece]] = {}
        self._lossless: list[tuple[int, str]] = []
        #: For each segment, the number of the captured one and the positions of its rows there.
        self._origins: list[tuple[int, np.ndarray | None]] = [
            (number, None) for number in range(len(segments))
        ]
        try:
            for number, segment in enumerate(segments):
                codec_of = {} if segment.on_host else codecs_of(segment)
                for name, source in segment.fields.items():
                    if segment.on_host:
                        self._copy((number, name), source, segment.rows)
                    else:
                        codec = codec_of[name]
                        self._on_device[number, name] = source.dispatch(segment.rows, codec)
                        if codec.lossless:
                            self._lossless.append((number, name))
        except BaseException:
            self.release()
            raise
        self.segments = [segment.detached() for segment in segments]

    def _copy(self, key: tuple[int, str], source: FieldSource, rows: Rows) -> None:
        out = self._taken(key, len(rows), source.trailing, source.dtype)
        # Threads that copy many small pieces would wait for each other's turn to run Python.
        if out.nbytes <= max(_INLINE_BYTES, _INLINE_PIECE_BYTES * len(source.shards)):
            source.gather(rows, out)
            return
        share = max(_LEAST_SHARE, -(-len(rows) // self._runtime.threads))
        for start in range(0, len(rows), share):
            part = slice(start, start + share)
            self._tasks.append(self._runtime.submit(source.gather, rows[part], out[part]))

    def _taken(
        self, key: tuple[int, str], count: int, trailing: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        self._on_host[key] = self._runtime.memory.take((count, *trailing), dtype)
        return self._on_host[key]

    def wait(self) -> None:
        """Waits until the training state is no longer read; devices read it before later steps."""
        for task in self._tasks:
            task.wait()
        self.released.set()

    def land(self) -> None:
        """Waits for the copies, and copies lossless fields of devices to host memory.

        Raises:
          Exception: the error of a copy.
        """
        self.wait()
        for task in self._tasks:
            task.result()
        while self._lossless:
            key = self._lossless.pop()
            pieces, start = self._on_device.pop(key), 0
            first, count = pieces[0].rows, len(self.segments[key[0]].rows)
            out = self._taken(key, count, first.shape[1:], np.dtype(first.dtype))
            for piece in pieces:
                out[start : start + piece.count] = piece.host()
                start += piece.count
        if any(segment.key is not None for segment in self.segments):
            self._split_evicted()

    def _split_evicted(self) -> None:
        """Moves evicted rows to segments of their own, of which only the row indices are stored."""
        segments, origins = [], []
        for number, segment in enumerate(self.segments):
            evicted = self._evicted(number, segment)
            count = np.count_nonzero(evicted)
            if count * segment.row_bytes < _LEAST_EVICTED_BYTES:
                segments.append(segment)
                origins.append((number, None))
                continue
            rows = np.asarray(segment.rows)
            if count < len(rows):
                segments.append(dataclasses.replace(segment, rows=rows[~evicted]))
                origins.append((number, np.flatnonzero(~evicted)))
            segments.append(dataclasses.replace(segment, rows=rows[evicted], evicted=True))
            origins.append((number, np.flatnonzero(evicted)))
        self.segments, self._origins = segments, origins

    def _evicted(self, number: int, segment: SegmentSource) -> np.ndarray:
        """Returns which rows have no id, and zeros in all other fields; (rows,) bool."""
        found = np.zeros(len(segment.rows), bool)
        held = {name: self._on_host.get((number, name)) for name in segment.fields}
        key = None if segment.key is None else held.pop(segment.key, None)
        # A table of two columns may be split, and its key column with it.
        if segment.kind == "base" or key is None or vocab.column_fault(key.shape, key.dtype):
            return found
        without_id = np.flatnonzero(vocab.ids_of(key) == vocab.NO_ID)
        for rows in held.values():
            if rows is None:  # It was encoded on its device.
                return found
            if len(without_id):
                bits = rows.take(without_id, 0).reshape(len(without_id), -1).view(np.uint8)
                without_id = without_id[~bits.any(axis=1)]
        found[without_id] = True
        return found

    def pieces(self, number: int, field: str, codec: Codec) -> Iterator[Piece]:
        """Yields the rows of one field of a segment in order, in pieces suitable for a codec.

        A lossless field is one piece, unless rows without an id were moved out of its segment.
        """
        source = self.segments[number].fields[field]
        number, positions = self._origins[number]
        if (number, field) in self._on_device:
            yield from self._on_device[number, field]
            return
        rows, limit = self._on_host[number, field], piece_rows(source.trailing)
        if positions is not None:
            if codec.lossless:
                limit = max(1, _HELD_PIECE_BYTES // max(1, source.row_bytes))
            for start in range(0, len(positions), limit):
                yield HostPiece(rows.take(positions[start : start + limit], 0))
            return
        if codec.lossless:
            limit = max(1, len(rows))
        for start in range(0, len(rows), limit):
            yield HostPiece(rows[start : start + limit])

    def release(self) -> None:
        """Releases the memory, once nothing writes to it. Idempotent."""
        self.wait()
        self._runtime.memory.give_back(self._on_host.values())
        self._on_host.clear()
        self._on_device.clear()


class HeldRows:
    """Rows that are read from the training state until they are written; see ``CopiedRows``."""

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
        """See ``CopiedRows``: contiguous raw rows are written without a copy."""
        rows, source = self.segments[number].rows, self.segments[number].fields[field]
        chunk_rows = max(1, _HELD_PIECE_BYTES // max(1, source.row_bytes))
        if not codec.lossless:
            on_host = piece_rows(source.trailing)
            return source.pieces(rows, on_host if source.on_host else chunk_rows)
        in_place = codec.name == "raw" and not isinstance(rows, np.ndarray) and source.in_order
        return source.pieces(rows, max(1, len(rows)) if in_place else chunk_rows)

    def release(self) -> None:
        """Drops the references to the training state."""
        self.segments = [segment.detached() for segment in self.segments]
        self.released.set()


#: The rows of one save, independent of later training steps.
TakenRows = CopiedRows | HeldRows


@jax.jit
def _device_copy(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def _hold(segment: SegmentSource) -> None:
    for source in segment.fields.values():
        for shard in source.shards:
            if isinstance(shard.data, MemberRows):
                shard.data = shard.data.held()
            elif isinstance(shard.data, jax.Array):
                if extract.on_host(shard.data):
                    shard.data = np.asarray(shard.data)
                else:
                    with contexts.beside(shard.data):
                        held = shard.data[shard.skip : shard.skip + shard.stop - shard.start]
                        [shard.data], shard.skip = _device_copy([held]), 0
