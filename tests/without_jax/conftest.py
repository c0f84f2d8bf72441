# SPDX-License-Identifier: Apache-2.0
"""Directories of ``make_runs.py``: created here if JAX is installed, otherwise given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--runs", help="what make_runs.py wrote, for an environment without jax")


@pytest.fixture(scope="session")
def runs(request, tmp_path_factory) -> Path:
    """The parent folder of the directories."""
    given = request.config.getoption("--runs", default=None)
    if given:
        return Path(given)
    made = tmp_path_factory.mktemp("runs")
    program = Path(__file__).with_name("make_runs.py")
    ended = subprocess.run([sys.executable, program, made], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return made
