# SPDX-License-Identifier: Apache-2.0
"""Options of the hot standby."""

from __future__ import annotations

import dataclasses

from deltackpt.errors import OptionError
from deltackpt.format import names
from deltackpt.storage import buckets

_DIRECTORY_SECS, _BUCKET_SECS = 0.1, 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How a directory's state is kept in memory.

    Attributes:
      item: name of the deltackpt item in a step.
      shards: into how many shards the rows of each table are split; default: the number of nodes.
      replicas: how many replicas of each shard there are, on different nodes.
      memory_bytes: maximum memory of one replica in bytes. Ray reserves it when it places the
        replica; by default a replica may use all memory of its node.
      poll_secs: seconds between two polls for a new step; each poll lists the checkpoint directory
        once. Default: 0.1 for a directory, 5 for a bucket, where listings are billed.
      compact_after: merge a chain of this many deltas into a new base, in the background; None
        disables compaction.
      compact_memory_bytes: memory for compaction in bytes, for all parts together.
      nice: CPU niceness of the replicas, 0 to 19.
      endpoint: address of the bucket's server, if it is not the cloud provider's default.
    """

    item: str = names.EMBEDDINGS_ITEM
    shards: int | None = None
    replicas: int = 1
    memory_bytes: int | None = None
    poll_secs: float | None = None
    compact_after: int | None = None
    compact_memory_bytes: int = 1 << 30
    nice: int = 10
    endpoint: str | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("shards", 1),
            ("replicas", 1),
            ("memory_bytes", 1),
            ("compact_after", 1),
            ("compact_memory_bytes", 1 << 20),
            ("nice", 0),
        ):
            found = getattr(self, name)
            if found is not None and found < least:
                raise OptionError(
                    f"ServiceOptions.{name}: expected at least {least}, found {found!r}"
                )
        if self.poll_secs is not None and not self.poll_secs > 0:
            raise OptionError(
                "ServiceOptions.poll_secs: expected a positive number of seconds, found "
                f"{self.poll_secs!r}"
            )

    def rest_secs(self, directory: str) -> float:
        """Seconds to pause between two polls of a checkpoint directory."""
        if self.poll_secs is not None:
            return self.poll_secs
        return _BUCKET_SECS if buckets.is_url(directory) else _DIRECTORY_SECS
