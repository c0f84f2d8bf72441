# SPDX-License-Identifier: Apache-2.0
"""The reader on synthetic records, in a memory store and a file store: no trainer, no jax."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import write_digested

from deltackpt.errors import BrokenChain, Damaged, ForeignDirectory, StepNotFound
from deltackpt.format import gaps, manifest, names
from deltackpt.format.blocks import Box
from deltackpt.format.manifest import Manifest, ParentRef, SaveId, TableEntry
from deltackpt.format.segments import ArrayEntry, FieldSpec, GroupEntry, Segment
from deltackpt.layers import merge
from deltackpt.reading import chains, inventory, reader, saves
from deltackpt.storage import arrays, digests
from deltackpt.storage.digests import Digests
from deltackpt.storage.store import FileStore, Spot
from deltackpt.testing import MemoryStore

ROWS, WIDTH = 40, 4


@pytest.fixture(params=["memory", "files"])
def root(request, tmp_path) -> Spot:
    (tmp_path / "store").mkdir()
    store = MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store")
    return Spot(store, "")


def group(rows: int = ROWS) -> GroupEntry:
    values = FieldSpec(name="values", trailing=(WIDTH,), dtype="float32")
    return GroupEntry(name="g0", rows=rows, fields=(values,))


def table(rows: int = ROWS) -> TableEntry:
    return TableEntry(
        name="t", group="g0", offset=0, rows=rows, leaves={"values": (("dict", "t"),)}
    )


def put_array(
    part: Spot, segment: str, name: str, data: np.ndarray, scratch: Path, chunk: int
) -> tuple[ArrayEntry, dict[str, digests.Digest]]:
    """Writes an array as a trainer does, and puts its chunks into the store."""
    entry = arrays.array_entry(name, data.shape, data.dtype, chunk_rows=chunk)
    below = names.array_dir(Path(), 0, segment, name).as_posix()
    found = write_digested(scratch / below, entry, [data])
    chunks = {name: digest for name, digest in found.items() if name.startswith("c/")}
    for name in chunks:
        at = part / below / name
        at.store.put(at.key, (scratch / below / name).read_bytes())
    return entry, {f"{below}/{name}": digest for name, digest in chunks.items()}


def put_save(
    root: Spot,
    step: int,
    rows: np.ndarray,
    values: np.ndarray,
    scratch: Path,
    *,
    parent: int | None = None,
    chunk: int = 7,
) -> Manifest:
    """Puts a save of some rows of the table; without a parent, a base of all rows."""
    item = root / str(step) / names.EMBEDDINGS_ITEM
    base = parent is None
    entry, found = put_array(item, "g0.0", "values", values, scratch / str(step), chunk)
    held = [entry]
    if not base:
        numbers, more = put_array(
            item, "g0.0", names.GAPS, gaps.encode_gaps(rows), scratch / str(step), 5
        )
        held.append(numbers)
        found |= more
    at = item / names.digests_name(0)
    data = digests.digests_bytes(Digests.of(found))
    at.store.put(at.key, data)
    segment = Segment(
        name="g0.0",
        group="g0",
        columns=(0, WIDTH),
        count=len(rows),
        ranges=((0, ROWS),) if base else None,
        fields=("values",),
        arrays=tuple(held),
    )
    head = Manifest(
        kind="base" if base else "delta",
        save_id=SaveId("run", step, 1),
        parent=None if base else ParentRef(save_id=SaveId("run", parent, 1), step_dir=str(parent)),
        reason="made up",
        process=0,
        process_count=1,
        groups=(group(),),
        tables=(table(),),
        segments=(segment,),
        item_digests_crc32c=digests.google_crc32c.value(data),
    )
    put_head(root, head)
    return head


def put_head(root: Spot, head: Manifest) -> None:
    at = root / str(head.save_id.step) / names.EMBEDDINGS_ITEM / names.manifest_name(0)
    at.store.put(at.key, manifest.to_bytes(head))


def put_chain(root: Spot, scratch: Path, touched=((3, 9, 39), (0, 9))) -> list[np.ndarray]:
    """Puts a base and deltas of these rows; returns the table after each."""
    rng = np.random.default_rng(0)
    current = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    put_save(root, 0, np.arange(ROWS), current, scratch)
    states = [current]
    for step, chosen in enumerate(touched, start=1):
        rows = np.array(sorted(chosen), np.int64)
        current = current.copy()
        current[rows] = rng.normal(size=(len(rows), WIDTH)).astype(np.float32)
        put_save(root, step, rows, current[rows], scratch, parent=step - 1)
        states.append(current)
    return states


def test_a_chain_is_merged_newest_row_wins(root, tmp_path):
    states = put_chain(root, tmp_path)
    for step, state in enumerate(states):
        chain = chains.read_chain(root / str(step))
        found = reader.restore_tables(chain)
        assert found.fields["t"]["values"].tobytes() == state.tobytes()
        assert [info.step_dir for info in found.chain] == [str(n) for n in range(step + 1)]
        assert [save.name for save in chain] == [f"{n}/embeddings" for n in range(step + 1)]


def test_only_the_wanted_boxes_are_read(root, tmp_path):
    states = put_chain(root, tmp_path)
    chain = chains.read_chain(root / "2")
    told: list[tuple[int, int]] = []
    wanted = {"t": {"values": [Box((9, 10), (0, WIDTH)), Box((20, 33), (1, 3))]}}
    found = reader.restore_tables(
        chain, wanted=wanted, progress=lambda done, total: told.append((done, total))
    )
    held = found.buffers["t"]["values"]
    for (rows, columns), array in held.items():
        assert np.array_equal(array, states[2][slice(*rows), slice(*columns)])
    assert told[-1] == (found.bytes_read, found.bytes_read)
    assert found.bytes_read < sum(save.head.nbytes for save in chain)


@settings(max_examples=20)
@given(data=st.data())
def test_any_rows_of_any_chain_equal_those_of_its_states(tmp_path_factory, data):
    scratch = tmp_path_factory.mktemp("scratch")
    rows = st.sets(st.integers(0, ROWS - 1), min_size=1)
    root = Spot(MemoryStore(), "")
    states = put_chain(root, scratch, data.draw(st.lists(rows, max_size=3)))
    start = data.draw(st.integers(0, ROWS - 1))
    stop = data.draw(st.integers(start + 1, ROWS))
    chain = chains.read_chain(root / str(len(states) - 1))
    wanted = {"t": {"values": [Box((start, stop), (0, WIDTH))]}}
    found = reader.restore_tables(chain, wanted=wanted).fields["t"]["values"]
    assert np.array_equal(found, states[-1][start:stop])


def test_row_indices_are_read_in_consecutive_pieces(root, tmp_path):
    rows = tuple(range(0, ROWS, 3))
    put_chain(root, tmp_path, [rows])
    [part] = saves.read_save(root / "1").parts()
    [segment] = part.record.segments
    assert merge.segment_rows(part, segment).tolist() == list(rows)
    found = [merge.gap_rows(part, segment, 0, 5)]
    for start in range(5, len(rows), 5):
        stop = min(start + 5, len(rows))
        found.append(merge.gap_rows(part, segment, start, stop, after=int(found[-1][-1])))
    assert np.concatenate(found).tolist() == list(rows)


def test_every_object_that_is_altered_or_missing_is_named(root, tmp_path, nobody_removes_steps):
    put_chain(root, tmp_path)
    store = root.store
    assert not any(inventory.verify_step(root / str(step)) for step in range(3))
    for key in store.keys(""):
        sound = store.get(key)
        for how, altered in (
            ("flipped", sound[:-5] + bytes([sound[-5] ^ 1]) + sound[-4:]),
            ("cut", sound[:-1]),
            ("missing", None),
        ):
            if altered is None:
                store.delete([key])
            else:
                store.put(key, altered)
            step = key.partition("/")[0]
            with pytest.raises((Damaged, BrokenChain, ForeignDirectory, StepNotFound)) as caught:
                reader.restore_tables(chains.read_chain(root / "2"))
            if isinstance(caught.value, Damaged):
                named = caught.value.object_name  # Its last seven components.
                assert named.endswith(key) or key.endswith(named), how
            assert inventory.verify_step(root / step), (key, how)
            store.put(key, sound)
    reader.restore_tables(chains.read_chain(root / "2"))


def test_a_base_that_lacks_rows_is_damage(root, tmp_path):
    head = put_save(root, 0, np.arange(ROWS), np.zeros((ROWS, WIDTH), np.float32), tmp_path)
    [segment] = head.segments
    less = dataclasses.replace(segment, ranges=((0, 20), (21, ROWS + 1)))
    put_head(root, dataclasses.replace(head, segments=(less,)))
    with pytest.raises(Damaged, match="0/embeddings"):
        reader.restore_tables(chains.read_chain(root / "0"))


def test_a_compacted_base_replaces_its_own_save_only(root, tmp_path):
    states = put_chain(root, tmp_path)
    aside = Spot(MemoryStore(), "")
    head = put_save(aside, 1, np.arange(ROWS), states[1], tmp_path / "again")
    item = names.compacted_dir(root / "1", names.EMBEDDINGS_ITEM)
    for key in (aside / "1" / names.EMBEDDINGS_ITEM).keys():
        at = aside / "1" / names.EMBEDDINGS_ITEM / key
        root.store.put((item / key).key, at.store.get(at.key))
    chain = chains.read_chain(root / "2")
    assert [save.name for save in chain] == ["compacted/1/embeddings", "2/embeddings"]
    assert reader.restore_tables(chain).fields["t"]["values"].tobytes() == states[2].tobytes()
    assert list(saves.compacted_bases(root)) == ["1"]
    other = dataclasses.replace(head, save_id=SaveId("other", 1, 1))
    root.store.put((item / names.manifest_name(0)).key, manifest.to_bytes(other))
    assert [save.compacted for save in chains.read_chain(root / "2")] == [False] * 3
