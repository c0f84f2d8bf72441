# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of deltas: bytes, errors along a chain, the loss after a restore, speed.

T5 with AdamW (float32, and bf16 with a float32 master) and adapters on a frozen backbone; state W;
and bf16 weights of which 1 % change. ``sparse`` and ``w`` need no training.
"""

from __future__ import annotations

import argparse
import functools
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import dense_models
import jax
import jax.numpy as jnp
import numpy as np
import report as reports
import state as states
import ways
from dlrm_jax import trainer as dlrm_trainer
from report import (
    Figures,
    Report,
    Sample,
    count,
    interleaved,
    megabytes,
    percent,
    ratio,
    speed,
    timed,
    times,
)
from t5_jax import data as texts

import deltackpt
from deltackpt.format.row_blocks import BLOCK, blocks_of
from deltackpt.resources.runtime import Runtime
from deltackpt.save import block_codes

#: Deltas of a chain.
CHAIN = 10
OURS = "a delta"
#: Number of data orders whose losses define the spread.
ORDERS = 5
LOSSLESS, EIGHT_BITS, FOUR_BITS, LINEAR = "lossless", "8 bits", "4 bits", "second moments as `int8`"
#: Globs of the kinds of leaves in the states of ``dense_models`` and of state W.
_PARAMETERS = ("params/**", "dense/**", "opt_state/params/**")
_FIRST, _SECOND = "opt_state/**/mu/**", "opt_state/**/nu/**"
#: Bars: the bytes of sparse bf16 deltas, of a chain over its base, and of W over Orbax's; the error
#: of the last saves over that of the first; and a restore of base and deltas over a read of them.
_SPARSE_BAR, _CHAIN_BAR, _W_BAR, _GROWTH_BAR, _RESTORE_BAR = 0.02, 2.5, 1 / 100, 1.5, 1.4


def codings(parameters: str, first: str, second: str) -> dict[str, str]:
    """Codecs by glob, for parameters, first moments and second moments."""
    return {_FIRST: first, _SECOND: second, **dict.fromkeys(_PARAMETERS, parameters)}


CODINGS: dict[str, Mapping[str, str]] = {
    LOSSLESS: {},
    EIGHT_BITS: codings("ef8", "int8", "log8"),
    FOUR_BITS: codings("ef4", "int8", "log4"),
    # The control that must fail: small second moments become zero or far too large.
    LINEAR: codings("ef4", "int8", "int8"),
}


class Case(NamedTuple):
    """A model whose deltas are measured."""

    title: str
    model: str
    coding: str  # A key of ``CODINGS``.
    small: bool = True  # Whether the T5 has ``--size`` instead of ``--loss-size``.
    weights: bool = False  # Weights only, as for inference processes.
    raw_bar: float | None = None  # Target: bytes as a fraction of raw ones.
    orbax_bar: float | None = None  # Target: bytes as a fraction of Orbax's defaults.


CASES = (
    Case("AdamW", "adamw", LOSSLESS),
    Case("AdamW", "adamw", EIGHT_BITS, raw_bar=0.25),
    Case("AdamW", "adamw", FOUR_BITS, raw_bar=0.12, orbax_bar=1 / 8),
    Case("LoRA", "lora", LOSSLESS, raw_bar=0.12),
    Case("bf16 weights", "master", LOSSLESS, small=False, weights=True),
    Case("bf16 fine-tuning", "tuning", LOSSLESS, small=False, weights=True),
    Case("bf16 with a float32 master", "master", FOUR_BITS, small=False),
)


class Lab:
    """Models, their trained states, and a directory for checkpoints."""

    def __init__(self, options: argparse.Namespace, size: str, place: Path):
        text = texts.text_of(Path(options.text) if options.text else None)
        self.models = dense_models.t5_models(text, size, options.batch)
        self.root, self.size = place / "checkpoints", size
        #: The steps of a base and the deltas on it.
        self.chain = tuple(options.first + options.gap * n for n in range(CHAIN + 1))

    def states(self, name: str, last: int | None = None) -> dict[int, Any]:
        """Trained states of a model, in host memory, by step of the chain up to ``last``."""
        model, wanted = self.models[name], self.chain[:last]
        if model.starts_from is None:
            state, done = model.init(), 0
        else:
            done = wanted[0]
            state = jax.device_put(self.states(model.starts_from, 1)[done])
        found = {}
        for number in range(done, wanted[-1] + 1):
            if number in wanted:
                found[number] = jax.tree.map(np.array, state)
            state = model.step(state, model.batch(0, number))
        return found

    def saved_chain(self, found: dict[int, Any], coding: str) -> deltackpt.CheckpointManager:
        """A manager that has saved a base and the deltas on it."""
        way = opened(self.root, CODINGS[coding])
        for step, state in found.items():
            way.saved(step, jax.device_put(state))
        return way.manager


def opened(
    root: Path, codec: Mapping[str, str], tables: deltackpt.Tables = dense_models.TABLES
) -> ways.Deltas:
    """A manager over an empty directory, whose only base is its first save."""
    shutil.rmtree(root, ignore_errors=True)
    # Without an error budget, nothing prevents a linear code for second moments.
    dense = deltackpt.Dense(deltas="blocks", codec=codec, max_error=None)
    return ways.Deltas(root, "process", tables=tables, dense=dense)


def measure_bytes(
    root: Path, codec: Mapping[str, str], pair: tuple[Any, Any], **tables: deltackpt.Tables
) -> Figures:
    """Bytes of a delta between two states, of raw ones, and of a step of stock Orbax."""
    found, way = Figures(), opened(root, codec, **tables)
    for number, state in enumerate(pair):
        saved = way.manager.save(number, state)
        way.wait()
    assert saved.kind == "delta", saved.reason
    way.close()
    found.add(OURS, {"bytes": ways.tree_bytes(root / "1")})
    found.add("raw", {"bytes": ways.nbytes(pair[1])})
    for name in ways.THEIRS:
        shutil.rmtree(root)
        other = ways.WAYS[name](root)
        other.saved(1, pair[1])
        other.close()
        found.add(name, {"bytes": ways.tree_bytes(root / "1")})
    return found


def over_cell(found: Figures, other: str) -> tuple[Sample, reports.Unit]:
    """The bytes of a delta, of those of another, for the published table."""
    return found(OURS, "bytes").over(found(other, "bytes")), ratio


def add_bytes(report: Report, labs: Mapping[bool, Lab], chosen: list[Case]) -> list[list]:
    """Adds lines of the total bytes of a delta; returns rows of the published table."""
    rows = []
    for case in chosen:
        lab = labs[case.small]
        first, second = (
            jax.device_put(state._replace(opt_state=()) if case.weights else state)
            for state in lab.states(case.model, 2).values()
        )
        exact = {"params/**": "lossless"} if case.model == "master" else {}
        found = measure_bytes(lab.root, exact | dict(CODINGS[case.coding]), (first, second))
        title = f"T5 {lab.size}, {case.title}, {case.coding}"
        bars = (case.raw_bar, case.orbax_bar)
        others = ("raw", *ways.THEIRS)
        report.against(f"{title}: bytes", found, "bytes", OURS, others, megabytes, bars=bars)
        cells = [over_cell(found, other) for other in others[:2]]
        rows.append([title, *found.cells(OURS, bytes=megabytes), *cells])
    report.section()
    return rows


def add_w(report: Report, root: Path, scale: float) -> list[list]:
    """Adds the bytes of a delta of state W, with 4 bits for rows and dense leaves."""
    tables = dlrm_trainer.checkpoint_tables("adaptive4")
    state = states.make(scale)
    later = states.change(jax.tree.map(jnp.copy, state), states.random_ids(state, 0.05, 1))
    found = measure_bytes(root, CODINGS[FOUR_BITS], (state, later), tables=tables)
    title, bars = "state W, 4 bits: bytes", (_W_BAR, _W_BAR)
    report.against(title, found, "bytes", OURS, ways.THEIRS, megabytes, bars=bars)
    report.section()
    cells = [*found.cells(OURS, bytes=megabytes), "", over_cell(found, ways.THEIRS[0])]
    return [["state W, `adaptive4` rows, `ef4` dense leaves", *cells]]


# Errors along a chain.


def add_chain(report: Report, lab: Lab, coding: str) -> None:
    """Adds lines of the bytes, and of the error of each kind of leaf after 1 and 10 saves."""
    errors: dict[str, list[float]] = defaultdict(list)
    trained = lab.states("adamw")
    with lab.saved_chain(trained, coding) as manager:
        for step in lab.chain[1:]:
            state = jax.device_put(trained[step])
            for kind, error in leaf_errors(manager.restore(step, state).state, state).items():
                errors[kind].append(error)
    sizes = [float(ways.tree_bytes(lab.root / str(step))) for step in lab.chain]
    for kind, found in errors.items():
        title = f"T5 {lab.size}, {coding}, {kind}: relative l2 error"
        report.state(f"{title}, 1 save", Sample((found[0],)), percent)
        report.state(f"{title}, {CHAIN} saves", Sample((found[-1],)), percent)
        if found[0]:
            # Averages of three, because the changes in ten training steps vary, too.
            growth = Sample((float(np.mean(found[-3:]) / np.mean(found[:3])),))
            report.state(f"{title}, last saves over first ones", growth, times, bar=_GROWTH_BAR)
    whole, base = Sample((sum(sizes),)), Sample((sizes[0],))
    bar = _CHAIN_BAR if coding == FOUR_BITS else None
    title = f"T5 {lab.size}, {coding}: base and {CHAIN} deltas"
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
            name = jax.tree_util.keystr(path)
            kind = "first moments" if ".mu" in name else "parameters"
            kind = "second moments" if ".nu" in name else kind
            exact = np.asarray(theirs).astype(np.float32).reshape(-1)
            change = np.asarray(mine).astype(np.float32).reshape(-1) - exact
            squared[kind] += float(np.dot(change, change))
            norms[kind] += float(np.dot(exact, exact))
    return {kind: (squared[kind] / norms[kind]) ** 0.5 for kind in norms if norms[kind]}


# The loss after a restore.


def add_loss(report: Report, lab: Lab, more: int) -> None:
    """Adds lines of the loss after a restore from ten deltas and some more steps.

    The spread is the largest distance of a loss of the uninterrupted run, over orders of the data,
    from their mean. A coding is within it if its mean loss over the same orders is within that
    distance of the mean.
    """
    model, last = lab.models["adamw"], lab.chain[-1]
    states_ = lab.states("adamw")

    def at_last() -> Any:
        return jax.device_put(states_[last])

    def trained(start: Callable[[], Any]) -> Sample:
        found = []
        for order in range(1, ORDERS + 1):
            state = start()
            for number in range(last, last + more):
                state = model.step(state, model.batch(order, number))
            found.append(model.tested(state))
        return Sample(tuple(found))

    losses = {"none, uninterrupted": trained(at_last)}
    for coding in CODINGS:
        with lab.saved_chain(states_, coding) as manager:

            def restored(manager: deltackpt.CheckpointManager = manager) -> Any:
                return manager.restore(last, at_last()).state

            losses[coding] = trained(restored)
    losses["moments dropped"] = trained(
        lambda: at_last()._replace(opt_state=model.init().opt_state)
    )
    exact = np.array(losses["none, uninterrupted"].values)
    # With no more steps, the orders do not differ.
    spread = max(1e-12, float(np.abs(exact - exact.mean()).max()))
    for name, found in losses.items():
        title = f"T5 {lab.size}, restored and {more} steps more, {name}"
        report.state(f"{title}: loss", found, "{:.4f}".format)
        distance = abs(float(np.mean(found.values)) - exact.mean()) / spread
        if name == LINEAR:  # Inverted: the distance must exceed the spread.
            value = Sample((1 / max(1e-12, distance),))
            report.state(f"{title}: spread over distance", value, times, bar=1.0)
        elif name in CODINGS:
            report.state(f"{title}: distance over spread", Sample((distance,)), times, bar=1.0)
    report.section()
    rows = [[name, found.shown("{:.3f}".format)] for name, found in losses.items()]
    report.publish("loss", ("codecs", f"held-out loss, {more} steps after the restore"), rows)


# bf16 weights of which 1 % change.


def in_blocks(leaf: np.ndarray) -> np.ndarray:
    """Pads a leaf to whole blocks."""
    found = np.zeros((blocks_of(leaf.size), BLOCK), leaf.dtype)
    found.reshape(-1)[: leaf.size] = leaf.reshape(-1)
    return found


def add_sparse(report: Report, root: Path, scale: float, rounds: int) -> None:
    """Measures bytes, speed and restores if 1 % of the bf16 weights change to adjacent values."""
    random, size = np.random.default_rng(0), round(200e6 * scale)
    weights = np.asarray(jnp.asarray(random.standard_normal(size, np.float32) * 0.02, jnp.bfloat16))
    title, gigabytes = "bf16, 1 % changed", weights.nbytes / 1e9
    state, found = dense_models.state_of({"weights": jnp.asarray(weights)}), Figures()
    way = opened(root, {})
    manager = way.manager
    with manager, Runtime(2) as pool:
        way.saved(0, state)
        for number in range(1, CHAIN + 1):
            before, bits = in_blocks(weights), weights.view(np.uint16).copy()
            places = np.flatnonzero(random.random(size, np.float32) < 0.01)
            bits[places] += np.where(random.random(len(places)) < 0.5, 1, -1).astype(np.uint16)
            weights = bits.view(weights.dtype)
            now = in_blocks(weights)
            encode = functools.partial(block_codes.encode_leaf, now, before, "lossless", None, pool)
            speeds = {
                "copy": ways.copy_secs(now, np.empty_like(now), pool) / gigabytes,
                "encode": timed(lambda: pool.memory.give_back([encode().decoded])) / gigabytes,  # noqa: B023
            }
            if number > 1:  # The first one faults in memory.
                found.add("", speeds)
            touched = dense_models.marked(state.touched)
            state = state._replace(params={"weights": jnp.asarray(weights)}, touched=touched)
            way.saved(number, state)
            nbytes = {"raw": weights.nbytes, "bytes": ways.tree_bytes(root / str(number))}
            found.add("", nbytes)
        restored = manager.restore(CHAIN, state).state.params["weights"]
        equal = bool((np.asarray(restored).view(np.uint16) == weights.view(np.uint16)).all())

        def restores() -> dict[str, float]:
            timings = {
                name: timed(lambda: jax.block_until_ready(manager.restore(step, state)))  # noqa: B023
                for name, step in (("base", 0), ("chain", CHAIN))
            }
            return timings | {"read": ways.read_secs(root)}

        measured = interleaved(rounds, {"": restores})
    delta, raw = found("", "bytes"), found("", "raw")
    report.compare(f"{title}: bytes of a delta", delta, "raw", raw, megabytes, bar=_SPARSE_BAR)
    report.state(f"{title}: other bits", Sample((0.0 if equal else 1.0,)), count, bar=0.0)
    encoded = found("", "encode")
    report.state(f"{title}: encode", encoded, speed, bar=1.0)
    report.compare(f"{title}: encode", encoded, "copy", found("", "copy"), speed)
    base, chain, read = (measured("", what) for what in ("base", "chain", "read"))
    what = f"{title}: restore of base and {CHAIN} deltas"
    report.compare(what, chain, "a read of the files", read, bar=_RESTORE_BAR)
    report.compare(what, chain, "a restore of the base", base)
    report.section()


def dense(report: Report, options: argparse.Namespace, place: Path) -> None:
    report.sizes = (
        f"T5 {options.size} (loss: {options.loss_size}), batch {options.batch}, "
        f"{options.first} steps before the first save, {options.gap} between two. {ways.TUNED}"
    )
    labs: dict[bool, Lab] = {}
    if {"bytes", "chain", "loss"} & {*options.only}:
        for small, size in ((True, options.size), (False, options.loss_size)):
            labs[small] = Lab(options, size, place)
    rows: list[list] = []
    if "bytes" in options.only:
        rows += add_bytes(report, labs, [case for case in CASES if case.model in options.models])
    if "w" in options.only:
        rows += add_w(report, place / "w", options.scale)
    if rows:
        columns = ("model, codec", "delta", "vs. raw bytes", "vs. Orbax defaults")
        report.publish("bytes", columns, rows)
    if "chain" in options.only:
        for coding in (EIGHT_BITS, FOUR_BITS):
            add_chain(report, labs[False], coding)
    if "loss" in options.only:
        add_loss(report, labs[False], options.more)
    if "sparse" in options.only:
        add_sparse(report, place / "sparse", options.scale, options.repeats)


if __name__ == "__main__":
    reports.main(
        "Dense leaves of deltas",
        dense,
        only=("bytes", "w", "chain", "loss", "sparse"),
        models=tuple(sorted({case.model for case in CASES})),
        text="",  # Any text file; by default docs and sources of this clone.
        size="small",
        loss_size="tiny",  # Of the T5 that is trained on after restores.
        batch=4,  # Samples.
        first=200,  # Steps before the first save.
        gap=10,  # Steps between the saves of a chain.
        more=20,  # Steps after a restore.
    )
