# SPDX-License-Identifier: Apache-2.0
"""Compactor: merges long chains of a directory into new bases, in the background, on all nodes.

Ray reruns a lost task; merging a shard is idempotent.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import Any

import ray
import ray.exceptions

from deltackpt.errors import AlreadyCompacting, ServiceUnavailable
from deltackpt.ledger.opening import open_steps
from deltackpt.ledger.steps import Steps
from deltackpt.maintenance import compact
from deltackpt.maintenance.compact import CompactionPlan, MergedShard
from deltackpt.reading import chains
from deltackpt.reading.reader import Progress
from deltackpt.resources.runtime import Runtime
from deltackpt.service.protocol import ServiceOptions
from deltackpt.storage import buckets

_logger = logging.getLogger(__name__)

_STOP_SECS = 10.0
#: The compactor polls this many times less often than the replicas.
_RARER = 5
_MOST_REST_SECS = 300.0
#: A shard has some GiB.
_SHARD_SECS = 1800.0


class Compactor:
    """Keeps the chain of the newest step short; a Ray actor, one per service."""

    def __init__(self, directory: str, shards: int, options: ServiceOptions):
        """Starts polling; merges as many shards of a base at a time as the service has replicas."""
        assert options.compact_after is not None
        os.nice(options.nice)
        self._directory, self._shards, self._options = directory, shards, options
        self._after = options.compact_after
        self._root: Steps | None = None
        self._examined_step: int | None = None
        self._status = "looks"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltackpt-compact", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        """Describes the current, last or failed compaction."""
        return self._status

    def stop(self) -> None:
        """Stops polling; the actor is killed afterwards and its current compaction is abandoned."""
        self._stopping.set()
        self._thread.join(_STOP_SECS)

    def _run(self) -> None:
        rest = least = _RARER * self._options.rest_secs(self._directory)
        while not self._stopping.wait(rest):
            try:
                self._poll()
                rest = least
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                if text != self._status:
                    _logger.warning("compaction of %s: %s", self._directory, text, exc_info=True)
                self._status = text
                rest = min(_MOST_REST_SECS, 2 * rest)
                if isinstance(error, (AlreadyCompacting, ServiceUnavailable)):
                    # Not an error of the step: poll again.
                    self._examined_step = None

    def _poll(self) -> None:
        """Merges the newest step's chain if it is long enough; examines each step once."""
        if self._root is None:
            self._root = open_steps(
                self._directory, item=self._options.item, endpoint=self._options.endpoint
            )
        newest = self._root.newest_step()
        if newest is None or newest == self._examined_step:
            return
        self._examined_step = newest
        read = chains.read_chain(self._root.at(newest), self._options.item)
        deltas = sum(save.info.kind == "delta" for save in read)
        if deltas >= self._after:
            self._status = f"merges step {newest}"
            done = compact.compact(
                self._directory,
                item=self._options.item,
                step=newest,
                workers=self._shards,
                memory_bytes=self._options.compact_memory_bytes,
                # Files fetched from a bucket are on this node only.
                merge_shards=None if buckets.is_url(self._directory) else _by_tasks,
                endpoint=self._options.endpoint,
            )
            self._status = "looks"
            if done is not None:
                self._status = (
                    f"merged step {done.step}: {done.deltas} deltas, {done.bytes_written:,} bytes "
                    f"in {done.seconds:.1f} s"
                )


def _by_tasks(
    plan: CompactionPlan, workers: int, memory_bytes: int, progress: Progress | None
) -> list[MergedShard]:
    """Merges the shards of a plan in Ray tasks; see ``compact.MergeShards``."""
    del progress  # No progress is reported.
    task: Any = ray.remote(_merge_quietly).options(
        num_cpus=0, scheduling_strategy="SPREAD", max_retries=3
    )
    waiting = list(range(len(plan.shards)))
    running: dict[ray.ObjectRef[MergedShard], int] = {}
    found: dict[int, MergedShard] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                number = waiting.pop(0)
                running[task.remote(plan, number, memory_bytes)] = number
            done, _ = ray.wait(list(running), num_returns=1, timeout=_SHARD_SECS)
            if not done:
                raise ServiceUnavailable(
                    f"compaction of step {plan.step}: expected a shard of it within "
                    f"{_SHARD_SECS:.0f} s, found none; check the nodes' storage"
                )
            for call in done:
                found[running.pop(call)] = ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except ray.exceptions.RayError as error:
        raise ServiceUnavailable(
            f"compaction of step {plan.step}: expected its tasks to run, found "
            f"{type(error).__name__}: {error}; the compactor retries at the next step"
        ) from error
    finally:
        for call in running:
            ray.cancel(call)
    return [found[number] for number in range(len(plan.shards))]


def _merge_quietly(plan: CompactionPlan, number: int, memory_bytes: int) -> MergedShard:
    """Merges a shard in a low-priority thread, since the Ray process runs other tasks later."""
    with Runtime(size=1, low_priority=True) as runtime:
        merge = functools.partial(compact.merge_shard, plan, number, memory_bytes=memory_bytes)
        return runtime.start(merge).result()
