# SPDX-License-Identifier: Apache-2.0
"""Memory that readers keep: what they see and write is theirs, whatever owners and others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deltackpt.standby import handover
from deltackpt.standby.handover import PIECE_BYTES, Mapped
from deltackpt.standby.memory import MemoryAddress, MemoryReader, SharedMemory

HANG_SECS = 60.0
PIECES = 6
NBYTES = PIECES * PIECE_BYTES + 12345
WORD = np.dtype("u8")
#: Reads the address of some memory, maps it, and says so; ends with its input.
READER = (
    "import sys\n"
    "from deltackpt.standby.memory import MemoryAddress, MemoryReader\n"
    "machine, pid, descriptor, token = sys.stdin.readline().strip().split('|')\n"
    "view = MemoryReader(MemoryAddress(machine, int(pid), int(descriptor), token))\n"
    "print('mapped', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture(autouse=True)
def no_thread(monkeypatch) -> None:
    """Looks are the tests' own."""
    monkeypatch.setattr(handover._watch, "add", lambda mapped: None)


def handed(value: int = 1) -> SharedMemory:
    """Memory that counts up from a value, and may be kept."""
    one = SharedMemory(NBYTES)
    one.begin_write()
    words(one)[:] = numbers(value)
    one.end_write()
    one.hand_over()
    return one


def words(one: SharedMemory | MemoryReader) -> np.ndarray:
    return one.array(0, (NBYTES // 8,), WORD)


def numbers(value: int) -> np.ndarray:
    return np.arange(value, value + NBYTES // 8, dtype=WORD)


def mapped_of(view: MemoryReader) -> Mapped:
    return Mapped(view._mapping, view._descriptor, 4096)


def below(view: MemoryReader) -> int:
    """Bytes of the memory itself that are there."""
    return os.fstat(view._descriptor).st_blocks * 512


def reader_of(one: SharedMemory) -> subprocess.Popen[str]:
    """Another process that keeps a mapping."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    place = one.place
    told = (place.machine, str(place.pid), str(place.descriptor), place.token)
    process.stdin.write("|".join(told) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "mapped\n"
    return process


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate(timeout=HANG_SECS)


# The owner.


def test_the_owner_leaves_memory_alone_while_a_reader_keeps_it(processes):
    one = handed()
    assert one.sequence == 2
    view = MemoryReader(one.place)
    assert view.sequence == 2
    assert not one.begin_write()
    assert (one.sequence, view.sequence) == (2, 2)
    del view
    processes.append(reader_of(one))
    assert not one.begin_write()
    # A reader that is killed keeps nothing.
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait(HANG_SECS)
    assert one.begin_write()
    assert one.sequence == 3
    one.close()


def test_who_maps_the_memory_after_the_owner_asked_sees_that_it_changes():
    one = handed()
    assert one.begin_write()
    view = MemoryReader(one.place)
    assert view.sequence == 3
    one.close()


def test_a_copy_goes_on_from_the_sequence_of_what_it_copies():
    one, copy = handed(), SharedMemory(NBYTES)
    view = MemoryReader(one.place)
    assert not one.begin_write()
    copy.copy_from(one)
    assert copy.sequence == 3
    copy.end_write()
    assert (copy.sequence, view.sequence) == (4, 2)
    assert (words(copy) == numbers(1)).all()
    one.close()
    copy.close()


def test_the_owner_survives_readers_that_open_while_it_asks(processes):
    """The kernel signals the holder of a lease; by default the signal would end it."""
    code = READER.replace("sys.stdin.read()", "") + (
        "for number in range(3000):\n"
        "    del view\n"
        "    view = MemoryReader(MemoryAddress(machine, int(pid), int(descriptor), token))\n"
        "print('done', flush=True)\n"
    )
    one, answers = handed(), set[bool]()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    processes.append(process)
    assert process.stdin is not None and process.stdout is not None
    place = one.place
    told = (place.machine, str(place.pid), str(place.descriptor), place.token)
    process.stdin.write("|".join(told) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "mapped\n"
    done = threading.Thread(target=process.wait)
    done.start()
    while done.is_alive():
        if may := one.begin_write():
            one.end_write()
        answers.add(may)
    assert process.returncode == 0
    assert False in answers
    assert one.begin_write()
    one.close()


# The reader.


def test_what_a_reader_writes_is_its_own():
    one = handed()
    views = [MemoryReader(one.place) for _ in range(2)]
    words(views[0])[:] = 7
    assert (words(views[1]) == numbers(1)).all()
    assert (words(one) == numbers(1)).all()
    one.close()


def test_what_is_below_copies_is_given_back_and_nothing_else():
    one = handed()
    view = MemoryReader(one.place)
    mapped, expected = mapped_of(view), numbers(1)
    whole = below(view)
    one.close()
    # Of the first piece a word of each page, of the second one page, of others nothing.
    per_page, per_piece = 4096 // 8, PIECE_BYTES // 8
    for index in (np.arange(0, per_piece, per_page), np.array([per_piece + 5])):
        words(view)[index] = 99
        expected[index] = 99
    assert mapped.take_over() is True
    assert below(view) == whole - PIECE_BYTES
    assert (words(view) == expected).all()
    assert mapped.take_over() is False
    words(view)[:] += 1
    expected += 1
    assert mapped.take_over() is True
    # The page of the sequence is left.
    assert below(view) <= 4096
    assert (words(view) == expected).all()
    assert mapped.take_over() is None


@pytest.mark.parametrize("who", ["owner", "reader", "another process"])
def test_nothing_is_given_back_while_somebody_else_has_the_memory_open(processes, who):
    one = handed()
    view = MemoryReader(one.place)
    other: Any = None
    if who == "another process":
        processes.append(reader_of(one))
    elif who == "reader":
        other = MemoryReader(one.place)
    if who != "owner":
        one.close()
    mapped, whole = mapped_of(view), below(view)
    words(view)[:] = 7
    assert mapped.take_over() is False
    assert below(view) == whole
    if other is not None:
        assert (words(other) == numbers(1)).all()
    if processes:
        processes[0].kill()
        processes[0].wait(HANG_SECS)
    elif who == "owner":
        one.close()
    del other
    assert mapped.take_over() is True
    assert (words(view) == 7).all()


def test_writers_beside_the_take_over_lose_nothing():
    one = handed()
    view = MemoryReader(one.place)
    mapped = mapped_of(view)
    one.close()
    stop, counts = threading.Event(), [0, 0]

    def write(number: int) -> None:
        mine = words(view)[number::2]
        while not stop.is_set() or not counts[number]:
            mine += np.uint64(1)
            counts[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while mapped.take_over() is not None:
        pass
    stop.set()
    for thread in threads:
        thread.join(HANG_SECS)
    for number in range(2):
        expected = numbers(1)[number::2] + np.uint64(counts[number])
        assert (words(view)[number::2] == expected).all()


def test_a_mapping_that_went_keeps_nothing_open():
    one = handed()
    view = MemoryReader(one.place)
    mapped = mapped_of(view)
    del view
    assert mapped.take_over() is None
    assert one.begin_write()
    one.close()


@pytest.mark.processes
def test_a_forked_child_goes_on_reading_what_its_parent_has_written_over():
    """In a process that has no other threads."""
    code = (
        "import os, signal, numpy as np\n"
        "from deltackpt.standby import handover\n"
        "from deltackpt.standby.memory import MemoryReader, SharedMemory\n"
        "handover._LEAST_REST_SECS = handover._watch._rest_secs = 0.01\n"
        "one = SharedMemory(8 << 20); one.begin_write()\n"
        "one.array(0, (8 << 20,), np.dtype('u1'))[:] = 3; one.end_write(); one.hand_over()\n"
        "view = MemoryReader(one.place); view.keep()\n"
        "mine = view.array(0, (8 << 20,), np.dtype('u1'))\n"
        "there, go = os.pipe(), os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.write(there[1], b'x'); os.read(go[0], 1)\n"
        "    os._exit(0 if (mine == 3).all() else 1)\n"
        "os.read(there[0], 1)\n"
        "one.close(); mine[:] = 4\n"
        "thread = handover._watch\n"
        "import time\n"
        "end = time.monotonic() + 60\n"
        "while thread._running and time.monotonic() < end: time.sleep(0.01)\n"
        "assert not thread._running and (mine == 4).all()\n"
        "os.write(go[1], b'x')\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=HANG_SECS)


def test_the_thread_takes_over_and_ends(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(handover, "_LEAST_REST_SECS", 0.001)
    watch = handover._Watch()
    one = handed()
    view = MemoryReader(one.place)
    watch.add(mapped_of(view))
    words(view)[:] = 7
    one.close()
    for thread in threading.enumerate():
        if thread.name == "deltackpt-handover" and thread is not threading.current_thread():
            thread.join(HANG_SECS)
    assert not watch._running
    assert below(view) <= 4096 and (words(view) == 7).all()


def test_an_address_of_other_memory_is_refused():
    one = handed()
    place = one.place
    with pytest.raises(OSError, match="other memory"):
        MemoryReader(MemoryAddress(place.machine, place.pid, place.descriptor, "00"))
    one.close()
