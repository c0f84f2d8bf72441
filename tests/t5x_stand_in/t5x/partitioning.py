# SPDX-License-Identifier: Apache-2.0
"""Placement of leaves."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec


@dataclasses.dataclass
class DataLayout:
    """The shard of the data that a process reads."""

    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


class BasePartitioner:
    """Tables by rows over the axis ``model``; everything else is replicated."""

    def __init__(self, num_partitions):
        devices = np.asarray(jax.devices()).reshape(-1, num_partitions)
        self.mesh = Mesh(devices, ("data", "model"))

    def get_data_layout(self, batch_size=None, host_index=None):
        """Returns the layout of a single process."""
        del host_index
        return DataLayout(batch_size or 1, 0, 1, True)

    def get_mesh_axes(self, train_state):
        """Returns the state with a ``PartitionSpec`` for each leaf."""
        return train_state.mapped(
            lambda name, leaf: (
                PartitionSpec("model", None)
                if name.endswith("/embedding") and len(leaf.shape) == 2
                else PartitionSpec()
            )
        )
