# SPDX-License-Identifier: Apache-2.0
"""One process of a multi-process job with a WAL; it runs the server of ``many_worker.py``."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import many_worker
from many_worker import Worker

from deltackpt import RecoveryPoint, WalOptions
from deltackpt.testing import Disk
from deltackpt.wal import KafkaWal, LocalWal, segment_files
from deltackpt.wal.writer import WalWriter

#: Deadline of each wait, so that a test cannot hang.
_SECS = 60.0


def _plain(recovery: RecoveryPoint | int | None) -> Any:
    """A recovery point as its step and whether it is full; a step unchanged."""
    return [recovery.step, recovery.full] if isinstance(recovery, RecoveryPoint) else recovery


class Logger(Worker):
    """A worker that also takes the requests of a process with a WAL."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._disks = contextlib.ExitStack()

    def open(self, root: str, log: dict[str, Any] | None = None, **options: Any) -> None:
        """Opens the manager and keeps its events.

        ``log`` holds its ``WalOptions``; ``directory`` and ``segment_bytes`` go to ``LocalWal``,
        ``kafka`` to ``KafkaWal``.
        """
        given = dict(log or {})
        if "kafka" in given:
            backend = KafkaWal(**given.pop("kafka"))
        else:
            backend = LocalWal(
                **{key: given.pop(key) for key in ("directory", "segment_bytes") if key in given}
            )
        self._disks.close()
        self._disk = self._disks.enter_context(Disk(Path(root).parent))
        super().open(root, wal=WalOptions(backend=backend, **given), **options)
        self._events: list[Any] = []
        run = self._manager._run
        run.event_handlers = (*run.event_handlers, self)

    def receive(self, event: Any) -> None:
        """See ``events.EventHandler``."""
        self._events.append(event)

    def told(self, name: str = "FailureEvent") -> dict[str, Any]:
        """Returns the events of a kind."""
        found = [one for one in self._events if type(one).__name__ == name]
        return {"events": [dataclasses.asdict(one) for one in found]}

    def log(
        self, ids: bool = False, without: int = 0, beyond: int | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Appends the state to the WAL.

        Args:
          ids: whether to name the rows that the last step changed.
          without: how many of them to leave out of each table.
          beyond: the process that names rows beyond the tables.
          **arguments: of ``append``.
        """
        if ids:
            changed = self._model.changed(self._step)
            more = 10**6 if beyond == self._task["process"] else 0
            arguments["ids"] = {name: rows[without:] + more for name, rows in changed.items()}
        found = self._manager.append(
            self._step,
            self._state,
            touched=self._given(),
            items={"at": self._step},
            **arguments,
        )
        saved = None if found.saved is None else found.saved.kind
        return {"step": found.step, "kind": found.kind, "reason": found.reason, "saved": saved}

    def run_on(self, to: int, **arguments: Any) -> dict[str, Any]:
        """Trains and appends each step up to one; returns the steps saved or skipped instead."""
        saved, skipped = [], []
        while self._step < to:
            self.train(self._step + 1)
            found = self.log(**arguments)
            saved += [[self._step, found["saved"], found["reason"]]] * (found["saved"] is not None)
            skipped += [self._step] * found["reason"].startswith("skipped")
        return {"saved": saved, "skipped": skipped}

    def run_until_saved(self, at_most: int, **arguments: Any) -> dict[str, Any]:
        """Trains and appends until a step is saved instead."""
        while self._step < at_most:
            found = self.run_on(self._step + 1, **arguments)
            if found["saved"]:
                return found
        return {"saved": [], "skipped": []}

    def keep_marks(self) -> None:
        """Keeps the marks for ``return_marks``."""
        self._kept = self._marks

    def return_marks(self) -> None:
        """Returns to the kept marks, as if training returned to their state in memory."""
        self._marks = self._kept

    def wait_appended(self, timeout_secs: float | None = None) -> dict[str, Any]:
        """Waits until the appended records are durable."""
        return {"recovery": _plain(self._manager.wait_appended(timeout_secs))}

    def wait_recovery(self, step: int) -> dict[str, Any]:
        """Waits until a restore would find a point or a step."""
        deadline = time.monotonic() + _SECS
        while True:
            found = self._manager.wait_appended()
            at = found.step if isinstance(found, RecoveryPoint) else found
            if at == step:
                return {"recovery": _plain(found)}
            assert time.monotonic() < deadline, f"expected {step}, found {found}"

    def points(self) -> dict[str, Any]:
        """Returns the steps of the full points."""
        return {"points": [point.step for point in self._manager.recovery_points()]}

    def refuse_writes(self, times: int, number: int = 28) -> None:
        """Makes the next writes of the WAL fail with an operating system error."""
        self._disk.fail("write", "[.]seg$", errno=number, times=times)

    def refuse_reads(self, number: int) -> None:
        """Makes the next read of an epoch header fail with an operating system error."""
        self._disk.fail("read", r"/\d+[.]msgpack$", errno=number)

    def wait_failed(self) -> None:
        """Waits until a batch has failed."""
        writer = self._manager._recorder._writer
        assert isinstance(writer, WalWriter)
        deadline = time.monotonic() + _SECS
        while writer.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _restored(self, result: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        found = super()._restored(result, *arguments, **options)
        point = result.point
        assert point is None or result.items == {"at": result.step}
        return found | {"point": None if point is None else point.step}


many_worker.POINTS["before the log is forced"] = many_worker._before(
    segment_files.SegmentWriter, "sync"
)
many_worker.Worker = Logger  # The class that forked processes use.

if __name__ == "__main__":
    many_worker.serve()
