# SPDX-License-Identifier: Apache-2.0
"""Bad input raises a typed error that names the problem and the remedy, and loses nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import jax
import jax.numpy as jnp
import model
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from flat_options import manager_options
from machine import required

import deltackpt
from deltackpt import cli, errors, inspect, touched
from deltackpt.handlers import v1
from deltackpt.integrations import loop

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


def manager(root: Path, handlers=None, **options) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root, handlers=handlers or HANDLERS, options=manager_options(**options)
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict]:
    """A base and a delta, and the state of the delta."""
    root = tmp_path_factory.mktemp("bad") / "root"
    state, marks = model.start()
    with manager(root) as saver:
        saver.save(1, state, touched=marks)
        state, marks = model.train(state, marks, 1)
        saver.save(2, state, touched=marks)
    return root, state


@pytest.fixture
def copied(written, tmp_path) -> tuple[Path, dict]:
    """A copy of the same, to be damaged."""
    root, state = written
    shutil.copytree(root, tmp_path / "root")
    return tmp_path / "root", state


def with_table(state: dict, name: str, table) -> dict:
    return {**state, "tables": {**state["tables"], name: table}}


def halves() -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))


# Templates.


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (
            lambda state: {
                **with_table(state, "users", jnp.zeros((699, 8))),
                "slots": {**state["slots"], "users": jnp.zeros(699)},
            },
            r"step 2, table tables/users.*expected .*699.* as in the template.*.*700.* in the step",
        ),
        (
            lambda state: with_table(state, "users", jnp.zeros((700, 9))),
            r"tables/users.*\[700, 9\].*\[700, 8\]",
        ),
        (
            lambda state: with_table(state, "users", jnp.zeros((700, 8), jnp.bfloat16)),
            r"tables/users.*bfloat16.*float32",
        ),
        (
            lambda state: {
                **state,
                "tables": {k: v for k, v in state["tables"].items() if k != "tiny"},
                "slots": {k: v for k, v in state["slots"].items() if k != "tiny"},
            },
            r"tables/tiny.*no such array",
        ),
        (
            lambda state: {**state, "slots": {**state["slots"], "users": jnp.zeros((700, 2))}},
            r"slots/users, a slot of table tables/users: expected.*\[700, 2\].*\[700\]",
        ),
        (
            lambda state: with_table(
                state, "tiny", jax.ShapeDtypeStruct((5, 4), jnp.float32, sharding=halves())
            ),
            r"found others at\n +tables/tiny\n.*partitioned 2 times, but the dimension size is 5",
        ),
    ],
    ids=["rows", "width", "dtype", "missing table", "slot", "sharding"],
)
def test_a_template_mismatch_names_both_sides(written, spoil, match):
    root, state = written
    template = spoil(state)
    slots = {path: choice for path, choice in model.SLOTS.items()}
    if "tiny" not in template["tables"]:
        del slots["tables/tiny"]
    handlers = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=slots)}
    with manager(root, handlers, access="read") as reader:
        with pytest.raises(errors.TemplateMismatch, match=match):
            reader.restore_latest(template)
        assert reader.restore_latest().step == 2


def test_a_leaf_with_a_sharding_and_without_a_shape_is_not_a_table(written):
    root, state = written
    with manager(root, access="read") as reader:
        template = with_table(state, "tiny", ocp.ArrayRestoreArgs(sharding=halves()))
        with pytest.raises(errors.TableSelectionError, match="tables/tiny is a ArrayRestoreArgs"):
            reader.restore_latest(template)


def optax_state(tables=("items", "users"), optimizer=None) -> dict:
    optimizer = optimizer or optax.adagrad(0.1)
    params = {"tables": {name: jnp.ones((50, 4)) for name in tables}, "w": jnp.ones(3)}
    return {"params": params, "opt_state": optimizer.init(params)}


@pytest.mark.parametrize(
    ("template", "first", "only_template", "only_step"),
    [
        (optax_state(["ads", "items", "users"]), "table params/tables/ads", ["tables/ads"], []),
        (optax_state(["users"]), "table params/tables/items", [], ["tables/items"]),
        (
            optax_state(["items", "people"]),
            "table params/tables/people",
            ["tables/people"],
            ["tables/users"],
        ),
        (
            optax_state(optimizer=optax.sgd(0.1, momentum=0.9)),
            "opt_state/0/sum_of_squares/tables/items, a slot of table params/tables/items",
            ["opt_state/0/trace/tables/items", "opt_state/0/trace/w: a dense leaf"],
            ["opt_state/0/sum_of_squares/w: a dense leaf"],
        ),
        ({**optax_state(), "extra": jnp.ones(2)}, "dense leaf extra", [], []),
    ],
    ids=["new table", "table that is gone", "rename", "new optimizer", "new dense leaf"],
)
def test_a_template_with_other_leaves_names_the_leaves_of_each_side_and_the_remedy(
    tmp_path, template, first, only_template, only_step
):
    handlers = {"embeddings": deltackpt.Tables(select="params/tables/*")}
    state = optax_state()
    with manager(tmp_path, handlers) as saver:
        saver.save(7, state)
    with manager(tmp_path, handlers, access="read") as reader:
        with pytest.raises(errors.TemplateMismatch) as raised:
            reader.restore_latest(template)
        headline, *rest = str(raised.value).splitlines()
        assert headline.startswith(f"step 7, {first}: expected ")
        assert " as in the template, found " in headline
        assert "read_state(7, template)" in headline
        found = "\n".join(rest)
        of_template, _, of_step = found.partition("only the step has")
        assert all(name in of_template for name in only_template), found
        assert all(name in of_step for name in only_step), found
        # The remedy in the message works.
        read = reader.read_state(7, template)
        assert bool(read.missing) == ("only the template has" in found or "extra" in first)


def test_params_that_do_not_fit_their_optimizer_state_are_named(tmp_path):
    def state(width: int) -> dict:
        return {"tables": {"users": jnp.zeros((100, 4))}, "w": jnp.zeros(width)}

    optimizer = optax.adagrad(0.1)
    tables = {"embeddings": deltackpt.Tables(select="params/tables/*")}
    with manager(tmp_path, tables) as saver:
        saver.save(1, {"params": state(8), "opt_state": optimizer.init(state(8))})
        saver.wait_until_finished()
        template = {"params": state(9), "opt_state": optimizer.init(state(8))}
        with pytest.raises(errors.TemplateMismatch) as caught:
            saver.restore(1, template)
    assert "initialize the optimizer state from these params" in str(caught.value)
    assert "slot.opt_state/0/sum_of_squares/tables as in the template" in str(caught.value)


def test_a_step_that_does_not_exist_is_named(written):
    root, state = written
    with manager(root, access="read") as reader:
        with pytest.raises(errors.StepNotFound, match=r"root/7.*all_steps"):
            reader.restore(7, state)


# Saves.


DONATED = jnp.int32(3)
DONATED.delete()
NO_STEPS = [3.0, -1, 1 << 63, True, "3", None, np.float32(3), np.array([3]), DONATED]


@pytest.mark.parametrize("step", NO_STEPS, ids=lambda step: type(step).__name__)
def test_an_invalid_step_is_refused_at_once_and_nothing_is_committed(tmp_path, step):
    state = model.initial()
    with manager(tmp_path) as saver:
        for call in (
            lambda: saver.save(step, state),
            lambda: saver.save_if_due(step, state),
            lambda: saver.reached_preemption(step),
            lambda: saver.restore(step, state),
        ):
            with pytest.raises(errors.OptionError, match="step: expected an integer from 0 to"):
                call()
        saver.save(0, state)
    assert inspect.open(tmp_path).steps == [0]
    if step is not None:  # None means the newest step there.
        with pytest.raises(errors.OptionError, match="step: expected an integer"):
            inspect.open(tmp_path).at(step)


def test_a_traced_step_is_refused(tmp_path):
    with manager(tmp_path) as saver, pytest.raises(errors.OptionError, match="outside of jit"):
        jax.jit(lambda step: saver.reached_preemption(step))(3)


def test_a_loop_and_a_directory_of_stock_orbax_accept_the_same_steps(tmp_path):
    state = {"emb": jnp.ones((4, 2))}
    emb = deltackpt.Tables(select="emb")
    with loop.LoopCheckpoints(tmp_path, tables=emb, every_steps=1) as saves:
        for call in (saves.after_step, saves.save):
            with pytest.raises(errors.OptionError, match="step: expected an integer"):
                call(2.0, state)
        assert saves.after_step(jnp.int32(2), state).step == 2
    with pytest.raises(errors.OptionError, match="step: expected an integer"):
        v1.step_number(tmp_path / str(1 << 63))


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.array, jnp.int32, jnp.array])
def test_an_integer_of_any_kind_is_a_step(tmp_path, kind):
    """For example, ``TrainState.step`` of Flax is a JAX array."""
    state = model.initial()
    with manager(tmp_path) as saver:
        saved = saver.save(kind(7), state)
        [report] = saver.wait_until_finished()
        restored = saver.restore(kind(7), state)
        assert saver.save_if_due(kind(8), state) is None
    for step in (saved.step, report.step, restored.step, *restored.chain):
        assert type(step) is int and step == 7
    assert inspect.open(tmp_path).at(kind(7)).step == 7


def test_the_largest_step_is_saved_and_listed(tmp_path):
    state, largest = model.initial(), (1 << 63) - 1
    with manager(tmp_path) as saver:
        saver.save(largest, state)
    with manager(tmp_path) as saver:
        assert saver.restore_latest(state).step == largest


def test_the_command_line_refuses_a_step_beyond_64_bits(written):
    found = CliRunner().invoke(cli.cli, ["show", str(written[0]), str(1 << 63)])
    assert found.exit_code == 2 and "is not in the range 0<=x<=9223372036854775807" in found.output
    found = CliRunner().invoke(cli.cli, ["show", str(written[0]), "latest"])
    assert found.exit_code == 2 and "'latest' is not a valid step number" in found.output


def test_arguments_of_orbax_s_manager_are_refused_with_the_call_to_make(written, tmp_path):
    root, state = written
    with manager(tmp_path) as saver:
        for call in (saver.save, saver.save_if_due, saver.append):
            match = rf"{call.__name__}\(step, state\): .* found StandardSaveArgs;"
            with pytest.raises(errors.OptionError, match=match):
                call(1, ocp.args.StandardSave(state))
    with manager(root, access="read") as reader:
        for read in (reader.restore_latest, lambda state: reader.restore(1, state)):
            with pytest.raises(
                errors.OptionError, match="found StandardRestoreArgs; pass the state"
            ):
                read(ocp.args.StandardRestore(state))
        with pytest.raises(errors.OptionError, match=r"tables: .* found \['users'\]; pass e.g."):
            reader.read(1, ["users"])


def test_a_file_in_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(errors.StorageError, match="expected a directory, found a file"):
            manager(path)


def test_a_state_without_tables_is_saved_as_bases_that_report_why(tmp_path):
    with manager(tmp_path, {"embeddings": deltackpt.Tables(select=())}) as saver:
        saved = [saver.save(step, {"w": jnp.ones(3)}) for step in (1, 2)]
        shown = repr(saver)
        assert saver.directory == tmp_path
    reasons = ["base: no committed save to build on", "base: the state has no tables"]
    assert [one.reason for one in saved] == reasons
    assert shown == f"<CheckpointManager of {tmp_path}, open>" and "closed" in repr(saver)


@pytest.mark.parametrize(
    ("select", "match"),
    [("embeddings/*", "tables/users"), ("key", "key"), (lambda path, leaf: False, "tables/users")],
    ids=["matches nothing", "no table", "predicate"],
)
def test_an_impossible_selection_lists_the_paths(tmp_path, select, match):
    handlers = {"embeddings": deltackpt.Tables(select=select)}
    with (
        manager(tmp_path, handlers) as saver,
        pytest.raises(errors.TableSelectionError, match=match),
    ):
        saver.save(1, model.initial())


@pytest.mark.parametrize(
    ("marks", "match"),
    [
        (
            {"tables/users": (699,), "tables/items": (300,), "tables/tiny": (5,)},
            r"tables/users.*700.*699|tables/users.*699.*700",
        ),
        ({"tables/users": (700,), "tables/others": (3,)}, "tables/"),
        ({"tables/users": (700,)}, "tables/items"),
    ],
    ids=["rows", "unknown table", "missing table"],
)
def test_a_touch_state_of_other_tables_is_refused_and_nothing_is_lost(copied, marks, match):
    root, state = copied
    wrong = touched.init({name: jnp.zeros((*rows, 8)) for name, rows in marks.items()})
    with manager(root) as saver:
        found = saver.restore_latest(state)
        with pytest.raises(errors.TrackingError, match=match):
            saver.save(3, state, touched=wrong)
        moved, good = model.train(found.state, found.touched, 5)
        assert saver.save(3, moved, touched=good).kind == "delta"
        saver.wait_until_finished()
        model.assert_same(saver.restore_latest(moved).state, moved)


def test_a_codec_of_blocks_is_refused_if_nothing_is_stored_as_blocks():
    dense = deltackpt.Dense(codec={"w": "ef8"})
    with pytest.raises(errors.OptionError, match="Dense.codec: .* pass deltas='blocks'"):
        deltackpt.ManagerOptions(dense=dense)
    deltackpt.ManagerOptions(dense=dense, wal=deltackpt.WalOptions(dense="delta"))
    deltackpt.ManagerOptions(dense=deltackpt.Dense(codec={}))


@pytest.mark.parametrize(
    "options",
    [
        {"durability": "disk"},
        {"when_busy": "drop"},
        {"base_snapshot": "copy"},
        {"max_to_keep": 0},
        {"staging_bytes": 0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_out_of_range_is_named(tmp_path, options):
    with pytest.raises(errors.OptionError, match=f"{next(iter(options))}: expected .* found"):
        manager(tmp_path, **options)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        *(
            (lambda one=one: deltackpt.policies.OneShot(max_chain=one), "max_chain")
            for one in (0, "9")
        ),
        (lambda: deltackpt.policies.Consecutive(max_delta_ratio=None), "max_delta_ratio"),
        (lambda: deltackpt.Dense(deltas="blocks", codec={1: "ef4"}), "codec"),
        *(
            (lambda name=name, given=given: deltackpt.Tables("*", **{name: given}), name)
            for name, given in (
                ("always", 5),
                ("always", [5]),
                ("slots", {"*": None}),
                ("slots", {"*": {5: "slots"}}),
                ("slots", {"*": {"m": 5}}),
                ("slots", {1: {"m": "slots"}}),
                ("key", {"*": 5}),
                ("key", {1: "keys"}),
                ("codec", {1: "raw"}),
                ("slot_codec", {1: "raw"}),
                ("stacks", None),
            )
        ),
    ],
)
def test_an_option_of_another_kind_is_named_when_it_is_given(make, option):
    with pytest.raises(errors.OptionError, match=f"{option}: expected .* found"):
        make()


def test_the_error_without_tables_names_the_default_ones(tmp_path):
    with pytest.raises(errors.OptionError, match="without handlers, the tables are"):
        deltackpt.CheckpointManager(tmp_path, handlers={"notes": ocp.JsonCheckpointHandler()})


def test_tables_take_their_pattern_by_position():
    assert deltackpt.Tables("params/*").select == "params/*"
    with pytest.raises(TypeError):
        deltackpt.Tables("params/*", {})  # type: ignore[reportCallIssue]


@pytest.mark.parametrize(
    "handlers",
    [
        {},
        {"a": ocp.JsonCheckpointHandler()},
        {"a": deltackpt.Tables(select="x"), "b": deltackpt.Tables(select="y")},
        {"a": deltackpt.Tables(select="x"), "dense": ocp.JsonCheckpointHandler()},
        {"a": deltackpt.Tables(select="x"), "b": object()},
        {"a": deltackpt.Tables(select="x"), "b": ocp.JsonCheckpointHandler},
    ],
    ids=["none", "no tables", "two tables", "dense is taken", "no handler", "a class"],
)
def test_invalid_handlers_are_named(tmp_path, handlers):
    if not handlers:
        handlers = {"notes": ocp.JsonCheckpointHandler()}
    with pytest.raises(errors.OptionError, match="handlers.*expected.*found"):
        deltackpt.CheckpointManager(tmp_path, handlers=handlers)


def test_a_forked_child_must_create_its_own_manager(tmp_path):
    saver = manager(tmp_path)
    pid = saver._lifetime._pid
    try:
        saver._lifetime._pid = pid + 1  # As in a child; a real fork with threads is unsafe.
        with pytest.raises(errors.ClosedError, match="create a manager in the child"):
            saver.save(1, model.initial())
    finally:
        saver._lifetime._pid = pid
        saver.close()


# Directories.


@pytest.mark.parametrize("how", ["version", "feature"])
def test_a_newer_format_is_refused_and_no_older_step_is_restored_instead(copied, how):
    root, state = copied
    path = root / "2" / "embeddings" / "manifest.0.msgpack"
    head = msgpack.unpackb(path.read_bytes())
    body = msgpack.unpackb(head["body"])
    if how == "version":
        head["version"] += 1
        body["format_version"] += 1
    else:
        body["features"] = ["telepathy"]
    head["body"] = msgpack.packb(body)
    head["crc32c"] = google_crc32c.value(head["body"])
    path.write_bytes(msgpack.packb(head))
    with manager(root, access="read") as reader:
        for call in (lambda: reader.restore(2, state), lambda: reader.restore_latest(state)):
            with pytest.raises(errors.FormatTooNew, match="install a newer deltackpt"):
                call()
        assert reader.restore(1, state).step == 1


def in_a_process_of_its_own(body: str, place: Path) -> None:
    """Runs a function of this module in a new process that skips its exit handlers.

    If a step's directory cannot be created, threads of Orbax 0.12.8 wait five minutes for it,
    even at the end of the process.
    """
    code = f"import os, test_bad_input as t; t.{body}(t.Path({str(place)!r})); os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


@contextlib.contextmanager
def tmpfs(place: Path, options: str) -> Iterator[Path]:
    """Mounts a tmpfs; skips the test if that fails."""
    required(os.geteuid() == 0, "mounting a tmpfs needs root")
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
    )
    required(not done.returncode, f"a tmpfs is needed: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.processes
def test_a_full_disk_raises_out_of_space_and_loses_nothing_once_space_is_freed(tmp_path):
    with tmpfs(tmp_path / "small", "size=1m") as place:
        in_a_process_of_its_own("fill_the_disk", place)


def fill_the_disk(place: Path) -> None:
    state, filler = model.initial(), np.zeros(300 << 10, np.uint8)
    marks = model.new_touched(state)
    ballast = place / "ballast"
    with manager(place / "root") as saver:
        model.commit(saver, 1, state, touched=marks)
        first = state
        state, marks = model.train(state, marks, 1)
        ballast.write_bytes(filler.tobytes())
        with contextlib.suppress(OSError):
            while True:
                with open(ballast, "ab") as file:
                    file.write(bytes(4096))
        with pytest.raises((errors.OutOfSpace, errors.SaveFailed), match=r"full|room") as caught:
            model.commit(saver, 2, state, touched=marks)
        assert "no touched row is lost" in str(caught.value)
        assert saver.all_steps() == [1]
        ballast.unlink()
        state, marks = model.train(state, marks, 2)
        assert saver.save(3, state, touched=marks).kind == "delta"
        saver.wait_until_finished()
        model.assert_same(saver.restore_latest(state).state, state)
        model.assert_same(saver.restore(1, state).state, first)


@pytest.mark.processes
def test_a_file_system_that_turns_read_only_fails_the_save_and_keeps_the_rest(tmp_path):
    with tmpfs(tmp_path / "disk", "size=16m") as place:
        in_a_process_of_its_own("turn_read_only", place)


def turn_read_only(place: Path) -> None:
    state, marks = model.start()
    with manager(place / "root") as saver:
        model.commit(saver, 1, state, touched=marks)
        first = state
        state, marks = model.train(state, marks, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        try:
            with pytest.raises((errors.StorageError, errors.SaveFailed), match="Read-only"):
                model.commit(saver, 2, state, touched=marks)
            with manager(place / "root", access="read") as reader:
                model.assert_same(reader.restore_latest(first).state, first)
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        state, marks = model.train(state, marks, 2)
        with contextlib.suppress(errors.SaveFailed):
            saver.wait_until_finished()
        assert saver.save(3, state, touched=marks).kind == "delta"
        saver.wait_until_finished()
        model.assert_same(saver.restore_latest(state).state, state)
