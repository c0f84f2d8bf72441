# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices for every test, and the data that lies beside the repository."""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Both are read once, when jax first makes its backends: set before anything imports jax.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

# What was compiled is kept: workers, and the processes that tests start, compile much the same.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / "build" / "compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Read when ray is imported. Its nodes stay on the loopback interface, keep no token under the home
# directory, and report to nobody.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import campaign
import hypothesis
import pytest

# A time limit for each example would be an assertion on time.
hypothesis.settings.register_profile("deltackpt", deadline=None)
hypothesis.settings.load_profile("deltackpt")

REPOSITORY = Path(__file__).resolve().parent.parent
_IN_MEMORY = Path("/dev/shm")
#: More than the directories of all tests ever hold.
_IN_MEMORY_BYTES = 4 << 30
_RECORD = "record"
_FIGURES = "figures"
#: Files whose tests start clusters of Ray, which never run two at once.
CLUSTERS = {
    "test_jax_trainer",
    "test_ray_demo",
    "test_ray_preemption",
    "test_service",
    "test_service_buckets",
    "test_service_kills",
}
#: Files whose tests start many processes, which never run two at once, but beside a cluster.
CROWDED = {
    "test_benchmarks",
    "test_dlrm_multi",
    "test_log_processes",
    "test_node_kills",
    "test_process_kills",
    "test_processes",
    "test_processes_failures",
    "test_processes_tracking",
    "test_step_kills",
    "test_scaling",
    "test_t5x_processes",
    "test_tiers_processes",
}

#: Files and folders whose tests all belong to `make test-processes`; others mark single tests.
PROCESSES = {
    "orbax_suites",
    "test_exits",
    "test_jax_trainer",
    "test_log_processes",
    "test_processes",
    "test_processes_failures",
    "test_processes_tracking",
    "test_ray_cluster",
    "test_service",
    "test_service_buckets",
    "test_t5x_processes",
    "test_tiers_processes",
    "without_jax",
}

#: How long the library lets others go on, where it has to look twice. Not that of readers beside
#: a removal: tests run these at the same time.
PAUSES = {
    "deltackpt.upkeep.verify": "_INTERVAL_SECS",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the long loops; workers get those of the process that starts them."""
    group = parser.getgroup("long loops")
    group.addoption("--long", choices=("part", "full"), default="part", help="how much they do")
    group.addoption("--long-seed", type=int, help="what they draw from; fresh by default")
    group.addoption("--long-summary", default="build/long_loops", help="where it is written to")
    parser.addoption(
        "--in-memory", action="store_true", help="directories of tests lie in /dev/shm, if they fit"
    )


@pytest.hookimpl(tryfirst=True)  # Before pytest makes them.
def pytest_configure(config: pytest.Config) -> None:
    """Draws a seed where none was given, once for all workers; places the tests' directories."""
    if (
        config.option.in_memory
        and config.option.basetemp is None
        and _IN_MEMORY.is_dir()
        and shutil.disk_usage(_IN_MEMORY).free >= _IN_MEMORY_BYTES
    ):
        place = config.option.basetemp = tempfile.mkdtemp(prefix="deltackpt-tests-", dir=_IN_MEMORY)
        config.add_cleanup(functools.partial(shutil.rmtree, place, ignore_errors=True))
    given = getattr(config, "workerinput", {}).get("long_seed", config.option.long_seed)
    config.option.long_seed = secrets.randbelow(1 << 32) if given is None else given


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist, for each worker."""
    node.workerinput["long_seed"] = node.config.option.long_seed


def _campaign(config: pytest.Config) -> campaign.Campaign:
    return campaign.Campaign(config.option.long == "full", config.option.long_seed)


def pytest_report_header(config: pytest.Config) -> str | None:
    """What repeats the long loops."""
    return str(_campaign(config)) if config.option.markexpr == "long" else None


@pytest.hookimpl(tryfirst=True)  # Before pytest selects by marks.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives each test its make target and its worker.

    Each file is the work of one of pytest-xdist's workers, all crowded ones of the same, and so are
    those with clusters; a test with a group of its own may run beside the others of its file.
    """
    for item in items:
        long = item.get_closest_marker("long") is not None
        if not long and (item.path.stem in PROCESSES or item.path.parent.name in PROCESSES):
            item.add_marker(pytest.mark.processes)
        elif long and item.get_closest_marker("processes") is not None:
            raise pytest.UsageError(f"{item.nodeid} is marked both long and processes")
    if not config.pluginmanager.has_plugin("xdist"):
        return
    for item in items:
        stem = item.path.stem
        if item.get_closest_marker("xdist_group") is None:
            group = "clusters" if stem in CLUSTERS else "crowded" if stem in CROWDED else stem
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def no_pauses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks again at once, where the library lets a moment pass first: nobody else is at work."""
    if request.node.get_closest_marker("processes") or request.node.get_closest_marker("long"):
        return
    for module, name in PAUSES.items():
        # Looked up, not imported: neither each test nor each environment has use for all.
        if module in sys.modules:
            monkeypatch.setattr(sys.modules[module], name, 0.0)


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """What takes lines about a test that are printed at the end, with its name."""
    return functools.partial(record_property, _RECORD)


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """What takes the name of a loop and its figures; those of several tests are added up."""

    def take(loop: str, **found: object) -> None:
        record_property(_FIGURES, (loop, found))

    return take


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints what tests recorded; their own output stays in the workers."""
    figures = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            lines = [line for name, line in report.user_properties if name == _RECORD]
            figures += [found for name, found in report.user_properties if name == _FIGURES]
            if lines:
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line("\n".join(map(str, lines)))
    if figures:
        started = terminalreporter._session_start.time  # As the last line of pytest.
        found = campaign.summary(_campaign(config), figures, time.time() - started)
        campaign.write(found, REPOSITORY / config.option.long_summary)
        terminalreporter.section(str(_campaign(config)))
        terminalreporter.write_line(campaign.markdown(found))


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
