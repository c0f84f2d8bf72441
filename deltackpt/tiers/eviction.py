# SPDX-License-Identifier: Apache-2.0
"""Which saves may leave a staging directory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deltackpt.format import chain
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import ParentRef


def evictable(
    infos: Mapping[int, SaveInfo], keep: int, is_at_root: Callable[[SaveInfo], bool]
) -> list[int]:
    """Returns steps that were uploaded and are in none of the newest chains.

    Args:
      infos: the staged saves.
      keep: number of chains to keep.
      is_at_root: whether a save is committed remotely.
    """
    kept: set[int] = set()
    anchors: set[int] = set()
    for step in sorted(infos, reverse=True):
        steps = chain_steps(step, infos)
        if min(steps) not in anchors:
            if len(anchors) == keep:
                break
            anchors.add(min(steps))
        kept |= steps
    return [step for step, info in infos.items() if step not in kept and is_at_root(info)]


def chain_steps(step: int, infos: Mapping[int, SaveInfo]) -> set[int]:
    """Returns the steps of a chain, as far as they are known."""
    by_id = {info.save_id: number for number, info in infos.items()}
    found = {step}

    def find(parent: ParentRef) -> SaveInfo | None:
        number = by_id.get(parent.save_id)
        if number is None:
            return None
        found.add(number)
        return infos[number]

    if step in infos:
        for _ in chain.walk(infos[step], find):
            pass
    return found
