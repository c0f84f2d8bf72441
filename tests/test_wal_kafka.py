# SPDX-License-Identifier: Apache-2.0
"""The WAL in Kafka: real brokers on loopback, killed, cut off, truncated, and with TLS."""

from __future__ import annotations

import base64
import contextlib
import gc
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kafka_trainee
import many_wal_worker
import numpy as np
import pytest
import servers
import test_follower
from brokers import PASSWORD, USER, KafkaCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka_trainee import CHUNK_BYTES, Trainee
from left_running import kill_uploaders
from many import Job, Server, wait_until
from servers import Certificate

import deltackpt
from deltackpt import events
from deltackpt.errors import AppendFailed, FencedError, OptionError, StorageError, WaitTimeout
from deltackpt.format import wal_format
from deltackpt.format.wal_format import RecordChunk
from deltackpt.inspect import open as open_checkpoints
from deltackpt.interchange import export_orbax, export_parquet, export_safetensors
from deltackpt.layers.footer import EpochRef
from deltackpt.ledger.opening import open_steps
from deltackpt.maintenance.estimate import restore_plan
from deltackpt.maintenance.verify import verify_root
from deltackpt.reading.wal_index import WalReader
from deltackpt.reading.wal_topics import Partition, WalTopics
from deltackpt.standby.follower import Follower
from deltackpt.storage.kafka import Message, Offsets, Topic
from deltackpt.testing import states
from deltackpt.testing.training_run import TrainingRun
from deltackpt.wal import KafkaWal

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("kafka"),
    pytest.mark.filterwarnings("ignore:.*it has one replica"),
]
#: The command line of this environment.
_COMMAND = str(Path(sys.executable).with_name("deltackpt"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("kafka")) as found:
        yield found


@pytest.fixture
def topic(cluster, request) -> str:
    name = "".join(one if one.isalnum() else "-" for one in request.node.name)
    return cluster.topic(name[:200], 2)


def options(
    topic: str, config: Any, *, chunk_bytes: int = CHUNK_BYTES, **wal: Any
) -> deltackpt.ManagerOptions:
    backend = KafkaWal(topic, config=config, chunk_bytes=chunk_bytes)
    wal = {"deadline_secs": 60.0, **wal}
    return deltackpt.ManagerOptions(wal=deltackpt.WalOptions(backend=backend, **wal))


class KafkaRun(TrainingRun):
    """A run with its WAL in a topic."""

    def __init__(self, folder: Path, topic: str, config: Any, **wal: Any):
        super().__init__(folder / "run", options=options(topic, config, **wal))
        self.topic, self.config = topic, config

    def log(self, records: int = 1, **arguments: Any) -> int:
        """Appends durable records; returns the step of the last one."""
        for _ in range(records):
            self.append(**arguments)
        return self.manager.wait_appended().step

    def start(self, records: int) -> None:
        """Saves the first step and appends durable records."""
        self.save_initial()
        self.log(records)

    def started(self, records: int) -> KafkaRun:
        """Starts with a manager of its own."""
        with self.open():
            self.start(records)
        return self

    @property
    def offsets(self) -> Offsets:
        """The first partition's."""
        return Topic(self.topic, self.config).offsets()[0]

    def assert_resumes(self, step: int, points: list[int] | None = None) -> None:
        with self.open() as manager:
            assert self.resume().step == step
            if points is not None:
                assert [one.step for one in manager.recovery_points()] == points

    def assert_restores_only_the_save(self, warning: str) -> None:
        with self.open() as manager, pytest.warns(UserWarning, match=warning):
            found = manager.restore_latest(self.state)
            assert found is not None and found.step == 0
            self.check(found)


@pytest.fixture
def run(cluster, topic, tmp_path) -> KafkaRun:
    return KafkaRun(tmp_path, topic, cluster.config)


# Round trips.


def test_every_recovery_point_restores_bit_for_bit(run):
    run.started(7)
    assert not [*(run.root / "log").rglob("*.seg")]
    with run.open() as manager:
        assert run.resume().step == 7
        for point in manager.recovery_points():
            run.check(manager.restore(point, run.state))
        run.resume()
        run.log(2)
    run.assert_resumes(9, [*range(9, 0, -1)])


def test_records_of_a_local_wal_are_continued_in_kafka_and_back(run):
    local = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())
    with run.open(local):
        run.start(3)
    with run.open():
        assert run.resume().step == 3
        run.log()
    run.assert_resumes(4)
    with run.open(local) as manager, pytest.raises(OptionError, match=f"topic '{run.topic}'"):
        manager.restore_latest(run.state)


@pytest.mark.parametrize("dense", ["delta", "soft"])
def test_dense_leaves_of_each_kind_return(cluster, topic, tmp_path, dense):
    run = KafkaRun(tmp_path, topic, cluster.config, dense=dense)
    with run.open():
        run.save_initial()
        run.log(5, full=True)
    run.assert_resumes(5)


@pytest.mark.parametrize("where", ["kafka", "directory"])
def test_processes_with_their_own_staging_directories_share_a_wal(cluster, tmp_path, where):
    """Of the staging directories, one is lost; the next job has another number of processes."""
    log: dict[str, Any] = {"directory": str(tmp_path / "log")}
    if where == "kafka":
        topic = cluster.topic("own-stages", 4)
        log = {"kafka": {"topic": topic, "config": cluster.config, "chunk_bytes": CHUNK_BYTES}}
    (tmp_path / "s3").mkdir()

    def opened(job: Job, url: str, endpoint: str) -> None:
        for number, process in enumerate(job.processes):
            stage = str(tmp_path / f"node{number}")
            tiers = {"staging_dir": stage, "endpoint": endpoint, "shared": False}
            process.ask("open", root=url, log=log, tiers=tiers)
        for answer in job.answers():
            assert "error" not in answer, answer

    def logged(job: Job, to: int) -> None:
        assert job.one("run_on", to=to)["saved"] == []
        for answer in job.all("wait_recovery", step=to):
            assert answer["recovery"] == [to, True]

    with servers.s3(tmp_path / "s3") as bucket, servers.environment_of(bucket):
        url, server = (
            bucket.bucket("own-stages") + "/run",
            Server(many_wal_worker.__file__, **bucket.environment),
        )
        try:
            with Job(server, tmp_path / "jobs", processes=2) as job:
                opened(job, url, bucket.endpoint)
                job.all("start", place={"mesh": [2, 2]})
                assert job.one("log")["saved"] == "base"
                job.all("wait")
                logged(job, 4)
                # A restore begins another epoch.
                for found in job.all("restore", step=3, place={"mesh": [2, 2]}, like=3):
                    assert (found["step"], found["wrong"]) == (3, None)
                logged(job, 6)
                steps = open_steps(url, endpoint=bucket.endpoint)
                wait_until(lambda: len(steps.wal_location.numbers()) == 2, "its header is uploaded")
                if where == "kafka":  # Each process writes a partition of its own.
                    ends = Topic(topic, cluster.config).offsets()
                    assert [bool(ends[one].stop) for one in range(4)] == [True, True, False, False]
                for process in job.processes:
                    process.kill()
            for number in range(2):
                kill_uploaders(tmp_path / f"node{number}" / f"process-{number}")
            shutil.rmtree(tmp_path / "node0")
            with Job(server, tmp_path / "jobs", processes=4, devices=1) as job:
                opened(job, url, bucket.endpoint)
                for found in job.all("restore_latest", place={"mesh": [2, 2]}, like=6):
                    assert (found["step"], found["point"], found["wrong"]) == (6, 6, None), found
                logged(job, 8)
                job.all("train", to=9)
                assert job.one("save")["kind"] == "delta"
                job.all("wait")
                job.close()
        finally:
            server.close()
            for number in range(4):
                kill_uploaders(tmp_path / f"node{number}" / f"process-{number}")


def test_trimming_deletes_the_records_that_no_restore_needs(run):
    starts = []
    with run.open():
        run.start(3)
        for _ in range(3):
            run.save()
            run.log()
            starts.append(run.offsets.start)
    starts.append(run.offsets.start)
    assert starts[0] == 0 and starts[-1] > 0 and sorted(starts) == starts
    with run.open() as manager:
        assert run.resume().step == run.step
        assert min(one.step for one in manager.recovery_points()) > 3
        # Earlier epochs go with the first two steps of a later one.
        below = run.offsets.stop
        for _ in range(3):
            run.save()
            run.log()
    assert run.offsets.start >= below
    run.assert_resumes(run.step)


# Failures of brokers.


def test_a_broker_that_is_killed_and_restarted_loses_no_record(cluster, run):
    [broker] = cluster.brokers
    with run.open():
        run.start(3)
        for _ in range(5):
            run.append()
        broker.kill()
        for _ in range(5):
            run.append()
        broker.start()
        assert run.manager.wait_appended().step == 13
    run.assert_resumes(13)


def test_an_outage_beyond_the_deadline_is_reported_and_the_next_record_has_its_rows(
    cluster, topic, tmp_path
):
    run, [broker] = KafkaRun(tmp_path, topic, cluster.config, deadline_secs=10.0), cluster.brokers
    with run.open() as manager:
        run.start(3)
        broker.kill()
        try:
            run.append()
            with pytest.raises(AppendFailed, match="append of step 4"):
                manager.wait_appended(60)
            assert run.save().kind == "delta"
        finally:
            broker.start()
            cluster.wait()
        run.append()
        assert manager.wait_appended(60).step == 6
    run.assert_resumes(6)


# Killed and fenced producers.


@pytest.fixture
def trainee(run) -> Iterator[Trainee]:
    """A process that trains ``run``."""
    found = Trainee(run.root, run.topic, run.config)
    yield found
    found.kill()


def test_a_producer_killed_in_an_append_loses_no_acknowledged_record(run, trainee):
    trainee.read_until("acknowledged", 6)
    time.sleep(0.05)
    trainee.kill()
    with run.open() as manager:
        found = manager.restore_latest(run.state)
        assert found is not None and found.step >= trainee.acknowledged
        states.assert_same(found.state, kafka_trainee.state_at(found.step))


def test_records_that_a_fenced_zombie_writes_are_void(run, request):
    trainee = Trainee(run.root, run.topic, run.config, stop_at=4)
    request.addfinalizer(trainee.kill)
    os.waitpid(trainee.process.pid, os.WUNTRACED)
    with run.open() as manager:
        found = manager.restore_latest(run.state)
        assert found is not None
        point = found.step
        run.states[point] = kafka_trainee.state_at(point)
        run.continue_from(found)
        # Another state than the zombie's, at the same step.
        run._move = lambda state, seen, step: states.train(state, seen, 1000 + step)
        run.log()
        before = run.offsets.stop
        trainee.process.send_signal(signal.SIGCONT)
        assert trainee.read_until("error") == FencedError.code
        assert run.offsets.stop > before
        run.log()
    with run.open() as manager:
        assert run.resume().step == point + 2
        newest = [one.step for one in manager.recovery_points()][:3]
        assert newest == [point + 2, point + 1, point]


# Records that are gone, repeated, or hostile.


def test_records_that_retention_removed_are_named_and_the_newest_step_is_restored(cluster, run):
    run.started(4)
    cluster.alter(run.topic, retention_ms="1")
    deadline = time.monotonic() + 120
    while (offsets := run.offsets).start < offsets.stop:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    cluster.alter(run.topic, retention_ms="-1")
    run.assert_restores_only_the_save("step 4, which was durable")


def test_a_gap_ends_at_the_newest_step_below_and_is_named(run):
    with run.open():
        run.start(4)
        middle = run.offsets.stop
        run.log(4)
    # Within the record after it.
    Topic(run.topic, run.config).truncate({0: middle + 1})
    run.assert_restores_only_the_save("records 1 to 5")


def test_records_deleted_under_a_reader_are_skipped(run):
    run.started(30)
    read, span = Topic(run.topic, run.config), run.offsets
    # As if they were deleted after it was asked where the partition begins.
    read.truncate({0: span.stop - 10})
    assert [one.offset for one in read.read({0: span})] == [*range(span.stop - 10, span.stop)]


def recreate_topic(cluster: KafkaCluster, topic: str) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient(cluster.config)
    admin.delete_topics([topic])[topic].result(60)
    deadline = time.monotonic() + 60
    while topic in admin.list_topics(timeout=60).topics:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster.topic(topic, 2)


def test_a_recreated_topic_is_noticed(cluster, run):
    run.started(4)
    recreate_topic(cluster, run.topic)
    run.assert_restores_only_the_save("step 4, which was durable")


@pytest.mark.parametrize("on_failure", ["save", "raise"])
def test_records_in_a_topic_that_was_recreated_during_a_run_are_not_acknowledged(
    cluster, topic, tmp_path, on_failure
):
    run = KafkaRun(tmp_path, topic, cluster.config, on_failure=on_failure)
    with run.open(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.start(2)
        recreate_topic(cluster, run.topic)
        saved = None
        while saved is None:
            with contextlib.suppress(AppendFailed):
                saved = run.append().saved
            if saved is None:
                with pytest.raises(AppendFailed):  # However many messages the new topic has.
                    run.manager.wait_appended()
        run.manager.wait_until_finished()
        step = run.log(2)  # In a new epoch of the same manager.
    assert step == saved.step + 2
    run.assert_resumes(step)


def test_repeated_and_foreign_messages_change_nothing(run):
    with run.open():
        run.start(3)
        read = Topic(run.topic, run.config)
        stored = [one.data for one in read.read({0: run.offsets})]
        producer = read.producer(0, message_bytes=CHUNK_BYTES, timeout_secs=30)
        for data in (*stored, *reversed(stored), b"x", b"", stored[0][:-1], stored[-1][1:]):
            producer.send(data)
        producer.flush()
        run.log()
    run.assert_resumes(4, [4, 3, 2, 1])


def test_a_follower_reads_only_what_is_new(cluster, run, monkeypatch):
    steps_read, counts, real = [], [], Topic.read

    def counted(topic: Topic, spans: dict[int, Offsets], **how: Any):
        counts.append(sum(span.stop - span.start for span in spans.values()))
        return real(topic, spans, **how)

    with run.open():
        run.start(3)
        follower = open_steps(run.root)
        follower.topics = WalTopics(cluster.config, follow=True)
        logs = WalReader(follower.wal_location)
        monkeypatch.setattr(Topic, "read", counted)
        for _ in range(3):
            steps_read.append(logs.read().points()[0].step)
            run.log()
        monkeypatch.undo()
        follower.topics.close()
    assert steps_read == [3, 4, 5]
    assert counts[0] >= 3 * counts[1] > 0 and counts[1] == counts[2]


def test_a_recovery_point_is_read_after_its_checkpoints_object_is_gone(cluster, run):
    run.started(2)
    step = open_checkpoints(run.root, wal=KafkaWal(config=cluster.config)).at(2)
    gc.collect()
    assert (np.asarray(step.tables["tables/users"][:]) == run.state["tables"]["users"]).all()


def librdkafka_threads() -> set[str]:
    """The threads of all connections of this process."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # It has ended.
            if Path(f"/proc/self/task/{thread}/comm").read_text().startswith("rdk:"):
                found.add(thread)
    return found


def test_verify_plan_inspect_and_exports_close_their_connections(cluster, run, tmp_path):
    run.started(2)
    gc.collect()
    before, wal = librdkafka_threads(), KafkaWal(config=cluster.config)
    assert {one.point.step for one in verify_root(run.root, wal=wal).points} == {1, 2}
    assert restore_plan(run.root, 2, wal=wal).wal_records == 2
    with open_checkpoints(run.root, wal=wal) as checkpoints:
        assert checkpoints.at(2).point is not None
        assert not librdkafka_threads() <= before
    for export in (export_safetensors, export_parquet, export_orbax):
        assert export(run.root, 2, tmp_path / export.__name__, wal=wal).step == 2
    assert librdkafka_threads() <= before


def test_a_standby_follows_the_records_and_the_next_run(cluster, run, tmp_path, monkeypatch):
    wal = KafkaWal(config=lambda: cluster.config)
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    with contextlib.ExitStack() as managers:
        managers.enter_context(run.open())
        run.start(2)
        followers = [
            Follower(run.root, item="embeddings", shard=shard, shards=2, wal=wal, soft=False)
            for shard in range(2)
        ]
        for moves in (run.log, run.save, run.log, None, run.log, run.save, run.save, run.log):
            if moves is None:
                managers.close()
                managers.enter_context(run.open())
                run.resume()
            else:
                moves()
            run.manager.recovery_points()  # Waits until trimming has ended.
            for one in followers:
                one.advance()
                assert one.health == "follows"
                held = one.loaded
                assert (held.save.save_id if held.point is None else held.point).step == run.step
                test_follower.assert_rows(one, test_follower.in_state(run.state))
    # Each follower has removed its copy of the epoch that the trainer has removed.
    assert len([*copies.glob("deltackpt-*/*")]) == len(followers)


_EPOCH = EpochRef(number=3, crc32c=77)


@st.composite
def _messages(draw) -> list[bytes]:
    """Messages of one record of four chunks and of others, in any order, some altered."""
    chunk = st.builds(
        lambda part, epoch, crc, seq, index, count, data: RecordChunk(
            part, epoch, crc, seq, index, count, memoryview(data)
        ).to_bytes(),
        st.integers(0, 3) | st.integers(0, (1 << 32) - 1),
        st.just(3) | st.integers(0, 9),
        st.just(77) | st.integers(0, 99),
        st.integers(1, 6) | st.integers(0, (1 << 64) - 1),
        st.integers(0, 4) | st.integers(0, (1 << 32) - 1),
        st.integers(1, 4) | st.integers(0, (1 << 32) - 1),
        st.binary(min_size=1, max_size=40),
    )
    altered = st.tuples(chunk, st.integers(0, 79), st.integers(0, 255)).map(
        lambda one: one[0][: one[1]] + bytes([one[2]]) + one[0][one[1] + 1 :]
    )
    return draw(st.lists(chunk | altered | st.binary(max_size=60), max_size=30))


def messages_of(records: list[bytes], *, part: int, chunk_bytes: int) -> list[bytes]:
    """The messages of whole records, the first with sequence number 1."""
    return [
        chunk.to_bytes()
        for seq, record in enumerate(records, 1)
        for chunk in wal_format.record_chunks(
            memoryview(record),
            part=part,
            epoch=_EPOCH.number,
            epoch_crc32c=_EPOCH.crc32c,
            seq=seq,
            message_bytes=wal_format.HEAD_BYTES + chunk_bytes,
        )
    ]


def add_all(partition: Partition, messages: list[bytes], start: int = 0) -> None:
    for offset, data in enumerate(messages, start):
        partition.add(Message(0, offset, data))


@settings(max_examples=150, deadline=None)
@given(hostile=_messages(), split=st.integers(1, 40))
def test_hostile_messages_never_change_what_was_written(tmp_path_factory, hostile, split):
    """Records that were written return whole and in order, whatever else is in the partition."""
    records = [bytes([seq]) * 100 for seq in range(1, 5)]
    pairs = itertools.zip_longest(messages_of(records, part=5, chunk_bytes=split), hostile)
    folder = tmp_path_factory.mktemp("copies")
    messages = [data for pair in pairs for data in pair if data is not None]
    add_all(Partition(folder, _EPOCH, 0), messages)
    assert (folder / "00005-00000000000000000001.seg").read_bytes() == b"".join(records)


@pytest.mark.parametrize(("read", "first"), [(8, 3), (9, 4)])
def test_a_copy_continues_in_a_new_file_after_its_messages_were_trimmed(tmp_path, read, first):
    """Whether the messages end with a record, or within one."""
    records = [bytes([seq]) * 100 for seq in range(1, 6)]
    messages = messages_of(records, part=0, chunk_bytes=25)
    partition = Partition(tmp_path, _EPOCH, 0)
    add_all(partition, messages[:read])
    partition.trim(read)
    assert not [*tmp_path.iterdir()]
    add_all(partition, messages[read:], read)
    [file] = tmp_path.iterdir()
    assert file.name == f"00000-{first:020}.seg"
    assert file.read_bytes() == b"".join(records[first - 1 :])


# What opening checks.


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ({"retention.ms": "1000"}, "retention.ms=-1"),
        ({"cleanup.policy": "compact"}, "cleanup.policy=delete"),
        ({"max.message.bytes": "2000"}, "max.message.bytes"),
        ({"unclean.leader.election.enable": "true"}, "unclean.leader.election"),
    ],
)
def test_a_topic_that_would_lose_records_is_refused(cluster, tmp_path, wrong, expected):
    topic = cluster.topic("wrong-" + next(iter(wrong)), config=wrong)
    with pytest.raises(OptionError, match=expected):
        KafkaRun(tmp_path, topic, cluster.config).open()


def test_a_topic_that_does_not_exist_or_belongs_to_another_directory_is_refused(run, tmp_path):
    with pytest.raises(OptionError, match="no such topic"):
        KafkaRun(tmp_path, "nowhere", run.config).open()
    run.started(1)
    with pytest.raises(OptionError, match="use a topic of its own"):
        KafkaRun(tmp_path / "other", run.topic, run.config).open()


def test_brokers_that_do_not_answer_are_reported_before_training(tmp_path):
    with pytest.raises(StorageError, match="expected an answer within 1.5 s"):
        KafkaRun(tmp_path, "any", {"bootstrap.servers": "127.0.0.1:9"}, deadline_secs=1.5).open()


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"acks": "1"}, "acks"),
        ({"enable.idempotence": False}, "enable.idempotence"),
        ({"partitioner": "random"}, "partitioner"),
        ({"max.in.flight": 6}, "max.in.flight"),
        ({"transactional.id": "a"}, "transactional.id"),
        ({"error_cb": print}, "error_cb"),
    ],
)
def test_settings_that_break_promises_are_refused(config, expected):
    with pytest.raises(OptionError, match=expected):
        KafkaWal("any", config=config)


def test_an_unknown_setting_is_refused_when_the_manager_opens(tmp_path):
    config = {"bootstrap.servers": "127.0.0.1:9", "no.such.setting": "1"}
    with pytest.raises(OptionError, match="no.such.setting"):
        KafkaRun(tmp_path, "any", config).open()


WITHOUT_KAFKA = """
import sys; sys.modules['confluent_kafka'] = None
import deltackpt; from deltackpt.wal import KafkaWal; from deltackpt.errors import MissingExtra
options = deltackpt.ManagerOptions(wal=deltackpt.WalOptions(backend=KafkaWal('t', config={})))
tables = {'e': deltackpt.Tables(select='t/*')}
try: deltackpt.CheckpointManager(sys.argv[1], options=options, handlers=tables)
except MissingExtra as error: print(error)
"""


def test_without_the_extra_a_typed_error_names_it(tmp_path):
    assert "pip install 'deltackpt[kafka]'" in output(sys.executable, "-c", WITHOUT_KAFKA, tmp_path)


def output(*command: object, check: bool = True) -> str:
    found = subprocess.run([*map(str, command)], capture_output=True, text=True, check=check)
    return found.stdout + found.stderr


def test_readers_without_the_configuration_name_the_topic(run):
    run.started(3)
    with run.open(deltackpt.ManagerOptions()) as manager:
        with pytest.raises(OptionError, match="KafkaWal"):
            manager.restore_latest(run.state)
        found = manager.restore_latest(run.state, wal=False)
        assert found is not None and found.step == 0
    for command in ("verify", "doctor"):
        found = output(_COMMAND, command, run.root, check=False)
        assert f"topic '{run.topic}'" in found and "pass --kafka-config FILE" in found
    for command in (["ls"], ["gc", "--dry-run"]):
        output(_COMMAND, *command, run.root)
    assert f"topic '{run.topic}'" in open_checkpoints(run.root).wal.epochs[0].problem


# Security.


@pytest.fixture(scope="module")
def secure(tmp_path_factory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("secure"), secure=True) as found:
        found.topic("secret")
        yield found


def assert_refused(folder: Path, config: Any, match: str, secret: str) -> None:
    with pytest.raises(StorageError, match=match) as caught:
        KafkaRun(folder, "secret", config, deadline_secs=60).open()
    assert secret not in f"{caught.value!r}{caught.value}"


def test_a_wrong_password_is_a_typed_error_before_training(secure, tmp_path):
    config = {**secure.config, "sasl.password": "wr0ng-pa55word"}
    assert_refused(tmp_path, config, "(?i)authentication", "wr0ng")


def test_a_wrong_authority_is_a_typed_error_before_training(secure, tmp_path):
    config = {**secure.config, "ssl.ca.location": str(Certificate.made(tmp_path).authority)}
    assert_refused(tmp_path, config, "(?i)certificate", PASSWORD)


def token(secs: float) -> tuple[str, float]:
    """Returns an unsigned token for a user that is valid for some seconds, and when it ends."""
    ends = time.time() + secs
    claims = {"sub": USER, "iat": time.time() - 10, "exp": ends}
    parts = (json.dumps(part).encode() for part in ({"alg": "none"}, claims))
    encoded = [base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, ""]), ends


def oauth(secure: KafkaCluster, callback: Any) -> dict[str, Any]:
    config = {key: value for key, value in secure.config.items() if "sasl" not in key}
    return {**config, "sasl.mechanism": "OAUTHBEARER", "oauth_cb": callback}


def test_oauth_tokens_are_renewed_while_records_are_written(secure, tmp_path):
    given = []

    def callback(_: str) -> tuple[str, float]:
        given.append(token(5.0))
        return given[-1]

    run = KafkaRun(tmp_path, secure.topic("oauth"), oauth(secure, callback))
    with run.open():
        run.start(3)
        first = len(given)
        while len(given) < first + 3:
            run.log()
            time.sleep(0.1)
    run.assert_resumes(run.step)
    for path in run.root.rglob("*"):
        assert not path.is_file() or given[0][0].encode() not in path.read_bytes()


def test_a_refused_token_is_a_typed_error_before_training(secure, tmp_path):
    expired = token(-60.0)[0]
    config = oauth(secure, lambda _: (expired, time.time() + 300))
    assert_refused(tmp_path, config, "(?i)authentication", expired)


@pytest.fixture(scope="module")
def settings_file(secure, tmp_path_factory) -> Path:
    """A file for ``--kafka-config``."""
    found = tmp_path_factory.mktemp("settings") / "kafka.properties"
    lines = [f"{name} = {value}" for name, value in secure.config.items()]
    found.write_text("\n".join(["# of the trainer", "", *lines]))
    return found


def test_the_command_line_reads_the_records(secure, settings_file, tmp_path):
    run = KafkaRun(tmp_path, secure.topic("commands"), secure.config).started(3)
    exported = tmp_path / "exported"

    def output_of(*command: object) -> str:
        name, *rest = command
        found = output(_COMMAND, name, *rest, "--kafka-config", settings_file)
        assert PASSWORD not in found
        return found

    points = json.loads(output_of("ls", run.root, "--wal", "--json"))["recovery_points"]
    assert [one["save_id"]["step"] for one in points] == [3, 2, 1]
    assert "recovery point 3" in output_of("show", run.root, 3)
    assert "tables/users" in output_of("diff", run.root, 0, 2)
    assert "full" in output_of("history", run.root, "tables/users", 0)
    assert "3 of 3 full recovery points can be restored" in output_of("verify", run.root)
    assert "up to recovery point 2" in output_of("plan", run.root, 2)
    assert "3 full recovery points, newest 3" in output_of("doctor", run.root)
    output_of("report", run.root, "-o", tmp_path / "report.html")
    for kind in ("safetensors", "parquet", "orbax"):
        assert "step 3" in output(
            _COMMAND, "export", kind, run.root, exported / kind, 3,
            "--kafka-config", settings_file,
        )  # fmt: skip
    from safetensors.numpy import load_file

    [file] = (exported / "safetensors").glob("*.safetensors")
    assert (load_file(file)["tables/users"] == np.asarray(run.state["tables"]["users"])).all()
    without = output(_COMMAND, "show", run.root, 3, check=False)
    assert "pass --kafka-config FILE" in without and "[option]" in without


def test_the_command_follow_serves_the_records(secure, settings_file, tmp_path):
    run = KafkaRun(tmp_path, secure.topic("follow"), secure.config)
    with run.open():
        run.start(2)
        command = [_COMMAND, "follow", str(run.root), "--tables", "**", "--json"]
        process = subprocess.Popen(
            [*command, "--kafka-config", str(settings_file)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            shown = "".join(itertools.takewhile(lambda line: line != "}\n", process.stdout))
            url = json.loads(shown + "}")["url"]
            for _ in range(2):
                wait_until(
                    lambda: f"deltackpt_serving_step {float(run.step)}" in page(url), "it is served"
                )
                run.log()
        finally:
            process.terminate()
            assert process.wait(120) == 0
            process.stdout.close()


def page(url: str) -> str:
    with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sasl.password", "name=value in line 1"),
        ("acks=0", "acks"),
        ("sasl.password=pa55\nnonsense pa55", "in line 2"),
        (None, "No such file"),
    ],
)
def test_a_file_that_has_no_settings_is_refused_without_its_contents(tmp_path, text, expected):
    path = tmp_path / "settings"
    if text is not None:
        path.write_text(text)
    found = output(_COMMAND, "ls", tmp_path, "--kafka-config", path, check=False)
    assert expected in found and "[option]" in found and "pa55" not in found


def test_secrets_are_in_no_file_log_event_or_error(secure, tmp_path, caplog):
    heard, asked = [], []

    class Heard:
        def receive(self, event: events.Event) -> None:
            heard.append(repr(event))

    def config() -> dict[str, Any]:
        asked.append(1)
        return {**secure.config, "debug": "security,broker"}

    run = KafkaRun(tmp_path, "secret", config)
    run._event_handlers = (Heard(),)
    with caplog.at_level(logging.DEBUG):
        run.started(3).assert_resumes(3)
    assert len(asked) > 2 and heard
    texts = [caplog.text, *heard, repr(run._options), str(run._options)]
    texts.append(repr(options("secret", secure.config)))
    for path in run.root.rglob("*"):
        if path.is_file():
            texts.append(path.read_bytes().decode("latin-1"))
    assert not [text[:200] for text in texts if PASSWORD in text]


# Three brokers.


@pytest.mark.filterwarnings("ignore:append of step")
def test_one_of_three_brokers_may_be_down_and_two_may_not(tmp_path):
    with KafkaCluster(tmp_path, 3) as three:
        run = KafkaRun(tmp_path, three.topic("three"), three.config, deadline_secs=240.0)
        with run.open() as manager:
            run.start(2)
            three.brokers[0].kill()
            assert run.log() == 3
            three.brokers[1].kill()
            run.append()
            with pytest.raises(WaitTimeout):
                manager.wait_appended(3)
            three.brokers[0].start()
            three.brokers[1].start()
            assert manager.wait_appended(120).step == 4
        run.assert_resumes(4)
