# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a step are stored, for tests that damage them."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import NamedTuple

from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.storage.store import store_path


class StoredChunk(NamedTuple):
    """A chunk of a stored array: ``nbytes`` from ``offset`` on, a Zarr chunk's checksum included.

    ``name`` is a regular expression that the message of ``Damaged`` matches if it is altered.
    """

    path: Path
    offset: int
    nbytes: int
    process: int
    name: str

    def flip(self, bit: int = 0) -> None:
        """Flips a bit of its middle byte; twice restores it."""
        data = bytearray(self.path.read_bytes())
        data[self.offset + self.nbytes // 2] ^= 1 << bit
        self.path.write_bytes(data)


def stored_chunks(
    step_dir: Path, array: str = "values", *, segment: str = "*", item: str = "embeddings"
) -> list[StoredChunk]:
    """Returns the chunks of arrays of a step that are not empty, by file and offset.

    ``step_dir`` may be ``compacted/<step>``. ``array`` is a glob of names, such as ``values``,
    ``slot.*`` or ``blocks``; ``segment``, such as ``g0.0`` or ``dense.*``.
    """
    found = []
    for path in sorted((step_dir / item).glob("shard.*/*/*/c.*")):
        shard, of_segment, of_array = path.relative_to(step_dir / item).parts[:3]
        if _matches(of_segment, segment) and _matches(of_array, array):
            chunk = path.relative_to(step_dir / item / shard).as_posix()
            name = re.escape(f"{shard}/{chunk}")
            process = int(shard.removeprefix("shard."))
            found.append(StoredChunk(path, 0, path.stat().st_size, process, name))
    for path in sorted((step_dir / item).glob("layer.*")):
        found += _chunks_of_layer(path, array, segment)
    if not found:
        raise LookupError(
            f"{step_dir}: expected arrays {array!r} of segments {segment!r}, found none; name "
            "arrays that the step has"
        )
    return found


def _chunks_of_layer(path: Path, array: str, segment: str) -> list[StoredChunk]:
    layer = LayerReader(StoredBytes(store_path(path)), path.stat().st_size)
    found = []
    for one in layer.manifest.arrays:
        if _matches(one.row_group, segment) and _matches(one.name, array):
            for number, chunk in enumerate(layer.chunks_of(one)):
                shown = f"row group {one.row_group!r}, array {one.name!r}, chunk {number}"
                name = re.escape(f"{path.name}: {shown}") + r"\b"
                nbytes = chunk.stop - chunk.offset
                process = layer.manifest.process
                found.append(StoredChunk(path, chunk.offset, nbytes, process, name))
    return sorted(found, key=lambda chunk: chunk.offset)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)
