# SPDX-License-Identifier: Apache-2.0
"""Where a step will stand, from the temporary path that Orbax gives to a handler."""

from __future__ import annotations

import re
from pathlib import Path

from deltackpt.handlers.orbax_private import TMP_DIR_SUFFIX


def final_step_dir(item_dir: Path) -> Path:
    """The committed step directory of an item that is being saved.

    Args:
      item_dir: ``<root>/<step>.orbax-checkpoint-tmp/<item>``, or ``<root>/<step>/<item>`` where
        Orbax commits by a file.
    """
    step_dir = item_dir.parent
    name, _, _ = step_dir.name.partition(TMP_DIR_SUFFIX)
    return step_dir.with_name(name)


def step_number(step_dir: Path) -> int:
    """The step of a step directory's name, 0 for a checkpoint that is not one of a sequence."""
    found = re.search(r"(\d+)$", step_dir.name)
    return int(found[1]) if found else 0
