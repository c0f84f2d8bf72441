# SPDX-License-Identifier: Apache-2.0
"""Self-describing keys of bundle fragments.

The key under which a peer agent stores a fragment::

    <root>/<pack>/<bytes>.<crc32c>/<k>.<m>.<segment>.<number>.<crc32c of the fragment>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from deltackpt.tiers import erasure
from deltackpt.tiers.packing import Label

#: Bytes of a bundle per segment; bounds the memory used on either side.
SEGMENT_BYTES = 16 << 20
_KEY = re.compile(
    r"([^/]+)/([^/]+)/(\d{1,15})\.(\d{1,10})/(\d{1,3})\.(\d{1,3})\.(\d{1,9})\.(\d{1,3})\.(\d{1,10})"
)


class Fragment(NamedTuple):
    """The contents of a fragment's key.

    Attributes:
      label: reference of the bundle.
      k: data fragments of its code.
      m: parity fragments of its code.
      segment: segment number in the bundle.
      number: number of the fragment; the first k are pieces of the segment itself.
      crc32c: CRC32C of its bytes.
    """

    label: Label
    k: int
    m: int
    segment: int
    number: int
    crc32c: int

    def key(self, root: str) -> str:
        """The key under which a peer agent stores it."""
        label = f"{self.label.key}/{self.label.nbytes}.{self.label.crc32c}"
        return f"{root}/{label}/{self.k}.{self.m}.{self.segment}.{self.number}.{self.crc32c}"

    @classmethod
    def of(cls, key: str) -> Fragment | None:
        """Parses a key; returns None for a foreign one."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        nbytes, total, k, m, segment, number, own = map(int, match.groups()[2:])
        found = cls(Label(match[2], nbytes, total), k, m, segment, number, own)
        is_code = erasure.is_code(k, m) and number < k + m
        sound = is_code and nbytes and segment < segments(nbytes) and found.key(match[1]) == key
        return found if sound else None


class Coding(NamedTuple):
    """How a bundle was split.

    Attributes:
      label: reference of the bundle.
      k: number of fragments that restore a segment.
      m: number of additional fragments.
    """

    label: Label
    k: int
    m: int


#: Nodes of the fragments of each segment.
Where = dict[int, dict[Fragment, list[str]]]


def segments(nbytes: int) -> int:
    """Returns the number of segments of a bundle."""
    return -(-nbytes // SEGMENT_BYTES)


def segment_bytes(label: Label, segment: int) -> int:
    """Returns the length of a segment in bytes."""
    return min(label.nbytes - segment * SEGMENT_BYTES, SEGMENT_BYTES)


def is_whole(coding: Coding, where: Where) -> bool:
    """Returns whether each segment has enough fragments."""
    return all(
        len({one.number for one in where.get(segment, {})}) >= coding.k
        for segment in range(segments(coding.label.nbytes))
    )


def is_complete(coding: Coding, where: Where) -> bool:
    """Returns whether each segment has every fragment, each on a distinct node."""
    return all(
        len(placed_of(where.get(segment, {}))) == coding.k + coding.m
        for segment in range(segments(coding.label.nbytes))
    )


def placed_of(there: Mapping[Fragment, list[str]]) -> dict[int, str]:
    """Returns the fragment indices placed on distinct nodes."""
    found: dict[int, str] = {}
    for one, nodes in sorted(there.items()):
        free = [node for node in nodes if node not in found.values()]
        if free:
            found.setdefault(one.number, free[0])
    return found
