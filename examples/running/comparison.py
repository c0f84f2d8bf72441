# SPDX-License-Identifier: Apache-2.0
"""Compares saves of one training state by deltackpt and by stock Orbax."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from rich import box
from rich.console import Console
from rich.table import Table

import deltackpt
from deltackpt.events import SaveEvent
from deltackpt.format import naming
from deltackpt.format.manifest import Kind
from running.journal import size

DELTACKPT = "deltackpt delta"
#: The method whose dense weights are stored as in a delta.
ORBAX_DEFAULTS = "Orbax full save, defaults"
ORBAX_UNCOMPRESSED = "Orbax full save, use_compression=False"
Manager = deltackpt.CheckpointManager | ocp.CheckpointManager


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One save.

    Attributes:
      nbytes: bytes of the step directory.
      blocked_secs: how long ``save()`` blocked the training thread.
      committed_secs: time from ``save()`` until the step was committed.
      kind: base or delta; None for Orbax.
      dense_nbytes: bytes of the dense leaves, also in the layer of a delta; None for Orbax.
    """

    nbytes: int
    blocked_secs: float
    committed_secs: float
    kind: Kind | None = None
    dense_nbytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The saves of one method.

    Attributes:
      name: name of the method.
      samples: one save per round.
    """

    name: str
    samples: tuple[Sample, ...]

    @property
    def nbytes(self) -> float:
        """Median size of a step in bytes."""
        return median(sample.nbytes for sample in self.samples)

    @property
    def committed_secs(self) -> float:
        """Median time from ``save()`` until the step was committed."""
        return median(sample.committed_secs for sample in self.samples)


def against_orbax(
    train: Callable[[Any], Any],
    tables: Callable[[], deltackpt.Tables],
    state: Any,
    *,
    directory: Path,
    rounds: int,
    console: Console,
) -> list[Figures]:
    """Trains on, and after each ``train`` call saves the state with each method in turn.

    Args:
      train: returns the state some steps later; may donate its argument.
      tables: returns the selection of tables.
      state: initial state: a named tuple with the TouchState in its field ``touched``.
      directory: an existing directory to save under.
      rounds: number of saves by each method.
      console: prints one line per round.

    Returns:
      Deltas with durability ``power`` and ``process``, and full Orbax saves with its defaults and
      without compression.
    """
    found: dict[str, list[Sample]] = {}
    with tempfile.TemporaryDirectory(dir=directory) as place:
        roots = {name: Path(place, str(i)) for i, name in enumerate(_WAYS)}
        ways = {name: make(roots[name], tables) for name, make in _WAYS.items()}
        for number in range(rounds + 1):
            what = f"round {number} of {rounds}" if number else "first save of each manager"
            console.print(f"  saving side by side: {what}")
            state = jax.block_until_ready(train(state))
            for name, manager in ways.items():
                sample = _timed(manager, roots[name], number, state)
                # The first round contains the base and every method's first call.
                if number:
                    found.setdefault(name, []).append(sample)
        for manager in ways.values():
            manager.close()
    return [Figures(name=name, samples=tuple(samples)) for name, samples in found.items()]


def _deltas(
    root: Path,
    tables: Callable[[], deltackpt.Tables],
    durability: Literal["power", "process"],
) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": tables()},
        options=deltackpt.ManagerOptions(
            writes=deltackpt.WriteOptions(durability=durability), max_to_keep=1
        ),
    )


def _orbax(
    root: Path, tables: Callable[[], deltackpt.Tables], compressed: bool
) -> ocp.CheckpointManager:
    del tables
    return ocp.CheckpointManager(
        root,
        item_handlers=ocp.PyTreeCheckpointHandler(use_compression=compressed),
        options=ocp.CheckpointManagerOptions(max_to_keep=1),
    )


_WAYS: dict[str, Callable[[Path, Callable[[], deltackpt.Tables]], Manager]] = {
    DELTACKPT: functools.partial(_deltas, durability="power"),
    'deltackpt delta, durability="process"': functools.partial(_deltas, durability="process"),
    ORBAX_DEFAULTS: functools.partial(_orbax, compressed=True),
    ORBAX_UNCOMPRESSED: functools.partial(_orbax, compressed=False),
}


def _timed(manager: Manager, root: Path, step: int, state: Any) -> Sample:
    reports: list[SaveEvent] = []
    started = time.perf_counter()
    if isinstance(manager, deltackpt.CheckpointManager):
        manager.save(step, state)
        blocked_secs = time.perf_counter() - started
        reports = manager.wait_until_finished()
    else:
        manager.save(step, args=ocp.args.PyTreeSave(state._replace(touched=())))
        blocked_secs = time.perf_counter() - started
        manager.wait_until_finished()
    committed_secs = time.perf_counter() - started
    step_dir = root / str(step)
    in_item = bytes_below(step_dir / naming.DENSE_ITEM)
    return Sample(
        nbytes=bytes_below(step_dir),
        blocked_secs=blocked_secs,
        committed_secs=committed_secs,
        kind=reports[0].kind if reports else None,
        dense_nbytes=in_item + reports[0].dense_bytes if reports else None,
    )


def bytes_below(directory: Path) -> int:
    """Returns the total size of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def show_figures(figures: list[Figures], console: Console) -> None:
    """Prints a table of the cost of each method, relative to the first."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("save", min_width=21)  # the longest word of a name
    for name in ("bytes", "x deltackpt", "blocked", "committed", "x deltackpt"):
        table.add_column(name, justify="right", no_wrap=True)
    ours = figures[0]
    for row in figures:
        table.add_row(
            row.name,
            size(row.nbytes),
            f"x {row.nbytes / ours.nbytes:.2f}",
            _spread([sample.blocked_secs for sample in row.samples]),
            _spread([sample.committed_secs for sample in row.samples]),
            f"x {row.committed_secs / ours.committed_secs:.1f}",
        )
    console.print(table)
    console.print(
        f"Medians (min-max) of {len(ours.samples)} interleaved saves each: how long save() "
        "blocked, and when the step was committed. The first row survives a power cut; Orbax "
        "fsyncs its arrays, but not its metadata."
    )


def _spread(secs: list[float]) -> str:
    """Formats ``12 ms`` and, below it, ``(11-15)``: median, minimum and maximum."""
    middle, least, greatest = (1e3 * of(secs) for of in (median, min, max))
    digits = 1 if middle < 10 else 0
    return f"{middle:.{digits}f} ms\n({least:.{digits}f}-{greatest:.{digits}f})"
