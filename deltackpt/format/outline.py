# SPDX-License-Identifier: Apache-2.0
"""Outlines of manifests: identity and size of a save, cheap enough for thousands of steps.

An outline has some of a manifest's fields, under the same names, and is parsed from the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math

from deltackpt.format import dtypes, manifest, records
from deltackpt.format.manifest import Kind, Manifest, ParentRef, RollingShare, SaveId
from deltackpt.format.records import Unsound


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Size:
    """Of an ArrayEntry what its bytes follow from."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.itemsize_of(self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Of a Segment what its bytes follow from."""

    arrays: tuple[_Size, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DenseSizes:
    """Of DenseBlocks what its bytes follow from."""

    segments: tuple[_Sizes, ...]
    complete: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PartSize:
    """Of a Part the bytes of its arrays."""

    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outline:
    """The identity and size of a save, from its manifest."""

    kind: Kind
    save_id: SaveId
    parent: ParentRef | None
    process: int
    process_count: int
    segments: tuple[_Sizes, ...]
    parents: tuple[str, ...] = ()
    rolling: RollingShare | None = None
    features: tuple[str, ...] = ()
    parts: tuple[_PartSize, ...] = ()
    dense_blocks: _DenseSizes | None = None
    dense_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, before any compression; of all parts if it describes them."""
        return manifest.nbytes_of(self)


def outline(data: bytes, *, name: str) -> Outline | Manifest:
    """Parses the outline of a save from the bytes of process 0's manifest.

    Args:
      data: the result of ``to_bytes``.
      name: the manifest's name in errors.

    Raises:
      Damaged, FormatTooNew, FormatTooOld: as for ``from_bytes``.
    """
    found = records.quickly(Outline, data, name=name, magic=manifest.MAGIC, alike=frozenset())
    if found is not None and manifest.is_current(found):
        with contextlib.suppress(Unsound, TypeError):
            manifest.check_ids(found)
            return found
    return manifest.from_bytes(data, name=name)
