# SPDX-License-Identifier: Apache-2.0
"""Damage of every file: never a wrong state, always the damaged object and a step that stands."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import model
import pytest

import deltackpt
from deltackpt import integrity, stored
from deltackpt.errors import NoIntactStep, RestoreError

STEPS = 3
HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict[int, dict]]:
    """A base and two deltas, and what each of them holds."""
    root = tmp_path_factory.mktemp("written")
    state = model.initial()
    touched = model.new_touched(state)
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
    options = deltackpt.ManagerOptions(read_only=True)
    with (
        warnings.catch_warnings(),
        deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager,
    ):
        warnings.simplefilter("ignore")
        try:
            result = manager.restore_latest(states[STEPS])
        except NoIntactStep as error:
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


def test_damage_of_any_file_is_named_and_an_older_step_restores(written, tmp_path, monkeypatch):
    root, states = written
    # Nobody removes steps meanwhile, which a restore would otherwise wait for at each damage.
    monkeypatch.setattr(stored, "_GONE_CHECKS", 1)
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
            found = integrity.verify_step(copy / str(damaged_step))
            assert found, f"{case}: verify found nothing"
            assert any(path.name in problem.object_name for problem in found), (case, found)
            if step == STEPS:
                # What a restore does not read may be damaged without harm to it.
                continue
            assert step is None or step < damaged_step or damaged_step == 1, (case, step)
            assert messages, case
            path.write_bytes(original)
        path.write_bytes(original)
    assert newest_intact(copy, states)[0] == STEPS


def test_no_intact_step_raises_and_names_the_damage(written, tmp_path):
    root, states = written
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    (copy / "1" / "embeddings" / "manifest.0.msgpack").unlink()
    step, messages = newest_intact(copy, states)
    assert step is None
    assert "manifest.0.msgpack" in messages[0] or "missing" in messages[0]


def test_a_removed_base_breaks_the_chain_by_name(written, tmp_path):
    root, states = written
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    shutil.rmtree(copy / "1")
    with (
        deltackpt.CheckpointManager(
            copy, handlers=HANDLERS, options=deltackpt.ManagerOptions(read_only=True)
        ) as manager,
        pytest.raises(RestoreError, match="parent 1 .* is missing"),
    ):
        manager.restore(3, states[3])


def test_a_swapped_step_is_noticed(written, tmp_path):
    """A base of another run under the parent's name is not the parent."""
    root, states = written
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(root, copy)
    with deltackpt.CheckpointManager(other, handlers=HANDLERS) as manager:
        manager.save(1, model.initial(7))
    shutil.rmtree(copy / "1")
    shutil.copytree(other / "1", copy / "1")
    step, messages = newest_intact(copy, {1: model.initial(7), 3: states[3]})
    assert step == 1
    assert any("expected save id" in message for message in messages)


def test_a_chunk_of_another_save_is_noticed(written, tmp_path):
    """A whole chunk, its own checksum right, in the place of another one."""
    root, states = written
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    victim = sorted((copy / "1").glob("embeddings/part.0/*/values/c/0/0"))[0]
    body = bytes(victim.stat().st_size - 4)
    victim.write_bytes(body + google_crc32c.value(body).to_bytes(4, "little"))
    assert integrity.verify_step(copy / "1")
    step, messages = newest_intact(copy, states)
    assert step is None
    assert "values/c/0/0" in messages[0]
