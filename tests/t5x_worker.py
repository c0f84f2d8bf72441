# SPDX-License-Identifier: Apache-2.0
"""One process of a multi-process T5X job, controlled by a test; see ``many.py``.

It creates the manager like T5X, with T5X's partitioner, train state and data iterator. The state
depends only on the step, as in ``many_worker.py``.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import many_worker
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import seqio
    import tensorflow as tf
    from flax import traverse_util
    from t5x import adafactor, checkpoints, models, partitioning, utils
    from t5x.examples.t5 import network

    from deltackpt.integrations import t5x as deltackpt_t5x

import deltackpt
from deltackpt.integrations.t5x import layout as t5x_layout
from deltackpt.ledger import directory
from deltackpt.options import Timeouts

TABLE = "target/token_embedder/embedding"
#: Enough that each process writes some of a replicated table.
ROWS = 1024
#: Rows of a batch, over all processes.
BATCH = 4


def changed(step: int) -> list[int]:
    """Rows of the table that a step changes."""
    return sorted({7 * step % ROWS, (7 * step + ROWS // 2) % ROWS})


class Worker(many_worker.Worker):
    """Commands of a T5X process; ``join``, ``arm`` and others are inherited."""

    def __init__(self, task: dict[str, Any], link: many_worker.Link):
        self._task, self._link = task, link
        self._manager: Any = None
        self._data: Any = None
        self._step = 0

    def open(
        self,
        model_dir: str,
        partitions: int = 1,
        reads: bool = False,
        data: bool = False,
        stock: bool = False,
        dtype: str | None = "float32",
    ) -> None:
        """Creates the manager like T5X's launcher.

        Args:
          model_dir: T5X's model directory.
          partitions: ``num_partitions`` of the partitioner.
          reads: whether this is an evaluation job, which has no save configuration.
          data: whether the data position is saved and restored.
          stock: whether to use T5X's own manager instead.
          dtype: dtype of the save and restore configurations.
        """
        self._partitioner = partitioning.PjitPartitioner(
            num_partitions=partitions,
            logical_axis_rules=partitioning.standard_logical_axis_rules(),
        )
        self._initializer = _initializer(self._partitioner)
        self._data = self._iterator() if data else None
        manager_cls = checkpoints.OrbaxCheckpointManagerInterface
        if not stock:
            manager_cls = deltackpt_t5x.checkpoint_manager(
                options=deltackpt.ManagerOptions(timeouts=Timeouts(processes_secs=60.0)),
            )
        self._manager = manager_cls(
            directory=model_dir,
            train_state=self._initializer.global_train_state_shape,
            partitioner=self._partitioner,
            dataset_iterator=self._data,
            save_dtype=None if reads else dtype,
            restore_dtype=dtype,
            period=None if reads else 1,
        )

    def limit(self, processes_secs: float) -> None:
        """Sets how long later saves wait for other processes."""
        options = self._manager._writer.options
        timeouts = dataclasses.replace(options.timeouts, processes_secs=processes_secs)
        self._manager._writer._run.options = dataclasses.replace(options, timeouts=timeouts)

    def start(self, step: int = 0) -> None:
        """Starts at a step, without a checkpoint."""
        self._step = step

    def train(self, to: int) -> None:
        """Trains up to step ``to``; each step consumes a batch."""
        for _ in range(self._step, to):
            if self._data is not None:
                next(self._data)
        self._step = to

    def save(self) -> dict[str, Any]:
        """Saves the state and waits, like T5X."""
        taken = self._manager.save(self._placed(self._step))
        self._manager.wait_until_finished()
        return {"taken": taken}

    def settle(self) -> None:
        """Waits until the save in flight is committed."""
        self._manager._writer.wait_until_finished()

    def restore(
        self, path: str | None = None, step: int | None = None, renames: bool = False
    ) -> dict[str, Any]:
        """Restores like T5X.

        Args:
          path: the checkpoint, or the model directory for the newest that T5X lists.
          step: the step, instead of a path.
          renames: whether a transformation replaces one leaf with another.
        """
        if path is not None and not Path(path).name.startswith("checkpoint_"):
            config = utils.RestoreCheckpointConfig(path=path, mode="latest")
            _, [path] = utils.get_first_valid_restore_config_and_paths([config])
        state = self._manager.restore(
            path=path, step=step, state_transformation_fns=[_renamed] if renames else []
        )
        self._step = int(checkpoints.get_local_data(state.step))
        return {"step": self._step, "wrong": self._wrong(state, renames)}

    def steps(self) -> dict[str, Any]:
        """The steps that T5X's manager lists."""
        steps = self._manager.all_steps()
        return {"steps": [int(step) for step in steps], "newest": self._manager.latest_step()}

    def position(self) -> dict[str, Any]:
        """How many batches this process has consumed, according to the next one."""
        [shard, *_] = (s.data for s in next(self._data)["number"].addressable_shards)
        found = self._partitioner.get_data_layout(BATCH)
        batches, rest = divmod(int(shard[0]), BATCH)
        assert rest == found.shard_id * (BATCH // found.num_shards)
        return {"batches": batches}

    def hide(self, step: int) -> None:
        """Hides a step from this process, as a network file system may do."""
        for owner, name in (
            (checkpoints, "all_steps"),
            (directory.Root, "steps"),
            (t5x_layout.StepLinks, "steps"),
        ):
            mock.patch.object(owner, name, _without(getattr(owner, name), step)).start()

    def close(self) -> None:
        """Closes the manager."""
        if self._manager is not None:
            self._manager.close()

    # The state.

    def _iterator(self) -> Any:
        found = self._partitioner.get_data_layout(BATCH)
        own = BATCH // found.num_shards
        numbers = tf.data.Dataset.range(100 * BATCH, output_type=tf.int32)
        data = numbers.batch(own).shard(found.num_shards, found.shard_id)
        return utils.prepare_train_iter(
            data.map(lambda batch: {"number": batch}),
            partitioner=self._partitioner,
            checkpoint_cfg=None,
            data_layout=found,
        )

    def _expected(self, step: int) -> dict[str, np.ndarray]:
        leaves: dict[str, np.ndarray] = {}
        for number, (name, leaf) in enumerate(sorted(flat(self._shape).items())):
            values = np.random.default_rng(number).standard_normal(leaf.shape)
            leaves[name] = values.astype(leaf.dtype)
            if name != TABLE and np.issubdtype(leaf.dtype, np.floating):
                leaves[name] += np.asarray(step, leaf.dtype)
        for now in range(1, step + 1):
            leaves[TABLE][changed(now)] += 1
        leaves["state/step"] = np.asarray(step, leaves["state/step"].dtype)
        return leaves

    @property
    def _shape(self) -> Any:
        return self._initializer.global_train_state_shape

    def _sharding(self, name: str) -> jax.sharding.NamedSharding:
        axes = flat(self._partitioner.get_mesh_axes(self._shape))
        return jax.sharding.NamedSharding(
            self._partitioner.mesh, axes.get(name, jax.sharding.PartitionSpec())
        )

    def _placed(self, step: int) -> Any:
        leaves = {
            name: jax.make_array_from_callback(
                leaf.shape, self._sharding(name), lambda index, leaf=leaf: leaf[index]
            )
            for name, leaf in self._expected(step).items()
        }
        whole = traverse_util.flatten_dict(self._shape.state_dict(), keep_empty_nodes=True, sep="/")
        return self._shape.restore_state(traverse_util.unflatten_dict({**whole, **leaves}, sep="/"))

    def _wrong(self, state: Any, renamed: bool) -> str | None:
        """The first leaf whose shards or sharding differ from those of the step."""
        found, expected = flat(state), self._expected(self._step)
        if renamed:
            expected[_TO] = expected[_FROM]
        if found.keys() != expected.keys():
            return f"{sorted(found)}, not {sorted(expected)}"
        for name, leaf in expected.items():
            if not found[name].sharding.is_equivalent_to(self._sharding(name), leaf.ndim):
                return f"{name} lies as {found[name].sharding}"
        return many_worker.difference(found, expected)


def _without(real: Callable[..., list[int]], step: int) -> Callable[..., list[int]]:
    return lambda *arguments: [found for found in real(*arguments) if found != step]


_FROM = "target/encoder/encoder_norm/scale"
_TO = "target/decoder/decoder_norm/scale"


def _renamed(tree: Any, target: Any) -> Any:
    del target
    leaves = traverse_util.flatten_dict(tree, keep_empty_nodes=True, sep="/")
    return traverse_util.unflatten_dict({**leaves, _TO: leaves[_FROM]}, sep="/")


def flat(state: Any) -> dict[str, Any]:
    """Leaves of a train state by their paths."""
    leaves = traverse_util.flatten_dict(state.state_dict(), sep="/")
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def _initializer(partitioner: Any) -> Any:
    """T5X's initializer for a very small T5.1.1."""
    config = network.T5Config(
        vocab_size=ROWS,
        emb_dim=32,
        num_heads=4,
        num_encoder_layers=1,
        num_decoder_layers=1,
        head_dim=4,
        mlp_dim=16,
    )
    optimizer = adafactor.Adafactor(
        decay_rate=0.8, logical_factor_rules=adafactor.standard_logical_factor_rules()
    )
    model = models.EncoderDecoderModel(
        network.Transformer(config), seqio.ByteVocabulary(), seqio.ByteVocabulary(), optimizer
    )
    shapes = {
        name: (BATCH, 4)
        for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    }
    return utils.TrainStateInitializer(optimizer, model.get_initial_variables, shapes, partitioner)


if __name__ == "__main__":
    with mock.patch.object(many_worker, "Worker", Worker):
        many_worker.serve()
