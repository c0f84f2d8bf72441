# SPDX-License-Identifier: Apache-2.0
"""The reader on synthetic records, in a memory store and a file store: no trainer, no jax."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_layers import Array, Rows, append
from written import write_digested

from deltackpt.errors import BrokenChain, Damaged, ForeignDirectory, StepNotFound
from deltackpt.format import manifest, naming, row_blocks
from deltackpt.format.manifest import LayerRef, Manifest, ParentRef, SaveId, TableEntry
from deltackpt.format.row_blocks import ArrayEntry, Box, FieldSpec, GroupEntry, Segment
from deltackpt.layers import row_indices
from deltackpt.layers.footer import LayerManifest
from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.layers.write import LayerFile
from deltackpt.reading import chains, inventory, reader, shard_arrays, stored_saves
from deltackpt.reading.wal_records import segment_of
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import digests
from deltackpt.storage.posix import DirectFile
from deltackpt.storage.store import FileStore, StorePath
from deltackpt.testing import MemoryStore

ROWS, WIDTH = 40, 4


@pytest.fixture(params=["memory", "files"])
def root(request, tmp_path) -> StorePath:
    (tmp_path / "store").mkdir()
    store = MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store")
    return StorePath(store, "")


def group(rows: int = ROWS) -> GroupEntry:
    values = FieldSpec(name="values", trailing=(WIDTH,), dtype="float32")
    return GroupEntry(name="g0", rows=rows, fields=(values,))


def table(rows: int = ROWS) -> TableEntry:
    return TableEntry(
        name="t", group="g0", offset=0, rows=rows, leaves={"values": (("dict", "t"),)}
    )


def put_array(
    piece: StorePath, segment: str, name: str, data: np.ndarray, scratch: Path, chunk: int
) -> tuple[ArrayEntry, dict[str, digests.Digest]]:
    """Writes an array as a trainer does, and puts its chunks into the store."""
    entry = row_blocks.array_entry(name, data.shape, data.dtype, chunk_rows=chunk)
    below = naming.array_dir(Path(), 0, segment, name).as_posix()
    found = write_digested(scratch / below, entry, [data])
    chunks = {name: digest for name, digest in found.items() if name.startswith("c.")}
    for name in chunks:
        at = piece / below / name
        at.store.put(at.key, (scratch / below / name).read_bytes())
    return entry, {f"{below}/{name}": digest for name, digest in chunks.items()}


def put_save(
    root: StorePath,
    step: int,
    rows: np.ndarray,
    values: np.ndarray,
    scratch: Path,
    *,
    parent: int | None = None,
    chunk: int = 7,
) -> Manifest:
    """Puts a save of some rows of the table; without a parent, a base of all rows."""
    item = root / str(step) / naming.EMBEDDINGS_ITEM
    save_id = SaveId("run", step, 1)
    if parent is None:
        stored = put_base(item, values, scratch / str(step), chunk)
    else:
        stored = put_layer(item, LayerManifest(save_id=save_id), rows, values, scratch, chunk)
    head = Manifest(
        kind="base" if parent is None else "delta",
        save_id=save_id,
        parent=None
        if parent is None
        else ParentRef(save_id=SaveId("run", parent, 1), step_dir=str(parent)),
        reason="made up",
        process=0,
        process_count=1,
        groups=(group(),),
        tables=(table(),),
        features=() if parent is None else (manifest.LAYERS,),
        files={},
        shards=(),
        **stored,
    )
    put_head(root, head)
    return head


def put_base(item: StorePath, values: np.ndarray, scratch: Path, chunk: int) -> dict:
    """Puts the Zarr array of a base; returns the fields of its manifest that depend on it."""
    entry, found = put_array(item, "g0.0", "values", values, scratch, chunk)
    at = item / naming.digests_name(0)
    data = digests.digests_bytes(found)
    at.store.put(at.key, data)
    segment = Segment(
        name="g0.0",
        group="g0",
        columns=(0, WIDTH),
        count=len(values),
        ranges=((0, len(values)),),
        fields=("values",),
        arrays=(entry,),
    )
    return {"segments": (segment,), "item_digests_crc32c": digests.google_crc32c.value(data)}


def put_layer(
    item: StorePath,
    described: LayerManifest,
    rows: np.ndarray,
    values: np.ndarray,
    scratch: Path,
    chunk: int,
) -> dict:
    """Puts the layer of a delta; returns the fields of its manifest that depend on it."""
    held = Rows("g0.0", "g0", rows, [Array("values", values)], codecs={"values": "raw"})
    held = held._replace(columns=(0, WIDTH))
    path, runtime = scratch / f"layer.{described.save_id.step}", Runtime()
    file = LayerFile(DirectFile(path), runtime, fsync=False, chunk_bytes=chunk * WIDTH * 4)
    written = append(file, described, [held])
    file.file.close()
    runtime.close()
    at = item / naming.layer_name(0)
    at.store.put(at.key, path.read_bytes())
    ref = LayerRef(nbytes=written.stop, crc32c=written.crc32c, digest=written.digest)
    layer = LayerReader(StoredBytes(at), ref.nbytes)
    [of_rows] = layer.manifest.row_groups
    segment = segment_of(of_rows, layer.arrays(of_rows).values())
    return {"segments": (dataclasses.replace(segment, encodings=()),), "layer": ref}


def put_head(root: StorePath, head: Manifest) -> None:
    at = root / str(head.save_id.step) / naming.EMBEDDINGS_ITEM / naming.manifest_name(0)
    at.store.put(at.key, manifest.to_bytes(head))


def put_chain(root: StorePath, scratch: Path, touched=((3, 9, 39), (0, 9))) -> list[np.ndarray]:
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


def test_only_the_wanted_boxes_are_read(root, tmp_path):
    states = put_chain(root, tmp_path)
    chain = chains.read_chain(root / "2")
    told: list[tuple[int, int]] = []
    wanted = {"t": {"values": [Box((9, 10), (0, WIDTH)), Box((20, 33), (1, 3))]}}
    found = reader.restore_tables(
        chain, wanted=wanted, progress=lambda done, total: told.append((done, total))
    )
    held = found.buffers["t"]["values"]
    for (rows, columns, _), array in held.items():
        assert np.array_equal(array, states[2][slice(*rows), slice(*columns)])
    assert told[-1] == (found.bytes_read, found.bytes_read)
    assert found.bytes_read < sum(save.head.nbytes for save in chain)


@settings(max_examples=20)
@given(data=st.data())
def test_any_rows_of_any_chain_equal_those_of_its_states(tmp_path_factory, data):
    scratch = tmp_path_factory.mktemp("scratch")
    rows = st.sets(st.integers(0, ROWS - 1), min_size=1)
    root = StorePath(MemoryStore(), "")
    states = put_chain(root, scratch, data.draw(st.lists(rows, max_size=3)))
    start = data.draw(st.integers(0, ROWS - 1))
    stop = data.draw(st.integers(start + 1, ROWS))
    chain = chains.read_chain(root / str(len(states) - 1))
    wanted = {"t": {"values": [Box((start, stop), (0, WIDTH))]}}
    with pytest.MonkeyPatch.context() as patch:
        # Layers are read as a whole, some of them, or array by array.
        layer_bytes = sum(save.head.layer.nbytes for save in chain if save.head.layer)
        patch.setattr(shard_arrays, "_LOADED_BYTES", data.draw(st.integers(0, layer_bytes)))
        found = reader.restore_tables(chain, wanted=wanted).fields["t"]["values"]
    assert np.array_equal(found, states[-1][start:stop])


def test_a_small_layer_is_read_with_one_request(tmp_path, monkeypatch):
    root, requests = StorePath(MemoryStore(), ""), list[str]()
    states = put_chain(root, tmp_path)
    chain, read = chains.read_chain(root / "2"), MemoryStore.read_into

    def counted(store: MemoryStore, key: str, *arguments: Any, **more: Any) -> None:
        requests.append(key)
        read(store, key, *arguments, **more)

    monkeypatch.setattr(MemoryStore, "read_into", counted)
    found = reader.restore_tables(chain).fields["t"]["values"]
    assert np.array_equal(found, states[-1])
    layers = [key for key in requests if key.endswith(naming.layer_name(0))]
    assert sorted(layers) == [f"{step}/embeddings/layer.0" for step in (1, 2)]
    # The footers are cached now, and show which layers have wanted rows.
    requests.clear()
    wanted = {"t": {"values": [Box((1, 3), (0, WIDTH))]}}
    reader.restore_tables(chain, wanted=wanted)
    assert [key for key in requests if key.endswith(naming.layer_name(0))] == [
        "2/embeddings/layer.0"
    ]


def test_row_indices_around_a_range_are_read(root, tmp_path):
    rows = [*range(0, ROWS, 3)]
    put_chain(root, tmp_path, [rows])
    [shard] = stored_saves.read_save(root / "1").shards()
    [segment] = shard.record.segments
    assert row_indices.segment_rows(shard, segment).tolist() == rows
    for start in range(ROWS):
        held = row_indices.rows_within(shard, segment, (start, start + 10))
        assert held.rows.tolist() == [row for row in rows if start <= row < start + 10]
        assert held.first == sum(row < start for row in rows)


def test_a_delta_without_a_layer_is_damaged(root, tmp_path):
    head = put_save(root, 0, np.arange(ROWS), np.zeros((ROWS, WIDTH), np.float32), tmp_path)
    parent = ParentRef(save_id=SaveId("run", 0, 1), step_dir="0")
    save_id = SaveId("run", 1, 1)
    put_head(root, dataclasses.replace(head, kind="delta", parent=parent, save_id=save_id))
    for read in (chains.read_chain, stored_saves.read_save):
        with pytest.raises(Damaged, match="1/embeddings/manifest.0.*a layer if it is a delta"):
            read(root / "1")


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
                named = caught.value.object_name.partition(": ")[0]  # Its last seven components.
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
    aside = StorePath(MemoryStore(), "")
    head = put_save(aside, 1, np.arange(ROWS), states[1], tmp_path / "again")
    item = naming.compacted_dir(root / "1", naming.EMBEDDINGS_ITEM)
    for key in (aside / "1" / naming.EMBEDDINGS_ITEM).keys():
        at = aside / "1" / naming.EMBEDDINGS_ITEM / key
        root.store.put((item / key).key, at.store.get(at.key))
    chain = chains.read_chain(root / "2")
    assert [save.name for save in chain] == ["compacted/1/embeddings", "2/embeddings"]
    assert reader.restore_tables(chain).fields["t"]["values"].tobytes() == states[2].tobytes()
    assert list(stored_saves.compacted_bases(root)) == ["1"]
    other = dataclasses.replace(head, save_id=SaveId("other", 1, 1))
    root.store.put((item / naming.manifest_name(0)).key, manifest.to_bytes(other))
    assert [save.compacted for save in chains.read_chain(root / "2")] == [False] * 3
