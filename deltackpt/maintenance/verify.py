# SPDX-License-Identifier: Apache-2.0
"""Verification of a checkpoint directory: every byte, every record, every chain.

Trainers, compactions and retention may run during a verification. Objects that they remove are not
reported as damage, and replacements are verified too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltackpt.errors import (
    BrokenChain,
    Damaged,
    DamagedKeys,
    DeltackptError,
    ForeignDirectory,
    RestoreError,
    StepGone,
    StepNotFound,
    StorageError,
)
from deltackpt.format import chain, naming
from deltackpt.format.manifest import ParentRef, SaveId, SaveInfo
from deltackpt.ledger import lease
from deltackpt.ledger.bucket_steps import BucketSteps
from deltackpt.ledger.directory import Root, is_known, is_leftover
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import open_steps
from deltackpt.ledger.steps import Steps
from deltackpt.maintenance.verify_save import (
    CommittedSave,
    Problem,
    SaveVerdict,
    committed_saves,
    once,
    problem_of,
    verify_save,
)
from deltackpt.maintenance.verify_wal import PointVerdict, verify_wal
from deltackpt.reading import reader, stored_saves
from deltackpt.reading.reader import Progress, ProgressMeter
from deltackpt.reading.shard_arrays import is_of_dense_segment
from deltackpt.reading.stored_dense import StoredItem
from deltackpt.reading.stored_saves import StoredSave

if TYPE_CHECKING:
    from deltackpt.options import KafkaWal

#: Number of listings if a chain lacks something that may have been replaced.
_MOST_ROUNDS = 8
#: Retention removes a chain step by step, so a parent may be missing before its children are.
_CHECKS = 5
_INTERVAL_SECS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """Whether a step can be restored bit for bit."""

    step: int
    restorable: bool
    chain: tuple[str, ...] = ()  #: Saves that a restore reads, base first.
    broken_by: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootReport:
    """Result of verifying a directory; ``notes`` are leftovers and unknown names, not damage."""

    directory: str
    steps: tuple[StepVerdict, ...]
    saves: tuple[SaveVerdict, ...]
    points: tuple[PointVerdict, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    file_count: int
    bytes_read: int
    seconds: float

    @property
    def intact(self) -> bool:
        """Whether nothing is damaged, and every step can be restored."""
        return not self.problems and all(step.restorable for step in self.steps)


def verify_root(
    directory: str | os.PathLike[str],
    *,
    item: str | None = None,
    steps: Collection[int] | None = None,
    endpoint: str | None = None,
    wal: KafkaWal | None = None,
    progress: Progress | None = None,
) -> RootReport:
    """Re-reads and checks everything in a directory, or ``steps`` and what they need.

    Neither jax nor Orbax is needed. ``wal`` reads WAL records in Kafka. ``progress`` is called from
    several threads.
    """
    with contextlib.closing(open_steps(directory, item=item, endpoint=endpoint, wal=wal)) as opened:
        return _verified(opened, steps, progress)


#: Maps the name of a save to the save, its verdict, and what chains need of its manifest.
Verified = dict[str, tuple[CommittedSave, SaveVerdict, SaveInfo | None]]


def broken_by(opened: Steps, step: int, kept: Collection[str], known: Verified) -> str:
    """Returns what breaks a step, if anything, after reading what its restore needs.

    Only the ``kept`` saves count: names of steps, and of bases such as ``compacted/5``. Saves
    in ``known`` are not read again; those that are read are added to it.
    """
    audit = _Audit(opened, [step], None, kept, known)
    verdicts = audit.run()
    if any(verdict.restorable for verdict in verdicts):
        return ""
    names = {name for verdict in verdicts for name in verdict.broken_by}
    saves = (save for save in audit.reports if save.name in names)
    damage = (one for save in saves for one in save.problems if one.stops != "nothing")
    return str(next(damage, "its chain is broken"))


def damage_of(opened: Steps, name: str, known: Verified) -> str:
    """Returns what is damaged in a save, if anything; reads the save unless it is ``known``."""
    for save in committed_saves(opened):
        if save.name == name:
            if name not in known or not known[name][0].dir_identity.same(save.dir_identity):
                known[name] = save, *verify_save(save, lambda nbytes: None)
            problems = known[name][1].problems
            return next((str(one) for one in problems if one.stops != "nothing"), "")
    return "it was removed"


def _refuse_foreign(opened: Steps) -> None:
    """Raises ForeignDirectory if deltackpt wrote none of the steps."""
    first = None
    for step in sorted(opened.steps(), reverse=True):
        try:
            stored_saves.read_save(opened.at(step), opened.item)
        except ForeignDirectory as error:
            first = first or error
        except (RestoreError, StorageError):
            return  # The audit reports it.
        else:
            return
    if first is not None:
        raise first


def _verified(
    opened: Steps, steps: Collection[int] | None, progress: Progress | None
) -> RootReport:
    started = time.perf_counter()
    if not stored_saves.compacted_bases(opened.store_path, opened.item):
        if not opened.steps():
            raise StepNotFound(f"{opened}: expected committed steps, found none; check the path")
        _refuse_foreign(opened)
    missing = set(steps or ()) - set(opened.steps())
    if missing:
        raise StepNotFound(
            f"{opened}: expected the steps {sorted(missing)}, found "
            f"{sorted(opened.steps())[-5:]} as the newest; choose steps that exist"
        )
    audit = _Audit(opened, steps, progress)
    verdicts = audit.run()
    gone = set(steps or ()) - {verdict.step for verdict in verdicts}
    if gone:
        raise StepGone(
            f"{opened}: expected the steps {sorted(gone)} to exist until they were verified, "
            "found them removed; choose steps that exist"
        )
    points: tuple[PointVerdict, ...] = ()
    intact, broken = audit.rows_intact(verdicts)  # May find problems.
    problems = [found for save in audit.reports for found in save.problems]
    notes, file_count = [*audit.notes], sum(save.file_count for save in audit.reports)
    if steps is None:
        log = verify_wal(opened, intact, broken, audit.meter)
        if isinstance(opened, BucketSteps):
            problems[:0] = map(_journal_problem, opened.journal.audit())
            journal = Journal(opened.journal.root)
            left = journal.find_leftovers(journal.state())
            notes += [f"{name}/: an upload that was interrupted" for name in sorted(left)]
        elif isinstance(opened, Root):
            others, of_others = _outside(opened.path)
            problems[:0], notes = others, [*notes, *of_others]
        points, file_count = log.points, file_count + log.file_count
        problems, notes = [*problems, *log.problems], [*notes, *log.notes]
    return RootReport(
        directory=str(opened),
        steps=verdicts,
        saves=audit.reports,
        points=points,
        problems=tuple(problems),
        notes=tuple(notes),
        file_count=file_count,
        bytes_read=audit.meter.done,
        seconds=time.perf_counter() - started,
    )


class _Audit:
    def __init__(
        self,
        opened: Steps,
        steps: Collection[int] | None,
        progress: Progress | None,
        kept: Collection[str] | None = None,
        known: Verified | None = None,
    ):
        self.notes: list[str] = []
        self.meter = ProgressMeter(progress)
        self._root = opened
        self._item = opened.item
        self._steps, self._kept = steps, kept
        self._found: Verified = {} if known is None else known
        #: The chain of the last step that was checked: that of the next step is mostly the same.
        self._chain: dict[CommittedSave, StoredSave] = {}

    @property
    def reports(self) -> tuple[SaveVerdict, ...]:
        """The report on each save, in the order of the steps; a base before its step."""
        found = sorted(self._found.values(), key=lambda one: (one[0].step, not one[0].is_base))
        return tuple(report for _, report, _ in found)

    def run(self) -> tuple[StepVerdict, ...]:
        """Verifies the requested steps; again if a chain lacks something that was replaced."""
        verdicts: tuple[StepVerdict, ...] = ()
        for _ in range(_MOST_ROUNDS):
            fresh = self._verify_new()
            verdicts = tuple(map(self._verdict, self._wanted_steps()))
            standing = all(save.exists for save, _, _ in self._found.values())
            if standing and all(verdict.restorable for verdict in verdicts):
                break
            if not fresh and not self._changes():
                break
        return verdicts

    def rows_intact(
        self, verdicts: Iterable[StepVerdict]
    ) -> tuple[dict[int, SaveId], dict[int, SaveId]]:
        """Returns the save ids of steps with intact rows, and of those with damaged ones, by step.

        A recovery point above a step needs only its rows.
        """
        intact, broken = dict[int, SaveId](), dict[int, SaveId]()
        for one in verdicts:
            info = self._found[str(one.step)][2]
            if info is not None:
                is_intact = one.restorable or self._verdict(one.step, dense=False).restorable
                (intact if is_intact else broken)[one.step] = info.save_id
        return intact, broken

    def _standing(self) -> Iterator[CommittedSave]:
        """The committed saves that count."""
        for save in committed_saves(self._root):
            if self._kept is None or save.name in self._kept:
                yield save

    def _changes(self) -> bool:
        """Whether the directory changes within a moment, so that missing saves may be replaced."""
        known = {(save.name, save.dir_identity.identity) for save, _, _ in self._found.values()}
        for _ in range(_CHECKS):
            now = {(save.name, save.dir_identity.identity) for save in self._standing()}
            if self._steps is None and now != known or not known <= now:
                return True
            time.sleep(_INTERVAL_SECS)
        return False

    def _wanted_steps(self) -> list[int]:
        steps = [int(name) for name in self._found if "/" not in name]
        return sorted(steps if self._steps is None else set(steps) & set(self._steps))

    def _verify_new(self) -> bool:
        """Verifies new saves and forgets removed ones; returns whether there were new ones."""
        standing = {save.name: save for save in self._standing()}
        for name, (save, _, _) in list(self._found.items()):
            if name not in standing or not standing[name].dir_identity.same(save.dir_identity):
                del self._found[name]
        fresh = [save for save in standing.values() if save.name not in self._found]
        if self._steps is not None:
            needed = self._needed(standing)
            fresh = [save for save in fresh if save.step in needed]
        self.meter.expect(sum(save.nbytes() for save in fresh))
        for save in fresh:
            report, info = verify_save(save, self.meter.add)
            if save.exists:
                self._found[save.name] = save, report, info
            else:
                self.notes.append(f"{save.name}: removed while it was verified")
        return bool(fresh)

    def _needed(self, standing: Mapping[str, CommittedSave]) -> set[int]:
        """Steps that the requested ones need, as far as their manifests can be read."""
        needed: set[int] = set()
        pending = list(self._steps or ())
        while pending:
            step = pending.pop()
            if step in needed:
                continue
            needed.add(step)
            save = standing.get(str(step))
            if save is not None:
                with contextlib.suppress(RestoreError, StorageError):
                    parent = save.read().info.parent
                    if parent is not None and parent.step_dir.isdecimal():
                        pending.append(int(parent.step_dir))
        return needed

    def _verdict(self, step: int, *, dense: bool = True) -> StepVerdict:
        """Returns whether a step can be restored, or its rows without ``dense`` leaves."""
        _, report, info = self._found[str(step)]
        # These are read even if the save has a compacted base.
        own = tuple(f"{self._item}/{of(0)}" for of in (naming.manifest_name, naming.digests_name))
        if (
            info is None
            or (dense and report.stops("step"))
            or any(
                problem.stops != "nothing" and problem.object_name.endswith(own)
                for problem in report.problems
            )
        ):
            return StepVerdict(step=step, restorable=False, broken_by=(str(step),))
        broken: list[str] = []
        read: list[str] = []

        def intact(save: SaveInfo) -> SaveInfo | None:
            held = self._intact(save, broken, dense)
            if held is None:
                return None
            name, save = held
            read.append(name)
            return save

        def find(parent: ParentRef) -> SaveInfo | None:
            below = self._info_of(parent.save_id, parent.step_dir)
            return None if below is None else intact(below)

        target = intact(info)
        walked = () if target is None else chain.walk(target, find)
        saves = {save.step_dir: save for save in walked}
        if not broken:
            try:
                chain.restore_chain(target or info, saves)
            except BrokenChain as error:
                broken.append(str(error).partition("; ")[0])
            else:
                broken += self._broken_together(step, read[::-1], dense)
                if not broken:
                    return StepVerdict(step=step, restorable=True, chain=tuple(reversed(read)))
        return StepVerdict(step=step, restorable=False, broken_by=tuple(broken))

    def _broken_together(self, step: int, read: Sequence[str], dense: bool) -> list[str]:
        """Saves that make dense leaves of a chain incomplete; the step if an id has two rows."""
        try:
            committed = [self._found[name][0] for name in read]
            self._chain = {save: self._chain.get(save) or save.read() for save in committed}
            saves = [*self._chain.values()]
            if dense:
                item = StoredItem(saves)
                if item.missing and item.base is not None:
                    base = item.base.save
                    if self._has_damaged_item(base.step_dir.name) and not base.compacted:
                        return [base.step_dir.name]
                if item.shards and self._has_damaged_dense(oldest := read[-len(item.shards)]):
                    return [oldest]
                item.check()
        except (Damaged, ForeignDirectory) as error:
            self._add(step, error)
            return [str(step)]
        except (RestoreError, StorageError):
            return [str(step)]  # Removed since, or reported for the save itself.
        try:
            reader.verify_keys(saves)
        except DamagedKeys as error:
            self._add(step, error)
            return [str(step)]
        except (RestoreError, StorageError):
            return [str(step)]  # Removed since: each save was intact.
        return []

    def _has_damaged_item(self, name: str) -> bool:
        """Whether the dense item of a step, or a list of its digests, is damaged."""
        found = (one.object_name.removeprefix(f"{name}/") for one in self._problems(name))
        return any(
            inside.partition("/")[0] in (naming.DENSE_ITEM, naming.STEP_DIGESTS)
            or naming.step_digests_process(inside) is not None
            for inside in found
        )

    def _has_damaged_dense(self, name: str) -> bool:
        """Whether dense leaves in the shards of a delta are damaged."""
        return any(
            problem.stops != "nothing" and self._is_of_dense(name, problem)
            for problem in self._problems(name)
        )

    def _is_of_dense(self, name: str, problem: Problem) -> bool:
        """Whether a problem affects only dense leaves in the item of a save."""
        inside = problem.object_name.removeprefix(f"{name}/{self._item}/")
        return inside != problem.object_name and (
            is_of_dense_segment(inside) or inside.startswith(f"{naming.DENSE_ITEM}/")
        )

    def _breaks_chains(self, report: SaveVerdict, dense: bool) -> bool:
        """Whether no chain with a save can be read, or none of its rows without ``dense``."""
        return any(
            problem.stops == "chain" and (dense or not self._is_of_dense(report.name, problem))
            for problem in report.problems
        )

    def _problems(self, name: str) -> tuple[Problem, ...]:
        return self._found[name][1].problems if name in self._found else ()

    def _add(self, step: int, error: Damaged | ForeignDirectory) -> None:
        """Adds a problem of the chain to the report on a step."""
        save, report, info = self._found[str(step)]
        problem = Problem(str(step), "a chain with all dense leaves", str(error), "step")
        if isinstance(error, Damaged):
            problem = problem_of(save, error)
        known = once((*report.problems, problem))
        self._found[str(step)] = save, dataclasses.replace(report, problems=known), info

    def _info_of(self, save_id: SaveId, step_dir: str) -> SaveInfo | None:
        """The save with that id; otherwise, the one that has its directory."""
        places = (f"{naming.COMPACTED}/{step_dir}", step_dir)
        found = [self._found[name][2] for name in places if name in self._found]
        known = [info for info in found if info is not None]
        for info in known:
            if info.save_id == save_id:
                return info
        if known or not found:
            return known[-1] if known else None
        # It exists but cannot be read: report damage instead of a missing save.
        return SaveInfo(save_id=save_id, kind="base", parent=None, step_dir=step_dir, nbytes=0)

    def _intact(
        self, info: SaveInfo, broken: list[str], dense: bool
    ) -> tuple[str, SaveInfo] | None:
        """What a reader uses for a save: its compacted base, or else the save itself."""
        damaged = []
        for name in (f"{naming.COMPACTED}/{info.step_dir}", info.step_dir):
            if name in self._found:
                _, report, found = self._found[name]
                if found is None or self._breaks_chains(report, dense):
                    damaged.append(name)
                elif found.save_id == info.save_id:
                    return name, found
        broken += damaged or [info.step_dir]
        return None


def _outside(path: Path) -> tuple[list[Problem], list[str]]:
    """Problems and notes of what is in the directory besides the steps."""
    problems, notes = [], []
    for name in sorted(os.listdir(path)):
        if naming.lease_epoch(name) is not None:
            problems += _lease_problems(path / name)
        elif name == naming.COMPACTED:
            notes += [
                f"{name}/{entry}: a compaction that was interrupted, or is running"
                for entry in _listing(path / name)
                if naming.is_compaction(entry)
            ]
        elif name == naming.ROLLED_BACK:
            found = sum(len(_listing(path / name / run)) for run in _listing(path / name))
            if found:
                notes.append(f"{name}/: {found} rolled-back steps, not verified")
        elif name == naming.COPYING:
            notes.append(f"{name}/: a copy that was interrupted, or is running")
        elif name.startswith(naming.REMOVED):
            notes.append(f"{name}: a deletion that was interrupted, or is running")
        elif is_leftover(name):
            notes.append(f"{name}: a save that was interrupted, or is running")
        elif name != naming.LOG and not is_known(name):
            notes.append(f"{name}: written by neither deltackpt nor Orbax")
    return problems, notes


def _journal_problem(error: Damaged) -> Problem:
    """The problem of a journal object: its saves are missing, or were read from its copy."""
    problem = Problem.from_damage(error, "nothing")
    return dataclasses.replace(problem, found=f"{error.found}; {error.action}")


def _lease_problems(path: Path) -> Iterable[Problem]:
    """Problems of a lease; an unsigned claim is not one, because only its name counts."""
    try:
        if path.stat().st_size:
            lease.read_lease(path)
    except FileNotFoundError:
        return  # Removed by a newer trainer.
    except Damaged as error:
        yield dataclasses.replace(Problem.from_damage(error, "nothing"), object_name=path.name)
    except (DeltackptError, OSError) as error:
        yield Problem(path.name, "a lease", str(error), "nothing")


def _listing(directory: Path) -> list[str]:
    """Names in a directory; none if it was removed."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
