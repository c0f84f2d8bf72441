# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory and its steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from deltackpt import units, vocab
from deltackpt.cached import cached_property
from deltackpt.errors import OptionError, RestoreError, StepGone, StepNotFound, StorageError
from deltackpt.format import chain, naming, row_blocks
from deltackpt.format.manifest import SaveId, TableFigures, table_figures
from deltackpt.format.row_blocks import PLAIN
from deltackpt.inspect.descriptions import Save, Wal, list_saves, wal_of
from deltackpt.inspect.listing import MOST_LINES
from deltackpt.lazy_import import LazyModule
from deltackpt.ledger import directory
from deltackpt.ledger.opening import open_steps
from deltackpt.ledger.steps import Steps
from deltackpt.reading import chains, stored_saves
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.storage import posix
from deltackpt.storage.store import DirIdentity, StorePath

if TYPE_CHECKING:
    from deltackpt.inspect import changes, history
    from deltackpt.inspect import lazy as rows_of_saves
    from deltackpt.inspect.changes import Diff
    from deltackpt.inspect.history import History
    from deltackpt.inspect.lazy import Saves
    from deltackpt.inspect.step import Step
    from deltackpt.ledger import recovery
    from deltackpt.options import KafkaWal
    from deltackpt.reading import wal_index
    from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan
else:  # Listing a directory needs none of them.
    changes = LazyModule("deltackpt.inspect.changes")
    history = LazyModule("deltackpt.inspect.history")
    recovery = LazyModule("deltackpt.ledger.recovery")
    rows_of_saves = LazyModule("deltackpt.inspect.lazy")
    wal_index = LazyModule("deltackpt.reading.wal_index")

#: ``"nothing"``: the next retention removes the step.
StaysFor = Literal["policy", "chain", "nothing"]


#: Attempts to read a history while a trainer replaces steps.
_MOST_TRIES = 3


class Checkpoints:
    """A checkpoint directory, open for reading; a trainer may be writing to it.

    Nothing is locked: reading a step that retention has removed raises ``StepGone``. If the WAL is
    in Kafka, use it as a context manager, or call ``close()``.

    Attributes:
      store_path: the directory, or the bucket.
      item: name of deltackpt's item in each step.
    """

    def __init__(self, root: Steps):
        """Internal: call ``open``."""
        self.store_path = root.store_path
        self.item = root.item
        self._root = root
        #: The identity is part of the key: a step may replace one that was rolled back.
        self._stored: dict[tuple[int, DirIdentity], StoredSave] = {}
        self._figures: dict[StoredSave, tuple[TableFigures, ...]] = {}

    @cached_property
    def _row_indices(self) -> rows_of_saves.RowIndexCache:
        return rows_of_saves.RowIndexCache()

    def close(self) -> None:
        """Closes the connections to Kafka, and removes the copies of its WAL records. Idempotent.

        Recovery points that were opened from Kafka cannot be read any more.
        """
        self._root.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The directory.

        Raises:
          TypeError: it is a bucket; ``store_path`` has its URL.
        """
        return Path(self.store_path)

    @property
    def steps(self) -> list[int]:
        """Committed steps, ascending; lists the directory once."""
        return sorted(self._root.steps())

    @property
    def newest(self) -> int | None:
        """The newest committed step, or None."""
        return self._root.newest_step()

    def at(self, step: int | RecoveryPoint | None = None) -> Step:
        """Opens a step, or a full recovery point, and reads the manifests of its chain.

        Args:
          step: a step, a recovery point from ``recovery_points``, or the training step of such a
            point; the newest step by default.

        Raises:
          OptionError: ``step`` is not a step number.
          StepNotFound: the step or recovery point does not exist, or the directory has no steps.
          Damaged, BrokenChain: the chain is incomplete or damaged; the object is named.
          StepGone: the step was removed while it was read.
        """
        from deltackpt.inspect.step import Step

        number, plan = self._found(step)
        self._root.await_readable(number)
        place = self._at(number).dir_identity()
        return Step(self._saves(number, plan), place)

    def __getitem__(self, step: int | RecoveryPoint) -> Step:
        return self.at(step)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return (self.at(step) for step in self.steps)

    @property
    def compacted(self) -> dict[int, int]:
        """Bytes on disk of each compacted base, by the step that it was compacted from.

        The step itself may have been removed while chains of later steps still use its base.
        """
        bases = sorted(stored_saves.compacted_bases(self._root.store_path, self.item), key=int)
        return {
            int(name): naming.compacted_dir(self.store_path / name, self.item).tree_bytes()
            for name in bases
        }

    @property
    def stays_for(self) -> dict[int, StaysFor]:
        """The reason why each step is kept: the preservation policy, or a chain that needs it.

        Returns:
          Step to ``"policy"``, ``"chain"``, or ``"nothing"`` if the next cleanup removes it.
          Steps whose reason is unknown are omitted: all steps if no policy is recorded.
        """
        # Unknown are all steps without a recorded policy, else those that are newer than the record
        # or that an unreadable chain might need.
        note = directory.read_kept(self._root.store_path)
        if note is None:
            return {}
        infos = dict(sorted(self._root.saves().items()))
        decided = [step for step in infos if step <= note.newest]
        wanted = set(note.steps)
        found: dict[int, StaysFor] = {step: "policy" for step in decided if step in wanted}
        known = {step: info for step, info in infos.items() if info is not None}
        if len(known) < len(infos):
            return found
        # Newer steps are not decided yet, and the next save continues from the newest.
        stand = [known[step].save_id for step in known if step in wanted or step > note.newest]
        stand += [known[step].save_id for step in [*known][-1:]]
        live = chain.live_set(stand, known.values(), (), self._root.compacted())
        for step in decided:
            if step not in wanted:
                found[step] = "chain" if known[step].save_id in live else "nothing"
        return dict(sorted(found.items()))

    @property
    def wal(self) -> Wal:
        """The write-ahead log; reads headers and footers, but no rows.

        Raises:
          StorageError: the WAL cannot be read.
        """
        location = self._root.wal_location
        if not (location.numbers() or location.logged()):
            return Wal(epochs=())
        return wal_of(wal_index.read_wal_state(location), self._root.restorable())

    def recovery_points(self) -> list[RecoveryPoint]:
        """Recovery points that a step can be replayed to, newest first, including soft ones.

        ``at`` opens the full ones.

        Raises:
          StorageError: the WAL cannot be read.
        """
        return self.wal.recovery_points()

    @property
    def saves(self) -> tuple[Save, ...]:
        """All steps, ascending; reads and caches their manifests."""
        return self.saves_of(self.steps)

    def saves_of(self, steps: Sequence[int]) -> tuple[Save, ...]:
        """Describes some steps; also reads the manifests of their chains.

        Args:
          steps: the steps; those that do not exist are ignored.

        Returns:
          The saves, ascending by step.
        """
        standing = {step: self._at(step).dir_identity() for step in self.steps}
        self._stored = {key: save for key, save in self._stored.items() if key[0] in standing}
        self._figures = {
            save: self._figures[save] for save in self._stored.values() if save in self._figures
        }
        compacted = self._root.compacted()
        found, problems = self._read_chains(steps)
        lengths: dict[int, int | None] = {}
        for step in sorted(found):
            lengths[step] = _chain_length(found[step], found, lengths, compacted)
        saves = []
        for step in sorted((found.keys() | problems.keys()) & set(steps)):
            at = self._at(step)
            if step in problems:
                saves.append(Save(step=step, store_path=at, problem=problems[step]))
            else:
                is_compacted = found[step].info.save_id in compacted
                saves.append(self._described(found[step], lengths[step], is_compacted))
        # A step that was removed or replaced since the listing is not a problem.
        return tuple(
            save
            for save in saves
            if not save.problem or standing.get(save.step) == self._at(save.step).dir_identity()
        )

    def save_of(self, step: int) -> Save:
        """Describes one step.

        Raises:
          StepNotFound: the step does not exist.
          StepGone: the step was removed while it was read.
        """
        number = self._chosen(step)
        path = self._at(number)
        with stored_saves.detect_removal(path, instead="open"):
            for save in self.saves_of([number]):
                return save
            raise StepNotFound(
                f"{path}: expected a committed step, found no such directory; see steps"
            )

    def _read_chains(self, steps: Sequence[int]) -> tuple[dict[int, StoredSave], dict[int, str]]:
        """Reads the saves of steps and their parents; those that cannot be read have a problem."""
        found: dict[int, StoredSave] = {}
        problems: dict[int, str] = {}
        pending = sorted(set(steps))
        while pending:
            step = pending.pop()
            try:
                found[step] = self._read(step)
            except (StepNotFound, StepGone):
                continue
            except (RestoreError, StorageError) as error:
                problems[step] = str(error)
                continue
            parent = found[step].info.parent
            if parent is not None and parent.save_id.step not in found:
                pending.append(parent.save_id.step)
        return found, problems

    def _described(self, save: StoredSave, chain_length: int | None, compacted: bool) -> Save:
        head, info = save.head, save.info
        problem, dense_nbytes, dense_codecs = chain.own_problem(info) or "", None, set[str]()
        try:
            if head.dense_blocks is not None:
                # Not by ``stored_dense``, whose imports a listing does not need.
                dense = [record for _, _, record in save.dense_layers()]
                dense_nbytes = sum(record.nbytes for record in dense)
                dense_codecs = {
                    encoding.codec
                    for record in dense
                    if not record.complete
                    for segment in record.segments
                    if segment.group != PLAIN
                    for encoding in segment.encodings
                }
            if save not in self._figures:
                segments = [segment for record in save.manifests for segment in record.segments]
                figures = table_figures(head.groups, head.tables, segments)
                self._figures[save] = figures
        except (RestoreError, StorageError) as error:
            problem = problem or str(error)
        parent = None if info.parent is None else info.parent.save_id.step
        if chain_length is None:
            problem = problem or (
                f"its chain is broken: its parent, step {parent}, is missing or damaged, has a "
                "broken chain, or is another save"
            )
        return Save(
            step=int(save.step_dir.name),
            store_path=save.step_dir,
            kind=info.kind,
            parent=parent,
            chain_length=chain_length,
            reason=head.reason,
            compacted=compacted,
            tables=self._figures.get(save, ()),
            table_rows={table.name: table.rows for table in head.tables},
            nbytes=info.nbytes,
            dense_nbytes=dense_nbytes,
            dense_codecs=tuple(sorted(dense_codecs)),
            problem=problem,
        )

    def touched(self, step: int, *, tables: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Returns the rows that the save of a step contains.

        Args:
          step: the step; a base contains all rows.
          tables: which tables; all by default. Tables that the step does not have are ignored.

        Returns:
          Table name to ascending row indices, int64. Fields that every save contains in full are
          not considered.

        Raises:
          StepNotFound, Damaged: the step cannot be read.
        """
        return changes.touched(self._read(self._chosen(step)), self._row_indices, tables)

    def history(
        self,
        table: str,
        rows: int | Sequence[int] | np.ndarray | None = None,
        *,
        ids: int | Sequence[int] | np.ndarray | None = None,
        field: str = row_blocks.VALUES,
        steps: Sequence[int] | None = None,
        wal: bool = True,
    ) -> History:
        """Returns the values of some rows at each step; reads each save and WAL record once.

        Args:
          table: name of the table.
          rows: row indices.
          ids: ids of rows, instead of ``rows``: the rows that they have at the newest of the steps.
          field: ``values``, or ``slot.<name>``.
          steps: which steps; all by default.
          wal: whether to include the recovery points; has no effect if ``steps`` is given.

        Raises:
          OptionError: both or neither of ``rows`` and ``ids`` were given.
          TemplateMismatch: no step has such a table, field, row or id.
          Damaged, BrokenChain, StepGone: a step, or a WAL record, cannot be read.
        """
        if (rows is None) == (ids is None):
            raise OptionError("history: expected either rows or ids, found both or neither")
        for _ in range(_MOST_TRIES):
            wanted = self.steps if steps is None else sorted(set(steps))
            places = {step: self._at(step).dir_identity() for step in self.steps}
            with_log = wal and steps is None
            read = functools.partial(
                history.history,
                self._read,
                self._saves,
                wanted,
                all_steps=steps is None,
                log=wal_index.WalReader(self._root.wal_location).read() if with_log else None,
            )
            if rows is not None:
                found = read(table, np.atleast_1d(rows), field)
            else:
                assert ids is not None
                asked = vocab.ids_of(np.atleast_1d(ids))
                held = self.at(wanted[-1] if wanted else None)
                own = held.tables[changes.named(table, held.tables)]
                held_rows = own.rows_of(asked)
                keys = read(table, held_rows, own.key_field)
                found = history.by_id(read(table, held_rows, field), asked, keys)
            now = {step: self._at(step).dir_identity() for step in places}
            # Never mix rolled-back steps with those that replaced them.
            if all(now[step] in (None, place) for step, place in places.items()):
                return found
        raise StepGone(
            f"{self.store_path}: expected no step to be replaced while a history was read, "
            f"found some replaced in {_MOST_TRIES} attempts; try again"
        )

    def diff(
        self,
        a: int | RecoveryPoint,
        b: int | RecoveryPoint | None = None,
        *,
        tables: Sequence[str] | None = None,
        field: str = row_blocks.VALUES,
    ) -> Diff:
        """Returns the rows that differ in any bit between two steps, and by how much.

        If the chains of both steps share saves, only the rows in the other saves are compared;
        otherwise all rows are.

        Args:
          a: the earlier step or recovery point, as for ``at``.
          b: the later step or recovery point; the newest step by default.
          tables: which tables; all by default.
          field: ``values``, or ``slot.<name>``; tables without it are skipped.

        Raises:
          TemplateMismatch: a named table is in neither step.
          StepNotFound, Damaged, BrokenChain, StepGone: a step cannot be read.
        """
        older, newer = (self._saves(*self._found(step)) for step in (a, b))
        return changes.diff(older, newer, tables, field)

    def _chosen(self, step: int | None) -> int:
        """Validates a step; None means the newest."""
        found = self.newest if step is None else naming.as_step(step)
        if found is None:
            raise StepNotFound(
                f"{self.store_path}: expected a committed step, found none; "
                "wait for the trainer's first save"
            )
        return found

    def _found(self, asked: int | RecoveryPoint | None) -> tuple[int, ReplayPlan | None]:
        """A step and, for a recovery point, the WAL records that lead there."""
        if asked is None:
            return self._chosen(None), None
        found = asked if isinstance(asked, wal_index.RecoveryPoint) else naming.as_step(asked)
        return recovery.locate(self._root, found)

    def _at(self, step: int) -> StorePath:
        return self._root.at(step)

    def _saves(
        self, step: int, plan: ReplayPlan | None = None, damaged: frozenset[int] = frozenset()
    ) -> Saves:
        """Opens a step, or a recovery point above it, or above an older step if it is damaged."""
        path = self._at(step)

        def open_older(error: RestoreError) -> Saves:
            assert plan is not None
            tried = damaged | {step}
            older = recovery.plan_above_older(self._root, plan, tried, error)
            return self._saves(older.step.step, older, tried)

        try:
            removal = stored_saves.detect_removal(path, instead="open")
            with removal, posix.typed_errors(path, "read"):
                chain = chains.read_chain(path, self.item)
        except RestoreError as error:
            if plan is None:
                raise
            return open_older(error)
        return rows_of_saves.Saves(chain, self._row_indices, plan, plan and open_older)

    def _read(self, step: int) -> StoredSave:
        path = self._at(step)
        identity = path.dir_identity()
        if identity is not None and (step, identity) in self._stored:
            return self._stored[step, identity]
        with stored_saves.detect_removal(path, instead="open"), posix.typed_errors(path, "read"):
            found = stored_saves.read_save(path, self.item)
        if identity is not None:
            self._stored[step, identity] = found
        return found

    def __repr__(self) -> str:
        steps = units.count(len(self), "step")
        return f"<Checkpoints {self.store_path}: {steps}, newest {self.newest}>"

    def _repr_html_(self) -> str:
        """The first and last steps."""
        steps = self.steps
        half = MOST_LINES // 2
        shown = steps if len(steps) <= MOST_LINES else [*steps[:half], *steps[-half:]]
        saves = self.saves_of(shown)
        title = f"{self.store_path}: {len(steps):,} steps, newest {self.newest}"
        if len(shown) < len(steps):
            title += f", {len(saves)} shown: the first and the last"
        return list_saves(saves, title).html()


def open(
    path: str | os.PathLike[str],
    *,
    item: str | None = None,
    endpoint: str | None = None,
    wal: KafkaWal | None = None,
) -> Checkpoints:
    """Opens a checkpoint directory for reading; lists it once and writes nothing.

    Args:
      path: the manager's directory: a path, or a bucket URL.
      item: name of deltackpt's item in the steps; detected in the newest step by default.
      endpoint: address of a bucket's server, if it is not the provider's own.
      wal: how to read WAL records in Kafka, such as ``KafkaWal(config=...)``; without it, their
        recovery points are not listed.

    Raises:
      StorageError: the directory does not exist.
      ForeignDirectory: the directory contains nothing that deltackpt wrote.
      UnsupportedRoot: the URL scheme is unknown.
      OptionError: the steps contain several deltackpt items, and ``item`` names none of them.
    """
    with posix.typed_errors(Path(path), "read"):
        return Checkpoints(open_steps(path, item=item, endpoint=endpoint, wal=wal))


def _chain_length(
    save: StoredSave,
    found: Mapping[int, StoredSave],
    lengths: Mapping[int, int | None],
    compacted: Collection[SaveId],
) -> int | None:
    """Number of deltas that a restore of a save reads, from the lengths of earlier saves."""
    parent = save.info.parent
    if parent is None or save.info.save_id in compacted:
        return 0
    if parent.save_id in compacted:
        return 1
    standing = found.get(parent.save_id.step)
    if standing is None or standing.info.save_id != parent.save_id:
        return None
    length = lengths.get(parent.save_id.step)
    return None if length is None else length + 1
