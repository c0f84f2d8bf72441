# SPDX-License-Identifier: Apache-2.0
"""Brings the log of a stage to its root as it grows, so that a lost node does not take it along.

The head of a stretch comes first, as an entry of the journal: before any save of its run, so that
whoever reads the root knows what of earlier stretches counts. What is logged follows behind the
saves, the oldest first, whole marks whose checksums hold. It goes from the root by the steps that
are committed there, and not by those of the stage, which are ahead of them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import google_crc32c

from deltackpt.errors import Damaged, FormatTooNew
from deltackpt.format import names, stretches
from deltackpt.format.manifest import SaveId
from deltackpt.format.names import PieceRange
from deltackpt.format.stretches import StretchHead
from deltackpt.ledger import entries
from deltackpt.ledger.committed import SEGMENT_BYTES
from deltackpt.ledger.entries import LogRef, State
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.promoted_log import HEAD, pieces_at
from deltackpt.reading.log_files import Mark
from deltackpt.reading.stretches import Logs
from deltackpt.resources.pace import Pace
from deltackpt.storage.store import Missing, Spot, spot
from deltackpt.tiers.stage import Stage

_logger = logging.getLogger(__name__)

#: A segment that grows is sent once it has grown by so much, or for so long.
PIECE_BYTES = 8 << 20
PIECE_SECS = 10.0


@dataclasses.dataclass(frozen=True)
class _Piece:
    """What is to be sent of a segment: whole marks.

    Attributes:
      segment: ``<process>/<segment>``.
      source: the file.
      start: where it begins in it.
      marks: its marks.
      is_closed: whether the segment grows no more.
    """

    segment: str
    source: Spot
    start: int
    marks: Sequence[Mark]
    is_closed: bool

    @property
    def end(self) -> int:
        return self.marks[-1].end

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def cut(self) -> _Piece:
        """As much of it as is sent at once: one mark at least."""
        count = 1
        while count < len(self.marks) and self.marks[count].end - self.start <= SEGMENT_BYTES:
            count += 1
        return dataclasses.replace(self, marks=self.marks[:count])


class _Damage(NamedTuple):
    """A mark of a segment that is altered: where it ends, and until when it is taken for so."""

    end: int
    until: float


class LogPromotion:
    """The log of one stage on its way to the root; used by one thread."""

    def __init__(self, stage: Stage, clock: Callable[[], float] = time.monotonic):
        """Reads and writes nothing yet."""
        self._at = spot(stage.steps / names.LOG)
        self._logs = Logs(self._at)
        self._clock = clock
        #: How far each segment is at the root, by stretch: ``<process>/<segment>`` to pieces.
        self._sent: dict[str, dict[str, list[PieceRange]]] = {}
        #: When something of a segment was sent last, or seen first.
        self._since: dict[tuple[str, str], float] = {}
        self._damaged: dict[tuple[str, str], _Damage] = {}
        #: Stretches whose heads are altered in the stage.
        self._unreadable: set[int] = set()

    # ---- heads

    def bring_heads(self, journal: Journal) -> None:
        """Makes the heads in the stage count at the root that do not yet.

        Raises:
          FencedError, StorageError: as ``Journal.commit``.
        """
        fresh: list[StretchHead] = []
        for number in self._logs.numbers():
            if number <= _newest(journal.known):
                break
            try:
                fresh.append(self._logs.head(number))
            except (Damaged, FormatTooNew) as error:
                # Nobody knows what it goes on from: without it more than that would count.
                if number not in self._unreadable:
                    _logger.error("%s; of the log nothing before it counts at the root", error)
                self._unreadable.add(number)
                journal.retire_logs([one.stretch for one in journal.known.entry.logs])
                break
        for head in reversed(fresh):
            self._bring(head, journal)

    def _bring(self, head: StretchHead, journal: Journal) -> None:
        data = stretches.to_bytes(head)
        prefix = entries.log_prefix(head.stretch, journal.claimed.lease.epoch)
        at = journal.root / prefix / HEAD
        ref = LogRef(
            stretch=head.stretch, run=head.run, prefix=prefix, crc32c=google_crc32c.value(data)
        )
        stands = False
        try:
            at.store.put(at.key, data)
            stands = journal.add_log(ref)
        finally:
            if not stands:
                journal.give_up(prefix)

    # ---- what is logged

    def step(self, journal: Journal, pace: Pace, *, every: bool) -> bool:
        """Sends one piece, the oldest that is due.

        Args:
          journal: of the root.
          pace: bounds the bytes per second.
          every: whether all is due that is there: nothing will be added.

        Returns:
          Whether there was one.

        Raises:
          FencedError: another trainer has taken the root.
          StorageError: the root refused, or did not answer.
        """
        for ref, piece in self._waiting(journal):
            since = self._since.setdefault((ref.prefix, piece.segment), self._clock())
            late = self._clock() - since >= PIECE_SECS
            if every or piece.is_closed or late or piece.nbytes >= PIECE_BYTES:
                if self._send(ref, piece.cut(), journal, pace):
                    return True
        return False

    def nbytes(self, journal: Journal) -> int:
        """Bytes of whole marks in the stage that may come to the root and have not."""
        return sum(piece.nbytes for _, piece in self._waiting(journal))

    def _waiting(self, journal: Journal) -> Iterator[tuple[LogRef, _Piece]]:
        """What is in the stage and not at the root, by stretch and process, oldest first."""
        here = {*self._logs.numbers()}
        for ref in journal.known.entry.logs:
            if ref.stretch not in here:
                continue
            try:
                head = self._logs.head(ref.stretch)
            except (Damaged, FormatTooNew):
                continue  # What came to the root of it is all that comes.
            if head.run == ref.run:
                for process in range(head.process_count):
                    for piece in self._of_process(ref, head, process, journal):
                        yield ref, piece

    def _of_process(
        self, ref: LogRef, head: StretchHead, process: int, journal: Journal
    ) -> Iterator[_Piece]:
        log, needed = self._logs.log_of(head, process), _oldest_needed(journal.known)
        log.advance()
        is_over, sent = ref.stretch < _newest(journal.known), self._known(ref, journal)
        left = len(log.segments)
        for name, marks in log.segments.items():
            left -= 1
            is_closed, segment = is_over or left > 0, f"{process}/{name}"
            if is_closed and needed and all(one.save_id.step <= needed.step for one in marks):
                continue  # It would go from the root at once.
            start = max((piece.end for piece in sent.get(segment, ())), default=0)
            fresh = [one for one in marks if one.end > start]
            damaged = self._damaged.get((ref.prefix, segment))
            if damaged is not None and self._clock() < damaged.until:
                fresh = [one for one in fresh if one.end < damaged.end]
            if fresh:
                source = self._logs.segments_of(head) / segment
                yield _Piece(segment, source, start, fresh, is_closed)

    def _send(self, ref: LogRef, piece: _Piece, journal: Journal, pace: Pace) -> bool:
        """Puts a piece whose frames are as they were written."""
        try:
            self._check(ref, piece)
        except Damaged:
            return False
        journal.check()
        step = piece.marks[-1].save_id.step
        try:
            for start in range(piece.start, piece.end, SEGMENT_BYTES):
                end = min(start + SEGMENT_BYTES, piece.end)
                pace.take(end - start)
                data = bytearray(end - start)
                piece.source.store.read_into(piece.source.key, start, [memoryview(data)])
                one = PieceRange(start, end, step)
                to = journal.root / ref.prefix / piece.segment / names.piece_name(one)
                to.store.put(to.key, bytes(data))
                self._known(ref, journal).setdefault(piece.segment, []).append(one)
        except Missing:
            return False  # It was trimmed meanwhile.
        self._since[ref.prefix, piece.segment] = self._clock()
        return True

    def _check(self, ref: LogRef, piece: _Piece) -> None:
        """Checks that frames are as they were written: what is altered here reaches no bucket.

        Raises:
          Damaged: one is not; what comes before it is sent, and it is looked at again later: of a
            file of another node some may not have come here yet.
        """
        for mark in piece.marks:
            try:
                for frame in mark.frames:
                    frame.check()
            except Damaged as error:
                key = ref.prefix, piece.segment
                if piece.source.is_file():
                    if key not in self._damaged:
                        _logger.error("the log at the root ends before %s: %s", mark.save_id, error)
                    self._damaged[key] = _Damage(mark.end, self._clock() + PIECE_SECS)
                raise

    # ---- what nothing needs any more

    def trim(self, journal: Journal) -> None:
        """Deletes at the root the marks that are not above its last but one step.

        Raises:
          FencedError, StorageError: as ``Journal.commit``.
        """
        oldest = _oldest_needed(journal.known)
        if oldest is None or not journal.known.entry.logs:
            return
        newest = journal.known.entry.logs[-1]
        if oldest.run == newest.run:
            over = [one.stretch for one in journal.known.entry.logs[:-1]]
            if over:
                journal.retire_logs(over)
        logs = journal.known.entry.logs
        for ref in logs:
            self._trim(ref, oldest.step, journal)
        prefixes = {ref.prefix for ref in logs}
        self._sent = {prefix: one for prefix, one in self._sent.items() if prefix in prefixes}
        self._since = {key: one for key, one in self._since.items() if key[0] in prefixes}

    def _trim(self, ref: LogRef, step: int, journal: Journal) -> None:
        known = self._known(ref, journal)
        last: dict[str, str] = {}
        for segment in sorted(known):
            last[segment.partition("/")[0]] = segment
        # The last one of a process may grow, and its beginning is needed then.
        for segment in known.keys() - {*last.values()}:
            if all(piece.step <= step for piece in known[segment]):
                at = journal.root / ref.prefix / segment
                at.store.delete((at / names.piece_name(piece)).key for piece in known[segment])
                del known[segment]

    def _known(self, ref: LogRef, journal: Journal) -> dict[str, list[PieceRange]]:
        """What is at the root of a stretch: listed once, since nobody else puts anything there."""
        if ref.prefix not in self._sent:
            found = pieces_at(journal.root / ref.prefix)
            self._sent[ref.prefix] = {segment: [*one.every] for segment, one in found.items()}
        return self._sent[ref.prefix]


def _newest(state: State) -> int:
    """The number of the newest stretch at the root; below all others where there is none."""
    return state.entry.logs[-1].stretch if state.entry.logs else -1


def _oldest_needed(state: State) -> SaveId | None:
    """The step from which restores may go on by the log: the last but one at the root."""
    steps = [*state.steps.values()]
    return steps[-2:][0].save_id if steps else None
