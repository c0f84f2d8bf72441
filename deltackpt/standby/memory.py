# SPDX-License-Identifier: Apache-2.0
"""Shared memory that other processes on the machine read while its owner changes it.

The memory is anonymous (``memfd``): it is freed when its owner and its last reader exit for any
reason, and is not limited by the size of ``/dev/shm``. A reader on the same machine opens it
through its owner's descriptor and maps it copy-on-write. The reader owns the mapping indefinitely,
and only the pages it writes to are copied. Pages are not prefaulted: for 1.04 GB that took 0.16 s,
and made the first read only 0.09 s faster.

A sequence number distinguishes complete contents from half-written ones: it is odd while they
change. A reader that maps the memory and then finds the number even may keep its mapping. The owner
first makes the number odd, and then asks the kernel whether another process has the memory open (a
killed process no longer does). If so, it leaves that memory unchanged and writes to a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import os
import secrets
import weakref
from pathlib import Path

import numpy as np

from deltackpt.resources import memory
from deltackpt.standby import leases

_HEADER_BYTES = 4096
_TOKEN_BYTES = 16
_SEQUENCE_BYTES = 8


@dataclasses.dataclass(frozen=True)
class MemoryAddress:
    """Address of shared memory for processes on the same machine.

    Attributes:
      machine: identifier that two processes must share to open each other's descriptors.
      pid: the owner's process id.
      descriptor: the owner's descriptor.
      token: first bytes of the memory, since a later process may reuse pid and descriptor.
    """

    machine: str
    pid: int
    descriptor: int
    token: str


class SharedMemory:
    """Shared memory of this process, initially zero."""

    def __init__(self, nbytes: int):
        """Creates it; pages are allocated on first write.

        Args:
          nbytes: size in bytes, without the header.
        """
        self.nbytes = nbytes
        self._handed = False
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._descriptor = os.memfd_create("deltackpt", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, _HEADER_BYTES + nbytes)
        # A separate descriptor: a lease is granted to a reader only while no other process has the
        # file open.
        self._leased = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self._release = weakref.finalize(self, _close, self._leased, self._descriptor)
        mapping = mmap.mmap(self._descriptor, _HEADER_BYTES + nbytes)
        memory.advise_huge_pages(mapping)
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._bytes[:_TOKEN_BYTES] = np.frombuffer(self._token, np.uint8)
        self._sequence = _sequence(self._bytes)
        self._sequence[0] = 1  # Nothing has been written yet.

    @property
    def place(self) -> MemoryAddress:
        """The memory's address for other processes."""
        return MemoryAddress(machine(), os.getpid(), self._descriptor, self._token.hex())

    @property
    def sequence(self) -> int:
        """Sequence number; odd while the contents change."""
        return int(self._sequence[0])

    def hand_over(self) -> None:
        """Allows readers to keep their mappings from now on."""
        self._handed = True

    def begin_write(self) -> bool:
        """Marks the contents as changing; idempotent.

        Returns:
          Whether the contents may change; False if a reader keeps a mapping, and then nothing is
          marked.
        """
        before = self._sequence[0]
        self._sequence[0] |= np.uint64(1)
        # Only now: a process that maps it later sees the odd number.
        if not self._handed or not leases.is_open_elsewhere(self._leased):
            return True
        self._sequence[0] = before
        return False

    def end_write(self) -> None:
        """Marks the contents as complete."""
        self._sequence[0] += np.uint64(1)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a part of the memory as an array."""
        return _part(self._bytes, offset, shape, dtype)

    def copy_from(self, other: SharedMemory) -> None:
        """Copies all bytes of another memory of the same size, and continues its sequence."""
        self._bytes[_HEADER_BYTES:] = other._bytes[_HEADER_BYTES:]
        self._sequence[0] = other._sequence[0] | np.uint64(1)

    def close(self) -> None:
        """Closes the descriptors, as dropping it does; the memory is freed with its last array."""
        self._release()


class MemoryReader:
    """Shared memory of any process on the machine, mapped copy-on-write."""

    def __init__(self, place: MemoryAddress):
        """Opens it.

        Raises:
          OSError: the owner is on another machine, in another container, or has exited.
        """
        if place.machine != machine():
            raise OSError(f"the memory of process {place.pid} is on another machine")
        descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDONLY)
        try:
            if os.pread(descriptor, _TOKEN_BYTES, 0).hex() != place.token:
                raise OSError(f"process {place.pid} has other memory there")
            header = mmap.mmap(descriptor, _HEADER_BYTES, prot=mmap.PROT_READ)
            mapping = mmap.mmap(
                descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._sequence = _sequence(np.frombuffer(header, np.uint8))

    @property
    def sequence(self) -> int:
        """Same as in ``SharedMemory``."""
        return int(self._sequence[0])

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a part of the memory as an array; the owner does not see writes to it.

        The caller owns it indefinitely if ``sequence`` is unchanged afterwards, and the owner
        called ``hand_over`` before the memory was mapped.
        """
        return _part(self._bytes, offset, shape, dtype)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _sequence(memory: np.ndarray) -> np.ndarray:
    return memory[_TOKEN_BYTES:][:_SEQUENCE_BYTES].view(np.uint64)


def _part(memory: np.ndarray, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    start = _HEADER_BYTES + offset
    return memory[start : start + size].view(dtype).reshape(shape)


@functools.cache
def machine() -> str:
    """Returns an identifier shared by processes that can open each other's descriptors."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
