# SPDX-License-Identifier: Apache-2.0
"""Description of a committed step, and its lines in tables."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltackpt.errors import RestoreError
from deltackpt.events import TableFigures
from deltackpt.format import blocks, names
from deltackpt.format.manifest import Kind
from deltackpt.inspect import html
from deltackpt.storage.store import StorePath
from deltackpt.units import size


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Save:
    """Description of a committed step.

    Attributes:
      step: the training step.
      path: its directory.
      kind: base or delta; None if it cannot be read.
      parent: step of a delta's parent.
      chain_length: number of deltas that a restore of the step merges; None if the chain is broken.
      reason: why the save is a base or a delta.
      compacted: whether it has a compacted base.
      tables: figures of each field of each table with rows in the save.
      table_rows: number of rows of each table, by name.
      nbytes: bytes of its arrays, before any compression.
      dense_nbytes: bytes of its dense leaves stored as blocks, before any compression; None without
        dense leaves, or if they are in Orbax's item.
      problem: why the save or its chain cannot be read; empty if no problem was found. Use
        ``deltackpt verify`` to check the data.
    """

    step: int
    store_path: StorePath
    kind: Kind | None = None
    parent: int | None = None
    chain_length: int | None = None
    reason: str = ""
    compacted: bool = False
    tables: tuple[TableFigures, ...] = ()
    table_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    nbytes: int = 0
    dense_nbytes: int | None = None
    problem: str = ""

    @property
    def path(self) -> Path:
        """Directory of the step.

        Raises:
          TypeError: the step is in a bucket; ``store_path`` has its URL.
        """
        return Path(self.store_path)

    @property
    def rows(self) -> int:
        """Number of table rows in the save; slots are not counted."""
        return sum(figures.rows for figures in self.tables if figures.field == blocks.VALUES)

    @property
    def total_rows(self) -> int:
        """Number of rows of all tables."""
        return sum(self.table_rows.values())

    @functools.cached_property
    def disk_bytes(self) -> int:
        """Bytes of all files of the step; 0 if it was removed."""
        return self.store_path.tree_bytes()

    @functools.cached_property
    def committed_at(self) -> float | None:
        """Time of Orbax's commit, in seconds since 1970; None if it is not recorded."""
        try:
            found = json.loads((self.store_path / names.STEP_METADATA).read())
            return found["commit_timestamp_nsecs"] / 1e9
        except (RestoreError, OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


SAVE_COLUMNS = (
    "step",
    "kind",
    "parent",
    "deltas",
    "rows",
    "share",
    "on disk",
    "codecs",
    "committed (UTC)",
    "reason",
)


def save_line(save: Save) -> tuple[Any, ...]:
    """Returns a step as a line for ``SAVE_COLUMNS``."""
    kind = f"{save.kind} (compacted)" if save.compacted else save.kind
    codecs = {figures.codec for figures in save.tables}
    if save.dense_nbytes is not None:
        codecs.add("dense blocks")
    return (
        save.step,
        kind or "unreadable",
        save.parent,
        save.chain_length,
        save.rows,
        f"{save.rows / save.total_rows:.2%}" if save.total_rows else None,
        size(save.disk_bytes),
        "+".join(sorted(codecs)) or None,
        html.utc(save.committed_at),
        save.problem or save.reason.removeprefix(f"{save.kind}: "),
    )


FIGURE_COLUMNS = ("table", "field", "codec", "rows", "on disk", "of raw", "error", "reason")


def figure_lines(save: Save) -> list[tuple[Any, ...]]:
    """Returns each field of each table in a save as lines for ``FIGURE_COLUMNS``."""
    return [
        (
            figures.table,
            figures.field,
            figures.codec,
            figures.rows,
            size(figures.nbytes),
            f"{figures.ratio:.1%}",
            f"{figures.relative_error:.2g}" if figures.relative_error else None,
            figures.reason,
        )
        for figures in save.tables
    ]
