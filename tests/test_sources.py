# SPDX-License-Identifier: Apache-2.0
"""Restores whose tables do not come from storage."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import deltackpt
from deltackpt.errors import DamagedKeys, ServiceUnavailable
from deltackpt.reading import chains, reader
from deltackpt.session.step_reader import StepReader

HANDLERS = {"embeddings": deltackpt.Tables(select="tables/*")}


def state(value: float) -> dict[str, Any]:
    return {"tables": {"words": np.full((64, 4), value, np.float32)}, "bias": np.full(3, value)}


def save(root: Path, step: int, value: float) -> None:
    """Saves a step in a new run; an existing one is rolled back."""
    with deltackpt.CheckpointManager(root, handlers=HANDLERS) as manager:
        steps = [found for found in manager.all_steps() if found < step]
        if steps:
            manager.restore(steps[-1])
        manager.save(step, state(value))
        manager.wait_until_finished()


class Source:
    """Reads storage, and calls a hook before or after it."""

    def __init__(self, before: Any = None, after: Any = None):
        self.before, self.after = before, after

    @contextlib.contextmanager
    def tables(self, save, wanted, *, timeout_secs):
        assert timeout_secs == deltackpt.Timeouts().service_secs
        if self.before is not None:
            self.before()
        found = reader.restore_tables(chains.read_chain(save.step_dir, save.item), wanted=wanted)
        if self.after is not None:
            self.after()
        yield found


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_step_that_is_replaced_while_it_is_restored_is_never_mixed(tmp_path, moment):
    root = tmp_path / "root"
    save(root, 0, 0.0)
    save(root, 1, 1.0)
    replaced = []

    def replace() -> None:
        if not replaced:
            replaced.append(True)
            save(root, 1, 2.0)

    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        # The step that replaced it is restored: nothing is skipped. The inner manager's warning is
        # issued when this call ends.
        with pytest.warns(UserWarning, match="moved"):
            found = manager.restore_latest(state(0.0), service=Source(**{moment: replace}))
    assert found is not None and replaced and found.skipped == ()
    values = {float(leaf.max()) for leaf in (found.state["tables"]["words"], found.state["bias"])}
    assert len(values) == 1, values


def test_a_failed_source_is_reported_and_keeps_nothing_alive(tmp_path):
    save(tmp_path, 0, 3.0)
    kept = []

    def fail() -> None:
        buffer = np.zeros(1000)
        kept.append(weakref.ref(buffer))
        raise ServiceUnavailable("expected rows, found none; restore from storage")

    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS) as manager:
        found = manager.restore_latest(state(0.0), service=Source(before=fail))
    assert ({*found.source}, str(found.service_error)[:13]) == ({"directory"}, "expected rows")
    np.testing.assert_array_equal(found.state["tables"]["words"], state(3.0)["tables"]["words"])
    gc.collect()
    assert kept[0]() is None


def test_storage_is_read_after_any_error_of_a_source(tmp_path):
    save(tmp_path, 0, 3.0)

    def fail() -> None:
        raise KeyError("words")

    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS) as manager:
        found = manager.restore_latest(jnp_state(), service=Source(before=fail))
    assert {*found.source} == {"directory"} and "KeyError" in str(found.service_error)


def jnp_state() -> dict[str, Any]:
    return {"tables": {"words": jnp.zeros((64, 4), jnp.float32)}, "bias": np.zeros(3)}


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_reads_the_ids_of_others_from_the_source_too(tmp_path, fails):
    tables = deltackpt.Tables(select="tables/*", key="keys/{name}")
    rows = NamedSharding(jax.make_mesh((4,), ("rows",)), PartitionSpec("rows"))
    sharded = {"words": np.ones((64, 4), np.float32)}, {"words": np.arange(64, dtype=np.int32)}
    state = dict(zip(("tables", "keys"), jax.device_put(sharded, rows)))
    asked = []

    class Keyed(Source):
        @contextlib.contextmanager
        def tables(self, save, wanted, *, timeout_secs, files=True):
            asked.append((files, sorted(wanted["tables/words"])))
            with super().tables(save, wanted, timeout_secs=timeout_secs) as found:
                if not files:
                    if fails:
                        raise ServiceUnavailable("expected rows, found none")
                    [column] = found.buffers["tables/words"]["slot.key"].values()
                    column[63] = column[5]
                yield found

    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as manager:
        manager.save(1, state)
        manager.wait_until_finished()
        # It checks the ids of the only table, as the first of two processes would.
        with mock.patch.object(StepReader, "_share", (0, 2)):
            if fails:  # Storage has the ids.
                assert manager.restore(1, state, service=Keyed()).step == 1
            else:
                with pytest.raises(DamagedKeys, match="in rows 5 and 63"):
                    manager.restore(1, state, service=Keyed())
    (with_files, fields), (without_files, columns) = asked
    assert with_files and "values" in fields and not without_files and len(columns) == 1
