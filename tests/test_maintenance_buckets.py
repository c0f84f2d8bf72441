# SPDX-License-Identifier: Apache-2.0
"""Maintenance of buckets by their URLs: compact, collect, plan, doctor."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import model
import numpy as np
import pytest
import servers
from command import run as command
from test_compact import manager, write_chain
from test_follower import held_regions
from test_tiers import eventually, server

from deltackpt import inspect
from deltackpt.errors import BrokenChain, FencedError, InUse, StepNotFound
from deltackpt.format import naming
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import open_steps
from deltackpt.maintenance import compact as compaction
from deltackpt.maintenance import doctor, estimate
from deltackpt.maintenance.compact import compact
from deltackpt.maintenance.garbage import Retention
from deltackpt.maintenance.gc import collect, collectable
from deltackpt.maintenance.verify import verify_root
from deltackpt.options import Tiers
from deltackpt.reading import chains, reader
from deltackpt.standby.follower import Follower
from deltackpt.storage import buckets
from deltackpt.storage.store import StorePath
from deltackpt.tiers.copy import copy
from deltackpt.tiers.copy_locations import Bucket

__all__ = ["server"]

_numbers = itertools.count()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[int, dict]]:
    """A base and four deltas."""
    root = tmp_path_factory.mktemp("run")
    return root, write_chain(root, 5, codec="lossless")


@pytest.fixture
def bucket(run, server) -> Callable[..., str]:
    """Makes a bucket that holds the run."""

    def make() -> str:
        url = server.bucket(f"bucket{next(_numbers)}") + "/run"
        copy(run[0], url, all_steps=True, endpoint=server.endpoint)
        return url

    return make


def opened(url: str, server: servers.Server) -> StorePath:
    return buckets.locate(url, endpoint=server.endpoint).open()


def tables(url: str | Path, endpoint: str | None, step: int) -> dict[str, bytes]:
    found = inspect.open(url, endpoint=endpoint).at(step).tables
    return {name: np.asarray(table).tobytes() for name, table in found.items()}


def test_a_compacted_chain_restores_the_same(run, server, bucket, tmp_path):
    url = bucket()
    done = compact(url, step=3, endpoint=server.endpoint)
    assert done is not None and (done.step, done.deltas) == (3, 3)
    at = Journal(opened(url, server))
    [base] = at.state().bases.values()
    assert (base.step, base.save_id) == (3, at.known.steps[3].save_id)
    assert verify_root(url, endpoint=server.endpoint).intact
    for step in range(5):
        assert tables(url, server.endpoint, step) == tables(run[0], None, step)
    assert inspect.open(url, endpoint=server.endpoint).at(4).chain == (3, 4)
    assert compact(url, step=3, endpoint=server.endpoint) is None
    with pytest.raises(StepNotFound):
        compact(url, step=9, endpoint=server.endpoint)
    again = command("compact", url, "--endpoint", server.endpoint, "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["step"] == 4, again.stderr


def test_the_second_of_two_compactions_finds_the_base(server, bucket):
    url, real, first = bucket(), compaction._put_base, iter([True])

    def put(journal, folder, unit):
        if next(first, False):
            assert compact(url, endpoint=server.endpoint) is not None
        real(journal, folder, unit)

    with mock.patch.object(compaction, "_put_base", put):
        compact(url, endpoint=server.endpoint)
    journal = Journal(opened(url, server))
    assert len(journal.state().bases) == 1
    journal.resume()
    assert not journal.find_leftovers(journal.known)
    prefixes = {"/".join(key.split("/")[:3]) for key in opened(url, server).keys()}
    assert len([prefix for prefix in prefixes if prefix.startswith("bases/")]) == 1


def test_a_step_that_is_removed_while_it_is_compacted(server, bucket):
    url, real = bucket(), compaction._put_base

    def back(journal, folder, unit):
        other = Journal(opened(url, server))
        other.resume()
        other.roll_back(2, "f" * 32)
        real(journal, folder, unit)

    with mock.patch.object(compaction, "_put_base", back), pytest.raises(BrokenChain):
        compact(url, endpoint=server.endpoint)

    def claimed(journal, folder, unit):
        with mock.patch.object(Journal, "resume", resume):
            real(journal, folder, unit)

    resumed, holder = Journal.resume, Journal(opened(url, server))

    def resume(self, **how):
        found = resumed(self, **how)
        holder.claim()
        return found

    with mock.patch.object(compaction, "_put_base", claimed), pytest.raises(FencedError):
        compact(url, endpoint=server.endpoint)
    notes = verify_root(url, endpoint=server.endpoint).notes
    assert [note for note in notes if note.startswith("bases/") and "interrupted" in note]
    holder.sweep()  # Only the new holder knows that the base is not committed.
    assert not any(key.startswith("bases/") for key in opened(url, server).keys())


def test_unneeded_steps_and_files_are_collected(run, server, bucket):
    url = bucket()
    compact(url, step=3, endpoint=server.endpoint)
    at = opened(url, server)
    journal = Journal(at)
    journal.resume()
    cut = journal.prefix(next(iter(journal.known.catalog)))
    (at / cut / "file").store.put(f"{cut}/file", b"half")
    found = collectable(url, retention=Retention(keep_last=1), endpoint=server.endpoint)
    assert [one.name for one in found.removable] == ["3", "2", "1", "0"]
    assert found.in_use is None and found.kept == (4,) and found.nbytes > 0
    gone = collect(url, retention=Retention(keep_last=1), endpoint=server.endpoint)
    assert {one.name for one in gone.removable} == {"0", "1", "2", "3", cut}
    assert sorted(open_steps(url, endpoint=server.endpoint).steps()) == [4]
    assert tables(url, server.endpoint, 4) == tables(run[0], None, 4)
    left = {"/".join(key.split("/")[:2]) for key in at.keys()}
    assert len([name for name in left if name.startswith("saves/")]) == 1
    assert not collect(url, endpoint=server.endpoint).removable


def test_a_starting_trainer_hides_no_running_one_from_collection_and_copies(server, bucket):
    url = bucket()
    running, starting = (Journal(opened(url, server)) for _ in range(2))
    running.claim()
    running.start_run(None)
    starting.claim(pending=True)
    holder = f"epoch {running.claimed.lease.epoch},"
    assert "claimed by process" in str(collectable(url, endpoint=server.endpoint).in_use)
    assert holder in str(Bucket(url, server.endpoint, "embeddings", workers=1).in_use())
    with pytest.raises(InUse):
        collect(url, endpoint=server.endpoint)
    starting.withdraw()
    running.check()


def test_rolled_back_steps_and_unneeded_bases_are_collected(server, bucket):
    url = bucket()
    compact(url, step=2, endpoint=server.endpoint)
    journal = Journal(opened(url, server))
    journal.resume()
    journal.roll_back(3, "e" * 32)
    compact(url, step=3, endpoint=server.endpoint)
    keep = Retention(keep_last=1)
    found = collect(url, retention=keep, rolled_back=True, endpoint=server.endpoint)
    kinds = {one.kind for one in found.removable}
    assert {"step", "compacted base", "rolled-back run"} <= kinds
    state = Journal(opened(url, server)).state()
    assert ([*state.steps], [unit.step for unit in state.bases]) == ([3], [3])
    assert not state.entry.rolled_back
    assert verify_root(url, endpoint=server.endpoint).intact


def test_nothing_is_collected_beside_a_trainer_unless_offline_is_set(server, tmp_path):
    url = server.bucket(f"bucket{next(_numbers)}") + "/run"
    tiers = Tiers(staging_dir=str(tmp_path / "stage"), endpoint=server.endpoint)
    with manager(url, tiers=tiers) as trainer:  # type: ignore[arg-type]
        state = model.initial()
        model.commit(trainer, 0, state, touched=model.new_touched(state))
        with pytest.raises(InUse, match="claimed by process"):
            collect(url, endpoint=server.endpoint)
        trainer.check_lease()
        assert not collect(url, offline=True, endpoint=server.endpoint).removable
        with pytest.raises(FencedError):
            trainer.check_lease()
        refused = command("gc", url, "--endpoint", server.endpoint)
        assert refused.returncode == 0, refused.stderr  # The collector is not a trainer.
    assert sorted(open_steps(url, endpoint=server.endpoint).steps()) == [0]


def test_a_trainer_continues_from_a_base_that_was_compacted_in_the_bucket(
    run, server, bucket, tmp_path
):
    url, (_, states) = bucket(), run
    compact(url, endpoint=server.endpoint)
    tiers = Tiers(staging_dir=str(tmp_path / "stage"), endpoint=server.endpoint)
    with manager(url, codec="lossless", tiers=tiers, max_to_keep=1) as trainer:  # type: ignore[arg-type]
        found = trainer.restore_latest(states[4])
        assert found is not None and found.chain == (4,)
        model.assert_same(found.state, states[4])
        assert found.touched is not None
        state, touched = model.train(found.state, found.touched, 5)
        assert trainer.save(5, state, touched=touched).kind == "delta"
        trainer.wait_until_finished()
        # The replicator removes older steps after it reports the upload.
        eventually(
            lambda: {*open_steps(url, endpoint=server.endpoint).steps()} <= {4, 5},
            "steps 0 to 3 are removed",
        )
    other = Tiers(staging_dir=str(tmp_path / "other"), endpoint=server.endpoint)
    with manager(url, codec="lossless", tiers=other) as trainer:  # type: ignore[arg-type]
        again = trainer.restore_latest(state)
        assert again is not None and again.step == 5
        model.assert_same(again.state, state)
    assert {5} <= {*open_steps(url, endpoint=server.endpoint).steps()} <= {4, 5}


def test_plan_and_doctor_inspect_a_bucket(run, server, bucket):
    url = bucket()
    found = estimate.restore_plan(url, endpoint=server.endpoint)
    there = estimate.restore_plan(run[0])
    assert (found.step, found.bytes_read) == (4, there.bytes_read)
    assert found.dense_bytes == there.dense_bytes
    shown = command("plan", url, "--endpoint", server.endpoint)
    assert shown.returncode == 0, shown.stderr
    findings = {one.subject: one for one in doctor.examine(url, endpoint=server.endpoint)}
    assert findings["steps"].found == "5 committed, newest 4"
    assert {findings[name].severity for name in ("bucket", "steps", "claim")} == {"ok"}
    assert not [key for key in opened(url, server).keys() if "probe" in key]
    missing = command("doctor", "s3://no-such-bucket/run", "--endpoint", server.endpoint)
    assert missing.returncode == 1


def test_a_follower_holds_what_a_bucket_holds(run, server, tmp_path):
    root, _ = run
    url = server.bucket(f"bucket{next(_numbers)}") + "/run"
    copy(root, url, steps=[1], endpoint=server.endpoint)
    follower = Follower(url, item=naming.EMBEDDINGS_ITEM, endpoint=server.endpoint)
    assert follower.advance() and not follower.advance()
    copy(root, url, steps=[3], endpoint=server.endpoint)
    assert follower.newest_step() == 3
    assert follower.advance()
    holding = follower.loaded
    assert holding is not None and holding.save.step_dir == "3"
    assert 0 < holding.lag_secs < 3600 * 24
    compact(url, step=3, endpoint=server.endpoint)
    assert not follower.advance()
    Journal(opened(url, server)).claim()
    journal = Journal(opened(url, server))
    journal.resume()
    journal.roll_back(1, "d" * 32)
    assert follower.advance()
    assert follower.loaded is not None and follower.loaded.save.step_dir == "1"
    expected = reader.restore_tables(chains.read_chain(root / "1")).fields
    for table, field, first, rows in held_regions(follower):
        wanted = expected[table][field][first : first + len(rows)]
        assert rows.tobytes() == np.asarray(wanted).tobytes(), (table, field)
