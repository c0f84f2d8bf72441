# SPDX-License-Identifier: Apache-2.0
"""A step of a development version is refused with a typed error at every entry point."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import command
import google_crc32c
import jax.numpy as jnp
import model
import msgpack
import pytest

import deltackpt
from deltackpt import inspect, serving
from deltackpt.errors import DeltackptError, FormatTooOld
from deltackpt.format import naming
from deltackpt.ledger import entries
from deltackpt.maintenance import doctor
from deltackpt.maintenance.verify import verify_root
from deltackpt.tiers import bundles
from deltackpt.tiers.copy import copy
from deltackpt.tiers.staging import Orders, StagingDir, check_stage

TABLES = {"embeddings": deltackpt.Tables(select="t")}


def without(field: str, data: bytes) -> bytes:
    """Returns a record without a field; development versions had no "files" and other "shards"."""
    head = msgpack.unpackb(data)
    body = msgpack.unpackb(head["body"])
    if field == "shards":
        body["parts"], body["features"] = body.pop(field), [*body["features"], "parts"]
    else:
        del body[field]
    head["body"] = msgpack.packb(body)
    return msgpack.packb(head | {"crc32c": google_crc32c.value(head["body"])})


@pytest.fixture(params=["format_version", "files", "shards"])
def root(tmp_path, request) -> Path:
    """A directory whose newest step is a delta of a development version."""
    table = jnp.zeros((100, 4))
    touched = deltackpt.touched.init({"t": table})
    with deltackpt.CheckpointManager(tmp_path / "run", handlers=TABLES) as trainer:
        model.commit(trainer, 1, {"t": table, "w": jnp.ones(3)}, touched=touched)
        touched = deltackpt.touched.mark(touched, {"t": jnp.array([5])})
        trainer.save(2, {"t": table.at[5].set(1), "w": jnp.ones(3)}, touched=touched)
    at = tmp_path / "run/2/embeddings" / naming.manifest_name(0)
    at.write_bytes(without(request.param, at.read_bytes()))
    return tmp_path / "run"


def reading(root: Path) -> deltackpt.CheckpointManager:
    options = deltackpt.ManagerOptions(access="read")
    return deltackpt.CheckpointManager(root, handlers=TABLES, options=options)


def restored(root: Path) -> None:
    with reading(root) as manager:
        manager.restore(2)


def restored_latest(root: Path) -> None:
    with reading(root) as manager:
        manager.restore_latest()


def resumed(root: Path) -> None:
    with deltackpt.CheckpointManager(root, handlers=TABLES) as trainer:
        trainer.restore_latest()


def by_command(*arguments: str) -> Callable[[Path], None]:
    """Runs a command that must name the error."""

    def run(root: Path) -> None:
        found = command.run(arguments[0], root, *arguments[1:])
        assert found.returncode != 0 and "[format-too-old]" in found.stderr
        raise FormatTooOld(found.stderr)

    return run


@pytest.mark.parametrize(
    "read",
    [
        restored,
        restored_latest,
        resumed,
        lambda root: inspect.open(root)[2],
        lambda root: copy(root, root.parent / "target"),
        by_command("compact"),
        by_command("plan"),
        by_command("show", "2"),
    ],
    ids=["restore", "restore_latest", "resume", "inspect", "copy", "compact", "plan", "show"],
)
def test_a_step_of_a_development_version_is_refused(root, read):
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(FormatTooOld, match="development version"):
        read(root)
    assert {path for path in before if not path.name.startswith("lease")} <= {*root.rglob("*")}


def test_reports_name_a_step_of_a_development_version(root):
    report = verify_root(root)
    assert [verdict.step for verdict in report.steps if not verdict.restorable] == [2]
    assert any("development version" in str(problem) for problem in report.problems)
    assert "development version" in command.run("ls", root).stdout
    with serving.follow(root, poll_secs=None) as live:
        live.advance()
        assert "development version" in str(live.problem)
    found = {finding.subject: finding for finding in doctor.examine(root, read_only=True)}
    assert found["newest step"].severity == "problem"
    assert "development version" in found["newest step"].found


def test_training_that_starts_over_saves_a_base(root):
    with deltackpt.CheckpointManager(root, handlers=TABLES) as trainer:
        trainer.save(3, {"t": jnp.ones((100, 4)), "w": jnp.ones(3)})
    assert inspect.open(root).save_of(3).kind == "base"
    with pytest.raises(DeltackptError):
        restored(root)


def test_a_wal_header_of_a_development_version_is_refused(tmp_path):
    table = jnp.zeros((100, 4))
    touched = deltackpt.touched.init({"t": table})
    options = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())
    root = tmp_path / "run"
    with deltackpt.CheckpointManager(root, handlers=TABLES, options=options) as trainer:
        model.commit(trainer, 1, {"t": table}, touched=touched)
        trainer.append(2, {"t": table}, touched=touched)
        trainer.wait_appended()
    for header in [root / "log/0.msgpack", *root.glob("log/0/head.msgpack")]:
        header.write_bytes(without("format_version", header.read_bytes()))
    for read in (verify_root, restored_latest, resumed):
        with pytest.raises(FormatTooOld, match="development version"):
            read(root)
    found = {finding.subject: finding for finding in doctor.examine(root, read_only=True)}
    assert found["WAL"].severity == "problem"
    with reading(root) as manager:
        result = manager.restore_latest(wal=False)
    assert result is not None and result.step == 1


def test_a_lease_of_a_development_version_is_a_finding(root):
    [lease] = root.glob("lease.*")
    lease.write_bytes(without("format_version", lease.read_bytes()))
    found = {finding.subject: finding for finding in doctor.examine(root, read_only=True)}
    assert found["lease"].severity == "problem"


#: Fields that development versions wrote under other names.
_OLD_FIELDS = {
    "journal": {"catalog": "standings", "committed": "promoted"},
    "orders": {"generation": "era", "lineages": "lines"},
    "bundle": {"lineage": "past"},
}


def with_old_fields(kind: str, data: bytes) -> bytes:
    """Returns a record with the field names of a development version."""
    head = msgpack.unpackb(data)
    body = msgpack.unpackb(head["body"])
    body = {_OLD_FIELDS[kind].get(name, name): value for name, value in body.items()}
    head["body"] = msgpack.packb(body)
    return msgpack.packb(head | {"crc32c": google_crc32c.value(head["body"])})


def test_a_journal_entry_of_a_development_version_is_refused(tmp_path):
    golden = Path(__file__).parent / "golden" / "journal-v1" / "journal"
    entry = (golden / "00000000000000000004.msgpack").read_bytes()
    with pytest.raises(FormatTooOld, match="development version"):
        entries.entry_from(with_old_fields("journal", entry), name="entry", number=4)


def test_orders_of_a_development_version_are_refused(tmp_path):
    stage = StagingDir(tmp_path)
    stage.make()
    orders = Orders(number=1, lease=1, url="s3://bucket/run", endpoint=None, item="embeddings")
    stage.order(orders)
    path = tmp_path / "orders.1.msgpack"
    path.write_bytes(with_old_fields("orders", path.read_bytes()))
    with pytest.raises(FormatTooOld, match="development version"):
        check_stage(stage, orders.url, None)


def test_a_bundle_of_a_development_version_is_refused(tmp_path):
    folder = Path(__file__).parent / "golden" / "pack-v1"
    [path] = folder.glob("*.*")
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data, 8)
    record = with_old_fields("bundle", data[16 : 16 + length])
    data = data[:8] + struct.pack("<Q", len(record)) + record + data[16 + length :]
    ref = bundles.BundleRef(path.name.rpartition(".")[0], len(data), google_crc32c.value(data))
    reader = bundles.SegmentReader(ref, len(data), lambda _: memoryview(data))
    with pytest.raises(FormatTooOld, match="development version"):
        bundles.read_manifest(reader, ref)
