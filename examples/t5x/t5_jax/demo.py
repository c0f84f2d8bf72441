# SPDX-License-Identifier: Apache-2.0
"""Kills a T5 trainer in the middle of a save, resumes it, and shows that nothing was lost.

python examples/t5x/demo.py # docs and sources of this clone python examples/t5x/demo.py --text
wiki.txt --size small
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import jax
import numpy as np
from rich.console import Console
from running import comparison, demonstration
from running.digest import digest
from running.progress import Progress

from t5_jax import data, trainer
from t5_jax import main as training

#: The script that runs ``training``; it finds the packages relative to itself.
_SCRIPT = Path(__file__).resolve().parents[1] / "main.py"
#: Overhead of files, manifests and digests over the bytes of the arrays.
_OVERHEAD = 0.02
#: Number of compared saves per method.
_ROUNDS = 5


def main(arguments: list[str] | None = None) -> int:
    """Runs the demonstration; returns the exit status."""
    options = parsed(arguments)
    console = Console(highlight=False)
    # Orbax warns that a directory opened read-only is read-only.
    logging.getLogger("absl").setLevel(logging.ERROR)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="t5-demo-", dir=options.directory) as place:
        root = Path(place)
        text = root / "text.txt"
        text.write_text(data.text_of(options.text), encoding="utf-8")
        if options.text is None:
            console.print("no --text given: training on this repository's docs and sources")
        killed, whole = (trainer_of(root, name, text, options) for name in ("killed", "whole"))

        console.rule("[bold]1. Train; SIGKILL in the middle of a save")
        kills = demonstration.kill_in_a_save(killed, console)
        demonstration.show_directory(killed.directory, console)

        console.rule("[bold]2. Resume")
        killed.run("--resume")

        console.rule("[bold]3. Compare with an uninterrupted run")
        whole.run(progress=Progress(console, "training", whole.journal, options.steps))
        source, train_options = training.batches(training.parsed(list(whole.arguments)))
        template = trainer.abstract_state(train_options)
        tables = trainer.checkpoint_tables()
        state = demonstration.restored(whole.directory, options.steps, tables, template)
        equal = demonstration.show_comparison(killed, whole, kills, digest(state), console)

        console.rule("[bold]4. Compare with stock Orbax on the same state")
        continued = Continued(train_options, source, options.save_every)
        figures = comparison.against_orbax(
            continued,
            trainer.checkpoint_tables,
            state,
            directory=root,
            rounds=_ROUNDS,
            console=console,
        )
        comparison.show_figures(figures, console)
        saves = {row.name: row.samples for row in figures}
        # The first round is not among the samples.
        touched = continued.touched[1:]
        embedding = trainer.embedding(template.params)
        share = share_of_orbax(
            saves[comparison.DELTACKPT], saves[comparison.ORBAX_DEFAULTS], touched, embedding
        )
        show_share(share, options, console)
    console.print(f"done in {time.perf_counter() - started:.0f} s")
    return 0 if equal and share.holds else 1


def trainer_of(
    root: Path, name: str, text: Path, options: argparse.Namespace
) -> demonstration.Trainer:
    """``main.py`` with the arguments of the demonstration; starts nothing yet."""
    return demonstration.Trainer(
        script=_SCRIPT,
        directory=root / name,
        journal=root / f"{name}.jsonl",
        arguments=[
            *(f"--text={text}", f"--vocabulary={options.vocabulary}", f"--size={options.size}"),
            *(f"--batch={options.batch}", f"--steps={options.steps}"),
            *(f"--save-every={options.save_every}", f"--print-every={options.save_every}"),
        ],
    )


class Continued:
    """Trains from one save to the next, and records how many rows were touched.

    Attributes:
      touched: number of embedding rows touched between each pair of saves.
    """

    def __init__(self, options: trainer.TrainOptions, source: data.SpanCorruption, steps: int):
        """Compiles nothing yet; ``steps`` is the number of steps between two saves."""
        self._step = trainer.train_step(options)
        self._source = source
        self._steps = steps
        self.touched: list[int] = []

    def __call__(self, state: trainer.TrainState) -> trainer.TrainState:
        """Returns the state some steps later; donates its argument."""
        assert state.touched is not None
        clock = int(state.touched.clock)
        for _ in range(self._steps):
            state, _ = self._step(state, self._source.batch(int(state.step)))
        assert state.touched is not None
        [stamps] = state.touched.stamps.values()
        self.touched.append(int(np.count_nonzero(np.asarray(stamps) > clock)))
        return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """Median bytes of saves, as fractions of stock Orbax's saves of the same states.

    Attributes:
      written: what deltackpt wrote.
      least: the minimum to write: the dense weights as Orbax wrote them into the same steps, and
        the touched rows (for a base, all rows) as they are in memory.
    """

    written: float
    least: float

    @property
    def holds(self) -> bool:
        """Whether deltackpt wrote little more than the minimum."""
        return self.written <= self.least + _OVERHEAD


def share_of_orbax(
    ours: Sequence[comparison.Sample],
    theirs: Sequence[comparison.Sample],
    touched: Sequence[int],
    embedding: jax.Array | jax.ShapeDtypeStruct,
) -> Share:
    """Compares uncompressed deltackpt saves with Orbax saves, pair by pair.

    Args:
      ours: saves by deltackpt, at least one.
      theirs: saves by Orbax of the same states.
      touched: number of embedding rows touched before each save since the previous one.
      embedding: the table.
    """
    rows, width = embedding.shape
    written, least = [], []
    for our, their, count in zip(ours, theirs, touched, strict=True):
        assert our.dense_nbytes is not None
        needed = (count if our.kind == "delta" else rows) * width * embedding.dtype.itemsize
        written.append(our.nbytes / their.nbytes)
        least.append((our.dense_nbytes + needed) / their.nbytes)
    return Share(written=median(written), least=median(least))


def show_share(share: Share, options: argparse.Namespace, console: Console) -> None:
    """Prints whether saves are near the minimum, and writes it to ``options.json``."""
    verdict = "[green]reached" if share.holds else "[red]missed"
    console.print(
        f"deltackpt writes {share.written:.1%} of the bytes of an {comparison.ORBAX_DEFAULTS}. "
        f"Both write the dense weights and the head in full, so about {share.least:.1%} is the "
        f"minimum: {verdict}"
    )
    if options.json is not None:
        entry = {
            "name": f"T5 {options.size}: bytes of a save against {comparison.ORBAX_DEFAULTS}",
            **{"ratio": share.written, "bar": share.least + _OVERHEAD, "holds": share.holds},
        }
        options.json.write_text(json.dumps([entry], indent=1) + "\n")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    training.add_model_options(parser)
    add = parser.add_argument
    add("--steps", type=int, default=30, help="number of steps of the compared runs")
    add("--save-every", type=int, default=5, help="steps between saves")
    add("--directory", type=Path, help="where to create the temporary directory")
    add("--json", type=Path, help="write the ratio and its bar to this file")
    return parser.parse_args(arguments)
