# SPDX-License-Identifier: Apache-2.0
"""Crafted dense leaves of a WAL with valid checksums: a restore, or a typed error."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import model
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from made_up_wals import StoredRecord, history_of, records_in
from test_wal_inspection import manager

from deltackpt.errors import Damaged, DamagedWal, DeltackptError
from deltackpt.format import naming, wal_format
from deltackpt.format.naming import PYTREE_METADATA
from deltackpt.format.row_blocks import PLAIN, BlockedValue, Segment
from deltackpt.format.wal_format import packed_values
from deltackpt.layers.read import LayerReader
from deltackpt.layers.write import LayerFile, LayerSegmentSink
from deltackpt.maintenance.verify import verify_root
from deltackpt.reading import dense_state
from deltackpt.reading.shard_arrays import LayerArrays
from deltackpt.reading.stored_saves import read_info
from deltackpt.reading.wal_index import newest_plan
from deltackpt.resources.runtime import Runtime
from deltackpt.save import dense_save
from deltackpt.storage import ocdbt, shard_writer
from deltackpt.storage.posix import DirectFile
from deltackpt.storage.shard_writer import SegmentSink
from deltackpt.wal.segment_files import Fill, FilledRecord, row_groups_of

#: (is_file, key) of a value.
Key = tuple[bool, str]
#: Replacements for a part of a description.
JUNK = [None, 0, -1, 1 << 60, 1.5, "x", "", [], {}, True, [1 << 40], "é", [[]], "|O", "<f8", [0]]


def write(root: Path) -> None:
    """Writes step 0, and recovery points 1 and 2."""
    state, touched = model.start()
    with manager(root, dense="whole") as trainer:
        trainer.save(0, state, touched=touched)
        for step in (1, 2):
            state, touched = model.train(state, touched, step)
            trainer.append(step, state, touched=touched)
        trainer.wait_until_finished()
        trainer.wait_appended()


class Root(NamedTuple):
    """A checkpoint directory, and the newest record of its WAL."""

    path: Path
    record: StoredRecord

    @property
    def values(self) -> dict[Key, bytes]:
        """Values of the record."""
        plan = newest_plan(history_of(self.path / "log"), {0: read_info(self.path / "0").save_id})
        assert plan is not None
        return {key: bytes(data) for key, data in dense_state.at_point(plan).items()}

    def rewrite(self, values: dict[Key, bytes]) -> None:
        """Replaces the values of the record, with valid checksums."""
        head, at = self.record.head, 0
        blocked: list[BlockedValue] = []
        for (file, key), data in values.items():
            value = BlockedValue(
                key=key, file=file, dtype="uint8", count=len(data), group=PLAIN, at=at
            )
            blocked.append(value)
            at += len(data)

        def fill(sink_of: Callable[[str], SegmentSink]) -> FilledRecord:
            for segment in self.record.rows:
                copy_segment(self.record.layer, segment, sink_of(segment.name))
            found = [np.frombuffer(data, np.uint8) for data in values.values()]
            plain = dense_save.write_plain(sink_of, found, zstd=False)
            changed = dataclasses.replace(head, values=packed_values(blocked))
            return FilledRecord(changed, [*self.record.rows, plain])

        rewrite(self.record, fill)

    def restore(self, template: Any = None) -> None:
        """Restores the newest point."""
        with manager(self.path) as trainer, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.restore(2, template)


def copy_segment(layer: LayerReader, segment: Segment, place: SegmentSink) -> None:
    """Writes the arrays of a segment of another layer."""
    arrays = LayerArrays(layer.at, name="it", file="")
    for entry in segment.arrays:
        if entry.name == naming.GAPS:
            place.write_rows(arrays.row_indices(segment).rows)
        else:
            held = np.empty(entry.shape, entry.dtype)
            arrays.read_into(segment, entry, 0, len(held), held)
            shard_writer.write_array(place, entry, [held])


def rewrite(record: StoredRecord, fill: Fill) -> None:
    """Replaces the last record of a segment."""
    manifest = dataclasses.replace(record.layer.manifest, row_groups=(), arrays=())
    path, runtime = record.path.with_suffix(".new"), Runtime()
    file = LayerFile(
        DirectFile(path), runtime, sequence=record.seq, predecessor=manifest.predecessor
    )
    layer = file.start_layer(manifest)
    filled = fill(functools.partial(LayerSegmentSink, layer))
    schema, groups = wal_format.record_head_bytes(filled.head), tuple(row_groups_of(filled))
    layer.finish(dataclasses.replace(manifest, schema=schema, row_groups=groups))
    file.file.close()
    runtime.close()
    record.path.write_bytes(record.path.read_bytes()[: record.layer.start] + path.read_bytes())
    path.unlink()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Root:
    path = tmp_path_factory.mktemp("crafted") / "root"
    write(path)
    return root_at(path)


def root_at(path: Path) -> Root:
    return Root(path, records_in(path / "log/0/0")[-1])


@pytest.fixture
def intact(root) -> Iterator[None]:
    """Restores the segment after the test."""
    data = root.record.path.read_bytes()
    yield
    root.record.path.write_bytes(data)


def altered(data: bytes, rng: random.Random) -> bytes:
    """Replaces, truncates, flips or extends bytes, or alters the description in them."""
    how = rng.randrange(6)
    if how == 0:
        return rng.randbytes(rng.choice([0, 1, 7, len(data)]))
    if how == 1:
        return data[: rng.randrange(len(data) + 1)]
    if how == 2 and data:
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if how == 3:
        return b"[" * 100_000
    try:
        return json.dumps(_replaced(json.loads(data), rng)).encode()
    except (ValueError, RecursionError):
        return data + bytes(4)


def _replaced(described: Any, rng: random.Random) -> Any:
    """Removes or replaces one part of a description."""
    if not isinstance(described, (dict, list)) or not described or rng.random() < 0.2:
        return rng.choice(JUNK)
    numbers = described if isinstance(described, dict) else range(len(described))
    piece = rng.choice([*numbers])
    if rng.random() < 0.1:
        del described[piece]
    else:
        described[piece] = _replaced(described[piece], rng)
    return described


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1 << 32), template=st.booleans(), count=st.integers(1, 2))
@example(seed=0, template=True, count=1)
@example(seed=354, template=True, count=2)  # A chunk of a typed key is missing.
def test_altered_dense_leaves_restore_or_raise_a_typed_error(root, seed, template, count):
    rng, values = random.Random(seed), root.values
    for key in rng.sample(sorted(values), count):
        if rng.random() < 0.1:
            del values[key]
        else:
            values[key] = altered(values[key], rng)
    data = root.record.path.read_bytes()
    root.rewrite(values)
    try:
        root.restore(model.initial() if template else None)
    except DeltackptError as error:
        assert str(error)
    finally:
        root.record.path.write_bytes(data)


@pytest.mark.parametrize(
    "described",
    [{"shape": [1 << 60], "chunks": [1]}, {"shape": [1 << 60], "chunks": [1 << 60]}],
    ids=["chunks", "bytes"],
)
@pytest.mark.parametrize("name", ["dense.kernel", "key"])
def test_an_array_that_claims_to_be_huge_takes_no_memory(root, intact, name, described):
    values, key = root.values, (False, f"{name}/{ocdbt.ZARRAY}")
    root.rewrite({**values, key: json.dumps(json.loads(values[key]) | described).encode()})
    with pytest.raises(Damaged):
        root.restore()


def test_verify_finds_dense_leaves_without_a_chunk(root, intact):
    root.rewrite({key: data for key, data in root.values.items() if not key[1].endswith("/0.0")})
    report = verify_root(root.path)
    assert not report.intact and "arrays imply" in report.problems[0].expected
    assert [verdict.restorable for verdict in report.points] == [True, False]


def test_a_point_with_crafted_dense_leaves_is_skipped(root, intact):
    values, key = root.values, (True, PYTREE_METADATA)
    data = values[key]
    root.rewrite({**values, key: data[:1] + b"\xff" + data[2:]})
    with manager(root.path) as trainer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = trainer.restore_latest(model.initial())
    assert result is not None and result.step == 1
    [(step, error)] = result.skipped
    assert step == 2 and isinstance(error, DamagedWal)
    assert verify_root(root.path).steps[0].restorable
