# SPDX-License-Identifier: Apache-2.0
"""Reported figures of dense leaves stored as blocks, and policy decisions based on them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import dense_states
import jax.numpy as jnp
import numpy as np
import prometheus_client
from dense_states import LOSSY, Loop, changed_bytes, opened

import deltackpt
from deltackpt import events
from deltackpt.layers import footer
from deltackpt.reading import stored_saves

CODED = deltackpt.Dense(deltas="blocks", codec=LOSSY)


class Told(list):
    """An event handler that keeps save events."""

    def receive(self, event: events.Event) -> None:
        """See ``EventHandler``."""
        if isinstance(event, events.SaveEvent):
            self.append(event)


def run(root: Path, dense: deltackpt.Dense, count: int, **options: Any) -> tuple[Loop, Told]:
    loop, told = Loop(), Told()
    deltas = deltackpt.DeltaOptions(**options)
    with deltackpt.CheckpointManager(
        root,
        handlers=dense_states.HANDLERS,
        options=deltackpt.ManagerOptions(dense=dense, deltas=deltas),
        event_handlers=(told,),
    ) as saver:
        loop.steps(saver, *range(1, count + 1))
    return loop, told


def test_an_event_reports_how_each_leaf_was_stored(tmp_path):
    loop, (base, delta) = run(tmp_path, CODED, 2)
    assert base.dense == () and base.dense_bytes == 0
    found = {figures.leaf: figures for figures in delta.dense}
    w, frozen, count = found["params/w"], found["params/frozen"], found["count"]
    assert (w.codec, w.reason, w.raw_bytes) == ("ef4", "", loop.state["params"]["w"].nbytes)
    assert w.blocks == w.changed_blocks == 75 and 0 < w.relative_error < 0.01
    assert 0 < w.nbytes < w.raw_bytes / 5
    assert (frozen.changed_blocks, frozen.nbytes, frozen.relative_error) == (0, 0, 0.0)
    assert (count.codec, count.blocks, count.raw_bytes) == ("lossless", 1, 4)
    assert delta.dense_relative_error >= w.relative_error
    record = stored_saves.read_save(tmp_path / "2").head.dense_blocks
    on_disk = sum(encoding.nbytes for one in record.segments for encoding in one.encodings)
    assert delta.dense_bytes == on_disk
    assert sum(figures.nbytes for figures in delta.dense) <= on_disk + len(delta.dense)
    # Rows are counted the same as without such leaves.
    assert 0 < delta.bytes_written < delta.dense_bytes
    _, (base, whole) = run(tmp_path / "whole", deltackpt.Dense(), 2)
    assert (whole.dense, whole.rows, base.dense_bytes) == ((), delta.rows, 0)
    # Except for the records of the layer's chunks, in whole pages.
    assert abs(whole.bytes_written - delta.bytes_written) <= 2 * footer.PAGE_BYTES
    assert delta.bytes_written < delta.dense_bytes < whole.dense_bytes


def test_a_leaf_that_was_widened_is_named_with_its_reason(tmp_path, caplog):
    strict = deltackpt.Dense(deltas="blocks", codec=LOSSY, max_error=1e-6)
    registry = prometheus_client.CollectorRegistry()
    given: list[dict] = []
    with caplog.at_level(logging.INFO, "deltackpt.events"):
        _, (_, delta) = run(tmp_path, strict, 2)
    widened = {figures.leaf: figures for figures in delta.widened}
    assert {"params/w", "nu"} <= widened.keys()
    assert "more than 1e-06" in widened["nu"].reason and widened["nu"].codec == "lossless"
    assert "widened=['" in caplog.text and "nu: int8 would change it" in caplog.text
    told = [
        encoding.reason
        for segment in stored_saves.read_save(tmp_path / "2").head.dense_blocks.segments
        for encoding in segment.encodings
    ]
    assert any("nu: int8 would change it" in reason for reason in told)
    logger = mock.Mock(log_entry=given.append)
    events.emit(delta, [events.PrometheusHandler(registry), events.OrbaxLoggerHandler(logger)])
    assert given[0]["dense"][0].keys() >= {"leaf", "codec", "reason"}
    labels = {"process": "0", "kind": "delta"}
    found = registry.get_sample_value("deltackpt_saved_dense_bytes_total", labels)
    assert found == delta.dense_bytes
    labels = {"process": "0", "leaf": "nu"}
    assert registry.get_sample_value("deltackpt_leaf_relative_error", labels) == 0.0


def test_sizes_of_saves_count_dense_leaves(tmp_path):
    loop, _ = run(tmp_path, CODED, 2)
    dense = sum(
        leaf.nbytes
        for name, leaf in loop.state.items()
        if name not in ("emb", "key", "none", "params")
    ) + sum(leaf.nbytes for leaf in loop.state["params"].values())
    base, delta = (stored_saves.read_info(tmp_path / step) for step in ("1", "2"))
    rows = loop.state["emb"].nbytes
    assert rows + dense < base.nbytes < rows + 1.1 * dense
    assert changed_bytes(tmp_path, 2) < delta.nbytes < changed_bytes(tmp_path, 2) + rows
    run(tmp_path / "orbax", deltackpt.Dense(), 2)
    assert stored_saves.read_info(tmp_path / "orbax" / "1").nbytes == rows


def test_deltas_that_do_not_pay_become_bases_and_others_stay_deltas(tmp_path):
    """Most of the state is dense, so rows alone do not determine the cost of a chain."""

    def kinds(root: Path, dense: deltackpt.Dense) -> list[str]:
        rng = np.random.default_rng(0)
        state = {**dense_states.initial(), "large": jnp.asarray(rng.normal(size=300_000))}
        loop, found = Loop(state), []
        with opened(root, dense) as saver:
            for step in range(1, 9):
                loop.train()
                change = 1e-3 * rng.normal(size=300_000)
                loop.state = {**loop.state, "large": loop.state["large"] + change}
                found.append(loop.save(saver, step).kind)
        return found

    small = deltackpt.Dense(deltas="blocks", codec={"large": "ef4", **LOSSY})
    assert kinds(tmp_path / "small", small).count("base") == 1
    assert kinds(tmp_path / "exact", deltackpt.Dense(deltas="blocks")).count("base") > 2


def test_a_change_of_all_rows_does_not_force_all_dense_leaves_to_be_written(tmp_path):
    loop = Loop({**dense_states.initial(), "large": jnp.ones(1 << 20)})
    everything = jnp.arange(dense_states.ROWS)
    with opened(tmp_path) as saver:
        loop.save(saver, 1)
        loop.train()
        loop.state = {**loop.state, "emb": loop.state["emb"] + 1}
        loop.touched = deltackpt.touched.mark(loop.touched, {"emb": everything})
        assert loop.save(saver, 2).kind == "delta"
        dense_states.assert_exact(saver, loop.states)
