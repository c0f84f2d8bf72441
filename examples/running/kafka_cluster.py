# SPDX-License-Identifier: Apache-2.0
"""Runs real Kafka brokers (KRaft) on loopback, for demonstrations, benchmarks and tests."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

# It has no list of public names.
# pyright: reportPrivateImportUsage=false
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from running.ports import free_ports

_JARS = Path(__file__).resolve().parents[2] / "build" / "servers" / "kafka" / "libs"
_START_SECS = 120
USER, PASSWORD = "trainer", "pa55-of-the-trainer"
_LOG = """status = error
rootLogger.level = WARN
rootLogger.appenderRef.out.ref = OUT
appender.out.type = Console
appender.out.name = OUT
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %m (%c)%n
"""


class Certificate(Protocol):
    """Files of a server's certificate, its key, and the authority that signed it."""

    authority: Path
    shown: Path
    key: Path


def missing() -> str | None:
    """Returns what brokers need and is not there."""
    if shutil.which("java") is None:
        return "Kafka needs java"
    return None if any(_JARS.glob("kafka_*.jar")) else "Kafka is not installed: make servers"


@dataclasses.dataclass
class Broker:
    """A broker, which is also a controller."""

    number: int
    port: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.folder / "out"

    def start(self) -> None:
        """Starts it; ``KafkaCluster.wait`` waits until it answers."""
        with open(self.log, "ab") as out:
            command = ["java", "-Xmx384m", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
            command += [f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}"]
            command += ["-cp", f"{_JARS}/*", "kafka.Kafka", str(self.folder / "server.properties")]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=self.folder)

    def kill(self) -> None:
        """Ends it at once, as a machine that loses power does, but for its page cache."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


class KafkaCluster:
    """One or several brokers; use as a context manager.

    Attributes:
      brokers: the brokers.
      config: what a client needs to reach them.
    """

    def __init__(self, folder: Path, count: int = 1, *, certificate: Certificate | None = None):
        """Starts nothing yet.

        Args:
          folder: an existing folder for their data.
          count: number of brokers.
          certificate: if given, clients use TLS and SCRAM-SHA-512, or OAUTHBEARER with unsigned
            tokens.
        """
        self._certificate = certificate
        ports = iter(free_ports(3 * count))
        self._plain = {one: next(ports) for one in range(1, count + 1)}
        controllers = {one: next(ports) for one in range(1, count + 1)}
        voters = ",".join(f"{one}@127.0.0.1:{port}" for one, port in controllers.items())
        self.brokers = []
        uuid = self._tool("random-uuid").strip()
        for number in self._plain:
            at = folder / f"broker{number}"
            at.mkdir()
            broker = Broker(number, next(ports) if certificate else self._plain[number], at)
            (at / "log4j2.properties").write_text(_LOG)
            shown = self._properties(broker, controllers[number], voters, min(count, 3))
            text = "".join(f"{key}={value}\n" for key, value in shown.items())
            (at / "server.properties").write_text(text)
            extra = []
            if certificate:
                extra = ["-S", f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"]
            config = str(at / "server.properties")
            self._tool("format", "-t", uuid, "-c", config, *extra)
            self.brokers.append(broker)
        servers = ",".join(f"127.0.0.1:{broker.port}" for broker in self.brokers)
        self.config: dict[str, Any] = {"bootstrap.servers": servers}
        if self._certificate is not None:
            self.config |= {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.username": USER,
                "sasl.password": PASSWORD,
                "ssl.ca.location": str(self._certificate.authority),
            }

    def _properties(
        self, broker: Broker, controller: int, voters: str, copies: int
    ) -> dict[str, object]:
        listeners = [f"PLAINTEXT://127.0.0.1:{self._plain[broker.number]}"]
        found: dict[str, object] = {}
        if self._certificate is not None:
            listeners.append(f"SASL_SSL://127.0.0.1:{broker.port}")
            chain = self._certificate.shown.read_text()
            key = self._certificate.key.read_text()
            (broker.folder / "server.pem").write_text(key + chain)
            found |= {
                "sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": broker.folder / "server.pem",
                "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
                    "org.apache.kafka.common.security.scram.ScramLoginModule required;"
                ),
                "listener.name.sasl_ssl.oauthbearer.sasl.jaas.config": (
                    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
                    'unsecuredLoginStringClaim_sub="broker";'
                ),
            }
        shown = ",".join(listeners)
        return {
            "process.roles": "broker,controller",
            "node.id": broker.number,
            "controller.quorum.voters": voters,
            "listeners": f"{shown},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": shown,
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL"
            ),
            "log.dirs": broker.folder / "data",
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": 1,
            "auto.create.topics.enable": "false",
            "group.initial.rebalance.delay.ms": 0,
            "log.retention.check.interval.ms": 300,
            "log.segment.delete.delay.ms": 0,
            "broker.session.timeout.ms": 6000,
            "unclean.leader.election.enable": "false",
            **found,
        }

    @property
    def plain_config(self) -> dict[str, Any]:
        """How a client without TLS reaches the brokers."""
        ports = self._plain.values()
        return {"bootstrap.servers": ",".join(f"127.0.0.1:{port}" for port in ports)}

    def _tool(self, *arguments: str) -> str:
        command = ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{_JARS}/*"]
        command += ["kafka.tools.StorageTool", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def __enter__(self) -> KafkaCluster:
        for broker in self.brokers:
            broker.start()
        try:
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for broker in self.brokers:
            broker.kill()

    def wait(self) -> None:
        """Waits until every broker that runs has joined the cluster."""

        deadline = time.monotonic() + _START_SECS
        running = [broker for broker in self.brokers if broker.process is not None]
        for broker in running:
            assert broker.process is not None
            while True:
                assert broker.process.poll() is None, broker.log.read_text()[-4000:]
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", broker.port), 1),
                ):
                    break
                assert time.monotonic() < deadline, broker.log.read_text()[-4000:]
                time.sleep(0.05)
        admin = AdminClient({**self.plain_config, "log_level": 0})
        while True:
            with contextlib.suppress(Exception):
                if len(admin.list_topics(timeout=2).brokers) >= len(running):
                    return
            assert time.monotonic() < deadline, "the brokers do not find each other"
            time.sleep(0.1)

    def topic(
        self, name: str, partitions: int = 1, *, config: Mapping[str, str] | None = None
    ) -> str:
        """Creates a topic that suits a WAL, unless ``config`` changes it; returns its name."""

        copies = min(len(self.brokers), 3)
        suits = {
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "min.insync.replicas": str(max(1, copies - 1)),
            **(config or {}),
        }
        admin = AdminClient(self.plain_config)
        new = NewTopic(name, num_partitions=partitions, replication_factor=copies, config=suits)
        admin.create_topics([new])[name].result(120)
        return name

    def alter(self, topic: str, **config: str) -> None:
        """Changes options of a topic; "_" in names stands for "."."""

        entries = [
            ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for name, value in config.items()
        ]
        asked = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        admin = AdminClient(self.plain_config)
        for done in admin.incremental_alter_configs([asked]).values():
            done.result(120)
