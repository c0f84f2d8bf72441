# SPDX-License-Identifier: Apache-2.0
"""Kills a trainer of T5 in the middle of a save, resumes it, and proves that nothing was lost.

python examples/t5x/demo.py                                # docs and sources of this clone
python examples/t5x/demo.py --text wiki.txt --size small
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

from t5_jax import data, trainer
from t5_jax import main as training

#: The script that runs ``training``; it finds the packages by its own place.
_SCRIPT = Path(__file__).resolve().parents[1] / "main.py"
#: What files, manifests and digests may add to the bytes of the arrays.
_OVERHEAD = 0.02
#: Saves of each way that are compared.
_ROUNDS = 5


def main(arguments: list[str] | None = None) -> int:
    """The whole demonstration; returns the exit status."""
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
            console.print("no --text was given: the text is that of this clone's docs and sources")
        killed, whole = (trainer_of(root, name, text, options) for name in ("killed", "whole"))

        console.rule("[bold]1. Train, and be killed in the middle of a save")
        kills = demonstration.kill_in_a_save(killed, console)
        demonstration.show_directory(killed.directory, console)

        console.rule("[bold]2. Resume")
        killed.run("--resume")

        console.rule("[bold]3. Compare with a run that nobody interrupted")
        with console.status("training without interruption"):
            whole.run(quiet=True)
        source, train_options = training.batches(training.parsed(list(whole.arguments)))
        template = trainer.abstract_state(train_options)
        tables = trainer.checkpoint_tables()
        state = demonstration.restored(whole.directory, options.steps, tables, template)
        equal = demonstration.show_comparison(killed, whole, kills, digest(state), console)

        console.rule("[bold]4. Against stock Orbax, the same state")
        continued = Continued(train_options, source, options.save_every)
        with console.status("saving side by side"):
            figures = comparison.against_orbax(
                continued, trainer.checkpoint_tables, state, directory=root, rounds=_ROUNDS
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
    """``main.py`` with the arguments of the demonstration; nothing is started yet."""
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
    """Trains on from one save to the next, and notes how many rows that touched.

    Attributes:
      touched: rows of the embedding that were touched between two saves, one number each.
    """

    def __init__(self, options: trainer.TrainOptions, source: data.SpanCorruption, steps: int):
        """Compiles nothing yet; ``steps`` lie between two saves."""
        self._step = trainer.train_step(options)
        self._source = source
        self._steps = steps
        self.touched: list[int] = []

    def __call__(self, state: trainer.TrainState) -> trainer.TrainState:
        """The state some steps later; donates the one that it is given."""
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
    """Bytes of saves as shares of those of stock Orbax's saves of the same states; medians.

    Attributes:
      written: what deltackpt wrote.
      least: what it had to write: the dense weights as Orbax wrote them into the same steps, and
        the rows that were touched, of a base all rows, as they are in memory.
    """

    written: float
    least: float

    @property
    def holds(self) -> bool:
        """Whether deltackpt wrote little more than it had to."""
        return self.written <= self.least + _OVERHEAD


def share_of_orbax(
    ours: Sequence[comparison.Sample],
    theirs: Sequence[comparison.Sample],
    touched: Sequence[int],
    embedding: jax.Array | jax.ShapeDtypeStruct,
) -> Share:
    """Compares saves by deltackpt without a codec with those of Orbax, pair by pair.

    Args:
      ours: saves by deltackpt, at least one.
      theirs: saves by Orbax of the same states.
      touched: rows of the embedding that were touched before each since the one before it.
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
    """Prints whether saves are as small as they can be, and writes it to ``options.json``."""
    verdict = "[green]reached" if share.holds else "[red]missed"
    console.print(
        f"deltackpt writes {share.written:.1%} of the bytes of an {comparison.ORBAX_DEFAULTS}. "
        f"Both write the dense weights and the head whole, so {share.least:.1%} is about the "
        f"least: {verdict}"
    )
    if options.json is not None:
        entry = {
            "name": f"T5 {options.size}: bytes of a save against {comparison.ORBAX_DEFAULTS}",
            **{"ratio": share.written, "bar": share.least + _OVERHEAD, "holds": share.holds},
        }
        options.json.write_text(json.dumps([entry], indent=1) + "\n")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    training.add_model_options(parser)
    add = parser.add_argument
    add("--steps", type=int, default=30, help="of the compared runs")
    add("--save-every", type=int, default=5, help="steps between saves")
    add("--directory", type=Path, help="where to make a temporary directory")
    add("--json", type=Path, help="write the ratio and its bar to this file")
    return parser.parse_args(arguments)
