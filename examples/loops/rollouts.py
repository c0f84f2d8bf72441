# SPDX-License-Identifier: Apache-2.0
"""A rollout process that acts with the newest weights that the trainer has saved.

Each line on its standard input requests a batch, which it returns as a line of JSON. Started by
``policy_loop.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from deltackpt import serving
from loops import policy

_READY_SECS = 120.0


def main() -> None:
    """Serves requests until its input ends."""
    parser = argparse.ArgumentParser(description="A rollout process.")
    parser.add_argument("--directory", required=True, help="checkpoint directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=512)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    key = jax.random.key(options.seed)
    with serving.follow(options.directory, policy.WEIGHTS, poll_secs=0.02) as live:
        live.wait_ready(_READY_SECS)
        for number, _ in enumerate(sys.stdin):
            with live.version() as version:
                weights = jax.device_put(version.dense.tree()["rollout"])
                contexts = rng.integers(0, policy.CONTEXTS, options.batch).astype(np.int32)
                actions = policy.act(weights, jax.random.fold_in(key, number), contexts)
                answer = {
                    "step": version.step,
                    "digest": policy.digest_of(version.dense),
                    "bytes_read": version.dense.bytes_read,
                    "weight_bytes": version.dense.nbytes,
                    "contexts": contexts.tolist(),
                    "actions": np.asarray(actions).tolist(),
                }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
