# SPDX-License-Identifier: Apache-2.0
"""One process of a job: writes a tree with stock Orbax, and its share of it with deltackpt.

Arguments: process index, process count, the coordinator's port, a directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from written import write_dense

number, count, port = map(int, sys.argv[1:4])
root = Path(sys.argv[4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"127.0.0.1:{port}"
jax.distributed.initialize(address, count, number, coordinator_bind_address=address)
mesh = Mesh(np.array(jax.devices()).reshape(count, -1), ("x", "y"))


def put(array, *spec):
    """Shards an array that every process has."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


rows = np.arange(32.0, dtype=np.float32).reshape(16, 2)
tree = {
    "replicated": put(rows),
    "partly": put(rows, "x"),
    "crosswise": put(rows, "y"),
    "split": put(rows, "x", "y"),
    "odd": put(np.arange(15).reshape(3, 5)),
    "scalar": put(np.float32(3) * np.ones(())),
    "host": np.arange(4),
    "text": "hi",
    "number": 3,
}
handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
with ocp.CheckpointManager(root / "stock", item_handlers={"dense": handler}) as manager:
    manager.save(0, args=ocp.args.Composite(dense=ocp.args.PyTreeSave(tree)))
item = root / "ours"
item.mkdir(exist_ok=True)
write_dense(item, tree, meet=lambda: multihost_utils.sync_global_devices("written"))
multihost_utils.sync_global_devices("merged")
