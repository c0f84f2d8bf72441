# SPDX-License-Identifier: Apache-2.0
"""What one committed step is, and the lines of a page that tell it."""

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
from deltackpt.storage.store import Spot
from deltackpt.units import size


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Save:
    """What a committed step is; where it cannot be read, ``problem`` says why.

    Attributes:
      step: the training step.
      path: its directory.
      kind: base or delta; None where it cannot be read.
      parent: step of a delta's parent.
      chain_length: deltas that a restore of it merges; None where the chain is not whole.
      reason: why it is a base, or a delta.
      compacted: whether a compacted base stands for it.
      tables: each field of each table of which rows were written; empty where all were.
      table_rows: name of each table to its rows.
      nbytes: bytes of its arrays, before any compression.
      dense_nbytes: likewise of the dense leaves that it holds as blocks; None where it has Orbax's
        item of them, or none.
      problem: what is wrong with it or its chain; empty where nothing was found. The data is not
        read: ``deltackpt verify`` does.
    """

    step: int
    spot: Spot
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
        """Its directory.

        Raises:
          TypeError: it is in a bucket; ``spot`` says where.
        """
        return Path(self.spot)

    @property
    def rows(self) -> int:
        """Rows of tables that it holds; slots are not counted again."""
        return sum(figures.rows for figures in self.tables if figures.field == blocks.VALUES)

    @property
    def total_rows(self) -> int:
        """Rows of all tables."""
        return sum(self.table_rows.values())

    @functools.cached_property
    def disk_bytes(self) -> int:
        """Bytes of all files of the step; 0 where it is gone."""
        return self.spot.tree_bytes()

    @functools.cached_property
    def committed_at(self) -> float | None:
        """When Orbax committed it, in seconds since 1970; None where it does not say so."""
        try:
            found = json.loads((self.spot / names.STEP_METADATA).read())
            return found["commit_timestamp_nsecs"] / 1e9
        except (RestoreError, OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


SAVE_COLUMNS = (
    "step",
    "kind",
    "parent",
    "deltas",
    "rows",
    "of all",
    "on disk",
    "codecs",
    "committed (UTC)",
    "why",
)


def save_line(save: Save) -> tuple[Any, ...]:
    """A step as a line under ``SAVE_COLUMNS``."""
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


FIGURE_COLUMNS = ("table", "field", "codec", "rows", "on disk", "of unencoded", "error", "why")


def figure_lines(save: Save) -> list[tuple[Any, ...]]:
    """What a save holds of each field of each table, as lines under ``FIGURE_COLUMNS``."""
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
