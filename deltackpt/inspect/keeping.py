# SPDX-License-Identifier: Apache-2.0
"""Why steps stay: for the trainer's policy, or only for chains of steps that it keeps."""

from __future__ import annotations

from typing import Literal

from deltackpt.format import chain
from deltackpt.ledger import kept
from deltackpt.ledger.steps import Steps

#: ``"nothing"``: the next retention removes the step.
StaysFor = Literal["policy", "chain", "nothing"]


def stays_for(root: Steps) -> dict[int, StaysFor]:
    """What steps stay for; the manifests of all are read, where a policy is noted.

    Args:
      root: the directory.

    Returns:
      Ascending; without the steps of which nothing is known: all where no policy is noted, those
      that are newer than its note, and those that chains might need which cannot be read.
    """
    note = kept.noted(root.spot)
    if note is None:
        return {}
    infos = dict(sorted(root.saves().items()))
    judged = [step for step in infos if step <= note.newest]
    wanted = set(note.steps)
    found: dict[int, StaysFor] = {step: "policy" for step in judged if step in wanted}
    known = {step: info for step, info in infos.items() if info is not None}
    if len(known) < len(infos):
        return found
    # Of what is newer nothing is known yet, and the next save goes on from the newest.
    stand = [known[step].save_id for step in known if step in wanted or step > note.newest]
    stand += [known[step].save_id for step in [*known][-1:]]
    live = chain.live_set(stand, known.values(), (), root.compacted())
    for step in judged:
        if step not in wanted:
            found[step] = "chain" if known[step].save_id in live else "nothing"
    return dict(sorted(found.items()))
