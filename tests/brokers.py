# SPDX-License-Identifier: Apache-2.0
"""Real Kafka brokers on loopback, started and stopped by tests."""

from __future__ import annotations

import sys
from pathlib import Path

from machine import required

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from running import kafka_cluster
from running.kafka_cluster import PASSWORD, USER
from servers import Certificate

__all__ = ["PASSWORD", "USER", "KafkaCluster"]


class KafkaCluster(kafka_cluster.KafkaCluster):
    """One or several brokers; skips the test, or fails it in CI, if Kafka is not installed."""

    def __init__(self, folder: Path, count: int = 1, *, secure: bool = False):
        """Starts nothing yet; see the base class.

        Args:
          folder: an existing folder for their data.
          count: number of brokers.
          secure: whether clients use TLS and SCRAM-SHA-512.
        """
        reason = kafka_cluster.missing()
        required(reason is None, str(reason))
        certificate = Certificate.made(folder) if secure else None
        super().__init__(folder, count, certificate=certificate)
