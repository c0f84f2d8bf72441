# SPDX-License-Identifier: Apache-2.0
"""Checks that the newest chain has everything that its dense leaves depend on."""

from __future__ import annotations

from collections.abc import Iterator

from deltackpt import units
from deltackpt.errors import Damaged, DeltackptError, FormatMismatch
from deltackpt.format.dense_blocks import PLAIN
from deltackpt.ledger.steps import Steps
from deltackpt.reading import chains, saves
from deltackpt.storage.store import store_path
from deltackpt.upkeep.dense_chain import DenseChain
from deltackpt.upkeep.doctor.findings import Finding


def dense_findings(opened: Steps) -> Iterator[Finding]:
    """Checks the manifest of the newest step, and the dense leaves in its shards.

    Reads records and block indices, but no data: ``deltackpt verify`` reads everything.

    Args:
      opened: the steps.
    """
    newest = opened.newest_step()
    if newest is None:
        return
    try:
        at = store_path(opened.at(newest))
        if saves.read_save(at, opened.item).head.dense_blocks is None:
            return
    except (Damaged, FormatMismatch) as error:
        yield Finding(
            area="directory",
            subject="newest step",
            severity="problem",
            found=f"step {newest}: {error}",
            meaning="It cannot be restored.",
            action="deltackpt verify reports restorable steps",
        )
        return
    except (DeltackptError, OSError):
        return  # Another manager's step, or it was removed.
    try:
        found = DenseChain.of(chains.read_chain(at, opened.item))
        for source in (source for one in found.sources for source in one):
            for segment in source.record.segments:
                if segment.group != PLAIN:
                    source.field_of(segment)
        found.check()
    except (DeltackptError, OSError) as error:
        yield Finding(
            area="directory",
            subject="dense leaves",
            severity="problem",
            found=f"step {newest}: {error}",
            meaning="Its dense leaves, and those of deltas that depend on it, cannot be restored.",
            action="deltackpt verify reports restorable steps; the next base starts a new chain",
        )
        return
    deltas, base = len(found.sources), found.base
    held = sum(source.record.nbytes for one in found.sources for source in one)
    where = "" if base is None or not found.missing else f", and the rest from {base.name}"
    yield Finding(
        area="directory",
        subject="dense leaves",
        severity="ok",
        found=f"step {newest} stores them in the shards of {units.count(deltas, 'delta')}, "
        f"{units.size(held)} before compression{where}",
        figures={"deltas": deltas, "nbytes": held, "from_base": bool(found.missing)},
    )
