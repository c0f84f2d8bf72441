# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of deltas: bytes, errors along a chain, speed, and the loss after a restore.

T5 with AdamW (float32, pure bf16, bf16 with a float32 master), Adafactor, and adapters on a
frozen backbone; the thesis DLRM; state W. Models are trained once and cached in --states.

python benchmarks/dense.py --text wiki.txt --states states --json dense.json
python benchmarks/dense.py --text wiki.txt --states states --only speed sparse w  # what is timed
python benchmarks/dense.py --size tiny --first 2 --gap 1 --more 1 --scale 0.01 --repeats 1  # a test
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import dense_models
import dense_speed
import jax
import jax.numpy as jnp
import numpy as np
import report as reports
import ways
from dense_lab import (
    CHAIN,
    CODINGS,
    EIGHT_BITS,
    EXACT,
    FOUR_BITS,
    LINEAR,
    Lab,
    exact_weights,
)
from dense_models import Model, Trajectory
from report import Report, Sample, megabytes, percent, secs, times
from t5_jax import data as texts

import deltackpt

#: Number of data orders whose losses define the spread.
ORDERS = 5
_PARTS = ("bytes", "chain", "loss", "speed", "sparse", "w")


class Case(NamedTuple):
    """A model whose deltas are measured.

    Attributes:
      model: its name.
      coding: a key of ``CODINGS``.
      codec: the codec of the coding for this model.
      weights: whether the optimizer state is left out, as for inference processes.
      raw_bar, defaults_bar: bars of the bytes at ten steps, over raw ones and Orbax's defaults.
    """

    model: str
    coding: str
    codec: Mapping[str, str]
    weights: bool = False
    raw_bar: float | None = None
    defaults_bar: float | None = None

    @property
    def title(self) -> str:
        """The title of its line in the table."""
        return f"{self.model}{', weights' if self.weights else ''}, {self.coding}"


def cases() -> Iterator[Case]:
    """All cases, in the order of the table."""
    yield Case("adamw", EXACT, CODINGS[EXACT])
    yield Case("adamw", EIGHT_BITS, CODINGS[EIGHT_BITS], raw_bar=0.25)
    yield Case("adamw", FOUR_BITS, CODINGS[FOUR_BITS], raw_bar=0.12, defaults_bar=1 / 8)
    yield Case("adafactor", EXACT, CODINGS[EXACT])
    yield Case("adafactor", EIGHT_BITS, CODINGS[EIGHT_BITS])
    yield Case("adafactor", FOUR_BITS, CODINGS[FOUR_BITS], defaults_bar=1 / 8)
    yield Case("master", EXACT, {})
    yield Case("master", FOUR_BITS, exact_weights(FOUR_BITS))
    yield Case("master", EXACT, {}, weights=True)
    yield Case("tuning", EXACT, {}, weights=True)
    yield Case("bf16", EXACT, {})
    yield Case("bf16", FOUR_BITS, CODINGS[FOUR_BITS])
    yield Case("lora", EXACT, {}, raw_bar=0.12)
    yield Case("lora", FOUR_BITS, CODINGS[FOUR_BITS])
    yield Case("dlrm", EXACT, {})
    yield Case("dlrm", FOUR_BITS, CODINGS[FOUR_BITS])


# Bytes.


def add_bytes(report: Report, lab: Lab, chosen: list[Case]) -> None:
    """Adds lines of the total bytes of a delta."""
    orbax: dict[tuple[str, bool], dict[bool, int]] = {}
    for case in chosen:
        trajectory = lab.trajectory(case.model)
        later = _viewed(trajectory.at(lab.chain[1]), case)
        if (case.model, case.weights) not in orbax:
            orbax[case.model, case.weights] = {
                compressed: lab.orbax_bytes(later, compressed=compressed)
                for compressed in (True, False)
            }
        of_orbax = orbax[case.model, case.weights]
        raw = dense_models.nbytes(later)
        for gap in lab.gaps:
            mine = Sample((float(_delta_bytes(lab, trajectory, case, gap)),))
            title = f"{case.title}, {gap} {'step' if gap == 1 else 'steps'}: bytes of a delta"
            judged = gap == lab.gaps[1]
            for other, theirs, bar in (
                ("raw", raw, case.raw_bar),
                (ways.NAMES["orbax"], of_orbax[True], case.defaults_bar),
                (ways.NAMES["orbax-tuned"], of_orbax[False], None),
            ):
                bar = bar if judged else None
                report.compare(title, mine, other, Sample((float(theirs),)), megabytes, bar=bar)
        report.section()


def _viewed(state: Any, case: Case) -> Any:
    return state._replace(opt_state=()) if case.weights else state


def _delta_bytes(lab: Lab, trajectory: Trajectory, case: Case, gap: int) -> int:
    with lab.manager(trajectory.model, case.codec) as manager:
        first = lab.chain[0]
        for step in (first, first + gap):
            saved = manager.save(step, _viewed(trajectory.at(step), case))
            manager.wait_until_finished()
        assert saved.kind == "delta", saved.reason
    return ways.tree_bytes(lab.root / str(first + gap))


# Errors along a chain.


def add_chain(report: Report, lab: Lab, name: str, coding: str) -> None:
    """Adds lines of the bytes, and of the error of each kind of leaf after 1 and 10 saves."""
    trajectory = lab.trajectory(name)
    errors: dict[str, list[float]] = defaultdict(list)
    with lab.saved_chain(trajectory, coding) as manager:
        for step in lab.chain[1:]:
            state = trajectory.at(step)
            for kind, error in leaf_errors(manager.restore(step, state).state, state).items():
                errors[kind].append(error)
    taken = [ways.tree_bytes(lab.root / str(step)) for step in lab.chain]
    for kind, found in errors.items():
        title = f"{name}, {coding}, {kind}: relative l2 error"
        report.state(f"{title}, 1 save", Sample((found[0],)), percent)
        report.state(f"{title}, {CHAIN} saves", Sample((found[-1],)), percent)
        if found[0]:
            # Averages of three, because the changes in ten training steps vary, too.
            growth = float(np.mean(found[-3:]) / np.mean(found[:3]))
            report.state(f"{title}, last saves over first ones", Sample((growth,)), times, bar=1.5)
    whole = Sample((float(sum(taken)),))
    base = Sample((float(taken[0]),))
    title = f"{name}, {coding}: base and {CHAIN} deltas"
    bar = 2.5 if coding == FOUR_BITS else None
    report.compare(title, whole, "the base", base, megabytes, bar=bar)
    report.section()


def leaf_errors(found: Any, expected: Any) -> dict[str, float]:
    """Relative l2 error of the floats of each kind of leaf, without the TouchState."""
    squared: dict[str, float] = defaultdict(float)
    norms: dict[str, float] = defaultdict(float)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(found._replace(touched=())),
        jax.tree.leaves(expected._replace(touched=())),
        strict=True,
    )
    for (path, mine), theirs in pairs:
        if jnp.issubdtype(theirs.dtype, jnp.floating):
            kind = _kind_of(jax.tree_util.keystr(path))
            exact = np.asarray(theirs).astype(np.float32)
            change = (np.asarray(mine).astype(np.float32) - exact).reshape(-1)
            squared[kind] += float(np.dot(change, change))
            norms[kind] += float(np.dot(exact.reshape(-1), exact.reshape(-1)))
    return {kind: (squared[kind] / norms[kind]) ** 0.5 for kind in norms if norms[kind]}


def _kind_of(path: str) -> str:
    if ".mu" in path:
        return "first moments"
    if ".nu" in path:
        return "second moments"
    return "statistics" if "opt_state" in path and "params" not in path[:20] else "parameters"


# The loss after a restore.


def add_loss(report: Report, lab: Lab, name: str, more: int) -> None:
    """Adds lines of the loss after a restore from ten deltas and some more steps.

    The spread is the largest distance of a loss of the uninterrupted run, over orders of the data,
    from their mean. A coding is within it if its mean loss over the same orders is within that
    distance of the mean.
    """
    trajectory = lab.trajectory(name)
    model = trajectory.model
    last = lab.chain[-1]
    losses = {"uninterrupted": _trained_on(model, lambda: trajectory.at(last), last, more)}
    for coding in (EXACT, EIGHT_BITS, FOUR_BITS, LINEAR):
        with lab.saved_chain(trajectory, coding) as manager:

            def restored(manager: deltackpt.CheckpointManager = manager) -> Any:
                return manager.restore(last, trajectory.at(last)).state

            losses[coding] = _trained_on(model, restored, last, more)

    def dropped() -> Any:
        return trajectory.at(last)._replace(opt_state=model.init().opt_state)

    losses["moments dropped"] = _trained_on(model, dropped, last, more)
    exact = np.array(losses.pop("uninterrupted"))
    # With no more steps, the orders do not differ.
    spread = max(1e-12, float(np.abs(exact - exact.mean()).max()))
    title = f"{name}, restored and {more} steps more"
    report.state(f"{title}, uninterrupted: loss", Sample(tuple(exact)), "{:.4f}".format)
    for way, found in losses.items():
        distance = float(np.mean(found) - exact.mean())
        report.state(f"{title}, {way}: loss", Sample(tuple(found)), "{:.4f}".format)
        if way == LINEAR:
            # Inverted: the distance must exceed the spread.
            report.state(
                f"{title}, {way}: spread over distance",
                Sample((spread / max(1e-12, abs(distance)),)),
                times,
                bar=1.0,
            )
        else:
            bar = None if way == "moments dropped" else 1.0
            share = Sample((abs(distance) / spread,))
            report.state(f"{title}, {way}: distance over spread", share, times, bar=bar)
        report.note(
            f"{title}, {way}: mean loss {distance:+.4f} against uninterrupted ones, whose furthest "
            f"is {spread:.4f} from their mean; paired by order "
            f"{', '.join(f'{a - b:+.4f}' for a, b in zip(found, exact, strict=True))}."
        )
    report.section()


def _trained_on(model: Model, start: Callable[[], Any], step: int, more: int) -> list[float]:
    """The losses on held-out data, one for each order of the data."""
    found = []
    for order in range(1, ORDERS + 1):
        state = start()
        for number in range(step, step + more):
            state, _ = model.step(state, model.batch(order, number))
        found.append(model.tested(state))
    return found


def run(options: argparse.Namespace, place: Path) -> None:
    """Measures the chosen parts and prints the table."""
    started = time.perf_counter()
    text = texts.text_of(options.text)
    kept = options.states or place / "states"
    labs = {}
    for size in {options.size, options.loss_size}:
        models = dense_models.t5_models(text, size, options.batch)
        models["dlrm"] = dense_models.dlrm_model(options.scale)
        labs[size] = Lab(models, kept / size, options.first, options.gap, place / "checkpoints")
    lab = labs[options.size]
    report = Report(
        "Dense leaves of deltas",
        sizes=f"T5 {options.size} (loss: {options.loss_size}), batch {options.batch}, "
        f"{options.first} steps before the first save; {options.repeats} rounds, median (range)",
    )
    report.note(ways.TUNED)
    chosen = [
        case for case in cases() if case.model in options.models and case.coding in options.codings
    ]
    if "bytes" in options.only:
        add_bytes(report, lab, chosen)
    if "chain" in options.only:
        for coding in (EIGHT_BITS, FOUR_BITS):
            add_chain(report, lab, "adamw", coding)
    if "loss" in options.only:
        add_loss(report, labs[options.loss_size], "adamw", options.more)
    if "speed" in options.only:
        dense_speed.add_speed(report, lab, "adamw", options.repeats)
    if "sparse" in options.only:
        dense_speed.add_sparse(report, lab, options.scale, options.repeats)
    if "w" in options.only:
        dense_speed.add_w(report, lab, options.scale)
    report.note(f"{secs(time.perf_counter() - started)} in all.")
    report.show(options.json, options.markdown)


def main() -> int:
    """Runs the command line."""
    parser = reports.arguments(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=_PARTS, default=_PARTS, help="what to measure")
    add("--models", nargs="+", default=sorted({case.model for case in cases()}))
    add("--codings", nargs="+", choices=list(CODINGS), default=list(CODINGS))
    add("--text", type=Path, help="any text file; default: docs and sources of this clone")
    add("--states", type=Path, help="keep trained states here, or take them from here")
    add("--size", default="small", help="of T5")
    add("--loss-size", default="tiny", help="of the T5 that is trained on after restores")
    add("--batch", type=int, default=4, help="samples in a batch of T5")
    add("--first", type=int, default=200, help="steps before the first save")
    add("--gap", type=int, default=10, help="steps between the saves of a chain")
    add("--more", type=int, default=100, help="steps after a restore")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dense-", dir=options.directory) as place:
        run(options, Path(place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
