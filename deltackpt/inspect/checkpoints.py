# SPDX-License-Identifier: Apache-2.0
"""A directory of checkpoints: its steps, and what each save holds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from deltackpt.errors import (
    BrokenChain,
    RestoreError,
    StepGone,
    StepNotFound,
    StorageError,
)
from deltackpt.events import TableFigures
from deltackpt.format import blocks, chain, names
from deltackpt.format.figures import table_figures
from deltackpt.format.manifest import SaveId
from deltackpt.inspect import changes, history, html, keeping
from deltackpt.inspect.changes import Diff
from deltackpt.inspect.history import History
from deltackpt.inspect.keeping import StaysFor
from deltackpt.inspect.lazy import RowNumbers, Saves
from deltackpt.inspect.logs import Log, log_of
from deltackpt.inspect.save import SAVE_COLUMNS, Save, save_line
from deltackpt.inspect.step import Step
from deltackpt.ledger.opening import open_steps
from deltackpt.ledger.steps import Steps
from deltackpt.reading import chains, dense_values, removal, saves
from deltackpt.reading.log_states import log_state
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stretches import LogPoint, Logs
from deltackpt.storage import files
from deltackpt.storage.store import Spot, Stamp

#: How often a history is read anew beside a trainer that replaces its steps.
_MOST_TRIES = 3


class Checkpoints:
    """A directory of steps, open for reading; it may be one that a trainer writes to.

    Nothing is locked: a step that retention removes while it is read raises ``StepGone``.

    Attributes:
      spot: the directory, or the bucket.
      item: name of our item in each step.
    """

    def __init__(self, root: Steps):
        """Made by ``open``."""
        self.spot = root.spot
        self.item = root.item
        self._root = root
        self._numbers = RowNumbers()
        #: A step may take the place of one that was rolled back.
        self._stored: dict[tuple[int, Stamp], StoredSave] = {}
        self._figures: dict[StoredSave, tuple[TableFigures, ...]] = {}

    @property
    def path(self) -> Path:
        """The directory.

        Raises:
          TypeError: it is a bucket; ``spot`` says which.
        """
        return Path(self.spot)

    @property
    def steps(self) -> list[int]:
        """Committed steps, ascending: one listing of the directory."""
        return sorted(self._root.steps())

    @property
    def newest(self) -> int | None:
        """The newest committed step; None where there is none."""
        return self._root.newest_step()

    def at(self, step: int | None = None) -> Step:
        """A step, the newest by default; the manifests of its chain are read.

        Raises:
          OptionError: it is no number of a step.
          StepNotFound: there is no such step, or none at all.
          Damaged, BrokenChain: the chain is not whole; the object is named.
          StepGone: it was removed meanwhile.
        """
        number = self._chosen(step)
        self._root.await_readable(number)
        place = self._at(number).stamp()
        return Step(self._saves(number), place)

    def __getitem__(self, step: int) -> Step:
        return self.at(step)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return (self.at(step) for step in self.steps)

    @property
    def compacted(self) -> dict[int, int]:
        """Steps for which a compacted base stands, to its bytes on disk.

        The step itself may be gone; chains of later ones go through its base.
        """
        bases = sorted(saves.compacted_bases(self._root.spot, self.item), key=int)
        return {
            int(name): names.compacted_dir(self.spot / name, self.item).tree_bytes()
            for name in bases
        }

    @property
    def stays_for(self) -> dict[int, StaysFor]:
        """Steps to what they stay for: the trainer's policy, or only a chain; see ``keeping``."""
        return keeping.stays_for(self._root)

    @property
    def log(self) -> Log:
        """The log between the steps: heads of its frames are read, and no rows.

        Raises:
          StorageError: it cannot be read.
        """
        return log_of(log_state(self._root.log_at))

    def points(self) -> list[LogPoint]:
        """Points of the log that count, newest first, soft ones too; see ``Log.points``.

        Raises:
          StorageError: the log cannot be read.
        """
        return self.log.points()

    @property
    def saves(self) -> tuple[Save, ...]:
        """Every step, ascending; the manifests of each are read, and kept."""
        return self.saves_of(self.steps)

    def saves_of(self, steps: Sequence[int]) -> tuple[Save, ...]:
        """What some steps are, ascending; those that are not there are left out.

        The manifests of their chains are read too.
        """
        standing = {step: self._at(step).stamp() for step in self.steps}
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
                saves.append(Save(step=step, spot=at, problem=problems[step]))
            else:
                is_compacted = found[step].info.save_id in compacted
                saves.append(self._described(found[step], lengths[step], is_compacted))
        # A step that is removed or replaced meanwhile has no problem.
        return tuple(
            save
            for save in saves
            if not save.problem or standing.get(save.step) == self._at(save.step).stamp()
        )

    def save_of(self, step: int) -> Save:
        """What a step is.

        Raises:
          StepNotFound: there is no such step.
          StepGone: it was removed meanwhile.
        """
        number = self._chosen(step)
        path = self._at(number)
        with removal.standing(path, instead="open"):
            for save in self.saves_of([number]):
                return save
            raise StepNotFound(
                f"{path}: expected a committed step, found no such directory; see steps"
            )

    def _read_chains(self, steps: Sequence[int]) -> tuple[dict[int, StoredSave], dict[int, str]]:
        """The saves of steps and of their parents, and what is wrong with those that have none."""
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
        problem, dense_nbytes = "", None
        try:
            if head.dense_blocks is not None:
                dense_nbytes = sum(one.record.nbytes for one in dense_values.sources(save))
            if save not in self._figures:
                segments = [segment for record in save.manifests for segment in record.segments]
                figures = table_figures(head.groups, head.tables, segments)
                self._figures[save] = figures
        except (RestoreError, StorageError) as error:
            problem = str(error)
        parent = None if info.parent is None else info.parent.save_id.step
        if chain_length is None and info.rolling is not None and not problem:
            problem = "a part of later steps only: what came before in its own window is gone"
        elif chain_length is None:
            problem = problem or (
                f"its chain is broken: its parent, step {parent}, is missing, damaged or broken "
                "itself, or is another save"
            )
        return Save(
            step=info.save_id.step,
            spot=save.step_dir,
            kind=info.kind,
            parent=parent,
            chain_length=chain_length,
            reason=head.reason,
            compacted=compacted,
            tables=self._figures.get(save, ()),
            table_rows={table.name: table.rows for table in head.tables},
            nbytes=info.nbytes,
            dense_nbytes=dense_nbytes,
            problem=problem,
        )

    def touched(self, step: int, *, tables: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Rows that the save of a step holds.

        Args:
          step: the step; of a base these are all rows.
          tables: which tables; all by default. Those that the step does not have are left out.

        Returns:
          Table name to ascending row numbers, int64. Fields that are always written whole do
          not count.

        Raises:
          StepNotFound, Damaged: it cannot be read.
        """
        return changes.touched(self._read(self._chosen(step)), self._numbers, tables)

    def history(
        self,
        table: str,
        rows: int | Sequence[int] | np.ndarray,
        *,
        field: str = blocks.VALUES,
        steps: Sequence[int] | None = None,
        log: bool = True,
    ) -> History:
        """Values of some rows over the steps; each save, and mark of the log, is read once.

        Args:
          table: name of the table.
          rows: row numbers.
          field: ``values``, or ``slot.<name>``.
          steps: which steps; all by default.
          log: whether the points of the log are told, too, where no steps are named.

        Raises:
          TemplateMismatch: no step has such a table, field or row.
          Damaged, BrokenChain, StepGone: a step, or a mark, cannot be read.
        """
        for _ in range(_MOST_TRIES):
            wanted = self.steps if steps is None else sorted(set(steps))
            places = {step: self._at(step).stamp() for step in self.steps}
            found = history.history(
                self._read,
                self._saves,
                wanted,
                table,
                np.atleast_1d(rows),
                field,
                all_steps=steps is None,
                log=Logs(self._root.log_at).read() if log and steps is None else None,
            )
            now = {step: self._at(step).stamp() for step in places}
            # Steps that take the place of rolled-back ones must not stand beside these.
            if all(now[step] in (None, place) for step, place in places.items()):
                return found
        raise StepGone(
            f"{self.spot}: expected its steps to stay while a history was read, found some of them "
            f"replaced {_MOST_TRIES} times; ask again"
        )

    def diff(
        self,
        a: int,
        b: int | None = None,
        *,
        tables: Sequence[str] | None = None,
        field: str = blocks.VALUES,
    ) -> Diff:
        """Rows that differ between two steps, in any bit, and by how much.

        Where the steps have saves of their chains in common only rows that the other saves hold
        are compared, else all rows.

        Args:
          a: the earlier step.
          b: the later step; the newest by default.
          tables: which tables; all by default.
          field: ``values``, or ``slot.<name>``; tables without it are passed over.

        Raises:
          TemplateMismatch: a table that was named is in neither step.
          StepNotFound, Damaged, BrokenChain, StepGone: a step cannot be read.
        """
        older, newer = (self._saves(self._chosen(step)) for step in (a, b))
        return changes.diff(older, newer, tables, field)

    def _chosen(self, step: int | None) -> int:
        """A step, the newest where it is None."""
        found = self.newest if step is None else names.as_step(step)
        if found is None:
            raise StepNotFound(
                f"{self.spot}: expected a committed step, found none; wait for the trainer's first "
                "save"
            )
        return found

    def _at(self, step: int) -> Spot:
        return self._root.at(step)

    def _saves(self, step: int) -> Saves:
        path = self._at(step)
        with removal.standing(path, instead="open"), files.typed_errors(path, "read"):
            return Saves(chains.read_chain(path, self.item), self._numbers)

    def _read(self, step: int) -> StoredSave:
        path = self._at(step)
        stamp = path.stamp()
        if stamp is not None and (step, stamp) in self._stored:
            return self._stored[step, stamp]
        with removal.standing(path, instead="open"), files.typed_errors(path, "read"):
            found = saves.read_save(path, self.item)
        if stamp is not None:
            self._stored[step, stamp] = found
        return found

    def __repr__(self) -> str:
        return f"<Checkpoints {self.spot}: {len(self)} steps, newest {self.newest}>"

    def _repr_html_(self) -> str:
        return _page(self)


def open(
    path: str | os.PathLike[str], *, item: str | None = None, endpoint: str | None = None
) -> Checkpoints:
    """Opens checkpoints for reading: one listing, and nothing is written.

    Args:
      path: what was given to the manager: a directory, or the URL of a bucket.
      item: name of our item in the steps; found in the newest step by default.
      endpoint: address of the server of a bucket, where it is not the service's own.

    Raises:
      StorageError: there is no such directory.
      ForeignDirectory: nothing in it was written by deltackpt.
      UnsupportedRoot: the scheme is unknown.
      OptionError: the steps hold several items of ours: name one.
    """
    with files.typed_errors(Path(path), "read"):
        return Checkpoints(open_steps(path, item=item, endpoint=endpoint))


def _chain_length(
    save: StoredSave,
    found: Mapping[int, StoredSave],
    lengths: Mapping[int, int | None],
    compacted: Collection[SaveId],
) -> int | None:
    """Deltas that a restore of a save reads; those of earlier saves are known."""
    if save.info.rolling is not None and save.info.save_id not in compacted:
        return _window_length(save, found, compacted)
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


def _window_length(
    save: StoredSave, found: Mapping[int, StoredSave], compacted: Collection[SaveId]
) -> int | None:
    """As ``_chain_length``, of a save with a share of a rolling base: not all parents are read."""
    infos = (
        dataclasses.replace(held.info, kind="base", parent=None, rolling=None)
        if held.info.save_id in compacted
        else held.info
        for held in found.values()
    )
    try:
        read = chain.restore_chain(save.info, {info.step_dir: info for info in infos})
    except BrokenChain:
        return None
    return len(read) - (read[0].kind == "base")


def _page(ck: Checkpoints) -> str:
    """A directory: its first and its last steps."""
    steps = ck.steps
    shown = steps if len(steps) <= html.MOST_LINES else html.ends(steps)
    lines = [save_line(save) for save in ck.saves_of(shown)]
    title = f"{ck.spot}: {len(steps):,} steps, newest {ck.newest}"
    if len(shown) < len(steps):
        title += f", {len(lines)} shown: the first and the last"
    return html.table(SAVE_COLUMNS, lines, title)
