# SPDX-License-Identifier: Apache-2.0
"""Hand-made bad bundles next to a staging directory: startup skips and reports each one.

Their checksums are correct. Each test starts a whole manager whose staging directory was lost, with
two intact saves and the bad bundles in extents or on peers.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import google_crc32c
import hypothesis
import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import HealthCheck
from test_nodes import TOKEN, serving
from test_tiers import Node, same, without_uploader
from test_tiers_peers import Cluster

import deltackpt
from deltackpt.errors import FormatTooOld, OptionError, RestoreError, StorageError
from deltackpt.events import FailureEvent
from deltackpt.format.extents import ExtentHeader
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.service import discovery
from deltackpt.storage import node_client
from deltackpt.tiers import Copies, Extents, bundles
from deltackpt.tiers.bundles import BundleName, BundleRef
from deltackpt.tiers.extent_store import ExtentFile
from deltackpt.tiers.local_replicas import LocalReplicas
from deltackpt.tiers.peers import PeerTier

EXTENT, EXTENTS = 16 << 10, 500
_PREFIX = 16
_numbers = itertools.count()


class Bundle:
    """A bundle with the given bytes."""

    def __init__(self, key: str, data: bytes):
        self.data, self.ref = data, BundleRef(key, len(data), google_crc32c.value(data))

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self.data[start : start + len(out)]


class Trained(NamedTuple):
    """A remote directory, and the bundles of two saves that never reached it."""

    url: str
    client: node_client.Node
    root: dict[str, bytes]
    good: list[Bundle]
    expected: dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[Trained]:
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("DELTACKPT_NODES_TOKEN", TOKEN)
        without_uploader(patch)
        server = stack.enter_context(serving(MemoryBlobs(64 << 20)))
        client = stack.enter_context(contextlib.closing(node_client.Node(server.address, TOKEN)))
        place = tmp_path_factory.mktemp("trained")
        one = Node(f"nodes://{server.address}/run", "", place / "stage")
        with manager_of(one, extents=extents_of(place)) as manager:
            one.saves(manager, 0, 1)
            root = {key: client.get(key) for key in client.keys("")}
        with contextlib.closing(extent_file(place)) as file:
            good = [Bundle(label.key, bytes_of(file, label)) for label in file.refs()]
        assert len(good) == 2
        yield Trained(one.url, client, root, good, one.held())


def bytes_of(holder: Any, label: BundleRef) -> bytes:
    found = bytearray(label.nbytes)
    reader = holder.open(label)
    reader.read_into(0, memoryview(found))
    return bytes(found)


def extents_of(place: Path) -> Extents:
    return Extents(directory=str(place), nbytes=EXTENTS * EXTENT, extent_bytes=EXTENT)


def extent_file(place: Path) -> ExtentFile:
    return ExtentFile(place, nbytes=EXTENTS * EXTENT, extent_bytes=EXTENT)


def manager_of(one: Node, **tiers: Any) -> deltackpt.CheckpointManager:
    return one.manager(endpoint=None, wait_for="staging", **tiers)


# ---- contents of a bundle


def pieces(bundle: Bundle) -> tuple[dict[str, Any], bytes]:
    """Splits a bundle into its record and the payload."""
    nbytes = int.from_bytes(bundle.data[8:_PREFIX], "little")
    record = bundle.data[_PREFIX : _PREFIX + nbytes]
    return msgpack.unpackb(msgpack.unpackb(record)["body"]), bundle.data[_PREFIX + nbytes :]


def remade(body: Any, payload: bytes, key: str) -> Bundle:
    """A bundle with another record; all checksums are correct."""
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    crc = google_crc32c.value(packed)
    record = msgpack.packb(
        {"format": "deltackpt.pack", "version": 1, "crc32c": crc, "body": packed}
    )
    return Bundle(key, b"dckpack1" + len(record).to_bytes(8, "little") + record + payload)


def name_of(body: dict[str, Any]) -> BundleName:
    one, lineage = body["save_id"], body["lineage"]
    return BundleName(
        *(one["run"], one["attempt"], one["step"]),
        *(lineage["epoch"], lineage["generation"], body["shard"]),
    )


def with_files(body: dict[str, Any], files: Any) -> dict[str, Any]:
    """The record of a later save of the same run, with other files."""
    number = 100 + next(_numbers)
    return body | {"files": files, "save_id": body["save_id"] | {"step": number, "attempt": number}}


def bad_files(body: dict[str, Any]) -> list[Bundle]:
    """Bundles with each of ``FILES``."""
    found = []
    for files, payload in FILES.values():
        other = with_files(body, files)
        found.append(remade(other, payload, name_of(other).key))
    return found


def digest(data: bytes) -> list[int]:
    return [
        len(data),
        google_crc32c.value(data[:-4] if len(data) > 4 else b""),
        int.from_bytes(data[-4:], "little"),
    ]


BIG = (2**32 - 1, 2**32, 2**33, 2**63 - 1, 2**63, 2**64 - 1)
#: Replacements for a save's files, each with its payload.
FILES: dict[str, tuple[Any, bytes]] = {
    **{f"a sum of {big}": ({"a": [1, big, 49]}, b"1") for big in BIG},
    **{f"a tail of {big}": ({"a": [1, 0, big]}, b"1") for big in BIG},
    **{f"a length of {big}": ({"a": [big, 0, 0]}, b"1") for big in BIG},
    "a tail that is longer than the file": ({"a": [1, 0, 256]}, b"1"),
    "many lengths": ({str(i): [2**63, 0, 0] for i in range(8)}, b"1"),
    **{
        f"{depth} folders": ({"d/" * depth + "a": digest(b"1")}, b"1")
        for depth in (200, 1500, 2040)
    },
    "a folder that is a file": ({"a": digest(b"1"), "a/b": digest(b"2")}, b"12"),
    "a file that is a folder": ({"a/b": digest(b"1"), "a": digest(b"2")}, b"12"),
    "a name of 256 letters": ({"x" * 256: digest(b"1")}, b"1"),
    "a name that no file system takes": ({"\U0001f40d" * 100: digest(b"1")}, b"1"),
    "a way out": ({"../../../../escaped": digest(b"1")}, b"1"),
    "an absolute name": ({"/tmp/escaped": digest(b"1")}, b"1"),
    "a NUL": ({"a\0b": digest(b"1")}, b"1"),
    "no file": ({}, b""),
    "files that are none of a save": ({"a": digest(b"1"), "embeddings/b": digest(b"22")}, b"122"),
    "a manifest that is none": ({"embeddings/manifest.0.msgpack": digest(b"no")}, b"no"),
    "files that end early": ({"a": digest(b"1" * 50)}, b"1" * 49),
    "more than the files": ({"a": digest(b"1")}, b"11"),
}
#: Replacements for any value.
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0.5, float("nan"), 2**64 - 1, "", "x" * 300, "\0", b"\xff", [], [[]], {}),
    {"": None},
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a record."""
    yield at
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(inner, (*at, key))


def put(value: Any, at: tuple[Any, ...], to: Any) -> Any:
    """A record with the value at a path replaced."""
    if not at:
        return to
    if isinstance(value, dict):
        return value | {at[0]: put(value[at[0]], at[1:], to)}
    return [put(one, at[1:], to) if number == at[0] else one for number, one in enumerate(value)]


def odd_records(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Records with one value replaced, each with its own key."""
    for at in paths(with_files(body, {"a": digest(b"1")})):
        for to in ODD:
            other = with_files(body, {"a": digest(b"1")})
            key = name_of(other).key
            other = put(other, at, to)
            with contextlib.suppress(Exception):  # The record may no longer have a valid name.
                key = name_of(other).key if BundleName.parse(name_of(other).key) else key
            yield key, other
    for depth in (500, 1000, 1020, 5000, 100_000):
        for field in ("files", "lineage", "unknown"):
            other = with_files(body, {"a": digest(b"1")})
            text, deep = msgpack.packb(field), b"\x91" * depth + b"\xc0"
            packed = msgpack.packb({name: one for name, one in other.items() if name != field})
            count = len(other) if field in other else len(other) + 1
            yield name_of(other).key, bytes([0x80 | count]) + packed[1:] + text + deep


def test_every_fault_of_a_bundle_is_a_typed_error(trained, tmp_path):
    body, _ = pieces(trained.good[1])
    bad = [remade(other, b"1", key) for key, other in odd_records(body)] + bad_files(body)
    for number, bundle in enumerate(bad):
        with contextlib.suppress(RestoreError, StorageError):
            bundles.unpack(bundle, bundle.ref, tmp_path / str(number), fsync=False)


def test_a_bundle_of_a_development_version_is_named_as_one(trained, tmp_path):
    body, payload = pieces(trained.good[1])
    key = name_of(body).key
    older = remade(
        {{"shard": "part"}.get(field, field): one for field, one in body.items()}, payload, key
    )
    with pytest.raises(FormatTooOld, match="development version"):
        bundles.unpack(older, older.ref, tmp_path / "bundle", fsync=False)


# ---- startup


@contextlib.contextmanager
def in_extents(place: Path, bundles: list[Bundle], also: Callable[[Any], None]) -> Iterator[dict]:
    with contextlib.closing(extent_file(place / "extents")) as file:
        for bundle in bundles:
            file.put(bundle)
        also(file)
    yield {"extents": extents_of(place / "extents")}


@contextlib.contextmanager
def at_peers(place: Path, bundles: list[Bundle], also: Callable[[Any], None]) -> Iterator[dict]:
    with contextlib.closing(Cluster(2)) as cluster, pytest.MonkeyPatch.context() as patch:
        group = cluster.peer_group("root", "embeddings", Copies(), "0")
        patch.setattr(discovery, "peer_group", cluster.peer_group)
        patch.setattr(discovery, "require_nodes", lambda *_: None)
        with contextlib.closing(PeerTier(group)) as peers:
            for bundle in bundles:
                peers.put(bundle)
            also(peers)
            yield {"peers": Copies()}


HOLDERS = {"extents": in_extents, "peers": at_peers}


def start(
    trained: Trained,
    place: Path,
    holder: str,
    bad: list[Bundle],
    also: Callable[[Any], None] = lambda held: None,
) -> str:
    """Starts a trainer with bad bundles and a lost staging directory; returns its warnings."""
    trained.client.delete(trained.client.keys(""))
    for key, data in trained.root.items():
        trained.client.put(key, [data])
    one = Node(trained.url, "", place / "stage")
    with (
        HOLDERS[holder](place, [*trained.good, *bad], also) as tiers,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        with manager_of(one, **tiers) as manager:
            found = one.restore(manager)
            assert found.step == 1 and found.source == (holder,) * 2
            assert all(isinstance(error, RestoreError) for _, error in found.skipped)
            skipped = {number for number, _ in found.skipped}
            assert skipped == {event.step for event in one.events.of(FailureEvent)}
            assert same(one.held(), trained.expected)
            assert one.save(manager, 2).kind == "delta"
            manager.wait_until_finished()
    assert not [*Path("/tmp").glob("escaped")] and not [*place.rglob("escaped")]
    return "\n".join([f"skipped {skipped}", *(str(one.message) for one in warned)])


@pytest.mark.parametrize("holder", HOLDERS)
def test_startup_skips_and_reports_a_bundle_with_bad_files(trained, tmp_path, holder):
    body, _ = pieces(trained.good[1])
    bad = bad_files(body)
    warned = start(trained, tmp_path, holder, bad)
    for what, bundle in zip(FILES, bad):
        # If its only fault is that it is not a save, the restore finds that.
        assert bundle.ref.key in warned or "manifest" in what or "file" in what, what


@pytest.mark.parametrize("holder", HOLDERS)
def test_startup_skips_a_bundle_with_a_bad_record(trained, tmp_path, holder):
    body, _ = pieces(trained.good[1])
    bad = {key: remade(other, b"1", key) for key, other in odd_records(body)}
    start(trained, tmp_path, holder, [*bad.values()])


@pytest.mark.parametrize("holder", HOLDERS)
@hypothesis.settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_startup_skips_a_bundle_with_random_bytes(trained, tmp_path_factory, holder, seed):
    drawn = random.Random(seed)
    body, payload = pieces(trained.good[1])
    bad = []
    for _ in range(30):
        other = with_files(body, body["files"])
        packed = bytearray(msgpack.packb(other))
        for at in drawn.sample(range(len(packed)), drawn.choice([1, 1, 2, 5])):
            packed[at] = drawn.choice(
                [0, 0x7F, 0x80, 0x90, 0xC1, 0xDD, 0xDF, 0xFF, drawn.randrange(256)]
            )
        one = remade(bytes(packed), payload, name_of(other).key)
        if drawn.random() < 0.3:
            data = bytearray(one.data)
            data[drawn.randrange(_PREFIX)] = drawn.randrange(256)
            one = Bundle(one.ref.key, bytes(data[: drawn.choice([len(data), 17, 16, 9, 1])]))
        bad.append(one)
    start(trained, tmp_path_factory.mktemp("start"), holder, bad)


def test_impossible_extent_headers_do_not_fail_startup(trained, tmp_path):
    most, room = 2**64 - 1, EXTENT - 4096
    headers = [
        ExtentHeader(most, 0, 0, 0, 0, ""),
        ExtentHeader(most, 0, 1, room, 0, "e0.1.2.3.4.0"),
        ExtentHeader(most - 1, 0, 1, 0, 0, "e0.1.2.3.4.1"),
        ExtentHeader(7, 0, 1, most, 0, "e0.1.2.3.4.2"),
        ExtentHeader(7, 0, 2**32 - 1, room, 0, "e0.1.2.3.4.3"),
        ExtentHeader(7, 2**32 - 1, 2**32 - 1, room, 0, "e0.1.2.3.4.4"),
        ExtentHeader(7, 0, 1, 0, 0, "e0.1.2.3.4.5"),
        ExtentHeader(2**40, 0, 1, 1, 0, f"e0.{10**17}.2.3.4.0"),
    ]

    def also(file: ExtentFile) -> None:
        for number, header in enumerate(headers, 1):
            file._write_header(file._division.start(EXTENTS - number), header)
        file._file.sync()

    start(trained, tmp_path, "extents", [], also)


def test_impossible_fragments_do_not_fail_startup(trained, tmp_path):
    big = 10**15 - 1
    later = BundleName.parse(trained.good[1].ref.key)._replace(step=900, attempt=900).key
    names = [
        *(f"{k}.{m}.0.{n}.0" for k, m in ((33, 1), (31, 2), (999, 0), (0, 1)) for n in range(33)),
        *(f"{k}.{m}.0.{n}.0" for k, m in ((2, 2), (1, 0), (3, 0), (31, 1)) for n in range(4)),
    ]
    labels = (f"{big}.0", f"{2**32}.{2**32 - 1}", "1.9999999999", "\u0661.0", "0.0")
    keys = [
        *(f"root/{later}/2.0/{name}" for name in names),
        *(f"root/{later}/{label}/1.0.0.0.0" for label in labels),
        *("root/x", f"root/{later}", "root/" + "a/" * 400 + "b", "root/" + "\U0001f40d" * 90),
    ]

    def also(held: PeerTier) -> None:
        (node, *_) = held._others
        for key in keys:
            held._nodes[node].put(key, [b"1"])

    assert later in start(trained, tmp_path, "peers", [], also)


def test_a_bundle_of_another_remote_directory_is_skipped(trained, tmp_path):
    body, payload = pieces(trained.good[1])
    other = with_files(body, body["files"]) | {"root": "s3://elsewhere/run"}
    foreign = remade(other, payload, name_of(other).key)
    assert "s3://elsewhere/run" in start(trained, tmp_path, "extents", [foreign])


def test_a_bundle_of_another_save_than_it_claims_is_skipped(trained, tmp_path):
    body, payload = pieces(trained.good[1])
    other = with_files(body, body["files"])
    changed = remade(other, payload, name_of(other).key)
    warned = start(trained, tmp_path, "extents", [changed])
    assert changed.ref.key in warned
    assert warned.startswith(f"skipped {{{name_of(other).step}}}\n")


class _Peers:
    """A tier of bundles in memory."""

    name = "peers"

    def __init__(self, held: list[Bundle]):
        self._held = {one.ref: one for one in held}

    def refs(self) -> list[BundleRef]:
        return [*self._held]

    def open(self, ref: BundleRef) -> Bundle:
        return self._held[ref]


def test_extents_of_another_remote_directory_are_refused_although_peers_hold_saves(
    trained, tmp_path
):
    body, payload = pieces(trained.good[1])
    other = with_files(body, body["files"]) | {"root": "s3://elsewhere/run"}
    with contextlib.closing(extent_file(tmp_path)) as file:
        file.put(remade(other, payload, name_of(other).key))
        replicas = LocalReplicas(cast(Any, None), cast(Any, None), file)
        replicas.peers = cast(PeerTier, _Peers(trained.good))
        with pytest.raises(OptionError, match=r"Tiers\.extents.*found saves of s3://elsewhere"):
            replicas.manifests(body["root"])
        # One of the directory's own: the other is left where it is.
        file.put(trained.good[0])
        with pytest.warns(UserWarning, match="left where it is"):
            assert len(replicas.manifests(body["root"])) == 2
