# SPDX-License-Identifier: Apache-2.0
"""Frames of the dense leaves of a full record: whole, or changed since the previous one.

Changes are blocks, encoded as ``ManagerOptions.dense`` sets, relative to the decoded previous full
record in the same file. Errors of lossy codecs do not add up: each record corrects the errors of
the previous one. The WAL has its own references, from the newest written batch. If a batch fails,
it is abandoned with everything else that is not durable, and the next record is whole, in a new
part.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from deltackpt.format import frames
from deltackpt.format.frames import BlocksHead, DenseHead, DenseValue
from deltackpt.format.manifest import SaveId
from deltackpt.save.coded_dense import CodedDense
from deltackpt.save.dense import DenseLeaves
from deltackpt.save.dense_blocks import DenseKeeper, TakenDense
from deltackpt.wal.frame import Frame, FramePlace, body_of

#: Full marks in a row that are against the one before, until one is whole again.
_AGAINST = 15
#: Field of a chunk whose values are not an array: its bytes.
_BYTE = 1
#: Values from this size on are long.
_LONG_BYTES = 1 << 20

T = TypeVar("T")


class DenseFrames:
    """Makes the frames of dense leaves of the records of one epoch; used by one thread."""

    def __init__(self, keeper: DenseKeeper | None):
        """Makes the first record whole.

        Args:
          keeper: keeps the references; None if all records are whole.
        """
        self._keeper = keeper
        self._reference: SaveId | None = None
        self._count = 0

    def restart(self) -> None:
        """Makes the next full record whole, for a new file or after a batch was abandoned."""
        if self._keeper is not None and self._reference is not None:
            self._keeper.references.failed(self._reference)
        self._reference, self._count = None, 0

    def of(
        self, dense: Dense | None, save_id: SaveId, pool: concurrent.futures.Executor
    ) -> Iterator[Frame]:
        """Returns the frames of a record.

        Args:
          dense: its captured dense leaves; None for a soft record.
          save_id: id of the record.
          pool: runs the encoding.
        """
        if isinstance(dense, DenseLeaves):
            yield from _whole(dense)
        elif dense is not None:
            yield from self._blocks(dense, save_id, pool)

    def _blocks(
        self, dense: TakenDense, save_id: SaveId, pool: concurrent.futures.Executor
    ) -> Iterator[Frame]:
        if self._count > _AGAINST:
            self.restart()
        self._count += 1
        against, self._reference = self._reference, save_id
        coded = dense.coded(against, save_id, pool)
        for values in _cut(coded.values, lambda one: one.taken.data.nbytes):
            places: list[FramePlace] = []

            def place_of(segment: str, places: list[FramePlace] = places) -> FramePlace:
                places.append(FramePlace(segment))
                return places[-1]

            record = CodedDense(values).write(place_of)
            held = [
                (place, segment.arrays)
                for place, segment in zip(places, record.segments, strict=True)
            ]
            body = body_of(held, pool)
            number = None if against is None else against.attempt
            yield Frame(BlocksHead(record=record, against=number, sizes=body.sizes), body.arrays)

    def written(self, save_id: SaveId) -> None:
        """Releases the copies of earlier records: the frames of a record were written."""
        if self._keeper is not None and self._reference == save_id:
            self._keeper.references.committed(save_id, save_id)


#: What is taken of dense leaves.
Dense = DenseLeaves | TakenDense


def dense_bytes(frame: Frame) -> int:
    """Returns the bytes of dense leaves in a frame."""
    if not isinstance(frame.head, (DenseHead, BlocksHead)):
        return 0
    return sum(
        piece.nbytes if isinstance(piece, np.ndarray) else len(piece)
        for pieces in frame.body
        for piece in pieces
    )


def _cut(values: Iterable[T], nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Splits values into frames: as many as fit whole into a body, or a single one.

    Short values do not share a frame with long ones: a reader that follows a few skips the rest.
    """
    short: list[T] = []
    long: list[T] = []
    for one in values:
        (short if nbytes_of(one) < _LONG_BYTES else long).append(one)
    for kind in (short, long):
        held: list[T] = []
        nbytes = 0
        for one in kind:
            if held and nbytes + nbytes_of(one) > frames.BODY_BYTES:
                yield held
                held, nbytes = [], 0
            held.append(one)
            nbytes += nbytes_of(one)
        if held:
            yield held


# Whole.


class _Plain(NamedTuple):
    """A value, or a file, of the dense item: its bytes, (n,) uint8."""

    key: str
    file: bool
    data: np.ndarray
    itemsize: int


def _whole(dense: DenseLeaves) -> Iterator[Frame]:
    for values in _cut(_plain_values(dense), lambda one: one.data.nbytes):
        heads = [
            DenseValue(
                key=one.key,
                file=one.file,
                nbytes=one.data.nbytes,
                decoded_bytes=one.data.nbytes,
                itemsize=one.itemsize,
            )
            for one in values
        ]
        yield Frame(DenseHead(values=tuple(heads)), [[one.data] for one in values])


def _plain_values(dense: DenseLeaves) -> Iterator[_Plain]:
    for name, text in dense.files.items():
        yield _Plain(name, True, np.frombuffer(text.encode(), np.uint8), _BYTE)
    for key, data in dense.values:
        if isinstance(data, bytes):
            yield _Plain(key, False, np.frombuffer(data, np.uint8), _BYTE)
        else:
            # Views of dtypes that no buffer describes are bytes like all others.
            flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            yield _Plain(key, False, flat, data.dtype.itemsize)
