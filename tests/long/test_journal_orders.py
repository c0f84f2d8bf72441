# SPDX-License-Identifier: Apache-2.0
"""Random orders of trainers, compactors and readers of one journal; see ``journal_model``."""

from __future__ import annotations

import pytest
from journal_model import World

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("faults", [0.02, 0.06, 0.2])
def test_random_orders_lose_no_commit(campaign, figures, faults):
    drawn = campaign.random("journal", faults)
    committed = entries = 0
    for _ in range(count := campaign.count(7000)):
        seed = drawn.getrandbits(32)
        world = World(seed, faults=faults)
        try:
            world.run()
        except BaseException as error:
            error.add_note(f"World({seed}, faults={faults})")
            raise
        committed += len(world.told.committed)
        entries += len(world.history())
    figures("orders of a journal", orders=count, commits=committed, entries=entries)
