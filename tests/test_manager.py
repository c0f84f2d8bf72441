# SPDX-License-Identifier: Apache-2.0
"""The manager in a training loop: when it saves, what it reports, what it restores."""

from __future__ import annotations

import collections
import errno
import signal
import threading
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import model
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flat_options import manager_options

import deltackpt
from deltackpt import errors, events
from deltackpt.options import Timeouts
from deltackpt.save import pending_save
from deltackpt.session.catalog import Catalog
from deltackpt.session.saving import Saver
from deltackpt.session.step_reader import StepReader
from deltackpt.state import placement
from deltackpt.testing import failing_saves, paused_saves
from deltackpt.wal.recorder import Recorder

TABLES = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)


def manager(root: Path, handlers=None, event_handlers=(), **options) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": TABLES, **(handlers or {})},
        options=manager_options(**options),
        event_handlers=event_handlers,
    )


def saver_of(root: Path, tables: deltackpt.Tables, **given) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(root, handlers={"embeddings": tables}, **given)


@pytest.fixture
def state() -> dict:
    return model.initial()


@pytest.fixture
def marks(state) -> deltackpt.TouchState:
    return model.new_touched(state)


def saved_twice(saver, state, marks):
    """Saves steps 1 and 2; returns the state of step 2, and what training makes of it."""
    model.commit(saver, 1, state, touched=marks)
    last, marks = model.train(state, marks, 1)
    model.commit(saver, 2, last, touched=marks)
    return last, *model.train(last, marks, 2)


# Threads.


def test_several_threads_may_use_one_manager(tmp_path, state, marks):
    over, problems = threading.Event(), []

    def call(*methods) -> None:
        while not over.is_set():
            for method in methods:
                try:
                    method()
                except errors.StepNotFound:
                    pass  # Removed in the meantime.
                except BaseException as error:
                    problems.append(error)
                    over.set()

    with manager(tmp_path, max_to_keep=2) as saver:
        newest = saver.latest_step
        model.commit(saver, 0, state, touched=marks, metrics={"loss": 1.0})
        groups = [
            (saver.all_steps, saver.check_lease, saver.is_saving_in_progress),
            (lambda: saver.resume_step, lambda: saver.best_step("loss")),
            (lambda: saver.metrics(newest()), lambda: saver.custom_metadata(newest())),
            (lambda: saver.item_metadata(newest()), lambda: saver.reached_preemption(1000)),
            (saver.wait_until_finished, saver.check_for_errors, saver.recovery_points),
            (lambda: saver.read(newest(), {"tables/tiny": None}), lambda: saver.next_save(state)),
        ]
        threads = [threading.Thread(target=call, args=group) for group in groups]
        for thread in threads:
            thread.start()
        for step in range(1, 12):
            state, marks = model.train(state, marks, step)
            assert saver.save(step, state, touched=marks, metrics={"loss": 1.0}).kind is not None
        over.set()
        for thread in threads:
            thread.join(60)
        assert not problems and not any(thread.is_alive() for thread in threads)
        saver.wait_until_finished()
        assert saver.latest_step() == 11
        model.assert_same(saver.restore_latest(state).state, state)


def test_a_save_may_end_while_another_thread_queries_it(tmp_path, monkeypatch, state, marks):
    with manager(tmp_path) as saver:
        saver.save(0, state, touched=marks)
        reads = iter([saver._saver.in_flight])
        kind = type(saver._saver)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "in_flight", property(lambda _: next(reads, None)), raising=False)
            saver.is_saving_in_progress()


# Saves while another one is in flight.


def test_a_busy_writer_is_waited_for_by_default(tmp_path, state, marks):
    with manager(tmp_path) as saver, paused_saves(tmp_path) as held:
        saver.save(1, state, touched=marks)
        threading.Timer(0.2, held.release).start()
        state, marks = model.train(state, marks, 1)
        assert saver.save(2, state, touched=marks).kind == "delta"
        assert [report.step for report in saver.wait_until_finished()] == [1, 2]


def test_a_wait_has_a_limit_and_the_save_continues(tmp_path, state, marks):
    saver = manager(tmp_path, timeouts=Timeouts(save_secs=0.2, close_secs=0.2))
    with paused_saves(tmp_path) as held:
        saver.save(1, state, touched=marks)
        with pytest.raises(errors.WaitTimeout, match="timeouts"):
            saver.wait_until_finished()
        held.release()
        while saver.is_saving_in_progress():
            threading.Event().wait(0.01)
        assert saver.latest_step() == 1
    saver.close()


# Kinds of saves, and their reasons.


@pytest.mark.parametrize(
    ("policy", "longest"), [("OneShot", 2), ("Consecutive", 4), ("Intermittent", 4)]
)
def test_every_policy_reports_its_reason_and_restores_exactly(
    tmp_path, policy, longest, state, marks
):
    with manager(tmp_path, policy=getattr(deltackpt.policies, policy)(max_chain=3)) as saver:
        for step in range(1, 8):
            decided = saver.next_save(state, touched=marks)
            saved = saver.save(step, state, touched=marks)
            assert (saved.kind, saved.reason) == (decided.kind, decided.reason)
            assert saved.reason.startswith(saved.kind)
            saver.wait_until_finished()
            last, (state, marks) = state, model.train(state, marks, step)
        found = saver.restore_latest(last)
    assert len(found.chain) <= longest
    model.assert_same(found.state, last)


@pytest.mark.parametrize("call", ["save", "wait", "restore", "close"])
def test_a_call_from_an_event_handler_is_refused_and_loses_no_failure(tmp_path, call, state, marks):
    """It would run in the middle of the call that emits the event."""
    found: list[Exception] = []
    calls = {
        "save": lambda: saver.save(7, state, touched=marks),
        "wait": lambda: saver.wait_until_finished(),
        "restore": lambda: saver.restore_latest(state),
        "close": lambda: saver.close(),
    }

    def receive(_) -> None:
        try:
            calls[call]()
        except errors.ClosedError as error:
            found.append(error)
            raise

    with manager(tmp_path, event_handlers=(mock.Mock(receive=receive),)) as saver:
        saver.save(1, state, touched=marks, force_base=True)
        with pytest.warns(RuntimeWarning, match="by one of its event handlers"):
            saver.wait_until_finished()
        with failing_saves(tmp_path, errno.ENOSPC):
            saver.save(2, state, touched=marks, force_base=True)
            with (
                pytest.warns(RuntimeWarning),
                pytest.raises(errors.SaveFailed, match="step 2 failed"),
            ):
                saver.wait_until_finished()
        with pytest.warns(RuntimeWarning):
            model.commit(saver, 3, state, touched=marks)
        assert saver.all_steps() == [1, 3]
    assert len(found) == 3


#: Functions that calls of a manager run in the middle, on the training thread.
INSIDE = {
    "save": (pending_save, "capture"),
    "append": (Recorder, "append"),
    "restore": (StepReader, "find"),
    "read": (StepReader, "find"),
    "wait": (Saver, "wait"),
    "delete": (Catalog, "delete"),
    "close": (Saver, "wait_uploaded"),
}


@pytest.mark.parametrize("outer", INSIDE)
def test_a_call_from_a_signal_handler_in_another_call_is_refused(tmp_path, outer, state, marks):
    """The other call would wait for itself, or continue from what it has changed in half."""
    calls = {
        "save": lambda: saver.save(7, state, touched=marks),
        "append": lambda: saver.append(7, state, touched=marks),
        "restore": lambda: saver.restore_latest(state),
        "read": lambda: saver.read(2, {"tables/tiny": None}),
        "wait": lambda: saver.wait_until_finished(),
        "delete": lambda: saver.delete(1),
        "close": lambda: saver.close(),
    }
    found = []

    def handle(*_) -> None:
        for call in calls.values():
            with pytest.raises(errors.ClosedError, match="by a signal handler"):
                call()
        found.append(saver.all_steps())

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with manager(tmp_path, wal=deltackpt.WalOptions()) as saver:
            model.commit(saver, 1, state, touched=marks, force_base=True)
            model.commit(saver, 2, state, touched=marks, force_base=True)
            with model.before_first_call(
                *INSIDE[outer], lambda *_: signal.raise_signal(signal.SIGUSR1)
            ):
                calls[outer]()
            assert found == [[1, 2]]
            if outer != "close":
                model.commit(saver, 8, state, touched=marks)
                assert saver.restore_latest(state).step == 8
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_manager_that_a_signal_handler_opens_in_a_call_takes_over(tmp_path, state, marks):
    opened = []
    before = signal.signal(signal.SIGUSR1, lambda *_: opened.append(manager(tmp_path)))
    try:
        with manager(tmp_path) as saver:
            with (
                pytest.warns(UserWarning, match="by a signal handler"),
                pytest.raises(errors.FencedError),
                model.before_first_call(
                    pending_save, "capture", lambda *_: signal.raise_signal(signal.SIGUSR1)
                ),
            ):
                saver.save(1, state, touched=marks)
                saver.wait_until_finished()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with opened[0] as other:
        model.commit(other, 2, state, touched=marks)
        assert other.all_steps() == [2]


@pytest.mark.parametrize("snapshot", ["hold", "block"])
def test_a_loop_that_donates_its_state_corrupts_no_save(tmp_path, snapshot, state, marks):
    move = jax.jit(lambda tables: jax.tree.map(lambda x: x * 2, tables), donate_argnums=0)
    expected = {name: np.array(table) for name, table in state["tables"].items()}
    with manager(tmp_path, base_snapshot=snapshot) as saver:
        with paused_saves(tmp_path) as held:
            if snapshot == "block":
                held.release()
            saver.save(1, state, touched=marks)
            moved = {**state, "tables": move(state["tables"])}
            jax.block_until_ready(moved["tables"])
            held.release()
            saver.wait_until_finished()
        found = saver.restore_latest(moved)
    for name, table in expected.items():
        assert np.asarray(found.state["tables"][name]).tobytes() == table.tobytes()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_table_that_has_grown_between_runs_keeps_the_additional_rows_of_the_template(
    tmp_path, sharded
):
    tables = deltackpt.Tables(select="t", slots={"t": {"a": "a"}})
    old = {"t": jnp.arange(36.0).reshape(9, 4), "a": jnp.arange(9.0), "w": jnp.ones(2)}
    marks = deltackpt.touched.init({"t": old["t"]})
    with saver_of(tmp_path, tables) as saver:
        saver.save(1, old, touched=marks)
        old = {**old, "t": old["t"].at[3].set(-1.0)}
        saver.save(2, old, touched=deltackpt.touched.mark(marks, {"t": jnp.array([3])}))
    grown = {"t": jnp.full((16, 4), 7.0), "a": jnp.full(16, 8.0), "w": jnp.zeros(2)}
    if sharded:
        mesh = jax.make_mesh((8,), ("x",))
        by_rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
        whole = jax.sharding.NamedSharding(mesh, jax.P())
        grown = jax.device_put(grown, {"t": by_rows, "a": by_rows, "w": whole})
    with saver_of(tmp_path, tables) as saver:
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), grown)
        with pytest.raises(errors.TemplateMismatch, match="has grown, pass a template of arrays"):
            saver.restore_latest(abstract)
        found = saver.restore_latest(grown)
        assert found.state["t"].sharding == grown["t"].sharding
        np.testing.assert_array_equal(np.asarray(found.state["t"])[:9], old["t"])
        np.testing.assert_array_equal(np.asarray(found.state["t"])[9:], 7.0)
        np.testing.assert_array_equal(np.asarray(found.state["a"]), [*range(9), *[8.0] * 7])
        saved = saver.save(3, found.state, touched=found.touched)
        assert saved.kind == "delta", saved.reason
        saver.wait_until_finished()
        model.assert_same(saver.restore(3, found.state).state, found.state)


def test_a_template_that_is_sharded_along_other_axes_than_saves_is_refused(tmp_path):
    state = {"t": jnp.ones((16, 4, 8)), "a": jnp.ones((16, 2))}
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    with saver_of(tmp_path, deltackpt.Tables(select="t", slots={"t": {"a": "a"}})) as saver:
        model.commit(saver, 1, state)
        for name, spec in (("t", jax.P(None, None, "y")), ("a", jax.P("x", "y"))):
            leaf = jax.device_put(state[name], jax.sharding.NamedSharding(mesh, spec))
            with pytest.raises(errors.TemplateMismatch, match=r"as wide as its table, found"):
                saver.restore_latest({**state, name: leaf})


def test_a_state_that_is_sharded_along_other_axes_than_saves_is_refused_by_name(tmp_path):
    state = {"t": jnp.ones((16, 4, 8)), "a": jnp.ones((16, 2)), "b": jnp.ones((16, 4, 8))}
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    chosen = deltackpt.Tables(select="t", slots={"t": {"a": "a", "b": "b"}})
    with saver_of(tmp_path, chosen) as saver:
        for name, spec in (
            ("t", jax.P(None, None, "y")),
            ("b", jax.P("x", None, "y")),
            ("a", jax.P("x", "y")),
        ):
            leaf = jax.device_put(state[name], jax.sharding.NamedSharding(mesh, spec))
            with pytest.raises(
                errors.TableSelectionError, match=f"as their tables, found\n  {name}: "
            ):
                saver.save(1, {**state, name: leaf})
        model.commit(saver, 1, state)


def test_a_restore_with_more_rows_than_the_step_is_logged_once(tmp_path, caplog):
    tables = deltackpt.Tables(select="t", slots={"t": {"a": "a"}})
    state = {"t": jnp.ones((9, 4)), "a": jnp.ones(9), "w": jnp.ones(2)}
    grown = {"t": jnp.zeros((16, 4)), "a": jnp.zeros(16), "w": jnp.ones(2)}
    with saver_of(tmp_path, tables) as saver:
        model.commit(saver, 1, state)
        saver.restore(1, state)
        assert "more rows" not in caplog.text
        saver.restore_latest(grown)
        [record] = [one for one in caplog.records if one.name == "deltackpt.restore.placing"]
        assert record.levelname == "WARNING" and record.getMessage() == (
            "step 1: the template has more rows than the step: t (9 rows in the step, 16 in the "
            "template); the additional rows of each table and of its slots keep the values of the "
            "template"
        )
        caplog.clear()
        saver.read_state(1, {"t": grown["t"]})
        assert "t (9 rows in the step, 16 in the template)" in caplog.text


def test_a_restore_copies_only_the_shards_of_a_template_with_new_rows(tmp_path):
    copied, local_arrays = [], placement.local_arrays

    class Piece:
        def __init__(self, array):
            self.array = array

        def __array__(self, *arguments, **options):
            copied.append(self.array.shape)
            return np.asarray(self.array)

    def pieces_of(leaf):
        return {device: Piece(array) for device, array in local_arrays(leaf).items()}

    by_rows = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))
    with saver_of(tmp_path, deltackpt.Tables(select="t")) as saver:
        model.commit(saver, 1, {"t": jnp.ones((9, 4))})
        with mock.patch.object(placement, "local_arrays", pieces_of):
            found = saver.restore_latest({"t": jax.device_put(jnp.zeros((16, 4)), by_rows)})
        np.testing.assert_array_equal(np.asarray(found.state["t"]).sum(axis=1), [4] * 9 + [0] * 7)
    assert copied == [(2, 4)] * 4


# Other items, retention and metrics.


def test_orbax_items_are_saved_and_restored(tmp_path, state, marks):
    handlers = {"notes": ocp.JsonCheckpointHandler()}
    with manager(tmp_path, handlers) as saver:
        for step in (1, 2):
            items = {"notes": ocp.args.JsonSave({"epoch": step})}
            saver.save(step, state, touched=marks, items=items)
        saver.wait_until_finished()
        found = saver.restore_latest(state, items={"notes": ocp.args.JsonRestore()})
        assert found.items == {"notes": {"epoch": 2}}
        assert saver.restore(1, state).items == {}


@pytest.mark.parametrize("tracking", ["touched", "fingerprints"])
def test_a_loop_without_work_may_save_the_step_that_it_restored(tmp_path, tracking, state, marks):
    if tracking == "fingerprints":
        marks = None
    with manager(tmp_path, tracking=tracking) as saver:
        saver.save(10, state, touched=marks)
        saver.save(20, state, touched=marks)
    with manager(tmp_path, tracking=tracking) as saver:
        found = saver.restore_latest(state)
        touched = None if marks is None else found.touched
        saved = saver.save(20, found.state, touched=touched, force=True)
        assert saved.kind is None and "it was restored" in saved.reason
        assert saver.wait_until_finished() == []
        other = {"touched": touched}
        if touched is None:
            trained = {"tables": jax.tree.map(lambda table: table + 1, found.state["tables"])}
        else:
            trained = {}
            other["touched"] = deltackpt.touched.mark(touched, {"users": np.array([1])})
        for changed, options in (
            ({}, {"touched": touched, "metrics": {"loss": 1.0}}),
            ({}, {"touched": touched, "custom_metadata": {"a": 1}}),
            (trained, other),
            ({"step": found.state["step"] + 1}, {"touched": touched}),
            ({"dense": {"kernel": None, "none": None}}, {"touched": touched}),
        ):
            with pytest.raises(errors.OptionError, match="expected a step above 20"):
                saver.save(20, {**found.state, **changed}, **options)
        found = saver.restore(10, state)
        touched = None if marks is None else found.touched
        with pytest.raises(errors.OptionError, match="expected a step above 10"):
            saver.save(10, found.state, touched=touched)
        with pytest.warns(UserWarning, match="were moved to rolled-back"):
            assert saver.save(21, found.state, touched=touched).kind is not None


# Results of a restore.


def test_a_restore_reports_what_it_read_and_its_progress(tmp_path, state, marks):
    reported = []
    with manager(tmp_path) as saver:
        last, *_ = saved_twice(saver, state, marks)
        found = saver.restore_latest(last, progress=lambda *done: reported.append(done))
    assert (found.step, found.chain, found.skipped) == (2, (1, 2), ())
    assert found.source == ("directory",) * len(found.chain) and found.seconds > 0
    assert reported[-1][0] == reported[-1][1] == found.bytes_read
    assert reported == sorted(reported)


def test_chosen_tables_and_rows_are_read_without_the_rest(tmp_path, state, marks):
    with manager(tmp_path) as saver:
        last, state, marks = saved_twice(saver, state, marks)
        whole = saver.restore(2, last)
        piece = saver.read(2, {"tables/users": (100, 110), "tables/tiny": None})
        assert saver.save(3, state, touched=marks).kind == "delta"
    assert set(piece.tables) == {"tables/users", "tables/tiny"}
    assert np.array_equal(piece.tables["tables/users"]["values"], last["tables"]["users"][100:110])
    [slot] = set(piece.tables["tables/tiny"]) - {"values"}
    assert np.array_equal(piece.tables["tables/tiny"][slot], last["slots"]["tiny"])
    assert piece.bytes_read < whole.bytes_read / 5
    assert piece.step == 2 and piece.chain == whole.chain


def test_rows_that_do_not_exist_are_named(tmp_path, state, marks):
    with manager(tmp_path) as saver:
        model.commit(saver, 1, state, touched=marks)
        for tables, match in (
            ({"tables/none": None}, "no such table"),
            ({"tables/users": (0, 701)}, r"row range within \[0, 700\)"),
            ({"tables/users": (-1, 3)}, "row range"),
        ):
            with pytest.raises(errors.TemplateMismatch, match=match):
                saver.read(1, tables)
        for tables, match in (
            (["tables/users"], "expected a mapping"),
            ({"tables/users": 3}, "expected a row range"),
            ({"tables/users": [(0, 3)]}, "expected a row range"),
            ({"tables/users": (0, 3.5)}, "expected a row range"),
            ({"tables/users": (0, 3), "users": (5, 8)}, "found two of 'tables/users'"),
        ):
            with pytest.raises(errors.OptionError, match=match):
                saver.read(1, tables)


def test_dense_leaves_of_every_kind_are_restored(tmp_path):
    state = {
        "t": jnp.ones((4, 2)),
        "bf16": jnp.arange(3, dtype=jnp.bfloat16),
        "bool": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(2.5),
        "numpy": np.arange(4),
        "numpy scalar": np.float64(1.25),
        "int": 3,
        "float": 0.5,
        "key": jax.random.key(7),
        "none": None,
        "nested": [{"a": jnp.zeros(2)}, (jnp.ones(1), 4)],
    }
    with saver_of(tmp_path, deltackpt.Tables(select="t")) as saver:
        model.commit(saver, 1, state)
        found = saver.restore_latest(state).state
        abstract = jax.eval_shape(lambda: {"int": 3, "float": 0.5})
        numbers = saver.restore_latest({**state, **abstract}).state
    assert (numbers["int"], numbers["float"]) == (3, 0.5)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for (path, left), right in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(state), strict=True
    ):
        assert type(left) is type(right) or isinstance(right, jax.Array), path
        if isinstance(right, jax.Array) and jnp.issubdtype(right.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        assert np.asarray(left).dtype == np.asarray(right).dtype, path
        assert np.array_equal(left, right), path


# Lifecycle of a manager.


def test_a_reader_sees_steps_as_they_are_committed_and_writes_nothing(tmp_path, state, marks):
    with manager(tmp_path) as saver, manager(tmp_path, access="read") as reader:
        assert reader.latest_step() is None and reader.restore_latest(state) is None
        model.commit(saver, 1, state, touched=marks)
        assert reader.latest_step() == 1
        before = sorted(tmp_path.rglob("*"))
        model.assert_same(reader.restore_latest(state).state, state)
        with pytest.raises(errors.OptionError, match="access='read'"):
            reader.save(2, state)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("reads", ["restore_latest", "restore", "read", "read_state", "delete"])
@pytest.mark.parametrize("then", ["wait_until_finished", "check_for_errors", "save", "close"])
def test_a_failure_that_a_restore_or_a_read_encounters_is_raised_after_it(
    tmp_path, reads, then, state, marks
):
    saver = manager(tmp_path)
    model.commit(saver, 1, state, touched=marks)
    state, marks = model.train(state, marks, 1)
    with failing_saves(tmp_path, errno.ENOSPC):
        saver.save(2, state, touched=marks)
        with pytest.warns(UserWarning, match="the save of step 2 failed: .*file system full"):
            arguments = {"restore_latest": [state], "delete": [1], "read": [1, {"users": (0, 3)}]}
            found = getattr(saver, reads)(*arguments.get(reads, [1, state]))
            assert reads == "delete" or found.step == 1
    state, marks = model.train(state, marks, 2)
    with pytest.raises(errors.SaveFailed, match="step 2 failed: .*file system full") as caught:
        if then == "save":
            saver.save(3, state, touched=marks)
        else:
            getattr(saver, then)()
    assert (caught.value.saved is not None) == (then == "save")
    if then == "close":
        return
    saved = caught.value.saved or saver.save(3, state, touched=marks)
    # The failed save resets nothing; only a deleted parent makes the next save a base.
    assert saved.kind == ("base" if reads == "delete" else "delta")
    saver.check_for_errors()
    saver.wait_until_finished()
    model.assert_same(saver.restore_latest(state).state, state)
    saver.close()


def test_rows_that_cannot_be_copied_fail_their_save_once_and_the_next_one_covers_them(tmp_path):
    state, touched = model.start()
    received = []
    handler = mock.Mock(receive=received.append)
    with saver_of(tmp_path, TABLES, event_handlers=(handler,)) as manager:
        model.commit(manager, 0, state, touched=touched)
        state, touched = model.train(state, touched, 0)
        failure = RuntimeError("transfer failed")
        broken = mock.Mock(wait=mock.Mock(side_effect=[failure, *[None] * 9]))
        real = pending_save.capture

        def failing(*arguments):
            pending = real(*arguments)
            pending.rows = broken
            return pending

        with mock.patch.object(pending_save, "capture", failing):
            with pytest.raises(RuntimeError, match="transfer failed"):
                manager.save(1, state, touched=touched)
        assert manager.save(2, state, touched=touched).kind == "delta"
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2]
        model.assert_same(manager.restore_latest(state).state, state)
    failures = [event for event in received if isinstance(event, events.FailureEvent)]
    assert [(event.operation, event.step) for event in failures] == [("save", 1)]


def test_new_containers_and_new_slots_in_the_middle_of_a_run_make_a_base(tmp_path):
    table = jnp.ones((50, 4))
    tables = deltackpt.Tables(select="tables/*", slots={"**": {"acc": "opt/{name}"}})
    other = collections.namedtuple("other", "tables opt")
    touched = deltackpt.touched.init({"tables/a": table})
    with saver_of(tmp_path, tables) as manager:
        first = {"tables": {"a": table}, "opt": {"a": jnp.full((50, 4), 7.0)}}
        model.commit(manager, 0, first, touched=touched)
        state = other({"a": table}, {"a": jnp.zeros((50, 4))})
        assert manager.save(1, state, touched=touched).kind == "base"
        manager.wait_until_finished()
        assert float(manager.restore_latest(state).state.opt["a"][0, 0]) == 0.0


def test_several_processes_without_a_coordination_service_are_refused(tmp_path):
    with (
        mock.patch("deltackpt.coordination.process_count", return_value=2),
        pytest.raises(
            errors.OptionError, match=r"jax\.distributed\.initialize\(\).* found 2 processes"
        ),
    ):
        saver_of(tmp_path, deltackpt.Tables(select="*"))
    assert not [*tmp_path.iterdir()]
