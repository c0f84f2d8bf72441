# SPDX-License-Identifier: Apache-2.0
"""Copies of chains: bit-exact and atomic, in both directions, even if interrupted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import google_crc32c
import model
import pytest
import servers
from command import run as command
from golden import make_golden
from model import before_first_call
from shown import bytes_below
from test_compact import chain, contents, manager, run_compaction, write_chain
from test_verify import chunk, flip

from deltackpt import errors
from deltackpt.format import manifest, naming, records
from deltackpt.ledger import lease
from deltackpt.ledger.journal import Journal
from deltackpt.maintenance.verify import verify_root
from deltackpt.options import Tiers
from deltackpt.reading import inventory, stored_saves
from deltackpt.storage import buckets, digests, posix
from deltackpt.testing import Disk
from deltackpt.tiers import copy as copies
from deltackpt.tiers import copy_locations
from deltackpt.tiers.copy import copy

GOLDEN = Path(make_golden.__file__).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[int, dict]]:
    """A base, two deltas, and a compacted base of the first delta."""
    root = tmp_path_factory.mktemp("run")
    states = write_chain(root, 3, codec="lossless")
    run_compaction(root, 1)
    return root, states


@pytest.fixture
def root(run, tmp_path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run[0], tmp_path / "root"))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.s3(tmp_path_factory.mktemp("server")) as running:
        with servers.environment_of(running):
            yield running


@pytest.fixture(scope="module")
def gcs(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.gcs(tmp_path_factory.mktemp("server")) as running:
        with servers.environment_of(running):
            yield running


_numbers = itertools.count()


@pytest.fixture
def bucket(server) -> str:
    """A URL in a new bucket."""
    return server.bucket(f"bucket{next(_numbers)}") + "/some/run"


@pytest.fixture(params=["directory", "server", "gcs"])
def target(request, tmp_path) -> dict:
    """A target, and the other arguments that ``copy`` needs for it."""
    if request.param == "directory":
        return {"target": tmp_path / "target"}
    found = request.getfixturevalue(request.param)
    url = found.bucket(f"bucket{next(_numbers)}") + "/some/run"
    return {"target": url, "endpoint": found.endpoint}


def back(target: dict, place: Path, **kwargs) -> copies.Copied:
    """Copies back from a target, and verifies the copy."""
    done = copy(target["target"], place, endpoint=target.get("endpoint"), **kwargs)
    assert verify_root(place).intact
    return done


def assert_restores(root: Path, states: dict[int, dict], *steps: int) -> None:
    """A manager restores steps bit for bit."""
    with manager(root, codec="lossless", access="read") as reader:
        for step in steps:
            model.assert_same(reader.restore(step, states[step]).state, states[step])


def file_spec(place: Path) -> str:
    """A bucket in a directory."""
    return json.dumps({"driver": "file", "path": str(place)})


# Round trips.


def test_a_step_restores_bit_for_bit_after_a_round_trip(run, target, tmp_path):
    root, states = run
    done = copy(root, **target)
    assert (done.steps, done.copied) == ((2,), ("compacted/1/embeddings", "2"))
    back(target, tmp_path / "again")
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["2", "compacted"]
    assert_restores(tmp_path / "again", states, 2)


def test_all_steps_are_copied_with_their_compacted_bases(run, target, tmp_path):
    root, states = run
    done = copy(root, **target, all_steps=True)
    assert done.copied == ("0", "compacted/1/embeddings", "1", "2")
    back(target, tmp_path / "again", all_steps=True)
    assert_restores(tmp_path / "again", states, *states)
    for step in "012":
        assert bytes_below(tmp_path / "again" / step) == bytes_below(root / step)


@pytest.mark.parametrize("name", ["v1", "shards-v1", "encodings-v1"])
def test_golden_checkpoints_are_copied_as_they_are(name, tmp_path):
    done = copy(GOLDEN / name, tmp_path / "target", steps=[20])
    assert done.copied == ("10", "20")
    assert verify_root(tmp_path / "target").intact
    assert contents(tmp_path / "target", 20) == contents(GOLDEN / name, 20)


def test_a_trainer_continues_in_a_copy(run, tmp_path):
    root, states = run
    copy(root, tmp_path / "target")
    with manager(tmp_path / "target", codec="lossless") as trainer:
        result = trainer.restore_latest(states[2])
        model.assert_same(result.state, states[2])
        model.commit(trainer, 3, result.state, touched=result.touched)
        assert trainer.all_steps() == [2, 3]


def test_a_step_without_digests_of_orbax_files_is_copied_as_it_is(tmp_path):
    write_chain(tmp_path / "run", 1)
    step = tmp_path / "run" / "0"
    plain = dataclasses.replace(stored_saves.read_save(step).head, digests=("item",))
    (step / "embeddings" / naming.manifest_name(0)).write_bytes(manifest.to_bytes(plain))
    (step / naming.STEP_DIGESTS).unlink()
    copy(tmp_path / "run", tmp_path / "target")
    assert bytes_below(tmp_path / "target" / "0") == bytes_below(step)
    report = verify_root(tmp_path / "target")
    assert report.intact and "not checked" in report.saves[0].notes[0]


# Existing entries at the target.


def test_existing_saves_are_not_copied_again(run, target):
    root, _ = run
    first = copy(root, **target)
    again = copy(root, **target)
    assert (again.copied, again.file_count, again.bytes_written) == ((), 0, 0)
    assert again.bytes_found == first.bytes_written
    assert copy(root, **target, steps=[0, 2]).copied == ("0",)


@pytest.mark.processes
@pytest.mark.parametrize("store", ["Directory", "Bucket"])
def test_a_killed_copy_shows_nothing_partial_and_resumes(store, run, server, bucket, tmp_path):
    root, states = run
    where = bucket if store == "Bucket" else str(tmp_path / "target")
    program = (
        "import os, signal, sys\n"
        "from deltackpt.ledger.journal import Journal\n"
        "from deltackpt.tiers import copy as copies\n"
        "from deltackpt.storage.kv_store import KvStore\n"
        f"kind = {'copies.Directory' if store == 'Directory' else '{kind}'}\n"
        "real, left = kind.{name}, int(sys.argv[1])\n"
        "def counted(self, *args, **kwargs):\n"
        "    global left\n"
        "    left -= 1\n"
        "    if left < 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(self, *args, **kwargs)\n"
        "kind.{name} = counted\n"
        f"copies.copy({str(root)!r}, {where!r}, all_steps=True, endpoint={server.endpoint!r})\n"
    )
    given = {"target": where, "endpoint": server.endpoint}
    whole: set[str] = set()
    for name, after in (("write", 0), ("write", 9), ("publish", 1), ("write", 4), ("publish", 0)):
        kind = "KvStore" if name == "write" else "Journal"
        call = name if store == "Directory" else {"write": "put", "publish": "commit"}[name]
        code = program.replace("{name}", call).replace("{kind}", kind)
        cut = subprocess.run([sys.executable, "-c", code, str(after)], capture_output=True)
        assert cut.returncode == -signal.SIGKILL, cut.stderr
        place = copies._place(where, server.endpoint)
        if store == "Bucket" or Path(where, "0").exists():
            # Only complete units exist, and each step has what it needs.
            for step in place.steps():
                shutil.rmtree(tmp_path / "seen", ignore_errors=True)
                back(given, tmp_path / "seen", steps=[step])
                whole.add(str(step))
    done = copy(root, **given, all_steps=True)
    assert whole <= set(done.found)
    assert store == "Bucket" or done.bytes_found > 0
    shutil.rmtree(tmp_path / "seen", ignore_errors=True)
    back(given, tmp_path / "seen", all_steps=True)
    assert_restores(tmp_path / "seen", states, 2)
    if store == "Directory":
        assert not (tmp_path / "target" / ".copying").exists()


# Damage.


def test_damage_at_the_source_is_named_and_nothing_becomes_visible(root, tmp_path):
    for name, before in bytes_below(root / "2").items():
        victim, target = root / "2" / name, tmp_path / name.replace("/", "-")
        flip(victim, victim)
        with pytest.raises((errors.Damaged, errors.BrokenChain)) as caught:
            copy(root, target)
        assert f"2/{name}" in str(caught.value)
        assert not (target / "2").exists()
        victim.write_bytes(before)


def test_a_damaged_compacted_manifest_is_skipped_if_the_chain_is_valid(root, tmp_path):
    flip(root / "compacted" / "1" / "embeddings" / naming.manifest_name(0), root)
    with pytest.warns(UserWarning, match="a compacted base in its chain is skipped"):
        assert copy(root, tmp_path / "target").copied == ("0", "1", "2")
    assert verify_root(tmp_path / "target").intact


def test_damage_at_the_target_is_repaired_if_it_is_rechecked(run, tmp_path):
    root, states = run
    target = tmp_path / "target"
    copy(root, target, all_steps=True)
    flip(chunk(target / "0"), target)
    assert copy(root, target, all_steps=True).copied == ()
    assert copy(root, target, all_steps=True, recheck=True).copied == ("0",)
    chunk(target / "1").unlink()
    assert copy(root, target, all_steps=True).copied == ("1",)
    assert verify_root(target).intact
    assert_restores(target, states, 2)


def test_damage_in_a_bucket_is_found_when_copied_back_and_repaired(run, target, tmp_path):
    root, _ = run
    if "endpoint" not in target:
        pytest.skip("that of a directory is another test")
    copy(root, **target)
    at = buckets.locate(target["target"], endpoint=target["endpoint"]).open()
    name = chunk(root / "2").relative_to(root / "2").as_posix()
    [key] = [key for key in at.keys() if key.startswith("saves/2.") and key.endswith(name)]
    at.store.put(key, b"other bytes")
    with pytest.raises(errors.Damaged, match=f"2/{name}"):
        back(target, tmp_path / "again")
    assert not (tmp_path / "again" / "2").exists()
    assert copy(root, **target).copied == ()
    assert copy(root, **target, recheck=True).copied == ("2",)
    back(target, tmp_path / "again")
    # The damaged save is gone.
    assert len({key.split("/")[1] for key in at.keys() if key.startswith("saves/")}) == 1
    at.store.delete(key for key in at.keys() if key.endswith("/commit.msgpack"))
    assert copy(root, **target).copied == ("compacted/1/embeddings", "2")
    assert verify_root(target["target"], endpoint=target["endpoint"]).intact


def test_a_copy_takes_no_lease_from_a_trainer(run, server, bucket, tmp_path):
    root, _ = run
    tiers = Tiers(staging_dir=str(tmp_path / "stage"), endpoint=server.endpoint)
    given = {"target": bucket, "endpoint": server.endpoint}
    with manager(bucket, tiers=tiers) as trainer:  # type: ignore[arg-type]
        state = model.initial()
        model.commit(trainer, 7, state, touched=model.new_touched(state))
        with pytest.raises(errors.InUse, match=r"claimed by process .* \(epoch 1, since"):
            copy(root, **given, steps=[2])
        trainer.check_lease()
    assert copy(root, **given, steps=[2], offline=True).copied[-1] == "2"
    assert back(given, tmp_path / "again", all_steps=True).steps == (2, 7)


def test_bytes_that_a_disk_stores_wrongly_are_detected(run, tmp_path):
    real = copy_locations.Directory.write

    def garbled(self, unit, name, pieces):
        data = b"".join(pieces)
        real(self, unit, name, [data[:-1] + b"x" if name.endswith("/c.0.0") else data])

    with (
        mock.patch.object(copy_locations.Directory, "write", garbled),
        pytest.raises(errors.StorageError, match="to read back the written bytes, found different"),
    ):
        copy(run[0], tmp_path / "target")
    assert not (tmp_path / "target" / "2").exists()


def test_another_save_with_the_same_name_is_never_replaced(run, target, tmp_path):
    write_chain(tmp_path / "other", 3)
    copy(tmp_path / "other", **target, all_steps=True)
    with pytest.raises(errors.TargetDiffers, match="another save"):
        copy(run[0], **target, all_steps=True)


def another_item(place: Path) -> None:
    os.rename(place / "embeddings", place / "others")


def foreign(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()
    (place / "precious").write_bytes(b"bytes")


def altered(place: Path) -> None:
    flip(place / "embeddings" / naming.manifest_name(0), place)


@pytest.mark.parametrize("make", [another_item, foreign, altered], ids=lambda one: one.__name__)
def test_an_entry_that_may_be_another_save_is_never_touched(make, run, tmp_path):
    target = tmp_path / "target"
    copy(run[0], target)
    make(target / "2")
    before = sorted(target.rglob("*")), bytes_below(target)
    with pytest.raises(errors.TargetDiffers, match="move this entry away"):
        copy(run[0], target, recheck=True)
    assert (sorted(target.rglob("*")), bytes_below(target)) == before


@pytest.mark.parametrize("killed", [False, True])
def test_a_damaged_step_is_put_back_if_its_replacement_fails(killed, run, tmp_path):
    target = tmp_path / "target"
    copy(run[0], target)
    chunk(target / "2").unlink()
    with Disk(target) as disk, pytest.raises(errors.StorageError, match="Input/output"):
        disk.fail("rename", "^2$", times=None if killed else 1)
        copy(run[0], target)
    assert (target / "2").exists() != killed
    assert copy(run[0], target).copied == ("2",)
    assert verify_root(target).intact and not (target / naming.COPYING).exists()


def test_rolled_back_steps_are_never_left_newest_at_the_target(root, target):
    copy(root, **target, all_steps=True)
    shutil.rmtree(root / "2")
    with pytest.raises(errors.TargetDiffers, match=r"no step after 1, .* found \[2\]"):
        copy(root, **target)
    assert copy(root, **target, steps=[1]).copied == ()


def test_a_damaged_compacted_base_is_not_copied_if_its_chain_is(root, tmp_path):
    flip(chunk(root / "compacted" / "1"), root)
    with pytest.warns(UserWarning, match="compacted/1/embeddings: expected an intact comp"):
        done = copy(root, tmp_path / "target")
    assert done.copied == ("0", "1", "2")
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["0", "1", "2"]
    shutil.rmtree(root / "0")
    with pytest.raises(errors.Damaged, match="compacted/1"):
        copy(root, tmp_path / "none")


@pytest.mark.parametrize("name", ["../../escaped", "/escaped", "a//b", "./a", ".."])
def test_names_that_escape_a_save_are_damage(name, run, tmp_path):
    spec = file_spec(tmp_path / "kv")
    copy(run[0], spec, steps=[0])
    [record] = (tmp_path / "kv" / "saves").glob("0.*/commit.msgpack")
    found = digests.digests_from(record.read_bytes(), name="record")
    files = {**digests.without_blocks(found), name: (1, 2, 3)}
    at = buckets.locate(spec).open()
    digest = records.to_bytes(digests._Stored(files), digests._MAGIC)
    at.store.put(f"saves/{record.parent.name}/commit.msgpack", digest)
    ledger = Journal(at)
    ledger.resume()
    [standing] = ledger.known.catalog.values()
    altered = dataclasses.replace(standing, crc32c=google_crc32c.value(digest))
    ledger._change_own(lambda state: state.with_committed(altered))
    with pytest.raises(errors.Damaged, match="paths of files below it"):
        copy(spec, tmp_path / "deep" / "target")
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize(
    ("name", "expected"), [("../1", "the name of a directory"), ("one", "parent one .* is missing")]
)
def test_a_parent_that_is_not_a_step_is_refused(name, expected, root, tmp_path):
    path = root / "2" / "embeddings" / naming.manifest_name(0)
    record = manifest.from_bytes(path.read_bytes(), name="m")
    wrong = dataclasses.replace(record.parent, step_dir=name)
    path.write_bytes(manifest.to_bytes(dataclasses.replace(record, parent=wrong)))
    with pytest.raises((errors.Damaged, errors.BrokenChain), match=expected):
        copy(root, tmp_path / "target")


# Concurrency.


@pytest.mark.parametrize("store", ["file", "s3"])
def test_the_later_of_two_copies_to_one_bucket_continues(store, run, tmp_path, request):
    given: dict = {"target": file_spec(tmp_path / "kv")}
    if store == "s3":
        given["target"] = request.getfixturevalue("bucket")
        given["endpoint"] = request.getfixturevalue("server").endpoint
    write_chain(tmp_path / "other", 1)
    with (
        before_first_call(Journal, "commit", lambda *_: copy(tmp_path / "other", **given)),
        pytest.raises(errors.FencedError),
    ):
        copy(run[0], **given, steps=[0])
    back(given, tmp_path / "again")
    assert contents(tmp_path / "again", 0) == contents(tmp_path / "other", 0)
    with pytest.raises(errors.TargetDiffers, match="another save"):
        copy(run[0], **given, steps=[0])


def test_an_upload_that_may_be_committed_keeps_its_files(run, tmp_path, monkeypatch):
    given, commit = {"target": file_spec(tmp_path / "kv")}, Journal.commit

    def refused(journal, *args, **options):
        commit(journal, *args, **options)
        raise errors.FencedError("the answer was lost, and the entry is unreadable")

    with monkeypatch.context() as patch, pytest.raises(errors.FencedError):
        patch.setattr(Journal, "commit", refused)
        copy(run[0], **given, steps=[0])
    back(given, tmp_path / "again")
    assert contents(tmp_path / "again", 0) == contents(run[0], 0)


def test_a_target_whose_trainer_may_be_alive_is_refused_unless_offline(run, tmp_path):
    with manager(tmp_path / "target", codec="lossless") as trainer:
        with pytest.raises(errors.InUse, match="which is running"):
            copy(run[0], tmp_path / "target")
        assert trainer.all_steps() == []
    assert copy(run[0], tmp_path / "target", offline=True).copied[-1] == "2"


def test_a_foreign_directory_is_refused_before_anything_is_created_there(run, tmp_path):
    (tmp_path / "notes.txt").write_text("somebody's")
    with pytest.raises(errors.ForeignDirectory):
        copy(run[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_removal_at_the_target_during_a_copy_is_reported(run, tmp_path):
    real = copy_locations.Directory.publish

    def publish(self, unit):
        real(self, unit)
        if unit.name == "2":
            shutil.rmtree(tmp_path / "target" / "compacted")

    with (
        mock.patch.object(copy_locations.Directory, "publish", publish),
        pytest.raises(errors.InUse, match="something was removed"),
    ):
        copy(run[0], tmp_path / "target")


def test_a_release_never_lets_two_hold_the_lock(tmp_path):
    """The first holder releases after the second opens the file and before it locks it."""
    first = copies._place(tmp_path, None)
    first.__enter__()
    with (
        before_first_call(lease.fcntl, "flock", lambda *_: first.__exit__(None, None, None)),
        copies._place(tmp_path, None),
        pytest.raises(errors.InUse),
        copies._place(tmp_path, None),
    ):
        pass


def test_a_unit_that_lost_files_before_publication_stays_hidden(run, tmp_path):
    def lose(place, unit):
        next(place._staged(unit).rglob("manifest.0.msgpack")).unlink()

    with (
        before_first_call(copy_locations.Directory, "publish", lose),
        pytest.raises(errors.StorageError, match="manifest.0.msgpack removed"),
    ):
        copy(run[0], tmp_path / "target", steps=[0])
    assert not (tmp_path / "target" / "0").exists()


@pytest.mark.parametrize("removed", ["2", "compacted/1/embeddings"])
def test_a_step_removed_during_a_copy_is_gone_and_not_partial(root, removed, tmp_path):
    def remove(*_):
        os.rename(root / removed, tmp_path / "removed")

    with (
        before_first_call(digests, "verified_file", remove),
        pytest.raises(errors.StepGone, match="copy again"),
    ):
        copy(root, tmp_path / "target")
    assert not (tmp_path / "target" / "2").exists()


# Refusals.


def test_wrong_sources_and_targets_are_named(run, server, bucket, tmp_path):
    root, target, at = run[0], tmp_path / "target", {"endpoint": server.endpoint}
    for error, match, where, to, options in (
        (errors.UnsupportedRoot, "'ftp'", root, "ftp://host/run", {}),
        (errors.OptionError, "the host 'relative'", root, "file://relative/path", {}),
        (errors.OptionError, "JSON", root, "{not json", {}),
        (errors.StepNotFound, r"\[7\]", root, target, {"steps": [7]}),
        (errors.StepNotFound, "found none", bucket, target, at),
        (errors.StorageError, "some/run", root, "s3://none/some/run", at),
    ):
        with pytest.raises(error, match=match):
            copy(where, to, **options)
    with (
        mock.patch.object(posix, "free_bytes", return_value=10),
        pytest.raises(errors.OutOfSpace, match="found 10 free"),
    ):
        copy(root, tmp_path / "full")


def test_a_kvstore_spec_and_a_file_url_are_accepted(run, tmp_path):
    root, states = run
    spec = file_spec(tmp_path / "kv")
    copy(root, spec)
    copy(spec, f"FILE://localhost{tmp_path}/a%20target#1")
    assert_restores(tmp_path / "a target#1", states, 2)


def test_a_compacted_step_restores_from_its_compacted_base(run, tmp_path):
    copy(run[0], tmp_path / "target", steps=[1])
    assert chain(tmp_path / "target", 1) == ["compacted/1/embeddings"]
    assert inventory.verify_step(tmp_path / "target" / "1") == []


# The command.


def test_the_command_copies_in_both_directions(run, server, bucket, tmp_path):
    found = command("copy", run[0], bucket, "--endpoint", server.endpoint)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("1 step (2) at the target: copied ")
    found = command("copy", bucket, tmp_path / "again", "--endpoint", server.endpoint, "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["copied"] == ["compacted/1/embeddings", "2"]
    assert verify_root(tmp_path / "again").intact
    assert command("copy", run[0], tmp_path / "x", "--all", 1).returncode == 2
    assert command("copy", run[0], tmp_path / "x", 99).returncode == 1
