# SPDX-License-Identifier: Apache-2.0
"""Bundles: a save as one stream, and the same files again."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import google_crc32c
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from shown import bytes_below

import deltackpt
from deltackpt.errors import Damaged, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.reading import stored_saves
from deltackpt.storage import digests
from deltackpt.storage.store import Missing, store_path
from deltackpt.tiers import bundles
from deltackpt.tiers.bundles import BundleManifest, BundleName, BundleRef, StagedBundle
from deltackpt.tiers.staging import Orders, RunLineage

SAVE = SaveId("ab12", 7, 3)


def test_joined_checksums_equal_the_checksum_of_the_whole():
    drawn = np.random.default_rng(0)
    lengths = (
        (0, 0),
        (1, 0),
        (0, 1),
        (5, 1000),
        (4097, 1 << 20),
        (1 << 20, 3),
        (9, digests.BLOCK_BYTES),
    )
    for first, second in lengths:
        one, two = (drawn.integers(0, 256, count, np.uint8).tobytes() for count in (first, second))
        whole = google_crc32c.value(one + two)
        assert digests.joined(google_crc32c.value(one), google_crc32c.value(two), second) == whole


def made(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def packed(
    folder: Path, save_id: SaveId = SAVE, epoch: int = 4, generation: int = 1
) -> StagedBundle:
    lineage = RunLineage(
        run=save_id.run,
        epoch=epoch,
        holder="somebody",
        generation=generation,
        ancestors={"cd34": 2},
    )
    orders = Orders(
        number=1,
        lease=1,
        url="s3://bucket/run",
        endpoint=None,
        item="embeddings",
        lineages=(lineage,),
    )
    return StagedBundle(folder, bundles.manifest_of(folder, save_id, orders))


class Held:
    """A bundle in memory."""

    def __init__(self, pack: StagedBundle):
        self.data = bytearray(pack.ref.nbytes)
        self.ref = pack.ref
        pack.read_into(0, memoryview(self.data))

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self.data[start : start + len(out)]


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> Path:
    """A base and its items, as a manager writes them."""
    root = tmp_path_factory.mktemp("packing") / "run"
    with deltackpt.CheckpointManager(
        root, handlers={"embeddings": deltackpt.Tables(select="tables/*")}
    ) as manager:
        state = {
            "tables": {"a": np.arange(4000, dtype=np.float32).reshape(-1, 4)},
            "dense": np.ones(300_000, np.float32),
        }
        manager.save(7, state, metrics={"loss": 1.0})
    return root / "7"


def test_a_step_comes_out_of_its_bundle_byte_for_byte(step, tmp_path):
    held = Held(packed(step, stored_saves.read_info(store_path(step), "embeddings").save_id))
    assert google_crc32c.value(bytes(held.data)) == held.ref.crc32c
    bundles.unpack(held, held.ref, tmp_path / "out", fsync=True)
    assert bytes_below(tmp_path / "out") == bytes_below(step)


@hypothesis.given(
    lengths=st.lists(st.integers(0, 9000), max_size=6),
    cuts=st.lists(st.integers(0, 40_000), max_size=8),
)
def test_any_range_of_a_bundle_matches_the_whole(tmp_path_factory, lengths, cuts):
    folder = tmp_path_factory.mktemp("ranges")
    drawn = np.random.default_rng(1)
    for number, length in enumerate(lengths):
        (folder / f"f{number}").write_bytes(drawn.integers(0, 256, length, np.uint8).tobytes())
    pack = packed(folder)
    whole = Held(pack).data
    assert google_crc32c.value(bytes(whole)) == pack.ref.crc32c
    ends = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    for start, end in zip(ends, ends[1:]):
        piece = bytearray(end - start)
        pack.read_into(start, memoryview(piece))
        assert piece == whole[start:end]


def test_a_flipped_bit_anywhere_is_detected(tmp_path):
    folder = made(tmp_path / "7", {"a/b": b"some bytes", "c": b"", "d": bytes(range(200))})
    pack = packed(folder)
    for place in range(pack.ref.nbytes):
        held = Held(pack)
        held.data[place] ^= 1 << place % 8
        with pytest.raises(Damaged):
            bundles.unpack(held, held.ref, tmp_path / f"out{place}", fsync=False)


def test_a_bundle_is_only_unpacked_under_its_name(tmp_path):
    held = Held(packed(made(tmp_path / "7", {"a": b"1"})))
    other = BundleRef(BundleName.parse(held.ref.key)._replace(step=8).key, *held.ref[1:])
    with pytest.raises(Damaged, match="the bundle of that name"):
        bundles.unpack(held, other, tmp_path / "out", fsync=False)


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../b", "", "a//b"])
def test_no_name_in_a_bundle_leads_out_of_it(tmp_path, name):
    pack = packed(made(tmp_path / "7", {"a": b"1"}))
    contents = bundles.read_manifest(Held(pack), pack.ref)[0]
    (digest,) = contents.files.values()
    hostile = StagedBundle(tmp_path, dataclasses.replace(contents, files={name: digest}))
    head = hostile._head
    held = Held(pack)
    held.data[:] = head + b"1"
    with pytest.raises(Damaged):
        bundles.unpack(held, hostile.ref, tmp_path / "out", fsync=False)


def test_a_step_removed_while_it_is_packed_is_missing_and_a_truncated_file_is_damage(tmp_path):
    folder = made(tmp_path / "7", {"a": b"1" * 100})
    pack = packed(folder)
    (folder / "a").write_bytes(b"1" * 99)
    with pytest.raises(Damaged, match="100 bytes, found 99 bytes"):
        Held(pack)
    (folder / "a").unlink()
    with pytest.raises(Missing):
        Held(pack)
    with pytest.raises(Missing):
        packed(tmp_path / "8")


def test_a_bundle_that_cannot_be_unpacked_is_a_typed_error(tmp_path):
    held = Held(packed(made(tmp_path / "7", {"a": b"1"})))
    (tmp_path / "out").mkdir()
    with pytest.raises(StorageError, match="unpack a save"):
        bundles.unpack(held, held.ref, tmp_path / "out", fsync=False)


def test_keys_name_saves_and_the_newest_comes_first():
    names = [
        BundleName("ab12", 1, 5, 2, 0, 0),
        BundleName("ab12", 0, 4, 2, 1, 0),
        BundleName("cd34", 0, 9, 1, 3, 0),
    ]
    labels = [BundleRef(name.key, 1, 0) for name in names]
    found = bundles.newest_first([*labels, BundleRef("no key", 1, 0)])
    assert [name for name, _ in found] == [names[1], names[0], names[2]]
    assert [name.save_id for name in names] == [
        SaveId("ab12", 5, 1),
        SaveId("ab12", 4, 0),
        SaveId("cd34", 9, 0),
    ]


def test_contents_record_the_moment_and_the_root(tmp_path):
    held = Held(packed(made(tmp_path / "7", {"a": b"1"})))
    found, start = bundles.read_manifest(held, held.ref)
    assert isinstance(found, BundleManifest) and found.lineage.moment == (4, 1)
    assert found.lineage.ancestors == {"cd34": 2}
    assert (found.root, found.lineage.holder) == ("s3://bucket/run", "somebody")
    assert found.save_id == SAVE
    assert held.ref.nbytes - start == 1


def test_the_golden_bundle_is_read_and_written_the_same(tmp_path):
    folder = Path(__file__).parent / "golden" / "pack-v1"
    (path,) = (one for one in folder.iterdir() if one.is_file())
    key, _, crc32c = path.name.rpartition(".")
    held = types.SimpleNamespace(data=path.read_bytes())
    held.read_into = lambda start, out: out.__setitem__(
        slice(None), held.data[start : start + len(out)]
    )
    label = BundleRef(key, len(held.data), int(crc32c, 16))
    found = bundles.unpack(held, label, tmp_path / "out", fsync=False)
    assert bytes_below(tmp_path / "out") == bytes_below(folder / "files")
    again = Held(StagedBundle(folder / "files", found))
    assert (bytes(again.data), again.ref) == (held.data, label)
