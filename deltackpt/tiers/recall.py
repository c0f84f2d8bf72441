# SPDX-License-Identifier: Apache-2.0
"""Recall: saves that are held near the stage and are not in it come back to it.

A node that lost its stage (memory, a power cut), or another node in its place, finds saves that
never came to the root in extents or at neighbours. Those that training still goes on from are
unpacked into the stage, where all else finds them: a restore, the next save, the promoter. What
training went back behind, or on without, must not come back: the claims in the root's journal say
what each trainer went on from, and packs say under which claim they were made and how often
training had gone back by then (their era).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from deltackpt import events
from deltackpt.errors import OptionError, RestoreError, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import State
from deltackpt.storage import files
from deltackpt.tiers import packing
from deltackpt.tiers.packing import Contents, Holder, Label, PackName
from deltackpt.tiers.stage import Orders, Stage

_logger = logging.getLogger(__name__)


class Offer(NamedTuple):
    """A pack that a holder has."""

    holder: Holder
    label: Label


class Verdict(NamedTuple):
    """Which packs count.

    Attributes:
      counting: those that training may go on from, oldest first.
      orphans: those that it went on without, and why.
    """

    counting: tuple[Contents, ...]
    orphans: tuple[tuple[Contents, str], ...]


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
) -> dict[SaveId, str]:
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

    Returns:
      Where each save that came back was held.

    Raises:
      OptionError: a holder is another root's.
    """
    here = {step: info for step, info in local.saves().items() if info is not None}
    known = {info.save_id for info in here.values()}
    offers = offered(holders, part)
    read: dict[PackName, Contents] = {}
    for name, offer in offers:
        if name in read or name.save_id in known or state.held(name.save_id):
            continue
        contents = _contents(offer)
        if contents is not None and contents.root != root:
            raise OptionError(
                f"Tiers.{offer.holder.name}: expected those of {root}, found that they hold saves "
                f"of {contents.root}; give each root its own"
            )
        if contents is not None and contents.parts == parts:
            read[name] = contents
    verdict = judge([*read.values()], state, orders)
    where: dict[SaveId, str] = {}
    for contents in verdict.counting:
        step = contents.save_id.step
        if step in here or contents.save_id in where:
            continue
        holder = bring(local, contents.save_id, offers, fsync=fsync)
        if holder is not None:
            where[contents.save_id] = holder
    if where:
        found = ", ".join(f"{one.step} ({holder})" for one, holder in where.items())
        _logger.info("%s: brought back steps %s", stage.path, found)
    _set_aside(stage, verdict.orphans, offers)
    return where


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


def judge(packs: Sequence[Contents], state: State, orders: Orders | None) -> Verdict:
    """Which packs count; pure.

    One is orphaned where it is of another root that stood under the URL; and where training went
    on at a later moment (of a claim, or of an era of one) from a save that does not come after it.

    Args:
      packs: of saves that are neither in the stage nor were ever at the root.
      state: of the root.
      orders: of the trainer before, where its stage is still there.
    """
    moments = {(claim.lease.epoch, 0): claim.goes_on for claim in state.entry.claims if claim.began}
    moments |= {one.name.moment: one.goes_on for one in packs}
    if orders is not None and orders.began:
        moments[orders.moment] = orders.era_from
    made_at = {one.save_id: one.name.moment for one in packs}

    def is_before(one: Contents, later: SaveId | None) -> bool:
        """Whether a save is one that a later one goes back to, or that one itself."""
        passed: set[SaveId] = set()
        while later is not None and later not in passed:
            if later.run == one.save_id.run:
                return one.save_id.attempt <= later.attempt
            passed.add(later)
            moment = made_at.get(later, (0, 0))
            if moment <= one.name.moment:
                return moment == one.name.moment and one.save_id.step <= later.step
            later = moments.get(moment)
        return False

    counting: list[Contents] = []
    orphans: list[tuple[Contents, str]] = []
    for one in packs:
        why = _other_root(one, state)
        for moment, goes_on in moments.items():
            if moment > one.name.moment and not is_before(one, goes_on):
                why = why or f"training went on without it (epoch {moment[0]}, era {moment[1]})"
        if why is None:
            counting.append(one)
        else:
            orphans.append((one, why))
    return Verdict(tuple(sorted(counting, key=lambda one: one.save_id.step)), tuple(orphans))


def _other_root(one: Contents, state: State) -> str | None:
    claimed = {claim.lease.epoch: claim.lease.holder for claim in state.entry.claims}
    if not claimed or one.epoch < min(claimed):
        return "so many trainers came since that the root does not remember its own"
    if claimed.get(one.epoch) != one.holder:
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
