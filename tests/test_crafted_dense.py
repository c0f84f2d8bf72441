# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a log that somebody made by hand, checksums right: leaves, or a typed error."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import model
import pytest
from hypothesis import HealthCheck, example, given, settings
from made_up_logs import StoredFrame, records_in
from test_log_frames import change
from test_log_looking import manager

from deltackpt.errors import Damaged, DamagedWal, DeltackptError
from deltackpt.format import frames
from deltackpt.format.frames import DenseHead
from deltackpt.format.names import PYTREE_METADATA
from deltackpt.storage import ocdbt
from deltackpt.upkeep.verify import verify_root

#: Whether a value is a file, and its key.
Key = tuple[bool, str]
#: What takes the place of a part of a description.
JUNK = [None, 0, -1, 1 << 60, 1.5, "x", "", [], {}, True, [1 << 40], "é", [[]], "|O", "<f8", [0]]


def write(root: Path) -> None:
    """Step 0, and points 1 and 2."""
    state = model.initial()
    touched = model.new_touched(state)
    with manager(root, dense="whole") as trainer:
        trainer.save(0, state, touched=touched)
        for step in (1, 2):
            state, touched = model.train(state, touched, step)
            trainer.append(step, state, touched=touched)
        trainer.wait_until_finished()
        trainer.wait_appended()


class Root(NamedTuple):
    """A root, and the frame of all dense leaves of its newest point."""

    path: Path
    frame: StoredFrame

    @property
    def values(self) -> dict[Key, bytes]:
        """What the frame holds, by whether it is a file, and its key."""
        held = self.frame.head.values
        parts = frames.pieces_of([one.nbytes for one in held], memoryview(self.frame.body), "it")
        return {(one.file, one.key): bytes(part) for one, part in zip(held, parts, strict=True)}

    def rewrite(self, values: dict[Key, bytes]) -> None:
        """Writes the frame with other values, and right checksums."""

        def replace(head: Any) -> None:
            held = [(one, values.get((one["file"], one["key"]))) for one in head["values"]]
            head["values"] = [
                {**one, "nbytes": len(data), "decoded_bytes": len(data)}
                for one, data in held
                if data is not None
            ]

        body = b"".join(data + bytes(-len(data) % 8) for data in values.values())
        change(self.frame.path, self.frame.number, replace, body)

    def restore(self, template: Any = None) -> None:
        """Restores the newest point."""
        with manager(self.path) as trainer, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.restore(2, template)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Root:
    path = tmp_path_factory.mktemp("crafted") / "root"
    write(path)
    return root_at(path)


def root_at(path: Path) -> Root:
    [frame] = [one for one in records_in(path / "log/0/0")[-1] if isinstance(one.head, DenseHead)]
    return Root(path, frame)


@pytest.fixture
def intact(root) -> Iterator[None]:
    """Undoes what is written to the segment."""
    data = root.frame.path.read_bytes()
    yield
    root.frame.path.write_bytes(data)


def altered(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are of another length, flipped, or another description."""
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
    """One part of a description is missing, or something else."""
    if not isinstance(described, (dict, list)) or not described or rng.random() < 0.2:
        return rng.choice(JUNK)
    parts = described if isinstance(described, dict) else range(len(described))
    part = rng.choice([*parts])
    if rng.random() < 0.1:
        del described[part]
    else:
        described[part] = _replaced(described[part], rng)
    return described


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 32), template=st.booleans(), count=st.integers(1, 2))
@example(seed=0, template=True, count=1)
@example(seed=354, template=True, count=2)  # A typed key lacks a chunk.
def test_altered_dense_leaves_are_leaves_or_a_typed_error(root, seed, template, count):
    rng, values = random.Random(seed), root.values
    for key in rng.sample(sorted(values), count):
        if rng.random() < 0.1:
            del values[key]
        else:
            values[key] = altered(values[key], rng)
    data = root.frame.path.read_bytes()
    root.rewrite(values)
    try:
        root.restore(model.initial() if template else None)
    except DeltackptError as error:
        assert str(error)
    finally:
        root.frame.path.write_bytes(data)


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


def test_dense_leaves_without_a_chunk_are_found(root, intact):
    root.rewrite({key: data for key, data in root.values.items() if not key[1].endswith("/0.0")})
    report = verify_root(root.path)
    assert not report.intact and "arrays imply" in report.problems[0].expected
    assert [verdict.restorable for verdict in report.points] == [True, False]


def test_a_point_with_a_dense_body_made_by_hand_is_skipped(root, intact):
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
