# SPDX-License-Identifier: Apache-2.0
"""Dense leaves as blocks: copied when a save is captured, encoded relative to its parent.

A base stores them losslessly in Orbax's layout; a delta stores blocks in deltackpt's item. Their
decoded values are the *reference* of the next delta: see ``dense_references``. If the parent has no
reference, a delta contains whole leaves.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deltackpt.errors import UnsupportedLeaf
from deltackpt.format import dense_blocks
from deltackpt.format.dense_blocks import BLOCK, Key
from deltackpt.format.manifest import DenseLeaf, RollingShare, SaveId, path_name
from deltackpt.save import coded_dense, dense_layout, device_blocks
from deltackpt.save.coded_dense import CodedDense, TakenValue
from deltackpt.save.dense import DenseLeaves
from deltackpt.save.dense_coding import Coding
from deltackpt.save.dense_layout import Chunk
from deltackpt.save.dense_references import Left, References
from deltackpt.state import placement
from deltackpt.storage.ocdbt import ZARRAY, Value

#: Smaller leaves are copied into memory of their own: staging has whole MiB.
_STAGED_BYTES = 1 << 20


class TakenDense:
    """The dense leaves of this process, independent of later training steps."""

    def __init__(self, values: Sequence[TakenValue], plan: dense_layout.Plan, keeper: DenseKeeper):
        """Created by ``DenseKeeper.take``."""
        self.values = values
        self.plan = plan
        self._keeper = keeper

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all values."""
        return sum(value.data.nbytes for value in self.values)

    def as_item(self, save_id: SaveId) -> DenseLeaves:
        """Returns the item of a base in Orbax's layout; its commit makes the leaves references."""
        references = self._keeper.references
        decoded = {(value.file, value.key): value.data for value in self.values}
        references.stage(save_id, Left(decoded, self._counts()))
        values = [
            Value(value.key, bytes(value.data) if value.shape is None else value.array)
            for value in self.values
            if not value.file
        ]
        return DenseLeaves(self.plan, values, references.staging, [])

    def coded(
        self,
        parent: SaveId | None,
        save_id: SaveId,
        pool: concurrent.futures.Executor,
        *,
        rolling: RollingShare | None = None,
    ) -> CodedDense:
        """Returns the delta's values, encoded relative to its parent.

        Args:
          parent: the delta's parent.
          save_id: the delta's save id.
          pool: encodes.
          rolling: the delta's share of a rolling base.
        """
        references, counts = self._keeper.references, self._counts()
        left = references.of(parent).of(counts)
        found = coded_dense.encode(
            self.values,
            left.data,
            pool,
            skip_unchanged=self._keeper.skip_unchanged,
            hashes=left.hashes,
            rolling=rolling,
        )
        decoded = {(one.taken.file, one.taken.key): one.decoded for one in found}
        references.stage(save_id, Left(decoded, counts))
        self.release()
        return CodedDense(found)

    def release(self) -> None:
        """Releases the memory that no save needs. Idempotent."""
        self._keeper.references.done_with(value.data for value in self.values)

    def _counts(self) -> dict[Key, int]:
        return {(value.file, value.key): value.count for value in self.values}


class DenseKeeper:
    """Copies dense leaves for saves, and keeps their decoded values; thread-safe."""

    def __init__(
        self,
        coding_of: Callable[[DenseLeaf, Any], Coding],
        *,
        max_reference_bytes: int,
        skip_unchanged: bool,
    ):
        """Keeps nothing yet.

        Args:
          coding_of: how the leaf at a path is encoded in deltas.
          max_reference_bytes: host memory for references, over all saves that are kept.
          skip_unchanged: whether to omit unchanged blocks from deltas.
        """
        self.skip_unchanged = skip_unchanged
        self.references = References(max_reference_bytes, hashed=skip_unchanged)
        self._coding_of = coding_of

    def take(self, tree: Any, leaves: Sequence[DenseLeaf], process: int) -> TakenDense:
        """Copies the dense leaves of this process; waits for accelerators.

        Args:
          tree: nested containers of leaves, as they are stored.
          leaves: their paths in the state.
          process: index of this process.

        Raises:
          UnsupportedLeaf: Orbax's handler has to write them.
        """
        return self._taken(tree, leaves, process, {})

    def _taken(
        self,
        tree: Any,
        leaves: Sequence[DenseLeaf],
        process: int,
        held: Mapping[str, np.ndarray],
    ) -> TakenDense:
        """See ``take``; copies no chunks that are already in memory, except those on devices."""
        plan = dense_layout.plan(tree, process)
        named = self._named(leaves, plan)
        chunks = []
        for chunk in plan.chunks:
            there = chunk.on_host or self._stays(chunk, named)
            if not there and chunk.key not in held:
                chunk = chunk._replace(source=placement.host_copy(chunk.source))
            chunks.append(chunk)
        values = [_plain(name, text.encode(), file=True) for name, text in plan.files.items()]
        values += [_plain(key, data) for key, data in plan.described.items()]
        try:
            for chunk in chunks:
                values.append(self._copied(chunk, named, held.get(chunk.key)))
        except BaseException:
            self.references.done_with(value.data for value in values)
            raise
        taken = TakenDense(values, plan, self)
        self.references.copied(taken.nbytes)
        return taken

    def adopt(
        self,
        save_id: SaveId,
        tree: Any,
        leaves: Sequence[DenseLeaf],
        process: int,
        described: Mapping[str, bytes],
        held: Mapping[str, np.ndarray],
    ) -> None:
        """Makes a restored state the reference of its step.

        Args:
          save_id: id of the step.
          tree: as for ``take``, with the restored (decoded) values.
          leaves: as for ``take``.
          process: as for ``take``.
          described: ``.zarray`` keys of the step, and their values. A leaf whose chunks differ now,
            because the topology changed, is not a reference.
          held: chunks of the step in memory that is never written, (bytes,) uint8, by key; they are
            not copied. jax may alias them, and does not write to them even if arrays are donated.
        """
        try:
            changed = {
                key.removesuffix(f"/{ZARRAY}")
                for key, data in dense_layout.described(tree).items()
                if described.get(key) != data
            }
            same = {key: data for key, data in held.items() if _name_of(key) not in changed}
            taken = self._taken(tree, leaves, process, same)
        except UnsupportedLeaf:
            return
        kept = [
            value
            for value in taken.values
            if value.shape is not None and _name_of(value.key) not in changed
        ]
        left = Left(
            {(False, value.key): value.data for value in kept},
            {(False, value.key): value.count for value in kept},
        )
        self.references.stage(save_id, left)
        self.references.committed(save_id, save_id)
        taken.release()

    def _named(
        self, leaves: Sequence[DenseLeaf], plan: dense_layout.Plan
    ) -> dict[str, tuple[str, Coding]]:
        """Returns name in Orbax's database to the path of the leaf, and its coding."""
        dtypes_of = {_name_of(chunk.key): chunk.source.dtype for chunk in plan.chunks}
        found = {}
        for leaf in leaves:
            name = ".".join(leaf.key)
            if name in dtypes_of:
                found[name] = path_name(leaf.path), self._coding_of(leaf, dtypes_of[name])
        return found

    def _stays(self, chunk: Chunk, named: Mapping[str, tuple[str, Coding]]) -> bool:
        """Returns whether a chunk is encoded on its device."""
        source = chunk.source
        if chunk.on_host or dense_blocks.is_plain(source.nbytes, source.dtype.name):
            return False
        _, coding = named.get(_name_of(chunk.key), ("", Coding()))
        return device_blocks.takes(coding.codec, source.dtype.name)

    def _copied(
        self,
        chunk: Chunk,
        named: Mapping[str, tuple[str, Coding]],
        held: np.ndarray | None = None,
    ) -> TakenValue:
        name = _name_of(chunk.key)
        leaf, coding = named.get(name, (name, Coding()))
        if self._stays(chunk, named):
            data, shape = device_blocks.take(chunk.source, chunk.window)
            dtype = np.dtype(chunk.source.dtype)
            return TakenValue(chunk.key, False, data, math.prod(shape), shape, dtype, coding, leaf)
        if held is not None and (data := _whole_blocks(held, chunk)) is not None:
            dtype = data.dtype
            return TakenValue(chunk.key, False, data, data.size, chunk.shape, dtype, coding, leaf)
        found = np.asarray(chunk.source)[chunk.window]
        if dense_blocks.is_plain(found.nbytes, found.dtype.name) or not found.dtype.isnative:
            data = np.frombuffer(found.tobytes(), np.uint8)
            shape = found.shape
            return TakenValue(chunk.key, False, data, data.size, shape, found.dtype, coding, leaf)
        count = found.size
        shape = (dense_blocks.blocks_of(count), BLOCK)
        if found.nbytes < _STAGED_BYTES:
            data = np.empty(shape, found.dtype)
        else:
            data = self.references.buffer(shape, found.dtype)
        flat = data.reshape(-1)
        np.copyto(flat[:count].reshape(found.shape), found)
        flat[count:] = 0
        return TakenValue(chunk.key, False, data, count, found.shape, found.dtype, coding, leaf)


def _name_of(key: str) -> str:
    """Returns the name of a chunk's array."""
    return key.rpartition("/")[0]


def _whole_blocks(held: np.ndarray, chunk: Chunk) -> np.ndarray | None:
    """Returns a chunk as (blocks, 256); None if it does not fill them, or is plain."""
    dtype, nbytes = (
        np.dtype(chunk.source.dtype),
        math.prod(chunk.shape) * chunk.source.dtype.itemsize,
    )
    if held.nbytes != nbytes or nbytes % (BLOCK * dtype.itemsize):
        return None
    if dense_blocks.is_plain(nbytes, dtype.name) or not dtype.isnative:
        return None
    return held.view(dtype).reshape(-1, BLOCK)


def _plain(key: str, data: bytes, *, file: bool = False) -> TakenValue:
    found = np.frombuffer(data, np.uint8)
    return TakenValue(key, file, found, len(data), None, found.dtype, Coding())
