# SPDX-License-Identifier: Apache-2.0
"""Exports tables of a step as Parquet files, for feature stores and data frames."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deltackpt import inspect
from deltackpt.__about__ import __version__
from deltackpt.errors import MissingExtra, OptionError, TemplateMismatch
from deltackpt.format import naming, row_blocks
from deltackpt.inspect import LazyArray, Step, Table
from deltackpt.interchange.target import Exported, exported, local_path, published, widened
from deltackpt.options import KafkaWal
from deltackpt.reading.reader import Progress, ProgressMeter

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP_BYTES = 32 << 20
_ROW = "row"
#: numpy types that Parquet also has.
_KNOWN = {"bool", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


@dataclasses.dataclass(frozen=True, eq=False)
class _Column:
    """A column of a table's file: ``values`` or ``slot.<name>``, with the dtype as stored."""

    name: str
    array: LazyArray
    dtype: np.dtype

    @property
    def width(self) -> int:
        return math.prod(self.array.shape[1:])


def export_parquet(
    directory: str | os.PathLike[str],
    step: int | None,
    target: str | os.PathLike[str],
    *,
    item: str | None = None,
    tables: Sequence[str] = ("**",),
    slots: bool = True,
    rows: tuple[int, int] | None = None,
    wal: KafkaWal | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes tables of a step as Parquet files, one per table, in row groups with zstd.

    A file is named after its table, percent-encoded: ``params%2Femb.parquet``. Its columns are
    ``row`` (int64), ``values``, and ``slot.<name>`` for each slot. Columns are fixed-size lists, or
    scalars if a row is a single value. ``bfloat16`` and 8-bit floats are widened to ``float32``,
    integers of less than 8 bits to ``int8`` or ``uint8``, without loss. The schema's metadata
    records the original dtype, the shape of a row, the table, the step and the save id.

    Needs memory for one row group (32 MiB of rows); every byte is verified when it is read. Dense
    leaves are not exported.

    Args:
      directory: the checkpoint directory.
      step: the step; None for the newest.
      target: the new directory; it appears complete or not at all.
      item: name of the deltackpt item in the steps; detected by default.
      tables: path patterns of the tables, or suffixes that match exactly one path each.
      slots: whether to export slots as well.
      rows: half-open range of row indices, for each table; all rows by default.
      wal: how to read WAL records in Kafka, such as ``KafkaWal(config=...)``.
      progress: called with the bytes of rows written so far and the total, before compression.

    Raises:
      MissingExtra: pyarrow is not installed.
      TemplateMismatch: a pattern matches no table, or a table has fewer rows.
      OptionError: Parquet does not support a table's dtype.
      TargetExists: the target exists.
      RestoreError: the step is not readable.
      OutOfSpace, StorageError: the file system reported an error.
    """
    _pyarrow()
    goal = local_path(target)
    with inspect.open(directory, item=item, wal=wal) as checkpoints:
        found = checkpoints.at(step)
        chosen = _chosen(found, tables)
        spans = {name: _span(found.tables[name], rows) for name in chosen}
        columns = {name: _columns(found.tables[name], slots) for name in chosen}
        total = sum(
            (spans[name].stop - spans[name].start) * _row_bytes(columns[name]) for name in chosen
        )
        count = ProgressMeter(progress, total).add
        with published(goal) as temporary:
            for name in chosen:
                path = temporary / f"{urllib.parse.quote(name, safe='')}.parquet"
                metadata = {"table": name, "step": str(found.step), "save_id": found.save_id}
                _write(path, columns[name], spans[name], metadata, count)
    changed = {
        f"{name}: {column.name}": column.dtype.name
        for name in chosen
        for column in columns[name]
        if column.dtype != column.array.dtype
    }
    return exported(goal, found.step, changed=changed)


def _pyarrow() -> types.ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "export to Parquet: expected the package pyarrow, found that it cannot be imported; "
            "install it: "
            "pip install 'deltackpt[interchange]'"
        ) from error
    return pyarrow


def _chosen(step: Step, patterns: Sequence[str]) -> list[str]:
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = {name for name in step.tables if naming.matches(pattern, name)}
        matched = matched or {naming.meant(pattern, step.tables, TemplateMismatch)} & {*step.tables}
        if not matched:
            raise TemplateMismatch(
                f"step {step.step}: expected a table that matches {pattern!r}, found\n"
                f"{naming.listed(step.tables)}\nask for one of them"
            )
        found |= matched
    return sorted(found)


def _span(table: Table, rows: tuple[int, int] | None) -> range:
    start, stop = rows or (0, len(table))
    if not 0 <= start <= stop <= len(table):
        raise TemplateMismatch(
            f"table {table.name}: expected a row range within [0, {len(table)}), found "
            f"[{start}, {stop}); choose rows within that range"
        )
    return range(start, stop)


def _columns(table: Table, slots: bool) -> list[_Column]:
    fields = [row_blocks.VALUES]
    if slots:
        fields += [row_blocks.slot_field(slot) for slot in table.slots]
    arrays = {field: table.field(field) for field in fields}
    return [_Column(name, array, _column_dtype(array)) for name, array in arrays.items()]


def _column_dtype(array: LazyArray) -> np.dtype:
    if (dtype := widened(array.dtype, _KNOWN)) is not None:
        return dtype
    raise OptionError(
        f"table {array.name}: expected a dtype that Parquet supports, found {array.dtype.name}; "
        "leave the table out"
    )


def _row_bytes(columns: Sequence[_Column]) -> int:
    return sum(column.width * column.dtype.itemsize for column in columns)


def _write(
    path: Path,
    columns: Sequence[_Column],
    rows: range,
    metadata: Mapping[str, str],
    count: Callable[[int], None],
) -> None:
    arrow = _pyarrow()
    schema = _schema(columns, metadata)
    group_rows = max(1, _GROUP_BYTES // max(1, _row_bytes(columns)))
    # A Python file object, so that errors are OSErrors.
    with (
        open(path, "wb") as file,
        arrow.parquet.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=False
        ) as writer,
    ):
        for start in range(rows.start, rows.stop, group_rows):
            group = range(start, min(rows.stop, start + group_rows))
            arrays = [arrow.array(np.arange(group.start, group.stop, dtype=np.int64))]
            arrays += [_arrow_rows(column, group, arrow) for column in columns]
            batch = arrow.RecordBatch.from_arrays(arrays, schema=schema)
            writer.write_batch(batch, row_group_size=len(group))
            count(len(group) * _row_bytes(columns))


def _schema(columns: Sequence[_Column], metadata: Mapping[str, str]) -> pa.Schema:
    arrow = _pyarrow()
    fields = [arrow.field(_ROW, arrow.int64(), nullable=False)]
    for column in columns:
        kind = arrow.from_numpy_dtype(column.dtype)
        if column.array.ndim > 1:
            kind = arrow.list_(arrow.field("element", kind, nullable=False), column.width)
        fields.append(arrow.field(column.name, kind, nullable=False))
    described = {
        column.name: {"dtype": column.array.dtype.name, "row_shape": column.array.shape[1:]}
        for column in columns
    }
    return arrow.schema(
        fields,
        metadata={
            "deltackpt": __version__,
            **{f"deltackpt.{key}": text for key, text in metadata.items()},
            "deltackpt.columns": json.dumps(described),
        },
    )


def _arrow_rows(column: _Column, rows: range, arrow: types.ModuleType) -> pa.Array:
    found = column.array.rows(rows).astype(column.dtype, copy=False)
    flat = arrow.array(np.ascontiguousarray(found).reshape(-1))
    if column.array.ndim == 1:
        return flat
    kind = _schema([column], {}).field(column.name).type
    return arrow.FixedSizeListArray.from_arrays(flat, type=kind)
