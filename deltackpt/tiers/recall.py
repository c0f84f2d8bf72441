# SPDX-License-Identifier: Apache-2.0
"""Recall: saves that are held near the stage and are not in it come back to it.

A node that lost its stage (memory, a power cut), or another node in its place, finds saves that
never came to the root in extents or at neighbours. Those that training still goes on from are
unpacked into the stage, where all else finds them: a restore, the next save, the promoter. What
training went back behind, or on without, must not come back: the claims in the root's journal say
what each trainer went on from, and packs say what their run comes after (its line).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from deltackpt import events
from deltackpt.errors import OptionError, RestoreError, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import entries
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import State
from deltackpt.storage import files
from deltackpt.tiers import packing
from deltackpt.tiers.packing import Contents, Holder, Label, PackName
from deltackpt.tiers.stage import Line, Orders, Stage

_logger = logging.getLogger(__name__)


class Offer(NamedTuple):
    """A pack that a holder has."""

    holder: Holder
    label: Label


class Judged(Protocol):
    """A save that may count: one in a pack, or in the stage."""

    @property
    def save_id(self) -> SaveId:
        """Which it is."""
        ...

    @property
    def line(self) -> Line:
        """That of its run."""
        ...


_Judged = TypeVar("_Judged", bound=Judged)


class InStage(NamedTuple):
    """A save in the stage."""

    save_id: SaveId
    line: Line


class Verdict(NamedTuple, Generic[_Judged]):
    """Which saves count.

    Attributes:
      counting: those that training may go on from, oldest first.
      orphans: those that it went on without, and why.
    """

    counting: tuple[_Judged, ...]
    orphans: tuple[tuple[_Judged, str], ...]


class Recalled(NamedTuple):
    """What came back.

    Attributes:
      where: the holder that each save came from.
      lines: of their runs.
      left: saves at the root that training had gone back behind before what came back was made.
    """

    where: dict[SaveId, str]
    lines: tuple[Line, ...]
    left: tuple[SaveId, ...]


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
    """Unpacks into the stage what counts of what is held near it, and is not at the root.

    What does not count is unpacked aside, with a warning, and held no more.

    Args:
      stage: of this process.
      local: its checkpoint directory, whose lease is held.
      holders: the nearest first.
      root: its URL.
      state: of the root.
      orders: those of the trainer before, where the stage has any that still hold.
      part: of which process.
      parts: of how many.
      fsync: whether what is unpacked survives a power cut in the stage.

    Raises:
      OptionError: a holder is another root's.
    """
    offers = offered(holders, part)
    read: dict[PackName, Contents] = {}
    for name, offer in offers:
        contents = None if name in read else _contents(offer)
        if contents is not None and contents.root != root:
            raise OptionError(
                f"Tiers.{offer.holder.name}: expected those of {root}, found that they hold saves "
                f"of {contents.root}; give each root its own"
            )
        if contents is not None and contents.parts == parts:
            read[name] = contents
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
        if step in infos:  # Nobody can tell which save it was.
            local.set_aside(step, stage.aside("damaged") / uuid.uuid4().hex)
        holder = bring(local, contents.save_id, offers, fsync=fsync)
        if holder is not None:
            where[contents.save_id] = holder
    if where:
        found = ", ".join(f"{one.step} ({holder})" for one, holder in where.items())
        _logger.info("%s: brought back steps %s", stage.path, found)
    _set_aside(stage, verdict.orphans, offers)
    back = [one for one in verdict.counting if one.save_id in where]
    return Recalled(
        where, tuple({one.line.run: one.line for one in back}.values()), left(back, state, lines)
    )


def offered(holders: Iterable[Holder], part: int) -> list[tuple[PackName, Offer]]:
    """The packs of a process that can be had, of each save those of the nearest holder first.

    A holder that cannot be asked is warned of: what it alone has will not come back.
    """
    found: list[tuple[PackName, Offer]] = []
    for holder in holders:
        try:
            labels = holder.labels()
        except StorageError as error:
            events.warn(
                f"{holder.name}: expected to be asked for saves, found that they do not answer "
                f"({error}); what only they hold is left where it is"
            )
            continue
        named = packing.newest_first(labels)
        found += [(name, Offer(holder, label)) for name, label in named if name.part == part]
    return found


def bring(
    local: Root, save_id: SaveId, offers: Iterable[tuple[PackName, Offer]], *, fsync: bool
) -> str | None:
    """Unpacks a save into the stage, from the first holder whose pack is whole.

    Returns:
      The name of the holder; None where none has it whole.
    """
    for name, offer in offers:
        if name.save_id == save_id and _unpacked(offer, local.step_dir(save_id.step), fsync):
            return offer.holder.name
    return None


def _leave_behind(
    stage: Stage,
    local: Root,
    state: State,
    lines: Sequence[Line],
    known: Sequence[Line],
) -> None:
    """Moves saves of the stage aside that training went on without, as packs near it tell.

    Args:
      stage: of this process.
      local: its checkpoint directory.
      state: of the root.
      lines: of all runs that are known.
      known: those of them that the stage knows.
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
        events.warn(
            f"{stage.path}: step {step} does not count, since {why}; it was moved to {target}"
        )


def judge(
    found: Sequence[_Judged],
    state: State,
    lines: Sequence[Line],
    removed: Collection[SaveId] = (),
) -> Verdict[_Judged]:
    """Which saves count; pure.

    One is orphaned where it is of another root that stood under the URL; and where a run that began
    at a later moment, or a trainer that took the root since, does not come after it.

    Args:
      found: saves that were never at the root.
      state: of the root.
      lines: of all runs that are known, those of what was found among them.
      removed: saves that were removed on purpose.
    """
    by_run = {line.run: line for line in lines}
    began = [claim for claim in state.entry.claims if claim.began]

    def goes_on_after(goes_on: SaveId | None, run: str, attempt: int) -> bool:
        """Whether a trainer that goes on from a save comes after an attempt of a run."""
        if goes_on is None:
            return False
        if goes_on.run == run:
            return attempt <= goes_on.attempt
        line = by_run.get(goes_on.run)
        return line is not None and attempt <= line.past.get(run, -1)

    def why_not(moment: tuple[int, int], run: str, attempt: int) -> str | None:
        for line in standing:
            if line.moment > moment and attempt > line.past.get(run, -1):
                return f"training went on without it (epoch {line.epoch}, era {line.era})"
        for claim in began:
            if claim.lease.epoch > moment[0] and not goes_on_after(claim.goes_on, run, attempt):
                return f"training went on without it (epoch {claim.lease.epoch})"
        return None

    #: Lines that later ones came after, with any of their saves: others say nothing any more.
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
    """Saves at the root that training went back behind, which never came to be done there; pure.

    Args:
      back: what came back from near the stage.
      state: of the root.
      lines: of all runs that are known.
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
        return "so many trainers came since that the root does not remember its own"
    if claimed.get(line.epoch) != line.holder:
        return "another root stands under the URL now"
    return None


def _contents(offer: Offer) -> Contents | None:
    """What is in a pack; None, with a warning, where it cannot be read."""
    try:
        with offer.holder.reading(offer.label) as reader:
            return packing.read_contents(reader, offer.label)[0]
    except (RestoreError, StorageError) as error:
        _warn_of(offer, error)
        return None


def _unpacked(offer: Offer, final: Path, fsync: bool) -> bool:
    """Unpacks a pack; says whether it could be."""
    temporary = packing.temporary_folder(final.parent, final.name)
    try:
        with offer.holder.reading(offer.label) as reader:
            packing.unpack(reader, offer.label, temporary, fsync=fsync)
        files.rename(temporary, final, fsync=fsync)
    except (RestoreError, StorageError) as error:
        files.remove_tree(temporary)
        _warn_of(offer, error)
        return False
    return True


def _warn_of(offer: Offer, error: Exception) -> None:
    events.warn(
        f"{offer.holder.name}: expected the pack {offer.label.key}, found that it cannot be read: "
        f"{error}; other places are tried"
    )


def _set_aside(
    stage: Stage,
    orphans: Sequence[tuple[Contents, str]],
    offers: Sequence[tuple[PackName, Offer]],
) -> None:
    """Unpacks what does not count aside, where nobody finds it, and lets it go."""
    if not orphans:
        return
    aside = stage.aside(f"held-{uuid.uuid4().hex[:8]}")
    files.make_folder(aside)
    for contents, why in orphans:
        held = [offer for name, offer in offers if name == contents.name]
        target = aside / str(contents.save_id.step) / contents.name.key
        files.make_folder(target.parent)
        if any(_unpacked(offer, target, True) for offer in held):
            events.warn(
                f"{held[0].holder.name}: step {contents.save_id.step} does not count, since {why}; "
                f"it was moved to {target}"
            )
            for offer in held:
                offer.holder.drop([offer.label])
