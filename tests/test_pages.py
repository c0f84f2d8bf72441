# SPDX-License-Identifier: Apache-2.0
"""Memory that is populated before it is filled."""

import mmap
import resource

import numpy as np
import pytest

from deltackpt.resources import host_memory

MIB = 1 << 20


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_populating_keeps_the_contents():
    array = host_memory.empty_buffer((9 * MIB,), np.dtype(np.uint8))
    array[::4096] = 7
    host_memory.populate(array[5:])
    host_memory.populate(array)
    assert (array[::4096] == 7).all() and int(array.sum()) == 7 * len(array[::4096])


def test_filling_populated_memory_does_not_fault():
    array = host_memory.empty_buffer((32 * MIB,), np.dtype(np.uint8))
    host_memory.populate(array)
    if not host_memory._can_populate:
        pytest.skip("the kernel cannot take memory beforehand (5.14 and later can)")
    before = minor_faults()
    array.fill(1)
    assert minor_faults() - before < 64


@pytest.mark.parametrize("nbytes", [8 * MIB, 64 * MIB + 1])
def test_large_arrays_begin_at_a_huge_page(nbytes):
    array = host_memory.empty_buffer((nbytes,), np.dtype(np.uint8))
    assert array.nbytes == nbytes and array.ctypes.data % host_memory.UNIT_BYTES == 0
    assert isinstance(host_memory.owner_of(array), host_memory.FreshMemory)


def test_fresh_memory_is_zero_and_a_part_can_be_populated():
    array = host_memory.empty_buffer((4 * MIB, 3), np.dtype(np.uint16))
    host_memory.populate(array[1 : 2 * MIB])
    assert not array.any()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4 * MIB, np.uint8),
        np.frombuffer(mmap.mmap(-1, 4 * MIB), np.uint8),
        host_memory.aligned_buffer(4 * MIB),
        host_memory.empty_buffer((100,), np.dtype(np.uint8)),
        np.zeros((0, 64), np.float32),
    ],
)
def test_other_memory_is_left_alone(monkeypatch, array):
    monkeypatch.setattr(host_memory, "_madvise", None)
    host_memory.populate(array)


def test_a_kernel_without_support_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(host_memory, "_madvise", lambda *call: asked.append(call) or -1)
    monkeypatch.setattr(host_memory, "_can_populate", True)
    array = host_memory.empty_buffer((64 * MIB,), np.dtype(np.uint8))
    host_memory.populate(array)
    assert 0 < len(asked) <= 3
    asked.clear()
    host_memory.populate(array)
    assert not asked
    array.fill(1)


def used(choice: host_memory.PageChoice, units: int, secs: dict[bool, float]) -> list[bool]:
    """Returns the chosen page sizes, given the time that each takes."""
    found = []
    for _ in range(units):
        huge = choice.is_huge()
        choice.record(huge=huge, secs=secs[huge])
        found.append(huge)
    return found


@pytest.mark.parametrize("quicker", [True, False])
def test_the_faster_pages_are_used_and_the_others_retried(quicker):
    choice = host_memory.PageChoice()
    found = used(choice, 1000, {quicker: 0.3e-3, (not quicker): 1.5e-3})
    assert 0.97 < found.count(quicker) / len(found) < 1


def test_pages_that_become_faster_are_found_and_one_hiccup_is_ignored():
    choice = host_memory.PageChoice()
    used(choice, 300, {True: 3e-3, False: 1e-3})
    later = used(choice, 300, {True: 0.2e-3, False: 1e-3})
    assert later.count(True) > 200 and later[-50:].count(True) > 45
    choice.record(huge=True, secs=3e-3)
    assert used(choice, 50, {True: 0.2e-3, False: 1e-3}).count(True) >= 48
