# SPDX-License-Identifier: Apache-2.0
"""The stages of a save: snapshot (training thread), then encode, write, digest, manifest.

``snapshot`` is the only part that blocks training. What it hands to the background is either
*copied* (the touched rows, in staging memory) or *held* (views of the training state, for a base
or for a delta larger than the staging budget), and ``PendingSave.released`` is set as soon as
nothing of the training state is referred to any more.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from deltackpt import __about__, codecs, events, processes
from deltackpt.codecs import Codec
from deltackpt.errors import OutOfSpace, TrackingError
from deltackpt.format import blocks, gaps, manifest, names
from deltackpt.format.manifest import GroupEntry, Manifest, Segment
from deltackpt.policy import Choice, too_large
from deltackpt.reading import saves
from deltackpt.resources.staging import Staging
from deltackpt.save import encode, extract, proof
from deltackpt.save import fields as field_writer
from deltackpt.save.encode import Piece
from deltackpt.save.extract import Copying, Dispatched, Landed, Owned, SegmentSource
from deltackpt.save.fields import Place, StoredArrays
from deltackpt.save.lineage import Clocks, Intent, Lineage, Reading
from deltackpt.save.rendezvous import Rendezvous
from deltackpt.state.marks import match_marks
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState, plain
from deltackpt.storage import arrays, files
from deltackpt.storage import digests as integrity
from deltackpt.storage.digests import Digest, Digests

#: Rows of held state are encoded in pieces of about this size.
PIECE_BYTES = arrays.CHUNK_BYTES
_WRITERS = 2
_ENCODERS = 2
#: Group name to field name to the codec that a save tries first.
Plans = Mapping[str, Mapping[str, Choice]]
_PROCEED_SECS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How saves are staged and written.

    Attributes:
      fsync: whether every file is on disk before its part counts as written.
      staging_bytes: host memory for copied rows, over all saves in flight.
      digests: digest files that the commit promises; see ``Manifest.digests``.
      sampled_proof: whether saves prove a sample of the rows: see ``proof``.
      processes_secs: how long a process that has written its part waits for the others.
    """

    fsync: bool = True
    staging_bytes: int = 1 << 30
    digests: tuple[str, ...] = ("item",)
    sampled_proof: bool = True
    processes_secs: float = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Embeddings:
    """The tables and slots of one state, and what saving them needs: our checkpointable.

    Attributes:
      split: the state, split by ``tables.split``; its dense leaves are not saved here.
      touched: a TouchState given beside those of the state; a row is touched if any of them says
        so. Without any the save is a base.
      lineage: what the trainer knows of its saves; None gives a base of a run of its own.
      options: how to stage and write.
      staging: the pool shared by the saves of one manager.
      force_base: take a base whatever the policy says.
    """

    split: Split
    touched: TouchState | None = None
    lineage: Lineage | None = None
    options: PipelineOptions = PipelineOptions()
    staging: Staging | None = None
    force_base: bool = False

    @property
    def marks(self) -> tuple[Marks, ...]:
        """The TouchStates of the state, and the one given where it is another."""
        given = self.touched
        if given is None or any(marks.state.clock is given.clock for marks in self.split.marks):
            return self.split.marks
        return *self.split.marks, Marks("", plain(given))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What the background half of a save did; its stages are those of ``events.SaveEvent``.

    ``rows``, ``bytes_written`` and ``tables`` are of this process's part, ``base_bytes`` is what
    all rows of tables and slots take unencoded.
    """

    intent: Intent
    rows: int
    total_rows: int
    bytes_written: int
    base_bytes: int
    extract_secs: float
    encode_secs: float
    write_secs: float
    digest_secs: float
    tables: tuple[events.TableFigures, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracked:
    """What the training thread found of the touched rows.

    Attributes:
      faults: what the sampled proof found; None where it holds.
      shared: checksums of what other processes must have found alike: ``Stamps.shared``.
    """

    faults: str | None = None
    shared: Mapping[str, int] = dataclasses.field(default_factory=dict)


class PendingSave:
    """A save whose snapshot was taken; ``write`` runs once, in the background."""

    def __init__(
        self,
        embeddings: Embeddings,
        intent: Intent,
        segments: Sequence[SegmentSource],
        copied: Sequence[Copying | Dispatched] | None,
        plans: Plans,
        staging: Staging,
        extract_secs: float,
        owned: Owned,
        tracked: Tracked,
    ):
        """Made by ``snapshot``."""
        self.intent = intent
        #: Why the touched rows were not trusted, and all rows are saved; None where they were.
        self.doubt = tracked.faults if intent.kind == "base" else None
        self._tracked = tracked
        self.plans = plans
        self.released = threading.Event()
        #: ``write`` waits for it: busy beside the start of Orbax's own threads it would cost
        #: each of them, and so the training thread, a switch interval of the interpreter.
        self.proceed = threading.Event()
        self.report: SaveReport | None = None
        self.failure: BaseException | None = None
        self._embeddings = embeddings
        self._segments = list(segments)
        self._copied: list[Copying | Dispatched | Landed] | None = None
        self._staging = staging
        self._extract_secs = extract_secs
        self._encoding = encode.BusyClock()
        self._owned = owned
        self._layout = embeddings.split.layout
        if copied is not None:
            self._copied = list(copied)
            self._segments = [segment.detached() for segment in segments]

    def wait_copied(self) -> None:
        """Returns when copied rows have left the training state; a held state has not yet."""
        if self._copied is not None and not self.released.is_set():
            started = time.perf_counter()
            try:
                for block in self._copied:
                    if not isinstance(block, Landed):
                        block.wait()
            except BaseException as error:
                self.failure = error  # Nothing is written of it.
                raise
            self._extract_secs += time.perf_counter() - started
            self.released.set()

    def write(self, item_dir: Path) -> SaveReport:
        """Writes this process's part into the item's directory, its manifest last.

        Process 0 waits for the parts of the others before it writes its manifest; without our own
        commit the others wait for that.

        Args:
          item_dir: existing directory of the item, in the step's temporary directory.

        Raises:
          StorageError: the store refused; nothing was committed.
          ProcessMissing, ProcessFailed, Disagreement: as ``Rendezvous``.
        """
        self.proceed.wait(_PROCEED_SECS)
        peers = rendezvous(item_dir.parent, self._embeddings.options.processes_secs)
        try:
            if self.failure is not None:
                raise self.failure
            return self._write(item_dir, peers)
        except BaseException as error:
            self.failure = error
            peers.fail(error)
            raise

    def _write(self, item_dir: Path, peers: Rendezvous) -> SaveReport:
        started = time.perf_counter()
        try:
            if self.intent.kind == "delta" and self._tracked.faults is not None:
                raise TrackingError(f"step {self.intent.save_id.step}: {self._tracked.faults}")
            self._land()
            landed = time.perf_counter()
            segments, chunks = self._write_segments(item_dir, peers.process)
        finally:
            self._release()
        written = time.perf_counter()
        nbytes = self._finish(item_dir, segments, chunks, peers)
        self.report = SaveReport(
            intent=self.intent,
            rows=self._rows,
            total_rows=sum(group.rows for group in self._layout.groups),
            bytes_written=nbytes,
            base_bytes=base_bytes(self._layout.groups),
            extract_secs=self._extract_secs + landed - started,
            encode_secs=self._encoding.seconds,
            write_secs=written - landed - self._encoding.seconds,
            digest_secs=time.perf_counter() - written,
            tables=saves.table_figures(self._layout.groups, self._layout.tables, segments),
        )
        return self.report

    def abandon(self) -> None:
        """Gives up a save that will not be written; safe to call at any time."""
        self.proceed.set()
        self._release()

    @property
    def _rows(self) -> int:
        """Rows of tables in this part; those of several column ranges count once."""
        held = [segment for segment in self._segments if blocks.VALUES in segment.fields]
        first = {
            segment.group: min(other.columns[0] for other in held if other.group == segment.group)
            for segment in held
        }
        return sum(len(s.rows) for s in held if s.columns[0] == first[s.group])

    def _write_segments(
        self, item_dir: Path, process: int
    ) -> tuple[list[Segment], dict[str, Digest]]:
        """What was written, and the digests of its chunks."""
        groups = {group.name: group for group in self._layout.groups}
        fsync = self._embeddings.options.fsync
        with (
            concurrent.futures.ThreadPoolExecutor(_WRITERS, "deltackpt-write") as pool,
            concurrent.futures.ThreadPoolExecutor(_ENCODERS, "deltackpt-encode") as encoders,
        ):
            started = []
            for number, source in enumerate(self._segments):
                place = Place(item_dir, process, f"{source.group}.{number}", fsync)
                rows = pool.submit(_write_rows, place, source.rows)
                bounds = self._bounds(groups[source.group], source.rows)
                fields = [
                    pool.submit(
                        field_writer.write_field,
                        place,
                        self._field(source, name, bounds),
                        functools.partial(self._pieces, number, name),
                        encoders,
                    )
                    for name in source.fields
                ]
                started.append((place, source, rows, fields))
            chunks: dict[str, Digest] = {}
            segments = []
            for place, source, rows, fields in started:
                stored = [future.result() for future in fields]
                found = StoredArrays.joined([rows.result(), *(field.arrays for field in stored)])
                chunks |= found.chunks
                segments.append(
                    Segment(
                        name=place.segment,
                        group=source.group,
                        columns=source.columns,
                        count=len(source.rows),
                        ranges=_spans(source.rows),
                        fields=tuple(source.fields),
                        arrays=found.entries,
                        encodings=tuple(field.encoding for field in stored),
                    )
                )
        return segments, chunks

    def _bounds(self, group: GroupEntry, rows: blocks.Rows) -> tuple[list[str], np.ndarray]:
        """Names of a group's tables, and the positions at which their rows begin and end."""
        tables = manifest.members(group, self._layout.tables)
        starts = [blocks.row_slice(rows, table.offset, group.rows).start for table in tables]
        return [table.name for table in tables], np.array([*starts, len(rows)])

    def _field(
        self, source: SegmentSource, name: str, tables: tuple[list[str], np.ndarray]
    ) -> field_writer.Field:
        held = source.fields[name]
        return field_writer.Field(
            name=name,
            trailing=held.trailing,
            dtype=held.dtype,
            tables=tables[0],
            bounds=tables[1],
            choice=self._embeddings.split.codecs[source.group][name],
            planned=self.plans[source.group][name],
        )

    def _pieces(self, number: int, field: str, codec: Codec) -> Iterator[Piece]:
        """Rows of a field in order, in pieces that suit the codec; the work on them is timed."""
        return self._encoding.over(self._untimed_pieces(number, field, codec))

    def _untimed_pieces(self, number: int, field: str, codec: Codec) -> Iterator[Piece]:
        source = self._segments[number].fields[field]
        chunk_rows = max(1, PIECE_BYTES // max(1, source.row_bytes))
        on_host = encode.piece_rows(source.trailing)
        if self._copied is not None:
            landed = self._copied[number]
            assert isinstance(landed, Landed)
            whole = max(1, len(landed.block.rows))
            return landed.pieces(field, whole if codec.lossless else on_host)
        rows = self._segments[number].rows
        if not codec.lossless:
            return source.pieces(rows, on_host if source.on_host else chunk_rows)
        # Raw rows are written from where they are.
        in_place = codec.name == "raw" and not isinstance(rows, np.ndarray)
        return source.pieces(rows, max(1, len(rows)) if in_place else chunk_rows)

    def _finish(
        self,
        item_dir: Path,
        segments: list[Segment],
        chunks: Mapping[str, Digest],
        peers: Rendezvous,
    ) -> int:
        """Digests, then the manifest, in step with the other processes; bytes of the part."""
        fsync = self._embeddings.options.fsync
        part = names.part_dir(item_dir, peers.process)
        others = integrity.digest_tree(item_dir, below=part, skip=chunks.__contains__)
        digests = Digests.of({**others, **chunks})
        digests_path = item_dir / names.digests_name(peers.process)
        digests_crc32c = integrity.write_digests(digests_path, digests, fsync=fsync)
        if fsync:
            files.fsync_tree(part, folders_only=True)
        record = self._manifest(segments, digests_crc32c, peers)
        if peers.count > 1 and peers.process == 0:
            parts = peers.collect(item_dir, record)
            record = dataclasses.replace(record, parts=parts, shared_stamps={})
        elif peers.count > 1:
            # Process 0 speaks for all; what it says is checked by its digest.
            record = dataclasses.replace(record, groups=(), tables=(), dense=(), tracking_paths=())
        data = manifest.to_bytes(record)
        files.write_atomic(item_dir / names.manifest_name(peers.process), data, fsync=fsync)
        if peers.process > 0 and "step" not in self._embeddings.options.digests:
            # Under our own commit that is waited for instead.
            peers.await_index(item_dir)
        arrays_bytes = sum(length for length, _, _ in digests.files.values())
        return arrays_bytes + digests_path.stat().st_size + len(data)

    def _manifest(
        self, segments: list[Segment], digests_crc32c: int, peers: Rendezvous
    ) -> Manifest:
        record = Manifest(
            kind=self.intent.kind,
            save_id=self.intent.save_id,
            parent=self.intent.parent,
            reason=self.intent.reason,
            process=peers.process,
            process_count=peers.count,
            groups=self._planned_groups(),
            tables=self._layout.tables,
            segments=tuple(segments),
            dense=self._layout.dense,
            tracking_paths=self._layout.tracking_paths,
            digests=self._embeddings.options.digests,
            item_digests_crc32c=digests_crc32c,
            writers=__about__.writer_versions(),
            restores=self.intent.restores,
            compacted=self._newest_compacted(peers),
            features=self._features(segments, peers.count),
        )
        if peers.count == 1:
            return record
        return dataclasses.replace(
            record,
            plan_crc32c=manifest.plan_crc32c(record),
            shared_stamps=dict(self._tracked.shared),
            owned_cells=self._owned.cells,
            covers=tuple(
                self._owned.cover(group)
                for group in self._layout.groups
                if any(segment.group == group.name for segment in segments)
            ),
        )

    def _newest_compacted(self, peers: Rendezvous) -> manifest.BaseRef | None:
        """What process 0 tells the others of compaction."""
        lineage = self._embeddings.lineage
        return lineage.newest_compacted() if lineage is not None and peers.process == 0 else None

    def _planned_groups(self) -> tuple[GroupEntry, ...]:
        """The groups with the codecs that this save planned."""
        return tuple(
            dataclasses.replace(
                group,
                fields=tuple(
                    dataclasses.replace(spec, codec=self.plans[group.name][spec.name].codec)
                    for spec in group.fields
                ),
            )
            for group in self._layout.groups
        )

    def _features(self, segments: Sequence[Segment], processes: int) -> tuple[str, ...]:
        """What a reader must know: it must not take planned codecs for those that were used."""
        planned = {choice.codec for plan in self.plans.values() for choice in plan.values()}
        used = {encoding.codec for segment in segments for encoding in segment.encodings}
        coded = () if planned | used == {"raw"} else (manifest.ENCODINGS,)
        return (*coded, manifest.PARTS) if processes > 1 else coded

    def _land(self) -> None:
        """Waits for rows that are on their way from the training state."""
        self.wait_copied()
        if self._copied is not None:
            for number, block in enumerate(self._copied):
                if not isinstance(block, Landed):
                    self._copied[number] = block.landed(self._staging)

    def _release(self) -> None:
        self.wait_copied()
        for held in self._copied or ():
            held.give_back(self._staging)
        if self._copied is not None:
            self._copied = []
        self._segments = [segment.detached() for segment in self._segments]
        self.released.set()


class RefusedSave:
    """A save that this process cannot take, and the other processes begin all the same.

    It goes through Orbax like a ``PendingSave``, so that no process waits for this one at a
    barrier, and tells the others why there will be no part of it.
    """

    def __init__(self, cause: Exception):
        """Made by the manager of one of several processes."""
        self.failure: BaseException | None = cause
        self._cause = cause

    def write(self, item_dir: Path) -> SaveReport:
        """Leaves a note for the others, and raises the cause."""
        rendezvous(item_dir.parent, 0.0).fail(self._cause)
        raise self._cause


def rendezvous(temporary: Path, timeout_secs: float) -> Rendezvous:
    """This process's view of a save in a step's temporary directory."""
    return Rendezvous(
        temporary=temporary,
        process=processes.index(),
        count=processes.count(),
        timeout_secs=timeout_secs,
    )


def snapshot(embeddings: Embeddings, step: int, step_dir: Path) -> PendingSave:
    """Takes what a save needs from the training state; the blocking half of a save.

    The caller must ``wait_copied()`` before training goes on. Where the sampled proof finds the
    touched rows wrong, one process saves a base at once; several fail in the background, before the
    commit.

    Args:
      embeddings: the state, its touched rows and its lineage.
      step: the training step.
      step_dir: where the step will stand once it is committed.

    Raises:
      TrackingError: a TouchState does not fit the tables.
      OutOfSpace: the store has too little room for the save.
    """
    started = time.perf_counter()
    split, marks = embeddings.split, embeddings.marks
    lineage = embeddings.lineage or Lineage.unprotected()
    staging = embeddings.staging or Staging(embeddings.options.staging_bytes)
    stamps = match_marks(marks, split.layout) if marks else {}
    intent = lineage.begin(
        step,
        step_dir,
        clocks=clocks_of(split, marks),
        layout=split.layout,
        force_base=embeddings.force_base,
    )
    copied: list[Copying | Dispatched] | None = None
    try:
        sources = extract.Sources(split.layout, split.fields, stamps, staging)
        if since := intent.since or intent.recent:
            sources.stamps.look(since)
        tracked = Tracked()
        if embeddings.options.sampled_proof and marks and embeddings.lineage is not None:
            found = proof.take(sources, intent)
            lineage.witnessed(intent.save_id, found.witness)
            tracked = Tracked(faults=found.text if found.faults else None)
        if intent.kind == "delta" and processes.count() > 1:
            tracked = dataclasses.replace(tracked, shared=sources.stamps.shared(intent.since))
        elif intent.kind == "delta" and tracked.faults is not None:
            intent = lineage.as_base(intent, tracked.faults)
        segments = sources.segments(whole=intent.kind == "base")
        if intent.kind == "delta" and processes.count() == 1:
            ahead = _expected_bytes(split, segments, intent)
            if (reason := too_large(lineage.policy, *ahead)) is not None:
                intent = lineage.as_base(intent, reason)
                segments = sources.segments(whole=True)
        plans = {
            group: {
                field: choice.planned(intent.kind, restores=intent.restores)
                for field, choice in choices.items()
            }
            for group, choices in split.codecs.items()
        }
        nbytes = sum(segment.nbytes for segment in segments)
        require_room(step_dir.parent, nbytes, step)
        if intent.kind == "delta" and staging.fits(nbytes):
            copied = []
            for segment in segments:
                if segment.on_host:
                    copied.append(segment.copied(staging))
                else:
                    copied.append(segment.dispatched(_codecs_of(plans[segment.group])))
        else:
            extract.hold(segments)
    except BaseException:
        lineage.failed(intent.save_id)
        for taken in copied or ():
            taken.give_back(staging)
        raise
    extract_secs = time.perf_counter() - started
    return PendingSave(
        embeddings,
        intent,
        segments,
        copied,
        plans,
        staging,
        extract_secs,
        sources.owned,
        tracked,
    )


def clocks_of(split: Split, marks: Sequence[Marks]) -> Clocks:
    """What a save sees of tracking, in numbers; waits for the step that computes them.

    Args:
      split: the state.
      marks: its TouchStates, and a given one.
    """
    readings = (Reading(place, int(state.identity), int(state.clock)) for place, state in marks)
    windows = ((int(updates), int(gathered)) for updates, gathered in split.windows)
    return Clocks(readings=tuple(readings), windows=tuple(windows))


def _expected_bytes(
    split: Split, segments: Sequence[SegmentSource], intent: Intent
) -> tuple[int, int]:
    """Bytes that a delta of some segments, and a base, would write before any compression."""
    delta_bytes = base_bytes = 0
    for group in split.layout.groups:
        for spec in group.fields:
            choice, dtype = split.codecs[group.name][spec.name], codecs.dtype_of(spec.dtype)
            row_bytes = {}
            for kind in ("delta", "base"):
                codec = codecs.get(choice.planned(kind, restores=intent.restores).codec)
                arrays_of = codec.stored(spec.trailing, dtype).values()
                row_bytes[kind] = sum(math.prod(a.trailing) * a.dtype.itemsize for a in arrays_of)
            held = [s for s in segments if s.group == group.name and spec.name in s.fields]
            # Segments of other columns hold the same rows.
            cells = sum(len(s.rows) * math.prod(s.fields[spec.name].trailing[:1]) for s in held)
            delta_bytes += cells * row_bytes["delta"] // manifest.width(spec.trailing)
            base_bytes += group.rows * row_bytes["base"]
    return delta_bytes, base_bytes


def _codecs_of(plan: Mapping[str, Choice]) -> dict[str, Codec]:
    return {field: codecs.get(choice.codec) for field, choice in plan.items()}


def _write_rows(place: Place, rows: blocks.Rows) -> StoredArrays:
    """Writes which rows a segment holds, where ranges do not say it."""
    if not isinstance(rows, np.ndarray):
        return StoredArrays((), {})
    encoded = gaps.encode_gaps(rows)
    entry = arrays.array_entry(names.GAPS, encoded.shape, encoded.dtype, zstd=True)
    return field_writer.write_array(place, entry, iter([encoded]))


def base_bytes(groups: Sequence[GroupEntry]) -> int:
    """Bytes that all rows of all fields take unencoded."""
    return sum(
        group.rows * int(np.prod(spec.trailing, dtype=np.int64)) * _itemsize(spec.dtype)
        for group in groups
        for spec in group.fields
    )


@functools.cache
def _itemsize(dtype: str) -> int:
    return codecs.dtype_of(dtype).itemsize


def require_room(root: Path, nbytes: int, step: int) -> None:
    """Checks that a file system has room.

    Raises:
      OutOfSpace: it has not.
    """
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = files.free_bytes(existing)
    if free < nbytes:
        raise OutOfSpace(
            f"step {step} in {root}: expected room for {nbytes:,} bytes, found {free:,} free; "
            "free space or keep fewer steps, then save again: no touched row is lost"
        )


def _spans(rows: blocks.Rows) -> tuple[blocks.Span, ...] | None:
    return None if isinstance(rows, np.ndarray) else blocks.spans_of(rows)
