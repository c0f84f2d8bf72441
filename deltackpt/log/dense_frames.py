# SPDX-License-Identifier: Apache-2.0
"""Frames of the dense leaves of a full mark: whole, or what changed since the full mark before.

What changed is blocks, by the codes of ``ManagerOptions.dense``, against what the full mark before
in the same file decodes to. Errors of lossy codes do not add up: each mark corrects those of the
one before. The references are the log's own, and those of the newest batch that was written: where
one fails, all that is not durable is given up with it, and the next mark is whole, in a new part.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt.format import frames
from deltackpt.format.frames import BlocksHead, DenseHead, DenseValue
from deltackpt.format.manifest import SaveId
from deltackpt.log.frame import Frame, FramePlace, body_of
from deltackpt.save.coded_dense import CodedDense, CodedValue
from deltackpt.save.dense import DenseLeaves
from deltackpt.save.dense_blocks import DenseKeeper, TakenDense

#: Full marks in a row that are against the one before, until one is whole again.
_AGAINST = 15
#: Of a chunk whose numbers are no array: its bytes.
_BYTE = 1


class DenseFrames:
    """Makes the frames of dense leaves of the marks of one stretch; used by one thread."""

    def __init__(self, keeper: DenseKeeper | None):
        """The first mark is whole.

        Args:
          keeper: of the references; None where all marks are whole.
        """
        self._keeper = keeper
        self._reference: SaveId | None = None
        self._count = 0

    def restart(self) -> None:
        """The next full mark is whole: a file begins, or a batch was given up."""
        if self._keeper is not None and self._reference is not None:
            self._keeper.references.failed(self._reference)
        self._reference, self._count = None, 0

    def of(
        self, dense: Dense | None, save_id: SaveId, pool: concurrent.futures.Executor
    ) -> Iterator[Frame]:
        """The frames of a mark.

        Args:
          dense: what was taken of its leaves; None of a soft one.
          save_id: of the mark.
          pool: encodes.
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
        for values in _cut(coded.values):
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
        """The frames of a mark were written: nothing reads the copies of earlier ones any more."""
        if self._keeper is not None and self._reference == save_id:
            self._keeper.references.committed(save_id, save_id)


#: What is taken of dense leaves.
Dense = DenseLeaves | TakenDense


def dense_bytes(frame: Frame) -> int:
    """Bytes of dense leaves in a frame."""
    if not isinstance(frame.head, (DenseHead, BlocksHead)):
        return 0
    return sum(
        piece.nbytes if isinstance(piece, np.ndarray) else len(piece)
        for pieces in frame.body
        for piece in pieces
    )


def _cut(values: Sequence[CodedValue]) -> Iterator[list[CodedValue]]:
    """The values of each frame: as many as its body would hold whole, or a single one."""
    held: list[CodedValue] = []
    nbytes = 0
    for one in values:
        if held and nbytes + one.taken.data.nbytes > frames.BODY_BYTES:
            yield held
            held, nbytes = [], 0
        held.append(one)
        nbytes += one.taken.data.nbytes
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
    for values in _frame_values(dense):
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


def _frame_values(dense: DenseLeaves) -> Iterator[list[_Plain]]:
    """The values of each frame: small ones together."""
    held: list[_Plain] = []
    nbytes = 0
    for one in _plain_values(dense):
        if held and nbytes + one.data.nbytes > frames.BODY_BYTES:
            yield held
            held, nbytes = [], 0
        held.append(one)
        nbytes += one.data.nbytes
    if held:
        yield held


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
