# SPDX-License-Identifier: Apache-2.0
"""Why steps are kept: the preservation policy, or a kept chain that needs them."""

from __future__ import annotations

from typing import Literal

from deltackpt.format import chain
from deltackpt.ledger import kept
from deltackpt.ledger.steps import Steps

#: ``"nothing"``: the next retention removes the step.
StaysFor = Literal["policy", "chain", "nothing"]


def stays_for(root: Steps) -> dict[int, StaysFor]:
    """Returns the reason why each step is kept; reads every manifest if a policy is recorded.

    Args:
      root: the directory.

    Returns:
      Reasons by step, ascending. Steps whose reason is unknown are omitted: all of them if no
      policy is recorded, those newer than the record, and those that an unreadable chain might
      need.
    """
    note = kept.noted(root.store_path)
    if note is None:
        return {}
    infos = dict(sorted(root.saves().items()))
    judged = [step for step in infos if step <= note.newest]
    wanted = set(note.steps)
    found: dict[int, StaysFor] = {step: "policy" for step in judged if step in wanted}
    known = {step: info for step, info in infos.items() if info is not None}
    if len(known) < len(infos):
        return found
    # Newer steps are not judged yet, and the next save continues from the newest.
    stand = [known[step].save_id for step in known if step in wanted or step > note.newest]
    stand += [known[step].save_id for step in [*known][-1:]]
    live = chain.live_set(stand, known.values(), (), root.compacted())
    for step in judged:
        if step not in wanted:
            found[step] = "chain" if known[step].save_id in live else "nothing"
    return dict(sorted(found.items()))
