# SPDX-License-Identifier: Apache-2.0
"""What saves see of tracking: the clocks of TouchStates, and what accumulators hold."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Reading(NamedTuple):
    """What a save read of one TouchState: where it stands, whose it is, and its clock."""

    place: str
    identity: int
    clock: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clocks:
    """What a save saw of tracking.

    Attributes:
      readings: one of each TouchState; () without any.
      windows: of each gradient accumulator (``optax.MultiSteps``) how many updates it has made, and
        how many steps it has gathered for the next.
    """

    readings: tuple[Reading, ...] = ()
    windows: tuple[tuple[int, int], ...] = ()

    def seen(self, reading: Reading) -> Reading | None:
        """What was read here of a TouchState that is read later, None where it was not there.

        One that has moved within the state is found by its identity; of several that bear it, the
        one of the lowest clock is right for all.
        """
        same = [known for known in self.readings if known.identity == reading.identity]
        here = [known for known in same if known.place == reading.place]
        return min(here or same, key=lambda known: known.clock, default=None)

    def starts_in(self, other: Clocks) -> bool:
        """Whether all that is gathered here was begun when ``other`` was read, or later."""
        return len(self.windows) == len(other.windows) and all(
            updates > before or (updates == before and not gathered)
            for (updates, _), (before, gathered) in zip(self.windows, other.windows)
        )

    @property
    def gathers(self) -> bool:
        """Whether rows that were marked may still move, without being marked again."""
        return any(gathered for _, gathered in self.windows)


def clocks_seen(clocks: Clocks, earlier: Clocks) -> dict[str, int]:
    """Place of each TouchState to its clock as it was read earlier; empty where one was not."""
    found = {reading.place: earlier.seen(reading) for reading in clocks.readings}
    if None in found.values():
        return {}
    return {place: seen.clock for place, seen in found.items() if seen is not None}
