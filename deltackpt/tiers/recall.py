# SPDX-License-Identifier: Apache-2.0
"""Recovery: brings saves from local replicas and peers back into the staging directory.

A node that lost its staging directory (memory, a power cut), or its replacement, finds saves that
were never uploaded in extents or on peers. Saves that training still builds on are unpacked into
the staging directory, where restores, the next save and the uploader find them. Saves that training
rolled back or superseded must not return: the claims in the remote journal record from where each
trainer resumed, and bundles record the lineage of their run.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from deltackpt import events
from deltackpt.errors import (
    ClosedError,
    Damaged,
    FormatMismatch,
    OptionError,
    RestoreError,
    StorageError,
)
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import entries
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import State
from deltackpt.reading import saves
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import store_path
from deltackpt.tiers import packing
from deltackpt.tiers.packing import Contents, Holder, Label, PackName
from deltackpt.tiers.stage import Line, Orders, Stage

_logger = logging.getLogger(__name__)


class Offer(NamedTuple):
    """A bundle in a replica."""

    holder: Holder
    label: Label


class Judged(Protocol):
    """A candidate save, in a bundle or in the staging directory."""

    @property
    def save_id(self) -> SaveId:
        """Id of the save."""
        ...

    @property
    def line(self) -> Line:
        """The lineage of its run."""
        ...


_Judged = TypeVar("_Judged", bound=Judged)
#: Errors of unusable bundles.
Problems = dict[SaveId, RestoreError]


class InStage(NamedTuple):
    """A staged save."""

    save_id: SaveId
    line: Line


class Verdict(NamedTuple, Generic[_Judged]):
    """Which saves are current.

    Attributes:
      counting: saves from which training may resume, oldest first.
      orphans: superseded saves, with the reason.
    """

    counting: tuple[_Judged, ...]
    orphans: tuple[tuple[_Judged, str], ...]


class Recalled(NamedTuple):
    """The result of a recovery.

    Attributes:
      where: the replica that each save came from.
      lines: lineages of their runs.
      left: remote saves that were rolled back before the recovered saves were made.
      unusable: errors of saves without a usable bundle, by step.
    """

    where: dict[SaveId, str]
    lines: tuple[Line, ...]
    left: tuple[SaveId, ...]
    unusable: dict[int, RestoreError]


def recall(
    stage: Stage,
    local: Root,
    holders: Sequence[Holder],
    root: str,
    state: State,
    orders: Orders | None,
    *,
    part: int = 0,
    parts: int = 1,
    fsync: bool = True,
) -> Recalled:
    """Unpacks current saves that are not uploaded into the staging directory.

    Superseded saves are moved aside with a warning and dropped from the replicas.

    Args:
      stage: this process's staging directory.
      local: its checkpoint directory, whose lease this process holds.
      holders: replicas, nearest first.
      root: URL of the remote directory.
      state: state of the remote directory.
      orders: the previous trainer's orders, if any are still valid.
      part: index of this process.
      parts: number of processes.
      fsync: whether to fsync unpacked files.

    Raises:
      OptionError: a replica belongs to another checkpoint directory.
    """
    offers = offered(holders, part)
    problems: Problems = {}
    read: dict[PackName, Contents] = {}
    others: dict[str, str] = {}
    for name, offer in offers:
        contents = None if name in read else _contents(offer, problems)
        if contents is not None and contents.root != root:
            others[name.key] = (
                f"Tiers.{offer.holder.name}: expected replicas of {root}, found saves of "
                f"{contents.root}"
            )
        elif contents is not None:
            read[name] = contents
    if others and not read:
        raise OptionError(
            f"{next(iter(others.values()))}; use separate replicas for each checkpoint directory"
        )
    for key, other in others.items():
        events.warn(f"{other} ({key}); that bundle is left where it is")
    read = {name: contents for name, contents in read.items() if contents.parts == parts}
    known = () if orders is None else orders.lines
    lines = (*(one.line for one in read.values()), *known)
    _leave_behind(stage, local, state, lines, known)
    infos = local.saves()
    here = {info.save_id for info in infos.values() if info is not None}
    removed = set() if orders is None else {one.save_id for one in orders.retired}
    away = [one for one in read.values() if one.save_id not in here and not state.held(one.save_id)]
    verdict = judge(away, state, lines, removed)
    where: dict[SaveId, str] = {}
    for contents in verdict.counting:
        step = contents.save_id.step
        if infos.get(step) is not None or contents.save_id in where:
            continue
        if step in infos:  # The save cannot be identified.
            local.set_aside(step, stage.aside("damaged") / uuid.uuid4().hex)
        holder = bring(local, contents.save_id, offers, fsync=fsync, problems=problems)
        if holder is not None:
            where[contents.save_id] = holder
    if where:
        found = ", ".join(f"{one.step} ({holder})" for one, holder in where.items())
        _logger.info("%s: recovered steps %s", stage.path, found)
    _set_aside(stage, verdict.orphans, offers)
    back = [one for one in verdict.counting if one.save_id in where]
    lost = [one for one in problems if not (one in where or one in here or state.held(one))]
    return Recalled(
        where,
        tuple({one.line.run: one.line for one in back}.values()),
        left(back, state, lines),
        {one.step: problems[one] for one in lost},
    )


def offered(holders: Iterable[Holder], part: int) -> list[tuple[PackName, Offer]]:
    """Returns a process's available bundles, for each save those of the nearest replica first.

    Warns about a replica that cannot be queried: saves that only it holds are not recovered.
    """
    found: list[tuple[PackName, Offer]] = []
    for holder in holders:
        try:
            labels = holder.labels()
        except StorageError as error:
            events.warn(
                f"{holder.name}: expected an answer, found none ({error}); saves that only they "
                "hold are left where they are"
            )
            continue
        named = packing.newest_first(labels)
        found += [(name, Offer(holder, label)) for name, label in named if name.part == part]
    return found


def refuse_another_root(holder: Holder, root: str, part: int = 0) -> None:
    """Checks, before anything is claimed, that a replica does not belong to another directory.

    Raises:
      OptionError: all its saves belong to another checkpoint directory.
    """
    roots: set[str] = set()
    for _, offer in offered([holder], part):
        # ``recall`` reports unreadable bundles.
        with contextlib.suppress(Exception), offer.holder.reading(offer.label) as reader:
            roots.add(packing.read_contents(reader, offer.label)[0].root)
    if roots and root not in roots:
        raise OptionError(
            f"Tiers.{holder.name}: expected replicas of {root}, found saves of {min(roots)}; use "
            "separate replicas for each checkpoint directory"
        )


def bring(
    local: Root,
    save_id: SaveId,
    offers: Iterable[tuple[PackName, Offer]],
    *,
    fsync: bool,
    problems: Problems | None = None,
) -> str | None:
    """Unpacks a save into the staging directory, from the first replica with an intact bundle.

    Args:
      local: the checkpoint directory in the staging directory.
      save_id: id of the save.
      offers: bundles of this save and of others.
      fsync: whether to fsync the unpacked files.
      problems: receives the errors of unusable bundles.

    Returns:
      The replica's name; None if none has an intact bundle.
    """
    for name, offer in offers:
        final = local.step_dir(save_id.step)
        if name.save_id == save_id and _unpacked(offer, final, fsync, local.item, problems):
            return offer.holder.name
    return None


def _leave_behind(
    stage: Stage,
    local: Root,
    state: State,
    lines: Sequence[Line],
    known: Sequence[Line],
) -> None:
    """Moves staged saves aside that replicas show to be superseded.

    Args:
      stage: this process's staging directory.
      local: its checkpoint directory.
      state: state of the remote directory.
      lines: lineages of all known runs.
      known: those that the staging directory knows.
    """
    by_run = {line.run: line for line in known}
    here = [
        InStage(info.save_id, by_run[info.save_id.run])
        for info in local.saves().values()
        if info is not None and info.save_id.run in by_run and not state.held(info.save_id)
    ]
    for left_behind, why in reversed(judge(here, state, lines).orphans):
        step = left_behind.save_id.step
        target = stage.aside(f"left-{uuid.uuid4().hex[:8]}") / str(step)
        local.set_aside(step, target)
        events.warn(f"{stage.path}: step {step} is superseded: {why}; it was moved to {target}")


def judge(
    found: Sequence[_Judged],
    state: State,
    lines: Sequence[Line],
    removed: Collection[SaveId] = (),
) -> Verdict[_Judged]:
    """Determines which saves are current; pure.

    A save is superseded if it belongs to a former directory at the URL, or if a later run, or a
    trainer that took the directory since, does not descend from it.

    Args:
      found: saves that were never uploaded.
      state: state of the remote directory.
      lines: lineages of all known runs, including those of ``found``.
      removed: saves that were removed deliberately.
    """
    by_run = {line.run: line for line in lines}
    began = [claim for claim in state.entry.claims if claim.began]

    def goes_on_after(goes_on: SaveId | None, run: str, attempt: int) -> bool:
        """Whether a trainer that resumes from a save descends from an attempt of a run."""
        if goes_on is None:
            return False
        if goes_on.run == run:
            return attempt <= goes_on.attempt
        line = by_run.get(goes_on.run)
        return line is not None and attempt <= line.past.get(run, -1)

    def why_not(moment: tuple[int, int], run: str, attempt: int) -> str | None:
        for line in standing:
            if line.moment > moment and attempt > line.past.get(run, -1):
                return f"training continued without it (epoch {line.epoch}, generation {line.era})"
        for claim in began:
            if claim.lease.epoch > moment[0] and not goes_on_after(claim.goes_on, run, attempt):
                return f"training continued without it (epoch {claim.lease.epoch})"
        return None

    #: Lineages with later descendants of any of their saves: earlier ones are irrelevant.
    standing: list[Line] = []
    for line in sorted(lines, key=lambda line: line.moment, reverse=True):
        if _other_root(line, state) is None and why_not(line.moment, line.run, 0) is None:
            standing.append(line)
    counting: list[_Judged] = []
    orphans: list[tuple[_Judged, str]] = []
    for one in found:
        why = "it was removed" if one.save_id in removed else None
        why = why or _other_root(one.line, state)
        why = why or why_not(one.line.moment, one.save_id.run, one.save_id.attempt)
        if why is None:
            counting.append(one)
        else:
            orphans.append((one, why))
    return Verdict(tuple(sorted(counting, key=lambda one: one.save_id.step)), tuple(orphans))


def left(back: Sequence[Contents], state: State, lines: Sequence[Line]) -> tuple[SaveId, ...]:
    """Returns remote saves that a rollback should have removed but never did. Pure.

    Args:
      back: the recovered saves.
      state: state of the remote directory.
      lines: lineages of all known runs.
    """
    if not back:
        return ()
    newest = max(back, key=lambda one: (one.line.moment, one.save_id.step))
    by_run = {line.run: line for line in lines}

    def is_on_line(save_id: SaveId) -> bool:
        if save_id.run == newest.save_id.run:
            return True
        after = by_run.get(save_id.run)
        return newest.line.has(save_id) or (after is not None and after.has(newest.save_id))

    steps = [one for one in state.standings.values() if one.item is None]
    kept = max((one.step for one in steps if is_on_line(one.save_id)), default=-1)
    return tuple(
        one.save_id
        for one in steps
        if one.step > kept
        and not is_on_line(one.save_id)
        and (entries.prefix_epoch(one.prefix) or 0) <= newest.epoch
    )


def _other_root(line: Line, state: State) -> str | None:
    claimed = {claim.lease.epoch: claim.lease.holder for claim in state.entry.claims}
    if not claimed or line.epoch < min(claimed):
        return "its claim was superseded by more trainers than the journal records"
    if claimed.get(line.epoch) != line.holder:
        return "another checkpoint directory is at the URL now"
    return None


def _contents(offer: Offer, problems: Problems) -> Contents | None:
    """Manifest of a bundle; None, with a warning, if it is not readable."""
    with _passing_over(offer, problems), offer.holder.reading(offer.label) as reader:
        return packing.read_contents(reader, offer.label)[0]
    return None


def _unpacked(
    offer: Offer,
    final: Path,
    fsync: bool,
    item: str | None = None,
    problems: Problems | None = None,
) -> bool:
    """Unpacks a bundle; returns whether that worked and the contents are the item's save."""
    temporary = packing.temporary_folder(final.parent, final.name)
    folder = DurableDir(final.parent, fsync=fsync)
    with _passing_over(offer, problems):
        try:
            with offer.holder.reading(offer.label) as reader:
                contents = packing.unpack(reader, offer.label, temporary, fsync=fsync)
            if item is not None:
                _check_save(temporary, item, contents.save_id)
            folder.publish(temporary, final)
        except BaseException:
            folder.remove(temporary)
            raise
        return True
    return False


def _check_save(step_dir: Path, item: str, save_id: SaveId) -> None:
    """Checks that a step is the save that its bundle names; a restore reports newer formats."""
    with contextlib.suppress(FormatMismatch):
        found = saves.read_info(store_path(step_dir), item).save_id
        if found != save_id:
            raise Damaged(step_dir.name, f"the save {save_id}", f"{found}")


@contextlib.contextmanager
def _passing_over(offer: Offer, problems: Problems | None) -> Iterator[None]:
    """Warns about an unusable bundle, and continues without it.

    Anyone with write access to the replica can write anything there, and no bundle may make startup
    fail. So this handles errors of every type.
    """
    try:
        yield
    except ClosedError:
        raise  # The replica, not the bundle.
    except Exception as error:
        events.warn(
            f"{offer.holder.name}: expected the bundle {offer.label.key}, found that it is not "
            f"readable: {str(error) or type(error).__name__}; trying other replicas"
        )
        save_id = packing.save_of(offer.label)
        if problems is not None and save_id is not None:
            if not isinstance(error, RestoreError):
                error = Damaged(offer.label.key, "a readable bundle", str(error))
            problems.setdefault(save_id, error)


def _set_aside(
    stage: Stage,
    orphans: Sequence[tuple[Contents, str]],
    offers: Sequence[tuple[PackName, Offer]],
) -> None:
    """Unpacks a superseded save where no reader looks, and drops it."""
    if not orphans:
        return
    aside = stage.aside(f"held-{uuid.uuid4().hex[:8]}")
    for contents, why in orphans:
        held = [offer for name, offer in offers if name == contents.name]
        target = aside / str(contents.save_id.step) / contents.name.key
        DurableDir(target.parent).create()
        if any(_unpacked(offer, target, True) for offer in held):
            events.warn(
                f"{held[0].holder.name}: step {contents.save_id.step} is superseded: {why}; it was "
                f"moved to {target}"
            )
            for offer in held:
                offer.holder.drop([offer.label])
