# SPDX-License-Identifier: Apache-2.0
"""A policy gradient loop that streams its weights to rollout processes through checkpoints.

The trainer saves every step; each rollout process follows the bf16 weights and reads only what
changed. For every batch of rollouts, the demo checks that its weights equal the trainer's weights
at that step, bit for bit.

python examples/loops/policy_loop.py python examples/loops/policy_loop.py --workers 2 --steps 100
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
    """Runs the command line; returns 0 if all weights were equal."""
    parser = argparse.ArgumentParser(description="Streams weights to rollout processes.")
    parser.add_argument("--directory", type=Path, help="checkpoints; default: temporary")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=1, help="rollout processes")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="policy-loop-") as place:
        directory = options.directory or Path(place, "checkpoints")
        return 0 if run(directory, options.steps, options.workers, Console(highlight=False)) else 1


def run(directory: Path, steps: int, workers: int, console: Console) -> bool:
    """Trains, and prints what the rollouts used; returns whether it matched the trainer."""
    state = policy.first_state(jax.random.key(0))
    marks = deltackpt.touched.init({"visits": state["visits"]})
    manager = deltackpt.CheckpointManager(
        directory,
        handlers={"embeddings": deltackpt.Tables(select="visits", slots={})},
        options=deltackpt.ManagerOptions(
            dense=deltackpt.Dense(deltas="blocks"),
            deltas=deltackpt.DeltaOptions(policy=deltackpt.policies.Consecutive(max_chain=20)),
            max_to_keep=4,
        ),
    )
    digests: dict[int, str] = {}
    answers: list[dict[str, Any]] = []
    with manager:

        def save(step: int) -> None:
            digests[step] = policy.digest_of(by_name(state["rollout"]))
            manager.save(step, state, touched=marks)

        save(0)
        manager.wait_until_finished()
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
    """Returns the rollout weights by the paths under which a follower sees them."""
    return {f"rollout/{name}": np.asarray(leaf) for name, leaf in weights.items()}


def started(directory: Path, seed: int) -> subprocess.Popen[str]:
    """Starts a rollout process."""
    script = Path(__file__).with_name("rollouts.py")
    return subprocess.Popen(
        [sys.executable, script, f"--directory={directory}", f"--seed={seed}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def asked(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Requests a batch from a rollout process."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"a rollout process exited with status {process.wait()}")
    return json.loads(answer)


def batch_of(answers: list[dict[str, Any]]) -> Rollouts:
    """Combines the batches of several processes, with rewards."""
    contexts = np.concatenate([np.array(one["contexts"], np.int32) for one in answers])
    actions = np.concatenate([np.array(one["actions"], np.int32) for one in answers])
    return Rollouts(contexts, actions, policy.rewards(contexts, actions))


def reported(answers: list[dict[str, Any]], digests: dict[int, str], console: Console) -> bool:
    """Prints how much was read and whether all weights were equal; returns the latter."""
    equal = all(digests[one["step"]] == one["digest"] for one in answers)
    first = batch_of(answers[: len(answers) // 10 or 1]).rewards.mean()
    last = batch_of(answers[-(len(answers) // 10 or 1) :]).rewards.mean()
    whole = answers[0]["weight_bytes"]
    # A process may answer several times with one version.
    read = {one["step"]: one["bytes_read"] for one in answers if one["bytes_read"] < whole}
    steps = {one["step"] for one in answers}
    table = Table("rollouts with streamed bf16 weights", "", box=box.SIMPLE_HEAD)
    table.add_row("batches, and distinct weight versions used", f"{len(answers)}, {len(steps)}")
    table.add_row("mean reward, first and last tenth", f"{first:.3f}, {last:.3f}")
    table.add_row("all weights", size(whole))
    if read:
        mean = sum(read.values()) / len(read)
        table.add_row("bytes read per version, mean", f"{size(int(mean))}, 1/{whole / mean:.0f}")
    table.add_row("bit-exact with the trainer at that step", "yes" if equal else "[red]NO")
    console.print(table)
    return equal


if __name__ == "__main__":
    sys.exit(main())
