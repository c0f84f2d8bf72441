# SPDX-License-Identifier: Apache-2.0
"""Sets up eight virtual CPU devices for every test, and locates data next to the repository."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Both are read once, when JAX creates its backends: set them before anything imports jax.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

# Cache compiled programs: workers and the processes that tests start compile the same ones.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / "build" / "compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Read when ray is imported. Ray stays on the loopback interface, writes no token to the home
# directory, and reports no usage.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import campaign
import hypothesis
import psutil
import pytest

# A time limit for an example, or for drawing some, would be a timing assertion.
UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("deltackpt", **UNTIMED)
# A test that reached its time limit would be shrunk without one.
hypothesis.settings.register_profile(
    "ci",
    **UNTIMED,
    phases=[phase for phase in hypothesis.Phase if phase.name not in ("shrink", "explain")],
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "deltackpt")

REPOSITORY = Path(__file__).resolve().parent.parent
_STARTED = time.monotonic()
_IN_MEMORY = Path("/dev/shm")
#: More than the directories of all tests ever need.
_IN_MEMORY_BYTES = 4 << 30
_MOST_RESIDENT_BYTES = 3 << 29
_RECORD = "record"
_FIGURES = "figures"
#: Files whose tests start Ray clusters; they never run concurrently.
CLUSTERS = {
    "test_jax_trainer",
    "test_ray_demo",
    "test_ray_preemption",
    "test_service",
    "test_service_buckets",
    "test_service_kills",
}
#: Files whose tests start many processes; they never run concurrently, except with a cluster.
CROWDED = {
    "test_benchmarks",
    "test_dlrm_multi",
    "test_wal_processes",
    "test_node_kills",
    "test_process_kills",
    "test_processes",
    "test_processes_failures",
    "test_step_kills",
    "test_scaling",
    "test_sparsecore_processes",
    "test_t5x_processes",
    "test_tiers_processes",
}

#: Files and folders whose tests all belong to `make test-processes`; others mark single tests.
PROCESSES = {
    "orbax_suites",
    "test_exits",
    "test_jax_trainer",
    "test_wal_processes",
    "test_processes",
    "test_processes_failures",
    "test_ray_cluster",
    "test_service",
    "test_service_buckets",
    "test_sparsecore_processes",
    "test_t5x_processes",
    "test_tiers_processes",
    "without_jax",
}

#: Pauses of the library before it checks something twice, except those of readers during a
#: removal, which tests exercise.
PAUSES = {
    "deltackpt.maintenance.verify": "_INTERVAL_SECS",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the long loops; workers inherit them from their parent."""
    group = parser.getgroup("long loops")
    group.addoption("--long", choices=("part", "full"), default="part", help="all, or a twentieth")
    group.addoption("--long-seed", type=int, help="random seed (default: a new one)")
    group.addoption("--long-secs", type=float, help="start no long test later than this")
    group.addoption("--long-summary", default="build/long_loops", help="directory of the summary")
    parser.addoption(
        "--in-memory", action="store_true", help="put test directories in /dev/shm if they fit"
    )
    parser.addoption(
        "--kernels", metavar="PATH", help="use this instruction set, or no compiled kernels: off"
    )


@pytest.hookimpl(tryfirst=True)  # Before pytest makes them.
def pytest_configure(config: pytest.Config) -> None:
    """Draws a seed if none is given, once for all workers; chooses the tests' directories."""
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
    if config.option.kernels:
        from instruction_sets import forced

        used = contextlib.ExitStack()
        used.enter_context(forced(config.option.kernels.removesuffix("off")))
        config.add_cleanup(used.close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called by pytest-xdist for each worker."""
    node.workerinput["long_seed"] = node.config.option.long_seed


def _campaign(config: pytest.Config) -> campaign.Campaign:
    return campaign.Campaign(config.option.long == "full", config.option.long_seed)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Prints how to repeat the long loops."""
    return str(_campaign(config)) if config.option.markexpr == "long" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports only the files with long tests if no others are selected: all take a minute."""
    if config.option.markexpr != "long" or not collection_path.name.startswith("test_"):
        return None
    return True if "mark.long" not in collection_path.read_text() else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Excludes imported objects from garbage collection: a full collection took 0.4 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # Before pytest selects by marks.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Assigns each test to its make target and worker.

    Each file is run by one pytest-xdist worker; all crowded files share a worker, and so do those
    with clusters. A test with its own group may run concurrently with the rest of its file.
    """
    _draw(config, items)
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


def _draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the marked number of tests of each drawn group, unless the loops run in full.

    For a long test with several parameters, one is drawn unless a mark sets another number.
    """
    if (run := _campaign(config)).full:
        return
    groups: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            groups.setdefault(mark.args, []).append(item)
        elif item.get_closest_marker("long"):
            groups.setdefault((item.nodeid.partition("[")[0], 1), []).append(item)
    left_out: set[pytest.Item] = set()
    for (group, most), found in groups.items():
        drawn = run.random("drawn", group).sample(found, min(most, len(found)))
        left_out |= {*found} - {*drawn}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips long tests once the time given for them is over."""
    secs = item.config.option.long_secs
    if secs and item.get_closest_marker("long") and time.monotonic() - _STARTED > secs:
        pytest.skip(f"the {secs:,.0f} s given for long tests are over")


@pytest.fixture(scope="session")
def cache_limit() -> list[int]:
    """Resident bytes of this process above which ``clear_jax_caches`` acts."""
    return [_MOST_RESIDENT_BYTES]


@pytest.fixture(scope="module", autouse=True)
def clear_jax_caches(cache_limit: list[int]) -> Iterator[None]:
    """Clears JAX's compilation caches once they are large: those of all files take gigabytes.

    Not after each file: loading 20 common programs takes half a second, even from the disk cache.
    """
    yield
    if "jax" not in sys.modules:
        return
    resident = psutil.Process().memory_info().rss
    if resident > cache_limit[0]:
        sys.modules["jax"].clear_caches()
        # The allocator keeps the freed memory, so the resident size stays at this level.
        cache_limit[0] = resident + _MOST_RESIDENT_BYTES // 16


@pytest.fixture(autouse=True)
def no_open_logs() -> Iterator[None]:
    """Closes the WAL files that a test has made by hand: hundreds with hypothesis."""
    yield
    if "made_up_wals" in sys.modules:
        sys.modules["made_up_wals"].close_all()


@pytest.fixture(autouse=True)
def no_pauses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the library's pauses, since no other process is involved."""
    if request.node.get_closest_marker("processes") or request.node.get_closest_marker("long"):
        return
    for module, name in PAUSES.items():
        # Looked up, not imported: not every test or environment needs them.
        if module in sys.modules:
            monkeypatch.setattr(sys.modules[module], name, 0.0)


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Returns a function that records lines to print at the end, with the test's name."""
    return functools.partial(record_property, _RECORD)


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Returns a function that adds to the figures of a named loop."""

    def take(loop: str, **found: object) -> None:
        record_property(_FIGURES, (loop, found))

    return take


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints the name of a failed test at once: a run that is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nfailed in {report.when}: {report.nodeid}", file=sys.__stderr__, flush=True)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints the recorded lines; the workers' own output is not shown."""
    figures = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            lines = [line for name, line in report.user_properties if name == _RECORD]
            figures += [found for name, found in report.user_properties if name == _FIGURES]
            if lines:
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line("\n".join(map(str, lines)))
    if figures:
        started = terminalreporter._session_start.time  # As the last line of pytest's output.
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
    """The folder of real inputs next to the repository."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"{path.relative_to(REPOSITORY.parent)} is not next to this checkout")
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A ``many.Server`` that starts the processes of jobs."""
    from many import Server

    found = Server()
    yield found
    found.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Any]:
    """A ``deltackpt.testing.Disk`` of the test's directory."""
    from deltackpt.testing import Disk

    with Disk(tmp_path) as found:
        yield found


@pytest.fixture
def nobody_removes_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes readers report damage at once, since no other process removes steps."""
    from deltackpt.maintenance import verify
    from deltackpt.reading import stored_saves

    monkeypatch.setattr(stored_saves, "_GONE_CHECKS", 1)
    monkeypatch.setattr(verify, "_CHECKS", 1)
