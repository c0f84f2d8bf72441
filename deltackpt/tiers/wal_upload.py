# SPDX-License-Identifier: Apache-2.0
"""Uploads a staged write-ahead log as it grows, so that it survives the loss of a node.

The epoch header is uploaded first, as a journal entry, before any save of its run: readers need it
to know which records of earlier epochs are valid. Records follow after the saves, oldest first. The
remote log is trimmed by the steps that are committed remotely, which are behind the staged ones.

Growing segments have no digests, so they are not sent as a ``Unit``: their records are verified,
and the names of the uploaded pieces state which bytes are missing.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import google_crc32c

from deltackpt.errors import Damaged, FormatMismatch
from deltackpt.format import naming, wal_format
from deltackpt.format.manifest import SaveId
from deltackpt.format.naming import PieceRange
from deltackpt.format.wal_format import EpochHeader
from deltackpt.ledger import entries
from deltackpt.ledger.committed import SEGMENT_BYTES
from deltackpt.ledger.entries import State, WalRef
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.uploaded_wal import HEAD, HEAD_COPY, pieces_at
from deltackpt.reading.wal_index import WalReader
from deltackpt.reading.wal_locations import NAME, DurableRecord, newest_durable
from deltackpt.reading.wal_records import ProcessWal, WalRecord
from deltackpt.resources.runtime import Pace
from deltackpt.storage.store import Missing, StorePath, store_path
from deltackpt.tiers.staging import StagingDir

_logger = logging.getLogger(__name__)

#: A growing segment is uploaded once it has grown by this much, or after this time.
PIECE_BYTES = 8 << 20
PIECE_SECS = 10.0


@dataclasses.dataclass(frozen=True)
class _UploadPiece:
    """A range of a segment to upload: complete records."""

    process: str
    name: str  # of the segment
    log: ProcessWal
    start: int  # offset in the file
    records: Sequence[WalRecord]
    is_closed: bool  # whether the segment is complete

    @property
    def segment(self) -> str:
        return f"{self.process}/{self.name}"

    @property
    def source(self) -> StorePath:
        return self.log.store_path / self.name

    @property
    def end(self) -> int:
        return self.records[-1].end

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def cut(self) -> _UploadPiece:
        """The leading records that are sent at once: at least one record."""
        count = 1
        while count < len(self.records) and self.records[count].end - self.start <= SEGMENT_BYTES:
            count += 1
        return dataclasses.replace(self, records=self.records[:count])


class _Damage(NamedTuple):
    """An altered record of a segment: where it ends, and until when it is considered altered."""

    end: int
    until: float


class WalUpload:
    """Uploads the log of one staging directory; used by one thread."""

    def __init__(self, stage: StagingDir):
        self._at = store_path(stage.steps / naming.LOG)
        self._logs = WalReader(self._at)
        #: What is uploaded of each segment, by WAL epoch: ``<process>/<segment>`` to pieces.
        self._sent: dict[str, dict[str, list[PieceRange]]] = {}
        #: When data of a segment was last sent, or first seen.
        self._since: dict[tuple[str, str], float] = {}
        self._damaged: dict[tuple[str, str], _Damage] = {}
        #: The newest record that is noted as uploaded, by WAL epoch and process.
        self._noted: dict[tuple[str, str], int] = {}
        #: WAL epochs whose staged headers are altered.
        self._unreadable: set[int] = set()

    # ---- epoch headers

    def upload_headers(self, journal: Journal) -> None:
        """Commits the staged epoch headers that the remote directory lacks."""
        fresh: list[EpochHeader] = []
        for number in self._logs.numbers():
            if number <= _newest(journal.known):
                break
            try:
                fresh.append(self._logs.head(number))
            except (Damaged, FormatMismatch) as error:
                # Its fork point is unknown: without it, records that must not count would.
                if number not in self._unreadable:
                    _logger.error("%s; no earlier remote WAL record is used", error)
                self._unreadable.add(number)
                journal.retire(lambda state: (one.prefix for one in state.entry.logs))
                break
        for head in reversed(fresh):
            self._upload_header(head, journal)

    def _upload_header(self, head: EpochHeader, journal: Journal) -> None:
        data = wal_format.epoch_header_bytes(head)
        prefix = entries.log_prefix(head.epoch, journal.claimed.lease.epoch)
        at = journal.root / prefix / HEAD
        ref = WalRef(
            epoch=head.epoch, run=head.run, prefix=prefix, crc32c=google_crc32c.value(data)
        )
        is_committed = False
        try:
            for one in (at, journal.root / prefix / HEAD_COPY):
                one.store.put(one.key, data)
            is_committed = journal.add_wal(ref)
        finally:
            if not is_committed:
                journal.abandon_upload(prefix)

    # ---- records

    def step(self, journal: Journal, pace: Pace, *, every: bool) -> bool:
        """Uploads the oldest piece that is due, or of ``every`` piece; returns whether it did."""
        for ref, process, log in self._staged(journal):
            # This or an earlier uploader may have sent records without noting that durably.
            self._note(ref, process, log, journal, is_checked=False)
            for piece in self._waiting(ref, process, log, journal):
                since = self._since.setdefault((ref.prefix, piece.segment), time.monotonic())
                late = time.monotonic() - since >= PIECE_SECS
                if every or piece.is_closed or late or piece.nbytes >= PIECE_BYTES:
                    if self._send(ref, piece.cut(), journal, pace):
                        return True
        return False

    def nbytes(self, journal: Journal) -> int:
        """Returns the bytes of complete staged records that were not uploaded yet."""
        return sum(
            piece.nbytes
            for staged in self._staged(journal)
            for piece in self._waiting(*staged, journal)
        )

    def _staged(self, journal: Journal) -> Iterator[tuple[WalRef, str, ProcessWal]]:
        """The staged WAL of each process, by remote WAL epoch, oldest first."""
        here = {*self._logs.numbers()}
        for ref in journal.known.entry.logs:
            if ref.epoch not in here:
                continue
            try:
                head = self._logs.head(ref.epoch)
            except (Damaged, FormatMismatch):
                continue  # No more of it will be uploaded.
            for process in range(head.process_count) if head.run == ref.run else ():
                log = self._logs.log_of(head, process)
                try:
                    log.advance()
                except FormatMismatch:
                    continue  # A newer version wrote it.
                yield ref, str(process), log

    def _waiting(
        self, ref: WalRef, process: str, log: ProcessWal, journal: Journal
    ) -> Iterator[_UploadPiece]:
        """What is staged and not uploaded of a process's WAL, by segment."""
        needed, sent = _oldest_needed(journal.known), self._known(ref, journal)
        is_over = ref.epoch < _newest(journal.known)
        left = len(log.segments)
        for name, records in log.segments.items():
            left -= 1
            is_closed, segment = is_over or left > 0, f"{process}/{name}"
            if is_closed and needed and all(one.save_id.step <= needed.step for one in records):
                continue  # It would be trimmed remotely at once.
            start = _end(sent, segment)
            fresh = [one for one in records if one.end > start]
            damaged = self._damaged.get((ref.prefix, segment))
            if damaged is not None and time.monotonic() < damaged.until:
                fresh = [one for one in fresh if one.end < damaged.end]
            if fresh:
                yield _UploadPiece(process, name, log, start, fresh, is_closed)

    def _send(self, ref: WalRef, piece: _UploadPiece, journal: Journal, pace: Pace) -> bool:
        try:
            self._check(ref, piece)
        except Damaged:
            return False
        journal.check()
        step = piece.records[-1].save_id.step
        try:
            for start in range(piece.start, piece.end, SEGMENT_BYTES):
                end = min(start + SEGMENT_BYTES, piece.end)
                pace.acquire(end - start)
                data = bytearray(end - start)
                piece.source.store.read_into(piece.source.key, start, [memoryview(data)])
                one = PieceRange(start, end, step)
                to = journal.root / ref.prefix / piece.segment / naming.piece_name(one)
                to.store.put(to.key, bytes(data))
                self._known(ref, journal).setdefault(piece.segment, []).append(one)
            self._note(ref, piece.process, piece.log, journal, is_checked=True)
        except Missing:
            return False  # The segment was trimmed concurrently.
        self._since[ref.prefix, piece.segment] = time.monotonic()
        return True

    def _note(
        self, ref: WalRef, process: str, log: ProcessWal, journal: Journal, *, is_checked: bool
    ) -> None:
        """Records the newest uploaded record of a process, as the process does locally."""
        at, sent = journal.root / ref.prefix / process, self._known(ref, journal)
        noted = self._noted.get((ref.prefix, process))
        if noted is None:
            noted = self._noted[ref.prefix, process] = newest_durable(at).number
        if noted >= log.durable.number:
            return
        ends = {name: _end(sent, f"{process}/{name}") for name in log.segments}
        fresh = [
            one.save_id
            for name, records in log.segments.items()
            for one in records
            if noted < one.save_id.attempt <= log.durable.number and one.end <= ends[name]
        ]
        if fresh:
            if not is_checked:
                journal.check()
            _put_progress(at, fresh[-1])
            self._noted[ref.prefix, process] = fresh[-1].attempt

    def _check(self, ref: WalRef, piece: _UploadPiece) -> None:
        for record in piece.records:
            try:
                record.layer.verify()
            except Damaged as error:
                # Records before this one are sent, and it is checked again later, because part of
                # another node's file may not be visible here yet.
                key = ref.prefix, piece.segment
                if piece.source.is_file():
                    if key not in self._damaged:
                        _logger.error("the uploaded WAL ends before %s: %s", record.save_id, error)
                    self._damaged[key] = _Damage(record.end, time.monotonic() + PIECE_SECS)
                raise

    # ---- trimming

    def trim(self, journal: Journal) -> None:
        """Deletes remote records that are not above its second-newest step."""
        oldest = _oldest_needed(journal.known)
        if oldest is None or not journal.known.entry.logs:
            return
        newest = journal.known.entry.logs[-1]
        if oldest.run == newest.run:
            over = [one.prefix for one in journal.known.entry.logs[:-1]]
            if over:
                journal.retire(lambda state: over)
        logs = journal.known.entry.logs
        for ref in logs:
            self._trim(ref, oldest.step, journal)
        prefixes = {ref.prefix for ref in logs}
        self._sent = {prefix: one for prefix, one in self._sent.items() if prefix in prefixes}
        self._since = {key: one for key, one in self._since.items() if key[0] in prefixes}

    def _trim(self, ref: WalRef, step: int, journal: Journal) -> None:
        known = self._known(ref, journal)
        last: dict[str, str] = {}
        for segment in sorted(known):
            last[segment.partition("/")[0]] = segment
        # The last segment of a process may grow, and its beginning is needed then.
        for segment in known.keys() - {*last.values()}:
            if all(piece.step <= step for piece in known[segment]):
                at = journal.root / ref.prefix / segment
                at.store.delete((at / naming.piece_name(piece)).key for piece in known[segment])
                del known[segment]

    def _known(self, ref: WalRef, journal: Journal) -> dict[str, list[PieceRange]]:
        """The uploaded records of a WAL epoch: listed once, as only this process uploads."""
        if ref.prefix not in self._sent:
            self._sent[ref.prefix] = pieces_at(journal.root / ref.prefix)
        return self._sent[ref.prefix]


def _end(sent: Mapping[str, Sequence[PieceRange]], segment: str) -> int:
    """The end of what is uploaded of a segment."""
    return max((piece.end for piece in sent.get(segment, ())), default=0)


def _put_progress(at: StorePath, newest: SaveId) -> None:
    (to := at / NAME).store.put(to.key, DurableRecord(newest.attempt, newest.step).to_bytes())


def _newest(state: State) -> int:
    """The number of the newest remote WAL epoch; a smaller one than all others if there is none."""
    return state.entry.logs[-1].epoch if state.entry.logs else -1


def _oldest_needed(state: State) -> SaveId | None:
    """The step onto which restores may replay the log: the remote directory's second newest."""
    steps = [*state.steps.values()]
    return steps[-2:][0].save_id if steps else None
