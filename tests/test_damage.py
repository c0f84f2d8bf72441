# SPDX-License-Identifier: Apache-2.0
"""Damage to any file: an intact step restores, and errors name the damaged object."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import model
import msgpack
import pytest
from click.testing import CliRunner

import deltackpt
import deltackpt.inspect
from deltackpt import cli, errors
from deltackpt.format import manifest, naming
from deltackpt.maintenance import compact, verify
from deltackpt.reading import inventory
from deltackpt.storage import digests

STEPS = 3
HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict[int, dict]]:
    """A base and two deltas, and the state of each."""
    root = tmp_path_factory.mktemp("written")
    state, touched = model.start()
    states = {}
    with deltackpt.CheckpointManager(root, handlers=HANDLERS) as manager:
        for step in range(1, STEPS + 1):
            manager.save(step, state, touched=touched)
            states[step] = state
            state, touched = model.train(state, touched, step)
    return root, states


def files_of(root: Path) -> Iterator[Path]:
    for step in range(1, STEPS + 1):
        yield from sorted(path for path in (root / str(step)).rglob("*") if path.is_file())


def newest_intact(root: Path, states: dict[int, dict]) -> tuple[int | None, list[str]]:
    """The step that restores and the messages about those that do not; checks exactness."""
    options = deltackpt.ManagerOptions(access="read")
    with (
        warnings.catch_warnings(),
        deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager,
    ):
        warnings.simplefilter("ignore")
        try:
            result = manager.restore_latest(states[STEPS])
        except errors.NoIntactStep as error:
            return None, [str(error)]
    assert result is not None
    model.assert_same(result.state, states[result.step])
    return result.step, [str(error) for _, error in result.skipped]


def damages(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """Ways to damage a file: (name, new contents), None to remove it."""
    data = path.read_bytes()
    yield "removed", None
    yield "truncated", data[: len(data) // 2]
    if data:
        for name, position in (("first", 0), ("middle", len(data) // 2), ("last", len(data) - 1)):
            flipped = bytearray(data)
            flipped[position] ^= 0x10
            yield f"{name} byte flipped", bytes(flipped)


def test_damage_of_any_file_is_named_and_an_older_step_restores(
    written, tmp_path, nobody_removes_steps
):
    root, states = written
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    for path in files_of(copy):
        original = path.read_bytes()
        damaged_step = int(path.relative_to(copy).parts[0])
        for how, contents in damages(path):
            if contents is None:
                path.unlink()
            else:
                path.write_bytes(contents)
            case = f"{path.relative_to(copy)} {how}"
            step, messages = newest_intact(copy, states)
            found = inventory.verify_step(copy / str(damaged_step))
            assert found, f"{case}: verify found nothing"
            assert any(path.name in problem.object_name for problem in found), (case, found)
            if step == STEPS:
                # Damage to files that a restore does not read is harmless.
                continue
            assert step is None or step < damaged_step or damaged_step == 1, (case, step)
            assert messages, case
            path.write_bytes(original)
        path.write_bytes(original)
    assert newest_intact(copy, states)[0] == STEPS


def test_the_layer_of_another_save_is_detected(written, tmp_path):
    """A complete file with correct checksums replaces another one."""
    root, states = written
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    shutil.copy(copy / "2" / "embeddings" / "layer.0", copy / "3" / "embeddings" / "layer.0")
    assert inventory.verify_step(copy / "3")
    step, messages = newest_intact(copy, states)
    assert step == 2
    assert "3/embeddings/layer.0: footer" in messages[0]


def test_a_chunk_of_another_save_is_detected(written, tmp_path):
    """A complete chunk with a correct checksum replaces another one."""
    root, states = written
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    victim = sorted((copy / "1").glob("embeddings/shard.0/*/values/c.0.0"))[0]
    body = bytes(victim.stat().st_size - 4)
    victim.write_bytes(body + google_crc32c.value(body).to_bytes(4, "little"))
    assert inventory.verify_step(copy / "1")
    step, messages = newest_intact(copy, states)
    assert step is None
    assert "values/c.0.0" in messages[0]


def test_a_flipped_bit_in_the_newest_record_never_blocks_an_older_step(
    written, tmp_path, nobody_removes_steps
):
    """The version precedes the body: one flipped bit, and it asks for a newer deltackpt."""
    root, states = written
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    manifest_path = copy / str(STEPS) / "embeddings" / naming.manifest_name(0)
    for path in (manifest_path, copy / "1" / naming.STEP_DIGESTS):
        if path != manifest_path:  # Only a base has it, and no delta needs it.
            for later in range(2, STEPS + 1):
                shutil.rmtree(copy / str(later))
        data = path.read_bytes()
        for position in range(data.index(b"body")):
            for bit in range(8):
                flipped = bytearray(data)
                flipped[position] ^= 1 << bit
                path.write_bytes(flipped)
                with pytest.raises(errors.Damaged):
                    check_record(path)
        flipped = bytearray(data)
        flipped[data.index(b"version") + len(b"version")] ^= 2
        path.write_bytes(flipped)
        step, messages = newest_intact(copy, states)
        assert step == (STEPS - 1 if path == manifest_path else None), messages
        assert "version 3" in messages[0], messages
        path.write_bytes(data)


def check_record(path: Path) -> None:
    if path.name == naming.STEP_DIGESTS:
        digests.read_digests(path)
    else:
        manifest.from_bytes(path.read_bytes(), name=path.name)


@pytest.mark.parametrize("repeated", [True, False], ids=["repeated", "development version"])
@pytest.mark.parametrize("outer", [0, 1, 2, 3, 65, 127])
@pytest.mark.parametrize("inner", [1, 2])
def test_the_version_that_the_checksum_covers_decides(written, inner, outer, repeated):
    root, _ = written
    path = root / "1" / "embeddings" / naming.manifest_name(0)
    head = msgpack.unpackb(path.read_bytes())
    body = msgpack.unpackb(head["body"])
    assert body.pop("format_version") == head["version"] == 1
    if repeated:
        body["format_version"] = inner
    packed = msgpack.packb(body)
    data = msgpack.packb(
        head | {"version": outer, "body": packed, "crc32c": google_crc32c.value(packed)}
    )
    if outer and repeated and inner > 1:
        with pytest.raises(errors.FormatTooNew, match=f"format version {inner}"):
            manifest.from_bytes(data, name="it")
    elif outer and not repeated:
        with pytest.raises(errors.FormatTooOld, match="development version"):
            manifest.from_bytes(data, name="it")
    elif outer == 1:
        assert manifest.from_bytes(data, name="it").save_id.step == 1
    else:
        with pytest.raises(errors.Damaged):
            manifest.from_bytes(data, name="it")
    # If the body's checksum is wrong, not even the version of a newer record is trusted.
    with pytest.raises(errors.Damaged):
        manifest.from_bytes(data[:-1] + bytes([data[-1] ^ 1]), name="it")


def test_a_compacted_base_copied_over_a_step_is_damage_and_an_older_step_restores(
    written, tmp_path
):
    """It holds the tables of the step, bit for bit, with the same save id, and no other item."""
    root, states = written
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    compact.compact(copy, step=STEPS)
    shutil.rmtree(copy / str(STEPS))
    shutil.copytree(copy / "compacted" / str(STEPS), copy / str(STEPS))
    options = deltackpt.ManagerOptions(access="read")
    for kept in (True, False):
        with deltackpt.CheckpointManager(copy, handlers=HANDLERS, options=options) as manager:
            for template in (states[STEPS], None):
                with pytest.raises(errors.Damaged, match=r"3/dense: .*compacted base"):
                    manager.restore(STEPS, template)
            assert manager.read(STEPS, {"tables/tiny": None}).step == STEPS
        step, messages = newest_intact(copy, states)
        assert step == STEPS - 1 and "compacted base" in messages[0]
        report = verify.verify_root(copy)
        assert [one.step for one in report.steps if not one.restorable] == [STEPS]
        assert any("3/dense" in str(problem) for problem in report.problems)
        found = deltackpt.inspect.open(copy).at(STEPS)
        assert found.tables and next(iter(found.tables.values()))[:1].shape[0] == 1
        with pytest.raises(errors.Damaged, match="3/dense"):
            list(found.dense)
        for command in ("ls", "show", "verify"):
            ended = CliRunner().invoke(cli.cli, [command, str(copy)])
            assert isinstance(ended.exception, (errors.DeltackptError, SystemExit, type(None))), (
                command
            )
        if kept:
            shutil.rmtree(copy / "compacted")
