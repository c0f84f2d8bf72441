# SPDX-License-Identifier: Apache-2.0
"""The state of tracking at a save: clocks of TouchStates, and windows of accumulators."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Reading(NamedTuple):
    """One TouchState at a save: its path, identity and clock."""

    place: str
    identity: int
    clock: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clocks:
    """The state of tracking at a save.

    Attributes:
      readings: one reading per TouchState; () without a TouchState.
      windows: for each gradient accumulator (``optax.MultiSteps``), the number of updates that it
        has made, and the number of steps gathered for the next one.
    """

    readings: tuple[Reading, ...] = ()
    windows: tuple[tuple[int, int], ...] = ()

    def seen(self, reading: Reading) -> Reading | None:
        """Returns this record's reading of a TouchState that was read later, or None.

        A TouchState that has moved within the state is found by its identity. If several have the
        same identity, the one with the lowest clock is safe for all.
        """
        same = [known for known in self.readings if known.identity == reading.identity]
        here = [known for known in same if known.place == reading.place]
        return min(here or same, key=lambda known: known.clock, default=None)

    def starts_in(self, other: Clocks) -> bool:
        """Returns whether all windows here started when ``other`` was read, or later."""
        return len(self.windows) == len(other.windows) and all(
            updates > before or (updates == before and not gathered)
            for (updates, _), (before, gathered) in zip(self.windows, other.windows)
        )

    @property
    def gathers(self) -> bool:
        """Returns whether rows already marked may still move without being marked again."""
        return any(gathered for _, gathered in self.windows)


def clocks_seen(clocks: Clocks, earlier: Clocks) -> dict[str, int]:
    """Returns TouchState path to its earlier clock; empty if one was not read."""
    found = {reading.place: earlier.seen(reading) for reading in clocks.readings}
    if None in found.values():
        return {}
    return {place: seen.clock for place, seen in found.items() if seen is not None}
