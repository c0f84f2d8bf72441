# SPDX-License-Identifier: Apache-2.0
"""Writes the golden checkpoints of the current format version, once.

Run ``python -m golden.make_golden`` in ``tests`` after a change of ``FORMAT_VERSION``, and commit
the output next to the earlier versions, which later releases must still read. ``v<n>`` holds states
computed by a formula; ``shards-v<n>`` the same, written by two processes; ``journal-v<n>`` the
steps of ``v<n>`` in a bucket; ``encodings-v<n>`` the encoded states and the digests of the decoded
ones (encoders may improve, decoding may not change); ``dense-v<n>`` deltas with dense blocks of
every codec, and a compacted base. ``log-v<n>`` holds a base and the WALs of two runs, the second of
which resumes from a point. The digests in ``expected.json`` are older than these files: development
versions wrote other files with the same values.
``layers-v<n>`` holds a layer, and layers appended to a file with a torn tail.
``extents-v<n>`` holds synthetic bundles in an extent file, ``pack-v<n>`` a bundle and its files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from made_up_layers import Array, Rows, append

import deltackpt
from deltackpt.format import extents, naming
from deltackpt.format.manifest import SaveId
from deltackpt.format.records import FORMAT_VERSION
from deltackpt.format.row_blocks import rows_of
from deltackpt.layers import footer
from deltackpt.layers.footer import EpochRef, LayerManifest
from deltackpt.layers.write import LayerFile
from deltackpt.maintenance import compact
from deltackpt.resources.runtime import Runtime
from deltackpt.storage.digests import crc32c
from deltackpt.storage.posix import DirectFile
from deltackpt.tiers import bundles
from deltackpt.tiers.bundles import BundleRef
from deltackpt.tiers.copy import copy
from deltackpt.tiers.extent_store import ExtentFile
from deltackpt.tiers.staging import Orders, RunLineage

HERE = Path(__file__).parent
STEPS = (10, 20, 30)
#: The files of the golden bundle.
PACKED = {"embeddings/a": bytes(range(200)), "embeddings/b/c": b"", "d": b"abc"}
#: The size of the golden extent file.
EXTENTS, EXTENT_BYTES = 6, 8192
#: Keys and lengths of its bundles, and the one that is dropped.
HELD = (("run.1", 5000), ("run.2", 3000), ("run.3", 4097), ("run.4", 0))
DROPPED = "run.2"


def handlers(**codecs: Any) -> dict[str, deltackpt.Tables]:
    """The golden tables with the given codecs."""
    slots = {
        "tables/users": {"accumulator": "slots/users", "rows": "always/users"},
        "tables/items": {"accumulator": "slots/items"},
    }
    return {
        "embeddings": deltackpt.Tables(select="tables/*", slots=slots, always=("rows",), **codecs)
    }


HANDLERS = handlers(codec={"tables/coarse": "bf16"})
#: Every layout of codes, in bases too, with exceptional rows stored separately.
ENCODED_HANDLERS = handlers(
    codec={
        "tables/users": deltackpt.policies.CodecChoice(delta="adaptive4", base="int8"),
        "tables/items": deltackpt.policies.CodecChoice(delta="int3", base="adaptive2"),
        "tables/half": deltackpt.policies.CodecChoice(delta="symmetric4", base="lossless"),
        "tables/coarse": deltackpt.policies.CodecChoice(delta="bf16", base="fp16"),
    },
    slot_codec={"tables/users": deltackpt.policies.CodecChoice(delta="lossless", base="bf16")},
)


def state_at(step: int) -> dict:
    """The golden state of a step: a formula, so that a reader in any language can check it."""
    grown = STEPS.index(step)

    def table(rows: int, width: int, dtype: type) -> jnp.ndarray:
        cells = np.arange(rows * width, dtype=np.float64).reshape(rows, width) / 7 - 3
        for later in range(1, grown + 1):
            cells[later :: 10 * later] += 100 * later
        return jnp.asarray(cells.astype(np.float32).astype(dtype))

    def slot(rows: int) -> jnp.ndarray:
        cells = np.arange(rows, dtype=np.float32)
        for later in range(1, grown + 1):
            cells[later :: 10 * later] += later
        return jnp.asarray(cells)

    return {
        "tables": {
            "users": table(50, 4, np.float32),
            "items": table(30, 4, np.float32),
            "half": table(20, 3, ml_dtypes.bfloat16),
            "coarse": table(40, 2, np.float32),
            "ids": jnp.asarray(np.arange(24, dtype=np.int32).reshape(12, 2) + 1000 * grown),
        },
        "slots": {"users": slot(50), "items": slot(30)},
        "always": {"users": jnp.full(50, float(step), jnp.float32)},
        "dense": {"kernel": jnp.arange(6.0).reshape(2, 3) + step, "step": step, "none": None},
    }


def touched_at(state: deltackpt.TouchState, step: int) -> deltackpt.TouchState:
    """Marks the rows that change before a step, and all rows of ``ids``."""
    later = STEPS.index(step)
    ids = {
        name: jnp.arange(later, rows, 10 * later)
        for name, rows in (("users", 50), ("items", 30), ("half", 20), ("coarse", 40))
    }
    return deltackpt.touched.mark(state, {**ids, "ids": jnp.arange(12)})


def odd_state_at(step: int) -> dict:
    """The golden state with rows that no codec can encode; they are stored separately."""
    state = state_at(step)
    if step != STEPS[0]:
        users = np.array(state["tables"]["users"])
        users[1 : STEPS.index(step) + 1] = np.nan, np.inf, -0.0, 2.0**-149
        state["tables"]["users"] = jnp.asarray(users)
    return state


def digests(state: dict) -> dict[str, str]:
    """SHA-256 of the bits of every leaf, by its path."""
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for path, leaf in jax.tree.leaves_with_path(state)
    }


#: How two processes share the tables: by rows, whole on both, or by columns.
SPECS = {
    "users": ("x",),
    "items": ("x",),
    "half": (),
    "coarse": (None, "x"),
    "ids": ("x",),
}


def shared_state_at(step: int) -> dict:
    """The golden state as global arrays of two processes with one device each."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))

    def placed(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        table = path[-1].key
        spec = SPECS.get(table, ())[: leaf.ndim] if path[0].key != "dense" else ()
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree_util.tree_map_with_path(placed, state_at(step))


def write_in_two_processes(root: Path) -> None:
    """Runs this script in two processes that write a golden directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "golden.make_golden", str(root), str(port)]
    children = [subprocess.Popen([*command, str(process)], cwd=HERE.parent) for process in (0, 1)]
    try:
        assert [child.wait(120) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()


def write_as_one_of_two(root: Path, port: str, process: int) -> None:
    """Runs one of the two processes."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, 2, process, coordinator_bind_address=address)
    write(root, handlers(), shared_state_at)


def write(root: Path, handlers: dict[str, Any], state_of: Callable[[int], dict]) -> None:
    """Writes the steps of one golden directory."""
    touched = deltackpt.touched.init(
        {f"tables/{name}": leaf for name, leaf in state_of(10)["tables"].items()}
    )
    policy = deltackpt.policies.Consecutive(max_restore_ratio=100)
    options = deltackpt.ManagerOptions(deltas=deltackpt.DeltaOptions(policy=policy))
    with deltackpt.CheckpointManager(root, handlers=handlers, options=options) as manager:
        for step in STEPS:
            if step != STEPS[0]:
                touched = jax.jit(touched_at, static_argnums=1)(touched, step)
            manager.save(step, state_of(step), touched=touched)
    for leftover in root.glob("lease.*"):
        leftover.unlink(missing_ok=True)


class _Pack:
    """A bundle of the golden extents."""

    def __init__(self, key: str, nbytes: int):
        self._data = extent_contents(nbytes)
        self.ref = BundleRef(key, nbytes, crc32c(np.frombuffer(self._data, np.uint8)))

    def read_into(self, start: int, out: memoryview) -> None:
        """See ``Bundle``."""
        out[:] = self._data[start : start + len(out)]


def extent_contents(nbytes: int) -> bytes:
    """Contents of a bundle of the golden extents."""
    return bytes(number * number % 251 for number in range(nbytes))


def write_journal(directory: Path) -> None:
    """Copies the golden steps as into a bucket, one file for each object."""
    bucket = {"driver": "file", "path": f"{directory}/"}
    copy(HERE / f"v{FORMAT_VERSION}", json.dumps(bucket), all_steps=True)
    for leftover in directory.glob("journal/*.copy.msgpack"):
        leftover.unlink()


def write_extents(directory: Path) -> None:
    """Writes an extent file: the second bundle is dropped, and its extents are reused."""
    held = ExtentFile(directory, nbytes=EXTENTS * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)
    for key, nbytes in HELD:
        pack = _Pack(key, nbytes)
        held.put(pack)
        if key == DROPPED:
            held.delete([pack.ref])
    held.close()
    (directory / "extents.lock").unlink()


def layer_groups(step: int) -> list[Rows]:
    """Every kind of row group and compression, from a formula."""
    rows = np.array([3, 4, 260, 70_000, 70_001]) + step
    values = np.arange(20, dtype=np.float32).reshape(5, 4) / 8 + step
    blocks = (np.arange(3 * 256 * 4, dtype=np.uint32) % (step + 2)).astype(np.uint8)
    count = np.full(3000, step, np.uint16)
    item = np.frombuffer(json.dumps({"step": step}).encode(), np.uint8)
    left = [Array("values", values[:, :3]), Array("slot.m", values[:, 0] * 2)]
    right = [Array("values", values[:, 3:])]
    every = [Array("slot.count", count, "zstd")]
    coded = [Array("blocks", blocks.reshape(3, 256, 4), "planes")]
    return [
        Rows("users.0", "users", rows, left, columns=(0, 3), codecs={"values": "raw"}),
        Rows("users.1", "users", rows, right, columns=(3, 4)),
        Rows("users.count", "users", range(3000), every),
        Rows(
            "float32",
            "float32",
            rows_of([(1, 3), (9, 10)]),
            coded,
            "blocks",
            codecs={"blocks": "planes"},
        ),
        Rows("metrics", "metrics", range(len(item)), [Array("bytes", item)], "item"),
    ]


def write_layers(directory: Path) -> None:
    """Writes the layer of a step, and four layers of a WAL, the last one truncated."""
    directory.mkdir()
    run, runtime, found = "0123456789abcdef0123456789abcdef", Runtime(), {}
    for name, steps in (("step", (3,)), ("wal", (4, 5, 6, 7))):
        file = LayerFile(DirectFile(directory / name), runtime, chunk_bytes=2048)
        for step in steps:
            manifest = LayerManifest(
                save_id=SaveId(run, step, step),
                parent=SaveId(run, step - 1, step - 1),
                epoch=None if name == "step" else EpochRef(number=2, crc32c=0x01020304),
                schema=b"schema" if name == "step" else b"",
            )
            written = append(file, manifest, layer_groups(step))
            found[str(step)] = {"file": name, "start": written.start, "digest": written.digest}
            for group in layer_groups(step):
                found[str(step)][group.name] = {
                    given.name: hashlib.sha256(given.data.tobytes()).hexdigest()
                    for given in group.arrays
                }
        file.file.close()
    del found["7"]
    os.truncate(directory / "wal", written.stop - 4096)
    runtime.close()
    (directory / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def write_pack(directory: Path) -> None:
    """Writes a bundle of a few files, and the files."""
    for name, data in PACKED.items():
        (directory / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / "files" / name).write_bytes(data)
    save_id = SaveId("0123456789abcdef0123456789abcdef", 7, 2)
    lineage = RunLineage(
        run=save_id.run,
        epoch=3,
        holder="00112233445566778899aabbccddeeff",
        generation=1,
        ancestors={"fedcba9876543210fedcba9876543210": 9},
    )
    orders = Orders(
        number=1,
        lease=1,
        url="s3://bucket/run",
        endpoint=None,
        item="embeddings",
        lineages=(lineage,),
    )
    contents = bundles.manifest_of(directory / "files", save_id, orders)
    pack = bundles.StagedBundle(directory / "files", contents)
    data = bytearray(pack.ref.nbytes)
    pack.read_into(0, memoryview(data))
    (directory / f"{pack.ref.key}.{pack.ref.crc32c:08x}").write_bytes(data)


#: For the golden WALs: one table's rows are encoded, with exceptional rows stored separately.
LOGGED_HANDLERS = {
    "embeddings": deltackpt.Tables(
        select="tables/*",
        slots={"tables/users": {"accumulator": "slots/users"}},
        codec={
            "tables/coarse": deltackpt.policies.CodecChoice(delta="int8", base="raw"),
            "tables/users": deltackpt.policies.CodecChoice(delta="lossless", base="raw"),
        },
    )
}
#: The WALs' base step, the point that the second run resumes from, and the last step of each run.
LOGGED_FROM, GOES_ON_FROM, FIRST_END, SECOND_END = 10, 15, 16, 20
#: Records without dense leaves, and the one whose write fails.
SOFT, REFUSED = (13, 18), 14


def logged_state_at(step: int, run: int) -> dict:
    """Returns the state at a step of one of the two runs with a WAL, from a formula.

    Dense leaves have several blocks, whose records build on earlier records.
    """
    users = np.arange(200, dtype=np.float64).reshape(50, 4) / 7 - 3
    coarse = np.arange(80, dtype=np.float64).reshape(40, 2) / 7 - 3
    accumulators = np.zeros(50, np.float32)
    for later in range(LOGGED_FROM + 1, step + 1):
        by = later + (run if later > GOES_ON_FROM else 0)
        users[later % 10 :: 10] += by
        coarse[later % 10 :: 10] *= by
        accumulators[later % 10 :: 10] += by
    if step > LOGGED_FROM:
        coarse[1] = np.nan, np.inf
    wide = np.arange(1500, dtype=np.float64).reshape(3, 500) / (step + run)
    brain = np.arange(2500, dtype=np.float64) / 7
    brain[:256] += 3 * step
    brain[step % 10 :: 100] += step + run
    return {
        "tables": {
            "users": jnp.asarray(users.astype(np.float32)),
            "coarse": jnp.asarray(coarse.astype(np.float32)),
        },
        "slots": {"users": jnp.asarray(accumulators)},
        "dense": {
            "kernel": jnp.arange(60.0).reshape(20, 3) / step + run,
            "step": step,
            "wide": jnp.asarray(wide.astype(np.float32)),
            "mean": jnp.asarray((wide - 100).astype(np.float32)),
            "brain": jnp.asarray(brain.astype(np.float32)).astype(jnp.bfloat16),
            "frozen": jnp.asarray(np.arange(1024, dtype=np.float32)),
        },
    }


def log_run(root: Path, run: int, steps: range) -> None:
    """Appends the steps of a run, which starts with a base or resumes from a point."""
    options = deltackpt.ManagerOptions(
        wal=deltackpt.WalOptions(dense="delta"),
        dense=deltackpt.Dense(codec={"dense/wide": "ef8", "dense/mean": "int8"}, max_error=None),
    )
    with deltackpt.CheckpointManager(root, handlers=LOGGED_HANDLERS, options=options) as manager:
        before = logged_state_at(steps[0] - 1, run)
        touched = deltackpt.touched.init(
            {f"tables/{name}": leaf for name, leaf in before["tables"].items()}
        )
        coarse = before["tables"]["coarse"]
        if run == 0:
            manager.save(LOGGED_FROM, before, touched=touched)
            manager.wait_until_finished()
        else:
            restored = manager.restore(GOES_ON_FROM, before)
            assert restored.touched is not None
            touched, coarse = restored.touched, restored.state["tables"]["coarse"]
        for step in steps:
            rows = {"users": jnp.arange(step % 10, 50, 10), "coarse": jnp.arange(step % 10, 40, 10)}
            rows["coarse"] = _with_odd(rows["coarse"])
            touched = deltackpt.touched.mark(touched, rows)
            state = logged_state_at(step, run)
            # Untouched rows keep their restored values.
            moved = state["tables"]["coarse"][rows["coarse"]]
            coarse = coarse.at[rows["coarse"]].set(moved)
            state["tables"] = {**state["tables"], "coarse": coarse}
            fails = mock.patch.object(os, "fdatasync", side_effect=OSError(errno.EIO, "injected"))
            with warnings.catch_warnings(), fails if step == REFUSED else mock.MagicMock():
                warnings.simplefilter("ignore")
                manager.append(
                    step,
                    state,
                    touched=touched,
                    items={"position": {"step": step, "run": run}, "raw": bytes([step, run])},
                    full=False if step in SOFT else None,
                )
                try:
                    manager.wait_appended()
                except deltackpt.errors.AppendFailed:
                    assert step == REFUSED


def _with_odd(rows: jnp.ndarray) -> jnp.ndarray:
    """Adds the row that no codec can encode."""
    return jnp.concatenate([rows, jnp.asarray([1])])


def write_log(root: Path) -> None:
    """Writes a base, the WALs of two runs, and the digests of their points."""
    log_run(root, 0, range(LOGGED_FROM + 1, FIRST_END + 1))
    log_run(root, 1, range(GOES_ON_FROM + 1, SECOND_END + 1))
    for leftover in root.glob("lease.*"):
        leftover.unlink(missing_ok=True)
    found = {}
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=LOGGED_HANDLERS, options=options) as manager:
        for point in manager.recovery_points():
            run = int(point.step > GOES_ON_FROM)
            state = manager.restore(point, logged_state_at(point.step, run)).state
            found[str(point.step)] = digests(state)
    (root / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


#: Codecs of the golden dense leaves; all other leaves are exact.
DENSE_CODECS = {f"dense/{name}": name for name in ("ef8", "ef4", "int8", "log8", "log4")}
#: The step whose chain is compacted.
COMPACTED = 20


def dense_state_at(step: int) -> dict:
    """A state whose exact leaves change so that each lossless codec is chosen for one of them."""
    later = STEPS.index(step)
    waves = np.sin(np.arange(1100, dtype=np.float64) / 9)
    powers = 10.0 ** (np.arange(1100) % 7 - 9.0)
    scattered = (np.arange(2600) % 97 / 16).astype(ml_dtypes.bfloat16)
    scattered[later::300] += np.array(later, ml_dtypes.bfloat16)
    near = (np.arange(2100) * 40503 % 8192 + 15000).astype(np.uint16) ^ np.uint16(later)
    mixed = np.arange(1, 5001, dtype=np.uint64) * (2654435761 + 2 * later)
    lossy = (waves + np.cos(np.arange(1100.0)) * 1e-3 * later).astype(np.float32)
    moments = (powers * (1 + waves**2 * 0.01 * later)).astype(np.float32)
    moments[::100] = 0
    return {
        "tables": {"users": jnp.arange(120.0).reshape(60, 2).at[1 : later + 1].add(0.5)},
        "dense": {
            "sparse": jnp.asarray(scattered),
            "xor": jnp.asarray(near.view(ml_dtypes.bfloat16)),
            # Its shape differs from the parent's, which therefore is not a reference.
            "planes": jnp.asarray(near[: 2050 + later].view(ml_dtypes.bfloat16)),
            "raw": jnp.asarray((mixed >> 13).astype(np.uint8)),
            "frozen": jnp.asarray(waves[::-1].astype(np.float32)),
            **{name: jnp.asarray(lossy) for name in ("ef8", "ef4", "int8")},
            **{name: jnp.asarray(moments) for name in ("log8", "log4")},
            "bias": jnp.arange(5.0) + later,
            "step": step,
            "none": None,
        },
    }


def write_dense(root: Path) -> None:
    """Writes a base, deltas with dense leaves as blocks, and a compacted base."""
    dense = deltackpt.Dense(deltas="blocks", codec=DENSE_CODECS)
    policy = deltackpt.policies.Consecutive(max_restore_ratio=100)
    deltas = deltackpt.DeltaOptions(policy=policy)
    options = deltackpt.ManagerOptions(dense=dense, deltas=deltas)
    touched = deltackpt.touched.init({"tables/users": dense_state_at(10)["tables"]["users"]})
    tables = {"embeddings": deltackpt.Tables(select="tables/*")}
    found = {}
    with deltackpt.CheckpointManager(root, handlers=tables, options=options) as manager:
        for step in STEPS:
            if step != STEPS[0]:
                row = jnp.array([STEPS.index(step)])
                touched = deltackpt.touched.mark(touched, {"users": row})
            manager.save(step, dense_state_at(step), touched=touched)
            manager.wait_until_finished()
            found[str(step)] = digests(manager.restore(step, dense_state_at(step)).state)
    compact.compact(root, step=COMPACTED, workers=1)
    (root / naming.COMPACTED / naming.COMPACTION_LOCK).unlink()
    for leftover in root.glob("lease.*"):
        leftover.unlink(missing_ok=True)
    (root / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Writes the missing golden files of the current format version."""
    plain = HERE / f"v{FORMAT_VERSION}"
    if not plain.exists():
        write(plain, HANDLERS, state_at)
    shards = HERE / f"shards-v{FORMAT_VERSION}"
    if not shards.exists():
        write_in_two_processes(shards)
    journal = HERE / f"journal-v{FORMAT_VERSION}"
    if not journal.exists():
        write_journal(journal)
    held = HERE / f"extents-v{extents.VERSION}"
    if not held.exists():
        write_extents(held)
    layers = HERE / f"layers-v{footer.VERSION}"
    if not layers.exists():
        write_layers(layers)
    packed = HERE / "pack-v1"
    if not packed.exists():
        write_pack(packed)
    logs = HERE / f"log-v{FORMAT_VERSION}"
    if not logs.exists():
        write_log(logs)
    blocks = HERE / f"dense-v{FORMAT_VERSION}"
    if not blocks.exists():
        write_dense(blocks)
    encoded = HERE / f"encodings-v{FORMAT_VERSION}"
    if not encoded.exists():
        write(encoded, ENCODED_HANDLERS, odd_state_at)
        found = {}
        options = deltackpt.ManagerOptions(access="read")
        with deltackpt.CheckpointManager(
            encoded, handlers=ENCODED_HANDLERS, options=options
        ) as manager:
            for step in STEPS:
                found[str(step)] = digests(manager.restore(step, state_at(step)).state)
        (encoded / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_as_one_of_two(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        main()
