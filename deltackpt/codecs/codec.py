# SPDX-License-Identifier: Apache-2.0
"""What a codec is.

A lossless codec only says how a field's bits lie in its stored array. A lossy one is encoded by
``deltackpt.save.encode``, jitted, on the device or in the background, and decoded here, in numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

import numpy as np


class StoredArray(NamedTuple):
    """One stored array of a field: shape of a row, dtype, and how its chunks are compressed.

    ``byte_planes`` arrays are stored with their last axis first and compressed by zstd.
    """

    trailing: tuple[int, ...]
    dtype: np.dtype
    byte_planes: bool = False


class Codec(Protocol):
    """How the rows of one field are stored.

    Stateless and hashable. A codec has one or more stored arrays, named by suffix; the main one
    has the suffix ``""``, and the first axis of each is that of the rows. Rows that a lossy codec
    does not hold are stored beside them as they are: see ``save.fields``.
    """

    #: Whether decoded rows are the rows bit for bit.
    lossless: ClassVar[bool]

    @property
    def name(self) -> str:
        """Its name in manifests and options."""
        ...

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:
        """Checks that rows of that shape and dtype can be stored, and gain from it.

        Raises:
          OptionError: they cannot, or the codec would not make them smaller.
        """
        ...

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """Suffix to stored array, for rows of that shape and dtype."""
        ...

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """Writes the rows into ``out``, (n, *trailing) of the table's dtype, contiguous."""
        ...

    def error_bound(self, rows: np.ndarray) -> np.ndarray:
        """Most l2 error, float64 (n,), of each of the rows (n, *trailing) that the codec holds."""
        ...


class Lossless(Codec, Protocol):
    """A codec whose stored array is a view of the rows."""

    def stored_view(self, rows: np.ndarray) -> np.ndarray:
        """The rows (n, *trailing), contiguous, as the stored array."""
        ...

    def rows_view(self, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The stored array as rows of ``dtype``."""
        ...
