# SPDX-License-Identifier: Apache-2.0
"""A trainer with a WAL in Kafka, for tests that kill or stop it.

usage: kafka_trainee.py DIRECTORY TASK, a JSON object: topic, config, chunk_bytes, save_every, steps

It restores the newest state, checks it, and trains. Each line of its output is JSON: what was
restored, the steps that were appended, and those that were acknowledged.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import deltackpt
from deltackpt.errors import DeltackptError
from deltackpt.testing import states
from deltackpt.testing.training_run import TrainingRun
from deltackpt.wal import KafkaWal


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
                    tell(acknowledged=recovery if isinstance(recovery, int) else recovery.step)
        except DeltackptError as error:
            tell(error=error.code, text=str(error))
            raise
        tell(acknowledged=run.step if manager.wait_appended() else 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], json.loads(sys.argv[2]))
