# SPDX-License-Identifier: Apache-2.0
"""Databases of TensorStore's OCDBT format as Orbax lays them out, written by one transaction each.

One process writes the item's database. Of several, each writes ``ocdbt.process_K`` below the item;
process 0 then copies references to all values into the item's own, atomically. One transaction
makes few files and starts no thread, where Orbax's handler commits once for each array. TensorStore
merges without a word what is incomplete, so that the keys are compared with what the arrays'
descriptions imply before the merge is committed.

TensorStore makes a database in memory, where large values are references to the leaves' copies, and
the batch of the step writes its files: through TensorStore 5 MB cost 14 ms of CPU, most of it for
fresh pages of the page cache, and 5 ms so.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from deltackpt.errors import Disagreement, StorageError
from deltackpt.format.names import DENSE_NODES
from deltackpt.storage.batch import FileBatch

#: What describes an array, below its name.
ZARRAY = ".zarray"
#: From this size on a value is referenced, not copied into 4 KiB pieces: 1 MiB takes 1.3 ms of CPU
#: instead of 2.2, 16 MiB 5 instead of 26.
REFERENCED_BYTES = 1 << 20
_TARGET_DATA_FILE_BYTES = 64 << 20
_MANIFEST = b"manifest.ocdbt"
_CONFIG = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}


class Value(NamedTuple):
    """A value to be written.

    Attributes:
      key: its key, ``NAME/.zarray`` or ``NAME/I.J``.
      data: its bytes, or a chunk of an array, contiguous and unchanged until it is written.
    """

    key: str
    data: bytes | np.ndarray


def process_directory(item: Path, process: int) -> Path:
    """Where a process writes its values."""
    return item / f"ocdbt.process_{process}"


def zarray(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """The description of an uncompressed array, as TensorStore orders and words it."""
    return {
        "chunks": list(chunks),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": dtype,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }


def chunk_key(name: str, index: Iterable[int]) -> str:
    """The key of a chunk; an array without axes has one, of index 0."""
    return f"{name}/{'.'.join(map(str, index)) or '0'}"


def implied(described: dict[str, bytes]) -> set[str]:
    """All keys that arrays have, their descriptions' too.

    Args:
      described: the descriptions by array name.
    """
    keys = set()
    for name, text in described.items():
        array = json.loads(text)
        counts = [-(-n // c) for n, c in zip(array["shape"], array["chunks"], strict=True)]
        keys.add(f"{name}/{ZARRAY}")
        keys.update(chunk_key(name, index) for index in itertools.product(*map(range, counts)))
    return keys


def write(
    directory: Path, values: Collection[Value], batch: FileBatch, *, nodes_apart: bool = False
) -> None:
    """Writes the values of this process in one transaction.

    Args:
      directory: the item's, or of one of several processes ``process_directory``.
      values: what it writes; without any, no file is made.
      batch: what the files are written with.
      nodes_apart: whether no file holds nodes beside values, so that nodes alone can be merged.

    Raises:
      StorageError: the store refused.
    """
    context = ts.Context()
    with _refusals(directory):
        how = {"btree_node_data_prefix": DENSE_NODES} if nodes_apart else {}
        store = _open({"driver": "memory"}, context, **how)
        writes = []
        with ts.Transaction(atomic=True) as transaction:
            within = store.with_transaction(transaction)
            for key, data in values:
                if isinstance(data, np.ndarray) and data.nbytes >= REFERENCED_BYTES:
                    writes.append(_reference(within, key, data))
                else:
                    raw = data.tobytes() if isinstance(data, np.ndarray) else data
                    writes.append(within.write(key, raw))
            for pending in writes:
                pending.result()
        made = ts.KvStore.open({"driver": "memory"}, context=context).result()
        # The manifest, which refers to the others, last.
        paths = sorted(made.list().result(), key=lambda path: (path == _MANIFEST, path))
    for path in paths:
        with _refusals(directory):
            data = made.read(path).result().value
            made.write(path, None).result()  # Its memory is given back.
        file = directory / path.decode()
        batch.make(file.parent)
        batch.write(file, data)


def merge(item: Path, processes: Iterable[int], names: Collection[str]) -> None:
    """Makes the item's database of those of the processes, all of which have reported.

    Its files, and their directories, are left to the caller to force.

    Args:
      item: the item's directory.
      processes: the processes that may have written.
      names: all arrays of the item.

    Raises:
      Disagreement: a value is missing, written twice or not expected; nothing was committed.
      StorageError: the store refused.
    """
    context = _context()
    with _refusals(item):
        children = {
            process: _open(_files(process_directory(item, process)), context)
            for process in processes
            if (process_directory(item, process) / _MANIFEST.decode()).exists()
        }
        writers: dict[str, int] = {}
        described: dict[str, bytes] = {}
        for process, child in children.items():
            for raw in child.list().result():
                key = raw.decode()
                if key in writers:
                    raise Disagreement(
                        f"{item}: expected {key} from one process, found it written by processes "
                        f"{writers[key]} and {process}; save again, and restart the job if the "
                        "processes keep to disagree"
                    )
                writers[key] = process
                if key.endswith(f"/{ZARRAY}"):
                    text = child.read(key).result().value
                    described[key.removesuffix(f"/{ZARRAY}")] = bytes(text)
        expected = implied(described) | {f"{name}/{ZARRAY}" for name in names}
        _check(item, expected, writers.keys())
        parent = _open(_files(item), context)
        transaction = ts.Transaction(atomic=True)
        within = parent.with_transaction(transaction)
        try:
            for child in children.values():
                child.experimental_copy_range_to(within).result()
            _check(item, expected, {key.decode() for key in within.list().result()})
        except BaseException:
            transaction.abort()
            raise
        transaction.commit_sync()


def read(item: Path) -> dict[str, bytes]:
    """All keys and values of a database; for tests and for looking."""
    store = _open(_files(item), _context())
    return {key.decode(): bytes(store.read(key).result().value) for key in store.list().result()}


def _reference(within: ts.KvStore, key: str, data: np.ndarray) -> ts.WriteFutures:
    """Writes one chunk through the zarr driver, which does not copy it.

    The driver sees the chunk as an array of bytes with that one chunk: the description is assumed,
    neither read nor written, and the bytes are the same.
    """
    name, _, index = key.rpartition("/")
    at = tuple(map(int, index.split(".")))
    flat = data.reshape(-1).view(np.uint8)
    shape = tuple(n + 1 for n in at[:-1]) + ((at[-1] + 1) * flat.size,)
    chunks = (1,) * (len(at) - 1) + (flat.size,)
    store = ts.open(
        {
            "driver": "zarr",
            "metadata": zarray(shape, chunks, "|u1"),
            "assume_metadata": True,
            "store_data_equal_to_fill_value": True,
        },
        kvstore=within / f"{name}/",
    ).result()
    part = store[(*at[:-1], slice(at[-1] * flat.size, (at[-1] + 1) * flat.size))]
    return part.write(flat, can_reference_source_data_indefinitely=True)


def _check(item: Path, expected: Collection[str], found: Collection[str]) -> None:
    missing, further = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or further:
        raise Disagreement(
            f"{item}: expected {len(expected)} values in the dense leaves, found {len(missing)} of "
            f"them missing ({', '.join(missing[:3])}) and {len(further)} not expected "
            f"({', '.join(further[:3])}); nothing was committed, save again"
        )


def _context() -> ts.Context:
    """A context of its own for a call, so that nothing cached outlives it.

    Databases between which is copied share one: TensorStore takes their files for different
    drivers' otherwise.
    """
    return ts.Context({"file_io_sync": False})


def _files(directory: Path) -> dict[str, Any]:
    """Files as the base of a database; copies between databases need locks that do not rename."""
    locking = {"mode": "non_atomic"}
    return {"driver": "file", "path": f"{directory}/", "file_io_locking": locking}


def _open(base: dict[str, Any], context: ts.Context, **how: Any) -> ts.KvStore:
    spec = {
        "driver": "ocdbt",
        "base": base,
        "config": _CONFIG,
        "assume_config": True,
        "target_data_file_size": _TARGET_DATA_FILE_BYTES,
        **how,
    }
    return ts.KvStore.open(spec, context=context).result()


@contextlib.contextmanager
def _refusals(directory: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        raise StorageError(f"{directory}: the dense leaves could not be stored: {error}") from error
