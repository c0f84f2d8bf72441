# SPDX-License-Identifier: Apache-2.0
"""Training against buckets: saves on a node reach the root despite failures."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import servers
from damages import damage
from machine import free_port

import deltackpt
from deltackpt import events, inspect, touched
from deltackpt.errors import (
    ClosedError,
    FencedError,
    ForeignDirectory,
    FormatTooNew,
    OptionError,
    SaveFailed,
    StorageError,
    UnsupportedRoot,
    WaitTimeout,
)
from deltackpt.events import FailureEvent, UploadEvent
from deltackpt.format import records
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import open_steps
from deltackpt.ledger.view import JournalView, entry_name
from deltackpt.maintenance.verify import verify_root
from deltackpt.options import ManagerOptions, Tiers, Timeouts
from deltackpt.storage import buckets
from deltackpt.tiers import cursor, replicator, uploader
from deltackpt.tiers.replication import ReplicationClient
from deltackpt.tiers.staging import Orders, StagingDir

HANDLERS = {"embeddings": deltackpt.Tables(select="tables/*")}
ROWS = 500
_numbers = itertools.count()
#: How long a test waits for a process; never asserted on.
_PATIENCE_SECS = 120


class Kept(list[events.Event]):
    """An event handler that keeps all events."""

    def receive(self, event: events.Event) -> None:
        self.append(event)

    def of(self, kind: type) -> list[Any]:
        """The events of a kind."""
        return [event for event in self if isinstance(event, kind)]


class Node:
    """A training machine: its staging directory, and a state determined by its calls."""

    def __init__(self, url: str, endpoint: str, stage: Path):
        self.url, self.endpoint, self.stage = url, endpoint, StagingDir(stage)
        self.events = Kept()
        self.state: dict[str, Any] = {}
        self.touched: Any = None
        self.begin(0)

    def begin(self, seed: int) -> None:
        drawn = np.random.default_rng(seed).normal(size=(ROWS, 4))
        self.state = {
            "tables": {"words": jnp.asarray(drawn, jnp.float32)},
            "bias": jnp.arange(3.0) + seed,
        }
        self.touched = touched.init(self.state["tables"])

    def manager(self, **options: Any) -> deltackpt.CheckpointManager:
        tiers: dict[str, Any] = {"staging_dir": str(self.stage.path), "endpoint": self.endpoint}
        names = Tiers.__dataclass_fields__
        tiers |= {name: options.pop(name) for name in [*options] if name in names}
        handlers = options.pop("handlers", HANDLERS)
        return deltackpt.CheckpointManager(
            self.url,
            handlers=handlers,
            options=ManagerOptions(tiers=Tiers(**tiers), **options),
            event_handlers=(self.events,),
        )

    def train(self, step: int) -> None:
        rows = jnp.arange(step * 7, step * 7 + 5) % ROWS
        words = self.state["tables"]["words"].at[rows].add(1.0 + step)
        self.state = {"tables": {"words": words}, "bias": self.state["bias"] + 0.5}
        self.touched = touched.mark(self.touched, {"words": rows})

    def save(self, manager: deltackpt.CheckpointManager, step: int, **more: Any):
        self.train(step)
        return manager.save(step, self.state, touched=self.touched, **more)

    def saves(
        self, manager: deltackpt.CheckpointManager, *steps: int, bases: Any = (), **more: Any
    ) -> None:
        """Saves steps and waits for them."""
        for step in steps:
            self.save(manager, step, force_base=step in bases, **more)
        manager.wait_until_finished()

    def run(self, *steps: int, bases: Any = (), start: int | None = None, **options: Any) -> None:
        """A run of its own: resumes from ``start`` or the newest step, then saves steps."""
        with self.manager(**options) as manager:
            if manager.all_steps():
                self.restore(manager, start)
            self.saves(manager, *steps, bases=bases)

    def staged_run(self, *steps: int, **options: Any) -> None:
        """A run whose saves are staged and not uploaded."""
        with pytest.MonkeyPatch.context() as patch:
            without_uploader(patch)
            self.run(*steps, wait_for="staging", **options)

    def resumed(
        self, step: int, steps: list[int] | None = None, *, like: Node | None = None, **options: Any
    ) -> Any:
        """A new manager restores ``step``, the newest of ``steps``, bit for bit."""
        expected = (like or self).held()
        self.begin(99)
        with self.manager(**options) as manager:
            found = self.restore(manager)
            assert found.step == step
            assert same(self.held(), expected)
            assert steps is None or sorted(manager.all_steps()) == steps
        return found

    def restore(self, manager: deltackpt.CheckpointManager, step: int | None = None):
        template = jax.eval_shape(lambda: self.state)
        found = (
            manager.restore_latest(template) if step is None else manager.restore(step, template)
        )
        assert found is not None
        self.state, self.touched = found.state, found.touched
        return found

    def held(self) -> dict[str, np.ndarray]:
        return {
            "words": np.asarray(self.state["tables"]["words"]),
            "bias": np.asarray(self.state["bias"]),
        }

    def local(self) -> list[int]:
        return sorted(int(one.name) for one in self.stage.steps.iterdir() if one.name.isdigit())

    def root(self) -> list[int]:
        return sorted(open_steps(self.url, endpoint=self.endpoint).steps())


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(first[name], second[name]) for name in first)


def newer_version() -> contextlib.AbstractContextManager[object]:
    """Within, records are written in a format that is newer than this version of deltackpt."""
    return mock.patch.object(records, "FORMAT_VERSION", records.FORMAT_VERSION + 1)


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(scope="module", params=["s3", "gcs", "azure"])
def server(request, tmp_path_factory) -> Iterator[servers.Server]:
    start = getattr(servers, request.param)
    with start(tmp_path_factory.mktemp("server")) as found:
        with servers.environment_of(found):
            yield found


@pytest.fixture(scope="module")
def s3(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.s3(tmp_path_factory.mktemp("server")) as found:
        with servers.environment_of(found):
            yield found


def nodes(server: servers.Server, tmp_path: Path) -> Iterator[Node]:
    url = server.bucket(f"bucket{next(_numbers)}") + "/some/run"
    for number in itertools.count():
        yield Node(url, server.endpoint, tmp_path / f"node{number}")


@pytest.fixture
def node(s3, tmp_path) -> Iterator[Callable[[], Node]]:
    """Creates nodes that share one root."""
    made = nodes(s3, tmp_path)
    yield lambda: next(made)


@pytest.fixture
def one(node) -> Node:
    return node()


@pytest.fixture
def other(one, node) -> Node:
    return node()


class Breakable:
    """A server that a test stops and restarts with its data."""

    def __init__(self, folder: Path):
        self._folder, self._port = folder, free_port()
        self._running = contextlib.ExitStack()
        self.server = self.start()

    def start(self) -> servers.Server:
        self.server = self._running.enter_context(servers.s3(self._folder, self._port))
        return self.server

    def end(self) -> None:
        self._running.close()


@pytest.fixture
def breakable(tmp_path) -> Iterator[Breakable]:
    found = Breakable(tmp_path / "server")
    with servers.environment_of(found.server):
        yield found
        found.end()
    for process in replicator._left:  # They would wait for the server forever.
        process.kill()
        process.wait()
    replicator._left.clear()


# ---- uploads


def resume_on_empty_nodes(first: Node, second: Node, third: Node) -> dict[int, dict]:
    """Trains on two nodes and restores all steps on a third; returns the states of the steps."""
    expected = {}
    with first.manager() as manager:
        for step in range(4):
            first.save(manager, step, force_base=step == 2)
            expected[step] = first.held()
        manager.wait_until_finished()
        assert first.root() == [0, 1, 2, 3] == manager.all_steps()
    with second.manager() as manager:
        assert manager.latest_step() == 3
        found = second.restore(manager)
        assert (found.step, found.chain) == (3, (2, 3))
        assert same(second.held(), expected[3])
        assert second.save(manager, 4).kind == "delta"
        expected[4] = second.held()
    assert second.root() == [0, 1, 2, 3, 4]
    with third.manager() as manager:
        for step, held in expected.items():
            third.restore(manager, step)
            assert same(third.held(), held), step
    assert verify_root(first.url, endpoint=first.endpoint).intact
    return expected


def test_an_empty_node_resumes_bit_for_bit(server, tmp_path):
    resume_on_empty_nodes(*itertools.islice(nodes(server, tmp_path), 3))


def test_each_save_is_uploaded_and_reported_once(one):
    with one.manager() as manager:
        one.saves(manager, 0, 1, 2)
        number = Journal(open_at(one)).state().entry.number
        reported = one.events.of(UploadEvent)
        assert [event.step for event in reported] == [0, 1, 2]
        assert all(event.bytes_sent > 0 and event.objects > 2 for event in reported)
        assert reported[-1].waiting == 0
    one.resumed(2, [0, 1, 2])
    # A claim, the record that it has started, and nothing else.
    assert Journal(open_at(one)).state().entry.number == number + 2


@pytest.mark.parametrize("saves_first", [False, True], ids=["at once", "with the next save"])
def test_wait_acknowledges_nothing_once_the_bucket_was_emptied(one, saves_first):
    with contextlib.suppress(FencedError), one.manager() as manager:
        one.saves(manager, 0)
        store = open_at(one).store
        eventually(lambda: any("copy" in key for key in store.keys("journal")), "no copy is put")
        store.delete(store.keys(""))
        if saves_first:
            one.save(manager, 1)
        with pytest.raises(FencedError, match="found none: the journal was removed"):
            manager.wait_until_finished()
    assert store.keys("journal") == []


def test_wait_rewrites_a_lost_entry(one):
    with one.manager() as manager:
        one.saves(manager, 0)
        at = open_at(one) / entry_name(Journal(open_at(one)).state().entry.number)
        at.store.put(at.key, b"lost")
        manager.wait_until_finished()
        assert sorted(JournalView(open_at(one)).state().steps) == [0]
        one.saves(manager, 1)
    assert one.root() == [0, 1]


def open_at(one: Node):
    return buckets.locate(one.url, endpoint=one.endpoint).open()


def test_all_contents_of_a_step_are_restored_from_the_root(one, other):
    handlers = {**HANDLERS, "progress": ocp.JsonCheckpointHandler()}
    with one.manager(handlers=handlers) as manager:
        one.save(
            manager,
            5,
            items={"progress": ocp.args.JsonSave({"epoch": 3})},
            metrics={"loss": 0.25},
            custom_metadata={"by": "test"},
        )
    with other.manager(handlers=handlers) as manager:
        template = jax.tree.map(jnp.zeros_like, one.state)
        items = {"progress": ocp.args.JsonRestore()}
        found = manager.restore(5, template, items=items)
        assert found.items["progress"] == {"epoch": 3}
        assert np.array_equal(found.state["bias"], one.state["bias"])
        assert manager.metrics(5) == {"loss": 0.25}
        assert manager.custom_metadata(5) == {"by": "test"}
        assert manager.item_metadata(5)["bias"].shape == (3,)
        assert manager.best_step("loss") == 5
        piece = manager.read_state(5, {"bias": jnp.zeros(3)})
        assert np.array_equal(piece.state["bias"], one.state["bias"])
        rows = manager.read(5, {"words": (3, 9)})
        [fields] = rows.tables.values()
        [words] = fields.values()
        assert np.array_equal(words, one.held()["words"][3:9])
        assert not [*other.stage.fetched.iterdir()]


def test_a_reader_follows_the_root(one):
    reader = Node(one.url, one.endpoint, one.stage.path.with_name("none"))
    with pytest.raises(StorageError, match="expected a journal in journal/, found none"):
        reader.manager(access="read")
    with one.manager() as manager, contextlib.ExitStack() as readers:
        one.saves(manager, 0)
        reading = readers.enter_context(reader.manager(access="read"))
        assert reading.latest_step() == 0
        one.saves(manager, 1)
        assert reading.latest_step() == 1
        assert reader.restore(reading).step == 1
        assert same(reader.held(), one.held())
        one.saves(manager, 2)
        # The reader has not listed it.
        assert reader.restore(reading, 2).step == 2
        with pytest.raises(OptionError, match="can write"):
            reader.save(reading, 3)
    assert not reader.stage.path.exists()


def test_the_default_staging_directory_is_in_the_users_cache(one, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ManagerOptions(tiers=Tiers(endpoint=one.endpoint))
    with deltackpt.CheckpointManager(one.url, handlers=HANDLERS, options=options) as manager:
        one.save(manager, 0)
    [stage] = (tmp_path / "cache" / "deltackpt" / "stages").iterdir()
    assert (stage / "steps" / "0").is_dir()


# ---- outages and staging space


def test_waiting_for_the_root_times_out_in_an_outage_and_loses_nothing(breakable, tmp_path):
    one = next(nodes(breakable.server, tmp_path))
    one.run(0)
    manager = one.manager(timeouts=Timeouts(close_secs=1.0, store_secs=5.0))
    one.restore(manager)
    breakable.end()
    one.save(manager, 1)
    eventually(lambda: not manager.is_saving_in_progress(), "it is in the stage")
    with pytest.raises(WaitTimeout, match="1 saves of .* bytes only in the staging directory"):
        manager.wait_until_finished()
    with pytest.raises(WaitTimeout):
        manager.close()
    breakable.start()
    # The uploader finishes although the manager is closed.
    eventually(lambda: one.root() == [0, 1], "the uploader continues")


def test_an_uploader_ends_if_the_trainer_is_of_a_newer_version(one):
    """The trainer's own uploader waits until it ends."""
    one.staged_run(0)
    orders = one.stage.orders()
    assert orders is not None
    with newer_version():
        one.stage.order(orders)
    trainer = cursor.Trainer()
    with replicator.only_one(one.stage, trainer), pytest.raises(FormatTooNew, match="orders"):
        uploader.Uploader(one.stage, adopts=True).run(trainer)


def test_an_uploader_retries_if_only_the_remote_directory_is_of_a_newer_version(one):
    """Otherwise, its trainer would start another uploader every two seconds."""
    one.staged_run(0)
    found = uploader.Uploader(one.stage)
    with mock.patch.object(Journal, "resume", side_effect=FormatTooNew("version 2")):
        with pytest.raises(FormatTooNew) as refused:
            found.step()
        assert found.is_retried(refused.value) and found.progress.code == "format-too-new"
    found.run(cursor.Trainer(is_gone=True))
    assert one.root() == [0]


def test_a_trainer_reports_that_its_uploader_is_of_a_newer_version(one, monkeypatch):
    without_uploader(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        one.saves(manager, 0)
    manager = one.manager(timeouts=Timeouts(close_secs=0.5))
    with newer_version():
        one.stage.report(one.stage.progress("another"))
    with pytest.raises(WaitTimeout, match="uploader is newer .*version 2, .* newer deltackpt"):
        manager.wait_until_finished()
    with pytest.raises(WaitTimeout):
        manager.close()
    assert "format-too-new" in [event.code for event in one.events.of(FailureEvent)]


def test_a_full_staging_directory_makes_the_next_save_wait(breakable, tmp_path):
    one = next(nodes(breakable.server, tmp_path))
    base = ROWS * 4 * 4
    limits = Timeouts(close_secs=120.0, store_secs=5.0, save_secs=1.0)
    with one.manager(timeouts=limits, wait_for="staging", max_staging_bytes=2 * base) as manager:
        breakable.end()
        one.save(manager, 0)
        eventually(lambda: not manager.is_saving_in_progress(), "it is in the stage")
        one.save(manager, 1, force_base=True)
        with pytest.raises(WaitTimeout, match="save of step 1"):
            one.save(manager, 2)  # It waits for the one before, which waits for space.
        assert manager.is_saving_in_progress()
        assert manager.all_steps() == [0]
        breakable.start()
        eventually(lambda: not manager.is_saving_in_progress(), "there is room")
        one.saves(manager, 2)
        assert manager.all_steps() == [0, 1, 2]
        waited = {event.step: event.room_secs for event in one.events.of(events.SaveEvent)}
        assert waited[1] > limits.save_secs
    eventually(lambda: one.root() == [0, 1, 2], "all saves came to the root")


def test_a_save_larger_than_the_staging_limit_is_staged_alone(one):
    with pytest.warns(UserWarning, match="exceeds Tiers.max_staging_bytes"):
        one.run(0, 1, max_staging_bytes=100)
    assert one.root() == [0, 1]


def test_the_staging_limit_counts_the_shards_of_all_processes(node):
    with node().manager(max_staging_bytes=1000) as manager:
        tiers = staged(manager)
        shared = ReplicationClient(
            tiers.replicas, tiers.journal, manager._run.options, tiers.orders, processes=3
        )
        assert tiers.make_room(500) is None
        assert "1,500 bytes exceeds" in str(shared.make_room(500))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_closing_ends_the_wait_for_space(breakable, tmp_path):
    one = next(nodes(breakable.server, tmp_path))
    limits = Timeouts(close_secs=1.0, store_secs=5.0)
    manager = one.manager(timeouts=limits, wait_for="staging", max_staging_bytes=100)
    breakable.end()
    with contextlib.suppress(WaitTimeout):
        one.saves(manager, 0)
    one.save(manager, 1)
    with pytest.raises(WaitTimeout):
        manager.close()
    with pytest.raises(ClosedError):
        one.save(manager, 2)
    assert one.local() == [0]


# ---- nodes that fail, restart and take over


def without_uploader(
    monkeypatch: pytest.MonkeyPatch, manager: deltackpt.CheckpointManager | None = None
) -> None:
    """Prevents uploaders from starting and kills that of a manager."""
    monkeypatch.setattr("deltackpt.tiers.replicator.ReplicatorProcess.start", lambda self: None)
    process = staged(manager).process._process if manager is not None else None
    if process is not None:
        process.kill()
        process.wait()


@pytest.fixture
def alone(monkeypatch) -> None:
    """Starts no uploader."""
    without_uploader(monkeypatch)


def staged(manager: deltackpt.CheckpointManager) -> ReplicationClient:
    """The tiers of a manager with a bucket."""
    found = manager._run.replication
    assert found is not None
    return found


def test_the_next_start_uploads_what_a_killed_node_left(one):
    one.staged_run(0, 1, 2)
    assert one.local() == [0, 1, 2]
    one.resumed(2)
    assert one.root() == [0, 1, 2]


def test_staged_saves_stay_if_the_next_trainer_starts_afresh(one, monkeypatch):
    one.staged_run(0, 1)
    with monkeypatch.context() as patch, one.manager(wait_for="staging") as manager:
        without_uploader(patch, manager)
        one.saves(manager, 2, bases=[2])
    one.resumed(2, [0, 1, 2])
    one.resumed(2, [0, 1, 2])
    assert one.root() == [0, 1, 2]


def test_staged_steps_that_another_run_superseded_are_moved_aside(one, other):
    one.run(0)
    one.staged_run(1, 2)
    assert (one.local(), one.root()) == ([0, 1, 2], [0])
    with other.manager() as manager:
        assert other.restore(manager).step == 0
        other.begin(5)
        other.restore(manager, 0)
        other.saves(manager, 1, 3)
    with pytest.warns(UserWarning, match=r"steps \[1, 2\], which are not at .* were moved to"):
        manager = one.manager()
    with manager:
        assert manager.all_steps() == [0, 1, 3]
        one.restore(manager)
        assert same(one.held(), other.held())
        assert one.save(manager, 4).kind == "delta"
        manager.wait_until_finished()
    assert one.root() == [0, 1, 3, 4]
    [aside] = (one.stage.path / "aside").iterdir()
    assert sorted(step.name for step in aside.iterdir()) == ["1", "2"]


def test_a_trainer_that_lost_the_root_is_fenced(node):
    one, other = node(), node()
    first = one.manager()
    one.saves(first, 0)
    with other.manager() as second:
        other.restore(second)
        with pytest.raises(FencedError):
            first.check_lease()
        one.save(first, 1)  # Saving is not fenced yet.
        with pytest.raises(FencedError, match="expected to hold its claim"):
            first.wait_until_finished()
        with pytest.raises(FencedError):
            one.save(first, 2)
        with pytest.raises(FencedError):
            first.close()
        assert other.root() == [0]
        other.saves(second, 1)
        assert other.root() == [0, 1]
    node().resumed(1, like=other)


def test_the_later_of_two_managers_in_a_process_holds_the_root(one):
    first = one.manager()
    one.save(first, 0)
    with one.manager() as second:
        assert second.latest_step() == 0
        with pytest.raises(FencedError, match="another manager of this process"):
            one.save(first, 1)
        one.restore(second)
        one.save(second, 1)
    assert one.root() == [0, 1]


# ---- rollback and removal


def test_rolled_back_steps_are_not_at_the_root(node):
    one, other = node(), node()
    with one.manager() as manager:
        one.saves(manager, 0, 1, 2, 3)
        one.restore(manager, 1)
        with pytest.warns(UserWarning, match=r"later steps \[2, 3\]"):
            one.save(manager, 2)
        assert manager.all_steps()[:2] == [0, 1]
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1, 2] == one.root()
    with other.manager() as manager:
        # Nothing is staged here.
        other.restore(manager, 0)
        with pytest.warns(UserWarning, match=r"later steps \[1, 2\] are rolled back"):
            other.saves(manager, 1)
        assert manager.all_steps() == [0, 1]
    assert other.root() == [0, 1]
    node().resumed(1, [0, 1], like=other)


def test_rolling_back_steps_that_are_not_uploaded_yet(monkeypatch, one, other):
    with monkeypatch.context() as patch, one.manager(wait_for="staging") as manager:
        without_uploader(patch)
        for step in range(4):
            one.save(manager, step)
        one.restore(manager, 1)
        with pytest.warns(UserWarning, match="later steps"):
            one.saves(manager, 3)
        assert manager.all_steps() == [0, 1, 3]
    with one.manager() as manager:
        assert manager.all_steps() == [0, 1, 3]
    assert one.root() == [0, 1, 3]
    other.resumed(3, like=one)


def test_a_rollback_survives_a_restart(one):
    one.run(0, 1, 2)
    with pytest.warns(UserWarning, match="later steps"):
        one.staged_run(1, start=0)
    assert one.root() == [0, 1, 2]
    one.resumed(1, [0, 1])
    assert one.root() == [0, 1]


@pytest.mark.filterwarnings("ignore:.*later steps")
def test_no_step_is_saved_before_the_rollback_is_ordered(one):
    write = StagingDir.order

    def refused(self: StagingDir, orders: Orders) -> None:
        if orders.removals:
            raise StorageError("no space left")
        write(self, orders)

    with one.manager() as manager:
        one.saves(manager, 0, 1, 2)
        one.restore(manager, 0)
        with mock.patch.object(StagingDir, "order", refused):
            for step in (1, 2):
                with pytest.raises(StorageError, match="no space left"):
                    one.save(manager, step)
        one.saves(manager, 3)
    assert one.root() == [0, 3]


def test_retention_applies_to_the_root_and_staging_keeps_the_newest_chains(one, other):
    policy = deltackpt.DeltaOptions(policy=deltackpt.policies.Consecutive(max_chain=1))
    with one.manager(max_to_keep=5, keep_local=1, deltas=policy) as manager:
        for step in range(13):
            one.saves(manager, step)
        # The uploader retires steps after the upload for which the manager has waited.
        eventually(lambda: manager.all_steps() == one.root(), "unneeded steps are retired")
        assert one.root()[-5:] == [8, 9, 10, 11, 12]
        assert len(one.root()) <= 7
        eventually(lambda: len(one.local()) <= 4 or bool(staged(manager).collect()), "evicted")
        assert manager.restore(8, one.state).step == 8
    other.resumed(12, like=one)
    assert verify_root(one.url, endpoint=one.endpoint).intact


def test_no_step_is_retired_before_its_replacement_is_uploaded(one, monkeypatch):
    one.run(0, max_to_keep=1)
    with monkeypatch.context() as patch, one.manager(max_to_keep=1, wait_for="staging") as manager:
        without_uploader(patch)
        one.restore(manager)
        for step in range(1, 4):
            one.saves(manager, step, bases=[step])
        assert manager.all_steps() == [3]
    orders = one.stage.orders()
    assert orders is not None and 0 in {removal.step for removal in orders.removals}
    work = uploader.Uploader(one.stage)
    unreachable = mock.Mock(side_effect=StorageError("the network is gone"))
    with mock.patch.object(uploader, "send", unreachable), pytest.raises(StorageError):
        work.step()
    assert one.root() == [0]
    assert work.step() and not work.step()
    assert one.root() == [3]


def test_a_delta_whose_parent_was_evicted_from_staging(one, other):
    with one.manager(keep_local=1) as manager:
        one.saves(manager, 0, 1)
        staged(manager).local.remove_steps([0, 1])
        assert manager.all_steps() == [0, 1]
        assert one.save(manager, 2).kind == "delta"
        manager.wait_until_finished()
        assert one.root() == [0, 1, 2]
        assert manager.restore(2, one.state).chain == (0, 1, 2)
    other.resumed(2, like=one)


def test_the_best_steps_are_kept_after_eviction_from_staging(one):
    best = ocp.checkpoint_managers.BestN(get_metric_fn=lambda found: found["loss"], n=2)
    with one.manager(preservation_policy=best, keep_local=1) as manager:
        for step, loss in enumerate((-1, 0, -1, -2, -3, -4, -9)):
            one.saves(manager, step, bases=[step], metrics={"loss": loss})
    assert {1} < {*one.root()}
    with one.manager(preservation_policy=best) as manager:
        assert manager.best_step() == 1


def test_a_step_is_deleted_at_the_root(one):
    with one.manager() as manager:
        one.saves(manager, 0, 1, 2, bases=[0, 1, 2])
        manager.delete(1)
        assert manager.all_steps() == [0, 2]
        with pytest.raises(deltackpt.errors.StepNotFound):
            manager.delete(1)
        manager.wait_until_finished()
        assert one.root() == [0, 2]


def test_a_deletion_is_forgotten_with_the_staging_directory_and_can_be_repeated(node, monkeypatch):
    one, other = node(), node()
    one.run(0, 1, 2, bases=[0, 1, 2])
    with monkeypatch.context() as patch:
        without_uploader(patch)
        with one.manager(wait_for="staging") as manager:
            one.restore(manager)
            manager.delete(1)
            manager.wait_until_finished()
    assert one.root() == [0, 1, 2]
    with other.manager() as manager:
        assert manager.all_steps() == [0, 1, 2]
        other.restore(manager)
        manager.delete(1)
    assert other.root() == [0, 2]


def test_a_deletion_is_awaited_if_the_upload_of_the_step_may_still_be_committing(node, monkeypatch):
    one = node()
    with one.manager(wait_for="staging") as manager:
        with monkeypatch.context() as patch:
            without_uploader(patch, manager)
            one.saves(manager, 0, 1, bases=[0, 1])
            manager.delete(0)
            assert staged(manager)._is_deleting()
        staged(manager).start()
        eventually(lambda: not staged(manager)._is_deleting(), "it was deleted")
        assert 0 not in one.root()


def test_the_deletion_of_a_step_that_was_never_uploaded_ends_in_an_outage(breakable, tmp_path):
    one = next(nodes(breakable.server, tmp_path))
    with one.manager(timeouts=Timeouts(store_secs=5.0), wait_for="staging") as manager:
        one.saves(manager, 0)
        eventually(lambda: one.root() == [0], "the first save came to the root")
        breakable.end()
        one.saves(manager, 1)
        eventually(lambda: staged(manager).progress().problem is not None, "it is noticed")
        manager.delete(1)
        eventually(lambda: not staged(manager)._is_deleting(), "there is nothing to delete")
        assert staged(manager).progress().problem is not None
        breakable.start()
        one.saves(manager, 2)
        eventually(lambda: one.root() == [0, 2], "the next save came to the root")


def test_a_deletion_is_done_although_no_uploader_can_be_started(node, monkeypatch):
    one = node()
    one.run(0, 1, bases=[0, 1])
    with one.manager() as manager:
        one.restore(manager)
        with monkeypatch.context() as patch:
            refused = mock.Mock(side_effect=deltackpt.errors.StorageError("no process can start"))
            patch.setattr("deltackpt.tiers.replicator.ReplicatorProcess.start", refused)
            manager.delete(1)
        assert refused.called
        assert manager.all_steps() == [0]
        one.saves(manager, 2)  # A delta of the deleted step could not be restored.
        assert one.root() == [0, 2]
        one.restore(manager, 2)


def test_a_wait_for_a_deletion_times_out_and_the_next_run_deletes(node, monkeypatch):
    one = node()
    one.run(0, 1, bases=[0, 1])
    with monkeypatch.context() as patch:
        without_uploader(patch)
        manager = one.manager(timeouts=Timeouts(close_secs=1.0))
        one.restore(manager)
        manager.delete(0)
        with pytest.raises(WaitTimeout, match="found deletions only in the staging directory"):
            manager.close()
    assert one.root() == [0, 1]
    one.run(2)
    assert one.root() == [1, 2]


# ---- damage


def damage_largest_file(step: Path) -> None:
    files = (path for path in step.rglob("*") if path.is_file())
    damage(max(files, key=lambda path: path.stat().st_size), "flipped")


def test_a_step_with_a_damaged_staged_copy_is_read_from_the_root(one):
    with one.manager() as manager:
        one.saves(manager, 0, 1)
        expected = one.held()
        damage_largest_file(one.stage.steps / "0")
        with pytest.warns(UserWarning, match="step 0 is damaged in the staging directory"):
            assert one.restore(manager).step == 1
        assert same(one.held(), expected)
        assert one.local() == [1]
        assert one.save(manager, 2).kind == "delta"
    assert one.root() == [0, 1, 2]


def test_a_save_that_is_damaged_before_it_is_uploaded(monkeypatch, one, other):
    with one.manager() as manager:
        one.saves(manager, 0)
        with monkeypatch.context() as patch:
            without_uploader(patch, manager)
            one.save(manager, 1)
            eventually(lambda: not manager.is_saving_in_progress(), "it is in the stage")
            damage_largest_file(one.stage.steps / "1")
        with (
            pytest.raises(SaveFailed, match="cannot reach"),
            pytest.warns(UserWarning, match="the uploader of .* exited with code -9"),
        ):
            manager.wait_until_finished()
        [failure] = one.events.of(FailureEvent)
        assert (failure.operation, failure.step, failure.code) == ("upload", 1, "damaged")
        assert one.save(manager, 2).kind == "base"
        manager.wait_until_finished()
        assert one.root() == [0, 2]
    other.resumed(2, like=one)


# ---- invalid configurations


def test_a_staging_directory_belongs_to_one_root(one, s3, tmp_path):
    one.run(0)
    other = Node(s3.bucket("another") + "/run", s3.endpoint, one.stage.path)
    with pytest.raises(OptionError, match="expected the staging directory of s3://another/run"):
        other.manager()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(OptionError, match="expected an empty directory or a staging"):
        Node(one.url, one.endpoint, tmp_path / "full").manager()
    with pytest.raises(OptionError, match="expected a local directory"):
        one.manager(staging_dir="s3://bucket/stage")


def test_invalid_tiers_are_refused(tmp_path):
    with pytest.raises(OptionError, match="expected None for the local directory"):
        deltackpt.CheckpointManager(tmp_path / "run", options=ManagerOptions(tiers=Tiers()))
    with pytest.raises(UnsupportedRoot, match="hdfs"):
        deltackpt.CheckpointManager("hdfs://name/run")
    invalid: dict[str, Any] = {
        "max_staging_bytes": 0,
        "keep_local": 0,
        "bytes_per_sec": -1.0,
        "wait_for": "memory",
    }
    for name, value in invalid.items():
        with pytest.raises(OptionError, match=f"Tiers.{name}"):
            Tiers(**{name: value})
    with pytest.raises(OptionError, match="ManagerOptions.tiers"):
        ManagerOptions(tiers={"staging_dir": "/dev/shm"})  # type: ignore[arg-type]


def test_a_bucket_with_foreign_objects_is_refused(one):
    open_at(one).store.put("somebody/else", b"data")
    with pytest.raises(ForeignDirectory, match="somebody"):
        one.manager()


def test_a_root_of_another_item_is_refused_and_its_trainer_keeps_it(one, other):
    with one.manager() as manager:
        one.saves(manager, 0)
        with pytest.raises(OptionError, match="expected one item"):
            other.manager(handlers={"others": deltackpt.Tables(select="tables/*")})
        one.save(manager, 1)
    assert one.root() == [0, 1]


def test_credentials_are_never_written_or_reported(one, monkeypatch):
    secret = "sEcReT-of-the-test-0123456789"
    one.run(0, timeouts=Timeouts(close_secs=60, store_secs=10))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(StorageError) as refused:
        one.manager()
    assert secret not in str(refused.value)
    for path in one.stage.path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert secret.encode() not in data and b"tester" not in data, path


def test_inspect_and_readers_see_whole_steps_beside_a_trainer(one):
    seen: list[int] = []
    problems: list[Exception] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                found = inspect.open(one.url, endpoint=one.endpoint)
                if found.steps:
                    seen.append(found.steps[-1])
                    report = verify_root(one.url, endpoint=one.endpoint)
                    assert report.intact, (report.problems, report.steps)
            except deltackpt.errors.StepGone:
                pass
            except Exception as error:
                if not (isinstance(error, StorageError) and "expected a journal" in str(error)):
                    problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        one.run(*range(8), bases=[0, 3, 6], max_to_keep=2)
    finally:
        stop.set()
        reader.join()
    assert not problems
    assert sorted(seen) == seen
