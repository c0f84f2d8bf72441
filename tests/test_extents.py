# SPDX-License-Identifier: Apache-2.0
"""Extents: stored bundles survive torn writes, damage, a full file, drops and a second opener."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from damages import flip
from golden import make_golden
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_pack import MemoryPack

from deltackpt.errors import (
    ClosedError,
    Damaged,
    FormatTooNew,
    InUse,
    OptionError,
    OutOfSpace,
    StorageError,
    TargetDiffers,
)
from deltackpt.format import extents as format_extents
from deltackpt.format.extents import BLOCK_BYTES, ExtentDivision, ExtentHeader
from deltackpt.storage.store import Missing
from deltackpt.tiers import extent_store as extents_module
from deltackpt.tiers.bundles import BundleRef
from deltackpt.tiers.extent_store import ExtentFile

#: Each holds three blocks of payload.
EXTENT_BYTES = 4 * BLOCK_BYTES
PAYLOAD_BYTES = EXTENT_BYTES - BLOCK_BYTES
COUNT = 6
GOLDEN = Path(make_golden.__file__).parent / "extents-v1"


def opened(directory: Path, *, count: int = COUNT) -> ExtentFile:
    return ExtentFile(directory, nbytes=count * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)


def read(held: ExtentFile, label: BundleRef) -> bytes:
    out = bytearray(label.nbytes)
    reader = held.open(label)
    reader.read_into(0, memoryview(out))
    return bytes(out)


def holds(held: ExtentFile, *packs: MemoryPack) -> None:
    """Asserts that the file has exactly these bundles, in this order, bit for bit."""
    assert held.refs() == [pack.ref for pack in packs]
    for pack in packs:
        assert read(held, pack.ref) == pack.data


def storing(directory: Path, *packs: MemoryPack) -> ExtentFile:
    held = opened(directory)
    for pack in packs:
        held.put(pack)
    return held


def holds_reopened(held: ExtentFile, *packs: MemoryPack) -> None:
    """Closes the file and asserts that it has exactly these bundles when it is opened again."""
    held.close()
    with contextlib.closing(opened(held.path.parent)) as found:
        holds(found, *packs)


def start_of(extent: int) -> int:
    return ExtentDivision(EXTENT_BYTES, COUNT).start(extent)


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


class Disk:
    """A disk at a power cut: it keeps what was fsynced and any subset of later writes.

    It writes 4 KiB blocks whole or not at all, in any order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.forced: bytes = b""
        #: Position and contents of each block written since the last fsync.
        self.later: list[tuple[int, bytes]] = []
        self.forcings = 0
        self._pwrite, self._fdatasync = os.pwrite, os.fdatasync
        monkeypatch.setattr(os, "pwrite", self._write)
        monkeypatch.setattr(os, "fdatasync", self._force)

    def _write(self, descriptor: int, data: memoryview, at: int) -> int:
        for start in range(0, len(data), BLOCK_BYTES):
            self.later.append((at + start, bytes(data[start : start + BLOCK_BYTES])))
        return self._pwrite(descriptor, data, at)

    def _force(self, descriptor: int) -> None:
        self._fdatasync(descriptor)
        self.forcings += 1
        self.forced, self.later = self.image(range(len(self.later))), []

    def image(self, kept: range | list[int]) -> bytes:
        """The file with only some of the blocks written since the last fsync."""
        image = bytearray(self.forced)
        for number in kept:
            at, block = self.later[number]
            image.extend(bytes(max(0, at + len(block) - len(image))))
            image[at : at + len(block)] = block
        return bytes(image)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def held(tmp_path):
    found = opened(tmp_path)
    yield found
    found.close()


def torn_hold(
    held: ExtentFile, pack: MemoryPack, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, bytes]]:
    """Interrupts a store at its fsync; returns the blocks that it wrote before."""

    class Cut(BaseException):
        pass

    def cut(_: int) -> None:
        raise Cut

    written: list[tuple[int, bytes]] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", cut)
        patched.setattr(ExtentFile, "_let_go", lambda self, many: written.extend(disk.later))
        with pytest.raises(Cut):
            held.put(pack)
    return written


def test_stored_bundles_are_there_after_the_file_is_reopened(tmp_path):
    sizes = {"run.0": 0, "a": 1, "0.-": 5000, "k" * 200: 2 * PAYLOAD_BYTES}
    packs = [MemoryPack(key, nbytes) for key, nbytes in sizes.items()]
    held = storing(tmp_path, *packs)
    holds(held, *packs)
    holds_reopened(held, *packs)


def test_any_range_can_be_read(held):
    pack = MemoryPack("run", 2 * PAYLOAD_BYTES + 100)
    held.put(pack)
    random_ = random.Random(0)
    reader = held.open(pack.ref)
    for _ in range(50):
        start, stop = sorted(random_.choices(range(pack.ref.nbytes + 1), k=2))
        out = bytearray(stop - start)
        reader.read_into(start, memoryview(out))
        assert out == pack.data[start:stop]
    for start, nbytes in ((-1, 1), (pack.ref.nbytes, 1)):
        with pytest.raises(ValueError, match="bytes"):
            reader.read_into(start, memoryview(bytearray(nbytes)))


def test_a_store_fsyncs_once_and_allocates_no_blocks(held, disk):
    written = held.path.stat().st_blocks
    small = MemoryPack("small", 100)
    held.put(small)
    assert disk.forcings == 1
    held.put(MemoryPack("large", 3 * PAYLOAD_BYTES))
    assert disk.forcings == 2
    assert held.path.stat().st_blocks == written
    held.put(small)
    assert disk.forcings == 2
    held.delete([small.ref])
    assert disk.forcings == 3


def test_header_and_payload_of_a_small_bundle_are_one_write(held):
    with mock.patch.object(os, "pwrite", wraps=os.pwrite) as write:
        held.put(MemoryPack("small", 100))
    assert [len(call.args[1]) for call in write.call_args_list] == [2 * BLOCK_BYTES]


def test_no_bytes_of_another_bundle_are_written_after_one(held):
    held.put(MemoryPack("large", PAYLOAD_BYTES))
    held.put(MemoryPack("small", 100))
    start = start_of(1) + BLOCK_BYTES
    assert held.path.read_bytes()[start + 100 : start + PAYLOAD_BYTES].strip(b"\0") == b""


@pytest.mark.parametrize("pieces", ["in one piece", "in pieces"])
def test_a_store_torn_anywhere_leaves_stored_bundles_intact(tmp_path, disk, monkeypatch, pieces):
    if pieces == "in pieces":
        monkeypatch.setattr(extents_module, "_PIECE_BYTES", BLOCK_BYTES)
    before, torn, after = (
        MemoryPack("before", PAYLOAD_BYTES + 1),
        MemoryPack("torn", 3 * PAYLOAD_BYTES),
        MemoryPack("after", 100),
    )
    held = storing(tmp_path / "disk", before)
    written = torn_hold(held, torn, disk, monkeypatch)
    assert len(written) == 3 * EXTENT_BYTES // BLOCK_BYTES
    numbers = [*range(len(written))]
    cuts = [numbers[:cut] for cut in range(len(numbers) + 1)]
    cuts += [numbers[:cut] + numbers[cut + 1 :] for cut in numbers]
    random_ = random.Random(0)
    cuts += [sorted(random_.sample(numbers, random_.randrange(12))) for _ in range(50)]
    disk.later = written
    images = [(len(kept) == len(numbers), disk.image(kept)) for kept in cuts]
    held.close()
    for number, (whole, image) in enumerate(images):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "extents").write_bytes(image)
        expected = [before, *([torn] if whole else [])]
        holds_reopened(opened(folder), *expected)
        found = storing(folder, after)
        holds(found, *expected, after)
        holds_reopened(found, *expected, after)
        shutil.rmtree(folder)


@pytest.mark.parametrize("at", [0, 9, 21, 30, 100, BLOCK_BYTES - 1], ids=lambda at: f"byte{at}")
def test_a_bundle_with_a_flipped_bit_in_a_header_is_not_listed(tmp_path, at):
    packs = [MemoryPack(key, 5000) for key in ("one", "two")]
    storing(tmp_path, *packs).close()
    for bit in range(8):
        flip(tmp_path / "extents", start_of(0) + at, 1 << bit)
        with pytest.warns(UserWarning, match=r"found \[0\] damaged"):
            held = opened(tmp_path)
        holds(held, packs[1])
        held.close()
        flip(tmp_path / "extents", start_of(0) + at, 1 << bit)


def test_a_flipped_bit_in_a_payload_is_found_when_it_is_read(tmp_path):
    pack = MemoryPack("run", 2 * PAYLOAD_BYTES)
    held = storing(tmp_path, pack)
    flip(held.path, start_of(1) + BLOCK_BYTES + 77)
    assert held.refs() == [pack.ref]
    reader = held.open(pack.ref)
    out = bytearray(PAYLOAD_BYTES)
    reader.read_into(0, memoryview(out))
    assert out == pack.data[:PAYLOAD_BYTES]
    for start in (PAYLOAD_BYTES, 2 * PAYLOAD_BYTES - 1):
        with pytest.raises(Damaged, match="extents, extent 1: expected piece 1 of run, crc32c"):
            reader.read_into(start, memoryview(bytearray(1)))
    # A torn write and later damage cannot be distinguished here.
    holds_reopened(held)


def test_a_damaged_bundle_that_is_not_the_newest_stays_listed(tmp_path):
    packs = [MemoryPack(key, 5000) for key in ("one", "two")]
    storing(tmp_path, *packs).close()
    flip(tmp_path / "extents", start_of(0) + BLOCK_BYTES + 77)
    with contextlib.closing(opened(tmp_path)) as held:
        assert held.refs() == [pack.ref for pack in packs]
        with pytest.raises(Damaged):
            read(held, packs[0].ref)


def run_in_process(directory: Path, then: str = "") -> subprocess.CompletedProcess[bytes]:
    """Another process opens the file."""
    program = (
        "import os, signal; from pathlib import Path; from deltackpt.errors import InUse\n"
        "from deltackpt.tiers.extent_store import ExtentFile\n"
        f"try: held = ExtentFile(Path({str(directory)!r}), nbytes={COUNT * EXTENT_BYTES}, "
        f"extent_bytes={EXTENT_BYTES})\n"
        f"except InUse as error: print(error)\n{then}"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True)


def test_another_process_cannot_use_the_same_file(held, tmp_path):
    done = run_in_process(tmp_path)
    assert done.returncode == 0
    assert b"expected no other trainer to use these extents, found one that does" in done.stdout
    with pytest.raises(InUse, match="give each its own"):
        opened(tmp_path)
    held.close()
    opened(tmp_path).close()


def test_a_killed_process_leaves_a_file_that_can_be_opened(tmp_path):
    done = run_in_process(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
    opened(tmp_path).close()


def test_a_full_file_reports_its_contents_and_loses_nothing(held):
    packs = [MemoryPack(f"run.{number}", 2 * PAYLOAD_BYTES) for number in range(3)]
    for pack in packs[:2]:
        held.put(pack)
    large = MemoryPack("large", 2 * PAYLOAD_BYTES + 1)
    expected = (
        "expected 49,152 free bytes for large of 24,577, found 32,768 free and 65,536 held by 2"
    )
    with pytest.raises(OutOfSpace, match=expected):
        held.put(large)
    held.put(packs[2])
    with pytest.raises(OutOfSpace, match="found 0 free"):
        held.put(MemoryPack("small", 1))
    holds(held, *packs)
    held.delete([packs[0].ref, packs[1].ref])
    held.put(large)
    holds(held, packs[2], large)


def test_a_failed_drop_can_be_retried(held):
    pack = MemoryPack("run", 100)
    held.put(pack)
    with mock.patch.object(os, "fdatasync", failing(errno.EIO)):
        with pytest.raises(StorageError, match="force to disk"):
            held.delete([pack.ref])
    held.delete([pack.ref])
    holds(held)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_failed_store_stores_nothing_and_can_be_retried(tmp_path, call):
    before, pack = MemoryPack("before", 100), MemoryPack("run", 2 * PAYLOAD_BYTES)
    held = storing(tmp_path, before)
    with mock.patch.object(os, call, failing(errno.EIO)):
        with pytest.raises(StorageError):
            held.put(pack)
        holds(held, before)
        with pytest.raises(Missing):
            read(held, pack.ref)
    held.put(pack)
    holds(held, before, pack)
    holds_reopened(held, before, pack)
    held = opened(tmp_path)
    held.delete([pack.ref])
    holds_reopened(held, before)


@pytest.mark.parametrize("again", [True, False])
def test_leftovers_of_a_failed_store_can_be_dropped(tmp_path, monkeypatch, again):
    """The whole bundle is on disk: the fsync fails, and all later writes fail, too."""
    held, pack = opened(tmp_path), MemoryPack("run", 100)
    with monkeypatch.context() as patched:

        def fail(_: int) -> None:
            patched.setattr(os, "pwrite", failing(errno.EIO))
            failing(errno.EIO)()

        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(StorageError):
            held.put(pack)
    holds(held)
    if again:
        held.put(pack)
    held.delete([pack.ref])
    holds_reopened(held)


def test_a_bundle_with_a_wrong_checksum_is_not_stored(tmp_path):
    held, pack = opened(tmp_path), MemoryPack("run", 2 * PAYLOAD_BYTES)
    pack.ref = pack.ref._replace(crc32c=pack.ref.crc32c ^ 1)
    with pytest.raises(Damaged, match="run: expected a bundle with crc32c"):
        held.put(pack)
    holds(held)
    holds_reopened(held)


def test_an_unreadable_bundle_is_not_stored(held):
    class Gone(MemoryPack):
        def read_into(self, start: int, out: memoryview) -> None:
            if start >= PAYLOAD_BYTES:
                raise Missing("the step")
            super().read_into(start, out)

    with pytest.raises(Missing, match="the step"):
        held.put(Gone("run", 2 * PAYLOAD_BYTES))
    holds(held)
    held.put(pack := MemoryPack("run", 6 * PAYLOAD_BYTES))
    holds(held, pack)


def test_another_bundle_with_the_same_key_is_refused(held):
    held.put(pack := MemoryPack("run", 100))
    with pytest.raises(TargetDiffers, match="drop that one first"):
        held.put(MemoryPack("run", 101))
    holds(held, pack)


@pytest.mark.parametrize("key", ["", "k" * 201, "A", "a/b", "ä", "a\n"])
def test_invalid_keys_are_refused(held, key):
    pack = MemoryPack("run", 10)
    pack.ref = pack.ref._replace(key=key)
    with pytest.raises(ValueError, match="expected a key of 1 to 200"):
        held.put(pack)
    holds(held)


@pytest.mark.parametrize(
    ("count", "extent_bytes"), [(COUNT + 1, EXTENT_BYTES), (COUNT, 2 * EXTENT_BYTES), (12, 8192)]
)
def test_a_file_with_another_layout_is_left_unchanged(tmp_path, count, extent_bytes):
    pack = MemoryPack("run", 5000)
    held = storing(tmp_path, pack)
    held.close()
    before = held.path.read_bytes()
    with pytest.raises(OptionError, match=r"which hold 1 saves; set nbytes=98304 and extent_byte"):
        ExtentFile(tmp_path, nbytes=count * extent_bytes, extent_bytes=extent_bytes)
    assert held.path.read_bytes() == before
    holds_reopened(held, pack)


def test_a_foreign_or_truncated_file_of_that_name_is_left_unchanged(tmp_path):
    opened(tmp_path).close()
    short = (tmp_path / "extents").read_bytes()[: 3 * EXTENT_BYTES]
    for contents in (b"x" * 10_000, b"", b"x", short):
        (tmp_path / "extents").write_bytes(contents)
        with pytest.raises(Damaged, match="move the file away|more bytes, found the end of the"):
            opened(tmp_path)
        assert (tmp_path / "extents").read_bytes() == contents


def test_a_later_version_is_refused(tmp_path):
    with mock.patch.object(format_extents, "VERSION", 2):
        opened(tmp_path).close()
    with pytest.raises(FormatTooNew, match="version 1 or below, found 2"):
        opened(tmp_path)


def test_lack_of_space_for_the_file_is_reported_at_startup(tmp_path):
    with mock.patch.object(os, "posix_fallocate", failing(errno.ENOSPC)):
        with pytest.raises(OutOfSpace, match=r"allocate 102,400 bytes.*a smaller Extents\.nbytes"):
            opened(tmp_path)
    assert not {path.name for path in tmp_path.iterdir()} - {"extents.lock"}
    opened(tmp_path).close()


def test_an_interrupted_creation_is_restarted(tmp_path):
    (tmp_path / "extents.making").write_bytes(b"half")
    with contextlib.closing(opened(tmp_path)) as held:
        holds(held)
        assert held.path.stat().st_size == BLOCK_BYTES + COUNT * EXTENT_BYTES
        assert held.path.stat().st_blocks * 512 >= held.path.stat().st_size
        assert not (tmp_path / "extents.making").exists()


def test_writes_use_the_page_cache_if_direct_io_is_refused(tmp_path):
    packs = [MemoryPack(f"run.{n}", 7000 * n) for n in range(3)]
    with mock.patch.object(fcntl, "fcntl", failing(errno.EINVAL)):
        held = storing(tmp_path, *packs)
        assert not held.direct
        holds(held, *packs)
        held.close()
    holds_reopened(held, *packs)


def test_room_for_two_bases_and_four_deltas_is_required(tmp_path):
    with contextlib.closing(opened(tmp_path, count=8)) as held:
        held.require_room(2 * PAYLOAD_BYTES, PAYLOAD_BYTES)
        expected = r"Extents\.nbytes: expected at least 163,840 for two ba"
        with pytest.raises(OptionError, match=expected):
            held.require_room(2 * PAYLOAD_BYTES + 1, PAYLOAD_BYTES)


def test_a_closed_file_raises(tmp_path):
    pack = MemoryPack("run", 10)
    held = storing(tmp_path, pack)
    held.close()
    held.close()
    for call in (held.refs, lambda: held.put(pack), lambda: held.delete([pack.ref])):
        with pytest.raises(ClosedError, match="open it again"):
            call()


def test_a_bundle_dropped_during_a_read_is_never_read_as_another(held):
    pack = MemoryPack("run", 2 * PAYLOAD_BYTES)
    held.put(pack)
    reader = held.open(pack.ref)
    held.delete([pack.ref])
    held.put(MemoryPack("other", 6 * PAYLOAD_BYTES))
    with pytest.raises(Damaged):
        reader.read_into(0, memoryview(bytearray(1)))


def test_golden_extents_are_read(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "golden")
    size = make_golden.EXTENT_BYTES
    expected = {key: make_golden.extent_contents(nbytes) for key, nbytes in make_golden.HELD}
    del expected[make_golden.DROPPED]
    with contextlib.closing(
        ExtentFile(tmp_path / "golden", nbytes=make_golden.EXTENTS * size, extent_bytes=size)
    ) as held:
        assert [label.key for label in held.refs()] == [*expected]
        for label in held.refs():
            assert read(held, label) == expected[label.key]


def test_headers_round_trip():
    header = ExtentHeader(2**63, 3, 7, 2**40, 2**32 - 1, "a.b-c")
    block = format_extents.header_block(header)
    assert len(block) == BLOCK_BYTES
    assert format_extents.read_header(block) == header
    assert format_extents.read_header(bytes(BLOCK_BYTES)) is None


class Held(RuleBasedStateMachine):
    """Stores, drops, power cuts and restarts in any order, checked against the acknowledgments."""

    @initialize(piece_blocks=st.integers(1, 3))
    def begin(self, piece_blocks: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(extents_module, "_PIECE_BYTES", piece_blocks * BLOCK_BYTES)
        self.disk = Disk(self.patch)
        self.folder = Path(tempfile.mkdtemp(prefix="deltackpt-test-"))
        self.number = 0
        self.acknowledged: dict[str, MemoryPack] = {}
        self.held = opened(self.folder)

    def teardown(self) -> None:
        self.held.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    def packed(self, nbytes: int) -> MemoryPack:
        self.number += 1
        return MemoryPack(f"run.{self.number}", nbytes)

    @rule(nbytes=st.integers(0, 4 * PAYLOAD_BYTES))
    def hold(self, nbytes: int) -> None:
        pack = self.packed(nbytes)
        try:
            self.held.put(pack)
        except OutOfSpace:
            taken = sum(self.extents(held.ref.nbytes) for held in self.acknowledged.values())
            assert taken + self.extents(nbytes) > COUNT
        else:
            self.acknowledged[pack.ref.key] = pack

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        keys = data.draw(st.sets(st.sampled_from(sorted(self.acknowledged)), min_size=1))
        self.held.delete([self.acknowledged.pop(key).ref for key in keys])

    @rule()
    def start(self) -> None:
        self.held.close()
        self.held = opened(self.folder)

    @rule(nbytes=st.integers(0, 4 * PAYLOAD_BYTES), data=st.data())
    def cut_while_holding(self, nbytes: int, data: st.DataObject) -> None:
        pack = self.packed(nbytes)
        taken = sum(self.extents(held.ref.nbytes) for held in self.acknowledged.values())
        if taken + self.extents(nbytes) > COUNT:
            return
        self.disk.later = torn_hold(self.held, pack, self.disk, self.patch)
        if self.cut(data):
            self.acknowledged[pack.ref.key] = pack

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def cut_while_dropping(self, data: st.DataObject) -> None:
        keys = data.draw(st.sets(st.sampled_from(sorted(self.acknowledged)), min_size=1))
        with self.patch.context() as patched:
            patched.setattr(os, "fdatasync", failing(errno.EIO))
            with pytest.raises(StorageError):
                self.held.delete([self.acknowledged[key].ref for key in keys])
        self.cut(data)
        left = {label.key for label in self.held.refs()}
        assert left <= {*self.acknowledged} <= left | keys
        self.acknowledged = {key: pack for key, pack in self.acknowledged.items() if key in left}

    def cut(self, data: st.DataObject) -> bool:
        """Cuts the power and reopens the file; returns whether all writes survived."""
        kept = [n for n in range(len(self.disk.later)) if data.draw(st.booleans())]
        image, whole = self.disk.image(kept), len(kept) == len(self.disk.later)
        self.held.close()
        self.held.path.write_bytes(image)
        self.disk.forced, self.disk.later = image, []
        self.held = opened(self.folder)
        return whole

    @invariant()
    def what_was_acknowledged_is_there(self) -> None:
        holds(self.held, *self.acknowledged.values())

    @staticmethod
    def extents(nbytes: int) -> int:
        return ExtentDivision(EXTENT_BYTES, COUNT).extents(nbytes)


Held.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestHeld = Held.TestCase
