# SPDX-License-Identifier: Apache-2.0
"""Extents: what was held is there, whatever is torn, damaged, full, dropped or opened twice."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

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
from deltackpt.format.extents import BLOCK_BYTES, Division, Header
from deltackpt.storage.store import Missing
from deltackpt.tiers import extents as extents_module
from deltackpt.tiers.extents import ExtentFile
from deltackpt.tiers.packing import Label

#: Three blocks of payload in each.
EXTENT_BYTES = 4 * BLOCK_BYTES
PAYLOAD_BYTES = EXTENT_BYTES - BLOCK_BYTES
COUNT = 6
GOLDEN = Path(make_golden.__file__).parent / "extents-v1"


def opened(directory: Path, *, count: int = COUNT) -> ExtentFile:
    return ExtentFile(directory, nbytes=count * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)


def read(held: ExtentFile, label: Label) -> bytes:
    out = bytearray(label.nbytes)
    with held.reading(label) as reader:
        reader.read_into(0, memoryview(out))
    return bytes(out)


def holds(held: ExtentFile, *packs: MemoryPack) -> None:
    """Just these, in this order, bit for bit."""
    assert held.labels() == [pack.label for pack in packs]
    for pack in packs:
        assert read(held, pack.label) == pack.data


class Disk:
    """What a disk keeps of a file where the power goes: what was forced, and of the rest anything.

    Blocks of 4 KiB are written whole or not at all, in any order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.forced: bytes = b""
        #: Position and contents of each block that was written since.
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
        """The file with some of the blocks that were written last."""
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
    """The blocks that a hold writes before it forces them, where it gets no further."""

    class Cut(BaseException):
        pass

    def cut(_: int) -> None:
        raise Cut

    written: list[tuple[int, bytes]] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", cut)
        patched.setattr(ExtentFile, "_let_go", lambda self, many: written.extend(disk.later))
        with pytest.raises(Cut):
            held.hold(pack)
    return written


def test_what_is_held_is_there_when_the_file_is_opened_again(tmp_path):
    packs = [MemoryPack(f"run.{n}", size) for n, size in enumerate((0, 1, 5000, 2 * PAYLOAD_BYTES))]
    held = opened(tmp_path)
    for pack in packs:
        held.hold(pack)
    holds(held, *packs)
    held.close()
    held = opened(tmp_path)
    holds(held, *packs)
    held.close()


def test_any_range_is_read(held):
    pack = MemoryPack("run", 2 * PAYLOAD_BYTES + 100)
    held.hold(pack)
    random_ = random.Random(0)
    with held.reading(pack.label) as reader:
        for _ in range(50):
            start, stop = sorted(random_.choices(range(pack.label.nbytes + 1), k=2))
            out = bytearray(stop - start)
            reader.read_into(start, memoryview(out))
            assert out == pack.data[start:stop]
        for start, nbytes in ((-1, 1), (pack.label.nbytes, 1)):
            with pytest.raises(ValueError, match="bytes"):
                reader.read_into(start, memoryview(bytearray(nbytes)))


def test_a_save_is_forced_once_and_writes_no_more_than_it_has(held, disk):
    written = held.path.stat().st_blocks
    small = MemoryPack("small", 100)
    held.hold(small)
    assert disk.forcings == 1
    held.hold(MemoryPack("large", 3 * PAYLOAD_BYTES))
    assert disk.forcings == 2
    assert held.path.stat().st_blocks == written
    held.hold(small)
    assert disk.forcings == 2
    held.drop([small.label])
    assert disk.forcings == 3


def test_of_a_small_save_header_and_payload_are_one_write(held, monkeypatch):
    real, lengths = os.pwrite, []

    def write(descriptor: int, data: memoryview, at: int) -> int:
        lengths.append(len(data))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    held.hold(MemoryPack("small", 100))
    assert lengths == [2 * BLOCK_BYTES]


def test_nothing_of_another_save_is_written_behind_one(held):
    held.hold(MemoryPack("large", PAYLOAD_BYTES))
    held.hold(MemoryPack("small", 100))
    start = Division(EXTENT_BYTES, COUNT).start(1) + BLOCK_BYTES
    assert held.path.read_bytes()[start + 100 : start + PAYLOAD_BYTES].strip(b"\0") == b""


def test_payloads_of_several_pieces_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(extents_module, "_PIECE_BYTES", BLOCK_BYTES)
    held, pack = opened(tmp_path), MemoryPack("run", 2 * PAYLOAD_BYTES - 5)
    held.hold(pack)
    holds(held, pack)
    held.close()
    held = opened(tmp_path)
    holds(held, pack)
    held.close()


@pytest.mark.parametrize("pieces", ["in one piece", "in pieces"])
def test_a_hold_that_is_torn_anywhere_leaves_what_was_held(tmp_path, disk, monkeypatch, pieces):
    if pieces == "in pieces":
        monkeypatch.setattr(extents_module, "_PIECE_BYTES", BLOCK_BYTES)
    held, before = opened(tmp_path / "disk"), MemoryPack("before", PAYLOAD_BYTES + 1)
    held.hold(before)
    torn = MemoryPack("torn", 3 * PAYLOAD_BYTES)
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
    after = MemoryPack("after", 100)
    for number, (whole, image) in enumerate(images):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "extents").write_bytes(image)
        for _ in range(2):
            found = opened(folder)
            holds(found, before, *([torn] if whole else []))
            found.close()
        found = opened(folder)
        found.hold(after)
        holds(found, before, *([torn] if whole else []), after)
        found.close()
        found = opened(folder)
        holds(found, before, *([torn] if whole else []), after)
        found.close()
        shutil.rmtree(folder)


def test_extents_of_what_is_held_are_never_written(held, disk):
    pack = MemoryPack("run.0", PAYLOAD_BYTES + 1)
    held.hold(pack)
    start = Division(EXTENT_BYTES, COUNT).start
    taken = held.path.read_bytes()[start(0) : start(2)]
    for number in range(1, 20):
        held.hold(other := MemoryPack(f"run.{number}", number * 100))
        held.drop([other.label])
        assert held.path.read_bytes()[start(0) : start(2)] == taken
    holds(held, pack)


@pytest.mark.parametrize("at", [0, 9, 21, 30, 100, BLOCK_BYTES - 1], ids=lambda at: f"byte{at}")
def test_a_pack_with_a_flipped_bit_in_a_header_is_not_offered(tmp_path, at):
    held, packs = opened(tmp_path), [MemoryPack(key, 5000) for key in ("one", "two")]
    for pack in packs:
        held.hold(pack)
    held.close()
    for bit in range(8):
        flip(tmp_path / "extents", Division(EXTENT_BYTES, COUNT).start(0) + at, 1 << bit)
        with pytest.warns(UserWarning, match=r"found \[0\] damaged"):
            held = opened(tmp_path)
        holds(held, packs[1])
        held.close()
        flip(tmp_path / "extents", Division(EXTENT_BYTES, COUNT).start(0) + at, 1 << bit)


def test_a_flipped_bit_in_a_payload_is_found_when_it_is_read(tmp_path):
    held, pack = opened(tmp_path), MemoryPack("run", 2 * PAYLOAD_BYTES)
    held.hold(pack)
    flip(held.path, Division(EXTENT_BYTES, COUNT).start(1) + BLOCK_BYTES + 77)
    assert held.labels() == [pack.label]
    with held.reading(pack.label) as reader:
        out = bytearray(PAYLOAD_BYTES)
        reader.read_into(0, memoryview(out))
        assert out == pack.data[:PAYLOAD_BYTES]
        for start in (PAYLOAD_BYTES, 2 * PAYLOAD_BYTES - 1):
            with pytest.raises(Damaged, match="extents, extent 1: expected piece 1 of run, crc32c"):
                reader.read_into(start, memoryview(bytearray(1)))
    held.close()
    # It may have been torn: nothing tells that from what was damaged later.
    held = opened(tmp_path)
    holds(held)
    held.close()


def test_of_damaged_packs_those_that_were_held_for_long_stay_offered(tmp_path):
    held, packs = opened(tmp_path), [MemoryPack(key, 5000) for key in ("one", "two")]
    for pack in packs:
        held.hold(pack)
    flip(held.path, Division(EXTENT_BYTES, COUNT).start(0) + BLOCK_BYTES + 77)
    held.close()
    held = opened(tmp_path)
    assert held.labels() == [pack.label for pack in packs]
    with pytest.raises(Damaged):
        read(held, packs[0].label)
    held.close()


def test_another_process_cannot_use_the_same_file(held, tmp_path):
    program = (
        "from pathlib import Path; from deltackpt.errors import InUse\n"
        "from deltackpt.tiers.extents import ExtentFile\n"
        f"try: ExtentFile(Path({str(tmp_path)!r}), nbytes={COUNT * EXTENT_BYTES}, "
        f"extent_bytes={EXTENT_BYTES})\n"
        "except InUse as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert b"expected no other trainer to use these extents, found one that does" in done.stdout
    with pytest.raises(InUse, match="give each its own"):
        opened(tmp_path)
    held.close()
    opened(tmp_path).close()


def test_who_dies_leaves_a_file_that_can_be_opened(tmp_path):
    program = (
        "import os, signal; from pathlib import Path\n"
        "from deltackpt.tiers.extents import ExtentFile\n"
        f"ExtentFile(Path({str(tmp_path)!r}), nbytes={COUNT * EXTENT_BYTES}, "
        f"extent_bytes={EXTENT_BYTES})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode < 0
    opened(tmp_path).close()


def test_a_full_file_says_what_is_held_and_loses_nothing(held):
    packs = [MemoryPack(f"run.{number}", 2 * PAYLOAD_BYTES) for number in range(3)]
    for pack in packs[:2]:
        held.hold(pack)
    large = MemoryPack("large", 2 * PAYLOAD_BYTES + 1)
    expected = (
        "expected 49,152 free bytes for large of 24,577, found 32,768 free and 65,536 held by 2"
    )
    with pytest.raises(OutOfSpace, match=expected):
        held.hold(large)
    held.hold(packs[2])
    with pytest.raises(OutOfSpace, match="found 0 free"):
        held.hold(MemoryPack("small", 1))
    holds(held, *packs)
    held.drop([packs[0].label, packs[1].label])
    held.hold(large)
    holds(held, packs[2], large)


def test_what_is_dropped_does_not_come_back(tmp_path):
    held, packs = opened(tmp_path), [MemoryPack(key, 2 * PAYLOAD_BYTES) for key in "abc"]
    for pack in packs:
        held.hold(pack)
    held.drop([packs[0].label, packs[2].label, Label("nobody", 1, 1)])
    held.drop([packs[0].label])
    held.drop([])
    holds(held, packs[1])
    with pytest.raises(Missing):
        read(held, packs[0].label)
    held.close()
    held = opened(tmp_path)
    holds(held, packs[1])
    held.hold(packs[0])
    holds(held, packs[1], packs[0])
    held.close()


def test_a_drop_is_on_disk_before_its_extents_are_used_again(tmp_path, disk):
    held, pack = opened(tmp_path / "disk"), MemoryPack("dropped", 2 * PAYLOAD_BYTES)
    held.hold(pack)
    held.drop([pack.label])
    assert not disk.later
    image = disk.forced
    held.close()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "extents").write_bytes(image)
    found = opened(tmp_path / "cut")
    holds(found)
    found.close()


def test_a_drop_that_failed_can_be_done_again(held, monkeypatch):
    pack = MemoryPack("run", 100)
    held.hold(pack)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", failing(errno.EIO))
        with pytest.raises(StorageError, match="force to disk"):
            held.drop([pack.label])
    held.drop([pack.label])
    holds(held)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_hold_that_failed_holds_nothing_and_can_be_done_again(tmp_path, monkeypatch, call):
    held, before = opened(tmp_path), MemoryPack("before", 100)
    held.hold(before)
    pack = MemoryPack("run", 2 * PAYLOAD_BYTES)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(errno.EIO))
        with pytest.raises(StorageError):
            held.hold(pack)
        holds(held, before)
        with pytest.raises(Missing):
            read(held, pack.label)
    held.hold(pack)
    holds(held, before, pack)
    held.close()
    held = opened(tmp_path)
    holds(held, before, pack)
    held.drop([pack.label])
    held.close()
    held = opened(tmp_path)
    holds(held, before)
    held.close()


@pytest.mark.parametrize("again", [True, False])
def test_what_a_failed_hold_left_on_disk_can_be_dropped(tmp_path, monkeypatch, again):
    """All of it is there: the disk took it, answered with an error, and then took nothing more."""
    held, pack = opened(tmp_path), MemoryPack("run", 100)
    with monkeypatch.context() as patched:

        def fail(_: int) -> None:
            patched.setattr(os, "pwrite", failing(errno.EIO))
            failing(errno.EIO)()

        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(StorageError):
            held.hold(pack)
    holds(held)
    if again:
        held.hold(pack)
    held.drop([pack.label])
    held.close()
    held = opened(tmp_path)
    holds(held)
    held.close()


def test_a_pack_that_is_not_as_its_label_says_is_not_held(tmp_path):
    held, pack = opened(tmp_path), MemoryPack("run", 2 * PAYLOAD_BYTES)
    pack.label = pack.label._replace(crc32c=pack.label.crc32c ^ 1)
    with pytest.raises(Damaged, match="run: expected a bundle with crc32c"):
        held.hold(pack)
    holds(held)
    held.close()
    held = opened(tmp_path)
    holds(held)
    held.close()


def test_a_pack_that_cannot_be_read_is_not_held(held):
    class Gone(MemoryPack):
        def read_into(self, start: int, out: memoryview) -> None:
            if start >= PAYLOAD_BYTES:
                raise Missing("the step")
            super().read_into(start, out)

    with pytest.raises(Missing, match="the step"):
        held.hold(Gone("run", 2 * PAYLOAD_BYTES))
    holds(held)
    held.hold(pack := MemoryPack("run", 6 * PAYLOAD_BYTES))
    holds(held, pack)


def test_another_pack_of_the_same_key_is_refused(held):
    held.hold(pack := MemoryPack("run", 100))
    with pytest.raises(TargetDiffers, match="drop that one first"):
        held.hold(MemoryPack("run", 101))
    holds(held, pack)


@pytest.mark.parametrize("key", ["a", "0.-", "k" * 200])
def test_every_key_that_a_label_may_have_is_held(tmp_path, key):
    held, pack = opened(tmp_path), MemoryPack(key, 10)
    held.hold(pack)
    held.close()
    held = opened(tmp_path)
    holds(held, pack)
    held.close()


@pytest.mark.parametrize("key", ["", "k" * 201, "A", "a/b", "ä", "a\n"])
def test_other_keys_are_refused(held, key):
    pack = MemoryPack("run", 10)
    pack.label = pack.label._replace(key=key)
    with pytest.raises(ValueError, match="expected a key of 1 to 200"):
        held.hold(pack)
    holds(held)


@pytest.mark.parametrize(
    ("count", "extent_bytes"), [(COUNT + 1, EXTENT_BYTES), (COUNT, 2 * EXTENT_BYTES), (12, 8192)]
)
def test_a_file_that_is_divided_otherwise_is_left_as_it_is(tmp_path, count, extent_bytes):
    held, pack = opened(tmp_path), MemoryPack("run", 5000)
    held.hold(pack)
    held.close()
    before = held.path.read_bytes()
    with pytest.raises(OptionError, match=r"which hold 1 saves; set nbytes=98304 and extent_byte"):
        ExtentFile(tmp_path, nbytes=count * extent_bytes, extent_bytes=extent_bytes)
    assert held.path.read_bytes() == before
    held = opened(tmp_path)
    holds(held, pack)
    held.close()


def test_something_else_of_that_name_is_left_as_it_is(tmp_path):
    for contents in (b"x" * 10_000, b"", b"x"):
        (tmp_path / "extents").write_bytes(contents)
        with pytest.raises(Damaged, match="move the file away|the end of the file"):
            opened(tmp_path)
        assert (tmp_path / "extents").read_bytes() == contents


def test_a_file_that_was_cut_short_is_damaged(tmp_path):
    opened(tmp_path).close()
    os.truncate(tmp_path / "extents", 3 * EXTENT_BYTES)
    with pytest.raises(Damaged, match="expected 4096 more bytes, found the end of the file"):
        opened(tmp_path)


def test_a_later_version_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(format_extents, "VERSION", 2)
        opened(tmp_path).close()
    with pytest.raises(FormatTooNew, match="version 1 or below, found 2"):
        opened(tmp_path)


def test_no_room_for_the_file_is_said_at_the_start(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        with pytest.raises(OutOfSpace, match=r"allocate 102,400 bytes.*a smaller Extents\.nbytes"):
            opened(tmp_path)
    assert not {path.name for path in tmp_path.iterdir()} - {"extents.lock"}
    opened(tmp_path).close()


def test_a_start_that_was_cut_short_is_begun_again(tmp_path):
    (tmp_path / "extents.making").write_bytes(b"half")
    held = opened(tmp_path)
    holds(held)
    assert held.path.stat().st_size == BLOCK_BYTES + COUNT * EXTENT_BYTES
    assert held.path.stat().st_blocks * 512 >= held.path.stat().st_size
    assert not (tmp_path / "extents.making").exists()
    held.close()


def test_where_direct_writes_are_refused_it_goes_through_the_page_cache(tmp_path, monkeypatch):
    real = os.open

    def refusing(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    held, packs = opened(tmp_path), [MemoryPack(f"run.{n}", 7000 * n) for n in range(3)]
    assert not held.direct
    for pack in packs:
        held.hold(pack)
    holds(held, *packs)
    held.close()
    monkeypatch.undo()
    held = opened(tmp_path)
    holds(held, *packs)
    held.close()


def test_room_for_two_bases_and_four_deltas_is_asked_for(tmp_path):
    held = opened(tmp_path, count=8)
    held.require_room(2 * PAYLOAD_BYTES, PAYLOAD_BYTES)
    with pytest.raises(OptionError, match=r"Extents\.nbytes: expected at least 163,840 for two ba"):
        held.require_room(2 * PAYLOAD_BYTES + 1, PAYLOAD_BYTES)
    held.close()


def test_a_closed_one_says_so(tmp_path):
    held, pack = opened(tmp_path), MemoryPack("run", 10)
    held.hold(pack)
    held.close()
    held.close()
    for call in (held.labels, lambda: held.hold(pack), lambda: held.drop([pack.label])):
        with pytest.raises(ClosedError, match="open it again"):
            call()


def test_what_is_dropped_while_it_is_read_is_never_read_as_another(held):
    pack = MemoryPack("run", 2 * PAYLOAD_BYTES)
    held.hold(pack)
    with held.reading(pack.label) as reader:
        held.drop([pack.label])
        held.hold(MemoryPack("other", 6 * PAYLOAD_BYTES))
        with pytest.raises(Damaged):
            reader.read_into(0, memoryview(bytearray(1)))


def test_golden_extents_are_read(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "golden")
    held = ExtentFile(
        tmp_path / "golden",
        nbytes=make_golden.EXTENTS * make_golden.EXTENT_BYTES,
        extent_bytes=make_golden.EXTENT_BYTES,
    )
    expected = {key: make_golden.extent_contents(nbytes) for key, nbytes in make_golden.HELD}
    del expected[make_golden.DROPPED]
    assert [label.key for label in held.labels()] == [*expected]
    for label in held.labels():
        assert read(held, label) == expected[label.key]
    held.close()


def test_headers_come_back_as_they_were():
    header = Header(2**63, 3, 7, 2**40, 2**32 - 1, "a.b-c")
    block = format_extents.header_block(header)
    assert len(block) == BLOCK_BYTES
    assert format_extents.read_header(block) == header
    assert format_extents.read_header(bytes(BLOCK_BYTES)) is None


class Held(RuleBasedStateMachine):
    """Holds, drops, power cuts and starts in any order, against what was acknowledged."""

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
            self.held.hold(pack)
        except OutOfSpace:
            taken = sum(self.extents(held.label.nbytes) for held in self.acknowledged.values())
            assert taken + self.extents(nbytes) > COUNT
        else:
            self.acknowledged[pack.label.key] = pack

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        keys = data.draw(st.sets(st.sampled_from(sorted(self.acknowledged)), min_size=1))
        self.held.drop([self.acknowledged.pop(key).label for key in keys])

    @rule()
    def start(self) -> None:
        self.held.close()
        self.held = opened(self.folder)

    @rule(nbytes=st.integers(0, 4 * PAYLOAD_BYTES), data=st.data())
    def cut_while_holding(self, nbytes: int, data: st.DataObject) -> None:
        pack = self.packed(nbytes)
        taken = sum(self.extents(held.label.nbytes) for held in self.acknowledged.values())
        if taken + self.extents(nbytes) > COUNT:
            return
        self.disk.later = torn_hold(self.held, pack, self.disk, self.patch)
        if self.cut(data):
            self.acknowledged[pack.label.key] = pack

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def cut_while_dropping(self, data: st.DataObject) -> None:
        keys = data.draw(st.sets(st.sampled_from(sorted(self.acknowledged)), min_size=1))
        with self.patch.context() as patched:
            patched.setattr(os, "fdatasync", failing(errno.EIO))
            with pytest.raises(StorageError):
                self.held.drop([self.acknowledged[key].label for key in keys])
        self.cut(data)
        left = {label.key for label in self.held.labels()}
        assert left <= {*self.acknowledged} <= left | keys
        self.acknowledged = {key: pack for key, pack in self.acknowledged.items() if key in left}

    def cut(self, data: st.DataObject) -> bool:
        """Whether all that was written is there when the power is back."""
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
        return Division(EXTENT_BYTES, COUNT).extents(nbytes)


Held.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestHeld = Held.TestCase


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail
