# SPDX-License-Identifier: Apache-2.0
"""The protocol of codecs.

A lossless codec only defines how a field's bits are arranged in its stored array. A lossy one is
encoded by ``deltackpt.save.encode``, jitted, on the device or in the background, and decoded here,
in numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

import numpy as np


class StoredArray(NamedTuple):
    """One stored array of a field, or of blocks of dense leaves.

    Attributes:
      trailing: shape of a row; of an element if it is ragged.
      dtype: stored dtype.
      byte_planes: whether chunks have their last axis first, and are compressed by zstd.
      zstd: whether chunks are compressed.
      ragged: whether the array ``count`` contains the number of elements of each row.
    """

    trailing: tuple[int, ...]
    dtype: np.dtype
    byte_planes: bool = False
    zstd: bool = False
    ragged: bool = False


class Codec(Protocol):
    """How the rows of one field are stored.

    Stateless and hashable. A codec has one or more stored arrays, named by suffix; the main one has
    the suffix ``""``, and the first axis of each is the rows. Rows that a lossy codec cannot
    represent are stored raw in additional arrays: see ``save.fields``.
    """

    #: Whether decoded rows are the rows bit for bit.
    lossless: ClassVar[bool]

    @property
    def name(self) -> str:
        """Returns the codec's name in manifests and options."""
        ...

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:
        """Checks that rows of a shape and dtype can be stored, and that they get smaller.

        Raises:
          OptionError: they cannot be stored, or would not get smaller.
        """
        ...

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """Returns suffix to stored array, for rows of a given shape and dtype."""
        ...

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """Decodes the rows into ``out``, (n, *trailing) of the table's dtype, contiguous."""
        ...

    def error_bound(self, rows: np.ndarray) -> np.ndarray:
        """Returns the largest l2 error of each representable row (n, *trailing), float64 (n,)."""
        ...


class Lossless(Codec, Protocol):
    """A codec whose stored array is a view of the rows."""

    def stored_view(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows (n, *trailing), contiguous, as the stored array."""
        ...

    def rows_view(self, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns the stored array as rows of ``dtype``."""
        ...
