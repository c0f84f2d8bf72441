# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the long loops."""

from __future__ import annotations

from collections.abc import Iterator

import harness
import pytest
from campaign import Campaign


@pytest.fixture(scope="session")
def campaign(request) -> Campaign:
    """How much to do, and the source of random draws."""
    option = request.config.option
    return Campaign(option.long == "full", option.long_seed)


@pytest.fixture(scope="session")
def trainees(tmp_path_factory) -> Iterator[harness.Trainees]:
    """The fork server."""
    server = harness.Trainees(tmp_path_factory.mktemp("trainees"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def log_trainees(tmp_path_factory) -> Iterator[harness.Trainees]:
    """The fork server of processes with a WAL."""
    server = harness.Trainees(tmp_path_factory.mktemp("trainees"), "wal_trainee.py")
    yield server
    server.close()
