# SPDX-License-Identifier: Apache-2.0
"""Accuracy cost of quantized checkpoints: log loss and AUC after L restores, against none.

Trains a DLRM. At L evenly spaced steps, a manager saves the state as a delta with the codec and
restores it, and training continues from the restored state. Each run is compared with the
uninterrupted run of the same seed and batches, on samples that neither has seen. Control runs show
what the comparison can detect. Raw deltas must make no difference. A perturbation of the initial
tables by 1e-7 gives the noise floor. A deliberately biased codec must fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import report as reports
import ways
from dlrm_jax import data, model, trainer
from report import Report, Sample, count, percent
from rich.progress import track as progress
from running.digest import digest
from scipy import stats

from deltackpt import codecs
from deltackpt.codecs import row_codecs

CODECS = ("adaptive2", "adaptive3", "adaptive4", "int8")
RESTORES = (1, 3, 10, 30)
#: Relative change of the log loss that Check-N-Run allows: 0.01 %.
BAR = 1e-4
BIASED = "biased2"
REFERENCE, PERTURBED = "uninterrupted", "perturbed"
_BATCH = 512
_TEST_BATCHES = 128
#: A codec, which may be ``uninterrupted`` or ``perturbed``, and the number of restores.
Kind = tuple[str, int]
#: Batches of synthetic traffic between those of two seeds.
_SEED_STRIDE = 10**6
_EXPONENT = 1.07
#: Divisor of the learning rates, and the part of a run from which it applies.
_CALMER, _CALM_FROM = 20, 0.75


class Biased(codecs.Uniform):
    """Two-bit codes, decoded a third of a step too high: a codec that must be detected."""

    def decode(self, arrays: Any, out: np.ndarray) -> None:
        super().decode(arrays, out)
        out += np.asarray(arrays["scale"]).view(np.float16).astype(np.float32)[:, None] / 3


class Traffic(NamedTuple):
    """Batches to train and to test on."""

    name: str
    rows: dict[str, int]
    train: Callable[[int, int], data.Batch]  # (seed, step)
    test: list[data.Batch]


class Outcome(NamedTuple):
    """Results of a run; ``relative_error`` is the mean over its saves."""

    log_loss: float
    auc: float
    relative_error: float
    digest: str


def synthetic() -> Traffic:
    """Zipf traffic over eight tables; each seed has its own samples."""
    rows = {f"C{i + 1}": 20_000 for i in range(8)}
    source = data.ZipfTraffic(rows, _BATCH, exponent=_EXPONENT, seed=0)
    # Batches that no run reaches.
    test = [source.batch(_SEED_STRIDE - 1 - number) for number in range(_TEST_BATCHES)]
    return Traffic(
        "synthetic", rows, lambda seed, step: source.batch(seed * _SEED_STRIDE + step), test
    )


def criteo(path: Path) -> Traffic:
    """A file in Criteo's format: its last samples are for tests; each seed has its own order."""
    rows = data.table_rows("kaggle", 0.002)
    source = data.CriteoFile(path, rows, _BATCH)
    whole = source.lines // _BATCH
    held_out = max(1, min(_TEST_BATCHES, whole // 5))
    batches = [source.batch(number) for number in range(whole)]
    known = batches[: whole - held_out] or batches

    def train(seed: int, step: int) -> data.Batch:
        epoch, place = divmod(step, len(known))
        return known[np.random.default_rng([seed, epoch]).permutation(len(known))[place]]

    return Traffic("Criteo format", rows, train, batches[whole - held_out :])


def write_criteo(path: Path, steps: int) -> None:
    """Writes synthetic clicks in the format of Criteo's Kaggle file, 10 % of the fields unknown."""
    rows = data.table_rows("kaggle", 0.002)
    source = data.ZipfTraffic(rows, _BATCH, exponent=_EXPONENT, seed=7)
    random = np.random.default_rng(7)
    with path.open("w") as file:
        for number in range(steps + _TEST_BATCHES):
            batch = source.batch(number)
            counts = np.floor(np.exp(batch.numeric) * 3).astype(int)
            known = random.random((_BATCH, data.CATEGORIES + counts.shape[1])) < 0.9
            for i in range(_BATCH):
                fields = [str(int(batch.labels[i]))]
                fields += [str(n) if known[i, j] else "" for j, n in enumerate(counts[i])]
                fields += [
                    f"{ids[i]:08x}" if known[i, counts.shape[1] + j] else ""
                    for j, ids in enumerate(batch.ids.values())
                ]
                file.write("\t".join(fields) + "\n")


class Study:
    """Runs over one kind of traffic, which share compiled functions."""

    def __init__(self, traffic: Traffic, steps: int):
        self.traffic, self._steps = traffic, steps
        self._sizes = trainer.ModelOptions(
            rows=traffic.rows, width=32, bottom=(64,), top=(128, 64), table_rate=0.05
        )
        # Learning rates fall at the end, as in practice; this also reduces the noise of a run's
        # last steps in the comparison.
        calm = dataclasses.replace(
            self._sizes,
            table_rate=self._sizes.table_rate / _CALMER,
            dense_rate=self._sizes.dense_rate / _CALMER,
        )
        step, calm_step = trainer.train_step(self._sizes), trainer.train_step(calm)
        calm_from = round(steps * _CALM_FROM)
        self._step_at = lambda number: step if number < calm_from else calm_step

        @jax.jit
        def logits(state: trainer.TrainState, batch: data.Batch) -> jax.Array:
            rows = [state.tables[name][ids] for name, ids in batch.ids.items()]
            return model.logits(state.dense, jnp.asarray(batch.numeric), rows)

        self._logits = logits

    def runs(self, seed: int, kinds: Iterable[Kind]) -> dict[Kind, Outcome]:
        """Trains, saves, restores and tests; all runs have the same batches."""
        batches = [self.traffic.train(seed, step) for step in range(self._steps)]
        return {kind: self._run(seed, kind, batches) for kind in kinds}

    def _run(self, seed: int, kind: Kind, batches: list[data.Batch]) -> Outcome:
        state, (codec, restores) = trainer.init_state(self._sizes, seed), kind
        if codec == PERTURBED:
            state = state._replace(tables={k: v * (1 + 1e-7) for k, v in state.tables.items()})
        if codec in (REFERENCE, PERTURBED):
            state, errors = self._trained(state, batches, 0, len(batches)), [0.0]
        else:
            with tempfile.TemporaryDirectory(prefix="accuracy-") as root:
                state, errors = self._interrupted(Path(root), codec, restores, state, batches)
        return Outcome(*self._tested(state), float(np.mean(errors)), digest(state))

    def _trained(
        self, state: trainer.TrainState, batches: list[data.Batch], start: int, stop: int
    ) -> trainer.TrainState:
        for number in range(start, stop):
            state, _, _ = self._step_at(number)(state, batches[number])
        return state

    def _interrupted(
        self,
        root: Path,
        codec: str,
        restores: int,
        state: trainer.TrainState,
        batches: list[data.Batch],
    ) -> tuple[trainer.TrainState, list[float]]:
        errors, done = [], 0
        way = ways.Deltas(root, "process", tables=trainer.checkpoint_tables(codec))
        way.saved(0, state)
        for number in range(1, restores + 1):
            stop = len(batches) * number // (restores + 1)
            state = self._trained(state, batches, done, stop)
            # Step numbers must grow even if there are more restores than steps.
            saved = way.manager.save(1 + stop + number, state)
            report = way.manager.wait_until_finished()[-1]
            assert saved.kind == "delta", saved.reason
            values = [f for f in report.tables if f.field == "values"]
            assert all(f.codec == codec for f in values), values
            errors.append(max((f.relative_error for f in values), default=0.0))
            state, done = way.restore(state), stop
        way.close()
        return self._trained(state, batches, done, len(batches)), errors

    def _tested(self, state: trainer.TrainState) -> tuple[float, float]:
        test = self.traffic.test
        labels = np.concatenate([batch.labels for batch in test])
        scores = np.concatenate([np.asarray(self._logits(state, batch)) for batch in test])
        scores = scores.astype(np.float64)
        losses = np.logaddexp(0, scores) - scores * labels
        return float(losses.mean()), model.area_under_curve(scores, labels)


class Change(NamedTuple):
    """Paired relative changes against the uninterrupted runs, one value per seed."""

    log_loss: np.ndarray
    auc: np.ndarray
    relative_error: float
    same_bits: bool


def changes(by_seed: list[dict[Kind, Outcome]]) -> dict[Kind, Change]:
    """Compares the runs of each seed with its uninterrupted one."""
    found = {}
    for kind in by_seed[0]:
        pairs = [(runs[kind], runs[REFERENCE, 0]) for runs in by_seed]
        found[kind] = Change(
            np.array([mine.log_loss / reference.log_loss - 1 for mine, reference in pairs]),
            np.array([mine.auc / reference.auc - 1 for mine, reference in pairs]),
            float(np.mean([mine.relative_error for mine, _ in pairs])),
            all(mine.digest == reference.digest for mine, reference in pairs),
        )
    return found


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean, by Student's t."""
    if len(values) < 2:
        return float("-inf"), float("inf")
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean() - half), float(values.mean() + half)


def claimed(values: np.ndarray) -> float:
    """The smallest upper bound that can be claimed for a change.

    The upper end of the interval, but at least half its width: a measurement less precise than a
    target cannot show that the target is met.
    """
    low, high = interval(values)
    return max(high, (high - low) / 2)


def add_lines(report: Report, found: dict[Kind, Change], traffic: str) -> None:
    for (codec, restores), change in found.items():
        title = f"{traffic}, {codec}, {restores} restores"
        if codec == "raw":
            differ = Sample((0.0 if change.same_bits else 1.0,))
            report.state(f"{title}: other bits", differ, count, bar=0.0)
        elif codec == BIASED:
            # Inverted: the lower end must be above the target.
            low = Sample((-interval(change.log_loss)[0],))
            report.state(f"{title}: detected, - lower end", low, percent, bar=-BAR)
        elif codec != REFERENCE:
            least = Sample((claimed(change.log_loss),))
            bar = None if codec == PERTURBED else BAR
            report.state(f"{title}: log loss, at most", least, percent, bar=bar)
            error = Sample((change.relative_error,))
            report.state(f"{title}: error of the rows", error, percent)


def publish(report: Report, found: dict[Kind, Change], traffic: str) -> None:
    """Adds the published table of one kind of traffic: the mean, its interval and the verdict."""

    def cell(codec: str, restores: int) -> str:
        values = found[codec, restores].log_loss
        low, high = interval(values)
        word = ", within" if claimed(values) <= BAR else ", worse" if low > BAR else ""
        return f"{100 * values.mean():+.4f} [{100 * low:+.4f}, {100 * high:+.4f}]{word}"

    controls = (REFERENCE, PERTURBED, BIASED, "raw")
    rows = sorted({codec for codec, _ in found if codec not in controls}, reverse=True)
    columns = sorted({restores for codec, restores in found if codec in rows})
    [(_, middle)] = [key for key in found if key[0] == BIASED]
    report.publish(
        traffic.lower().replace(" ", "-"),
        ("codec", *(f"{n} restore{'s' if n > 1 else ''}" for n in columns)),
        [[f"`{codec}`", *(cell(codec, restores) for restores in columns)] for codec in rows],
        f"*{BIASED}*, {middle} restores: {cell(BIASED, middle)}. "
        f"*{PERTURBED}*: {cell(PERTURBED, 0)}.",
    )


def plot(found: dict[Kind, Change], traffic: str, directory: Path) -> None:
    """Changes of log loss and AUC over the restores, with their intervals, as an SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "deltackpt"
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = dict.fromkeys(codec for codec, _ in found)
    codecs_ = [name for name in names if name not in (REFERENCE, PERTURBED, "raw")]
    for panel, what, bar in zip(panels, ("log_loss", "auc"), (BAR, -BAR), strict=True):
        low, high = interval(getattr(found[PERTURBED, 0], what))
        panel.axhspan(100 * low, 100 * high, color="0.85", label="noise floor (1e-7)")
        panel.axhline(0, color="0.5", linewidth=0.8)
        panel.axhline(100 * bar, color="0.3", linestyle=":", linewidth=0.8, label="0.01 %")
        for shift, codec in enumerate(codecs_):
            places = sorted(restores for name, restores in found if name == codec)
            values = [getattr(found[codec, restores], what) for restores in places]
            means = [100 * value.mean() for value in values]
            halves = [50 * (high - low) for low, high in map(interval, values)]
            where = np.array(places) * 1.06 ** (shift - len(codecs_) / 2)
            marker = "x" if codec == BIASED else "o"
            panel.errorbar(where, means, halves, marker=marker, capsize=3, label=codec)
        panel.set_xscale("log")
        panel.set_yscale("symlog", linthresh=0.1)
        panel.set_xticks(sorted({r for _, r in found if r}), labels=None)
        panel.xaxis.set_major_formatter(ticker.ScalarFormatter())
        panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        panel.minorticks_off()
        panel.set_xlabel("restores in the run")
    panels[0].set_ylabel("change of the log loss in % (higher is worse)")
    panels[1].set_ylabel("change of the AUC in % (lower is worse)")
    panels[0].legend(fontsize="small")
    figure.suptitle(f"{traffic}: mean and 95 % interval, paired by seed")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"accuracy-{traffic.lower().replace(' ', '-')}.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def accuracy(report: Report, options: argparse.Namespace, place: Path) -> None:
    report.sizes = (
        f"{options.steps} steps of batch {_BATCH}, {options.seeds} seeds, tested on up to "
        f"{_TEST_BATCHES * _BATCH:,} samples"
    )
    row_codecs._CODECS[BIASED] = Biased(BIASED, 2)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    warnings.filterwarnings("ignore", message=".*donated buffers.*")
    middle = sorted(options.restores)[len(options.restores) // 2]
    kinds = [(REFERENCE, 0), (PERTURBED, 0), ("raw", middle), (BIASED, middle)]
    kinds += itertools.product(options.codecs, options.restores)
    write_criteo(place / "criteo.txt", options.steps)
    for traffic in (synthetic(), criteo(place / "criteo.txt")):
        study = Study(traffic, options.steps)
        seeds = progress(range(options.seeds), traffic.name)
        found = changes([study.runs(seed, kinds) for seed in seeds])
        add_lines(report, found, traffic.name)
        publish(report, found, traffic.name)
        report.section()
        if options.plots:
            plot(found, traffic.name, Path(options.plots))


if __name__ == "__main__":
    reports.main(
        "Accuracy after restores from quantized deltas",
        accuracy,
        repeats=1,
        steps=600,  # Of a run.
        seeds=12,
        codecs=CODECS,
        restores=RESTORES,
        plots="",  # A directory for plots.
    )
