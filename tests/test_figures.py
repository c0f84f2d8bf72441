# SPDX-License-Identifier: Apache-2.0
"""Figures of tables from synthetic records: row sizes, byte shares, errors."""

import math

import pytest

from deltackpt.format.manifest import TableEntry, table_figures
from deltackpt.format.row_blocks import Encoding, FieldSpec, GroupEntry, Segment

VALUES = FieldSpec(name="values", trailing=(4,), dtype="bfloat16")
MOMENT = FieldSpec(name="slot.mu", trailing=(), dtype="float32")
GROUP = GroupEntry(name="g0", rows=10, fields=(VALUES, MOMENT))
TABLES = (
    TableEntry(name="b", group="g0", offset=0, rows=6, leaves={}),
    TableEntry(name="a", group="g0", offset=6, rows=4, leaves={}),
)


def segment(*encodings: Encoding, columns: tuple[int, int] = (0, 4)) -> Segment:
    return Segment(
        name="s",
        group="g0",
        columns=columns,
        count=4,
        ranges=((0, 4),),
        fields=("values",),
        arrays=(),
        encodings=encodings,
    )


def encoding(
    field: str = "values",
    *,
    codec: str = "raw",
    nbytes: int = 40,
    rows: tuple[int, ...] = (3, 1),
    error: tuple[float, ...] = (0.0, 0.0),
    norm: tuple[float, ...] = (0.0, 0.0),
) -> Encoding:
    return Encoding(
        field=field,
        codec=codec,
        reason=f"{codec} was asked for",
        nbytes=nbytes,
        rows=rows,
        squared_error=error,
        squared_norm=norm,
    )


def test_a_row_has_the_bytes_of_its_columns() -> None:
    assert (VALUES.row_bytes, MOMENT.row_bytes, GROUP.row_bytes) == (8, 4, 12)
    assert FieldSpec(name="slot.none", trailing=(0,), dtype="float32").row_bytes == 0


def test_the_bytes_of_a_field_are_divided_by_rows() -> None:
    found = table_figures((GROUP,), TABLES, [segment(encoding())])
    assert [(f.table, f.field, f.rows, f.nbytes) for f in found] == [
        ("b", "values", 3, 30),
        ("a", "values", 1, 10),
    ]
    assert found[0].ratio == pytest.approx(30 / (3 * 8))
    assert found[0].relative_error == 0.0


def test_a_table_without_rows_is_left_out() -> None:
    found = table_figures((GROUP,), TABLES, [segment(encoding(rows=(0, 2)))])
    assert [f.table for f in found] == ["a"]


def test_rows_of_several_column_ranges_count_once_but_all_bytes_count() -> None:
    halves = [segment(encoding(), columns=(0, 2)), segment(encoding(), columns=(2, 4))]
    found = table_figures((GROUP,), TABLES, halves)
    assert (found[0].rows, found[0].nbytes) == (3, 60)


def test_codecs_and_errors_of_all_segments_are_combined() -> None:
    parts = [
        segment(encoding(codec="uniform8", error=(1.0, 0.0), norm=(16.0, 4.0))),
        segment(encoding(codec="raw", error=(3.0, 0.0), norm=(0.0, 0.0))),
    ]
    found = table_figures((GROUP,), TABLES, parts)[0]
    assert found.codec == "raw+uniform8"
    assert found.reason == "raw was asked for; uniform8 was asked for"
    assert found.relative_error == math.sqrt(4 / 16)
