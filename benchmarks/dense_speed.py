# SPDX-License-Identifier: Apache-2.0
"""The parts of ``dense.py`` that measure time or need no training."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import dense_models
import jax
import jax.numpy as jnp
import numpy as np
import once
import report as reports
import state as states
import ways
from dense_lab import CHAIN, CODINGS, EIGHT_BITS, EXACT, FOUR_BITS, Lab
from dlrm_jax import trainer as dlrm_trainer
from report import Report, Sample, megabytes, speed

import deltackpt
from deltackpt.format import dense_blocks, globs
from deltackpt.resources.runtime import Runtime
from deltackpt.save import block_codes

_THREADS = 2


class Blocks(NamedTuple):
    """A leaf at two steps, in blocks, and its codec."""

    now: np.ndarray
    before: np.ndarray
    codec: str


def add_speed(report: Report, lab: Lab, name: str, rounds: int) -> None:
    """Compares encoding a delta with a copy, and restoring a chain with a read of as many bytes."""
    trajectory = lab.trajectory(name)
    now, before = trajectory.at(lab.chain[1]), trajectory.at(lab.chain[0])
    gigabytes = dense_models.nbytes(now) / 1e9
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with Runtime(_THREADS) as pool:
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
        with lab.saved_chain(trajectory, coding) as manager:
            last = lab.chain[-1]
            restores = _restores(lab, manager, (lab.chain[0], last), trajectory.at(last), rounds)
        _add_restores(report, f"{name}, {coding}", restores, gigabytes)
    report.section()


def _in_blocks(now: Any, before: Any, codec: Mapping[str, str]) -> Iterator[Blocks]:
    """The leaves that are not stored as plain bytes."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(now._replace(touched=())),
        jax.tree.leaves(before._replace(touched=())),
        strict=True,
    )
    for (path, leaf), earlier in pairs:
        name = "/".join(_step_of(key) for key in path)
        if dense_blocks.group_of(leaf.nbytes, leaf.dtype.name) == dense_blocks.PLAIN:
            continue
        chosen = next((one for glob, one in codec.items() if globs.matches(glob, name)), "lossless")
        yield Blocks(_blocks(leaf), _blocks(earlier), chosen)


def _step_of(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))))


def _blocks(leaf: jax.Array) -> np.ndarray:
    found = np.zeros((dense_blocks.blocks_of(leaf.size), dense_blocks.BLOCK), leaf.dtype)
    found.reshape(-1)[: leaf.size] = np.asarray(leaf).reshape(-1)
    return found


def _copy(leaves: list[Blocks], pool: Runtime) -> None:
    for leaf in leaves:
        out = np.empty_like(leaf.now)
        step = max(1, -(-len(out) // _THREADS))
        parts = [slice(start, start + step) for start in range(0, len(out), step)]
        list(pool.map(lambda part: np.copyto(out[part], leaf.now[part]), parts))  # noqa: B023


def _encode(leaves: list[Blocks], pool: Runtime) -> None:
    for leaf in leaves:
        block_codes.encode_leaf(leaf.now, leaf.before, leaf.codec, None, pool)


def _restores(
    lab: Lab,
    manager: deltackpt.CheckpointManager,
    steps: tuple[int, int],
    template: Any,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds to restore the base and the last step of its chain, and to read the base's files."""
    found: dict[str, list[float]] = defaultdict(list)
    base, step = steps
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
        what: Sample(tuple(value / gigabytes for value in values)) for what, values in found.items()
    }
    base, chain, read = (per_gigabyte[what] for what in ("base", "chain", "read"))
    report.compare(f"{title}: restore of the base", base, "read of the base", read, speed)
    title = f"{title}: restore of base and {CHAIN}"
    report.compare(title, chain, "restore of the base", base, speed)
    report.compare(title, chain, "read of the base", read, speed, bar=bar)


# bf16 weights of which 1 % change.


class Sparse:
    """bf16 weights, a fraction of which changes to an adjacent value at each step."""

    def __init__(self, count: int, share: float):
        """Creates ``count`` weights, of which ``share`` change per step."""
        self._random = np.random.default_rng(0)
        self._count, self._share = count, share
        weights = self._random.standard_normal(count, np.float32) * 0.02
        self.weights = np.asarray(jnp.asarray(weights, jnp.bfloat16))

    def change(self) -> None:
        """Simulates an optimizer step with a small learning rate."""
        changed = self._random.random(self._count, np.float32) < self._share
        places = np.flatnonzero(changed)
        bits = self.weights.view(np.uint16).copy()
        bits[places] += np.where(self._random.random(len(places)) < 0.5, 1, -1).astype(np.uint16)
        self.weights = bits.view(self.weights.dtype)

    def state(self) -> dense_models.State:
        """The weights as a train state."""
        table = {"table": jnp.zeros((8, 8))}
        return dense_models.State(
            table["table"],
            {"weights": jnp.asarray(self.weights)},
            (),
            jnp.zeros((), jnp.int32),
            deltackpt.touched.init(table),
        )


def add_sparse(report: Report, lab: Lab, scale: float, rounds: int) -> None:
    """Measures bytes, speed and restores if 1 % of the bf16 weights change."""
    source = Sparse(round(200e6 * scale), 0.01)
    title = "bf16, 1 % changed"
    model = dense_models.untrained(source.state)
    first = source.state()
    gigabytes = source.weights.nbytes / 1e9
    touched = first.touched
    encoded, copied, taken = [], [], []
    with lab.manager(model, {}) as manager, Runtime(_THREADS) as pool:
        manager.save(0, first)
        manager.wait_until_finished()
        for number in range(1, CHAIN + 1):
            before = _blocks(jnp.asarray(source.weights))
            source.change()
            touched = dense_models.marked(touched)
            state = source.state()._replace(touched=touched)
            leaves = [Blocks(_blocks(jnp.asarray(source.weights)), before, EXACT)]
            copied.append(reports.timed(functools.partial(_copy, leaves, pool)) / gigabytes)
            encoded.append(reports.timed(functools.partial(_encode, leaves, pool)) / gigabytes)
            manager.save(number, state)
            manager.wait_until_finished()
            taken.append(float(ways.tree_bytes(lab.root / str(number))))
        found = manager.restore(CHAIN, state).state.params["weights"]
        equal = bool((np.asarray(found).view(np.uint16) == source.weights.view(np.uint16)).all())
        restores = _restores(lab, manager, (0, CHAIN), state, rounds)
    raw = Sample((float(source.weights.nbytes),) * len(taken))
    report.compare(
        f"{title}: bytes of a delta", Sample(tuple(taken)), "raw", raw, megabytes, bar=0.02
    )
    report.state(f"{title}: other bits", Sample((0.0 if equal else 1.0,)), "{:.0f}".format, bar=0.0)
    report.state(f"{title}: encode", Sample(tuple(encoded[1:])), speed, bar=1.0)
    report.compare(
        f"{title}: encode", Sample(tuple(encoded[1:])), "copy", Sample(tuple(copied[1:])), speed
    )
    _add_restores(report, title, restores, gigabytes, bar=1.3)
    report.section()


# State W.


def add_w(report: Report, lab: Lab, scale: float) -> None:
    """Measures the bytes of a delta of state W, with 4 bits for rows and dense leaves."""
    state = states.make(scale)
    model = dense_models.untrained(
        lambda: states.make(scale), dlrm_trainer.checkpoint_tables("adaptive4")
    )
    orbax = {c: lab.orbax_bytes(state, compressed=c) for c in (True, False)}
    with lab.manager(model, CODINGS[FOUR_BITS]) as manager:
        manager.save(0, state)
        manager.wait_until_finished()
        state = states.change(state, states.random_ids(state, 0.05, 1))
        manager.save(1, state)
        manager.wait_until_finished()
    mine = Sample((float(ways.tree_bytes(lab.root / "1")),))
    for compressed, other in ((True, "orbax"), (False, "orbax-tuned")):
        theirs = Sample((float(orbax[compressed]),))
        title = "state W, 4 bits: bytes of a delta, all included"
        report.compare(title, mine, ways.NAMES[other], theirs, megabytes, bar=1 / 100)
    report.section()
