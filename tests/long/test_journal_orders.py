# SPDX-License-Identifier: Apache-2.0
"""Random interleavings of trainers, compactors and readers of one journal."""

from __future__ import annotations

import pytest

from deltackpt.testing import JournalModel

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("faults", [0.02, 0.06, 0.2])
def test_random_orders_lose_no_commit(campaign, figures, faults):
    drawn = campaign.random("journal", faults)
    committed = entries = damaged = 0
    for _ in range(count := campaign.count(7000)):
        seed = drawn.getrandbits(32)
        world = JournalModel(seed, faults=faults, starts=seed % 2 * 0.6)
        try:
            world.run()
        except BaseException as error:
            error.add_note(f"JournalModel({seed}, faults={faults}, starts={world.starts})")
            raise
        committed += len(world.observed.committed)
        entries += len(world.history())
        damaged += world.observed.damaged
    figures(
        "orders of a journal", orders=count, commits=committed, entries=entries, damaged=damaged
    )
