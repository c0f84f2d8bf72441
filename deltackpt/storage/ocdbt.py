# SPDX-License-Identifier: Apache-2.0
"""OCDBT databases in Orbax's layout: written in one transaction, read without TensorStore.

A single process writes the item's database. With several, each writes ``ocdbt.process_K`` below the
item, and process 0 then copies references to all values into the item's own database, atomically.

TensorStore silently merges incomplete databases, so the keys are compared with those that the
arrays' descriptions imply before the merge is committed. TensorStore builds the database in memory;
the batch of the step writes its files, which takes a third of the CPU time (5 MB: 5 ms).

TensorStore returns values with two copies. OCDBT stores values longer than 1 KiB uncompressed in a
file, so a reader that knows the location reads the bytes directly into their destination.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deltackpt.errors import Damaged, Disagreement, StorageError
from deltackpt.format.naming import DENSE_NODES
from deltackpt.lazy_import import ts
from deltackpt.storage.batch import FileBatch

if TYPE_CHECKING:
    from deltackpt.storage.kv_store import Reachable

_MANIFEST = "manifest.ocdbt"


class Extent(NamedTuple):
    """A run of bytes in a file, by its path below the database's folder."""

    file: str
    start: int
    nbytes: int


class Index(NamedTuple):
    """The last version of a database."""

    values: Mapping[str, Extent | memoryview]  # By key; short ones are stored in nodes.
    nodes: Mapping[str, tuple[Extent, ...]]  # By file; () for the manifest: all of it.


def index(folder: Reachable) -> Index:
    """Reads the nodes of a database; ``ValueError`` or ``OSError`` if it is damaged."""
    base: Any = ts.KvStore.open(folder.spec, context=folder.context).result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
    values: dict[str, Extent | memoryview] = {}
    nodes: dict[str, tuple[Extent, ...]] = {_MANIFEST: ()}
    level: list[tuple[bytes, str]] = [(b"", root["location"])] if "location" in root else []
    while level:
        for at in (_extent(location) for _, location in level):
            nodes[at.file] = (*nodes.get(at.file, ()), at)
        asked = [(prefix, ts.ocdbt.dump(base, location)) for prefix, location in level]
        level = []
        for prefix, answer in asked:
            node = answer.result()
            for entry in node["entries"]:
                if node["height"]:
                    level.append((prefix + entry["subtree_common_prefix"], entry["location"]))
                    continue
                key = (prefix + entry["key"]).decode()
                short = entry.get("inline_value")
                values[key] = (
                    _extent(entry["indirect_value"]) if short is None else memoryview(short)
                )
    return Index(values, nodes)


def _extent(location: str) -> Extent:
    """A location as TensorStore words it: ``KIND:FOLDER:FILE:START:LENGTH``, names escaped."""
    _, folder, file, start, nbytes = location.split(":")
    path = urllib.parse.unquote(folder) + urllib.parse.unquote(file)
    return Extent(path, int(start), int(nbytes))


#: What describes an array, below its name.
ZARRAY = ".zarray"
#: From this size on a value is referenced, not copied into 4 KiB pieces: 1 MiB takes 1.3 ms of CPU
#: instead of 2.2, 16 MiB 5 instead of 26.
REFERENCED_BYTES = 1 << 20
_TARGET_DATA_FILE_BYTES = 64 << 20
#: More than any array has: there is one for each shard.
_MOST_CHUNKS = 1 << 20
_CONFIG = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}


class Value(NamedTuple):
    """A value to be written."""

    key: str  # ``NAME/.zarray`` or ``NAME/I.J``.
    data: bytes | np.ndarray  # A chunk is contiguous and unchanged until it is written.


def process_directory(item: Path, process: int) -> Path:
    """Returns the directory in which a process writes its values."""
    return item / f"ocdbt.process_{process}"


def zarray(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> dict[str, object]:
    """Returns the metadata of an uncompressed array, byte for byte as TensorStore writes it."""
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
    """Returns the key of a chunk; an array without axes has a single chunk, with index 0."""
    return f"{name}/{'.'.join(map(str, index)) or '0'}"


def check_chunks(described: Mapping[str, Any]) -> list[int]:
    """Returns the chunks of each axis; ``ValueError`` for invalid shapes, or too many chunks."""
    shape, chunks = described["shape"], described["chunks"]
    for size, section in zip(shape, chunks, strict=True):
        if type(size) is not int or type(section) is not int or size < 0 or section < 1:
            raise ValueError(f"shape {shape} in chunks {chunks}")
    counts = [-(-size // section) for size, section in zip(shape, chunks, strict=True)]
    if math.prod(counts) > _MOST_CHUNKS:
        raise ValueError(f"shape {shape} in {math.prod(counts)} chunks")
    return counts


def implied(described: Mapping[str, bytes]) -> set[str]:
    """Returns all keys of the described arrays, and of their metadata.

    Raises ``ValueError``, ``LookupError`` or ``TypeError`` for an invalid description.
    """
    keys = set()
    for name, text in described.items():
        counts = check_chunks(json.loads(text))
        keys.add(f"{name}/{ZARRAY}")
        keys.update(chunk_key(name, index) for index in itertools.product(*map(range, counts)))
    return keys


def check_keys(name: str, keys: Set[str], values: Mapping[str, bytes | memoryview]) -> None:
    """Raises ``Damaged`` if a database lacks values that its arrays imply, or has others.

    Only the descriptions of arrays in ``values`` are read; all of them must exist.
    """
    tail = f"/{ZARRAY}"
    described = {
        key.removesuffix(tail): bytes(text) for key, text in values.items() if key.endswith(tail)
    }
    try:
        differing = sorted(implied(described) ^ keys)
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise Damaged(name, "descriptions of arrays", f"{type(error).__name__}: {error}") from error
    if differing:
        expected = "the values of dense leaves that their arrays imply"
        raise Damaged(name, expected, f"a difference in {', '.join(differing[:3])}")


def write(
    directory: Path, values: Collection[Value], batch: FileBatch, *, separate_nodes: bool = False
) -> None:
    """Writes the values of this process in one transaction; without values, creates no file.

    ``separate_nodes`` stores nodes and values in separate files, so that nodes can be merged alone.
    """
    context = ts.Context()
    with _refusals(directory):
        how = {"btree_node_data_prefix": DENSE_NODES} if separate_nodes else {}
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
        paths = sorted(made.list().result(), key=lambda path: (path == _MANIFEST.encode(), path))
    for path in paths:
        with _refusals(directory):
            data = made.read(path).result().value
            made.write(path, None).result()  # Its memory is given back.
        file = directory / path.decode()
        batch.make(file.parent)
        batch.write(file, data)


def merge(item: Path, processes: Iterable[int], described: Mapping[str, bytes]) -> None:
    """Merges the databases of all processes, which have all reported, into the item's database.

    Reads no values: to read one, TensorStore reads and decodes the whole node that leads to it, so
    that the time would grow with the square of the number of arrays. The caller must fsync the
    item's files and their directories. A missing, extra or doubly written value raises
    ``Disagreement``, and nothing is committed.
    """
    context = _context()
    with _refusals(item):
        children = {
            process: _open(_files(process_directory(item, process)), context)
            for process in processes
            if (process_directory(item, process) / _MANIFEST).exists()
        }
        writers: dict[str, int] = {}
        for process, child in children.items():
            for raw in child.list().result():
                key = raw.decode()
                if key in writers:
                    raise Disagreement(
                        f"{item}: expected {key} from one process, found it written by processes "
                        f"{writers[key]} and {process}; make the leaf one global array, or a "
                        "NumPy array, not one array in each process"
                    )
                writers[key] = process
        expected = implied({key.removesuffix(f"/{ZARRAY}"): described[key] for key in described})
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


def _reference(within: ts.KvStore, key: str, data: np.ndarray) -> ts.WriteFutures:
    """Writes one chunk through the zarr driver, which does not copy it."""
    name, _, index = key.rpartition("/")
    at = tuple(map(int, index.split(".")))
    flat = data.reshape(-1).view(np.uint8)
    shape = tuple(n + 1 for n in at[:-1]) + ((at[-1] + 1) * flat.size,)
    chunks = (1,) * (len(at) - 1) + (flat.size,)
    # The driver sees the chunk as an array of bytes with that one chunk: the description is
    # assumed, neither read nor written, and the bytes are the same.
    store = ts.open(
        {
            "driver": "zarr",
            "metadata": zarray(shape, chunks, "|u1"),
            "assume_metadata": True,
            "store_data_equal_to_fill_value": True,
        },
        kvstore=within / f"{name}/",
    ).result()
    section = store[(*at[:-1], slice(at[-1] * flat.size, (at[-1] + 1) * flat.size))]
    return section.write(flat, can_reference_source_data_indefinitely=True)


def _check(item: Path, expected: Collection[str], found: Collection[str]) -> None:
    missing, further = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or further:
        raise Disagreement(
            f"{item}: expected {len(expected)} values in the dense leaves, found {len(missing)} of "
            f"them missing ({', '.join(missing[:3])}) and {len(further)} not expected "
            f"({', '.join(further[:3])}); nothing was committed, save again"
        )


def _context() -> ts.Context:
    """Returns a context for one call, so that nothing cached outlives it."""
    # Databases between which is copied share one. Otherwise TensorStore takes their files for those
    # of different drivers.
    return ts.Context({"file_io_sync": False})


def _files(directory: Path) -> dict[str, object]:
    """Files as the base of a database; copies between databases need locks that do not rename."""
    locking = {"mode": "non_atomic"}
    return {"driver": "file", "path": f"{directory}/", "file_io_locking": locking}


def _open(base: Mapping[str, object], context: ts.Context, **how: object) -> ts.KvStore:
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
