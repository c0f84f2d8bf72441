# SPDX-License-Identifier: Apache-2.0
"""Fragments of some bytes, of which any k of k + m give them back.

The bytes are cut into stripes of about 1 MiB, which stay in the processor's cache while they are
coded, and each stripe into k pieces; fragment i < k is the i-th piece of every stripe: views of the
bytes themselves. The m further ones are the bytes again (k = 1), their sum by XOR in numpy (m = 1),
or Reed-Solomon codes over Cauchy matrices (pyeclib with ISA-L; measured on a busy machine, 4 + 2:
3.2 GB/s of a core, and 1.8 where two are lost).
Fragments are what the mathematics says and no header of any library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from deltackpt.errors import MissingExtra, OptionError

STRIPE_BYTES = 1 << 20
#: Pieces of stripes are multiples of it: what vector instructions take.
_ALIGNMENT_BYTES = 64
#: What liberasurecode puts before each of its fragments.
_HEADER_BYTES = 80
#: The most that liberasurecode takes.
_MOST_FRAGMENTS = 32


class Code(Protocol):
    """How the further fragments of one stripe follow from its k pieces.

    Attributes:
      k: pieces.
      m: further ones.
    """

    k: int
    m: int

    def further(self, stripe: memoryview) -> list[memoryview]:
        """The m further pieces of a stripe of k pieces end to end."""
        ...

    def restore(self, found: Mapping[int, memoryview], lost: Mapping[int, memoryview]) -> None:
        """Fills pieces that were lost from any k others.

        Args:
          found: k pieces or more, by number; those from k on are further ones.
          lost: where the pieces belong that are not found, by number, all below k.
        """
        ...


def code_of(k: int, m: int) -> Code:
    """The code of k pieces and m further ones.

    Raises:
      OptionError: there is none.
      MissingExtra: pyeclib is not installed, which this one needs.
    """
    if k < 1 or m < 0 or k + m > _MOST_FRAGMENTS:
        raise OptionError(
            f"Erasure: expected k of at least 1 and k + m of at most {_MOST_FRAGMENTS}, found "
            f"k={k} and m={m}"
        )
    if k == 1 or m == 0:
        return Repeated(k, m)
    return Xor(k) if m == 1 else ReedSolomon(k, m)


class Repeated:
    """The bytes themselves, once for each fragment, or, without further ones, in pieces."""

    def __init__(self, k: int, m: int):
        self.k, self.m = k, m

    def further(self, stripe: memoryview) -> list[memoryview]:
        """See ``Code``."""
        return [stripe] * self.m

    def restore(self, found: Mapping[int, memoryview], lost: Mapping[int, memoryview]) -> None:
        """See ``Code``."""
        for out in lost.values():
            out[:] = next(iter(found.values()))


class Xor:
    """One further piece, the sum of all others; measured 8 GB/s of a core."""

    def __init__(self, k: int):
        self.k, self.m = k, 1

    def further(self, stripe: memoryview) -> list[memoryview]:
        """See ``Code``."""
        total = np.empty(len(stripe) // self.k, np.uint8)
        _add([stripe[at : at + len(total)] for at in range(0, len(stripe), len(total))], total)
        return [total.data]

    def restore(self, found: Mapping[int, memoryview], lost: Mapping[int, memoryview]) -> None:
        """See ``Code``."""
        for out in lost.values():
            _add([*found.values()][: self.k], np.frombuffer(out, np.uint8))


def _add(pieces: Sequence[memoryview], into: np.ndarray) -> None:
    words = [np.frombuffer(piece, np.uint64) for piece in pieces]
    total = into.view(np.uint64)
    total[:] = words[0]
    for other in words[1:]:
        np.bitwise_xor(total, other, out=total)


class ReedSolomon:
    """Several further pieces, by ISA-L; for one thread."""

    def __init__(self, k: int, m: int):
        """Loads the library.

        Raises:
          MissingExtra: it is not installed.
        """
        try:
            from pyeclib import ec_iface  # pyright: ignore[reportMissingImports]

            self._driver: Any = ec_iface.ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
        except Exception as error:
            # What liberasurecode misses is told by an error of its own.
            raise MissingExtra(
                f"Erasure(k={k}, m={m}): expected pyeclib with ISA-L, found none that works "
                f"({error}); install it: pip install 'deltackpt[erasure]', or use m=1 or Copies"
            ) from error
        # The library takes fresh memory for each stripe. Once a larger piece was freed, glibc hands
        # out what was used before instead of mapping anew (mallopt(3), M_MMAP_THRESHOLD):
        # measured, busy, 3.2 GB/s against 1.0, and 1.8 against 0.3 for what was lost.
        bytes(16 * STRIPE_BYTES)
        self.k, self.m = k, m
        self._headers: dict[int, list[bytes]] = {}

    def further(self, stripe: memoryview) -> list[memoryview]:
        """See ``Code``."""
        coded = self._driver.encode(np.frombuffer(stripe, np.uint8))
        nbytes = _HEADER_BYTES + len(stripe) // self.k
        return [memoryview(one)[_HEADER_BYTES:nbytes] for one in coded[self.k :]]

    def restore(self, found: Mapping[int, memoryview], lost: Mapping[int, memoryview]) -> None:
        """See ``Code``."""
        nbytes = len(next(iter(found.values())))
        headers = self._headers_of(nbytes)
        taken = [b"".join((headers[i], found[i])) for i in sorted(found)[: self.k]]
        whole = memoryview(self._driver.decode(taken))
        for number, out in lost.items():
            out[:] = whole[number * nbytes : (number + 1) * nbytes]

    def _headers_of(self, nbytes: int) -> list[bytes]:
        """What liberasurecode wants before pieces of a length; it says nothing of their bytes."""
        if nbytes not in self._headers:
            coded = self._driver.encode(bytes(self.k * nbytes))
            self._headers[nbytes] = [bytes(one[:_HEADER_BYTES]) for one in coded]
        return self._headers[nbytes]


def padded_bytes(k: int, nbytes: int) -> int:
    """How long bytes are that are cut into fragments: zeros follow them up to that."""
    unit = k * _ALIGNMENT_BYTES
    return -(-nbytes // unit) * unit


def stripes(k: int, padded: memoryview) -> list[memoryview]:
    """Bytes of a padded length in stripes; each is k pieces of equal length end to end."""
    unit = k * _ALIGNMENT_BYTES
    length = max(STRIPE_BYTES // unit, 1) * unit
    return [padded[at : at + length] for at in range(0, len(padded), length)]


def piece(k: int, stripe: memoryview, number: int) -> memoryview:
    """One of the k pieces of a stripe."""
    nbytes = len(stripe) // k
    return stripe[number * nbytes : (number + 1) * nbytes]


def fragments(code: Code, padded: memoryview) -> list[list[memoryview]]:
    """The k + m fragments of bytes of a padded length, each as its pieces.

    The first k are views of the bytes; nothing of them is copied.
    """
    found: list[list[memoryview]] = [[] for _ in range(code.k + code.m)]
    for stripe in stripes(code.k, padded):
        for number in range(code.k):
            found[number].append(piece(code.k, stripe, number))
        for number, further in enumerate(code.further(stripe), code.k):
            found[number].append(further)
    return found


def restore(
    code: Code, padded: memoryview, further: Mapping[int, memoryview], lost: Set[int]
) -> None:
    """Fills what was lost of bytes of a padded length from fragments of them.

    Args:
      code: of the fragments.
      padded: where the first k fragments stand, as far as they are not lost.
      further: the others that are there, by number: with those that are not lost at least k.
      lost: numbers of those of the first k that are missing.
    """
    start = 0
    for stripe in stripes(code.k, padded):
        nbytes = len(stripe) // code.k
        there = {i: piece(code.k, stripe, i) for i in range(code.k) if i not in lost}
        there |= {number: one[start : start + nbytes] for number, one in further.items()}
        code.restore(there, {i: piece(code.k, stripe, i) for i in lost})
        start += nbytes
