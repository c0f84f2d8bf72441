# SPDX-License-Identifier: Apache-2.0
"""Uploads a staged write-ahead log as it grows, so that it survives the loss of a node.

The epoch header is uploaded first, as a journal entry, before any save of its run: readers need it
to know which records of earlier epochs are valid. Records follow after the saves, oldest first. The
remote log is trimmed by the steps that are committed remotely, which are behind the staged ones.

Growing segments have no digests, so they are not sent as a ``Unit``: their records are verified,
and the names of the uploaded pieces state which bytes are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
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
from deltackpt.ledger.uploaded_wal import HEAD, HEAD_COPY, UploadedWals, pieces_at
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


@dataclasses.dataclass
class _Uploaded:
    """What is uploaded of a segment."""

    pieces: list[PieceRange] = dataclasses.field(default_factory=list)
    #: When data of it was last sent, or first seen.
    since: float = dataclasses.field(default_factory=time.monotonic)
    #: Where an altered record ends, and until when it is considered altered.
    damaged: tuple[int, float] | None = None

    @property
    def end(self) -> int:
        return max((piece.end for piece in self.pieces), default=0)


class _ToUpload(NamedTuple):
    """Complete records of a segment that are not uploaded."""

    at: StorePath  # remote folder of the segment
    source: StorePath
    sent: _Uploaded
    records: Sequence[WalRecord]
    is_closed: bool  # whether the segment is complete

    @property
    def nbytes(self) -> int:
        return self.records[-1].end - self.sent.end

    def at_once(self) -> Sequence[WalRecord]:
        """The leading records that are sent at once: at least one record."""
        count = 1
        most = self.sent.end + SEGMENT_BYTES
        while count < len(self.records) and self.records[count].end <= most:
            count += 1
        return self.records[:count]


class WalUpload:
    """Uploads the log of one staging directory under one claim; used by one thread."""

    def __init__(self, stage: StagingDir, journal: Journal):
        self._at = store_path(stage.steps / naming.LOG)
        self._logs = WalReader(self._at)
        self._journal = journal
        #: By prefix of the WAL epoch, and ``<process>/<segment>``.
        self._sent: dict[str, dict[str, _Uploaded]] = {}
        #: The newest record that is noted as uploaded, by WAL epoch and process.
        self._noted: dict[tuple[str, str], int] = {}
        #: Prefix of the newest remote epoch to the step of the point that it continues from.
        self._ends: dict[str, int] = {}
        #: WAL epochs whose staged headers are altered.
        self._unreadable: set[int] = set()

    # ---- epoch headers

    def upload_headers(self) -> None:
        """Commits the staged epoch headers that the remote directory lacks."""
        fresh: list[EpochHeader] = []
        for number in self._logs.numbers():
            if number <= self._newest():
                break
            try:
                fresh.append(self._logs.head(number))
            except (Damaged, FormatMismatch) as error:
                # Its fork point is unknown: without it, records that must not count would.
                if number not in self._unreadable:
                    _logger.error("%s; no earlier remote WAL record is used", error)
                self._unreadable.add(number)
                self._journal.retire(lambda state: (one.prefix for one in state.entry.logs))
                break
        for head in reversed(fresh):
            self._upload_header(head)

    def _upload_header(self, head: EpochHeader) -> None:
        data, journal = wal_format.epoch_header_bytes(head), self._journal
        prefix = entries.log_prefix(head.epoch, journal.claimed.lease.epoch)
        ref = WalRef(
            epoch=head.epoch, run=head.run, prefix=prefix, crc32c=google_crc32c.value(data)
        )
        is_committed = False
        try:
            for name in (HEAD, HEAD_COPY):
                at = journal.root / prefix / name
                at.store.put(at.key, data)
            is_committed = journal.add_wal(ref)
        finally:
            if not is_committed:
                journal.abandon_upload(prefix)

    def _newest(self) -> int:
        """The number of the newest remote WAL epoch; if there is none, smaller than all others."""
        logs = self._journal.known.entry.logs
        return logs[-1].epoch if logs else -1

    # ---- records

    def step(self, pace: Pace, *, every: bool) -> bool:
        """Uploads the oldest piece that is due, or of ``every`` piece; returns whether it did."""
        for ref, process, log in self._staged():
            # This or an earlier uploader may have sent records without noting that durably.
            self._note(ref, process, log, is_checked=False)
            for one in self._waiting(ref, process, log):
                late = time.monotonic() - one.sent.since >= PIECE_SECS
                if every or one.is_closed or late or one.nbytes >= PIECE_BYTES:
                    if self._send(one, pace):
                        self._note(ref, process, log, is_checked=True)
                        return True
        return False

    def nbytes(self) -> int:
        """Returns the bytes of complete staged records that were not uploaded yet."""
        return sum(one.nbytes for staged in self._staged() for one in self._waiting(*staged))

    def _staged(self) -> Iterator[tuple[WalRef, str, ProcessWal]]:
        """The staged WAL of each process, by remote WAL epoch, oldest first."""
        here = {*self._logs.numbers()}
        for ref in self._journal.known.entry.logs:
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

    def _waiting(self, ref: WalRef, process: str, log: ProcessWal) -> Iterator[_ToUpload]:
        """What is staged and not uploaded of a process's WAL, by segment."""
        needed, known = oldest_needed(self._journal.known), self._known(ref)
        is_over = ref.epoch < self._newest()
        left = len(log.segments)
        for name, records in log.segments.items():
            left -= 1
            is_closed = is_over or left > 0
            if is_closed and needed and all(one.save_id.step <= needed.step for one in records):
                continue  # It would be trimmed remotely at once.
            segment = f"{process}/{name}"
            sent = known.setdefault(segment, _Uploaded())
            end = sent.end
            fresh = [one for one in records if one.end > end]
            if sent.damaged is not None and time.monotonic() < sent.damaged[1]:
                fresh = [one for one in fresh if one.end < sent.damaged[0]]
            if fresh:
                at, source = self._journal.root / ref.prefix / segment, log.store_path / name
                yield _ToUpload(at, source, sent, fresh, is_closed)

    def _send(self, one: _ToUpload, pace: Pace) -> bool:
        records = one.at_once()
        if not self._are_intact(one, records):
            return False
        self._journal.check()
        last = records[-1]
        try:
            for start in range(one.sent.end, last.end, SEGMENT_BYTES):
                end = min(start + SEGMENT_BYTES, last.end)
                pace.acquire(end - start)
                data = bytearray(end - start)
                one.source.store.read_into(one.source.key, start, [memoryview(data)])
                piece = PieceRange(start, end, last.save_id.step)
                to = one.at / naming.piece_name(piece)
                to.store.put(to.key, bytes(data))
                one.sent.pieces.append(piece)
        except Missing:
            return False  # The segment was trimmed concurrently.
        one.sent.since = time.monotonic()
        return True

    def _note(self, ref: WalRef, process: str, log: ProcessWal, *, is_checked: bool) -> None:
        """Records the newest uploaded record of a process, as the process does locally."""
        at, known = self._journal.root / ref.prefix / process, self._known(ref)
        noted = self._noted.get((ref.prefix, process))
        if noted is None:
            noted = self._noted[ref.prefix, process] = newest_durable(at).number
        if noted >= log.durable.number:
            return
        fresh = [
            one.save_id
            for name, records in log.segments.items()
            if (sent := known.get(f"{process}/{name}")) is not None
            for end in (sent.end,)
            for one in records
            if noted < one.save_id.attempt <= log.durable.number and one.end <= end
        ]
        if fresh:
            if not is_checked:
                self._journal.check()
            _put_progress(at, fresh[-1])
            self._noted[ref.prefix, process] = fresh[-1].attempt

    def _are_intact(self, one: _ToUpload, records: Sequence[WalRecord]) -> bool:
        for record in records:
            try:
                record.layer.verify()
            except Damaged as error:
                # Records before this one are sent, and it is checked again later, because part of
                # another node's file may not be visible here yet.
                if one.source.is_file():
                    if one.sent.damaged is None:
                        _logger.error("the uploaded WAL ends before %s: %s", record.save_id, error)
                    one.sent.damaged = record.end, time.monotonic() + PIECE_SECS
                return False
        return True

    # ---- trimming

    def trim(self) -> None:
        """Deletes remote records that are not above its second-newest step."""
        journal = self._journal
        oldest = oldest_needed(journal.known)
        if oldest is None or not journal.known.entry.logs:
            return
        *over, newest = journal.known.entry.logs
        if over and oldest.run == newest.run and self._newest_end(newest) <= oldest.step:
            journal.retire(lambda state: (one.prefix for one in over))
        logs = journal.known.entry.logs
        for ref in logs:
            self._trim(ref, oldest.step)
        prefixes = {ref.prefix for ref in logs}
        self._sent = {prefix: one for prefix, one in self._sent.items() if prefix in prefixes}

    def _newest_end(self, newest: WalRef) -> int:
        """Returns the step of the point that the newest epoch continues from, or -1."""
        if newest.prefix not in self._ends:
            journal, end = self._journal, None
            # Without a header, no earlier record counts.
            with contextlib.suppress(Damaged):
                uploaded = WalReader(UploadedWals(journal.root, lambda: journal.known))
                end = uploaded.head(newest.epoch).continues
            self._ends = {newest.prefix: -1 if end is None else end.save_id.step}
        return self._ends[newest.prefix]

    def _trim(self, ref: WalRef, step: int) -> None:
        known, last = self._known(ref), dict[str, str]()
        for segment in sorted(known):
            last[segment.partition("/")[0]] = segment
        # The last segment of a process may grow, and its beginning is needed then.
        for segment in known.keys() - {*last.values()}:
            sent = known[segment]
            if sent.damaged is not None and not sent.pieces:
                continue  # Already reported; it is checked again.
            if all(piece.step <= step for piece in sent.pieces):
                at = self._journal.root / ref.prefix / segment
                at.store.delete((at / naming.piece_name(piece)).key for piece in sent.pieces)
                del known[segment]

    def _known(self, ref: WalRef) -> dict[str, _Uploaded]:
        """The uploaded records of a WAL epoch: listed once, as only this process uploads."""
        if ref.prefix not in self._sent:
            found = pieces_at(self._journal.root / ref.prefix)
            self._sent[ref.prefix] = {
                segment: _Uploaded([*pieces]) for segment, pieces in found.items()
            }
        return self._sent[ref.prefix]


def _put_progress(at: StorePath, newest: SaveId) -> None:
    (to := at / NAME).store.put(to.key, DurableRecord(newest.attempt, newest.step).to_bytes())


def oldest_needed(state: State) -> SaveId | None:
    """Returns the oldest step onto which restores replay the WAL: the second-newest remote one."""
    steps = [*state.steps.values()]
    return steps[-2:][0].save_id if steps else None
