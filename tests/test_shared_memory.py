# SPDX-License-Identifier: Apache-2.0
"""Shared memory: owners and other readers never change what a reader sees."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from deltackpt.standby.shared_memory import MemoryAddress, MemoryReader, SharedMemory

HANG_SECS = 60.0
NBYTES = (1 << 20) + 12345
WORD = np.dtype("u8")
#: Reads a memory address, maps it, and reports that; exits at the end of its input.
READER = (
    "import sys\n"
    "from deltackpt.standby.shared_memory import MemoryAddress, MemoryReader\n"
    "machine, pid, descriptor, token = sys.stdin.readline().strip().split('|')\n"
    "view = MemoryReader(MemoryAddress(machine, int(pid), int(descriptor), token))\n"
    "print('mapped', flush=True)\n"
    "sys.stdin.read()\n"
)


def handed(value: int = 1) -> SharedMemory:
    """Memory that counts up from a value and that readers may keep."""
    one = SharedMemory(NBYTES)
    one.start_write()
    words(one)[:] = numbers(value)
    one.end_write()
    one.allow_mapping()
    return one


@pytest.fixture
def one() -> SharedMemory:
    return handed()


def words(one: SharedMemory | MemoryReader) -> np.ndarray:
    return one.array(0, (NBYTES // 8,), WORD)


def numbers(value: int) -> np.ndarray:
    return np.arange(value, value + NBYTES // 8, dtype=WORD)


def reader_of(one: SharedMemory, code: str = READER) -> subprocess.Popen[str]:
    """Starts another process that keeps a mapping."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    place = one.address
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


def test_the_owner_leaves_memory_alone_while_a_reader_keeps_it(processes, one):
    assert one.sequence == 2
    view = MemoryReader(one.address)
    assert view.sequence == 2
    assert not one.start_write()
    assert (one.sequence, view.sequence) == (2, 2)
    del view
    processes.append(reader_of(one))
    assert not one.start_write()
    # A reader that is killed keeps nothing.
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait(HANG_SECS)
    assert one.start_write()
    assert one.sequence == 3
    one.close()


def test_a_mapping_made_after_begin_write_sees_that_the_memory_changes(one):
    assert one.start_write()
    view = MemoryReader(one.address)
    assert view.sequence == 3
    one.close()


def test_a_copy_continues_the_sequence_of_its_source():
    one, copy = handed(), SharedMemory(NBYTES)
    view = MemoryReader(one.address)
    assert not one.start_write()
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
    processes.append(process := reader_of(one, code))
    done = threading.Thread(target=process.wait)
    done.start()
    while done.is_alive():
        if may := one.start_write():
            one.end_write()
        answers.add(may)
    assert process.returncode == 0
    assert False in answers
    assert one.start_write()
    one.close()


# The reader.


def test_writes_of_a_reader_are_private(one):
    views = [MemoryReader(one.address) for _ in range(2)]
    words(views[0])[:] = 7
    assert (words(views[1]) == numbers(1)).all()
    assert (words(one) == numbers(1)).all()
    one.close()


def test_an_address_of_other_memory_is_refused(one):
    place = one.address
    with pytest.raises(OSError, match="other memory"):
        MemoryReader(MemoryAddress(place.machine, place.pid, place.descriptor, "00"))
    with pytest.raises(OSError, match="another machine"):
        MemoryReader(MemoryAddress("elsewhere", place.pid, place.descriptor, place.token))
    one.close()


@pytest.mark.parametrize("closed", [False, True])
def test_dropped_memory_keeps_no_descriptor_and_its_arrays_stay_valid(closed):
    one = handed()
    array, place = words(one), one.address
    if closed:
        one.close()
        one.close()
    del one
    with pytest.raises(OSError):
        MemoryReader(place)
    assert (array == numbers(1)).all()
