# SPDX-License-Identifier: Apache-2.0
"""The WAL in Kafka: real brokers on loopback, killed, cut off, truncated, and with TLS."""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kafka_trainee
import many_wal_worker
import numpy as np
import pytest
import servers
from brokers import PASSWORD, USER, KafkaCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka_trainee import CHUNK_BYTES, Trainee
from left_running import promoters
from many import Job, Server
from servers import Certificate

import deltackpt
from deltackpt import events, serving
from deltackpt.errors import AppendFailed, FencedError, OptionError, StorageError
from deltackpt.format import wal_format
from deltackpt.format.wal_format import RecordChunk
from deltackpt.inspect import open as open_checkpoints
from deltackpt.layers.footer import EpochRef
from deltackpt.ledger.opening import open_steps
from deltackpt.reading.wal_index import WalReader
from deltackpt.reading.wal_topics import Partition, WalTopics
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
    given = {"deadline_secs": 60.0, **wal}
    return deltackpt.ManagerOptions(wal=deltackpt.WalOptions(backend=backend, **given))


def new_run(folder: Path, topic: str, config: Any, **wal: Any) -> TrainingRun:
    return TrainingRun(folder / "run", options=options(topic, config, **wal))


def started(run: TrainingRun, records: int) -> None:
    """Saves the first step and appends durable records."""
    run.save_initial()
    for _ in range(records):
        run.append()
    run.manager.wait_appended()


# Round trips.


def test_every_recovery_point_restores_bit_for_bit(cluster, topic, tmp_path):
    run = new_run(tmp_path, topic, cluster.config)
    with run.open():
        started(run, 7)
    assert not [*(tmp_path / "run" / "log").rglob("*.seg")]
    with run.open() as manager:
        assert run.resume().step == 7
        for point in manager.recovery_points():
            run.check(manager.restore(point, run.state))
        run.resume()
        run.append()
        run.append()
        manager.wait_appended()
    with run.open() as manager:
        assert run.resume().step == 9
        assert {one.step for one in manager.recovery_points()} == {*range(1, 10)}


def test_a_restore_to_an_earlier_point_voids_later_records(cluster, topic, tmp_path):
    run = new_run(tmp_path, topic, cluster.config)
    with run.open() as manager:
        started(run, 6)
        run.continue_from(manager.restore(3, run.state))
        run.append()
        manager.wait_appended()
    with run.open() as manager:
        assert run.resume().step == 4
        assert [one.step for one in manager.recovery_points()] == [4, 3, 2, 1]


def test_records_of_a_local_wal_are_continued_in_kafka_and_back(cluster, topic, tmp_path):
    run = new_run(tmp_path, topic, cluster.config)
    local = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())
    with run.open(local):
        started(run, 3)
    with run.open() as manager:
        assert run.resume().step == 3
        run.append()
        manager.wait_appended()
    with run.open() as manager:
        assert run.resume().step == 4
    with run.open(local) as manager, pytest.raises(OptionError, match=f"topic '{topic}'"):
        manager.restore_latest(run.state)


@pytest.mark.parametrize("dense", ["delta", "soft"])
def test_dense_leaves_of_each_kind_return(cluster, topic, tmp_path, dense):
    run = new_run(tmp_path, topic, cluster.config, dense=dense)
    with run.open():
        run.save_initial()
        for _ in range(5):
            run.append(full=True)
        run.manager.wait_appended()
    with run.open():
        assert run.resume().step == 5


def test_records_survive_a_node_whose_checkpoints_are_in_a_bucket(cluster, topic, tmp_path):
    (tmp_path / "s3").mkdir()
    with servers.s3(tmp_path / "s3") as server, servers.environment_of(server):
        wal = options(topic, cluster.config).wal

        def staged(name: str) -> deltackpt.ManagerOptions:
            tiers = deltackpt.Tiers(staging_dir=tmp_path / name, endpoint=server.endpoint)
            return deltackpt.ManagerOptions(wal=wal, tiers=tiers)

        run = TrainingRun(f"{server.bucket('bucket')}/run", options=staged("lost"))
        with run.open():
            started(run, 4)
        end_uploaders(tmp_path / "lost")
        shutil.rmtree(tmp_path / "lost")
        with run.open(staged("other")) as manager:
            assert run.resume().step == 4
            run.append()
            manager.wait_appended()
        with run.open(staged("other")):
            assert run.resume().step == 5
        end_uploaders(tmp_path / "other")


def end_uploaders(staging_dir: Path) -> None:
    for process in promoters(staging_dir):
        os.kill(process, signal.SIGKILL)


def test_several_processes_write_a_partition_each(cluster, tmp_path):
    topic = cluster.topic("several", 4)
    server = Server(many_wal_worker.__file__)
    try:
        log = {"kafka": {"topic": topic, "config": cluster.config, "chunk_bytes": CHUNK_BYTES}}
        with Job(server, tmp_path / "jobs", processes=2) as job:
            job.all("open", root=str(tmp_path / "run"), log=log)
            job.all("start", place={"mesh": [2, 2]})
            assert job.one("log")["saved"] == "base"
            job.all("wait")
            job.one("run_on", to=6)
            job.all("wait_appended")
        ends = Topic(topic, cluster.config).offsets()
        assert [bool(ends[one].stop) for one in range(4)] == [True, True, False, False]
        with Job(server, tmp_path / "jobs", processes=4, devices=1) as job:
            job.all("open", root=str(tmp_path / "run"), log=log)
            for found in job.all("restore_latest", place={"mesh": [2, 2]}, like=6):
                assert (found["step"], found["point"], found["wrong"]) == (6, 6, None)
    finally:
        server.close()


def test_trimming_deletes_the_records_that_no_restore_needs(cluster, topic, tmp_path):
    run, read = new_run(tmp_path, topic, cluster.config), Topic(topic, cluster.config)
    starts = []
    with run.open() as manager:
        started(run, 3)
        for _ in range(3):
            run.save()
            run.append()
            manager.wait_appended()
            starts.append(read.offsets()[0].start)
    starts.append(read.offsets()[0].start)
    assert starts[0] == 0 and starts[-1] > 0 and sorted(starts) == starts
    with run.open() as manager:
        assert run.resume().step == run.step
        assert min(one.step for one in manager.recovery_points()) > 3
        # Earlier epochs go with the first two steps of a later one.
        below = read.offsets()[0].stop
        for _ in range(3):
            run.save()
            run.append()
            manager.wait_appended()
    assert read.offsets()[0].start >= below
    with run.open():
        assert run.resume().step == run.step


# Failures of brokers.


def test_a_broker_that_is_killed_and_restarted_loses_no_record(cluster, topic, tmp_path):
    run, [broker] = new_run(tmp_path, topic, cluster.config), cluster.brokers
    with run.open() as manager:
        started(run, 3)
        for _ in range(5):
            run.append()
        broker.kill()
        for _ in range(5):
            run.append()
        broker.start()
        assert manager.wait_appended().step == 13
    with run.open():
        assert run.resume().step == 13


def test_an_outage_beyond_the_deadline_is_reported_and_the_next_record_has_its_rows(
    cluster, topic, tmp_path
):
    run, [broker] = new_run(tmp_path, topic, cluster.config, deadline_secs=2.0), cluster.brokers
    with run.open() as manager:
        started(run, 3)
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
        assert run.manager.wait_appended(60).step == 6
    with run.open():
        assert run.resume().step == 6


# Killed and fenced producers.


def test_a_producer_killed_in_an_append_loses_no_acknowledged_record(cluster, topic, tmp_path):
    trainee = Trainee(tmp_path / "run", topic, cluster.config)
    try:
        trainee.read_until("acknowledged", 6)
        time.sleep(0.05)
    finally:
        trainee.kill()
    run = new_run(tmp_path, topic, cluster.config)
    with run.open() as manager:
        found = manager.restore_latest(run.state)
        assert found is not None and found.step >= trainee.acknowledged
        states.assert_same(found.state, kafka_trainee.state_at(found.step))


def test_what_a_zombie_still_writes_is_dead(cluster, topic, tmp_path):
    trainee = Trainee(tmp_path / "run", topic, cluster.config)
    read = Topic(topic, cluster.config)
    try:
        trainee.read_until("acknowledged", 4)
        trainee.process.send_signal(signal.SIGSTOP)
        run = new_run(tmp_path, topic, cluster.config)
        with run.open() as manager:
            found = manager.restore_latest(run.state)
            assert found is not None
            point = found.step
            run.states[point] = kafka_trainee.state_at(point)
            run.continue_from(found)
            # Another state than the zombie's, at the same step.
            run._move = lambda state, seen, step: states.train(state, seen, 1000 + step)
            run.append()
            manager.wait_appended()
            before = read.offsets()[0].stop
            trainee.process.send_signal(signal.SIGCONT)
            assert trainee.read_until("error") == FencedError.code
            assert read.offsets()[0].stop > before
            run.append()
            manager.wait_appended()
        with run.open() as manager:
            assert run.resume().step == point + 2
            assert [one.step for one in manager.recovery_points()][:3] == [
                point + 2,
                point + 1,
                point,
            ]
    finally:
        trainee.kill()


# Records that are gone, repeated, or hostile.


def test_records_that_retention_removed_are_named_and_the_newest_step_is_restored(
    cluster, topic, tmp_path
):
    run = new_run(tmp_path, topic, cluster.config)
    with run.open() as manager:
        started(run, 4)
        manager.wait_appended()
    read = Topic(topic, cluster.config)
    cluster.alter(topic, retention_ms="1")
    deadline = time.monotonic() + 60
    while (offsets := read.offsets()[0]).start < offsets.stop:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    cluster.alter(topic, retention_ms="-1")
    with run.open() as manager, pytest.warns(UserWarning, match="step 4, which was durable"):
        found = manager.restore_latest(run.state)
        assert found is not None and found.step == 0
        run.check(found)


def test_a_gap_ends_at_the_newest_step_below_and_is_named(cluster, topic, tmp_path):
    run = new_run(tmp_path, topic, cluster.config)
    read = Topic(topic, cluster.config)
    with run.open() as manager:
        started(run, 4)
        middle = read.offsets()[0].stop
        for _ in range(4):
            run.append()
        manager.wait_appended()
    # Within the record after it.
    read.truncate({0: middle + 1})
    with run.open() as manager, pytest.warns(UserWarning, match="records 1 to 5"):
        found = manager.restore_latest(run.state)
        assert found is not None and found.step == 0
        run.check(found)


def test_records_deleted_under_a_reader_are_skipped(cluster, topic, tmp_path):
    run = new_run(tmp_path, topic, cluster.config)
    with run.open():
        started(run, 30)
    read = Topic(topic, cluster.config)
    span = read.offsets()[0]
    middle = span.stop - 10
    # As if they were deleted after it was asked where the partition begins.
    read.truncate({0: middle})
    assert [one.offset for one in read.read({0: span})] == [*range(middle, span.stop)]


def test_a_recreated_topic_is_noticed(cluster, topic, tmp_path):
    from confluent_kafka.admin import AdminClient

    run = new_run(tmp_path, topic, cluster.config)
    with run.open():
        started(run, 4)
    admin = AdminClient(cluster.config)
    admin.delete_topics([topic])[topic].result(30)
    time.sleep(1)
    cluster.topic(topic, 2)
    with run.open() as manager, pytest.warns(UserWarning, match="step 4, which was durable"):
        found = manager.restore_latest(run.state)
        assert found is not None and found.step == 0


def test_repeated_and_foreign_messages_change_nothing(cluster, topic, tmp_path):
    run, read = new_run(tmp_path, topic, cluster.config), Topic(topic, cluster.config)
    with run.open() as manager:
        started(run, 3)
        stored = [one.data for one in read.read({0: read.offsets()[0]})]
        producer = read.producer(0, message_bytes=CHUNK_BYTES, timeout_secs=30)
        for data in (*stored, *reversed(stored), b"x", b"", stored[0][:-1], stored[-1][1:]):
            producer.send(data)
        producer.flush()
        run.append()
        manager.wait_appended()
    with run.open() as manager:
        assert run.resume().step == 4
        assert [one.step for one in manager.recovery_points()] == [4, 3, 2, 1]


def test_a_follower_reads_only_what_is_new(cluster, topic, tmp_path):
    run = new_run(tmp_path, topic, cluster.config)
    steps_read = []
    with run.open() as manager:
        started(run, 3)
        follower = open_steps(tmp_path / "run")
        follower.topics = WalTopics(cluster.config)
        logs = WalReader(follower.wal_location)
        read_of, spans_of = Topic.read, []

        def counted(topic: Topic, spans: dict[int, Offsets]):
            spans_of.append(sum(span.stop - span.start for span in spans.values()))
            return read_of(topic, spans)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Topic, "read", counted)
            for _ in range(3):
                steps_read.append(logs.read().points()[0].step)
                run.append()
                manager.wait_appended()
        follower.topics.close()
    assert steps_read == [3, 4, 5]
    assert spans_of[0] >= 3 * spans_of[1] > 0 and spans_of[1] == spans_of[2]


def test_a_serving_process_follows_the_records(cluster, topic, tmp_path):
    run = new_run(tmp_path, topic, cluster.config)
    with run.open() as manager:
        started(run, 2)
        wal = KafkaWal(topic, config=cluster.config)
        with serving.follow(tmp_path / "run", (), tables="**", wal=wal, poll_secs=None) as live:
            for step in (2, 3, 4):
                assert live.advance()
                with live.version() as version:
                    assert version.step == step
                    for name, expected in run.states[step]["tables"].items():
                        rows, found = version.lookup(name, np.arange(len(expected)))
                        assert found.all() and (rows == np.asarray(expected)).all()
                run.append()
                manager.wait_appended()


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


@settings(max_examples=150, deadline=None)
@given(found=_messages(), split=st.integers(1, 40))
def test_hostile_messages_never_change_what_was_written(tmp_path_factory, found, split):
    """Records that were written return whole and in order, whatever else is in the partition."""
    records = [bytes([seq]) * 100 for seq in range(1, 5)]
    real = [
        chunk.to_bytes()
        for seq, record in enumerate(records, 1)
        for chunk in wal_format.record_chunks(
            memoryview(record),
            part=5,
            epoch=3,
            epoch_crc32c=77,
            seq=seq,
            message_bytes=wal_format.HEAD_BYTES + split,
        )
    ]
    folder = tmp_path_factory.mktemp("copies")
    partition = Partition(folder, _EPOCH, 0)
    stored, hostile = [], list(found)
    for data in real:
        stored.append(data)
        if hostile:
            stored.append(hostile.pop())
    for offset, data in enumerate([*stored, *hostile]):
        partition.add(Message(0, offset, data))
    assert (folder / "00005-00000000000000000001.seg").read_bytes() == b"".join(records)


def test_a_copy_continues_in_a_new_file_after_its_messages_were_trimmed(tmp_path):
    """Whether the messages end with a record, or within one."""
    messages = [
        chunk.to_bytes()
        for seq in range(1, 6)
        for chunk in wal_format.record_chunks(
            memoryview(bytes([seq]) * 100),
            part=0,
            epoch=3,
            epoch_crc32c=77,
            seq=seq,
            message_bytes=wal_format.HEAD_BYTES + 25,
        )
    ]
    for read, first in ((8, 3), (9, 4)):
        folder = tmp_path / str(read)
        folder.mkdir()
        partition = Partition(folder, _EPOCH, 0)
        for offset, data in enumerate(messages[:read]):
            partition.add(Message(0, offset, data))
        partition.trim(read)
        assert not [*folder.iterdir()]
        for offset, data in enumerate(messages[read:], read):
            partition.add(Message(0, offset, data))
        [file] = folder.iterdir()
        assert file.name == f"00000-{first:020}.seg"
        assert file.read_bytes() == b"".join(bytes([seq]) * 100 for seq in range(first, 6))


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
        new_run(tmp_path, topic, cluster.config).open()


def test_a_topic_that_does_not_exist_or_belongs_to_another_directory_is_refused(
    cluster, topic, tmp_path
):
    with pytest.raises(OptionError, match="no such topic"):
        new_run(tmp_path, "nowhere", cluster.config).open()
    with (run := new_run(tmp_path, topic, cluster.config)).open():
        started(run, 1)
    with pytest.raises(OptionError, match="use a topic of its own"):
        TrainingRun(tmp_path / "other", options=options(topic, cluster.config)).open()


def test_brokers_that_do_not_answer_are_reported_before_training(tmp_path):
    with pytest.raises(StorageError, match="expected an answer within 1.5 s"):
        new_run(tmp_path, "any", {"bootstrap.servers": "127.0.0.1:9"}, deadline_secs=1.5).open()


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
        new_run(tmp_path, "any", config).open()


def test_without_the_extra_a_typed_error_names_it(tmp_path):
    code = (
        "import sys; sys.modules['confluent_kafka'] = None\n"
        "import deltackpt; from deltackpt.wal import KafkaWal; from deltackpt.errors import *\n"
        "wal = deltackpt.WalOptions(backend=KafkaWal('t', config={}))\n"
        "try: deltackpt.CheckpointManager(sys.argv[1], options=deltackpt.ManagerOptions(wal=wal),"
        " handlers={'e': deltackpt.Tables(select='t/*')})\n"
        "except MissingExtra as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "pip install 'deltackpt[kafka]'" in told


def test_readers_without_the_configuration_name_the_topic(cluster, topic, tmp_path):
    run = new_run(tmp_path, topic, cluster.config)
    with run.open():
        started(run, 3)
    expected = f"KafkaWal('{topic}'"
    with run.open(deltackpt.ManagerOptions()) as manager:
        with pytest.raises(OptionError, match="KafkaWal"):
            manager.restore_latest(run.state)
        found = manager.restore_latest(run.state, wal=False)
        assert found is not None and found.step == 0
    for command in (["verify"], ["doctor"]):
        told = subprocess.run(
            [_COMMAND, *command, str(tmp_path / "run")],
            capture_output=True,
            text=True,
        )
        assert expected in told.stdout + told.stderr, told
    for command in (["ls"], ["gc", "--dry-run"]):
        subprocess.run([_COMMAND, *command, str(tmp_path / "run")], capture_output=True, check=True)
    assert f"topic '{topic}'" in open_checkpoints(tmp_path / "run").wal.epochs[0].problem


# Security.


@pytest.fixture(scope="module")
def secure(tmp_path_factory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("secure"), secure=True) as found:
        found.topic("secret")
        yield found


def test_a_wrong_password_is_a_typed_error_before_training(secure, tmp_path):
    config = {**secure.config, "sasl.password": "wr0ng-pa55word"}
    with pytest.raises(StorageError, match="(?i)authentication") as caught:
        new_run(tmp_path, "secret", config, deadline_secs=30).open()
    assert "wr0ng" not in f"{caught.value!r}{caught.value}"


def test_a_wrong_authority_is_a_typed_error_before_training(secure, tmp_path):
    other = Certificate.made(tmp_path)
    config = {**secure.config, "ssl.ca.location": str(other.authority)}
    with pytest.raises(StorageError, match="(?i)certificate") as caught:
        new_run(tmp_path, "secret", config, deadline_secs=30).open()
    assert PASSWORD not in f"{caught.value!r}{caught.value}"


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
        given.append(token(3.0))
        return given[-1]

    run = new_run(tmp_path, secure.topic("oauth"), oauth(secure, callback))
    with run.open() as manager:
        started(run, 3)
        first = len(given)
        while len(given) < first + 3:
            run.append()
            manager.wait_appended()
            time.sleep(0.1)
        last = run.step
    with run.open():
        assert run.resume().step == last
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or given[0][0].encode() not in path.read_bytes()


def test_a_refused_token_is_a_typed_error_before_training(secure, tmp_path):
    expired = token(-60.0)[0]
    config = oauth(secure, lambda _: (expired, time.time() + 300))
    with pytest.raises(StorageError, match="(?i)authentication") as caught:
        new_run(tmp_path, "secret", config, deadline_secs=30).open()
    assert expired not in f"{caught.value!r}{caught.value}"


def test_secrets_are_in_no_file_log_event_or_error(secure, tmp_path, caplog):
    heard, asked = [], []

    class Heard:
        def receive(self, event: events.Event) -> None:
            heard.append(repr(event))

    def config() -> dict[str, Any]:
        asked.append(1)
        return {**secure.config, "debug": "security,broker"}

    given = options("secret", config)
    with caplog.at_level(logging.DEBUG):
        run = TrainingRun(tmp_path / "run", options=given, event_handlers=[Heard()])
        with run.open():
            started(run, 3)
        with run.open():
            assert run.resume().step == 3
    assert len(asked) > 2 and heard
    texts = [caplog.text, *heard, repr(given), str(given)]
    texts.append(repr(options("secret", secure.config)))
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            texts.append(path.read_bytes().decode("latin-1"))
    assert not [text[:200] for text in texts if PASSWORD in text]


# Three brokers.


@pytest.mark.filterwarnings("ignore:append of step")
def test_one_of_three_brokers_may_be_down_and_two_may_not(tmp_path):
    with KafkaCluster(tmp_path, 3) as three:
        topic = three.topic("three")
        run = new_run(tmp_path, topic, three.config, deadline_secs=30.0)
        with run.open() as manager:
            started(run, 2)
            three.brokers[0].kill()
            run.append()
            assert manager.wait_appended().step == 3
            three.brokers[1].kill()
            run.append()
            with pytest.raises(deltackpt.errors.WaitTimeout):
                manager.wait_appended(3)
            three.brokers[0].start()
            three.brokers[1].start()
            assert manager.wait_appended(120).step == 4
        with run.open():
            assert run.resume().step == 4
