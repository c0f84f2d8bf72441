# SPDX-License-Identifier: Apache-2.0
"""Checks that the newest chain has everything that its dense leaves depend on."""

from __future__ import annotations

from collections.abc import Iterator

from deltackpt import units
from deltackpt.errors import Damaged, DeltackptError, FormatMismatch
from deltackpt.format.dense_blocks import PLAIN
from deltackpt.ledger.steps import Steps
from deltackpt.reading import chains, saves
from deltackpt.reading.stored_dense import DenseItem
from deltackpt.storage.store import store_path
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
        item = DenseItem(chains.read_chain(at, opened.item))
        shards = [shard for of_save in item.shards for shard in of_save]
        for shard in shards:
            for segment in shard.record.segments:
                if segment.group != PLAIN:
                    shard.field_of(segment)
        item.check()
    except (DeltackptError, OSError) as error:
        yield Finding(
            subject="dense leaves",
            severity="problem",
            found=f"step {newest}: {error}",
            meaning="Its dense leaves, and those of deltas that depend on it, cannot be restored.",
            action="deltackpt verify reports restorable steps; the next base starts a new chain",
        )
        return
    deltas, nbytes = len(item.shards), sum(shard.record.nbytes for shard in shards)
    where = f", and the rest from {item.base.save.name}" if item.base and item.missing else ""
    yield Finding(
        subject="dense leaves",
        found=f"step {newest} stores them in the shards of {units.count(deltas, 'delta')}, "
        f"{units.size(nbytes)} before compression{where}",
        figures={"deltas": deltas, "nbytes": nbytes, "from_base": bool(item.missing)},
    )
