# SPDX-License-Identifier: Apache-2.0
"""One process of a job of several that log; see ``many_worker.py``."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

# Run as a program it stands beside the module whose processes it has.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import many_worker

import deltackpt


class Worker(many_worker.Worker):
    """A process that can also be asked to log."""

    def open(self, log: dict[str, Any], **options: Any) -> None:
        """Makes the manager, with a log of these options; see there."""
        log = dict(log)
        backend = deltackpt.wal.LocalWal(**log.pop("backend"))
        super().open(wal=deltackpt.WalOptions(backend=backend, **log), **options)

    def logs(self, seed: int, begins: bool) -> None:
        """Trains, logs and saves until it is killed; says of which step each call is.

        Args:
          seed: of what is drawn, the same in all processes.
          begins: whether there is no step yet.
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
