# SPDX-License-Identifier: Apache-2.0
"""One lost or damaged object never blocks a root, and never revives abandoned steps.

The long loops damage each object of each kind of bucket for each entry point.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from unittest import mock

import damaged_roots
import pytest
from damaged_roots import CHAINS, READS, Bucket, Readers, Where
from damages import DAMAGES, damage
from test_bucket_faults import named
from test_nodes import TOKEN, serving

from deltackpt.events import FailureEvent
from deltackpt.format import naming
from deltackpt.ledger.view import JOURNAL
from deltackpt.maintenance.compact import compact
from deltackpt.maintenance.verify import verify_root
from deltackpt.nodes.blobs import MemoryBlobs


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Iterator[Bucket]:
    with (
        mock.patch.dict(os.environ, {"DELTACKPT_NODES_TOKEN": TOKEN}),
        serving(MemoryBlobs(256 << 20)) as server,
        damaged_roots.quick(),
    ):
        yield Bucket(f"nodes://{server.address}/run", tmp_path_factory.mktemp("nodes"))


def test_an_intact_root_is_read_by_all(bucket):
    bucket.put(bucket.whole)
    for reads in READS:
        reads(Readers(bucket.url, bucket.states, CHAINS))


def test_every_entry_point_tolerates_one_damaged_object_of_a_bucket(bucket):
    turns = itertools.cycle(READS)
    for number, key in enumerate(bucket.needed):
        for how in ("removed", ("truncated", "flipped")[number % 2]):
            readers = Readers(bucket.url, bucket.states, bucket.damage(bucket.whole, key, how))
            for reads in {READS[0], next(turns)}:
                with named(f"{key} {how}: {reads.__name__}"):
                    reads(readers)


def test_every_entry_point_tolerates_a_lost_folder_of_a_bucket(bucket):
    for prefix, step in bucket.prefixes.items():
        bucket.put({key: one for key, one in bucket.whole.items() if not key.startswith(prefix)})
        intact = [one for one in CHAINS if step not in CHAINS[one]]
        for reads in READS:
            with named(f"{prefix}: {reads.__name__}"):
                reads(Readers(bucket.url, bucket.states, intact))


@pytest.mark.parametrize("moment", ["whole", "between"])
def test_abandoned_steps_are_never_revived_whichever_entry_is_damaged(bucket, moment):
    before = getattr(bucket, moment)
    steps = [step for step in CHAINS if moment == "whole" or step < 3]
    states = {step: bucket.states[step] for step in steps}
    *older, newest = sorted(key for key in before if key.startswith(JOURNAL))
    for key in older:
        with named(key):
            bucket.damage(before, key, "removed")
            Readers(bucket.url, states, states).restores_the_newest()
    for key, how in itertools.product((older[-1], newest), DAMAGES):
        with named(f"{key} {how}"):
            bucket.damage(before, key, how)
            Readers(bucket.url, states, states).restores_the_newest()
            report = verify_root(bucket.url)
            assert [one.step for one in report.steps if one.restorable] == steps
            assert how == "removed" or any("journal/" in str(one) for one in report.problems)
            damaged_roots.goes_on(bucket.new_node(), states, states)
            assert bucket.steps() == [*steps, 10]


def test_a_lost_entry_is_reported_although_its_copy_is_read(bucket):
    newest = max(key for key in bucket.whole if key.startswith(JOURNAL) and ".copy." not in key)
    bucket.damage(bucket.whole, newest, "removed")
    told = damaged_roots.EventHandler()
    with (
        damaged_roots.reader(bucket.url, None, told) as manager,
        pytest.warns(UserWarning, match=f"{newest}: expected an entry, found no such file"),
    ):
        found = manager.restore_latest(bucket.states[3])
        assert found is not None and found.step == 3 and found.skipped == ()
        manager.restore_latest(bucket.states[3])  # It is reported once.
    [event] = [one for one in told if isinstance(one, FailureEvent)]
    assert (event.operation, event.step, event.code) == ("skip", None, "damaged")


def test_a_step_that_only_a_lost_entry_named_is_reported(bucket):
    without = {key: one for key, one in bucket.whole.items() if ".copy." not in key}
    newest = max(key for key in without if key.startswith(JOURNAL))
    for how in ("truncated", "flipped"):
        bucket.damage(without, newest, how)
        for reads in READS:
            with named(f"{how}: {reads.__name__}"):
                reads(Readers(bucket.url, bucket.states, [1, 2]))
        damaged_roots.goes_on(bucket.new_node(), bucket.states, [1, 2])
        assert bucket.steps() == [1, 2, 10]


def test_a_trainer_continues_whichever_record_of_the_newest_step_is_damaged(bucket):
    records = [key for key in bucket.needed if bucket.step_of(key) == max(CHAINS)]
    records = [key for key in records if key.endswith(".msgpack")]
    for key, how in zip(records, itertools.cycle(DAMAGES), strict=False):
        with named(f"{key} {how}"):
            intact = bucket.damage(bucket.whole, key, how)
            damaged_roots.goes_on(bucket.new_node(), bucket.states, intact)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_entry_point_tolerates_one_damaged_file_or_folder_of_a_directory(tmp_path):
    root, work, turns = tmp_path / "root", tmp_path / "work", itertools.cycle(READS)
    with damaged_roots.quick():
        states = damaged_roots.train(Where(str(root)))
        compact(root, step=2)
        for number, path in enumerate(sorted(root.rglob("*"))):
            below = path.relative_to(root)
            step = naming.step_number(below.parts[0])
            # ``test_damage`` covers the files of a step.
            if below.parts[0] == naming.ROLLED_BACK or (path.is_file() and step in (1, 2)):
                continue
            # A step removed by hand looks like one removed by retention.
            some = {one: states[one] for one in states if below.parts != (str(one),)}
            intact = [one for one in some if step not in CHAINS[one]]
            shutil.copytree(root, work)
            with named(below):
                if path.is_dir():
                    shutil.rmtree(work / below)
                else:
                    damage(work / below, [*DAMAGES][number % len(DAMAGES)])
                for reads in {next(turns), READS[0] if step == 3 else next(turns)}:
                    reads(Readers(str(work), some, intact))
                if below.name.startswith("lease") or below.name in ("embeddings", "3"):
                    damaged_roots.goes_on(Where(str(work)), some, intact)
            shutil.rmtree(work)
