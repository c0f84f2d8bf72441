# SPDX-License-Identifier: Apache-2.0
"""What is used of T5X, which is on no package index.

Raises:
  MissingExtra: when this is imported, where T5X cannot be.
"""

from __future__ import annotations

import importlib
from typing import Any

from deltackpt.errors import MissingExtra

try:
    checkpoints: Any = importlib.import_module("t5x.checkpoints")
    state_utils: Any = importlib.import_module("t5x.state_utils")
    utils: Any = importlib.import_module("t5x.utils")
except ImportError as error:
    raise MissingExtra(
        "deltackpt.integrations.t5x: expected the package t5x, found that it cannot be imported "
        f"({error}); T5X is on no package index: install it from "
        "https://github.com/google-research/t5x"
    ) from error
