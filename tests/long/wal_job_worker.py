# SPDX-License-Identifier: Apache-2.0
"""One process of a multi-process job that appends to a WAL; see ``many_worker.py``."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

# Makes ``many_worker`` importable if this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import many_worker

import deltackpt


class Worker(many_worker.Worker):
    """A worker that can also append to a WAL."""

    def open(self, log: dict[str, Any], **options: Any) -> None:
        """Opens the manager with a WAL of these options; see the base class."""
        log = dict(log)
        backend = deltackpt.wal.LocalWal(**log.pop("backend"))
        super().open(wal=deltackpt.WalOptions(backend=backend, **log), **options)

    def logs(self, seed: int, begins: bool) -> None:
        """Trains, appends and saves until it is killed; reports the step of each call.

        Args:
          seed: of the random choices, the same in all processes.
          begins: whether no step exists yet.
        """
        draw = random.Random(seed)
        while True:
            self.train(to=self._step + draw.choice((1, 1, 1, 2)))
            self._link.send({"reached": f"begun {self._step}"})
            if begins or draw.random() < 0.1:
                self._manager.save(self._step, self._state, touched=self._marks)
                begins = False
                if draw.random() < 0.5:
                    self._manager.wait_until_finished()
                    self._acknowledged(self._step)
                continue
            logged = self._manager.append(self._step, self._state, touched=self._marks)
            recovery = logged.recovery
            if draw.random() < 0.2:
                recovery = self._manager.wait_appended() or recovery
            if recovery is not None:
                self._acknowledged(recovery if isinstance(recovery, int) else recovery.step)

    def _acknowledged(self, step: int) -> None:
        self._link.send({"reached": f"acknowledged {step}"})

    def _restored(self, result: Any, *arguments: Any) -> dict[str, Any]:
        return super()._restored(result, *arguments) | {"point": result.point is not None}


if __name__ == "__main__":
    with mock.patch.object(many_worker, "Worker", Worker):
        many_worker.serve()
