# SPDX-License-Identifier: Apache-2.0
"""What a fragment of a pack is called, so that it says itself what it is of.

The key under which a keeper holds a fragment::

    <root>/<pack>/<bytes>.<crc32c>/<k>.<m>.<segment>.<number>.<crc32c of the fragment>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from deltackpt.tiers.packing import Label

#: Of a pack, in one go: what is in memory of it on either side.
SEGMENT_BYTES = 16 << 20
_KEY = re.compile(
    r"([^/]+)/([^/]+)/(\d{1,15})\.(\d{1,10})/(\d{1,3})\.(\d{1,3})\.(\d{1,9})\.(\d{1,3})\.(\d{1,10})"
)


class Fragment(NamedTuple):
    """What the key of a fragment says.

    Attributes:
      label: of the pack.
      k: of its code.
      m: of its code.
      segment: of the pack.
      number: of the fragment; the first k are pieces of the segment itself.
      crc32c: of its bytes.
    """

    label: Label
    k: int
    m: int
    segment: int
    number: int
    crc32c: int

    def key(self, root: str) -> str:
        """Under which a keeper holds it."""
        label = f"{self.label.key}/{self.label.nbytes}.{self.label.crc32c}"
        return f"{root}/{label}/{self.k}.{self.m}.{self.segment}.{self.number}.{self.crc32c}"

    @classmethod
    def of(cls, key: str) -> Fragment | None:
        """What a key says; None of another one."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        nbytes, total, k, m, segment, number, own = map(int, match.groups()[2:])
        found = cls(Label(match[2], nbytes, total), k, m, segment, number, own)
        sound = k >= 1 and nbytes and number < k + m and segment < segments(nbytes)
        return found if sound else None


class Coding(NamedTuple):
    """How a pack was cut.

    Attributes:
      label: of the pack.
      k: fragments that any so many of restore a segment.
      m: further ones.
    """

    label: Label
    k: int
    m: int


#: Nodes of the fragments of each segment of a pack.
Where = dict[int, dict[Fragment, list[str]]]


def segments(nbytes: int) -> int:
    """How many segments a pack of a length has."""
    return -(-nbytes // SEGMENT_BYTES)


def segment_bytes(label: Label, segment: int) -> int:
    """How long a segment of a pack is."""
    return min(label.nbytes - segment * SEGMENT_BYTES, SEGMENT_BYTES)


def is_whole(coding: Coding, where: Where) -> bool:
    """Whether each segment has fragments enough."""
    return all(
        len({one.number for one in where.get(segment, {})}) >= coding.k
        for segment in range(segments(coding.label.nbytes))
    )


def is_complete(coding: Coding, where: Where) -> bool:
    """Whether each segment has every fragment, each on a node of its own."""
    return all(
        len(placed_of(where.get(segment, {}))) == coding.k + coding.m
        for segment in range(segments(coding.label.nbytes))
    )


def placed_of(there: Mapping[Fragment, list[str]]) -> dict[int, str]:
    """Numbers of fragments with a node of its own each."""
    found: dict[int, str] = {}
    for one, nodes in sorted(there.items()):
        free = [node for node in nodes if node not in found.values()]
        if free:
            found.setdefault(one.number, free[0])
    return found
