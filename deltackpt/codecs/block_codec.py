# SPDX-License-Identifier: Apache-2.0
"""What a codec of blocks of dense leaves is; see ``of_blocks``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

#: Dtypes of numbers that lossy codecs take.
FLOATS = ("float32", "bfloat16", "float16")


class BlockArray(NamedTuple):
    """One stored array of some blocks.

    Attributes:
      trailing: shape of what it has of a block; of a ragged one that of an element.
      dtype: stored.
      zstd: whether its chunks are compressed.
      byte_planes: whether they are compressed with their last axis first.
      ragged: whether a block has as many elements as the array ``count`` says.
    """

    trailing: tuple[int, ...]
    dtype: np.dtype
    zstd: bool = False
    byte_planes: bool = False
    ragged: bool = False


class BlockCodec(Protocol):
    """How blocks of one dtype are stored. Stateless; numpy only."""

    @property
    def name(self) -> str:
        """Its name in manifests and options."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether decoded blocks are the blocks bit for bit."""
        ...

    @property
    def relative(self) -> bool:
        """Whether it is decoded by way of a reference."""
        ...

    def takes(self, dtype: str) -> bool:
        """Whether blocks of a dtype can be stored."""
        ...

    def stored(self, dtype: np.dtype) -> Mapping[str, BlockArray]:
        """Suffix to stored array; the main one has the suffix ``""``."""
        ...

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """Writes blocks.

        Args:
          arrays: suffix to stored array, of n blocks.
          reference: (n, 256) of the blocks' dtype, of relative codecs; it may be ``out``.
          out: likewise, contiguous.

        Raises:
          ValueError: the arrays cannot be of n blocks.
        """
        ...
