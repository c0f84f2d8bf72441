# SPDX-License-Identifier: Apache-2.0
"""Steps in a journal are read like a local directory, from any store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import servers
from command import run as command
from test_compact import run_compaction, write_chain

from deltackpt import inspect
from deltackpt.errors import Damaged, StorageError
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.inspect.checkpoints import Checkpoints
from deltackpt.ledger import committed, upload
from deltackpt.ledger.bucket_steps import BucketSteps
from deltackpt.ledger.committed import COMMIT, CommittedStore
from deltackpt.ledger.entries import CatalogEntry, ObjectKey
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.upload import Unit
from deltackpt.ledger.view import JournalView
from deltackpt.reading import inventory, stored_saves
from deltackpt.storage import buckets
from deltackpt.storage.digests import digest_tree
from deltackpt.storage.store import FileStore, StorePath, store_path
from deltackpt.testing import MemoryStore


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A base, two deltas, and a compacted base of the first delta."""
    root = tmp_path_factory.mktemp("run")
    write_chain(root, 3, codec="lossless")
    run_compaction(root, 1)
    return root


@pytest.fixture(scope="module", params=["memory", "files", "s3", "gcs", "azure"])
def bucket(request, tmp_path_factory) -> Iterator[tuple[StorePath, str | None]]:
    """A folder of a store, and the address of its server."""
    folder = tmp_path_factory.mktemp("store")
    if request.param == "memory":
        yield StorePath(MemoryStore(), "run"), None
    elif request.param == "files":
        yield StorePath(FileStore(folder), "run"), None
    else:
        start = getattr(servers, request.param)
        with start(folder) as server, servers.environment_of(server):
            url = server.bucket("bucket") + "/run"
            yield buckets.locate(url, endpoint=server.endpoint).open(), server.endpoint


def commit(ledger: Journal, root: Path, unit: ObjectKey) -> CatalogEntry:
    """Uploads a step or compacted base of a directory to a store and commits it."""
    source = store_path(root / unit.name)
    files = inventory.every_digest(source, naming.EMBEDDINGS_ITEM, base=unit.item is not None)
    if unit.item is None:
        info = stored_saves.read_save(source, naming.EMBEDDINGS_ITEM).info
    else:
        info = stored_saves.read_base(store_path(root / str(unit.step)), unit.item).info
    return upload.commit(Unit(unit, info, source, files), ledger)


@pytest.fixture(scope="module")
def filled(run, bucket) -> Journal:
    ledger = Journal(bucket[0])
    ledger.claim()
    steps = sorted(int(path.name) for path in run.iterdir() if path.name.isdecimal())
    based = [int(path.name) for path in (run / naming.COMPACTED).iterdir() if path.name.isdecimal()]
    for step in steps:
        commit(ledger, run, ObjectKey(step))
        if step in based:
            commit(ledger, run, ObjectKey(step, naming.EMBEDDINGS_ITEM))
    return ledger


def as_directory(root: StorePath) -> StorePath:
    journal = JournalView(root)
    journal.state()
    return StorePath(CommittedStore(journal), "")


def test_a_journal_has_the_layout_of_the_directory(run, bucket, filled):
    found, expected = as_directory(bucket[0]), store_path(run)
    wanted = [key for key in expected.keys() if key[0].isdecimal() or key.startswith("compacted/")]
    wanted = [key for key in wanted if not key.endswith("/lock")]
    assert found.keys() == wanted
    for key in wanted:
        assert (found / key).read(most_bytes=None) == (expected / key).read(most_bytes=None)
        assert (found / key).length() == (expected / key).length()
    for folder in ("", "2", "compacted", "compacted/2", "2/embeddings", "4", "2/nothing"):
        at = found / folder if folder else found
        names_there = (expected / folder if folder else expected).folders()
        assert at.folders() == [name for name in names_there if not name.startswith(".")]
        assert at.is_dir() == bool(not folder or at.keys())
    assert (found / "2").dir_identity() == as_directory(bucket[0]).__truediv__("2").dir_identity()
    identity = (found / "2").dir_identity()
    assert identity is not None and not identity.same((found / "3").dir_identity())


def test_inspection_shows_the_same_as_the_directory(run, bucket, filled):
    same_as_the_directory(bucket[0], run)


def test_steps_in_segments_are_inspected_too(run, tmp_path, monkeypatch):
    monkeypatch.setattr(committed, "SEGMENT_BYTES", 500)
    monkeypatch.setattr("deltackpt.ledger.upload.SEGMENT_BYTES", 500)
    ledger = Journal(StorePath(FileStore(tmp_path), "run"))
    ledger.claim()
    for unit in (ObjectKey(0), ObjectKey(1), ObjectKey(1, naming.EMBEDDINGS_ITEM), ObjectKey(2)):
        commit(ledger, run, unit)
    same_as_the_directory(ledger.root, run)


def same_as_the_directory(root: StorePath, run: Path) -> None:
    ck = inspect.open(run)
    there = Checkpoints(BucketSteps(JournalView(root), naming.EMBEDDINGS_ITEM))
    assert there.steps == ck.steps and there.compacted.keys() == ck.compacted.keys()
    for step in ck.steps:
        one, other = ck.at(step), there.at(step)
        assert one.tables.keys() == other.tables.keys() and one.dense.keys() == other.dense.keys()
        for name in one.tables:
            assert np.asarray(one[name]).tobytes() == np.asarray(other[name]).tobytes()
        for name, leaf in one.dense.items():
            assert repr(leaf.value) == repr(other.dense[name].value)
    assert [save.kind for save in there.saves] == [save.kind for save in ck.saves]


def test_commands_take_a_url(run, bucket, filled):
    root, endpoint = bucket
    if endpoint is None:
        pytest.skip("no server has it")
    url = str(root)
    assert (
        command("ls", url, "--endpoint", endpoint).stdout.splitlines()[:4]
        == (command("ls", run).stdout.splitlines()[:4])
    )
    verified = command("verify", url, "--endpoint", endpoint)
    assert verified.returncode == 0 and "3 steps" in verified.stdout, verified
    shown = command("show", url, "2", "--endpoint", endpoint)
    assert shown.returncode == 0 and shown.stdout == command("show", run, "2").stdout
    missing = command("ls", f"{url}/elsewhere", "--endpoint", endpoint)
    assert missing.returncode != 0 and "expected a journal" in missing.stderr


def test_altered_and_lost_files_are_named(run, tmp_path):
    root = StorePath(FileStore(tmp_path), "run")
    ledger = Journal(root)
    ledger.claim()
    first = commit(ledger, run, ObjectKey(0))
    at = tmp_path / "run" / first.prefix
    found = as_directory(root)
    chunk = next(name for name in (found / "0").keys() if name.endswith("/c.0.0"))
    data = bytearray((at / chunk).read_bytes())
    data[5] ^= 1
    (at / chunk).write_bytes(data)
    with pytest.raises(Damaged, match=f"0/{chunk}"):
        (found / "0" / chunk).read()
    os.unlink(at / chunk)
    with pytest.raises(Damaged, match=chunk.rpartition("/")[2]):
        (found / "0" / chunk).read()
    (at / COMMIT).write_bytes((at / COMMIT).read_bytes()[:-1])
    with pytest.raises(Damaged, match=COMMIT):
        (as_directory(root) / "0").keys()
    with pytest.raises(StorageError, match="expected only reads"):
        found.store.put("1/x", b"")


def test_a_reader_that_misses_a_file_sees_that_the_step_was_removed(run, tmp_path):
    root = StorePath(FileStore(tmp_path), "run")
    ledger = Journal(root)
    ledger.claim()
    commit(ledger, run, ObjectKey(0))
    found = as_directory(root)
    names_there = (found / "0").keys()
    identity = (found / "0").dir_identity()
    ledger.retire(lambda state: [state.steps[0].prefix])
    assert (found / "0").dir_identity() == identity  # No call has refreshed it since.
    with pytest.raises(Damaged):
        (found / "0" / names_there[0]).read()
    assert (found / "0").dir_identity() is None and not (found / "0").is_dir()


def test_large_files_are_put_in_segments(run, tmp_path):
    source, root = tmp_path / "7", StorePath(FileStore(tmp_path), "run")
    source.mkdir()
    data = np.random.default_rng(0).bytes(10_007)
    (source / "large").write_bytes(data)
    (source / "small").write_bytes(data[:100])
    (source / "empty").write_bytes(b"")
    for number, segment_bytes in enumerate((5_000, 3_335, 10_007, 10_006, 10_005, 2_000)):
        with (
            mock.patch.object(committed, "SEGMENT_BYTES", segment_bytes),
            mock.patch("deltackpt.ledger.upload.SEGMENT_BYTES", segment_bytes),
        ):
            ledger = Journal(root)
            ledger.claim()
            ledger.retire(lambda state: [one.prefix for one in state.steps.values()])
            info = SaveInfo(
                save_id=SaveId("r", 7, number), kind="base", parent=None, step_dir="7", nbytes=0
            )
            unit = Unit(ObjectKey(7), info, store_path(source), digest_tree(source))
            folder = root / upload.commit(unit, ledger).prefix
            most = max((folder / name).length() for name in folder.keys())
            assert most <= max(segment_bytes, 500)
            found = as_directory(root) / "7"
            assert found.keys() == ["empty", "large", "small"]
            assert (found / "large").read() == data and (found / "empty").read() == b""
            for start, size in itertools.product(
                (0, 1, 1_999, 4_999, 10_000, -7), (0, 1, 7, 5_001)
            ):
                out = bytearray(size)
                at = found / "large"
                first = start % len(data)
                if first + size > len(data):
                    with pytest.raises(Damaged):
                        at.store.read_into(at.key, start, [memoryview(out)])
                    continue
                at.store.read_into(at.key, start, [memoryview(out)])
                assert out == data[first : first + size]
            # A file that changes during the upload is not uploaded.
            (source / "large").write_bytes(data[:5_000] + b"x" + data[5_001:])
            with pytest.raises(Damaged, match="large"):
                upload.commit(unit, ledger)
            (source / "large").write_bytes(data)
