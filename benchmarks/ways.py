# SPDX-License-Identifier: Apache-2.0
"""Save methods to compare: deltackpt and stock Orbax, behind one interface."""

from __future__ import annotations

import mmap
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import numpy as np
import orbax.checkpoint as ocp
from dlrm_jax import trainer

import deltackpt

# The package imports its modules on first use; Orbax's are already imported.
deltackpt.CheckpointManager  # noqa: B018


class Way(Protocol):
    """One checkpoint manager over one directory. States have the fields of ``TrainState``."""

    root: Path

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        """Starts a save; ``base`` requests a full one if there is a choice."""
        ...

    def wait(self) -> None:
        """Waits until the save is committed."""
        ...

    def restore(self, template: Any) -> Any:
        """The newest state, placed on the device."""
        ...

    def close(self) -> None:
        """Closes the manager."""
        ...


class Deltas:
    """deltackpt: touched rows since the previous save."""

    def __init__(
        self,
        root: Path,
        durability: Literal["power", "process"],
        base_snapshot: Literal["block", "hold"] = "hold",
        codec: str = "raw",
        slot_codec: str = "raw",
        policy: deltackpt.policies.BaseOrDelta | None = None,
        log: deltackpt.WalOptions | None = None,
        event_handlers: tuple[deltackpt.events.EventHandler, ...] = (),
    ):
        self.root = root
        # No automatic bases: the benchmark decides which save is one.
        policy = policy or deltackpt.policies.Consecutive(max_chain=10_000, max_restore_ratio=1e9)
        self._manager = deltackpt.CheckpointManager(
            root,
            handlers={"embeddings": trainer.checkpoint_tables(codec, slot_codec)},
            options=deltackpt.ManagerOptions(
                deltas=deltackpt.DeltaOptions(
                    base_snapshot=base_snapshot,
                    policy=policy,
                ),
                writes=deltackpt.WriteOptions(durability=durability),
                wal=log,
            ),
            event_handlers=event_handlers,
        )

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        self._manager.save(step, state, force_base=base)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, template: Any) -> Any:
        result = self._manager.restore_latest(template)
        assert result is not None and not result.skipped
        return jax.block_until_ready(result.state)

    def close(self) -> None:
        self._manager.close()


class Logs(Deltas):
    """deltackpt: the WAL between saves.

    Attributes:
      appends: an event with the cost of each durable append.
    """

    def __init__(self, root: Path, options: deltackpt.WalOptions | None = None):
        self.appends: list[deltackpt.events.AppendEvent] = []
        super().__init__(
            root, "power", log=options or deltackpt.WalOptions(), event_handlers=(self,)
        )

    def receive(self, event: deltackpt.events.Event) -> None:
        if isinstance(event, deltackpt.events.AppendEvent):
            self.appends.append(event)

    def log(self, step: int, state: Any, ids: Any = None) -> deltackpt.Appended:
        """Appends a WAL record of this step."""
        return self._manager.append(step, state, ids=ids)

    def wait(self) -> None:
        super().wait()
        self._manager.wait_appended()


class Orbax:
    """Stock Orbax: the whole state each time."""

    def __init__(self, root: Path | str, *, compressed: bool, keep: int | None = None):
        self.root = Path(root)
        self._manager = ocp.CheckpointManager(
            root,
            item_handlers=ocp.PyTreeCheckpointHandler(use_compression=compressed),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep),
        )

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        del base
        self._manager.save(step, args=ocp.args.PyTreeSave(state._replace(touched=())))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, template: Any) -> Any:
        item = jax.tree.map(_on_device, template._replace(touched=()))
        kinds = ocp.checkpoint_utils.construct_restore_args(item)
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=kinds)
        return jax.block_until_ready(
            self._manager.restore(self._manager.latest_step(), args=arguments)
        )

    def close(self) -> None:
        self._manager.close()


class Pickles:
    """One pickle for each process and save, as plain training scripts write it."""

    def __init__(self, root: Path):
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        del base
        shards = [
            {str(shard.index): np.asarray(shard.data) for shard in leaf.addressable_shards}
            for leaf in jax.tree.leaves(state._replace(touched=()))
        ]
        path = self.root / f"{step}.{jax.process_index()}.pickle"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            pickle.dump(shards, file, protocol=5)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        _fsync(self.root)

    def wait(self) -> None:
        """Saves are synchronous."""

    def restore(self, template: Any) -> Any:
        leaves, treedef = jax.tree.flatten(template._replace(touched=()))
        mine = self.root.glob(f"*.{jax.process_index()}.pickle")
        newest = max(mine, key=lambda path: int(path.name.partition(".")[0]))
        with newest.open("rb") as file:
            shards = pickle.load(file)
        found = [
            jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at, by=by: by[str(at)])
            for leaf, by in zip(leaves, shards, strict=True)
        ]
        return jax.block_until_ready(jax.tree.unflatten(treedef, found))

    def close(self) -> None:
        """Nothing is open."""


#: Save methods by their command-line names.
WAYS: dict[str, Callable[[Path], Way]] = {
    "power": lambda root: Deltas(root, "power"),
    "power-block": lambda root: Deltas(root, "power", "block"),
    "process": lambda root: Deltas(root, "process"),
    "adaptive4": lambda root: Deltas(root, "power", codec="adaptive4"),
    "int4": lambda root: Deltas(root, "power", codec="int4"),
    "lossless": lambda root: Deltas(root, "power", codec="lossless", slot_codec="lossless"),
    "log": Logs,
    "pickle": Pickles,
    "orbax": lambda root: Orbax(root, compressed=True),
    "orbax-tuned": lambda root: Orbax(root, compressed=False),
}
NAMES = {
    "power": "deltackpt, power",
    "power-block": 'deltackpt, power, base_snapshot="block"',
    "process": "deltackpt, process",
    "adaptive4": "power, adaptive4",
    "int4": "power, int4",
    "lossless": "power, lossless",
    "log": "deltackpt, log",
    "pickle": "pickle",
    "orbax": "Orbax defaults",
    "orbax-tuned": "Orbax tuned",
}
TUNED = "Tuned: PyTreeCheckpointHandler(use_compression=False)."


def settle(state: Any) -> None:
    """Prepares a measurement: flushes pending writes and touches free memory.

    A virtual machine may get memory from its host only at first touch, and lose memory that it
    frees. This was measured at 0.5 GB/s against 13 GB/s, a larger effect than all that is compared
    here, and would hit any method that runs after a pause.

    Args:
      state: memory of four states is touched, the most that any save or restore uses.
    """
    os.sync()
    leaves = jax.tree.leaves(state)
    nbytes = 4 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf, "dtype"))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    mmap.mmap(-1, max(1, nbytes), flags=flags).close()


def force_to_disk(step_dir: Path) -> None:
    """Fsyncs every file and directory of a step, and the parent, which stock Orbax does not."""
    for folder, _, files in os.walk(step_dir, topdown=False):
        for name in (*(Path(folder, file) for file in files), Path(folder)):
            _fsync(name)
    _fsync(step_dir.parent)


def keep_only(root: Path, first: int) -> None:
    """Removes the steps before ``first`` and syncs the disk, outside the timed section."""
    for path in root.iterdir():
        if path.name.isdecimal() and int(path.name) < first:
            shutil.rmtree(path)
    os.sync()


def tree_bytes(step_dir: Path) -> int:
    """Bytes of all files of a step."""
    return sum(path.stat().st_size for path in step_dir.rglob("*") if path.is_file())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_device(leaf: Any) -> jax.ShapeDtypeStruct:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sharding = getattr(leaf, "sharding", None) or one
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
