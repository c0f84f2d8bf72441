# SPDX-License-Identifier: Apache-2.0
"""A trainer with a WAL in Kafka, for tests that kill or stop it.

usage: kafka_trainee.py DIRECTORY TASK, a JSON object: topic, config, chunk_bytes, save_every, steps

It restores the newest state, checks it, and trains. Each line of its output is JSON: what was
restored, the steps that were appended, and those that were acknowledged. With ``stop_at``, it sends
itself a SIGSTOP once that step is acknowledged and nothing is in flight.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import deltackpt
from deltackpt.errors import DeltackptError
from deltackpt.testing import states
from deltackpt.testing.training_run import TrainingRun
from deltackpt.wal import KafkaWal

#: A record is several messages.
CHUNK_BYTES = 5000


class Trainee:
    """A trainer in a process of its own, from the side of the test."""

    def __init__(self, directory: Path, topic: str, config: Any, **task: Any):
        asked = {"topic": topic, "config": config, "chunk_bytes": CHUNK_BYTES}
        asked |= {"save_every": 1000, "steps": 100_000, **task}
        command = [sys.executable, __file__, str(directory), json.dumps(asked)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.acknowledged = self.appended = -1
        self.error = None

    def read_until(self, name: str, at_least: int = 0) -> int:
        """Reads its output until it reports a value."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            self.acknowledged = max(self.acknowledged, told.get("acknowledged", -1))
            self.appended = max(self.appended, told.get("appended", -1))
            self.error = told.get("error", self.error)
            if name in told and (name == "error" or told[name] >= at_least):
                return told[name]
        raise AssertionError(self.process.stderr and self.process.stderr.read()[-3000:])

    def kill(self) -> None:
        """Kills it, and reads the rest of its output."""
        self.process.kill()
        out, _ = self.process.communicate()
        for line in out.splitlines():
            if line.endswith("}"):
                self.acknowledged = max(self.acknowledged, json.loads(line).get("acknowledged", -1))


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def state_at(step: int) -> Any:
    """The state after so many steps."""
    state = states.initial()
    seen = states.new_touched(state)
    for number in range(1, step + 1):
        state, seen = states.train(state, seen, number)
    return state


def main(directory: str, task: dict[str, Any]) -> None:
    backend = KafkaWal(task["topic"], config=task["config"], chunk_bytes=task["chunk_bytes"])
    wal = deltackpt.WalOptions(backend=backend, deadline_secs=task.get("deadline_secs", 60.0))
    run = TrainingRun(directory, options=deltackpt.ManagerOptions(wal=wal))
    with run.open() as manager:
        tell(opened=True)
        found = manager.restore_latest(run.state)
        if found is None:
            run.save_initial()
        else:
            run.states[found.step] = state_at(found.step)
            run.continue_from(found)
        tell(restored=run.step)
        try:
            for number in range(task["steps"]):
                if (run.step + 1) % task["save_every"] == 0:
                    run.save(wait=False)
                else:
                    run.append()
                tell(appended=run.step)
                if number % 3 == 2:
                    recovery = manager.wait_appended()
                    step = recovery if isinstance(recovery, int) else recovery.step
                    tell(acknowledged=step)
                    if step >= task.get("stop_at", task["steps"]):
                        task["stop_at"] = task["steps"]
                        os.kill(os.getpid(), signal.SIGSTOP)
        except DeltackptError as error:
            tell(error=error.code, text=str(error))
            raise
        tell(acknowledged=run.step if manager.wait_appended() else 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], json.loads(sys.argv[2]))
