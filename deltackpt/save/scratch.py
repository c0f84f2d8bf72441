# SPDX-License-Identifier: Apache-2.0
"""Per-thread temporary memory for encoding blocks of dense leaves.

Fresh memory costs as much as filling it.
"""

from __future__ import annotations

import threading

import numpy as np

from deltackpt.codecs.of_blocks import PIECE_BLOCKS
from deltackpt.format.dense_blocks import BLOCK


class _Scratch(threading.local):
    """Buffers whose contents are undefined at the start of each piece.

    Attributes:
      values: (``PIECE_BLOCKS``, 256) float32, the values to encode.
      reference: the same shape and dtype, their reference.
      change, other: the same shape and dtype, for results.
      codes: the same shape, int8.
    """

    def __init__(self) -> None:
        floats = np.empty((4, PIECE_BLOCKS, BLOCK), np.float32)
        self.values, self.reference, self.change, self.other = floats
        self.codes = np.empty((PIECE_BLOCKS, BLOCK), np.int8)


SCRATCH = _Scratch()
