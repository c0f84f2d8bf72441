# SPDX-License-Identifier: Apache-2.0
"""Chains: what a restore reads, what retention must keep, what does not fit together.

Pure functions over what manifests say: no I/O, no jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from deltackpt.errors import BrokenChain, Damaged
from deltackpt.manifest import Kind, Manifest, ParentRef, SaveId


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """What chain logic needs to know of a committed save.

    Attributes:
      save_id: its identity.
      kind: base or delta.
      parent: a delta's parent.
      step_dir: name of its step directory.
      nbytes: bytes of its arrays.
    """

    save_id: SaveId
    kind: Kind
    parent: ParentRef | None
    step_dir: str
    nbytes: int


def restore_chain(target: SaveInfo, by_dir: Mapping[str, SaveInfo]) -> tuple[SaveInfo, ...]:
    """The saves that restoring ``target`` reads, base first.

    Args:
      target: the save to restore.
      by_dir: committed saves by the name of their step directory.

    Raises:
      BrokenChain: a parent is missing, is another save than the one named, or does not end in a
        base; the message names the newest step that is intact.
    """
    chain = [target]
    while True:
        current = chain[-1]
        if current.kind == "base" and current.parent is None:
            return tuple(reversed(chain))
        problem = _parent_problem(current, by_dir, len(chain))
        if problem is not None:
            raise BrokenChain(
                f"step {target.save_id.step}: {problem}; newest intact step is "
                f"{_newest_intact(by_dir, target)}; restore_latest() takes it"
            )
        assert current.parent is not None
        chain.append(by_dir[current.parent.step_dir])


def live_set(
    keep: Iterable[SaveId], saves: Iterable[SaveInfo], in_flight: Iterable[SaveId] = ()
) -> frozenset[SaveId]:
    """Saves that must stay: those to keep, those in flight, and every parent of them.

    Args:
      keep: saves that a policy keeps.
      saves: all committed saves.
      in_flight: saves not committed yet, and parents that they name.
    """
    by_id = {save.save_id: save for save in saves}
    live: set[SaveId] = set()
    pending = [*keep, *in_flight]
    while pending:
        save_id = pending.pop()
        if save_id in live:
            continue
        live.add(save_id)
        save = by_id.get(save_id)
        if save is not None and save.parent is not None:
            pending.append(save.parent.save_id)
    return frozenset(live)


def check_parts(manifests: Sequence[Manifest]) -> None:
    """Checks that manifests are the parts of one save, every process once.

    Args:
      manifests: the manifests of one step's item, by ascending process.

    Raises:
      Damaged: a part is missing, double, or of another save.
    """
    first = manifests[0]
    step = f"step {first.save_id.step}"
    found = [part.process for part in manifests]
    if found != list(range(first.process_count)):
        raise Damaged(step, f"parts of processes 0 to {first.process_count - 1}", f"{found}")
    for part in manifests[1:]:
        for field in ("save_id", "kind", "parent", "process_count", "groups", "tables"):
            want, have = getattr(first, field), getattr(part, field)
            if want != have:
                raise Damaged(
                    f"{step}, part of process {part.process}", f"{field} {want}", f"{have}"
                )


def _parent_problem(save: SaveInfo, by_dir: Mapping[str, SaveInfo], length: int) -> str | None:
    """What is wrong with the link from a save to its parent, None where nothing is."""
    ref = save.parent
    if save.kind == "base":
        return f"the base {save.save_id} names a parent, {ref}"
    if ref is None:
        return f"the delta {save.save_id} names no parent"
    parent = by_dir.get(ref.step_dir)
    if parent is None:
        return f"parent {ref.save_id.step} (save id {ref.save_id}) is missing"
    if parent.save_id != ref.save_id:
        return (
            f"parent {ref.save_id.step}: expected save id {ref.save_id}, found "
            f"{parent.save_id} in {ref.step_dir}"
        )
    if parent.save_id.step >= save.save_id.step or length > len(by_dir):
        return f"parent {ref.save_id.step} is not older than step {save.save_id.step}"
    return None


def _newest_intact(by_dir: Mapping[str, SaveInfo], target: SaveInfo) -> str:
    def intact(save: SaveInfo, length: int = 1) -> bool:
        if save.kind == "base" and save.parent is None:
            return True
        if _parent_problem(save, by_dir, length) is not None or save.parent is None:
            return False
        return intact(by_dir[save.parent.step_dir], length + 1)

    steps = [save.save_id.step for save in by_dir.values() if save is not target and intact(save)]
    return str(max(steps)) if steps else "none of those read"
