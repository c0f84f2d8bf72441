# SPDX-License-Identifier: Apache-2.0
"""``deltackpt verify`` finds and names damage of every file, and reports nothing else."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import command
import google_crc32c
import model
import numpy as np
import orbax.checkpoint as ocp
import pytest
from golden import make_golden
from test_compact import run_compaction, write_chain

from deltackpt import inspect
from deltackpt.errors import (
    ForeignDirectory,
    RestoreError,
    StepNotFound,
    StorageError,
)
from deltackpt.format import manifest, naming
from deltackpt.format.row_blocks import StoredRows
from deltackpt.layers.read import LayerReader
from deltackpt.ledger.directory import Root
from deltackpt.maintenance import doctor
from deltackpt.maintenance.verify import RootReport, verify_root
from deltackpt.reading import chains, inventory, reader, stored_dense, stored_saves
from deltackpt.storage import digests as integrity
from deltackpt.storage.store import StorePath
from deltackpt.testing import stored_chunks

GOLDEN = Path(make_golden.__file__).parent


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """Directories with every kind of content, by name."""
    place = tmp_path_factory.mktemp("written")
    found = {name: place / name for name in ("lossless", "lossy", "shards")}
    write_chain(found["lossless"], 3, codec="lossless", slot_codec="lossless")
    run_compaction(found["lossless"], 1, workers=2)
    write_chain(found["lossy"], 3, codec="adaptive4", always=("accumulator",))
    for step in make_golden.STEPS[:2]:
        shutil.copytree(GOLDEN / "shards-v1" / str(step), found["shards"] / str(step))
    return found


@pytest.fixture
def copied(written, tmp_path) -> Callable[[str], Path]:
    """Copies a directory, to be changed."""
    return lambda name: Path(shutil.copytree(written[name], tmp_path / "root"))


@pytest.fixture
def root(copied) -> Path:
    """A copy of the lossy directory."""
    return copied("lossy")


pytestmark = pytest.mark.usefixtures("nobody_removes_steps")


def saved_files(root: Path) -> list[Path]:
    """Every file of every save."""
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file() and path.parent != root and path.name != naming.COMPACTION_LOCK
    )


def restores(root: Path, step: int) -> bool:
    """Whether a restore of a step succeeds, without Orbax's part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Root.open(root, read_only=True).check_step_files(root / str(step))
            chain = chains.read_chain(root / str(step))
            reader.restore_tables(chain)
            stored_dense.open_values(chain)
        except RestoreError:
            return False
    return True


def chunk(step_dir: Path) -> Path:
    """A file with stored values of a save."""
    return stored_chunks(step_dir)[0].path


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x04
    else:
        data += b"\0"
    path.write_bytes(data)


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    mine, others = path.read_bytes(), other.read_bytes()
    path.write_bytes(others)
    other.write_bytes(mine)


def duplicate(path: Path, other: Path) -> None:
    shutil.copy(path, path.with_name(f"{path.name}.1"))


DAMAGES = (flip, truncate, remove, swap, duplicate)
EVERY = (pytest.mark.long, pytest.mark.drawn("damage of every file", 4), pytest.mark.timeout(900))


def other_of(path: Path, found: list[Path]) -> Path:
    """A file of the same name with other contents, or at least one with other contents."""
    others = [one for one in found if one.read_bytes() != path.read_bytes()]
    alike = [one for one in others if one.name == path.name]
    return (alike or others)[0]


def named(report: RootReport, path: Path, root: Path) -> bool:
    name = path.relative_to(root).as_posix()
    return any(name in str(problem) for problem in report.problems)


def restorable(report: RootReport) -> list[bool]:
    return [step.restorable for step in report.steps]


def step_of(path: Path, root: Path) -> int:
    """The step of a file's save or compacted base."""
    return next(int(piece) for piece in path.relative_to(root).parts if piece.isdecimal())


@contextlib.contextmanager
def damaged(path: Path, other: Path, how: Callable[[Path, Path], None]) -> Iterator[None]:
    """Damages a file, and undoes it on exit."""
    before = {one: one.read_bytes() for one in (path, other)}
    how(path, other)
    yield
    for one, data in before.items():
        one.write_bytes(data)
    path.with_name(f"{path.name}.1").unlink(missing_ok=True)


def one_of_each(found: list[Path], root: Path) -> list[Path]:
    """One file of each kind, in a step and in a compacted base."""
    return list(
        {
            (path.relative_to(root).parts[0] == naming.COMPACTED, path.suffix, path.parts[-2]): path
            for path in found
        }.values()
    )


@pytest.mark.parametrize("how", DAMAGES, ids=lambda how: how.__name__)
@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("lossless", False),
        *(pytest.param(name, True, marks=EVERY) for name in ("lossless", "lossy", "shards")),
    ],
)
def test_damage_of_every_file_is_found_and_named(name, every, how, copied):
    root = copied(name)
    assert verify_root(root).intact
    found = saved_files(root)
    for path in found if every else one_of_each(found, root):
        if how is not truncate or path.stat().st_size:
            with damaged(path, other_of(path, found), how):
                report = verify_root(root, steps=[step_of(path, root)])
                assert not report.intact, path
                assert named(report, path, root), (path, report.problems)
    assert verify_root(root).intact


@pytest.mark.parametrize("how", [flip, remove, duplicate], ids=lambda how: how.__name__)
@pytest.mark.parametrize("name", ["lossless", "shards"])
def test_a_step_is_reported_restorable_exactly_if_it_restores(name, how, copied):
    root = copied(name)
    found = saved_files(root)
    for path in one_of_each(found, root):
        with damaged(path, path, how):
            for verdict in verify_root(root).steps:
                assert verdict.restorable == restores(root, verdict.step), (path, verdict)


def flipped_bits(data: bytes) -> Iterator[bytes]:
    """Flips every bit of a record's head, and some of its body."""
    for position in [*range(min(96, len(data))), *range(96, len(data), 37)]:
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            yield bytes(flipped)


@pytest.mark.parametrize(
    "place",
    [
        "compacted/1/embeddings/manifest.0.msgpack",
        "0/digests.step.msgpack",
        "2/embeddings/manifest.0.msgpack",
    ],
)
def test_every_bit_of_a_record_that_nothing_else_covers_is_verified(place, copied):
    root = copied("lossless")
    path = root / place
    step_dir = root / place.removesuffix("/digests.step.msgpack").partition("/embeddings")[0]
    for number, data in enumerate(flipped_bits(path.read_bytes())):
        path.write_bytes(data)
        assert inventory.read_inventory(step_dir).damage, number


def change_records(path: Path, change: Callable[[manifest.Manifest], manifest.Manifest]) -> None:
    """Rewrites a manifest and its digests: an intact record with wrong contents."""
    record = manifest.from_bytes(path.read_bytes(), name=path.name)
    path.write_bytes(manifest.to_bytes(change(record)))
    step_dir = path.parent.parent
    if not (step_dir / naming.STEP_DIGESTS).exists():  # A delta: nothing covers its manifest.
        return
    digests = integrity.read_digests(step_dir / naming.STEP_DIGESTS)
    name = path.relative_to(step_dir).as_posix()
    digests[name] = integrity.digest_file(path)
    (step_dir / naming.STEP_DIGESTS).write_bytes(integrity.digests_bytes(digests))


def with_segments(change: Callable[[tuple], tuple]) -> Callable[[manifest.Manifest], Any]:
    return lambda record: dataclasses.replace(record, segments=change(record.segments))


def first_segment(**changes) -> Callable[[manifest.Manifest], Any]:
    return with_segments(lambda found: (dataclasses.replace(found[0], **changes), *found[1:]))


@pytest.mark.parametrize(
    ("step", "change", "expected"),
    [
        (0, with_segments(lambda found: found[1:]), "expected all"),
        (0, with_segments(lambda found: (*found, found[0])), "expected each row in one segment"),
        (0, first_segment(ranges=((0, 3),)), "found ranges of 3"),
        (0, first_segment(ranges=((0, 10**9),)), "expected ascending ranges"),
        (0, first_segment(columns=(0, 99)), "expected columns within"),
        (1, first_segment(arrays=()), "expected an array"),
        (1, first_segment(count=1, ranges=((0, 1),)), "expected shape (1,"),
    ],
    ids=["fewer", "twice", "count", "beyond", "columns", "arrays", "shape"],
)
def test_intact_records_with_impossible_contents_are_damage(step, change, expected, root):
    change_records(root / str(step) / "embeddings" / naming.manifest_name(0), change)
    report = verify_root(root)
    assert any(expected in str(problem) for problem in report.problems), report.problems
    broken = [verdict.step for verdict in report.steps if not verdict.restorable]
    assert broken == list(range(step, 3))


def test_wrong_row_indices_are_found_despite_valid_checksums(root):
    """Simulates a faulty writer: rows beyond the end of their table."""
    real = LayerReader.rows

    def beyond(layer, *arguments):
        rows, first = real(layer, *arguments)
        return StoredRows(rows + 1_000_000, first)

    with mock.patch.object(LayerReader, "rows", beyond):
        report = verify_root(root)
    assert any("rows below" in str(problem) for problem in report.problems)


def test_a_chunk_of_zeros_with_its_own_checksum_is_found(copied):
    root = copied("shards")
    victim = sorted(root.glob("10/embeddings/shard.1/*/values/c.0.0"))[0]
    body = bytes(victim.stat().st_size - 4)
    victim.write_bytes(body + google_crc32c.value(body).to_bytes(4, "little"))
    report = verify_root(root)
    assert named(report, victim, root)
    assert [verdict.broken_by for verdict in report.steps] == [("10",), ("10",)]


# Chains.


def test_the_manifests_of_a_chain_are_not_read_again_for_each_of_its_steps(root):
    real, read = stored_saves.read_save, collections.Counter()

    def counted(at, item):
        read[at.name] += 1
        return real(at, item)

    with mock.patch.object(stored_saves, "read_save", counted):
        steps = verify_root(root).steps
    assert len(steps[-1].chain) == 3
    # The newest for its format, each to compare its records (twice), and once for all chains.
    assert max(read.values()) <= 4


@pytest.mark.parametrize(
    "move",
    [
        lambda root: os.rename(root / "2", root / "5"),
        lambda root: shutil.copytree(root / "1", root / "7"),
    ],
    ids=["renamed", "copied"],
)
def test_steps_moved_by_hand_are_found(move, copied, root):
    move(root)
    report = verify_root(root)
    assert not report.intact
    assert "renamed or copied by hand" in report.steps[-1].broken_by[0]
    listed = inspect.open(root).saves
    assert [save.step for save in listed] == [one.step for one in report.steps]
    assert "renamed or copied by hand" in listed[-1].problem
    problems = [one for one in doctor.examine(root) if one.severity == "problem"]
    assert any("renamed or copied by hand" in one.found for one in problems)


def test_a_step_of_another_run_in_place_of_a_parent_is_found(written, tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    shutil.copytree(written["lossy"], root)
    write_chain(other, 2)
    shutil.rmtree(root / "1")
    shutil.copytree(other / "1", root / "1")
    assert restorable(verify_root(root)) == [True, False, False]


def test_a_damaged_compacted_base_breaks_only_steps_without_another_chain(copied):
    root = copied("lossless")
    flip(chunk(root / "compacted" / "1"), root)
    report = verify_root(root)
    assert not report.intact and all(restorable(report))
    assert report.steps[2].chain == ("0", "1", "2")
    shutil.rmtree(root / "0")
    report = verify_root(root)
    assert restorable(report) == [False, False]
    assert "parent 0 (save id" in report.steps[-1].broken_by[0]


def test_a_compacted_base_replaces_a_removed_chain(copied):
    root = copied("lossless")
    for step in ("0", "1"):
        shutil.rmtree(root / step)
    report = verify_root(root)
    assert report.intact and report.steps[-1].chain == ("compacted/1", "2")


# Not damage.


def test_leftovers_are_notes_and_an_unsigned_claim_is_not(copied):
    root = copied("lossless")
    (root / "9.orbax-checkpoint-tmp").mkdir()
    (root / f"{naming.REMOVED}1").mkdir()
    (root / "compacted" / naming.compaction_name("3")).mkdir()
    (root / "notes.txt").write_text("somebody's")
    (root / naming.lease_name(99)).touch()
    report = verify_root(root)
    assert report.intact
    text = "\n".join(report.notes)
    for piece in (
        "9.orbax",
        "deletion that was interrupted",
        "compaction that was interrupted",
        "notes.txt",
    ):
        assert piece in text
    assert naming.lease_name(99) not in text and report.problems == ()


def test_an_altered_lease_is_damage_that_stops_no_restore(root):
    (lease,) = root.glob("lease.*")
    for data in itertools.islice(flipped_bits(lease.read_bytes()), 0, None, 101):
        lease.write_bytes(data)
        report = verify_root(root)
        assert [problem.object_name for problem in report.problems] == [lease.name]
        assert all(restorable(report))


def test_a_chain_replaced_by_compaction_during_verification_is_intact(tmp_path):
    write_chain(tmp_path, 3)

    def replace(*_):
        run_compaction(tmp_path, 1)
        for step in ("0", "1"):
            shutil.rmtree(tmp_path / step)

    with model.before_first_call(integrity, "check_files", replace):
        report = verify_root(tmp_path)
    assert report.intact
    assert [(step.step, step.chain) for step in report.steps] == [(2, ("compacted/1", "2"))]


@pytest.mark.parametrize("steps", [None, [1]])
@pytest.mark.parametrize("step", [1, 2])
def test_a_manifest_that_cannot_be_read_is_damage_of_its_save(step, steps, root):
    path = root / str(step) / "embeddings" / naming.manifest_name(0)
    path.unlink()
    path.symlink_to(path.name)
    report = verify_root(root, steps=steps)
    if steps is None or step in steps:
        assert named(report, path, root)
        assert not report.steps[-1].restorable
    else:
        assert report.intact


# Selection of steps, and refusals.


def test_a_wrong_path_never_verifies_as_intact(written, tmp_path):
    with pytest.raises(StepNotFound, match="found none"):
        verify_root(tmp_path)
    shutil.copytree(written["lossless"] / "compacted", tmp_path / "compacted")
    assert verify_root(tmp_path).intact


def test_only_chosen_steps_and_what_they_need_are_verified(root):
    flip(chunk(root / "2"), root)
    report = verify_root(root, steps=[1])
    assert report.intact and [save.name for save in report.saves] == ["0", "1"]
    assert not verify_root(root, steps=[2]).intact
    with pytest.raises(StepNotFound, match=r"\[99\]"):
        verify_root(root, steps=[1, 99])


def test_a_foreign_directory_is_refused(tmp_path):
    with pytest.raises(StorageError):
        verify_root(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("somebody's")
    with pytest.raises(ForeignDirectory):
        verify_root(tmp_path)


def test_a_directory_of_stock_orbax_is_refused(tmp_path):
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(1, args=ocp.args.StandardSave({"t": np.ones((4, 2))}))
    with pytest.raises(ForeignDirectory, match="deltackpt import"):
        verify_root(tmp_path)


def test_an_unreadable_file_is_damage_by_name(root):
    victim = root / "1" / "embeddings" / "layer.0"
    real = integrity.digest_file

    def refused(path: StorePath, **kwargs):
        if Path(path) == victim:
            raise StorageError(f"{path}: no") from OSError(5, "Input/output error")
        return real(path, **kwargs)

    with mock.patch.object(integrity, "digest_file", refused):
        report = verify_root(root)
    assert named(report, victim, root)
    assert restorable(report) == [True, False, False]


def test_every_byte_is_counted_and_reported(written):
    reported: list[tuple[int, int]] = []
    root = written["lossless"]
    report = verify_root(root, progress=lambda *done: reported.append(done))
    nbytes = sum(path.stat().st_size for path in saved_files(root))
    assert report.bytes_read == nbytes == reported[-1][0] == reported[-1][1]
    assert report.file_count == len(saved_files(root))


# The command.


#: The command line, in a process in which imports of some packages fail.
WITHOUT = (
    "import sys\n"
    "for name in ('jax', 'jaxlib', 'flax', 'optax', 'orbax', 'ray'): sys.modules[name] = None\n"
    "from deltackpt import cli; cli.main()"
)


@pytest.mark.processes
def test_the_command_needs_neither_jax_nor_orbax_and_exits_0_if_all_is_intact(written):
    command = [sys.executable, "-W", "error", "-c", WITHOUT, "verify", written["lossless"]]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert "3 of 3 steps can be restored, 0 damaged objects" in found.stdout
    assert "compacted/1 + 1 delta" in found.stdout


def test_the_command_names_damage_and_exits_1(tmp_path, root):
    [damaged_chunk, *_] = stored_chunks(root / "1")
    damaged_chunk.flip()
    found = command.run("verify", root)
    assert found.returncode == 1 and found.stderr == ""
    assert re.search(f"damaged: 1/embeddings/{damaged_chunk.name}: expected", found.stdout)
    assert "1 of 3 steps can be restored, 1 damaged object;" in found.stdout
    described = json.loads(command.run("verify", root, "--json").stdout)
    assert described["intact"] is False and len(described["problems"]) == 1
    assert [step["restorable"] for step in described["steps"]] == [True, False, False]
    assert command.run("verify", root, 0).returncode == 0
    assert command.run("verify", tmp_path / "none").returncode == 1
    assert command.run("verify").returncode == 2
