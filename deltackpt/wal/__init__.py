# SPDX-License-Identifier: Apache-2.0
"""The write-ahead log: rows that changed between two saves, durable at every append."""

from deltackpt.options import KafkaWal, LocalWal

__all__ = ["KafkaWal", "LocalWal"]
