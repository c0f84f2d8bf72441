# SPDX-License-Identifier: Apache-2.0
"""In-memory layers of made-up rows, and the values that reads must return."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import msgpack
import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format.manifest import SaveId
from deltackpt.format.row_blocks import Rows as RowIndices
from deltackpt.format.row_blocks import rows_of
from deltackpt.layers import footer
from deltackpt.layers.footer import (
    PAGE_BYTES,
    TRAILER_BYTES,
    Compression,
    Kind,
    LayerManifest,
    RowGroup,
)
from deltackpt.layers.read import ByteSource, LayerReader
from deltackpt.layers.write import LayerFile, WrittenLayer, ranges_of
from deltackpt.resources.runtime import Pace, Runtime
from deltackpt.storage.posix import DirectFile

NAME = "layer.0"
RUN = "0123456789abcdef0123456789abcdef"


class Memory:
    """Bytes in memory; records the ranges that are read."""

    name = NAME
    run_bytes = 16 << 20

    def __init__(self, data: bytes | bytearray):
        self.data = data
        self.ranges: list[tuple[int, int]] = []

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        """See ``ByteSource``."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        self.ranges.append((start, wanted))
        if start < 0 or start + wanted > len(self.data):
            raise Damaged(self.name, f"{start + wanted} bytes", f"{len(self.data)} bytes")
        for buffer in buffers:
            buffer.cast("B")[:] = self.data[start : start + buffer.nbytes]
            start += buffer.nbytes


class Array(NamedTuple):
    """An array to write."""

    name: str
    data: np.ndarray
    compression: Compression = ""


class Rows(NamedTuple):
    """A row group to write."""

    name: str
    group: str
    rows: RowIndices
    arrays: Sequence[Array]
    kind: Kind = "rows"
    columns: tuple[int, int] | None = None
    codecs: Mapping[str, str] = {}

    @property
    def described(self) -> RowGroup:
        return RowGroup(
            name=self.name,
            group=self.group,
            count=len(self.rows),
            kind=self.kind,
            columns=self.columns,
            ranges=ranges_of(self.rows),
            codecs={**self.codecs},
        )


def append(file: LayerFile, manifest: LayerManifest, groups: Sequence[Rows]) -> WrittenLayer:
    """Writes a layer of row groups in memory."""
    layer = file.start_layer(manifest)
    try:
        for group in groups:
            layer.write_rows(group.name, group.rows)
            for name, data, compression in group.arrays:
                writer = layer.array(group.name, name, data.shape, data.dtype, compression)
                writer.write(data)
                writer.finish()
    except BaseException:
        layer.abandon()
        raise
    described = tuple(group.described for group in groups)
    return layer.finish(dataclasses.replace(manifest, row_groups=described))


def manifest_of(number: int = 1, **fields) -> LayerManifest:
    """The manifest of a layer that follows another save of its run."""
    save_id, parent = SaveId(RUN, number, number), SaveId(RUN, number - 1, number - 1)
    return LayerManifest(save_id=save_id, parent=parent, **fields)


def groups_of(number: int = 1, count: int = 300) -> list[Rows]:
    """Rows with a slot in two column shards, blocks, and an item; ``number`` is the seed."""
    random = np.random.default_rng(number)
    rows = np.unique(random.integers(0, 1 << 20, count))
    values = random.standard_normal((len(rows), 6), np.float32)
    slot = random.standard_normal(len(rows), np.float32)
    blocks = random.integers(0, 3, (7, 256, 2), np.uint8)
    item = np.frombuffer(b'{"loss": %d}' % number, np.uint8)
    return [
        Rows(
            "users.left",
            "users",
            rows,
            [Array("values", values[:, :4]), Array("slot.m", slot)],
            columns=(0, 4),
        ),
        Rows("users.right", "users", rows, [Array("values", values[:, 4:])], columns=(4, 6)),
        Rows(
            "bfloat16",
            "bfloat16",
            rows_of([(3, 8), (10, 12)]),
            [Array("blocks", blocks, "planes")],
            kind="blocks",
            codecs={"blocks": "planes"},
        ),
        Rows("metrics", "metrics", range(len(item)), [Array("bytes", item)], kind="item"),
    ]


def contents_of(groups: Sequence[Rows]) -> dict[str, tuple[list[int], dict[str, bytes]]]:
    """The value that ``read_all`` must return for row groups."""
    found = {}
    for group in groups:
        arrays = {given.name: given.data.tobytes() for given in group.arrays}
        found[group.name] = np.asarray(group.rows).tolist(), arrays
    return found


def read_all(layer: LayerReader) -> dict[str, tuple[list[int], dict[str, bytes]]]:
    """Row indices and bytes of every array, by row group."""
    found = {}
    for group in layer.manifest.row_groups:
        arrays = {}
        for name, array in layer.arrays(group).items():
            if name != footer.GAPS:
                held = np.empty(array.shape, array.dtype)
                layer.read_into(array, 0, array.shape[0], held)
                arrays[name] = held.tobytes()
        found[group.name] = np.asarray(layer.rows(group).rows).tolist(), arrays
    return found


def write(
    path: Path,
    layers: Sequence[tuple[LayerManifest, Sequence[Rows]]],
    *,
    buffer_bytes: int = 1 << 20,
    pace: Pace | None = None,
    **options,
) -> list[WrittenLayer]:
    """Writes layers into a file, and closes it."""
    runtime = Runtime()
    file = LayerFile(DirectFile(path, pace=pace), runtime, buffer_bytes=buffer_bytes, **options)
    try:
        written = [append(file, manifest, groups) for manifest, groups in layers]
        file.sync()
    finally:
        file.file.close()
        runtime.close()
    return written


def opened(data: bytes | bytearray) -> LayerReader:
    """Opens a layer from its bytes."""
    return LayerReader(Memory(data), len(data))


def layers_in(source: ByteSource, data: bytes) -> list[LayerReader]:
    """The complete layers in the bytes of a file."""
    found, start = [], 0
    while start + PAGE_BYTES <= len(data):
        header = footer.header_of(data[start : start + PAGE_BYTES], "a layer")
        if header is None or start + header.nbytes > len(data):
            break
        found.append(LayerReader(source, header.nbytes, start=start))
        start += header.nbytes
    return found


def fields_of(data: bytes) -> dict:
    """The unpacked manifest fields of a layer."""
    trailer = footer.trailer_of(data[-TRAILER_BYTES:], len(data), NAME)
    return msgpack.unpackb(data[trailer.footer :][: trailer.manifest_bytes])


def refooted(data: bytes, packed: bytes) -> bytes:
    """The layer with a different manifest and valid checksums."""
    return footed(data[: footer.trailer_of(data[-TRAILER_BYTES:], len(data), NAME).footer], packed)


def footed(data: bytes, packed: bytes) -> bytes:
    """A header and chunks, followed by a manifest and valid checksums."""
    at = len(data)
    nbytes = -(-(at + len(packed) + TRAILER_BYTES) // PAGE_BYTES) * PAGE_BYTES
    fixed = footer._TRAILER.pack(footer._TRAILER_MAGIC, footer.VERSION, nbytes, at, len(packed))
    tail = packed.ljust(nbytes - at - TRAILER_BYTES, b"\0") + fixed.ljust(TRAILER_BYTES - 4, b"\0")
    return data + tail + google_crc32c.value(tail).to_bytes(4, "little")


def with_fields(data: bytes, **changed) -> bytes:
    """The layer with changed manifest fields and valid checksums."""
    return refooted(data, msgpack.packb(fields_of(data) | changed))


def place_of(layer: LayerReader, offset: int) -> str:
    """The location that an error about a byte of a layer must name."""
    trailer = layer.nbytes - TRAILER_BYTES
    if offset < PAGE_BYTES:
        return f"{NAME}: header"
    for array in layer.manifest.arrays:
        for number, chunk in enumerate(layer.chunks_of(array)):
            if chunk.start <= offset < chunk.stop:
                shown = f"row group {array.row_group!r}, array {array.name!r}"
                return f"{NAME}: {shown}, chunk {number}"
    assert offset <= trailer + TRAILER_BYTES
    return f"{NAME}: footer"
