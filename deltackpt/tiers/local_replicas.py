# SPDX-License-Identifier: Apache-2.0
"""Replicas of one process's staged saves, as bundles, in extents and on peers.

If a node loses its staging directory, it or its replacement recovers from them the saves that were
never uploaded. The nearest tier is used first.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deltackpt import events
from deltackpt.errors import (
    ClosedError,
    Damaged,
    FormatMismatch,
    OptionError,
    OutOfSpace,
    RestoreError,
    StorageError,
)
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import State
from deltackpt.reading import stored_saves
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import store_path
from deltackpt.tiers import bundles
from deltackpt.tiers.bundles import BundleManifest, BundleName, BundleRef, Tier
from deltackpt.tiers.extent_store import ExtentFile
from deltackpt.tiers.peers import PeerTier
from deltackpt.tiers.staging import Orders, PeerGroup, StagingDir

_logger = logging.getLogger(__name__)


class Offer(NamedTuple):
    """A bundle that a tier holds."""

    name: BundleName
    tier: Tier
    ref: BundleRef


class LocalReplicas:
    """The extents and peers of one process; unpacks bundles into its directory of saves."""

    def __init__(
        self,
        stage: StagingDir,
        local: Root,
        extents: ExtentFile | None = None,
        shard: int = 0,
        shards: int = 1,
        *,
        fsync: bool = False,
    ):
        self.extents = extents
        self.peers: PeerTier | None = None
        #: Errors of saves that a tier has but that could not be recovered, by step.
        self.unusable: Mapping[int, RestoreError] = {}
        #: The tier from which each save was recovered.
        self.sources: dict[SaveId, str] = {}
        self.stage, self.local, self._fsync = stage, local, fsync
        #: The index of this process's staging directory, and their number.
        self._shard, self._shards = shard, shards
        self._offers: list[Offer] = []
        #: Errors of unusable bundles, by save.
        self._problems: dict[SaveId, RestoreError] = {}
        #: Size of the newest delta in the extents, in bytes.
        self._delta_bytes = 0

    @property
    def _tiers(self) -> list[Tier]:
        found: list[Tier | None] = [self.extents, self.peers]
        return [one for one in found if one is not None]

    def connect(self, group: PeerGroup) -> None:
        """Uses a group of peers from now on."""
        if self.peers is not None:
            self.peers.close()
        self.peers = PeerTier(group)

    def close(self) -> None:
        """Closes all tiers; stored bundles remain."""
        for tier in self._tiers:
            tier.close()

    def offers(self) -> list[Offer]:
        """Returns this process's available bundles, for each save those of the nearest tier first.

        Warns about a tier that cannot be queried: saves that only it holds are not recovered.
        """
        found: list[Offer] = []
        for tier in self._tiers:
            try:
                named = bundles.newest_first(tier.refs())
            except StorageError as error:
                events.warn(
                    f"{tier.name}: expected an answer, found none ({error}); saves that only they "
                    "hold are left where they are"
                )
                continue
            found += [Offer(name, tier, ref) for name, ref in named if name.shard == self._shard]
        return found

    def fetch(self, save_ids: Collection[SaveId]) -> None:
        """Unpacks saves into the local directory, if a tier holds them."""
        if save_ids:
            self._offers = self.offers()
        for save_id in save_ids:
            self._fetch(save_id)

    def _fetch(self, save_id: SaveId) -> bool:
        final = self.local.step_dir(save_id.step)
        for one in self._offers:
            if one.name.save_id == save_id and self._unpacked(one, final, self.local.item):
                self.sources[save_id] = one.tier.name
                return True
        return False

    def _unpacked(self, offer: Offer, final: Path, item: str | None = None) -> bool:
        """Unpacks a bundle; returns whether that worked and it contains the item's save."""
        # Ignored as a leftover after a kill.
        unpacked = f"{final.name}{naming.TEMPORARY}-recovered-{secrets.token_hex(8)}"
        temporary = final.with_name(unpacked)
        # The tiers' copies of a superseded save are deleted afterwards.
        fsync = self._fsync or item is None
        folder = DurableDir(final.parent, fsync=fsync)
        with self._passing_over(offer):
            try:
                reader = offer.tier.open(offer.ref)
                if bundles.read_manifest(reader, offer.ref)[0].shards != self._shards:
                    return False  # The shard is from a job with another process count.
                contents = bundles.unpack(reader, offer.ref, temporary, fsync=fsync)
                if item is not None:
                    _check_save(temporary, item, contents.save_id)
                folder.publish(temporary, final)
            except BaseException:
                folder.remove(temporary)
                raise
            return True
        return False

    @contextlib.contextmanager
    def _passing_over(self, offer: Offer) -> Iterator[None]:
        """Warns about an unusable bundle, and continues without it."""
        try:
            yield
        except ClosedError:
            raise  # The tier, not the bundle.
        except Exception as error:
            # Anyone can write to a tier, and no bundle may make startup fail.
            events.warn(
                f"{offer.tier.name}: expected the bundle {offer.ref.key}, found that it is not "
                f"readable: {str(error) or type(error).__name__}; trying other replicas"
            )
            if not isinstance(error, RestoreError):
                error = Damaged(offer.ref.key, "a readable bundle", str(error))
            self._problems.setdefault(offer.name.save_id, error)

    # ---- recovery

    def manifests(self, root: str) -> list[BundleManifest]:
        """Returns the manifests of the bundles of ``root``, each from the nearest readable copy.

        Raises OptionError if all bundles, or all in the extents, are of other roots: full extents
        would delete them.
        """
        read: dict[BundleName, BundleManifest] = {}
        others: dict[tuple[str, str], OptionError] = {}
        own_tiers: set[str] = set()
        self._offers = self.offers()
        for one in self._offers:
            if one.name in read:
                continue
            with self._passing_over(one):
                found = bundles.read_manifest(one.tier.open(one.ref), one.ref)[0]
                if found.root == root:
                    read[one.name] = found
                    own_tiers.add(one.tier.name)
                else:
                    others[one.tier.name, one.name.key] = OptionError(
                        f"Tiers.{one.tier.name}: expected replicas of {root}, found saves of "
                        f"{found.root}; use separate replicas for each checkpoint directory"
                    )
        for (tier, _), other in others.items():
            if not read or (tier == ExtentFile.name and tier not in own_tiers):
                raise other
        for (_, key), other in others.items():
            events.warn(f"{other} ({key}); that bundle is left where it is")
        return [one for one in read.values() if one.shards == self._shards]

    def recover(
        self,
        found: Sequence[BundleManifest],
        state: State,
        why_stale: Callable[[BundleManifest], str | None],
    ) -> list[BundleManifest]:
        """Unpacks current saves that are not uploaded; returns the manifests of those.

        ``found`` are all ``manifests``. Stale saves are moved aside with a warning and deleted from
        the tiers.
        """
        infos = self.local.saves()
        here = {info.save_id for info in infos.values() if info is not None}
        stale: set[SaveId] = set()

        def is_missing(save_id: SaveId) -> bool:
            known = here | stale | self.sources.keys()
            return save_id not in known and not state.was_committed(save_id)

        back: list[BundleManifest] = []
        aside = self.stage.aside(f"held-{uuid.uuid4().hex[:8]}")
        for one in sorted(found, key=lambda one: one.save_id.step):
            save_id, step = one.save_id, one.save_id.step
            if save_id in here or state.was_committed(save_id):
                continue
            if (why := why_stale(one)) is not None:
                stale.add(save_id)
                self._set_aside(aside, one, why)
                continue
            if infos.get(step) is not None or save_id in self.sources:
                continue
            if step in infos:  # The save cannot be identified.
                self.local.set_aside(step, self.stage.aside_damaged())
            if self._fetch(save_id):
                back.append(one)
        if back:
            shown = ", ".join(f"{one.step} ({tier})" for one, tier in self.sources.items())
            _logger.info("%s: recovered steps %s", self.stage.path, shown)
        self.unusable = {one.step: why for one, why in self._problems.items() if is_missing(one)}
        self._warn_of_lost(is_missing)
        return back

    def _set_aside(self, aside: Path, stale: BundleManifest, why: str) -> None:
        """Unpacks a stale save where no reader looks, and deletes it from the tiers."""
        same = [one for one in self._offers if one.name == stale.name]
        target = aside / str(stale.save_id.step) / stale.name.key
        DurableDir(target.parent).create()
        if any(self._unpacked(one, target) for one in same):
            events.warn(
                f"{same[0].tier.name}: step {stale.save_id.step} is superseded: {why}; it was "
                f"moved to {target}"
            )
            for one in same:
                one.tier.delete([one.ref])

    def _warn_of_lost(self, is_missing: Callable[[SaveId], bool]) -> None:
        """Warns about peers that do not answer, and saves with too few fragments left."""
        if self.peers is None:
            return
        if silent := self.peers.silent():
            events.warn(
                f"peers: expected an answer from all nodes, found none from {silent}; saves that "
                "only they hold are left there, and training continues without them"
            )
        found = self.peers.survey()
        for name, ref in bundles.newest_first(found.every - found.whole):
            if name.shard == self._shard and is_missing(name.save_id):
                try:
                    self.peers.open(ref)
                except StorageError as error:
                    events.warn(f"step {name.step} cannot be recovered: {error}")

    # ---- extents

    def put(
        self, orders: Orders, may_go: Callable[[SaveId], bool], keep_waiting: Callable[[], bool]
    ) -> None:
        """Writes the local saves, oldest first, to the extents unless they are there.

        If the extents are full, the oldest saves that ``may_go`` are deleted. Raises StorageError
        if there is still no room when ``keep_waiting`` returns False.
        """
        if (extents := self.extents) is None:
            return
        held = {bundles.save_of(ref) for ref in extents.refs()}
        infos = [info for info in self.local.saves().values() if info is not None]
        infos.sort(key=lambda one: one.save_id.step)
        for info in infos:
            if info.save_id in held or (info is not infos[-1] and may_go(info.save_id)):
                continue
            bundle = bundles.staged_bundle(self.stage, info.save_id, orders)
            if info.parent is None:
                extents.require_room(bundle.ref.nbytes, self._delta_bytes)
            else:
                self._delta_bytes = bundle.ref.nbytes
            while True:
                try:
                    extents.put(bundle)
                    break
                except OutOfSpace as error:
                    if not _delete_oldest(extents, may_go) and not keep_waiting():
                        raise StorageError(
                            f"{self.stage.path}: expected room in Tiers.extents for a save, found "
                            f"only saves that were not uploaded to {bundle.root} yet when the "
                            "manager was closed; the uploader continues, save again later"
                        ) from error

    def forget(self, save_ids: Collection[SaveId]) -> None:
        """Deletes rolled-back saves from the extents durably; peers delete what is not staged."""
        if self.extents is not None and save_ids:
            refs = self.extents.refs()
            self.extents.delete([one for one in refs if bundles.save_of(one) in save_ids])


def _delete_oldest(extents: ExtentFile, may_go: Callable[[SaveId], bool]) -> bool:
    """Deletes the oldest save that ``may_go``; returns whether there is one."""
    oldest_first = reversed(bundles.newest_first(extents.refs()))
    gone = next((ref for name, ref in oldest_first if may_go(name.save_id)), None)
    if gone is not None:
        extents.delete([gone])
    return gone is not None


def _check_save(step_dir: Path, item: str, save_id: SaveId) -> None:
    """Checks that a step is the save that its bundle names; a restore reports newer formats."""
    with contextlib.suppress(FormatMismatch):
        found = stored_saves.read_info(store_path(step_dir), item).save_id
        if found != save_id:
            raise Damaged(step_dir.name, f"the save {save_id}", f"{found}")
