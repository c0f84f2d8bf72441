# SPDX-License-Identifier: Apache-2.0
"""Recovery: fetches saves from local replicas and peers into the staging directory.

A node that lost its staging directory (memory, a power cut), or its replacement, finds saves that
were never uploaded in extents or on peers. Saves that training rolled back or superseded must not
return: the claims in the remote journal record from where each trainer resumed, and bundles record
the lineage of their run.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from deltackpt import events
from deltackpt.errors import (
    ClosedError,
    Damaged,
    FormatMismatch,
    OptionError,
    RestoreError,
    StorageError,
)
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import entries
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import State
from deltackpt.reading import stored_saves
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import store_path
from deltackpt.tiers import bundles
from deltackpt.tiers.bundles import BundleManifest, BundleName, BundleRef, Tier
from deltackpt.tiers.staging import Orders, RunLineage, StagingDir

_logger = logging.getLogger(__name__)

#: Errors of unusable bundles.
Problems = dict[SaveId, RestoreError]


class Offer(NamedTuple):
    """A bundle in a tier."""

    name: BundleName
    tier: Tier
    ref: BundleRef


class Recovered(NamedTuple):
    """The result of a recovery."""

    sources: dict[SaveId, str]  # the tier that each save came from
    lines: tuple[RunLineage, ...]
    #: Remote saves that were rolled back before the recovered saves were made.
    left: tuple[SaveId, ...]
    unusable: dict[int, RestoreError]  # errors of saves without a usable bundle, by step


def recover(
    stage: StagingDir,
    local: Root,
    tiers: Sequence[Tier],
    root: str,
    state: State,
    orders: Orders | None,
    *,
    part: int = 0,
    parts: int = 1,
    fsync: bool = True,
) -> Recovered:
    """Unpacks current saves that are not uploaded into the staging directory.

    The nearest tier comes first. Stale saves are moved aside with a warning and deleted from the
    tiers. Raises OptionError if all bundles belong to another checkpoint directory.
    """
    offers = offered(tiers, part)
    problems: Problems = {}
    found = [one for one in _manifests(offers, root, problems) if one.parts == parts]
    known = () if orders is None else orders.lines
    lines = (*(one.lineage for one in found), *known)
    why_stale = classify(state, lines)
    _leave_stale(stage, local, state, known, why_stale)
    infos = local.saves()
    here = {info.save_id for info in infos.values() if info is not None}
    removed = set() if orders is None else {one.save_id for one in orders.retired}
    current: list[BundleManifest] = []
    sources: dict[SaveId, str] = {}
    aside = stage.aside(f"held-{uuid.uuid4().hex[:8]}")
    for one in sorted(found, key=lambda one: one.save_id.step):
        if one.save_id in here or state.was_committed(one.save_id):
            continue
        why = "it was removed" if one.save_id in removed else why_stale(one.save_id, one.lineage)
        if why is not None:
            _set_aside(aside, one, why, offers)
            continue
        current.append(one)
        step = one.save_id.step
        if infos.get(step) is not None or one.save_id in sources:
            continue
        if step in infos:  # The save cannot be identified.
            local.set_aside(step, stage.aside("damaged") / uuid.uuid4().hex)
        source = fetch(local, one.save_id, offers, fsync=fsync, problems=problems)
        if source is not None:
            sources[one.save_id] = source
    if sources:
        shown = ", ".join(f"{one.step} ({source})" for one, source in sources.items())
        _logger.info("%s: recovered steps %s", stage.path, shown)
    back = [one for one in current if one.save_id in sources]
    lost = [
        one for one in problems if not (one in sources or one in here or state.was_committed(one))
    ]
    return Recovered(
        sources,
        tuple({one.lineage.run: one.lineage for one in back}.values()),
        unfinished_rollback(back, state, lines),
        {one.step: problems[one] for one in lost},
    )


def offered(tiers: Iterable[Tier], part: int) -> list[Offer]:
    """Returns a process's available bundles, for each save those of the nearest tier first.

    Warns about a tier that cannot be queried: saves that only it holds are not recovered.
    """
    found: list[Offer] = []
    for tier in tiers:
        try:
            named = bundles.newest_first(tier.refs())
        except StorageError as error:
            events.warn(
                f"{tier.name}: expected an answer, found none ({error}); saves that only they "
                "hold are left where they are"
            )
            continue
        found += [Offer(name, tier, ref) for name, ref in named if name.part == part]
    return found


def refuse_another_root(tier: Tier, root: str, part: int = 0) -> None:
    """Checks, before anything is claimed, that a tier does not belong to another directory."""
    roots: set[str] = set()
    for one in offered([tier], part):
        # ``recover`` reports unreadable bundles.
        with contextlib.suppress(Exception), tier.open(one.ref) as reader:
            roots.add(bundles.read_manifest(reader, one.ref)[0].root)
    if roots and root not in roots:
        raise _of_another_root(tier, root, min(roots))


def fetch(
    local: Root,
    save_id: SaveId,
    offers: Iterable[Offer],
    *,
    fsync: bool,
    problems: Problems | None = None,
) -> str | None:
    """Unpacks a save from the first tier with an intact bundle; returns the tier's name or None."""
    final = local.step_dir(save_id.step)
    for one in offers:
        if one.name.save_id == save_id and _unpacked(one, final, fsync, local.item, problems):
            return one.tier.name
    return None


def classify(
    state: State, lines: Sequence[RunLineage]
) -> Callable[[SaveId, RunLineage], str | None]:
    """Returns a function that explains why a save that was never uploaded is stale; pure.

    A save is stale if it belongs to a former directory at the URL, or if a later run, or a trainer
    that took the directory since, does not descend from it. ``lines`` include the saves' own
    lineages.
    """
    by_run = {lineage.run: lineage for lineage in lines}
    began = [claim for claim in state.entry.claims if claim.began]
    claimed = {claim.lease.epoch: claim.lease.holder for claim in state.entry.claims}
    #: Lineages with later descendants of any of their saves: earlier ones are irrelevant.
    living: list[RunLineage] = []

    def descends(resumed_from: SaveId | None, run: str, attempt: int) -> bool:
        """Whether a trainer that resumes from a save descends from an attempt of a run."""
        if resumed_from is None:
            return False
        if resumed_from.run == run:
            return attempt <= resumed_from.attempt
        lineage = by_run.get(resumed_from.run)
        return lineage is not None and attempt <= lineage.past.get(run, -1)

    def reason_stale(lineage: RunLineage, attempt: int) -> str | None:
        if not claimed or lineage.epoch < min(claimed):
            return "its claim was superseded by more trainers than the journal records"
        if claimed.get(lineage.epoch) != lineage.holder:
            return "another checkpoint directory is at the URL now"
        for one in living:
            if one.moment > lineage.moment and attempt > one.past.get(lineage.run, -1):
                return f"training continued without it (epoch {one.epoch}, generation {one.era})"
        for claim in began:
            epoch = claim.lease.epoch
            if epoch > lineage.epoch and not descends(claim.goes_on, lineage.run, attempt):
                return f"training continued without it (epoch {epoch})"
        return None

    for lineage in sorted(lines, key=lambda lineage: lineage.moment, reverse=True):
        if reason_stale(lineage, 0) is None:
            living.append(lineage)
    return lambda save_id, lineage: reason_stale(lineage, save_id.attempt)


def unfinished_rollback(
    back: Sequence[BundleManifest], state: State, lines: Sequence[RunLineage]
) -> tuple[SaveId, ...]:
    """Returns remote saves that a rollback should have removed but never did. Pure."""
    if not back:
        return ()
    newest = max(back, key=lambda one: (one.lineage.moment, one.save_id.step))
    by_run = {lineage.run: lineage for lineage in lines}

    def is_in_lineage(save_id: SaveId) -> bool:
        if save_id.run == newest.save_id.run:
            return True
        after = by_run.get(save_id.run)
        return newest.lineage.has(save_id) or (after is not None and after.has(newest.save_id))

    steps = [one for one in state.catalog.values() if one.item is None]
    kept = max((one.step for one in steps if is_in_lineage(one.save_id)), default=-1)
    return tuple(
        one.save_id
        for one in steps
        if one.step > kept
        and not is_in_lineage(one.save_id)
        and (entries.prefix_epoch(one.prefix) or 0) <= newest.epoch
    )


def _manifests(offers: Iterable[Offer], root: str, problems: Problems) -> list[BundleManifest]:
    """Manifests of the offered bundles, each read from the nearest tier where it is readable."""
    read: dict[BundleName, BundleManifest] = {}
    others: dict[str, OptionError] = {}
    for one in offers:
        if one.name in read:
            continue
        with _passing_over(one, problems), one.tier.open(one.ref) as reader:
            found = bundles.read_manifest(reader, one.ref)[0]
            if found.root == root:
                read[one.name] = found
            else:
                others[one.name.key] = _of_another_root(one.tier, root, found.root)
    if others and not read:
        raise next(iter(others.values()))
    for key, other in others.items():
        events.warn(f"{other} ({key}); that bundle is left where it is")
    return [*read.values()]


def _of_another_root(tier: Tier, root: str, found: str) -> OptionError:
    return OptionError(
        f"Tiers.{tier.name}: expected replicas of {root}, found saves of {found}; use separate "
        "replicas for each checkpoint directory"
    )


def _leave_stale(
    stage: StagingDir,
    local: Root,
    state: State,
    known: Sequence[RunLineage],
    why_stale: Callable[[SaveId, RunLineage], str | None],
) -> None:
    """Moves staged saves aside that replicas show to be stale."""
    by_run = {lineage.run: lineage for lineage in known}
    for step, info in reversed(local.saves().items()):
        lineage = None if info is None else by_run.get(info.save_id.run)
        if info is None or lineage is None or state.was_committed(info.save_id):
            continue
        if (why := why_stale(info.save_id, lineage)) is not None:
            target = stage.aside(f"left-{uuid.uuid4().hex[:8]}") / str(step)
            local.set_aside(step, target)
            events.warn(f"{stage.path}: step {step} is superseded: {why}; it was moved to {target}")


def _set_aside(aside: Path, stale: BundleManifest, why: str, offers: Iterable[Offer]) -> None:
    """Unpacks a stale save where no reader looks, and deletes it from the tiers."""
    same = [one for one in offers if one.name == stale.name]
    target = aside / str(stale.save_id.step) / stale.name.key
    DurableDir(target.parent).create()
    if any(_unpacked(one, target, True) for one in same):
        events.warn(
            f"{same[0].tier.name}: step {stale.save_id.step} is superseded: {why}; it was moved to "
            f"{target}"
        )
        for one in same:
            one.tier.delete([one.ref])


def _unpacked(
    offer: Offer,
    final: Path,
    fsync: bool,
    item: str | None = None,
    problems: Problems | None = None,
) -> bool:
    """Unpacks a bundle; returns whether that worked and it contains the item's save."""
    # Ignored as a leftover after a kill.
    unpacked = f"{final.name}{naming.TEMPORARY}-recalled-{secrets.token_hex(8)}"
    temporary = final.with_name(unpacked)
    folder = DurableDir(final.parent, fsync=fsync)
    with _passing_over(offer, problems):
        try:
            with offer.tier.open(offer.ref) as reader:
                contents = bundles.unpack(reader, offer.ref, temporary, fsync=fsync)
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
        found = stored_saves.read_info(store_path(step_dir), item).save_id
        if found != save_id:
            raise Damaged(step_dir.name, f"the save {save_id}", f"{found}")


@contextlib.contextmanager
def _passing_over(offer: Offer, problems: Problems | None) -> Iterator[None]:
    """Warns about an unusable bundle, and continues without it."""
    try:
        yield
    except ClosedError:
        raise  # The tier, not the bundle.
    except Exception as error:
        # Anyone can write anything to a tier, and no bundle may make startup fail.
        events.warn(
            f"{offer.tier.name}: expected the bundle {offer.ref.key}, found that it is not "
            f"readable: {str(error) or type(error).__name__}; trying other replicas"
        )
        if problems is not None:
            if not isinstance(error, RestoreError):
                error = Damaged(offer.ref.key, "a readable bundle", str(error))
            problems.setdefault(offer.name.save_id, error)
