# SPDX-License-Identifier: Apache-2.0
"""Chains: what a restore reads, what retention must keep, and which saves do not fit together.

Pure functions over the contents of manifests: no I/O, no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from deltackpt.errors import BrokenChain, Damaged
from deltackpt.format.manifest import Manifest, ParentRef, SaveId, SaveInfo


def walk(target: SaveInfo, find: Callable[[ParentRef], SaveInfo | None]) -> Iterator[SaveInfo]:
    """Yields a save and the parents that a restore needs, newest first, as far as they are found.

    It does not check that ``find`` returns the named save: ``restore_chain`` does. No directory is
    visited twice, so the walk ends.
    """
    passed: set[str] = set()
    save: SaveInfo | None = target
    while save is not None:
        passed.add(save.step_dir)
        yield save
        parent, save = save.parent, None
        if parent is not None and parent.step_dir not in passed:
            save = find(parent)


def restore_chain(target: SaveInfo, by_dir: Mapping[str, SaveInfo]) -> tuple[SaveInfo, ...]:
    """Returns the saves that restoring ``target`` reads, base first.

    ``by_dir`` has the committed saves by step directory. Raises BrokenChain if a parent is missing,
    is another save than the one named, is not older, or is in the directory of another step.
    """
    chain, problem = _walk(target, by_dir)
    if problem is None:
        return tuple(reversed(chain))
    newest = _newest_intact(by_dir, target)
    known = "none of the examined steps is intact"
    if newest is not None:
        known = f"the newest intact step examined is {newest}"
    broken = chain[-1]
    where = "" if broken is target else f"step {broken.step_dir} of its chain: "
    raise BrokenChain(
        f"step {target.step_dir}: {where}{problem}; {known}; restore_latest() examines all steps"
    )


def broken_at(target: SaveInfo, by_dir: Mapping[str, SaveInfo]) -> SaveInfo | None:
    """Returns the save of a chain that ``restore_chain`` would report; None if it is whole."""
    found, problem = _walk(target, by_dir)
    return None if problem is None else found[-1]


def live_set(
    keep: Iterable[SaveId],
    saves: Iterable[SaveInfo],
    in_flight: Iterable[SaveId] = (),
    compacted: Collection[SaveId] = (),
) -> frozenset[SaveId]:
    """Returns the saves whose step directories must be kept: ``keep`` and what their chains need.

    ``in_flight`` are saves that are not committed yet, and parents that they may name. A save in
    ``compacted`` needs neither its own step directory nor those of its parents.
    """
    kept = frozenset(keep)
    return kept | (_closure(kept, saves, in_flight, compacted) - frozenset(compacted))


def needed_bases(
    saves: Iterable[SaveInfo], in_flight: Iterable[SaveId], compacted: Collection[SaveId]
) -> frozenset[SaveId]:
    """Returns the saves whose compacted bases must be kept, because other chains end there."""
    standing = tuple(saves)
    every = frozenset(save.save_id for save in standing)
    return _closure(every, standing, in_flight, compacted) & frozenset(compacted)


def check_index(head: Manifest) -> None:
    """Raises Damaged unless the manifest of process 0 names the shard of every process once."""
    found = [shard.process for shard in head.shards] or [0]
    # The number of processes is compared first, since it is unbounded.
    if head.process_count != len(found) or found != list(range(len(found))):
        raise Damaged(
            f"step {head.save_id.step}, manifest of process 0",
            f"one shard of each process 0 to {head.process_count - 1}",
            f"shards of {found}",
        )


def _closure(
    keep: Iterable[SaveId],
    saves: Iterable[SaveInfo],
    in_flight: Iterable[SaveId],
    compacted: Collection[SaveId],
) -> frozenset[SaveId]:
    """Saves in the chains of others; a chain ends at a compacted base."""
    by_id = {save.save_id: save for save in saves}
    live: set[SaveId] = set()
    pending = [*keep, *in_flight]
    while pending:
        save_id = pending.pop()
        if save_id in live:
            continue
        live.add(save_id)
        save = by_id.get(save_id)
        if save is not None and save.parent is not None and save_id not in compacted:
            pending.append(save.parent.save_id)
    return frozenset(live)


def _walk(target: SaveInfo, by_dir: Mapping[str, SaveInfo]) -> tuple[list[SaveInfo], str | None]:
    """Returns the intact part of a save's chain, newest first, and the error where it ends."""
    chain: list[SaveInfo] = []
    # Steps descend along a chain, so the walk ends.
    for save in walk(target, lambda parent: by_dir.get(parent.step_dir)):
        chain.append(save)
        problem = own_problem(save) or _parent_problem(save, by_dir)
        if problem is not None:
            return chain, problem
    return chain, None


def own_problem(save: SaveInfo) -> str | None:
    """Returns why no chain may contain a save; None if its parent decides."""
    if save.step_dir.isdecimal() and int(save.step_dir) != save.save_id.step:
        return (
            f"directory {save.step_dir}: expected a save of step {int(save.step_dir)}, found "
            f"save id {save.save_id}: it was renamed or copied by hand"
        )
    if save.kind == "base" and save.parent is not None:
        return f"save id {save.save_id}: expected a base without a parent, found {save.parent}"
    if save.kind == "delta" and save.parent is None:
        return f"save id {save.save_id}: expected a delta with a parent, found none"
    return None


def _parent_problem(save: SaveInfo, by_dir: Mapping[str, SaveInfo]) -> str | None:
    """The error of the link from a save to its parent, or None."""
    ref = save.parent
    if ref is None:
        return None
    parent = by_dir.get(ref.step_dir)
    if parent is None:
        return f"parent {ref.step_dir} (save id {ref.save_id}) is missing"
    if parent.save_id != ref.save_id:
        return (
            f"parent {ref.step_dir}: expected save id {ref.save_id}, found save id {parent.save_id}"
        )
    if parent.save_id.step >= save.save_id.step:
        return (
            f"parent {ref.step_dir}: expected a step below {save.save_id.step}, found save id "
            f"{parent.save_id}"
        )
    return None


def _newest_intact(by_dir: Mapping[str, SaveInfo], target: SaveInfo) -> int | None:
    """The newest step except ``target`` whose chain reaches a base."""
    candidates = sorted(by_dir.values(), key=lambda save: save.save_id.step, reverse=True)
    for save in candidates:
        if save.step_dir != target.step_dir and _walk(save, by_dir)[1] is None:
            return save.save_id.step
    return None
