# SPDX-License-Identifier: Apache-2.0
"""Orbax's ``CheckpointManager`` as ours drives it: opened, and opened anew after each failure.

After a failed save Orbax keeps raising the old error and forgets steps; after a read that another
process did not come to, its barriers are counted differently. Both times it is closed and another
one takes its place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import orbax.checkpoint as ocp

from deltackpt import processes
from deltackpt.format import names
from deltackpt.handlers import commit, dense, retention, v0, waiting
from deltackpt.handlers.orbax_private import remove_by
from deltackpt.handlers.run import Run

#: How often a reader lists steps that a trainer removes meanwhile.
_LISTINGS = 10


class Moments(Protocol):
    """What Orbax's background threads call in the course of a save."""

    def written(self) -> None:
        """All files of this process are written; also called later."""
        ...

    def failed(self, error: BaseException) -> None:
        """Something ended the save before its commit."""
        ...

    def committed(self) -> None:
        """The step is visible."""
        ...

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """Several processes are to meet."""
        ...


class Engine:
    """The manager of Orbax that is open now."""

    def __init__(self, run: Run, extra: dict[str, ocp.CheckpointHandler], moments: Moments):
        """Opens one.

        Args:
          run: the manager's run.
          extra: handlers of further items, by name.
          moments: what is called in the background of a save.
        """
        self._run = run
        self._extra = extra
        self._moments = moments
        #: How often reading by Orbax failed: its barriers count those that came, each for itself.
        self._failed_reads = 0
        self.orbax = self._open()

    def restart(
        self, *, failed_read: bool = False, closed: Callable[[], object] | None = None
    ) -> None:
        """Closes Orbax's manager and opens another.

        Args:
          failed_read: not all processes came to a barrier, so the next ones need other names.
          closed: called in between, where none of its threads is at work.
        """
        self._failed_reads += failed_read
        self.close()
        if closed is not None:
            closed()
        self.orbax = self._open()

    def close(self) -> None:
        """Ends its threads; the error of a failed save, raised again, was reported already."""
        with contextlib.suppress(Exception):
            limit = self._run.options.timeouts.close_secs
            waiting.bounded(self.orbax.close, limit, "the end of Orbax's threads")

    def _open(self) -> ocp.CheckpointManager:
        if self._run.options.read_only:
            # Beside a trainer: it lists the steps, then looks at each, which may be gone.
            for _ in range(_LISTINGS):
                with contextlib.suppress(FileNotFoundError):
                    return self._new()
        return self._new()

    def _new(self) -> ocp.CheckpointManager:
        run, moments = self._run, self._moments
        options = run.options
        handlers: dict[str, Any] = {
            run.item: v0.DeltaHandler(),
            names.DENSE_ITEM: dense.handler(),
            **self._extra,
        }
        manager = ocp.CheckpointManager(
            run.root.path,
            item_handlers=handlers,
            options=ocp.CheckpointManagerOptions(
                create=False,
                read_only=options.read_only,
                save_interval_steps=0 if options.read_only else 1,
                preservation_policy=retention.KeepChain(
                    retention.as_policy(options.retention),
                    run.lineage.protected,
                    run.root.saves,
                    run.root.compacted,
                    deletes=run.among.index == 0,
                ),
                temporary_path_class=commit.temporary_path_class(
                    fsync=run.fsync,
                    item=run.item,
                    begun=moments.written,
                    check=run.root.check_lease,
                    committed=moments.committed,
                    failed=moments.failed,
                ),
                save_root_metadata=False,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=processes.index() if options.alone else 0,
                    # Barriers of the coordination service, which have a limit, instead of
                    # collectives of the devices, which have none.
                    active_processes=self._active_processes(),
                    barrier_sync_key_prefix=f"deltackpt-{run.lineage.run}-{self._failed_reads}",
                ),
                async_options=ocp.options.AsyncOptions(
                    # Above every limit of ours, which say more.
                    timeout_secs=math.ceil(
                        options.timeouts.save_secs + 4 * options.timeouts.processes_secs
                    ),
                    barrier_sync_fn=moments.meet,
                ),
            ),
        )
        remove_by(manager, run.root.remove_steps)
        return manager

    def _active_processes(self) -> set[int] | None:
        if self._run.options.alone:
            return {processes.index()}
        return self._run.among.everybody if self._run.among.count > 1 else None
