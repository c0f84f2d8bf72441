# SPDX-License-Identifier: Apache-2.0
"""The protocol of codecs for blocks of dense leaves; see ``of_blocks``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from deltackpt.codecs.codec import StoredArray

#: Dtypes of numbers that lossy codecs take.
FLOATS = ("float32", "bfloat16", "float16")


class BlockCodec(Protocol):
    """How blocks of one dtype are stored. Stateless; numpy only."""

    @property
    def name(self) -> str:
        """Returns the codec's name in manifests and options."""
        ...

    @property
    def lossless(self) -> bool:
        """Returns whether decoded blocks equal the blocks bit for bit."""
        ...

    @property
    def relative(self) -> bool:
        """Returns whether decoding needs a reference."""
        ...

    def takes(self, dtype: str) -> bool:
        """Returns whether blocks of a dtype can be stored."""
        ...

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """Returns suffix to stored array; the main one has the suffix ``""``."""
        ...

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """Decodes blocks.

        Args:
          arrays: suffix to stored array, of n blocks.
          reference: (n, 256) of the blocks' dtype, for relative codecs; it may be ``out``.
          out: (n, 256) of the blocks' dtype, contiguous; written.

        Raises:
          ValueError: the arrays cannot be of n blocks.
        """
        ...
