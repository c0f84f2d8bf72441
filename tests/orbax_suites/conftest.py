# SPDX-License-Identifier: Apache-2.0
"""Orbax's suites are third-party code: their warnings are not errors here."""

from __future__ import annotations

from pathlib import Path

import pytest
from absl import flags

HERE = Path(__file__).resolve().parent


def pytest_configure() -> None:
    """absl's temporary directories need parsed flags."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["pytest"], known_only=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of Orbax, flax and absl stay warnings in this directory."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
