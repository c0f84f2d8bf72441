# SPDX-License-Identifier: Apache-2.0
"""Synthetic clicks of users on items, each with its index, and two Grain pipelines over them."""

from __future__ import annotations

from typing import Any, Literal

import grain
import numpy as np
from absl import flags

USERS, ITEMS = 3000, 5000
SAMPLES, BATCH = 1280, 32
STEPS_PER_EPOCH = SAMPLES // BATCH

Pipeline = Literal["dataset", "loader"]


class Clicks:
    """Samples by index; a user clicks on items of the same parity.

    Grain compares the ``repr`` of a source when a ``DataLoader`` resumes, so it must not contain a
    memory address.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self._users = rng.integers(0, USERS, SAMPLES).astype(np.int32)
        self._items = rng.integers(0, ITEMS, SAMPLES).astype(np.int32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> dict[str, Any]:
        user, item = self._users[index], self._items[index]
        label = np.float32((user + item) % 2 == 0)
        return {"sample": np.int32(index), "user": user, "item": item, "label": label}

    def __repr__(self) -> str:
        return f"Clicks({SAMPLES})"


def batches(pipeline: Pipeline, *, epochs: int, workers: int = 0, seed: int = 1) -> Any:
    """Returns an iterator over shuffled batches, with every sample once per epoch.

    Args:
      pipeline: ``"dataset"`` for Grain's ``MapDataset`` with prefetching threads; ``"loader"`` for
        Grain's ``DataLoader``.
      epochs: number of epochs.
      workers: number of prefetching processes; 0 for none.
      seed: seed of the shuffle.

    Returns:
      An iterator over dicts of arrays, each (BATCH,).
    """
    if workers:
        # Grain's workers receive absl's flags, which a script without absl never parses.
        flags.FLAGS.mark_as_parsed()
    if pipeline == "loader":
        sampler = grain.samplers.IndexSampler(
            SAMPLES,
            shard_options=grain.sharding.NoSharding(),
            shuffle=True,
            num_epochs=epochs,
            seed=seed,
        )
        operations = [grain.transforms.Batch(BATCH, drop_remainder=True)]
        return iter(
            grain.DataLoader(
                data_source=Clicks(),
                sampler=sampler,
                operations=operations,
                worker_count=workers,
            )
        )
    dataset = grain.MapDataset.source(Clicks()).shuffle(seed).repeat(epochs)
    ahead = dataset.batch(BATCH, drop_remainder=True).to_iter_dataset()
    if workers:
        ahead = ahead.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    return iter(ahead)
