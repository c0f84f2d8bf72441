# SPDX-License-Identifier: Apache-2.0
"""Steps whose dense leaves are blocks: compacted, exported, copied, looked at, verified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import command
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import servers

import deltackpt
from deltackpt import inspect, interchange
from deltackpt.errors import Damaged, OptionError, OutOfSpace, RestoreError
from deltackpt.format import names
from deltackpt.reading import chains, dense_values, dense_work, orbax_values, removal
from deltackpt.reading import saves as stored
from deltackpt.storage import ocdbt
from deltackpt.tiers import copy as copying
from deltackpt.upkeep import collect, compact, doctor, estimate, fold_dense, verify
from deltackpt.upkeep.unneeded import Retention

HANDLERS = {"embeddings": deltackpt.Tables(select="emb")}
CODECS = {"params/w": "ef4", "params/v": "ef8", "nu": "int8"}
STEPS = (1, 2, 3, 4, 5)


def options(**how) -> deltackpt.ManagerOptions:
    dense = deltackpt.Dense(deltas="own", codec=CODECS)
    writes = deltackpt.WriteOptions(durability="process")
    return deltackpt.ManagerOptions(dense=dense, writes=writes, **how)


def initial() -> dict:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    return {
        "emb": normal(50, 8),
        "params": {
            "w": normal(60, 70),
            "v": normal(40, 50),
            "exact": normal(33, 47),
            "half": normal(64, 100).astype(jnp.bfloat16),
            "bias": normal(70),
        },
        "frozen": normal(100, 30),
        "nu": jnp.abs(normal(60, 70)),
        "ids": jnp.arange(5000),
        "count": jnp.zeros((), jnp.int32),
        "key": jax.random.key(7),
        "name": "a text",
        "nothing": None,
    }


def trained(state: dict, step: int) -> dict:
    """The state after a step that leaves ``frozen`` and most bits of ``half`` as they are."""
    rng = np.random.default_rng(step)
    params = dict(state["params"])
    for name in ("w", "v", "exact"):
        params[name] = params[name] + 1e-3 * rng.normal(size=params[name].shape).astype(np.float32)
    half = np.array(params["half"])
    half.reshape(-1)[rng.integers(0, half.size, 60)] += 0.25
    params["half"] = jnp.asarray(half)
    return {
        **state,
        "params": params,
        "nu": state["nu"] * 0.99,
        "ids": state["ids"].at[step].add(1),
        "count": state["count"] + 1,
        "key": jax.random.fold_in(state["key"], step),
        "emb": state["emb"].at[step].add(1.0),
    }


def marked(touched, step: int):
    return deltackpt.touched.mark(touched, {"emb": jnp.array([step])})


def write(root: Path, steps=STEPS, **how) -> dict[int, dict]:
    """Saves a base and deltas; what each step was given."""
    state = initial()
    touched = deltackpt.touched.init({"emb": state["emb"]})
    found = {}
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options(**how)) as one:
        for step in steps:
            one.save(step, state, touched=touched)
            one.wait()
            found[step] = state
            state = trained(state, step)
            touched = marked(touched, step)
    return found


@pytest.fixture(scope="module")
def _written(tmp_path_factory):
    root = tmp_path_factory.mktemp("written") / "run"
    return root, write(root)


@pytest.fixture
def written(_written, tmp_path):
    """A base and four deltas, and what was saved."""
    root, states = _written
    shutil.copytree(root, tmp_path / "run")
    return tmp_path / "run", states


def bits(tree) -> list[bytes]:
    def of(leaf) -> bytes:
        if isinstance(leaf, str):
            return leaf.encode()
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes()

    return [of(leaf) for leaf in jax.tree.leaves(tree)]


def restored(root: Path, step: int, template=None) -> list[bytes]:
    how = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=how) as one:
        return bits(one.restore(step, template).state)


def values(root: Path, step: int, **how) -> tuple[dict[str, bytes], dict[str, bytes]]:
    found = dense_values.of_step(chains.read_chain(root / str(step), **how))
    return (
        {key: bytes(value) for key, value in found.values.items()},
        {key: bytes(value) for key, value in found.files.items()},
    )


def chain(root: Path, step: int) -> list[str]:
    return [save.name for save in chains.read_chain(root / str(step))]


def fold(root: Path, step: int, **how):
    return compact.compact(root, step=step, **{"memory_bytes": 64 << 20, **how})


def _as_numpy(leaf) -> ocp.RestoreArgs:
    kind = np.ndarray if isinstance(leaf, ocp.metadata.ArrayMetadata) else None
    return ocp.RestoreArgs(restore_type=kind)


def by_orbax(path: Path):
    """A pytree as stock Orbax reads it, as numpy arrays."""
    with ocp.PyTreeCheckpointer() as one:
        kinds = one.metadata(path).item_metadata.tree
        args = jax.tree.map(_as_numpy, kinds)
        return one.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))


def test_deltas_have_no_item_of_orbax(written):
    root, states = written
    assert (root / "1/dense").is_dir() and not (root / "2/dense").exists()
    found = restored(root, 5, states[5])
    assert len(found) == len(bits(states[5])) and found != bits(states[5]), "some codes are lossy"


# Compaction.


@pytest.mark.parametrize("workers", [1, 3])
def test_a_compacted_base_has_orbax_s_item_with_the_bits_of_the_chain(written, workers):
    root, states = written
    before = {step: values(root, step) for step in STEPS}
    state = {step: restored(root, step, states[step]) for step in STEPS}
    done = fold(root, 4, workers=workers)
    assert done is not None and done.deltas == 3
    assert done.bytes_written > sum(len(value) for value in before[4][0].values())
    assert chain(root, 4) == ["compacted/4/embeddings"]
    for step in (1, 2, 3):
        shutil.rmtree(root / str(step))
    for step in (4, 5):
        assert values(root, step) == before[step]
        assert restored(root, step, states[step]) == state[step]
    # Stock Orbax reads the item as that of any other step.
    tree = by_orbax(root / "compacted/4/embeddings/dense")
    for name, leaf in tree["params"].items():
        assert leaf.dtype == states[4]["params"][name].dtype
        assert leaf.tobytes() in state[4], name


def test_a_base_is_compacted_in_pieces_that_fit_into_the_memory(written):
    root, states = written
    before, state = values(root, 5), restored(root, 5, states[5])
    with mock.patch.object(fold_dense, "_READ_BYTES", (12 << 20) - (100 << 10)):
        assert fold(root, 5, memory_bytes=12 << 20, workers=1) is not None
    item = root / "compacted/5/embeddings/dense"
    assert (item / "ocdbt.process_1").is_dir(), "several pieces"
    assert values(root, 5) == before
    assert restored(root, 5, states[5]) == state
    assert compact.compact(root, step=5) is None


def test_memory_that_does_not_suffice_is_refused_before_anything_is_read(written):
    root, _ = written
    with (
        mock.patch.object(fold_dense, "_READ_BYTES", 1 << 30),
        pytest.raises(OptionError, match="at least 1,07"),
    ):
        fold(root, 5)
    with (
        mock.patch.object(compact.files, "free_bytes", lambda path: 4000),
        pytest.raises(OutOfSpace, match="expected room for"),
    ):
        fold(root, 5)


def test_a_compacted_base_is_folded_again_and_deltas_go_on_from_it(written):
    root, states = written
    fold(root, 3)
    for step in (1, 2, 3):
        shutil.rmtree(root / str(step))
    before = values(root, 5)
    assert fold(root, 5).deltas == 2
    assert values(root, 5) == before
    shutil.rmtree(root / "compacted/3")
    shutil.rmtree(root / "4")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options()) as one:
        found = one.restore(5, states[5])
        state = trained(found.state, 5)
        saved = one.save(6, state, touched=marked(found.touched, 5))
        one.wait()
        assert saved.kind == "delta"
    assert chain(root, 6) == ["compacted/5/embeddings", "6/embeddings"]
    record = stored.read_save(root / "6").head.dense_blocks
    assert record is not None
    used = {one.codec for segment in record.segments for one in segment.encodings}
    assert {"ef4", "ef8", "sparse"} <= used, "what the base decodes to is their reference"
    found = restored(root, 6, state)
    assert all(bits(state["params"][name])[0] in found for name in ("exact", "half", "bias"))


def test_retention_keeps_a_compacted_base_and_its_item(tmp_path):
    root = tmp_path / "run"
    how = {
        "retention": 1,
        "deltas": deltackpt.DeltaOptions(
            bases="compacted", policy=deltackpt.Consecutive(max_chain=3)
        ),
    }
    state = initial()
    touched = deltackpt.touched.init({"emb": state["emb"]})
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options(**how)) as one:
        for step in range(9):
            assert one.save(step, state, touched=touched).kind == ("delta" if step else "base")
            one.wait()
            if step in (3, 6):
                before = values(root, step)
                assert fold(root, step) is not None
                assert values(root, step) == before
            last, state = state, trained(state, step)
            touched = marked(touched, step)
        one._root._collected.result()
        assert set(one.all_steps()) <= {6, 7, 8} and not (root / "compacted/3").exists()
        assert one.restore(8, last).chain == (6, 7, 8)
    assert restored(root, 8, last)


def test_where_deltas_have_orbax_s_item_a_compacted_base_has_none(tmp_path):
    root = tmp_path / "run"
    state = initial()
    touched = deltackpt.touched.init({"emb": state["emb"]})
    with deltackpt.CheckpointManager(root, handlers=HANDLERS) as one:
        for step in (1, 2):
            one.save(step, state, touched=touched)
            one.wait()
    assert fold(root, 2) is not None
    assert not (root / "compacted/2/embeddings/dense").exists()
    assert restored(root, 2, state) == bits(state)


def test_no_delta_goes_on_from_an_item_that_compaction_takes_away(tmp_path):
    root = tmp_path / "run"
    state = initial()
    touched = deltackpt.touched.init({"emb": state["emb"]})
    with deltackpt.CheckpointManager(root, handlers=HANDLERS) as one:
        for step in (1, 2):
            one.save(step, state, touched=touched)
            one.wait()
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options()) as one:
        found = one.restore(2, state)
        one.save(3, trained(found.state, 2), touched=marked(found.touched, 2))
        one.wait()
    fold(root, 2)
    before = restored(root, 3, state)
    for step in (1, 2):
        shutil.rmtree(root / str(step))
    assert restored(root, 3, state) == before


def test_two_attempts_at_a_part_leave_one_item(written):
    root, _ = written
    before = values(root, 4)
    planned = compact.plan(root, step=4)
    assert planned is not None and planned.dense_bytes == sum(
        len(value) for found in before for value in found.values()
    )
    real, second = fold_dense.move, []

    def late(plan):
        if not second:  # Another worker folds the part from its beginning to its end.
            second.append(None)
            compact.fold(planned, 0, memory_bytes=64 << 20)
        real(plan)

    with mock.patch.object(fold_dense, "move", late), compact.exclusive(root):
        compact.fold(planned, 0, memory_bytes=64 << 20)
        compact.publish(planned)
    shutil.rmtree(planned.workspace)
    assert values(root, 4) == before
    assert chain(root, 4) == ["compacted/4/embeddings"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from deltackpt.reading import chains, dense_values
from deltackpt.upkeep import compact

root, every = Path(sys.argv[1]), int(sys.argv[2])
EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")

def contents(step, compacted):
    found = dense_values.of_step(chains.read_chain(root / str(step), compacted=compacted))
    return {key: bytes(value) for part in found for key, value in part.items()}

def child(call):
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except BaseException:
            import traceback; traceback.print_exc()
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def compacting(at):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in EVENTS and any(str(root) in a for a in map(str, args)):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    assert compact.compact(root, step=3, workers=1, memory_bytes=64 << 20) is not None

def check():
    for step in (3, 4):
        assert contents(step, True) == contents(step, False), "restored otherwise"

at, kills, published = 1, 0, 0
while True:
    ended = child(lambda: compacting(at))
    assert ended in (0, -9), ended
    assert child(check) == 0, at
    if ended == 0:
        break
    kills += 1
    if (root / "compacted" / "3" / "embeddings").is_dir():
        published += 1
        import shutil; shutil.rmtree(root / "compacted" / "3")
    at += every
print(kills, published)
"""


@pytest.mark.processes
def test_killed_at_any_call_everything_restores(written):
    root, _ = written
    run = subprocess.run(
        [sys.executable, "-c", _KILLED, str(root), "3"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[0]) > 20
    assert chain(root, 3) == ["compacted/3/embeddings"]
    left = [name for name in os.listdir(root / names.COMPACTED) if names.is_compaction(name)]
    assert left == []


@pytest.mark.parametrize("how", ["removed", "truncated", "flipped"])
@mock.patch.object(removal, "_GONE_INTERVAL_SECS", 0.0)
def test_a_damaged_item_of_a_compacted_base_is_passed_over_or_an_error(written, how):
    root, _ = written
    before = values(root, 4)
    fold(root, 3)
    bare = root.with_name("bare")
    shutil.copytree(root, bare)
    for step in (1, 2):
        shutil.rmtree(bare / str(step))
    item = Path("compacted/3/embeddings/dense")
    for path in sorted(path for path in (root / item).rglob("*") if path.is_file()):
        data = path.read_bytes()
        name = path.relative_to(root)
        for place in (root, bare):
            _damage(place / name, how)
        with pytest.warns(UserWarning, match="reading it through compacted/3/embeddings failed"):
            assert values(root, 4) == before
        with pytest.raises(RestoreError, match=r"compacted/3/embeddings|parent 2"):
            values(bare, 4)
        for place in (root, bare):
            (place / name).write_bytes(data)
    assert values(bare, 4) == before


def _damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        at = len(data) // 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def test_a_step_that_lacks_a_value_of_its_arrays_is_not_folded(written):
    root, _ = written
    with (
        mock.patch.object(ocdbt, "implied", lambda described: {"other/0"}),
        pytest.raises(Damaged, match="the values of dense leaves that their arrays imply"),
    ):
        fold(root, 3)
    assert chain(root, 3)[0] == "1/embeddings"


# Looked at.


def assert_shown(root: Path, step: int, states: dict[int, dict]) -> None:
    """What inspection shows of a step is what it restores to, bit for bit."""
    found = inspect.open(root).at(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = dict(zip(_names(states[step]), restored(root, step, states[step]), strict=True))
    del expected["emb"]
    shown = {name: leaf for name, leaf in found.dense.items() if leaf.kind != "None"}
    assert shown.keys() == expected.keys()
    for name, leaf in shown.items():
        value = leaf.value.encode() if leaf.kind == "string" else np.asarray(leaf).tobytes()
        assert value == expected[name], name
    assert found.dense["key"].kind == "key" and found.dense["name"].value == "a text"
    assert found.items["dense"]["params/w"].shape == (60, 70)
    w = np.asarray(found["params/w"])
    assert (found["params/w"][3:5, 1] == w[3:5, 1]).all() and found["params/w"][2, 3] == w[2, 3]


def _names(state) -> list[str]:
    return [
        "/".join(step.key for step in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(state)
    ]


def test_every_leaf_is_shown_as_it_restores(written):
    root, states = written
    for step in (1, 2, 5):
        assert_shown(root, step, states)
    fold(root, 4)
    for step in (1, 2, 3):
        shutil.rmtree(root / str(step))
    for step in (4, 5):
        assert_shown(root, step, states)


def test_a_leaf_is_checked_before_it_is_shown(written):
    root, _ = written
    found = inspect.open(root).at(4)
    before = np.asarray(found["params/exact"]).tobytes()
    path = root / "3/embeddings/part.0/dense.float32.ef4/blocks.scale/c/0"
    _damage(path, "flipped")
    with pytest.raises(Damaged, match="3/embeddings/part.0/dense.float32"):
        [np.asarray(leaf) for leaf in found.dense.values() if leaf.kind == "array"]
    _damage(path, "flipped")
    assert np.asarray(found["params/exact"]).tobytes() == before
    item = next(path for path in (root / "1/dense/d").iterdir())
    _damage(item, "flipped")
    with pytest.raises(Damaged, match="1/dense/d/"):
        np.asarray(found["frozen"])


def test_how_a_save_holds_dense_leaves_is_told(written):
    root, _ = written
    ck = inspect.open(root)
    assert ck.at(1).dense_saved == () and ck.save_of(1).dense_nbytes is None
    saved = {leaf.name: leaf for leaf in ck.at(3).dense_saved}
    assert saved["params/w"].codecs == ("ef4",) and saved["params/v"].codecs == ("ef8",)
    assert saved["nu"].codecs == ("int8",) and saved["params/half"].codecs == ("sparse",)
    assert saved["params/w"].blocks == saved["params/w"].total_blocks == 17
    assert saved["frozen"].blocks == 0 and saved["frozen"].nbytes == 0
    assert saved["frozen"].codecs == () and saved["frozen"].raw_bytes == 12000
    assert 0 < saved["params/half"].blocks < saved["params/half"].total_blocks
    assert saved["count"].codecs == ("plain",) and saved["count"].total_blocks == 0
    assert 0.1 < saved["params/w"].nbytes / saved["params/w"].raw_bytes < 0.16
    assert ck.save_of(3).dense_nbytes > saved["nu"].nbytes


def test_commands_tell_how_dense_leaves_are_held(written):
    root, _ = written
    listed = command.run("ls", root)
    assert listed.returncode == 0 and listed.stdout.count("dense blocks") == 4
    shown = command.run("show", root, 3).stdout
    assert "dense leaves in this save" in shown and "ef4" in shown
    told = json.loads(command.run("show", root, 3, "--json").stdout)
    assert told["dense_bytes"] > 0
    assert {"name": "frozen", "codecs": [], "blocks": 0}.items() <= next(
        leaf for leaf in told["dense_saved"] if leaf["name"] == "frozen"
    ).items()
    assert "dense leaves in this save" in inspect.open(root).at(3)._repr_html_()


# Verified.


def verdicts(root: Path) -> dict[int, tuple[str, ...]]:
    """Steps to what keeps them from being restored."""
    return {one.step: one.broken_by for one in verify.verify_root(root).steps}


@pytest.mark.parametrize("compacted", [False, True])
def test_a_sound_directory_verifies(written, compacted):
    root, _ = written
    if compacted:
        fold(root, 4)
        for step in (1, 2, 3):
            shutil.rmtree(root / str(step))
    report = verify.verify_root(root)
    assert not report.problems and all(one.restorable for one in report.steps)


def test_every_damaged_file_of_blocks_and_items_is_found(written):
    root, _ = written
    fold(root, 3)
    files = [*(root / "4/embeddings/part.0").rglob("*"), *(root / "4").glob("embeddings/d*")]
    files += [*(root / "compacted/3/embeddings/dense").rglob("*")]
    chosen = [path for path in files if path.is_file() and path.stat().st_size]
    assert len(chosen) > 20
    for path in chosen:
        _damage(path, "flipped")
        found = verify.verify_root(root)
        name = str(path.relative_to(root))
        assert name in [problem.object_name for problem in found.problems], name
        broken = {one.step for one in found.steps if not one.restorable}
        # A compacted base is passed over while what it replaced stands.
        own = name.startswith("4/") and path.name != "zarr.json"
        assert broken == ({4, 5} if own else set()), name
        _damage(path, "flipped")


def test_a_damaged_item_of_a_base_breaks_the_deltas_that_go_on_from_it(written):
    root, _ = written
    item = next((root / "1/dense/d").iterdir())
    _damage(item, "flipped")
    assert verdicts(root) == dict.fromkeys(STEPS, ("1",))
    _damage(item, "flipped")
    shutil.rmtree(root / "1/dense")
    assert verdicts(root) == dict.fromkeys(STEPS, ("1",))


def test_a_chain_that_does_not_complete_a_value_is_told(written):
    root, _ = written
    with _without("frozen/0.0"):
        report = verify.verify_root(root)
    assert [one.restorable for one in report.steps] == [True, False, False, False, False]
    told = [str(problem) for problem in report.problems]
    assert told[0].startswith(
        "1/dense: expected 12000 bytes of frozen/0.0, from which 2/embeddings goes on, found none"
    )


def _without(key: str):
    """Items of bases lack a value meanwhile."""
    real = orbax_values.OrbaxValues.nbytes

    def nbytes(self, one):
        return None if one[1] == key else real(self, one)

    return mock.patch.object(orbax_values.OrbaxValues, "nbytes", nbytes)


def test_blocks_of_an_unknown_code_are_told(written):
    root, _ = written

    def unknown(segment, name):
        raise Damaged(name, f"a codec of {segment.name}", "['new']")

    with mock.patch.object(dense_work, "codec_of", unknown):
        report = verify.verify_root(root, steps=[3])
    assert not any(one.restorable for one in report.steps)
    assert any("a codec of dense." in str(problem) for problem in report.problems)


def test_doctor_looks_at_what_dense_leaves_go_on_from(written):
    root, _ = written

    def told() -> tuple[str, str]:
        [found] = [one for one in doctor.examine(root, read_only=True) if "dense" in one.subject]
        return found.severity, found.found

    severity, found = told()
    assert severity == "ok" and "blocks of 4 deltas" in found and "from 1/embeddings" in found
    with _without("frozen/0.0"):
        assert told()[0] == "problem" and "frozen/0.0" in told()[1]
    shutil.move(root / "1/dense", root.with_name("aside"))
    assert told()[0] == "problem" and "1/dense" in told()[1]
    shutil.move(root.with_name("aside"), root / "1/dense")
    fold(root, 4)
    for step in (1, 2, 3):
        shutil.rmtree(root / str(step))
    assert told()[0] == "ok" and "from compacted/4/embeddings" in told()[1]
    shutil.rmtree(root / "5")
    assert [one for one in doctor.examine(root, read_only=True) if "dense" in one.subject]


def test_an_estimate_counts_blocks_and_the_item_that_they_go_on_from(written):
    root, _ = written
    files = [
        *(path for path in (root / "1/dense").rglob("*") if path.is_file()),
        *(
            path
            for step in (2, 3)
            for path in (root / f"{step}/embeddings/part.0").glob("dense*/**/c/**/*")
        ),
    ]
    beside = [path for path in (root / "3").iterdir() if path.is_file()]
    expected = sum(path.stat().st_size for path in (*files, *beside) if path.is_file())
    found = estimate.restore_plan(root, 3)
    assert found.dense_bytes == expected
    tables = 50 * 8 * 4
    assert found.memory_bytes == tables and found.folded_bytes > tables + 60_000
    fold(root, 3)
    item = root / "compacted/3/embeddings/dense"
    folded = sum(path.stat().st_size for path in item.rglob("*") if path.is_file())
    expected = folded + sum(path.stat().st_size for path in beside)
    assert estimate.restore_plan(root, 3).dense_bytes == expected
    assert "dense leaves:" in command.run("plan", root, 3).stdout


def test_collection_removes_what_a_compacted_base_replaces_and_no_more(written):
    root, states = written
    fold(root, 4)
    before = {step: restored(root, step, states[step]) for step in (4, 5)}
    kept = Retention(keep_last=1)
    done = collect.collect(root, retention=kept, offline=True)
    assert {one.name for one in done.removable} >= {"1", "2", "3"}
    assert restored(root, 5, states[5]) == before[5]
    assert not verify.verify_root(root).problems


def test_collection_keeps_all_where_the_chain_that_stays_lacks_its_item(written):
    root, _ = written
    _damage(next((root / "1/dense/d").iterdir()), "flipped")
    found = collect.collectable(root, retention=Retention(keep_last=1))
    assert not [one for one in found.removable if one.kind == "step"]


# Elsewhere.


@pytest.mark.parametrize("compacted", [False, True])
def test_stock_orbax_reads_an_export(written, compacted, tmp_path):
    root, states = written
    before = restored(root, 4)
    if compacted:
        fold(root, 4)
    done = interchange.export_orbax(root, 4, tmp_path / "export")
    assert done.step == 4 and not done.changed
    state = by_orbax(tmp_path / "export/4/default")
    expected = inspect.open(root).at(4)
    for name in ("w", "v", "exact", "half", "bias"):
        assert state["params"][name].tobytes() == np.asarray(expected[f"params/{name}"]).tobytes()
    assert state["frozen"].tobytes() == np.asarray(states[4]["frozen"]).tobytes()
    assert state["name"] == "a text" and int(state["count"]) == int(states[4]["count"])
    assert jax.tree.leaves(before)


def test_tensors_of_dense_leaves_are_exported(written, tmp_path):
    root, _ = written
    interchange.export_safetensors(root, 3, tmp_path / "out")
    from safetensors.numpy import load_file

    tensors = {}
    for path in (tmp_path / "out").rglob("*.safetensors"):
        tensors |= load_file(path)
    assert (
        tensors["params/w"].tobytes() == np.asarray(inspect.open(root).at(3)["params/w"]).tobytes()
    )


@pytest.mark.parametrize("compacted", [False, True])
def test_a_copy_of_a_chain_restores_from_its_new_place(written, compacted, tmp_path):
    root, states = written
    before = restored(root, 5, states[5])
    if compacted:
        fold(root, 3)
    done = copying.copy(root, tmp_path / "copy")
    assert done.steps == (5,)
    assert restored(tmp_path / "copy", 5, states[5]) == before
    assert not verify.verify_root(tmp_path / "copy").problems


@pytest.mark.processes
def test_a_chain_in_a_bucket_is_folded_shown_and_verified(written, tmp_path):
    root, states = written
    before = restored(root, 5, states[5])
    with servers.s3(tmp_path / "server") as server, servers.environment_of(server):
        url, endpoint = server.bucket("bucket") + "/run", server.endpoint
        copying.copy(root, url, all_steps=True, endpoint=endpoint)
        assert compact.compact(url, step=3, endpoint=endpoint).deltas == 2
        assert compact.compact(url, step=5, endpoint=endpoint).deltas == 2, "from a compacted base"
        report = verify.verify_root(url, endpoint=endpoint)
        assert not report.problems and all(one.restorable for one in report.steps)
        shown = inspect.open(url, endpoint=endpoint).at(4)
        assert np.asarray(shown["params/w"]).tobytes() in restored(root, 4, states[4])
        copying.copy(url, tmp_path / "back", endpoint=endpoint)
    assert (tmp_path / "back/compacted/5/embeddings/dense").is_dir()
    assert restored(tmp_path / "back", 5, states[5]) == before
