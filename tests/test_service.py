# SPDX-License-Identifier: Apache-2.0
"""The restore service on a real cluster of three nodes: faults never cause wrong bits."""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

pytest.importorskip("ray.cluster_utils", reason="needs deltackpt[ray]", exc_type=ImportError)

import many
import many_worker
import ray
import ray_nodes
from brokers import KafkaCluster
from damages import flip
from made_up_wals import records_in
from many import Job
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_nodes import HANG_SECS, ROWS, Trainer, pids, remove_arrays, restored, started, wait_until

import deltackpt
from deltackpt import service
from deltackpt.errors import OptionError, ServiceMismatch, ServiceUnavailable, TooLittleMemory
from deltackpt.reading import stored_saves
from deltackpt.restore import sources as restore_sources
from deltackpt.service import RestoreService, ServiceOptions, lifecycle, protocol, replica_reads
from deltackpt.service.actor import RestoreActor
from deltackpt.standby import shared_memory
from deltackpt.testing.states import assert_same
from deltackpt.testing.training_run import TrainingRun
from deltackpt.wal import KafkaWal

pytestmark = ray_nodes.IGNORED

P = jax.sharding.PartitionSpec


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes.nodes(3) as found:
        yield found


@pytest.fixture(autouse=True)
def stopped(cluster, standing) -> Iterator[None]:
    """Kills the services of a test, except the standing one."""
    yield
    for name in protocol.listed():
        if standing.key not in name:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=protocol.NAMESPACE), no_restart=True)


class Standing:
    """A service of a directory whose arrays are gone from disk."""

    def __init__(self, path: Path):
        self.root, self.whole = path / "root", path / "whole"
        with Trainer(self.root) as trainer:
            for _ in range(3):
                trainer.save()
        self.state = trainer.state
        shutil.copytree(self.root, self.whole)
        self.service = started(self.root)
        self.key = protocol.key(self.root, "embeddings")
        remove_arrays(self.root)

    def renew(self, gone: str) -> None:
        """Lets replicas of a lost node reload their rows on other nodes."""
        shutil.copytree(self.whole, self.root, dirs_exist_ok=True)
        wait_until(lambda: elsewhere(self.service, gone), "its replicas come back on others")
        self.service.wait_ready(3, HANG_SECS)
        remove_arrays(self.root)


def elsewhere(found: RestoreService, node: str) -> bool:
    # Processes may briefly outlive their node and still answer.
    told = [one.found for one in found.status().replicas]
    return all(one is not None and one.node != node for one in told)


@pytest.fixture(scope="module")
def standing(cluster, tmp_path_factory) -> Standing:
    return Standing(tmp_path_factory.mktemp("standing"))


def template(state: dict, mesh: tuple[int, int], spec: P, narrow: P, first: int = 0) -> dict:
    devices = np.array(jax.devices()[first : first + mesh[0] * mesh[1]]).reshape(mesh)
    mesh = jax.sharding.Mesh(devices, ("x", "y"))

    def leaf(path, leaf):
        kind = path[0].key
        spec_ = {"tables": spec, "wide": spec, "narrow": narrow}.get(kind, P())
        sharding = jax.sharding.NamedSharding(mesh, spec_)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map_with_path(leaf, state)


def assert_from_service(found: Any, state: dict) -> None:
    assert found.service_error is None
    assert ({*found.source}, found.skipped) == ({"service"}, ())
    assert_same(found.state, state)


def assert_from_storage(found: Any, state: dict, problem: type[Exception] | None) -> None:
    assert ({*found.source}, found.skipped) == ({"directory"}, ())
    assert type(found.service_error) is (problem or type(None)), found.service_error
    assert_same(found.state, state)


def saved_run(directory: Path, **arguments: Any) -> Trainer:
    """A closed trainer that saved one step."""
    with Trainer(directory / "root", **arguments) as trainer:
        trainer.save()
    return trainer


@contextlib.contextmanager
def served(directory: Path, **options: Any) -> Iterator[tuple[Trainer, RestoreService]]:
    """An open trainer that saved one step, and a service of its directory."""
    with Trainer(directory / "root") as trainer:
        trainer.save()
        yield trainer, started(trainer.root, **options)


def served_from_memory(directory: Path, **options: Any) -> tuple[Trainer, RestoreService]:
    """A closed trainer, and the service that alone has its arrays; ``whole`` is a copy."""
    trainer = saved_run(directory)
    shutil.copytree(trainer.root, directory / "whole")
    found = started(trainer.root, **options)
    remove_arrays(trainer.root)
    return trainer, found


def assert_served(trainer: Trainer, **options: Any) -> None:
    """The service restores what its trainer saved last."""
    assert_from_service(restored(trainer.root, trainer.state, **options), trainer.state)


def remove_all_but_manifests(step: Path) -> None:
    for path in step.rglob("*"):
        if path.is_file() and not path.name.startswith("manifest."):
            path.unlink()


@contextlib.contextmanager
def on_another_machine(every: int = 1) -> Iterator[list]:
    """Makes every n-th replica appear to be on another machine."""
    count = iter(range(1 << 30))
    fetched = []
    real, fetch = shared_memory.machine, replica_reads._Read._fetch

    def machine():
        return "elsewhere" if next(count) % every == 0 else real()

    def counted(self, pin, pieces, *, files=False):
        if not files:
            fetched.append(pin)
        return fetch(self, pin, pieces, files=files)

    with (
        mock.patch.object(shared_memory, "machine", machine),
        mock.patch.object(replica_reads._Read, "_fetch", counted),
        mock.patch.object(replica_reads, "_PIECE_BYTES", 1000),
    ):
        yield fetched


# Sources of tables.


def test_tables_come_from_memory_if_storage_cannot_be_read(standing):
    found = restored(standing.root, standing.state)
    assert_from_service(found, standing.state)
    again = restored(standing.whole, standing.state)
    assert_from_storage(again, standing.state, None)
    assert (found.step, found.chain) == (again.step, again.chain) == (3, (1, 2, 3))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(standing.state))
    assert found.bytes_read == size - standing.state["bias"].nbytes
    with pytest.raises(deltackpt.errors.NoIntactStep):
        restored(standing.root, standing.state, service=None)


@pytest.mark.parametrize("machine", ["here", "another", "mixed"])
@pytest.mark.parametrize(
    "mesh,spec,narrow",
    [
        ((8, 1), P("x"), P("x")),
        ((2, 4), P(None, "y"), P()),
        ((4, 2), P("x", "y"), P("x")),
        ((2, 2), P(), P("y")),
    ],
    ids=["rows", "columns", "both", "whole"],
)
def test_any_topology_is_filled_from_memory(standing, machine, mesh, spec, narrow):
    wanted = template(standing.state, mesh, spec, narrow, 8 - mesh[0] * mesh[1])
    with contextlib.ExitStack() as stack:
        fetched = []
        if machine != "here":
            fetched = stack.enter_context(on_another_machine(1 if machine == "another" else 2))
        found = restored(standing.root, wanted)
        assert len(fetched) == {"here": 0, "another": 3, "mixed": len(fetched)}[machine]
    assert_from_service(found, standing.state)
    for leaf, other in zip(jax.tree.leaves(found.state), jax.tree.leaves(wanted)):
        assert leaf.sharding == other.sharding


@pytest.mark.parametrize("machine", ["here", "another", "mixed"])
def test_a_recovery_point_comes_completely_from_memory(cluster, tmp_path, machine):
    """Dense leaves, items and replayed row indices come with it: no WAL record is read."""
    root = tmp_path / "root"
    with Trainer(root, wal=deltackpt.WalOptions()) as trainer:
        trainer.save()
        standing = started(root)
        for _ in range(3):
            trainer.step += 1
            trainer.train()
            trainer.manager.append(
                trainer.step, trainer.state, touched=trainer.marks, items={"at": trainer.step}
            )
        trainer.manager.wait_appended()
    wait_until(lambda: held_points(standing) == {4}, "the replicas apply the marks")
    assert standing.status(HANG_SECS).step == 1
    wanted = template(trainer.state, (4, 2), P("x", "y"), P("x"))
    with contextlib.ExitStack() as stack:
        if machine != "here":
            stack.enter_context(on_another_machine(1 if machine == "another" else 2))
        places = [
            (record.path, start)
            for record in records_in(root / "log/0/0")
            for row_group, array in record.layer._chunks
            for start, _ in record.chunks_of(row_group, array)
        ]
        for place in places:
            flip(*place)
        found = restored(root, wanted)
        for place in places:
            flip(*place)
    assert_from_service(found, trainer.state)
    assert (found.step, found.chain, found.items) == (4, (1,), {"at": 4})
    # The step below it is only in storage.
    with ray_nodes.reader(root) as manager:
        assert_from_storage(manager.restore(1, wanted), trainer.states[1], ServiceUnavailable)
    with Trainer(root, wal=deltackpt.WalOptions()) as trainer:
        assert trainer.step == 4
        trainer.save()
    standing.wait_ready(5, HANG_SECS)
    assert held_points(standing) == {None}
    assert_from_service(restored(root, wanted), trainer.state)


def held_points(standing: RestoreService) -> set[int | None]:
    """Returns the steps of the replicas' recovery points."""
    told = [one.found.point for one in standing.status().replicas if one.found is not None]
    return {None if point is None else point.step for point in told}


def test_arrays_in_one_replica_are_mapped_and_not_copied(cluster, tmp_path):
    # Eight device shards on four service shards: every box is in one replica.
    with served(tmp_path, shards=4) as (trainer, _):
        wanted = template(trainer.state, (8, 1), P("x"), P("x"))
        with mock.patch.object(replica_reads, "_put") as copied:
            found = restored(trainer.root, wanted)
        assert not copied.called
        assert_from_service(found, trainer.states[1])


def test_real_processes_are_filled_from_memory(cluster, tmp_path):
    """Each connects to the cluster, on a topology other than the saved one."""
    server, root, model = many.Server(), tmp_path / "root", many_worker.Model()
    try:
        with Job(server, tmp_path / "jobs", processes=2, model=model) as job:
            job.all("open", root=str(root))
            job.all("start", place={"mesh": [2, 2]})
            for step in (0, 1):
                job.all("train", to=step)
                job.all("save")
                job.all("wait")
            job.close()
        started(root, shards=2)
        remove_arrays(root)
        with Job(server, tmp_path / "jobs", processes=4, devices=1, model=model) as job:
            job.all("connect", address=cluster.address)
            job.all("open", root=str(root))
            place = {"mesh": [2, 2], "layout": "turned", "across": "y"}
            for answer in job.all("restore_latest", place=place, like=1):
                assert {*answer["source"]} == {"service"}, answer
                assert (answer["step"], answer["wrong"]) == (1, None)
            # They agree on the next save.
            job.all("train", to=2)
            assert job.one("save")["kind"] == "delta"
            job.all("wait")
            job.all("disconnect")
            job.close()
    finally:
        server.close()


def test_grown_tables_keep_the_rows_of_the_template(standing):
    grown = jax.tree.map(np.array, standing.state)
    for kind in ("tables", "wide", "narrow"):
        leaf = grown[kind]["d"]
        grown[kind]["d"] = np.concatenate([leaf, np.full((24, *leaf.shape[1:]), 5, leaf.dtype)])
    scratch = jax.tree.map(np.array, grown)
    for kind in ("tables", "wide", "narrow"):
        scratch[kind]["d"][:1000] = -1
    found = restored(standing.root, scratch)
    assert_from_service(found, grown)


# Other services, and versions.


def test_an_explicit_service_is_used_and_one_of_another_directory_rejected(standing, tmp_path):
    found = restored(standing.root, standing.state, service=service.connect(standing.root))
    assert_from_service(found, standing.state)
    found = restored(standing.whole, standing.state, service=standing.service)
    assert_from_storage(found, standing.state, ServiceMismatch)
    assert "another directory" in str(found.service_error)
    found = restored(standing.whole, standing.state, service=RestoreService(standing.whole))
    assert_from_storage(found, standing.state, ServiceUnavailable)
    with pytest.raises(ServiceUnavailable, match="found none; start one with"):
        service.connect(standing.whole)
    assert service.find(standing.whole) is None


def test_a_step_of_an_earlier_run_comes_from_storage_at_once(cluster, tmp_path):
    with Trainer(tmp_path / "root") as first:
        first.save()
    with Trainer(tmp_path / "root") as trainer:
        trainer.save()
    started(trainer.root)
    began = time.monotonic()
    with ray_nodes.reader(trainer.root) as manager:
        found = manager.restore(1, first.state)
    assert_from_storage(found, first.state, ServiceUnavailable)
    assert time.monotonic() - began < HANG_SECS / 2


def test_a_service_that_sees_another_run_under_the_same_path_is_rejected(cluster, tmp_path):
    """For example, a directory that the nodes do not share."""
    theirs = Path(cluster.head_node.get_temp_dir_path()) / "cwd" / "run"
    for place, seed in ((theirs, 1), (tmp_path / "run", 2)):
        with Trainer(place) as trainer:
            trainer.step = 10 * seed
            trainer.save()
    # The nodes have another working directory than this process.
    root = Path("/proc/self/cwd/run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        started(root, shards=1)
        found = restored(root, trainer.state, secs=5)
    assert_from_storage(found, trainer.state, ServiceMismatch)
    assert "of another run" in str(found.service_error)
    shutil.rmtree(theirs)


def test_a_replica_of_another_version_is_rejected(standing):
    with mock.patch.object(protocol, "PROTOCOL", protocol.PROTOCOL + 1):
        with ray_nodes.reader(standing.root) as manager, pytest.warns(UserWarning):
            with pytest.raises(deltackpt.errors.NoIntactStep):
                manager.restore_latest(standing.state)
        status = standing.service.status(HANG_SECS)
    assert all("ServiceMismatch" in one.problem for one in status.replicas)
    told = f"expected an answer of protocol {protocol.PROTOCOL + 1}"
    assert all(told in one.problem for one in status.replicas)
    assert_from_service(restored(standing.root, standing.state), standing.state)


def test_a_request_of_another_version_is_answered_so_that_the_reader_reports_the_version():
    other = protocol.packed(protocol.Description(directory="", node="", pid=1, health=""))
    answer = RestoreActor.pin(mock.Mock(), other, timeout_secs=0.0)
    with mock.patch.object(protocol, "PROTOCOL", protocol.PROTOCOL + 1):
        with pytest.raises(ServiceMismatch, match=f"found protocol {protocol.PROTOCOL - 1} of"):
            protocol.unpacked(answer, protocol.Pinned, "a replica")


def test_a_service_whose_methods_have_other_parameters_falls_back_to_storage(cluster, tmp_path):
    class Earlier:
        def pin(self, run: str, step: int, attempt: int, timeout_secs: float) -> bytes:
            raise AssertionError("Ray does not call it")

    trainer = saved_run(tmp_path)
    replica = protocol.Replica(protocol.key(trainer.root, "embeddings"), 0, 1, 0)
    ray.remote(Earlier).options(**lifecycle.detached(replica.name, protocol.node_id())).remote()
    found = restored(trainer.root, trainer.state)
    assert_from_storage(found, trainer.state, ServiceMismatch)
    [status] = service.connect(trainer.root).status(HANG_SECS).replicas
    for shown in (str(found.service_error), status.problem):
        assert "install one version of deltackpt everywhere" in shown


def test_too_little_memory_is_reported_and_storage_still_works(cluster, tmp_path):
    trainer = saved_run(tmp_path)
    found = service.start(trainer.root, options=ServiceOptions(memory_bytes=1 << 20, shards=2))
    with pytest.raises(TooLittleMemory, match="found 1,048,576; start the service with more"):
        found.wait_ready(timeout_secs=HANG_SECS)
    assert_from_storage(restored(trainer.root, trainer.state), trainer.state, ServiceUnavailable)
    assert all(one.found.nbytes == 0 for one in found.status(HANG_SECS).replicas if one.found)


# Processes without a service.

_STATE = """
import sys, warnings
from pathlib import Path
{before}
import numpy as np
import deltackpt
root = Path({root!r})
handlers = {{"embeddings": deltackpt.Tables(select="tables/*")}}
state = {{"tables": {{"t": np.arange(40, dtype=np.float32).reshape(10, 4)}}}}
with deltackpt.CheckpointManager(root, handlers=handlers) as manager:
    manager.save(1, state, touched=deltackpt.touched.init({{"tables/t": state["tables"]["t"]}}))
    manager.wait_until_finished()
    found = manager.restore_latest(state, service="auto")
    assert (found.source, found.service_error) == (("directory",), None), found.service_error
    assert np.array_equal(found.state["tables"]["t"], state["tables"]["t"])
import deltackpt.service as service
from deltackpt.errors import {error}
try:
    service.start(root)
except {error} as error:
    print(isinstance(error, ImportError), error)
"""


def run_alone(tmp_path: Path, before: str, error: str) -> str:
    code = _STATE.format(before=before, root=str(tmp_path / "root"), error=error)
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECS)
    assert done.returncode == 0, done.stderr
    return done.stdout


_QUIET = 'with warnings.catch_warnings():\n    warnings.simplefilter("ignore")\n    import ray'


@pytest.mark.parametrize(
    ("before", "error", "named"),
    [
        ('sys.modules["ray"] = None', "MissingExtra", "pip install 'deltackpt[ray]'"),
        (_QUIET, "ServiceUnavailable", "ray.init() was not called"),
    ],
    ids=["without ray", "not connected"],
)
def test_a_process_without_a_cluster_restores_from_storage(tmp_path, before, error, named):
    printed = run_alone(tmp_path, before, error)
    assert printed.startswith(str(error == "MissingExtra")) and named in printed


# Starting and stopping.


def test_start_is_idempotent_and_rejects_invalid_options(cluster, tmp_path):
    trainer = saved_run(tmp_path)
    found = started(trainer.root, shards=2)
    before = sorted(pids(found.status(HANG_SECS)))
    for options in (ServiceOptions(shards=2), ServiceOptions(), None):
        service.start(trainer.root, options=options)
        found.wait_ready(timeout_secs=HANG_SECS)
        assert sorted(pids(found.status(HANG_SECS))) == before
    with pytest.raises(ServiceMismatch, match=r"expected 3 shards, found replicas of \[2\]"):
        service.start(trainer.root, options=ServiceOptions(shards=3))
    with pytest.raises(OptionError, match="found 4 for 3 nodes"):
        service.start(tmp_path / "other", options=ServiceOptions(replicas=4))
    assert service.stop(trainer.root) == 2
    wait_until(lambda: service.find(trainer.root) is None, "its names go")
    for pid in before:
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "its processes end")
    assert service.stop(trainer.root) == 0
    assert_from_storage(restored(trainer.root, trainer.state), trainer.state, None)
    started(trainer.root, shards=3)
    assert_served(trainer)


def test_a_service_that_is_started_first_waits_for_the_first_step(cluster, tmp_path):
    found = service.start(tmp_path / "root", options=ServiceOptions(poll_secs=0.05))
    status = wait_until(
        lambda: (s := found.status()) and len(pids(s)) == 3 and s, "the replicas answer"
    )
    assert status.step is None and status.newest_step is None
    with pytest.raises(ServiceUnavailable, match="expected every replica to hold step None"):
        found.wait_ready(timeout_secs=0.1)
    with Trainer(tmp_path / "root") as trainer:
        trainer.save()
        found.wait_ready(1, HANG_SECS)
        assert_served(trainer)


@pytest.mark.filterwarnings("ignore:.*it has one replica")
def test_replicas_follow_records_in_kafka(cluster, tmp_path):
    (tmp_path / "brokers").mkdir()
    with KafkaCluster(tmp_path / "brokers") as brokers:
        backend = KafkaWal(brokers.topic("standby"), config=brokers.config)
        wal = deltackpt.WalOptions(backend=backend)
        run = TrainingRun(tmp_path / "root", options=deltackpt.ManagerOptions(wal=wal))
        with run.open() as manager:
            run.save_initial()
            found = started(run.root, wal=KafkaWal(config=brokers.config))
            for _ in range(3):
                run.append()
                manager.wait_appended()

            def have_the_point() -> bool:
                told = [one.found for one in found.status().replicas]
                points = [None if one is None else one.point for one in told]
                return all(point is not None and point.step == run.step for point in points)

            wait_until(have_the_point, "the replicas hold the newest point")
            restored = manager.restore_latest(run.state, service=found)
            assert (restored.service_error, restored.step) == (None, run.step)
            assert "service" in restored.source
            run.check(restored)
        assert service.stop(run.root) == 3


def test_status_describes_each_replica(standing):
    status = standing.service.status(HANG_SECS)
    assert (status.step, status.newest_step, status.compactor) == (3, 3, None)
    shards = [(one.replica.shard, one.replica.shards) for one in status.replicas]
    assert shards == [(0, 3), (1, 3), (2, 3)]
    assert len({one.found.node for one in status.replicas}) == 3
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(standing.state))
    held = sum(one.found.nbytes for one in status.replicas)
    assert size - 100 <= held < size + 64 * 3 * 12
    for one in status.replicas:
        assert one.problem == "" and one.found.code == "" and one.found.lag_secs >= 0
        assert one.found.version == deltackpt.__version__
        assert one.found.directory == str(standing.root)


class WithKernel(Trainer):
    """A trainer with a dense leaf of many blocks, of which a step changes few elements."""

    def train(self) -> None:
        """Trains a step that also changes the kernel."""
        kernel = np.array(self.state.get("kernel", np.zeros((20, 256), np.float32)))
        super().train()
        kernel.reshape(-1)[np.random.default_rng(self.step).integers(0, kernel.size, 5)] = self.step
        self.state["kernel"] = kernel


@pytest.mark.parametrize("dense", ["whole", "blocks"])
def test_a_trainer_that_leaves_bases_to_the_service_writes_one(cluster, tmp_path, dense):
    policy = deltackpt.policies.Consecutive(max_chain=100, max_restore_ratio=20)
    options = {"bases": "compacted", "max_to_keep": 2, "policy": policy}
    options["dense"] = deltackpt.Dense(deltas=dense)
    with WithKernel(tmp_path / "root", **options) as trainer:
        trainer.save()
        found = started(trainer.root, shards=2, compact_after=2)
        reasons = []

        def folded() -> bool:
            reasons.append(trainer.manager.next_save(trainer.state, touched=trainer.marks).kind)
            trainer.save()
            chain = restored(trainer.root, trainer.state, service=None).chain
            # Retention drops the steps that a compacted base replaces, the trainer's base included.
            return chain[0] > 3 and 1 not in trainer.manager.all_steps()

        wait_until(folded, "a base is compacted and replaces what it stands for")
        # Dense leaves are merged with the rows.
        assert [*(trainer.root / "compacted").glob("[0-9]*/embeddings/dense")]
        assert {*reasons} == {"delta"}
        for _ in range(3):
            trainer.save()
            found.wait_ready(trainer.step, HANG_SECS)
            assert_served(trainer)
            stored_ = restored(trainer.root, trainer.state, service=None)
            assert {*stored_.source} == {"directory"}
            assert_same(stored_.state, trainer.state)
        assert found.status().compactor is not None


# Faults.


def test_killed_actors_restart_and_are_the_source_again(cluster, tmp_path):
    with served(tmp_path, shards=2) as (trainer, found):
        for _ in range(3):
            before = pids(found.status(HANG_SECS))
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            # Any source is fine during the restart.
            trainer.save()
            assert_same(restored(trainer.root, trainer.state, secs=2).state, trainer.state)
            found.wait_ready(trainer.step, HANG_SECS)
            assert not {*pids(found.status(HANG_SECS))} & {*before}
            assert_served(trainer)


def test_another_replica_replaces_a_killed_actor(cluster, tmp_path):
    trainer, found = served_from_memory(tmp_path, shards=2, replicas=2)
    status = found.status(HANG_SECS)
    assert len({(one.replica.shard, one.found.node) for one in status.replicas}) == 4
    for replica in (0, 1):
        for one in status.replicas:
            if one.replica.index == replica:
                os.kill(one.found.pid, signal.SIGKILL)
        assert_served(trainer)
        shutil.copytree(tmp_path / "whole", trainer.root, dirs_exist_ok=True)
        found.wait_ready(timeout_secs=HANG_SECS)
        status = found.status(HANG_SECS)
        remove_arrays(trainer.root)


def test_replicas_of_a_killed_node_restart_elsewhere(cluster, standing, tmp_path):
    trainer, found = served_from_memory(tmp_path, replicas=2)
    [victim, *_] = cluster.worker_nodes
    gone = [one for one in found.status(HANG_SECS).replicas if one.found.node == victim.node_id]
    assert len(gone) == 2
    cluster.remove_node(victim, allow_graceful=False)
    try:
        assert_served(trainer)
        shutil.copytree(tmp_path / "whole", trainer.root, dirs_exist_ok=True)
        wait_until(lambda: elsewhere(found, victim.node_id), "its replicas come back on others")
        found.wait_ready(timeout_secs=HANG_SECS)
        assert_served(trainer)
    finally:
        ray_nodes.add_node(cluster)
        standing.renew(victim.node_id)


def test_the_service_outlives_the_driver_that_started_it(cluster, tmp_path):
    trainer = saved_run(tmp_path)
    code = (
        "import ray, deltackpt.service as service\n"
        f"ray.init(address={cluster.address!r}, log_to_driver=False)\n"
        f"service.start({str(trainer.root)!r}, options=service.ServiceOptions(shards=2))\n"
        "import os; os._exit(1)\n"
    )
    driver = subprocess.run([sys.executable, "-c", code], timeout=HANG_SECS, capture_output=True)
    assert driver.returncode == 1, driver.stderr.decode()
    service.connect(trainer.root).wait_ready(timeout_secs=HANG_SECS)
    remove_arrays(trainer.root)
    assert_served(trainer)


def test_replicas_that_do_not_answer_are_waited_for_until_the_timeout(cluster, tmp_path):
    with served(tmp_path, shards=2) as (trainer, found):
        stopped = pids(found.status(HANG_SECS))
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            trainer.save()
            asked = restored(trainer.root, trainer.state, secs=0.5)
            assert_from_storage(asked, trainer.state, ServiceUnavailable)
            assert "expected an answer within" in str(asked.service_error)
            status = found.status(0.2)
            assert len(status.replicas) == 2 and not pids(status)
            assert all("expected an answer within" in one.problem for one in status.replicas)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        found.wait_ready(2, HANG_SECS)
        assert sorted(pids(found.status(HANG_SECS))) == sorted(stopped)
        assert_served(trainer)


def test_one_of_two_replicas_that_does_not_answer_is_replaced_in_time(cluster, tmp_path):
    trainer, found = served_from_memory(tmp_path, shards=1, replicas=2)
    for one in found.status(HANG_SECS).replicas:
        os.kill(one.found.pid, signal.SIGSTOP)
        try:
            assert_served(trainer, secs=30)
        finally:
            os.kill(one.found.pid, signal.SIGCONT)
        wait_until(lambda: len(pids(found.status())) == 2, "both answer again")


def test_a_state_that_vanishes_while_it_is_read_comes_from_another_replica(cluster, tmp_path):
    """Nothing remains of the first replica's data."""
    trainer, replicas = served_from_memory(tmp_path, shards=1, replicas=2)
    check, lost = replica_reads._Pin.check, []

    def lose_first(pin):
        if not lost:
            lost.append(pin)
            raise ServiceUnavailable("it went on")
        check(pin)

    real = shared_memory.MemoryReader

    def opened_once(place):
        # The other replica is on another machine.
        if lost:
            raise OSError("elsewhere")
        view = real(place)
        # Its contents have changed.
        view._bytes = np.full_like(view._bytes, 99)
        return view

    with (
        mock.patch.object(replica_reads._Pin, "check", lose_first),
        mock.patch.object(replica_reads, "MemoryReader", opened_once),
    ):
        save = stored_saves.read_save(trainer.root / "1")
        with replicas.tables(save, timeout_secs=HANG_SECS) as found:
            for name in ROWS:
                fields = found.fields[f"tables/{name}"]
                for field, kind in (
                    ("values", "tables"),
                    ("slot.moment", "wide"),
                    ("slot.accumulator", "narrow"),
                ):
                    assert fields[field].tobytes() == trainer.state[kind][name].tobytes()
    assert lost


def test_training_donates_the_mapping_while_the_service_advances(cluster, tmp_path):
    """Pages that training writes become private; the replica copies its state, and only once."""
    with served(tmp_path, shards=1) as (trainer, replicas):
        [pid] = pids(replicas.status(HANG_SECS))
        first = trainer.states[1]
        found = restored(trainer.root, template(first, (1, 1), P(), P()))
        assert_from_service(found, first)
        tables = found.state["tables"]
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        mapped = [
            range(*(int(end, 16) for end in line[0].split("-")))
            for line in maps
            if any("memfd:deltackpt" in piece for piece in line)
        ]
        for leaf in jax.tree.leaves(tables):
            assert any(leaf.unsafe_buffer_pointer() in piece for piece in mapped)
        expected = jax.tree.map(np.array, tables)
        doubled = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 2, x), donate_argnums=0)
        for number in range(3):
            trainer.save(force_base=number == 1)
            replicas.wait_ready(trainer.step, HANG_SECS)
            tables = doubled(tables)
            expected = jax.tree.map(lambda leaf: leaf * 2, expected)
            assert_same(tables, expected)
            again = restored(trainer.root, template(first, (1, 1), P(), P()))
            assert_from_service(again, trainer.state)
        assert pids(replicas.status(HANG_SECS)) == [pid]


def test_the_whole_step_comes_from_memory(cluster, tmp_path):
    """Only manifests are read from storage: dense leaves and other items are removed there."""
    with Trainer(tmp_path / "root") as trainer:
        trainer.save(items={"progress": ocp.args.JsonSave({"epoch": 3})})
        started(trainer.root)
        remove_all_but_manifests(trainer.root / "1")
        items = {"progress": ocp.args.JsonRestore()}
        place = tmp_path / "memory"  # Only this test uses it.
        place.mkdir()
        for machine in (contextlib.nullcontext(), on_another_machine()):
            with machine, mock.patch.object(restore_sources, "_MEMORY", place):
                found = restored(trainer.root, trainer.state, items=items)
            assert_from_service(found, trainer.state)
            assert found.items == {"progress": {"epoch": 3}}
        assert not [*place.iterdir()]


def test_dense_leaves_in_blocks_come_from_memory(cluster, tmp_path):
    dense = deltackpt.Dense(deltas="blocks", codec={"weights": "ef4"}, max_error=None)
    with Trainer(tmp_path / "root", dense=dense) as trainer:
        rng = np.random.default_rng(0)

        def save() -> None:
            weights = jax.numpy.asarray(rng.normal(size=(300, 100)), np.float32)
            trainer.state = {**trainer.state, "weights": weights}
            trainer.save()

        save()
        replicas = started(trainer.root)
        for _ in range(2):
            save()
            wait_until(lambda: replicas.status().step == trainer.step, "it follows")
        expected = restored(trainer.root, trainer.state, service=None).state
        remove_all_but_manifests(trainer.root / "3")
        for machine in (contextlib.nullcontext(), on_another_machine()):
            with machine:
                found = restored(trainer.root, trainer.state)
            assert_from_service(found, expected)


def test_files_that_changed_in_memory_are_rejected(standing):
    """They are verified like files in storage."""
    real = replica_reads._Read._files_of

    def changed(self, pin):
        files = dict(real(self, pin))
        [name] = [name for name in files if name.startswith("dense/d/")]
        files[name] = files[name].copy()
        files[name][100] ^= 1
        return files

    with mock.patch.object(replica_reads._Read, "_files_of", changed):
        with pytest.warns(UserWarning), pytest.raises(deltackpt.errors.NoIntactStep):
            with ray_nodes.reader(standing.root) as manager:
                manager.restore_latest(standing.state)


@ray.remote(num_cpus=0)
class Filler:
    """Fills the object store of its node with objects that cannot be spilled."""

    def fill(self) -> int:
        self.held = []
        for _ in range(200):
            try:
                ref = ray.put(np.ones(4 << 20, np.uint8))
                self.held.append((ref, ray.get(ref, timeout=5)))
            except ray.exceptions.RayError:
                break
            if len(self.held) * (4 << 20) > 2 * ray_nodes.STORE_BYTES:
                break
        return len(self.held)


def test_restores_work_with_a_full_object_store(cluster, tmp_path):
    trainer = saved_run(tmp_path, rows={"a": 80_000})
    started(trainer.root)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    fillers = [Filler.options(scheduling_strategy=one).remote() for one in strategies]
    try:
        full = ray.get([filler.fill.remote() for filler in fillers], timeout=HANG_SECS)
        assert all(count * (4 << 20) > ray_nodes.STORE_BYTES / 2 for count in full), full
        with on_another_machine() as fetched:
            with mock.patch.object(replica_reads, "_PIECE_BYTES", 1 << 20):
                found = restored(trainer.root, trainer.state, secs=15)
        assert fetched
        assert_same(found.state, trainer.state)
        # Reads from local memory need no object store.
        assert_served(trainer)
    finally:
        for filler in fillers:
            ray.kill(filler)


# Concurrent with a trainer.


def test_a_reader_beside_a_trainer_sees_only_whole_steps(cluster, tmp_path):
    options = {"max_to_keep": 1, "policy": deltackpt.policies.Consecutive(max_chain=4)}
    with Trainer(tmp_path / "root", **options) as trainer:
        trainer.save()
        started(trainer.root, shards=2)
        stop, problems = threading.Event(), []

        def train():
            try:
                while not stop.is_set() and trainer.step < 1000:
                    trainer.save()
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=train)
        beside = ray_nodes.reader(trainer.root, 10)
        thread.start()
        sources: dict[str, int] = {}
        try:

            def enough():
                assert not problems, problems
                found = ray_nodes.newest(beside, trainer.states[1])
                assert_same(found.state, trainer.states[found.step])
                sources[found.source[0]] = sources.get(found.source[0], 0) + 1
                return sources.get("service", 0) >= 5 and sum(sources.values()) >= 15

            wait_until(enough, "restores come from the service")
        finally:
            stop.set()
            thread.join(HANG_SECS)
            beside.close()


# The driver.


@ray.remote(num_cpus=0)
def restore_there(root: str, rows: int) -> str:
    """Restores in a trainer process on the cluster."""
    found = restored(Path(root), ray_nodes.initial({"a": rows}))
    return json.dumps([found.source[0], float(np.asarray(found.state["tables"]["a"]).sum())])


def test_bytes_through_the_driver_do_not_grow_with_the_tables(cluster, tmp_path):
    from ray._private import serialization

    context = serialization.SerializationContext
    sizes: list[int] = []

    def serialize(self, value):
        found = real_serialize(self, value)
        sizes.append(found.total_bytes)
        return found

    def deserialize(self, objects, refs, more):
        sizes.extend(0 if one[0] is None else len(one[0]) for one in objects)
        return real_deserialize(self, objects, refs, more)

    real_serialize, real_deserialize = context.serialize, context.deserialize_objects
    through = []
    for rows in (2_000, 20_000, 200_000):
        trainer = saved_run(tmp_path / str(rows), rows={"a": rows})
        sizes.clear()
        with (
            mock.patch.object(context, "serialize", serialize),
            mock.patch.object(context, "deserialize_objects", deserialize),
        ):
            found = service.start(trainer.root, options=ServiceOptions(shards=2))
            started_bytes = sum(sizes)
            found.wait_ready(timeout_secs=HANG_SECS)
            sizes.clear()
            found.status()
            source, total = json.loads(ray.get(restore_there.remote(str(trainer.root), rows)))
            through.append(started_bytes + sum(sizes))
        assert source == "service"
        assert total == float(trainer.state["tables"]["a"].sum())
        assert sizes and max(sizes) < 10_000
        service.stop(trainer.root)
    assert max(through) - min(through) < 1000, through


def test_an_error_of_the_thread_that_renews_pins_is_raised_at_the_end(monkeypatch):
    renewed = threading.Event()

    def actor(_: object) -> None:
        if threading.current_thread().name == "deltackpt-renew":
            renewed.set()
            raise RuntimeError("broken")
        raise ServiceUnavailable("gone")

    monkeypatch.setattr(replica_reads.shared_memory, "PIN_SECS", 0.03)
    monkeypatch.setattr(replica_reads.protocol, "actor", actor)
    pin = replica_reads._Pin(protocol.Replica("key", 0, 1, 0), protocol.Pinned(pin=1), None)
    with (
        pytest.raises(ServiceUnavailable, match="found RuntimeError: broken") as raised,
        replica_reads._Pins() as pins,
    ):
        pins._pins.append(pin)
        assert renewed.wait(60)
    assert isinstance(raised.value.__cause__, RuntimeError)
