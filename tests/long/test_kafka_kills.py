# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of trainers and of brokers, at any moment, while records are written to Kafka.

Each successor restores the newest step or recovery point. Acknowledged records must exist, and the
state must equal that of an undisturbed run bit for bit.
"""

from __future__ import annotations

import collections
import time

import pytest
from brokers import KafkaCluster
from kafka_trainee import Trainee

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200), pytest.mark.xdist_group("kafka")]

#: Trainers to kill in each phase: 120 in total, with the brokers that are killed before them.
KILLS_PER_PHASE = 20
BROKERS = 3
#: Brokers to kill before the trainer, and whether they return before it ends.
PHASES = {
    "trainer alone": (0, False),
    "trainer after a broker": (1, False),
    "trainer after a broker that returned": (1, True),
    "trainer after two brokers": (2, False),
    "trainer after two brokers that returned": (2, True),
    "trainer after all brokers that returned": (3, True),
}
_LONGEST_SECS = 1.5


def test_kills_of_trainers_and_brokers_lose_no_acknowledged_record(tmp_path, campaign, figures):
    random_ = campaign.random("kafka kills")
    order = [*PHASES] * campaign.count(KILLS_PER_PHASE)
    random_.shuffle(order)
    acknowledged = records = broker_kills = 0
    with KafkaCluster(tmp_path, BROKERS) as cluster:
        topic = cluster.topic("kills")
        for phase in order:
            count, returns = PHASES[phase]
            every = random_.choice((4, 15, 1000))
            # Longer than brokers need to return on a slow machine.
            task = {"save_every": every, "deadline_secs": 600.0}
            trainee = Trainee(tmp_path / "run", topic, cluster.config, **task)
            try:
                # It compares what it restores with an undisturbed run.
                restored = trainee.read_until("restored")
                assert restored >= acknowledged, phase
                trainee.read_until("acknowledged", restored + random_.randrange(1, 12))
                time.sleep(random_.uniform(0, 0.1))
                killed = random_.sample(cluster.brokers, count)
                for broker in killed:
                    broker.kill()
                time.sleep(random_.uniform(0, _LONGEST_SECS))
                if returns:
                    for broker in killed:
                        broker.start()
                    cluster.wait()
                    time.sleep(random_.uniform(0, _LONGEST_SECS))
            finally:
                trainee.kill()
            for broker in cluster.brokers:
                if broker.process is None:
                    broker.start()
            cluster.wait()
            assert trainee.error is None, trainee.error
            acknowledged, records = trainee.acknowledged, records + trainee.appended - restored
            broker_kills += count
        last = Trainee(tmp_path / "run", topic, cluster.config, steps=1)
        try:
            assert last.read_until("restored") >= acknowledged
        finally:
            last.kill()
    figures(
        "kills of trainers and Kafka brokers",
        phases=dict(collections.Counter(order)),
        kills=len(order),
        broker_kills=broker_kills,
        records=records,
    )
