# SPDX-License-Identifier: Apache-2.0
"""Exports a step in the safetensors format, with Hugging Face's conventions for shards."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from deltackpt import inspect
from deltackpt.__about__ import __version__
from deltackpt.errors import OptionError
from deltackpt.format import dtypes
from deltackpt.format.dtypes import SafetensorsTensor
from deltackpt.inspect import DenseLeaf, LazyArray, Step
from deltackpt.inspect.dense_items import PLACEHOLDERS
from deltackpt.interchange.target import Exported, chosen, exported, local_path, published, widened
from deltackpt.options import KafkaWal
from deltackpt.reading.reader import Progress, ProgressMeter

_SHARD_BYTES = 4 << 30
_WITHOUT_TENSOR = (*PLACEHOLDERS, "string")


@dataclasses.dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor of the export, named by path; ``dtype`` is wider if the format lacks the leaf's."""

    name: str
    array: LazyArray | DenseLeaf
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.array.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[np.ndarray]:
        """Yields its elements in order, a moderate number of rows at a time."""
        if not isinstance(self.array, LazyArray):
            yield np.asarray(self.array)
            return
        for rows in self.array.batches():
            yield self.array.rows(rows)


def export_safetensors(
    directory: str | os.PathLike[str],
    step: int | None,
    target: str | os.PathLike[str],
    *,
    item: str | None = None,
    leaves: str | Sequence[str] = "**",
    shard_bytes: int = _SHARD_BYTES,
    wal: KafkaWal | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes tables, slots and dense leaves of a step as safetensors files.

    Tensors are named by '/'-joined path. The target holds ``model.safetensors``, or
    ``model-00001-of-0000N.safetensors`` ... and ``model.safetensors.index.json``. Each file's
    metadata records step, save id and version. Types that the format lacks are widened without
    loss: 4-bit and 2-bit integers to 8 bits, rare 8-bit floats to ``float32``. Typed PRNG keys are
    stored as their ``uint32`` data; None, strings and empty containers are left out.

    Needs memory for some rows and for the largest dense leaf; every byte is verified when it is
    read.

    Args:
      directory: the checkpoint directory.
      step: the step; None for the newest.
      target: the new directory; it appears complete or not at all.
      item: name of the deltackpt item in the steps; detected by default.
      leaves: globs over the '/'-joined paths of the tables, slots and dense leaves to export.
      shard_bytes: maximum bytes of tensors per file; a larger tensor gets its own file.
      wal: how to read WAL records in Kafka, such as ``KafkaWal(config=...)``.
      progress: called with the bytes written so far and the total.

    Raises:
      OptionError: ``shard_bytes`` is not positive, a glob matches no leaf, or a leaf's dtype cannot
        be widened.
      TargetExists: the target exists.
      RestoreError: the step is not readable.
      OutOfSpace, StorageError: the file system reported an error.
    """
    if shard_bytes < 1:
        raise OptionError(f"shard_bytes: expected at least 1, found {shard_bytes}")
    goal = local_path(target)
    with inspect.open(directory, item=item, wal=wal) as checkpoints:
        found = checkpoints.at(step)
        wanted = chosen(found, leaves)
        left_out = [name for name in wanted & {*found.dense} if found.dense[name].kind == "string"]
        tensors = sorted(_tensors(found, wanted), key=lambda tensor: tensor.name)
        total = sum(tensor.nbytes for tensor in tensors)
        metadata = {
            "format": "np",
            "step": str(found.step),
            "save_id": found.save_id,
            "deltackpt": __version__,
        }
        shards = _shards(tensors, shard_bytes)
        count = ProgressMeter(progress, total).add
        with published(goal, needed_bytes=total) as temporary:
            weight_map = {}
            for number, shard in enumerate(shards, start=1):
                suffix = "" if len(shards) == 1 else f"-{number:05}-of-{len(shards):05}"
                name = f"model{suffix}.safetensors"
                with open(temporary / name, "wb") as file:
                    _write(file, shard, metadata, count)
                weight_map.update({tensor.name: name for tensor in shard})
            if len(shards) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                text = json.dumps(index, indent=2) + "\n"
                (temporary / "model.safetensors.index.json").write_text(text)
    changed = {
        tensor.name: tensor.dtype.name for tensor in tensors if tensor.dtype != tensor.array.dtype
    }
    return exported(goal, found.step, left_out=left_out, changed=changed)


def _tensors(step: Step, wanted: Collection[str]) -> Iterator[_Tensor]:
    for table in step.tables.values():
        for field, path in table.leaves.items():
            if path in wanted:
                array = table.field(field)
                yield _Tensor(path, array, _stored_dtype(path, array.dtype))
    for name, leaf in step.dense.items():
        if name in wanted and leaf.kind not in _WITHOUT_TENSOR:
            yield _Tensor(name, leaf, _stored_dtype(name, leaf.dtype))


def _stored_dtype(name: str, dtype: np.dtype) -> np.dtype:
    if name == dtypes.METADATA:
        raise OptionError(
            f"{name}: expected another leaf name, found the name of safetensors' metadata entry; "
            "rename the leaf, or export to Orbax"
        )
    if (stored := widened(dtype, dtypes.NAMES)) is not None:
        return stored
    raise OptionError(
        f"{name}: expected a dtype that safetensors supports, found {dtype.name}; cast the leaf "
        "before you save it, or export to Orbax"
    )


def _shards(tensors: Sequence[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    """Assigns tensors to files in order; a file is closed when the next tensor does not fit."""
    shards: list[list[_Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    return shards


def _write(
    file: BinaryIO,
    shard: Sequence[_Tensor],
    metadata: Mapping[str, str],
    count: Callable[[int], None],
) -> None:
    # Wide types first, so that each tensor is aligned.
    ordered = sorted(shard, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    listed = {one.name: SafetensorsTensor(one.dtype, tuple(one.array.shape)) for one in ordered}
    file.write(dtypes.safetensors_header(listed, metadata))
    for tensor in ordered:
        for piece in tensor.pieces():
            data = np.ascontiguousarray(piece.astype(tensor.dtype, copy=False))
            file.write(data.reshape(-1).view(np.uint8).data)
            count(data.nbytes)
