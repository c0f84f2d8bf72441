# SPDX-License-Identifier: Apache-2.0
"""Bundles of made-up bytes, for tests of bundle stores."""

from __future__ import annotations

import numpy as np

from deltackpt.storage.digests import crc32c
from deltackpt.tiers.bundles import BundleRef


class MemoryPack:
    """A bundle whose key and length determine its bytes."""

    def __init__(self, key: str, nbytes: int):
        self.data = contents(key, nbytes)
        self.ref = BundleRef(key, nbytes, crc32c(np.frombuffer(self.data, np.uint8)))

    def read_into(self, start: int, out: memoryview) -> None:
        """See ``Bundle``."""
        out[:] = self.data[start : start + len(out)]


def contents(key: str, nbytes: int) -> bytes:
    """The bytes of a bundle with this key and length."""
    return np.random.default_rng(list(key.encode())).bytes(nbytes)
