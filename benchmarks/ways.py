# SPDX-License-Identifier: Apache-2.0
"""Save methods to compare, deltackpt and stock Orbax; limits of the machine for the same bytes."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import numpy as np
import orbax.checkpoint as ocp
from dlrm_jax import trainer

import deltackpt
import deltackpt.events
from deltackpt.resources.host_memory import aligned_buffer

# The package imports its modules on first use; Orbax's are already imported.
deltackpt.CheckpointManager  # noqa: B018

_FRESH = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_BUFFERED_BYTES, _DIRECT_BYTES = 256 << 10, 4 << 20


class Deltas:
    """deltackpt: touched rows since the previous save, and a WAL if ``wal`` is given.

    No base is automatic, unless ``defaults`` is set: the benchmark decides which save is one.
    Further options are those of the manager.
    """

    def __init__(
        self,
        root: Path | str,
        durability: Literal["power", "process"] = "power",
        *,
        base_snapshot: Literal["block", "hold"] = "hold",
        tables: deltackpt.Tables | None = None,
        defaults: bool = False,
        **options: Any,
    ):
        self.root = Path(root)
        #: Events so far; those of an upload or an append have what it cost.
        self.events: list[deltackpt.events.Event] = []
        policy = deltackpt.policies.Consecutive(max_chain=1_000_000, max_restore_ratio=1e9)
        if not defaults:
            options["deltas"] = deltackpt.DeltaOptions(base_snapshot=base_snapshot, policy=policy)
        self.manager = deltackpt.CheckpointManager(
            root,
            handlers={"embeddings": tables or trainer.checkpoint_tables()},
            options=deltackpt.ManagerOptions(
                writes=deltackpt.WriteOptions(durability=durability), **options
            ),
            event_handlers=(self,),
        )

    def receive(self, event: deltackpt.events.Event) -> None:
        self.events.append(event)

    def save(self, step: int, state: Any, *, base: bool = False, touched: Any = None) -> None:
        self.manager.save(step, state, touched=touched, force_base=base)

    def append(self, step: int, state: Any, ids: Any = None, *, touched: Any = None) -> None:
        """Appends a WAL record of this step."""
        self.manager.append(step, state, touched=touched, ids=ids)

    def wait(self) -> None:
        self.manager.wait_until_finished()
        if self.manager.options.wal is not None:
            self.manager.wait_appended()

    def saved(self, step: int, state: Any, **more: Any) -> None:
        """Saves, and waits until the save is committed."""
        self.save(step, state, **more)
        self.wait()

    def restore(self, template: Any) -> Any:
        return jax.block_until_ready(self.restore_from(template).state)

    def restore_from(self, template: Any, *, storage: bool = False) -> deltackpt.Restored:
        """Restores the newest step, from the hot standby unless ``storage`` is true."""
        more: dict[str, Any] = {"service": None} if storage else {}
        result = self.manager.restore_latest(template, **more)
        assert result is not None and not result.skipped
        return result

    def close(self) -> None:
        self.manager.close()


class Orbax:
    """Stock Orbax: the whole state each time."""

    def __init__(
        self,
        root: Path,
        *,
        compressed: bool = False,
        keep: int | None = None,
        asynchronous: bool = True,
    ):
        self.root = root
        self._manager = ocp.CheckpointManager(
            root,
            item_handlers=ocp.PyTreeCheckpointHandler(use_compression=compressed),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=asynchronous
            ),
        )

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        del base
        self._manager.save(step, args=ocp.args.PyTreeSave(untracked(state)))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def saved(self, step: int, state: Any, *, base: bool = False) -> None:
        """Saves, and waits until the save is committed."""
        self.save(step, state, base=base)
        self.wait()

    def restore(self, template: Any) -> Any:
        item = jax.tree.map(_on_device, untracked(template))
        kinds = ocp.checkpoint_utils.construct_restore_args(item)
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=kinds)
        return jax.block_until_ready(
            self._manager.restore(self._manager.latest_step(), args=arguments)
        )

    def close(self) -> None:
        self._manager.close()


def untracked(state: Any) -> Any:
    """A state without its TouchState."""
    return state._replace(touched=()) if hasattr(state, "touched") else state


#: One checkpoint manager over one directory. States have the fields of ``TrainState``.
Way = Deltas | Orbax


def coded(codec: str, slots: str = "raw") -> Callable[[Path], Way]:
    """Makes deltas whose rows and slots have codecs."""
    return lambda root: Deltas(root, tables=trainer.checkpoint_tables(codec, slots))


#: Save methods by their names in functions and tables.
WAYS: dict[str, Callable[[Path], Way]] = {
    "power": Deltas,
    "power-block": lambda root: Deltas(root, base_snapshot="block"),
    "process": lambda root: Deltas(root, "process"),
    "adaptive4": coded("adaptive4"),
    "int4": coded("int4"),
    "lossless": coded("lossless", "lossless"),
    "wal": lambda root: Deltas(root, wal=deltackpt.WalOptions()),
    "Orbax defaults": lambda root: Orbax(root, compressed=True),
    "Orbax tuned": Orbax,
}
THEIRS = ("Orbax defaults", "Orbax tuned")
TUNED = "Tuned: PyTreeCheckpointHandler(use_compression=False)."


def opened(root: Path | str, names: Iterable[str]) -> dict[str, Way]:
    """Opens a manager of each kind, in a directory of its name."""
    return {name: WAYS[name](Path(root, name)) for name in names}


def warm_memory(state: Any, most: int = 1 << 62) -> None:
    """Flushes pending writes and touches free memory: at most ``most`` bytes, of four states.

    A virtual machine may get memory from its host only at first touch, and lose memory that it
    frees. First touches were measured at 0.5 GB/s, later ones at 13 GB/s. This effect exceeds every
    difference compared here, and would affect any method that runs after a pause.
    """
    os.sync()
    flags = _FRESH | getattr(mmap, "MAP_POPULATE", 0)
    mmap.mmap(-1, max(1, min(most, 4 * nbytes(state))), flags=flags).close()


def nbytes(state: Any) -> int:
    """Size in bytes of the arrays of a state or its shapes, without the TouchState."""
    leaves = [leaf for leaf in jax.tree.leaves(untracked(state)) if hasattr(leaf, "dtype")]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def fsync(path: Path) -> None:
    """Makes a file or a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def fsync_all(step_dir: Path) -> None:
    """Fsyncs every file and directory of a step, and the parent, which stock Orbax does not."""
    for folder, _, files in os.walk(step_dir, topdown=False):
        for name in (*files, ""):
            fsync(Path(folder, name))
    fsync(step_dir.parent)


def replace_file(path: Path, write: Callable[[Any], object]) -> None:
    """Writes a file anew, and makes it and its name durable."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    fsync(path.parent)


def keep_only(root: Path, first: int) -> None:
    """Removes the steps before ``first`` and syncs the disk, outside the timed section."""
    for path in root.iterdir():
        if path.name.isdecimal() and int(path.name) < first:
            shutil.rmtree(path)
    os.sync()


def files_in(root: str | Path) -> list[Path]:
    return [path for path in Path(root).rglob("*") if path.is_file()]


def tree_bytes(step_dir: Path) -> int:
    return sum(path.stat().st_size for path in files_in(step_dir))


def drop_caches() -> bool:
    """Empties the page cache; returns False if this user may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def read_through(root: Path) -> None:
    """Brings every file into the page cache."""
    for path in files_in(root):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def checksum(state: Any) -> int:
    """CRC32 over every leaf but the TouchState."""
    total = 0
    for leaf in jax.tree.leaves(untracked(state)):
        total = zlib.crc32(np.ascontiguousarray(leaf).data, total)
    return total


# The limits of this machine for the same bytes.


def write_secs(place: Path, nbytes: int) -> float:
    """Seconds to write and fsync so many bytes, buffered or direct, whichever is faster."""
    data = aligned_buffer(nbytes)
    data[:] = 1
    return min(
        _write_secs(place, data[:nbytes], 0, _BUFFERED_BYTES),
        _write_secs(place, data, os.O_DIRECT, _DIRECT_BYTES),
    )


def _write_secs(place: Path, data: np.ndarray, flags: int, piece: int) -> float:
    started = time.perf_counter()
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    for start in range(0, len(data), piece):
        os.write(descriptor, data[start : start + piece].data)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - started
    place.unlink()
    return seconds


def read_secs(root: str | Path) -> float:
    """Seconds to read every large file into fresh memory with two threads, as a restore must."""
    found = [(path, path.stat().st_size) for path in files_in(root)]
    buffers = [(path, mmap.mmap(-1, n, flags=_FRESH)) for path, n in found if n > 1 << 16]

    def fill(path: Path, buffer: mmap.mmap) -> None:
        with path.open("rb", buffering=0) as file:
            view = memoryview(buffer)
            while count := file.readinto(view):
                view = view[count:]

    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: fill(*each), buffers))
    return time.perf_counter() - started


def copy_secs(array: np.ndarray, out: np.ndarray, pool: Any, threads: int = 2) -> float:
    """Seconds of a plain copy of rows by some threads, the limit of the memory."""
    step = max(1, -(-len(array) // threads))
    chunks = [slice(start, start + step) for start in range(0, len(array), step)]
    started = time.perf_counter()
    list(pool.map(lambda chunk: np.copyto(out[chunk], array[chunk]), chunks))
    return time.perf_counter() - started


def gather_secs(state: Any, ids: dict[str, np.ndarray]) -> float:
    """Seconds to scan all stamps and to gather rows and slots with two threads, in warm memory."""
    leaves = [state.tables, state.accumulators]
    sources = [(np.asarray(leaf[name]), np.sort(ids[name])) for leaf in leaves for name in ids]
    warm = [np.zeros((len(rows), *leaf.shape[1:]), leaf.dtype) for leaf, rows in sources]
    stamps = [np.asarray(one) for one in state.touched.stamps.values()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(abs, range(2)))
        started = time.perf_counter()
        list(pool.map(lambda one: np.flatnonzero(one > 0).size, stamps))
        jobs = [
            pool.submit(np.take, leaf, rows, 0, out, "clip")
            for (leaf, rows), out in zip(sources, warm, strict=True)
        ]
        for job in jobs:
            job.result()
        return time.perf_counter() - started


def _on_device(leaf: Any) -> jax.ShapeDtypeStruct:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sharding = getattr(leaf, "sharding", None) or one
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
