# SPDX-License-Identifier: Apache-2.0
"""What tests need of the machine."""

from __future__ import annotations

import os

import pytest


def required(there: bool, reason: str) -> None:
    """Skips a test that misses something of the machine; with ``CI=true`` it fails."""
    if there:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true")
    pytest.skip(reason)
