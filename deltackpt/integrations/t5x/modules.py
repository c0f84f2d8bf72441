# SPDX-License-Identifier: Apache-2.0
"""Imports the used parts of T5X, which is not on PyPI.

Raises:
  MissingExtra: on import, if T5X cannot be imported.
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
        f"({error}); T5X is not on PyPI: install it from "
        "https://github.com/google-research/t5x"
    ) from error
