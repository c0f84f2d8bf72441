# SPDX-License-Identifier: Apache-2.0
"""One process of a job of several that keeps a log; see ``many_worker.py``, whose server it is."""

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
from deltackpt.wal import LocalWal, segments
from deltackpt.wal.writer import LogWriter

#: A test would wait for ever where a process was looked for more often, and not at all.
_SECS = 60.0


def _plain(recovery: RecoveryPoint | int | None) -> Any:
    """A point as the step and whether it is full; a step as it is."""
    return [recovery.step, recovery.full] if isinstance(recovery, RecoveryPoint) else recovery


class Logger(Worker):
    """What a process with a log can be asked for, too."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._disks = contextlib.ExitStack()

    def open(self, root: str, log: dict[str, Any] | None = None, **options: Any) -> None:
        """Makes the manager; ``log``: its ``WalOptions``, of which ``directory`` is ``LocalWal``'s.

        Its events are kept.
        """
        given = dict(log or {})
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
        """The events of a kind."""
        found = [one for one in self._events if type(one).__name__ == name]
        return {"events": [dataclasses.asdict(one) for one in found]}

    def log(
        self, ids: bool = False, without: int = 0, beyond: int | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Logs the state.

        Args:
          ids: whether it says which rows the last step has changed.
          without: how many of them it leaves out, of each table.
          beyond: a process that names rows beyond the tables.
          **arguments: of ``log``.
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
        """Trains and logs each step up to one; says what was saved instead of a mark."""
        saved, skipped = [], []
        while self._step < to:
            self.train(self._step + 1)
            found = self.log(**arguments)
            saved += [[self._step, found["saved"], found["reason"]]] * (found["saved"] is not None)
            skipped += [self._step] * found["reason"].startswith("skipped")
        return {"saved": saved, "skipped": skipped}

    def run_until_saved(self, at_most: int, **arguments: Any) -> dict[str, Any]:
        """Trains and logs until a step is saved instead of a mark."""
        while self._step < at_most:
            found = self.run_on(self._step + 1, **arguments)
            if found["saved"]:
                return found
        return {"saved": [], "skipped": []}

    def wait_appended(self, timeout_secs: float | None = None) -> dict[str, Any]:
        """Waits until what was logged is durable."""
        return {"recovery": _plain(self._manager.wait_appended(timeout_secs))}

    def wait_recovery(self, step: int) -> dict[str, Any]:
        """Waits until a point, or a step, is what a restore would find."""
        deadline = time.monotonic() + _SECS
        while True:
            found = self._manager.wait_appended()
            at = found.step if isinstance(found, RecoveryPoint) else found
            if at == step:
                return {"recovery": _plain(found)}
            assert time.monotonic() < deadline, f"expected {step}, found {found}"

    def verify_tracking(self) -> None:
        """Looks at every row for whether it is marked."""
        self._manager.verify_tracking(self._state, touched=self._given())

    def points(self) -> dict[str, Any]:
        """Steps of the full points."""
        return {"points": [point.step for point in self._manager.recovery_points()]}

    def refuse_writes(self, times: int, number: int = 28) -> None:
        """Has the next writes of the log fail by an error of the operating system."""
        self._disk.fail("write", "[.]seg$", errno=number, times=times)

    def refuse_reads(self, number: int) -> None:
        """Has the next read of a head of the log fail by an error of the operating system."""
        self._disk.fail("read", r"/\d+[.]msgpack$", errno=number)

    def run_until_told(self, at_most: int) -> dict[str, Any]:
        """Trains and logs until something is told to have failed."""
        while self._step < at_most:
            self.run_on(self._step + 1)
            self._manager.wait_appended()
            failed = self.told()["events"]
            if failed:
                return {
                    "code": failed[0]["code"],
                    "message": failed[0]["message"],
                    "step": self._step,
                }
        return {"code": None}

    def wait_failed(self) -> None:
        """Waits until a batch has failed."""
        writer = self._manager._recorder._writer
        assert isinstance(writer, LogWriter)
        deadline = time.monotonic() + _SECS
        while writer.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _restored(self, result: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        found = super()._restored(result, *arguments, **options)
        point = result.point
        assert point is None or result.items == {"at": result.step}
        return found | {"point": None if point is None else point.step}


many_worker.POINTS["before the log is forced"] = many_worker._before(segments.SegmentWriter, "sync")
many_worker.Worker = Logger  # What the forked processes are.

if __name__ == "__main__":
    many_worker.serve()
