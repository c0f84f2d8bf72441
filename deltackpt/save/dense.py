# SPDX-License-Identifier: Apache-2.0
"""Dense leaves: captured from the training state, then written as an item or into a layer.

A base stores them in Orbax's layout. A delta or a WAL record stores them in its layer: whole, or,
if a ``DenseKeeper`` keeps the decoded values of the parent, only the blocks that changed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltackpt.errors import UnsupportedLeaf
from deltackpt.format.dense_blocks import BLOCK, PLAIN, blocks_of, group_of
from deltackpt.format.manifest import DenseLeaf, RollingShare, SaveId, path_name
from deltackpt.resources.runtime import Runtime
from deltackpt.save import dense_layer, dense_layout, device_blocks
from deltackpt.save.dense_coding import Coding
from deltackpt.save.dense_layer import DenseValue, WrittenDense
from deltackpt.save.dense_layout import Plan
from deltackpt.save.dense_references import Array, Left, References
from deltackpt.save.writers import StepWriters
from deltackpt.state import placement
from deltackpt.storage import ocdbt
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.ocdbt import ZARRAY, Value
from deltackpt.storage.parts import Place

#: Smaller values of one dtype share a buffer, because staging lends whole MiB.
_SHARED_BYTES = 1 << 20
#: Threads share copies of so many bytes at least, in pieces of about so many.
_LARGE_BYTES, _PIECE_BYTES = 8 << 20, 2 << 20
#: Smaller buffers of whole leaves are not taken from staging.
_STAGED_BYTES = 128 << 10


class DenseLeaves:
    """The dense leaves that this process writes, independent of later training steps."""

    def __init__(
        self,
        plan: Plan,
        chunks: Sequence[DenseValue],
        pieces: Mapping[str, Sequence[np.ndarray]],
        runtime: Runtime,
        keeper: DenseKeeper | None,
    ):
        """Created by ``capture``."""
        #: Bytes of all values.
        self.nbytes = sum(value.data.nbytes for value in chunks)
        self.nbytes += sum(map(len, plan.described.values()))
        self.nbytes += sum(len(text.encode()) for text in plan.files.values())
        self.chunks = chunks
        self._plan = plan
        self._pieces = pieces
        self._runtime = runtime
        self._keeper = keeper

    @classmethod
    def capture(cls, tree: Any, process: int, runtime: Runtime) -> DenseLeaves:
        """Copies the values that this process writes, to store them whole; waits for accelerators.

        Args:
          tree: nested containers of leaves.
          process: index of this process.
          runtime: provides the memory for the copies, and encodes them.

        Raises:
          UnsupportedLeaf: Orbax's handler must write the leaves.
        """
        return _captured(dense_layout.plan(tree, process), runtime)

    def write(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """See ``step.Item``: writes a base's item in Orbax's layout, and releases the memory."""
        own = item_dir
        if others.count > 1:
            own = ocdbt.process_directory(item_dir, others.process)
        values = [Value(key, data) for key, data in self._plan.described.items()]
        values += [Value(value.key, value.array) for value in self.chunks]
        try:
            ocdbt.write(own, values, batch, nodes_apart=not others.shared_fs)
        finally:
            del values
            self.release()
        for name, text in self._plan.files.items():
            path = item_dir / name
            batch.make(path.parent)
            batch.write(path, text.encode())

    def values(self) -> Iterator[DenseValue]:
        """Yields all values of the item, in its order."""
        for name, text in self._plan.files.items():
            yield DenseValue.of_bytes(name, text.encode(), file=True)
        for key, data in self._plan.described.items():
            yield DenseValue.of_bytes(key, data)
        yield from self.chunks

    def complete(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """See ``step.Item``."""
        if others.count > 1:
            ocdbt.merge(item_dir, range(others.count), self._plan.described)
            own = {ocdbt.process_directory(item_dir, number) for number in range(others.count)}
            batch.adopt(item_dir, but=own)  # Each digests and forces its own.

    def write_layer(
        self,
        place_of: Callable[[str], Place],
        save_id: SaveId,
        parent: SaveId | None,
        *,
        rolling: RollingShare | None = None,
    ) -> WrittenDense:
        """Writes the segments of a delta or a WAL record, and releases the memory.

        With a keeper, their decoded values become the reference of the next one.

        Args:
          place_of: returns the destination of a segment.
          save_id: id of the save or record.
          parent: the save or record that it may refer to; None to write whole leaves.
          rolling: the delta's share of a rolling base.
        """
        keeper, values = self._keeper, [*self.values()]
        try:
            if keeper is None:
                return dense_layer.write_whole(place_of, values, self._pieces)
            deltas = dense_layer.encode(
                values,
                keeper.references.of(parent),
                self._runtime,
                skip_unchanged=keeper.skip_unchanged,
                rolling=rolling,
            )
            keeper.keep(save_id, values, [delta.decoded for delta in deltas])
        finally:
            self.release()
        return dense_layer.write_changes(place_of, values, deltas)

    def keep(self, save_id: SaveId) -> None:
        """Makes the values of a keeper the reference of a base, once it is committed."""
        assert self._keeper is not None
        values = [*self.values()]
        self._keeper.keep(save_id, values, [value.data for value in values])

    def release(self) -> None:
        """Releases the memory that no save needs. Idempotent."""
        if self._keeper is not None:
            self._keeper.references.release(value.data for value in self.chunks)
        else:
            self._runtime.memory.give_back(itertools.chain(*self._pieces.values()))
        self.chunks, self._pieces = (), {}


class DenseKeeper:
    """Captures dense leaves for blocks, and keeps their decoded values; thread-safe."""

    def __init__(
        self,
        coding_of: Callable[[DenseLeaf, Any], Coding],
        runtime: Runtime,
        *,
        max_reference_bytes: int,
        skip_unchanged: bool,
    ):
        """Keeps nothing yet.

        Args:
          coding_of: how the leaf at a path is encoded in deltas.
          runtime: threads that copy and encode.
          max_reference_bytes: host memory for references, over all saves that are kept.
          skip_unchanged: whether to omit unchanged blocks from deltas.
        """
        self.skip_unchanged = skip_unchanged
        self.references = References(max_reference_bytes, runtime, hashed=skip_unchanged)
        self._coding_of = coding_of

    def capture(
        self,
        tree: Any,
        leaves: Sequence[DenseLeaf],
        process: int,
        given: Mapping[str, np.ndarray] | None = None,
    ) -> DenseLeaves:
        """Copies the dense leaves of this process; waits for accelerators.

        Args:
          tree: nested containers of leaves, as they are stored.
          leaves: their paths in the state.
          process: index of this process.
          given: key to the bytes of chunks in memory that is never written, (n,) uint8; chunks that
            fill their blocks are not copied.

        Raises:
          UnsupportedLeaf: Orbax's handler has to write them.
        """
        plan = dense_layout.plan(tree, process)
        dtypes_of = {_name_of(chunk.key): chunk.source.dtype for chunk in plan.chunks}
        codings = {}
        for leaf in leaves:
            if (name := ".".join(leaf.key)) in dtypes_of:
                codings[name] = path_name(leaf.path), self._coding_of(leaf, dtypes_of[name])
        found = _captured(plan, self.references.runtime, self, codings, given or {})
        self.references.copied(found.nbytes)
        return found

    def keep(self, save_id: SaveId, values: Sequence[DenseValue], decoded: Sequence[Array]) -> None:
        """Makes decoded values the reference of a save, once it is committed."""
        data = {value.item_key: one for value, one in zip(values, decoded, strict=True)}
        self.references.stage(save_id, Left(data, {one.item_key: one.count for one in values}))

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
          tree: as for ``capture``, with the restored (decoded) values.
          leaves: as for ``capture``.
          process: as for ``capture``.
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
            found = self.capture(tree, leaves, process, same)
        except UnsupportedLeaf:
            return
        kept = [value for value in found.chunks if _name_of(value.key) not in changed]
        self.keep(save_id, kept, [value.data for value in kept])
        self.references.committed(save_id, save_id)
        found.release()


def _captured(
    plan: Plan,
    runtime: Runtime,
    keeper: DenseKeeper | None = None,
    codings: Mapping[str, tuple[str, Coding]] | None = None,
    given: Mapping[str, np.ndarray] | None = None,
) -> DenseLeaves:
    """Copies the chunks of a plan.

    Values of the host are copied into blocks, end to end if they are small, so that whole leaves
    are written without another copy. Without a keeper, copies from accelerators stay as they are.

    Args:
      plan: the chunks.
      runtime: provides memory, and threads that copy.
      keeper: keeps the values; None to store them whole.
      codings: name in Orbax's database to the path of the leaf and its coding.
      given: see ``DenseKeeper.capture``.
    """
    codings, given = codings or {}, given or {}
    leaf, coding = "", Coding()
    values: dict[str, DenseValue] = {}
    sources = []
    for chunk in plan.chunks:
        source = chunk.source
        if not chunk.on_host:
            leaf, coding = codings.get(_name_of(chunk.key), ("", Coding()))
            group = group_of(source.nbytes, _native_name_of(source.dtype))
            if group != PLAIN and device_blocks.takes(coding.codec, group):
                data, shape = device_blocks.capture(source, chunk.window)
                values[chunk.key] = DenseValue(
                    chunk.key, group, data, shape, source.dtype, coding, leaf
                )
            elif chunk.key not in given:
                source = placement.host_copy(source)
        sources.append(source)
    #: Values that share a buffer, or one that has its own.
    runs: list[list[DenseValue]] = []
    open_runs: dict[np.dtype, list[DenseValue]] = {}
    views = set[str]()
    for chunk, source in zip(plan.chunks, sources, strict=True):
        key = chunk.key
        if key in values:
            continue
        if codings:
            leaf, coding = codings.get(_name_of(key), ("", Coding()))
        if (held := given.get(key)) is None:
            found = np.asarray(source)[chunk.window]
        else:
            found = held.view(source.dtype).reshape(chunk.shape)
        dtype = found.dtype
        group = group_of(found.nbytes, _native_name_of(dtype))
        if group == PLAIN:
            data = np.frombuffer(found.tobytes(), np.uint8)
            values[key] = DenseValue(key, PLAIN, data, found.shape, dtype, coding, leaf)
            continue
        value = values[key] = DenseValue(key, group, found, found.shape, dtype, coding, leaf)
        is_view = found.size % BLOCK == 0 if held is not None else not (chunk.on_host or keeper)
        if is_view:
            views.add(key)
        if is_view or keeper is not None or found.nbytes >= _SHARED_BYTES:
            open_runs.pop(dtype, None)
            runs.append([value])
        elif dtype in open_runs:
            open_runs[dtype].append(value)
        else:
            open_runs[dtype] = [value]
            runs.append(open_runs[dtype])
    least = _STAGED_BYTES if keeper is None else _SHARED_BYTES
    pieces = _copied(runs, views, runtime, least)
    return DenseLeaves(plan, [values[chunk.key] for chunk in plan.chunks], pieces, runtime, keeper)


def _copied(
    runs: Sequence[Sequence[DenseValue]], views: Container[str], runtime: Runtime, least: int
) -> dict[str, list[np.ndarray]]:
    """Replaces the data of values by their blocks, in memory of their own.

    Args:
      runs: values of one dtype each, which share a buffer.
      views: keys of values that are in their own memory already.
      runtime: provides buffers, and threads that copy.
      least: size of the smallest buffer that is taken from it.

    Returns:
      Group to its blocks in the order of the values, (n, 256) each.
    """
    pieces: dict[str, list[np.ndarray]] = {}
    copies: list[tuple[np.ndarray, np.ndarray]] = []
    try:
        for run in runs:
            of_group, dtype = pieces.setdefault(run[0].group, []), run[0].dtype
            if run[0].key in views:
                flat = np.ascontiguousarray(run[0].data).reshape(-1)
                of_group.extend(_blocks(flat))
                run[0].data = flat if flat.size % BLOCK else of_group[-1]
                continue
            bounds = [0, *itertools.accumulate(blocks_of(value.data.size) for value in run)]
            shape = bounds[-1], BLOCK
            is_staged = bounds[-1] * BLOCK * dtype.itemsize >= least
            buffer = runtime.memory.take(shape, dtype) if is_staged else np.empty(shape, dtype)
            of_group.append(buffer)
            for value, start, stop in zip(run, bounds, bounds[1:], strict=False):
                found = np.asarray(value.data)
                value.data = buffer if len(run) == 1 else buffer[start:stop]
                flat, count = value.data.reshape(-1), found.size
                copies.append((flat[:count].reshape(found.shape), found))
                if count < flat.size:
                    flat[count:] = 0
        _copy(copies, runtime)
    except BaseException:
        runtime.memory.give_back(itertools.chain(*pieces.values()))
        raise
    return pieces


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]], runtime: Runtime) -> None:
    """Copies arrays to others of their shapes; threads help if they are large."""
    large = sum(source.nbytes for _, source in pairs) >= _LARGE_BYTES
    pieces = [piece for pair in pairs for piece in _pieces(*pair)] if large else pairs
    runtime.map(lambda pair: np.copyto(*pair), pieces, threads=None if large else 1)


def _pieces(out: np.ndarray, source: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a copy in pieces along the first axis."""
    if source.nbytes < 2 * _PIECE_BYTES:
        yield out, source
        return
    count = max(1, len(source) * _PIECE_BYTES // source.nbytes)
    for start in range(0, len(source), count):
        yield out[start : start + count], source[start : start + count]


@functools.cache
def _native_name_of(dtype: np.dtype) -> str:
    """Returns the name of a dtype in the machine's byte order; empty for others."""
    return dtype.name if dtype.isnative else ""


def _name_of(key: str) -> str:
    """Returns the name of a chunk's array."""
    return key.rpartition("/")[0]


def _blocks(flat: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the full blocks of a value, and its last one, padded."""
    full = len(flat) // BLOCK * BLOCK
    if full:
        yield flat[:full].reshape(-1, BLOCK)
    if full < len(flat):
        last = np.zeros((1, BLOCK), flat.dtype)
        last[0, : len(flat) - full] = flat[full:]
        yield last
