# SPDX-License-Identifier: Apache-2.0
"""Hybrid parallelism: tables sharded by rows over all devices, batches by samples, MLPs replicated.

Each device holds a range of rows of every table, with their accumulators and stamps, and a copy of
both MLPs. It computes the gradients of its share of the batch; XLA inserts the exchange.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dlrm_jax.data import Batch

_AXIS = "devices"


class Placement:
    """The shardings of a run over a mesh of one axis.

    Attributes:
      mesh: the devices of all processes.
      split: sharding along the first axis: rows of tables, samples of a batch.
      whole: fully replicated sharding.
    """

    def __init__(self, mesh: Mesh):
        """Derives the shardings from a mesh."""
        self.mesh = mesh
        self.split = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
        self.whole = NamedSharding(mesh, PartitionSpec())

    @classmethod
    def over_all_devices(cls) -> Placement:
        """Returns the placement over every device of every process.

        Its axis is ``Auto``: the step constrains the sharding of its results, and XLA does the
        rest.
        """
        mesh = jax.make_mesh((jax.device_count(),), (_AXIS,), axis_types=(AxisType.Auto,))
        return cls(mesh)

    def batch(self, batch: Batch) -> Batch:
        """Returns the batch as global arrays: samples sharded, ids replicated.

        A device looks its rows up for all samples, so it needs every id.

        Args:
          batch: the complete batch, equal in every process; its size is a multiple of the device
            count.
        """

        def placed(array: np.ndarray, sharding: NamedSharding) -> Any:
            return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

        return Batch(
            numeric=placed(batch.numeric, self.split),
            ids={name: placed(ids, self.whole) for name, ids in batch.ids.items()},
            labels=placed(batch.labels, self.split),
        )
