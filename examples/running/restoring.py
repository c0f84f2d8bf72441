# SPDX-License-Identifier: Apache-2.0
"""Restores a run with a progress bar."""

from __future__ import annotations

from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

import deltackpt
from running.journal import size

State = TypeVar("State")


def resumed(
    manager: deltackpt.CheckpointManager, template: State, console: Console
) -> State | None:
    """Restores the newest intact step; returns None if no step was committed.

    Args:
      manager: manager of the run's directory.
      template: an abstract state.
      console: prints what was restored and which steps were skipped.
    """
    bar = Progress(
        TextColumn("restoring"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("restore")
        result = manager.restore_latest(
            template, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if result is None:
        console.print("nothing to resume from: starting at step 0")
        return None
    for skipped, error in result.skipped:
        console.print(f"[yellow]step {skipped} was skipped:[/] {error}")
    console.print(
        f"resumed at step {result.step} from a chain of {len(result.chain)} saves "
        f"({size(result.bytes_read)} in {result.seconds:.2f} s)"
    )
    return result.state
