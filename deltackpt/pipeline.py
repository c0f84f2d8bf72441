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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from deltackpt import (
    __about__,
    blocks,
    codecs,
    encode,
    events,
    extract,
    field_writer,
    integrity,
    layout,
    manifest,
    stored,
)
from deltackpt.codecs import Codec
from deltackpt.encode import Piece
from deltackpt.errors import OutOfSpace
from deltackpt.extract import Copying, Dispatched, Landed, SegmentSource
from deltackpt.field_writer import Place, StoredArrays
from deltackpt.integrity import Digest, Digests
from deltackpt.lineage import Intent, Lineage
from deltackpt.manifest import GroupEntry, Manifest, Segment
from deltackpt.policy import Choice
from deltackpt.staging import Staging
from deltackpt.storage import arrays, files, gaps
from deltackpt.tables import Split, match_touched
from deltackpt.touched import TouchState

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
    """

    fsync: bool = True
    staging_bytes: int = 1 << 30
    digests: tuple[str, ...] = ("item",)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Embeddings:
    """The tables and slots of one state, and what saving them needs: our checkpointable.

    Attributes:
      split: the state, split by ``tables.split``; its dense leaves are not saved here.
      touched: which rows changed; None gives a base.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What the background half of a save did; seconds are wall time.

    ``rows``, ``bytes_written`` and ``tables`` are of this process's part, ``base_bytes`` is what
    all rows of tables and slots take unencoded.
    """

    intent: Intent
    rows: int
    total_rows: int
    bytes_written: int
    base_bytes: int
    extract_secs: float
    write_secs: float
    digest_secs: float
    tables: tuple[events.TableFigures, ...]


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
    ):
        """Made by ``snapshot``."""
        self.intent = intent
        self.plans = plans
        self.released = threading.Event()
        #: ``write`` waits for it: busy beside the start of Orbax's own threads it would cost
        #: each of them, and so the training thread, a switch interval of the interpreter.
        self.proceed = threading.Event()
        self.report: SaveReport | None = None
        self._embeddings = embeddings
        self._segments = list(segments)
        self._copied: list[Copying | Dispatched | Landed] | None = None
        self._staging = staging
        self._extract_secs = extract_secs
        self._layout = embeddings.split.layout
        if copied is not None:
            self._copied = list(copied)
            self._segments = [segment.detached() for segment in segments]

    def wait_copied(self) -> None:
        """Returns when copied rows have left the training state; a held state has not yet."""
        if self._copied is not None:
            for block in self._copied:
                if not isinstance(block, Landed):
                    block.wait()
            self.released.set()

    def write(self, item_dir: Path, *, process: int = 0, process_count: int = 1) -> SaveReport:
        """Writes this process's part into the item's directory, its manifest last.

        Args:
          item_dir: existing directory of the item, in the step's temporary directory.
          process: index of this process.
          process_count: how many processes write a part.

        Raises:
          StorageError: the store refused; nothing was committed.
        """
        self.proceed.wait(_PROCEED_SECS)
        started = time.perf_counter()
        try:
            self._land()
            segments, chunks = self._write_segments(item_dir, process)
            written = time.perf_counter()
            self._finish(item_dir, segments, chunks, process, process_count)
        finally:
            self._release()
        nbytes = sum(path.stat().st_size for path in item_dir.rglob("*") if path.is_file())
        self.report = SaveReport(
            intent=self.intent,
            rows=sum(len(segment.rows) for segment in self._segments if self._is_main(segment)),
            total_rows=sum(group.rows for group in self._layout.groups),
            bytes_written=nbytes,
            base_bytes=base_bytes(self._layout.groups),
            extract_secs=self._extract_secs,
            write_secs=written - started,
            digest_secs=time.perf_counter() - written,
            tables=stored.table_figures(self._layout.groups, self._layout.tables, segments),
        )
        if self._embeddings.lineage is not None:
            self._embeddings.lineage.wrote(self.intent.save_id, nbytes)
        return self.report

    def abandon(self) -> None:
        """Gives up a save that will not be written; safe to call at any time."""
        self.proceed.set()
        self._release()

    def _is_main(self, segment: SegmentSource) -> bool:
        return blocks.VALUES in segment.fields and segment.columns[0] == 0

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
                        ranges=_ranges(source.rows),
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
        """Rows of a field in order, in pieces that suit the codec."""
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
        in_place = codec.name == "raw" and isinstance(rows, range)
        return source.pieces(rows, max(1, len(rows)) if in_place else chunk_rows)

    def _finish(
        self,
        item_dir: Path,
        segments: list[Segment],
        chunks: Mapping[str, Digest],
        process: int,
        process_count: int,
    ) -> None:
        fsync = self._embeddings.options.fsync
        others = integrity.digest_tree(item_dir, skip=chunks.keys())
        digests = Digests({**others.files, **chunks})
        digests_crc32c = integrity.write_digests(
            item_dir / layout.digests_name(process), digests, fsync=fsync
        )
        record = Manifest(
            kind=self.intent.kind,
            save_id=self.intent.save_id,
            parent=self.intent.parent,
            reason=self.intent.reason,
            process=process,
            process_count=process_count,
            groups=self._planned_groups(),
            tables=self._layout.tables,
            segments=tuple(segments),
            dense=self._layout.dense,
            tracking_paths=self._layout.tracking_paths,
            digests=self._embeddings.options.digests,
            item_digests_crc32c=digests_crc32c,
            writers=__about__.writer_versions(),
            restores=self.intent.restores,
            features=self._features(segments),
        )
        name = layout.manifest_name(process)
        files.write_atomic(item_dir / name, manifest.to_bytes(record), fsync=fsync)

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

    def _features(self, segments: Sequence[Segment]) -> tuple[str, ...]:
        """What a reader must know: it must not take planned codecs for those that were used."""
        planned = {choice.codec for plan in self.plans.values() for choice in plan.values()}
        used = {encoding.codec for segment in segments for encoding in segment.encodings}
        return () if planned | used == {"raw"} else (manifest.ENCODINGS,)

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


def snapshot(embeddings: Embeddings, step: int, step_dir: Path) -> PendingSave:
    """Takes what a save needs from the training state; the blocking half of a save.

    The caller must ``wait_copied()`` before training goes on.

    Args:
      embeddings: the state, its touched rows and its lineage.
      step: the training step.
      step_dir: where the step will stand once it is committed.

    Raises:
      TrackingError: the TouchState does not fit the tables.
      OutOfSpace: the store has too little room for the save.
    """
    started = time.perf_counter()
    split, touched = embeddings.split, embeddings.touched
    lineage = embeddings.lineage or Lineage.unprotected()
    staging = embeddings.staging or Staging(embeddings.options.staging_bytes)
    names = match_touched(touched, split.layout) if touched is not None else {}
    intent = lineage.begin(
        step,
        step_dir,
        clock=int(touched.clock) if touched is not None else None,
        layout=split.layout,
        force_base=embeddings.force_base,
    )
    copied: list[Copying | Dispatched] | None = None
    try:
        whole = intent.since_clock is None
        plans = {
            group: {
                field: choice.planned(intent.kind, restores=intent.restores)
                for field, choice in choices.items()
            }
            for group, choices in split.codecs.items()
        }
        segments = extract.segment_sources(
            split.layout, split.fields, _rows_of(embeddings, intent, names, staging), whole=whole
        )
        nbytes = sum(segment.nbytes for segment in segments)
        _require_room(step_dir.parent, nbytes, step)
        if not whole and staging.fits(nbytes):
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
    return PendingSave(embeddings, intent, segments, copied, plans, staging, extract_secs)


def _codecs_of(plan: Mapping[str, Choice]) -> dict[str, Codec]:
    return {field: codecs.get(choice.codec) for field, choice in plan.items()}


def _write_rows(place: Place, rows: blocks.Rows) -> StoredArrays:
    """Writes which rows a segment holds, where ranges do not say it."""
    if isinstance(rows, range):
        return StoredArrays((), {})
    encoded = gaps.encode_gaps(rows)
    entry = arrays.array_entry(layout.GAPS, encoded.shape, encoded.dtype, zstd=True)
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


def _rows_of(
    embeddings: Embeddings, intent: Intent, names: Mapping[str, str], staging: Staging
) -> dict[str, blocks.Rows]:
    if intent.since_clock is None or embeddings.touched is None:
        return {group.name: range(group.rows) for group in embeddings.split.layout.groups}
    stamps, since = embeddings.touched.stamps, intent.since_clock
    tables = sorted(embeddings.split.layout.tables, key=lambda table: table.offset)
    found = [
        staging.submit(extract.touched_rows, stamps[names[table.name]], since, table.offset)
        for table in tables
    ]
    parts: dict[str, list[np.ndarray]] = {g.name: [] for g in embeddings.split.layout.groups}
    for table, rows in zip(tables, found, strict=True):
        parts[table.group].append(rows.result())
    return {name: np.concatenate(rows) for name, rows in parts.items()}


def _require_room(root: Path, nbytes: int, step: int) -> None:
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = files.free_bytes(existing)
    if free < nbytes:
        raise OutOfSpace(
            f"step {step} in {root}: expected room for {nbytes:,} bytes, found {free:,} free; "
            "free space or keep fewer steps, then save again: no touched row is lost"
        )


def _ranges(rows: blocks.Rows) -> tuple[tuple[int, int], ...] | None:
    return ((rows.start, rows.stop),) if isinstance(rows, range) else None
