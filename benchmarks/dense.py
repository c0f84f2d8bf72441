# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of deltas: bytes, errors along a chain, speed, and the loss after a restore.

T5 by AdamW (float32, pure bf16, bf16 with a float32 master), by Adafactor, and with adapters on a
frozen backbone; the thesis DLRM; state W. What is trained is kept in --states and trained once.

python benchmarks/dense.py --text wiki.txt --states states --json dense.json
python benchmarks/dense.py --text wiki.txt --states states --only speed sparse   # of quiet machines
python benchmarks/dense.py --size tiny --scale 0.01 --quick          # a smoke test, own text
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import dense_models
import jax
import jax.numpy as jnp
import numpy as np
import once
import report as reports
import state as states
import ways
from dense_models import Model, Trajectory
from dlrm_jax import trainer as dlrm_trainer
from report import Report, Sample, megabytes, percent, secs, speed, times
from t5_jax import data as texts

import deltackpt
from deltackpt.format import dense_blocks
from deltackpt.save import block_codes

#: Steps between two saves whose bytes are measured.
GAPS = (1, 10, 50)
#: Deltas of a chain, and steps between them.
CHAIN, CHAIN_GAP = 10, 10
#: Orders of the data whose losses are the spread.
ORDERS = 5
_THREADS = 2
_PARTS = ("bytes", "chain", "loss", "speed", "sparse", "w")

EXACT, EIGHT_BITS, FOUR_BITS, LINEAR = "exact", "8 bits", "4 bits", "linear nu"
#: Leaves by what they are, in the states of ``dense_models``.
_PARAMETERS = ("params/**", "dense/**", "opt_state/params/**")
_FIRST, _SECOND = "opt_state/**/mu/**", "opt_state/**/nu/**"


def codings(parameters: str, first: str, second: str) -> dict[str, str]:
    """Codecs by glob: of parameters, of first moments, of second moments."""
    return {_FIRST: first, _SECOND: second, **dict.fromkeys(_PARAMETERS, parameters)}


CODINGS: dict[str, Mapping[str, str]] = {
    EXACT: {},
    EIGHT_BITS: codings("ef8", "int8", "log8"),
    FOUR_BITS: codings("ef4", "int8", "log4"),
    # The control that must fail: small second moments become zero or far too large.
    LINEAR: codings("ef4", "int8", "int8"),
}


@functools.cache
def exact_weights(coding: str) -> dict[str, str]:
    """A coding that leaves weights in bf16 as they are beside their master in float32."""
    return {"params/**": "exact", **CODINGS[coding]}


class Case(NamedTuple):
    """A model whose deltas are measured.

    Attributes:
      model: name of it.
      coding: of ``CODINGS``.
      codec: what that is for this model.
      weights: whether the optimizer's state is left out, as for processes that only apply weights.
      raw_bar, defaults_bar: of the bytes at ten steps, of raw ones and of Orbax's defaults.
    """

    model: str
    coding: str
    codec: Mapping[str, str]
    weights: bool = False
    raw_bar: float | None = None
    defaults_bar: float | None = None

    @property
    def title(self) -> str:
        """For a line of the table."""
        return f"{self.model}{', weights' if self.weights else ''}, {self.coding}"


def cases() -> Iterator[Case]:
    """All of them, in the order of the table."""
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


class Lab:
    """Models, the states that they were trained to, and room for checkpoints."""

    def __init__(self, models: Mapping[str, Model], states_dir: Path, first: int, root: Path):
        """Of what is to be trained, or was.

        Args:
          models: by name.
          states_dir: where states are kept.
          first: steps that are trained before the first save.
          root: of checkpoints.
        """
        self.models = models
        self.first = first
        self.root = root
        self._states_dir = states_dir

    def trajectory(self, name: str) -> Trajectory:
        """The states of a model at all steps that are needed; trains if they are not there."""
        model = self.models[name]
        found = Trajectory(model, self._states_dir / name)
        chain = (self.first + CHAIN_GAP * number for number in range(CHAIN + 1))
        start = None if model.starts_from is None else self.trajectory(model.starts_from)
        found.train(self.first, {*chain, *(self.first + gap for gap in GAPS)}, start)
        return found

    def manager(self, model: Model, codec: Mapping[str, str]) -> deltackpt.CheckpointManager:
        """A manager over an empty directory, whose first save is a base and its only one."""
        shutil.rmtree(self.root, ignore_errors=True)
        return deltackpt.CheckpointManager(
            self.root,
            handlers={"embeddings": model.tables},
            options=deltackpt.ManagerOptions(
                deltas=deltackpt.DeltaOptions(
                    policy=deltackpt.Consecutive(max_chain=10_000, max_restore_ratio=1e9)
                ),
                writes=deltackpt.WriteOptions(durability="process"),
                dense=deltackpt.Dense(deltas="own", codec=codec),
            ),
        )

    def orbax_bytes(self, state: Any, *, compressed: bool) -> int:
        """Bytes of a step by stock Orbax."""
        shutil.rmtree(self.root, ignore_errors=True)
        way = ways.Orbax(self.root, compressed=compressed)
        way.save(1, state)
        way.wait()
        way.close()
        return ways.tree_bytes(self.root / "1")


# Bytes.


def add_bytes(report: Report, lab: Lab, chosen: list[Case]) -> None:
    """Lines of the bytes of a delta, all included."""
    orbax: dict[tuple[str, bool], dict[bool, int]] = {}
    for case in chosen:
        trajectory = lab.trajectory(case.model)
        later = _viewed(trajectory.at(lab.first + CHAIN_GAP), case)
        if (case.model, case.weights) not in orbax:
            orbax[case.model, case.weights] = {
                compressed: lab.orbax_bytes(later, compressed=compressed)
                for compressed in (True, False)
            }
        of_orbax = orbax[case.model, case.weights]
        raw = dense_models.nbytes(later)
        for gap in GAPS:
            mine = Sample((float(_delta_bytes(lab, trajectory, case, gap)),))
            title = f"{case.title}, {gap} {'step' if gap == 1 else 'steps'}: bytes of a delta"
            judged = gap == CHAIN_GAP
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
        for step in (lab.first, lab.first + gap):
            saved = manager.save(step, _viewed(trajectory.at(step), case))
            manager.wait()
        assert saved.kind == "delta", saved.reason
    return ways.tree_bytes(lab.root / str(lab.first + gap))


# Errors along a chain.


def add_chain(report: Report, lab: Lab, name: str, coding: str) -> None:
    """Lines of the error of each kind of leaf after one and after ten saves, and of the bytes."""
    trajectory = lab.trajectory(name)
    errors: dict[str, list[float]] = defaultdict(list)
    taken = []
    with lab.manager(trajectory.model, CODINGS[coding]) as manager:
        for number in range(CHAIN + 1):
            step = lab.first + number * CHAIN_GAP
            state = trajectory.at(step)
            manager.save(step, state)
            manager.wait()
            taken.append(ways.tree_bytes(lab.root / str(step)))
        for number in range(1, CHAIN + 1):
            state = trajectory.at(lab.first + number * CHAIN_GAP)
            result = manager.restore(lab.first + number * CHAIN_GAP, state)
            for kind, error in leaf_errors(result.state, state).items():
                errors[kind].append(error)
    for kind, found in errors.items():
        title = f"{name}, {coding}, {kind}: relative l2 error"
        report.state(f"{title}, 1 save", Sample((found[0],)), percent)
        report.state(f"{title}, {CHAIN} saves", Sample((found[-1],)), percent)
        if found[0]:
            # An average of three: what training changes in ten steps differs, too.
            growth = float(np.mean(found[-3:]) / np.mean(found[:3]))
            report.state(f"{title}, last saves over first ones", Sample((growth,)), times, bar=1.5)
    whole = Sample((float(sum(taken)),))
    base = Sample((float(taken[0]),))
    title = f"{name}, {coding}: base and {CHAIN} deltas"
    report.compare(title, whole, "the base", base, megabytes, bar=2.5)
    report.section()


def leaf_errors(found: Any, expected: Any) -> dict[str, float]:
    """Relative l2 error of the floats of each kind of leaf, without what only says what changed."""
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
    """Lines of the loss after a restore from ten deltas and some steps more.

    The spread is that of the uninterrupted run over orders of the data. A way is within it where
    the mean of its losses over the same orders is no further from the mean of the uninterrupted
    ones than these themselves are.
    """
    trajectory = lab.trajectory(name)
    model = trajectory.model
    last = lab.first + CHAIN * CHAIN_GAP
    losses = {"uninterrupted": _trained_on(model, lambda: trajectory.at(last), last, more)}
    for coding in (EXACT, EIGHT_BITS, FOUR_BITS, LINEAR):
        with lab.manager(model, CODINGS[coding]) as manager:
            for number in range(CHAIN + 1):
                step = lab.first + number * CHAIN_GAP
                manager.save(step, trajectory.at(step))
                manager.wait()

            def restored(manager: deltackpt.CheckpointManager = manager) -> Any:
                return manager.restore(last, trajectory.at(last)).state

            losses[coding] = _trained_on(model, restored, last, more)

    def dropped() -> Any:
        return trajectory.at(last)._replace(opt_state=model.init().opt_state)

    losses["moments dropped"] = _trained_on(model, dropped, last, more)
    exact = np.array(losses.pop("uninterrupted"))
    spread = float(np.abs(exact - exact.mean()).max())
    title = f"{name}, restored and {more} steps more"
    report.state(f"{title}, uninterrupted: loss", Sample(tuple(exact)), "{:.4f}".format)
    for way, found in losses.items():
        distance = float(np.mean(found) - exact.mean())
        report.state(f"{title}, {way}: loss", Sample(tuple(found)), "{:.4f}".format)
        if way == LINEAR:
            # Turned round: it must be further away than the spread.
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
    """The losses of what is not trained on, one for each order of the data."""
    found = []
    for order in range(1, ORDERS + 1):
        state = start()
        for number in range(step, step + more):
            state, _ = model.step(state, model.batch(order, number))
        found.append(model.tested(state))
    return found


# Speed.


class Blocks(NamedTuple):
    """A leaf at two steps, in blocks, and its codec."""

    now: np.ndarray
    before: np.ndarray
    codec: str


def add_speed(report: Report, lab: Lab, name: str, rounds: int) -> None:
    """Lines of encoding a delta and of restoring a chain, against copying and reading as much."""
    trajectory = lab.trajectory(name)
    step = lab.first + CHAIN_GAP
    now, before = trajectory.at(step), trajectory.at(lab.first)
    gigabytes = dense_models.nbytes(now) / 1e9
    found: dict[str, list[float]] = defaultdict(list)
    with ThreadPoolExecutor(_THREADS) as pool:
        for number in range(rounds + 1):
            for coding in (EXACT, EIGHT_BITS, FOUR_BITS):
                leaves = list(_in_blocks(now, before, CODINGS[coding]))
                copied = reports.timed(functools.partial(_copy, leaves, pool))
                encoded = reports.timed(functools.partial(_encode, leaves, pool))
                if number:
                    found["copy", coding].append(copied / gigabytes)
                    found["encode", coding].append(encoded / gigabytes)
    for coding in (EXACT, EIGHT_BITS, FOUR_BITS):
        report.compare(
            f"{name}, {coding}: encode",
            Sample(tuple(found["encode", coding])),
            "copy of the leaves",
            Sample(tuple(found["copy", coding])),
            speed,
        )
    for coding in (EXACT, EIGHT_BITS, FOUR_BITS):
        with lab.manager(trajectory.model, CODINGS[coding]) as manager:
            for number in range(CHAIN + 1):
                step = lab.first + number * CHAIN_GAP
                manager.save(step, trajectory.at(step))
                manager.wait()
            restores = _restores(lab, manager, step, trajectory.at(step), rounds)
        _add_restores(report, f"{name}, {coding}", restores, gigabytes)
    report.section()


def _in_blocks(now: Any, before: Any, codec: Mapping[str, str]) -> Iterator[Blocks]:
    """The leaves that are no plain bytes."""
    from deltackpt.format import globs

    pairs = zip(
        jax.tree_util.tree_leaves_with_path(now._replace(touched=())),
        jax.tree.leaves(before._replace(touched=())),
        strict=True,
    )
    for (path, leaf), earlier in pairs:
        name = "/".join(_step_of(key) for key in path)
        if dense_blocks.is_plain(leaf.nbytes, leaf.dtype.name):
            continue
        chosen = next((one for glob, one in codec.items() if globs.matches(glob, name)), "exact")
        yield Blocks(_blocks(leaf), _blocks(earlier), chosen)


def _step_of(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))))


def _blocks(leaf: jax.Array) -> np.ndarray:
    found = np.zeros((dense_blocks.blocks_of(leaf.size), dense_blocks.BLOCK), leaf.dtype)
    found.reshape(-1)[: leaf.size] = np.asarray(leaf).reshape(-1)
    return found


def _copy(leaves: list[Blocks], pool: ThreadPoolExecutor) -> None:
    for leaf in leaves:
        out = np.empty_like(leaf.now)
        step = max(1, -(-len(out) // _THREADS))
        parts = [slice(start, start + step) for start in range(0, len(out), step)]
        list(pool.map(lambda part: np.copyto(out[part], leaf.now[part]), parts))  # noqa: B023


def _encode(leaves: list[Blocks], pool: ThreadPoolExecutor) -> None:
    for leaf in leaves:
        block_codes.encode_leaf(leaf.now, leaf.before, leaf.codec, None, pool)


def _restores(
    lab: Lab, manager: deltackpt.CheckpointManager, step: int, template: Any, rounds: int
) -> dict[str, list[float]]:
    """Seconds of restoring the base, the whole chain, and of reading the files of the base."""
    found: dict[str, list[float]] = defaultdict(list)
    base = lab.first
    for number in range(rounds + 1):
        of_base = reports.timed(lambda: jax.block_until_ready(manager.restore(base, template)))
        of_chain = reports.timed(lambda: jax.block_until_ready(manager.restore(step, template)))
        read = once.read(lab.root / str(base))["seconds"]
        if number:
            found["base"].append(of_base)
            found["chain"].append(of_chain)
            found["read"].append(read)
    return found


def _add_restores(
    report: Report,
    title: str,
    found: dict[str, list[float]],
    gigabytes: float,
    bar: float | None = None,
) -> None:
    per_gigabyte = {
        what: Sample(tuple(value / gigabytes for value in values))
        for what, values in found.items()
    }
    title = f"{title}: restore of base and {CHAIN}"
    chain = per_gigabyte["chain"]
    report.compare(title, chain, "restore of the base", per_gigabyte["base"], speed, bar=bar)
    report.compare(title, chain, "read of the base", per_gigabyte["read"], speed)


# Bits of bf16 of which one in a hundred changed.


class Sparse:
    """Weights in bf16 of which a share changes to a neighbour at each step."""

    def __init__(self, count: int, share: float):
        """Of so many numbers."""
        self._random = np.random.default_rng(0)
        self._count, self._share = count, share
        weights = self._random.standard_normal(count, np.float32) * 0.02
        self.weights = np.asarray(jnp.asarray(weights, jnp.bfloat16))

    def change(self) -> None:
        """One step of an optimizer whose learning rate is small."""
        changed = self._random.random(self._count, np.float32) < self._share
        places = np.flatnonzero(changed)
        bits = self.weights.view(np.uint16).copy()
        bits[places] += np.where(self._random.random(len(places)) < 0.5, 1, -1).astype(np.uint16)
        self.weights = bits.view(self.weights.dtype)

    def state(self) -> dense_models.State:
        """As a state."""
        table = {"table": jnp.zeros((8, 8))}
        return dense_models.State(
            table["table"],
            {"weights": jnp.asarray(self.weights)},
            (),
            jnp.zeros((), jnp.int32),
            deltackpt.touched.init(table),
        )


def add_sparse(report: Report, lab: Lab, scale: float, rounds: int) -> None:
    """Lines of bytes, speed and restores where 1 % of the bits of bf16 change."""
    source = Sparse(round(200e6 * scale), 0.01)
    title = "bf16, 1 % changed"
    model = dense_models.untrained(source.state)
    first = source.state()
    gigabytes = source.weights.nbytes / 1e9
    touched = first.touched
    encoded, copied, taken = [], [], []
    with lab.manager(model, {}) as manager, ThreadPoolExecutor(_THREADS) as pool:
        manager.save(lab.first, first)
        manager.wait()
        for number in range(1, CHAIN + 1):
            before = _blocks(jnp.asarray(source.weights))
            source.change()
            touched = dense_models.marked(touched)
            state = source.state()._replace(touched=touched)
            leaves = [Blocks(_blocks(jnp.asarray(source.weights)), before, EXACT)]
            copied.append(reports.timed(functools.partial(_copy, leaves, pool)) / gigabytes)
            encoded.append(reports.timed(functools.partial(_encode, leaves, pool)) / gigabytes)
            manager.save(lab.first + number, state)
            manager.wait()
            taken.append(float(ways.tree_bytes(lab.root / str(lab.first + number))))
        last = lab.first + CHAIN
        found = manager.restore(last, state).state.params["weights"]
        equal = bool((np.asarray(found).view(np.uint16) == source.weights.view(np.uint16)).all())
        restores = _restores(lab, manager, last, state, rounds)
    raw = Sample((float(source.weights.nbytes),) * len(taken))
    report.compare(f"{title}: bytes of a delta", Sample(tuple(taken)), "raw", raw, megabytes, bar=0.02)
    report.state(f"{title}: other bits", Sample((0.0 if equal else 1.0,)), "{:.0f}".format, bar=0.0)
    report.state(f"{title}: encode", Sample(tuple(encoded[1:])), speed, bar=1.0)
    report.compare(
        f"{title}: encode", Sample(tuple(encoded[1:])), "copy", Sample(tuple(copied[1:])), speed
    )
    _add_restores(report, title, restores, gigabytes, bar=1.3)
    report.section()


# State W.


def add_w(report: Report, lab: Lab, scale: float) -> None:
    """Lines of the bytes of a delta of state W, 4 bits for rows and dense leaves."""
    state = states.make(scale)
    model = dense_models.untrained(
        lambda: states.make(scale), dlrm_trainer.checkpoint_tables("adaptive4")
    )
    orbax = {c: lab.orbax_bytes(state, compressed=c) for c in (True, False)}
    with lab.manager(model, CODINGS[FOUR_BITS]) as manager:
        manager.save(0, state)
        manager.wait()
        state = states.change(state, states.random_ids(state, 0.05, 1))
        manager.save(1, state)
        manager.wait()
    mine = Sample((float(ways.tree_bytes(lab.root / "1")),))
    for compressed, other in ((True, "orbax"), (False, "orbax-tuned")):
        theirs = Sample((float(orbax[compressed]),))
        title = "state W, 4 bits: bytes of a delta, all included"
        report.compare(title, mine, ways.NAMES[other], theirs, megabytes, bar=1 / 100)
    report.section()


def run(options: argparse.Namespace, place: Path) -> None:
    """Measures the chosen parts and prints the table."""
    started = time.perf_counter()
    text = texts.text_of(options.text)
    kept = options.states or place / "states"
    labs = {}
    for size in {options.size, options.loss_size}:
        models = dense_models.t5_models(text, size, options.batch)
        models["dlrm"] = dense_models.dlrm_model(options.scale)
        labs[size] = Lab(models, kept / size, options.first, place / "checkpoints")
    lab = labs[options.size]
    report = Report(
        "Dense leaves of deltas",
        sizes=f"T5 {options.size} (loss: {options.loss_size}), batch {options.batch}, "
        f"{options.first} steps before the first save; {options.repeats} rounds, median (range)",
    )
    report.note(ways.TUNED)
    chosen = [case for case in cases() if case.model in options.models]
    if "bytes" in options.only:
        add_bytes(report, lab, chosen)
    if "chain" in options.only:
        for coding in (EIGHT_BITS, FOUR_BITS):
            add_chain(report, lab, "adamw", coding)
    if "loss" in options.only:
        add_loss(report, labs[options.loss_size], "adamw", options.more)
    if "speed" in options.only:
        add_speed(report, lab, "adamw", options.repeats)
    if "sparse" in options.only:
        add_sparse(report, lab, options.scale, options.repeats)
    if "w" in options.only:
        add_w(report, lab, options.scale)
    report.note(f"{secs(time.perf_counter() - started)} in all.")
    report.show(options.json, options.markdown)


def main() -> int:
    """Runs the command line."""
    parser = reports.arguments(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=_PARTS, default=_PARTS, help="what to measure")
    add("--models", nargs="+", default=sorted({case.model for case in cases()}))
    add("--text", type=Path, help="any text file; default: docs and sources of this clone")
    add("--states", type=Path, help="keep trained states here, or take them from here")
    add("--size", default="small", help="of T5")
    add("--loss-size", default="tiny", help="of the T5 that is trained on after restores")
    add("--batch", type=int, default=4, help="samples in a batch of T5")
    add("--first", type=int, default=200, help="steps before the first save")
    add("--more", type=int, default=100, help="steps after a restore")
    options = parser.parse_args()
    options.directory and options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dense-", dir=options.directory) as place:
        run(options, Path(place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
