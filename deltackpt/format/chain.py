# SPDX-License-Identifier: Apache-2.0
"""Chains: what a restore reads, what retention must keep, what does not fit together.

Pure functions over what manifests say: no I/O, no jax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from deltackpt.errors import BrokenChain, Damaged
from deltackpt.format.manifest import Kind, Manifest, ParentRef, RollingShare, SaveId
from deltackpt.format.outline import Outline


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """What chain logic needs to know of a committed save.

    Attributes:
      save_id: its identity.
      kind: base or delta.
      parent: a delta's parent.
      step_dir: name of its step directory.
      nbytes: bytes of its arrays.
      rolling: the share of all rows that a delta of a rolling base holds.
    """

    save_id: SaveId
    kind: Kind
    parent: ParentRef | None
    step_dir: str
    nbytes: int
    rolling: RollingShare | None = None

    @classmethod
    def of(cls, head: Manifest | Outline, step_dir: str) -> SaveInfo:
        """What the manifest of process 0 says; the step directory's name is not in it."""
        return cls(
            save_id=head.save_id,
            kind=head.kind,
            parent=head.parent,
            step_dir=step_dir,
            nbytes=head.nbytes,
            rolling=head.rolling,
        )

    def still(self, read: float = math.inf) -> float:
        """How many saves before this one a restore must read; infinity where down to a base.

        Args:
          read: how many that was said to be, itself included, by saves that lead to it.
        """
        if self.rolling is not None and self.rolling.full:
            read = min(read, self.rolling.window)
        return read - 1


def walk(target: SaveInfo, find: Callable[[ParentRef], SaveInfo | None]) -> Iterator[SaveInfo]:
    """A save and its parents, newest first, as far as they are found and a restore needs them.

    That is down to a base, or over the window of a rolling one. What is found is not judged: it may
    be another save than the one that was named, which ``restore_chain`` says. A directory that was
    passed is not entered again, so the walk ends whatever the records say.

    Args:
      target: where to begin.
      find: what stands where a save names its parent, None where nothing does. It is asked after
        the save that names it was taken up.
    """
    passed: set[str] = set()
    save: SaveInfo | None = target
    still = math.inf
    while save is not None:
        passed.add(save.step_dir)
        yield save
        parent, still = save.parent, save.still(still)
        save = None
        if parent is not None and still and parent.step_dir not in passed:
            save = find(parent)


def restore_chain(target: SaveInfo, by_dir: Mapping[str, SaveInfo]) -> tuple[SaveInfo, ...]:
    """The saves that restoring ``target`` reads, base first.

    Args:
      target: the save to restore.
      by_dir: committed saves by the name of their step directory.

    Raises:
      BrokenChain: a parent is missing, is another save than the one named, is not older, or a
        directory holds the save of another step; the message names the step, the save id that
        was expected, what was found, and the newest step whose chain is whole.
    """
    chain, problem = _walk(target, by_dir)
    if problem is None:
        return tuple(reversed(chain))
    newest = _newest_intact(by_dir, target)
    if newest is None:
        known = "no step that was looked at is intact; restore_latest() looks at all of them"
    else:
        known = f"newest intact step is {newest}: restore it, or call restore_latest()"
    broken = chain[-1]
    where = "" if broken is target else f"step {broken.step_dir} of its chain: "
    raise BrokenChain(f"step {target.step_dir}: {where}{problem}; {known}")


def live_set(
    keep: Iterable[SaveId],
    saves: Iterable[SaveInfo],
    in_flight: Iterable[SaveId] = (),
    compacted: Collection[SaveId] = (),
) -> frozenset[SaveId]:
    """Saves whose step directories must stay: those to keep, and what restoring needs of others.

    Args:
      keep: saves that a policy keeps.
      saves: all committed saves.
      in_flight: saves not committed yet, and parents that they name or may name.
      compacted: saves for which a compacted base stands: nothing needs their step directories,
        nor those of their parents.
    """
    kept = frozenset(keep)
    return kept | (_closure(kept, saves, in_flight, compacted) - frozenset(compacted))


def needed_bases(
    saves: Iterable[SaveInfo],
    in_flight: Iterable[SaveId],
    compacted: Collection[SaveId],
) -> frozenset[SaveId]:
    """Saves whose compacted bases must stay, since chains of others end there.

    Args:
      saves: all committed saves.
      in_flight: saves not committed yet, and parents that they name or may name.
      compacted: saves for which a compacted base stands.
    """
    standing = tuple(saves)
    every = frozenset(save.save_id for save in standing)
    return _closure(every, standing, in_flight, compacted) & frozenset(compacted)


def check_index(head: Manifest) -> None:
    """Checks that the manifest of process 0 names the part of every process once.

    Raises:
      Damaged: it does not.
    """
    found = [part.process for part in head.parts] or [0]
    # The number of processes is compared first: nobody bounds it.
    if head.process_count != len(found) or found != list(range(len(found))):
        raise Damaged(
            f"step {head.save_id.step}, manifest of process 0",
            f"one part of each process 0 to {head.process_count - 1}",
            f"parts of {found}",
        )


def _closure(
    keep: Iterable[SaveId],
    saves: Iterable[SaveInfo],
    in_flight: Iterable[SaveId],
    compacted: Collection[SaveId],
) -> frozenset[SaveId]:
    """Saves in the chains of others; a chain ends where a compacted base stands."""
    by_id = {save.save_id: save for save in saves}
    #: The most that any chain reads of each, itself included.
    live: dict[SaveId, float] = {}
    pending = [(save_id, math.inf) for save_id in (*keep, *in_flight)]
    while pending:
        save_id, read = pending.pop()
        save = by_id.get(save_id)
        still = read - 1 if save is None else save.still(read)
        if still <= live.get(save_id, -1):
            continue
        live[save_id] = still
        if save is not None and save.parent is not None and still and save_id not in compacted:
            pending.append((save.parent.save_id, still))
    return frozenset(live)


def _walk(target: SaveInfo, by_dir: Mapping[str, SaveInfo]) -> tuple[list[SaveInfo], str | None]:
    """The chain of a save, newest first, as far as it is whole, and what is wrong where it ends.

    Steps descend along a chain, so the walk ends.
    """
    chain: list[SaveInfo] = []
    still = math.inf
    for save in walk(target, lambda parent: by_dir.get(parent.step_dir)):
        chain.append(save)
        still = save.still(still)
        problem = _own_problem(save) or (_parent_problem(save, by_dir) if still else None)
        if problem is not None:
            return chain, problem
    return chain, None


def _own_problem(save: SaveInfo) -> str | None:
    """What is wrong with a save by itself."""
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
    """What is wrong with the link from a save to its parent, None where nothing is."""
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
    """The newest step but ``target`` whose chain reaches a base."""
    candidates = sorted(by_dir.values(), key=lambda save: save.save_id.step, reverse=True)
    for save in candidates:
        if save.step_dir != target.step_dir and _walk(save, by_dir)[1] is None:
            return save.save_id.step
    return None
