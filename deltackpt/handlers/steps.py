# SPDX-License-Identifier: Apache-2.0
"""A save as a handler starts it, from the temporary path that Orbax passes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from deltackpt.coordination import Coordinator
from deltackpt.format import names
from deltackpt.save import snapshot
from deltackpt.save.flight import Embeddings, PendingSave
from deltackpt.save.lineage import Lineage
from deltackpt.state import contexts


@contexts.neutral()
def started(embeddings: Embeddings, item_dir: Path) -> tuple[PendingSave, Coordinator]:
    """Captures the rows: the blocking half of a save without deltackpt's manager.

    Args:
      embeddings: the tables and slots to save.
      item_dir: the item's directory, as Orbax names it; it need not exist yet.

    Returns:
      The save, and the processes that write it.
    """
    root, secs = str(item_dir.parent.parent), embeddings.options.processes_secs
    coordinator = Coordinator(root, secs)
    if embeddings.lineage is None:
        run = coordinator.join("starting a save")
        embeddings = dataclasses.replace(embeddings, lineage=Lineage.unprotected(run))
    step_dir = final_step_dir(item_dir)
    pending = snapshot.take(embeddings, step_number(step_dir), step_dir)
    pending.wait_copied()
    return pending, coordinator


def final_step_dir(item_dir: Path) -> Path:
    """Returns the committed step directory of an item that is being saved.

    Args:
      item_dir: ``<root>/<step>.orbax-checkpoint-tmp/<item>``, or ``<root>/<step>/<item>`` if Orbax
        commits by a file.
    """
    step_dir = item_dir.parent
    name, _, _ = step_dir.name.partition(names.TEMPORARY)
    return step_dir.with_name(name)


def step_number(step_dir: Path) -> int:
    """Returns the step of a step directory's name, 0 for a checkpoint outside a sequence.

    Raises:
      OptionError: the step is greater than any that a record can represent.
    """
    found = re.search(r"(\d+)$", step_dir.name)
    return names.as_step(int(found[1])) if found else 0
