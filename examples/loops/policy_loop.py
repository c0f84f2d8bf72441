# SPDX-License-Identifier: Apache-2.0
"""A loop of policy gradients whose weights stream to rollout processes through its checkpoints.

The trainer saves every step; each rollout process follows the bf16 weights and reads only what
changed. Whatever step a batch of rollouts was made by, its weights are proved to be those that the
trainer had at that step, bit for bit.

python examples/loops/policy_loop.py
python examples/loops/policy_loop.py --workers 2 --steps 100
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from running.journal import size

import deltackpt
from loops import policy
from loops.policy import Rollouts


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 0 where all weights were equal."""
    parser = argparse.ArgumentParser(description="Streams weights to rollout processes.")
    parser.add_argument("--directory", type=Path, help="of the checkpoints; a temporary one")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=1, help="rollout processes")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="policy-loop-") as place:
        directory = options.directory or Path(place, "checkpoints")
        return 0 if run(directory, options.steps, options.workers, Console(highlight=False)) else 1


def run(directory: Path, steps: int, workers: int, console: Console) -> bool:
    """Trains, and says what the rollouts used; whether it was what the trainer had."""
    state = policy.first_state(jax.random.key(0))
    marks = deltackpt.touched.init({"visits": state["visits"]})
    manager = deltackpt.CheckpointManager(
        directory,
        handlers={"embeddings": deltackpt.Tables(select="visits", slots={})},
        options=deltackpt.ManagerOptions(
            dense=deltackpt.Dense(deltas="own"),
            deltas=deltackpt.DeltaOptions(policy=deltackpt.Consecutive(max_chain=20)),
            retention=4,
        ),
    )
    digests: dict[int, str] = {}
    answers: list[dict[str, Any]] = []
    with manager:

        def save(step: int) -> None:
            digests[step] = policy.digest_of(by_name(state["rollout"]))
            manager.save(step, state, touched=marks)

        save(0)
        manager.wait()
        processes = [started(directory, seed) for seed in range(workers)]
        try:
            for step in range(1, steps + 1):
                found = [asked(one) for one in processes]
                answers += found
                seen = batch_of(found)
                state = policy.train_step(state, seen)
                marks = deltackpt.touched.mark(marks, {"visits": seen.contexts})
                save(step)
        finally:
            for one in processes:
                one.communicate()
    return reported(answers, digests, console)


def by_name(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    """The weights of rollouts by the paths that a follower knows them by."""
    return {f"rollout/{name}": np.asarray(leaf) for name, leaf in weights.items()}


def started(directory: Path, seed: int) -> subprocess.Popen[str]:
    """A rollout process."""
    script = Path(__file__).with_name("rollouts.py")
    return subprocess.Popen(
        [sys.executable, script, f"--directory={directory}", f"--seed={seed}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def asked(process: subprocess.Popen[str]) -> dict[str, Any]:
    """A batch of a rollout process."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"a rollout process ended with status {process.wait()}")
    return json.loads(answer)


def batch_of(answers: list[dict[str, Any]]) -> Rollouts:
    """What several processes did, with its rewards."""
    contexts = np.concatenate([np.array(one["contexts"], np.int32) for one in answers])
    actions = np.concatenate([np.array(one["actions"], np.int32) for one in answers])
    return Rollouts(contexts, actions, policy.rewards(contexts, actions))


def reported(answers: list[dict[str, Any]], digests: dict[int, str], console: Console) -> bool:
    """Prints what was moved and proved; whether all weights were equal."""
    equal = all(digests[one["step"]] == one["digest"] for one in answers)
    first = batch_of(answers[: len(answers) // 10 or 1]).rewards.mean()
    last = batch_of(answers[-(len(answers) // 10 or 1) :]).rewards.mean()
    whole = answers[0]["weight_bytes"]
    # A process may answer several times by one version.
    read = {one["step"]: one["bytes_read"] for one in answers if one["bytes_read"] < whole}
    steps = {one["step"] for one in answers}
    table = Table("rollouts by streamed bf16 weights", "", box=box.SIMPLE_HEAD)
    table.add_row(
        "batches, and the versions that they were made by", f"{len(answers)}, {len(steps)}"
    )
    table.add_row("mean reward, of the first and the last tenth", f"{first:.3f}, {last:.3f}")
    table.add_row("all weights", size(whole))
    if read:
        mean = sum(read.values()) / len(read)
        table.add_row("read for a version, on average", f"{size(int(mean))}, 1/{whole / mean:.0f}")
    table.add_row("bit for bit what the trainer had at that step", "yes" if equal else "[red]NO")
    console.print(table)
    return equal


if __name__ == "__main__":
    sys.exit(main())
