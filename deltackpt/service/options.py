# SPDX-License-Identifier: Apache-2.0
"""Options of a restore service."""

from __future__ import annotations

import dataclasses

from deltackpt.errors import OptionError
from deltackpt.format import names
from deltackpt.storage import buckets

_DIRECTORY_SECS, _BUCKET_SECS = 0.1, 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How a directory is kept in memory.

    Attributes:
      item: name of our item in a step.
      shards: how many members share the rows of each table; the number of nodes by default.
      replicas: how many members, on different nodes, hold the same rows.
      memory_bytes: most memory of one member. Ray is told, and places members where so much is
        free; by default a member takes what its node has.
      poll_secs: how often a member looks for a new step: one listing of the root; by default 0.1
        s for a directory, and 5 s for a bucket, whose listings are paid for.
      compact_after: fold a chain of that many deltas into a new base, in the background; None
        leaves chains as they are.
      compact_memory_bytes: memory for that, of all shares together.
      nice: how far the members yield the processors to others, 0 to 19.
      endpoint: address of the server of a bucket, where it is not the service's own.
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

    def rest_secs(self, root: str) -> float:
        """How long to rest between two looks at a root."""
        if self.poll_secs is not None:
            return self.poll_secs
        return _BUCKET_SECS if buckets.is_url(root) else _DIRECTORY_SECS
