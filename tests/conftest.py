# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices for every test, and the data that lies beside the repository."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

# Both are read once, when jax first makes its backends: set before anything imports jax.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

# Read when ray is imported. Its nodes stay on the loopback interface, keep no token under the home
# directory, and report to nobody.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import hypothesis
import pytest

# A time limit for each example would be an assertion on time.
hypothesis.settings.register_profile("deltackpt", deadline=None)
hypothesis.settings.load_profile("deltackpt")

REPOSITORY = Path(__file__).resolve().parent.parent
_RECORD = "record"
#: Files whose tests start clusters or many processes, which never run two at once.
CROWDED = {
    "test_benchmarks",
    "test_dlrm_multi",
    "test_jax_trainer",
    "test_process_kills",
    "test_processes",
    "test_processes_failures",
    "test_ray_demo",
    "test_ray_preemption",
    "test_scaling",
    "test_service",
    "test_service_kills",
    "test_t5x_processes",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each file is the work of one of pytest-xdist's workers, and all crowded ones of the same."""
    if not config.pluginmanager.has_plugin("xdist"):
        return
    for item in items:
        stem = item.path.stem
        item.add_marker(pytest.mark.xdist_group("crowded" if stem in CROWDED else stem))


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """What takes lines about a test that are printed at the end, with its name."""
    return functools.partial(record_property, _RECORD)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests recorded; their own output stays in the workers."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            lines = [line for name, line in report.user_properties if name == _RECORD]
            if lines:
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line("\n".join(map(str, lines)))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real inputs beside the repository."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"{path.relative_to(REPOSITORY.parent)} is not beside this checkout")
    return path
