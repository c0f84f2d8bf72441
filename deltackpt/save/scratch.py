# SPDX-License-Identifier: Apache-2.0
"""Memory of each thread for what comes between when blocks of dense leaves are encoded.

Fresh memory costs as much as what fills it.
"""

from __future__ import annotations

import threading

import numpy as np

from deltackpt.codecs.of_blocks import PIECE_BLOCKS
from deltackpt.format.dense_blocks import BLOCK


class _Scratch(threading.local):
    """What it holds is anything, wherever a piece begins.

    Attributes:
      values: (``PIECE_BLOCKS``, 256) float32, of what is encoded.
      reference: likewise, of its reference.
      change, other: likewise, of results.
      codes: likewise, int8.
    """

    def __init__(self) -> None:
        floats = np.empty((4, PIECE_BLOCKS, BLOCK), np.float32)
        self.values, self.reference, self.change, self.other = floats
        self.codes = np.empty((PIECE_BLOCKS, BLOCK), np.int8)


SCRATCH = _Scratch()
