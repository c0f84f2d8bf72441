# SPDX-License-Identifier: Apache-2.0
"""Encodes blocks by the codes of second moments; see ``codecs.logarithms``."""

from __future__ import annotations

import numpy as np

from deltackpt.codecs.of_blocks import BlockCodec
from deltackpt.save.encode import Encoded


def on_host(codec: BlockCodec, rows: np.ndarray, reference: np.ndarray | None) -> Encoded:
    """Encodes blocks in host memory.

    Args:
      codec: one of ``logarithms.LOGARITHMS``.
      rows: (n, 256) of a float dtype; blocks with a negative number, NaN or infinity are not held.
      reference: likewise, of relative codecs.
    """
    raise NotImplementedError(codec.name)
