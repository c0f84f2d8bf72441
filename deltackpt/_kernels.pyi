# SPDX-License-Identifier: Apache-2.0
from typing import Any

SOURCE_CRC32: int

def paths() -> tuple[str, ...]: ...
def path() -> str: ...
def use(name: str, /) -> None: ...

# Rows.
def gather(
    sources: list[Any],
    itemsize: int,
    row_items: int,
    firsts: Any,
    stops: Any,
    rows: Any,
    out: Any,
    /,
) -> None: ...
def scatter(
    source: Any, row_bytes: int, positions: Any | None, rows: Any, first: int, out: Any, /
) -> None: ...
def scan(stamps: Any, clock: int, first: int, out: Any, /) -> int: ...
def encode_uniform(
    rows: Any,
    dtype: str,
    width: int,
    codec: tuple[int, bool, int, int, float, float, float],
    codes: Any,
    scale: Any,
    offset: Any | None,
    held: Any,
    squared_error: Any,
    squared_norm: Any,
    /,
) -> None: ...
def encode_shorter(
    rows: Any,
    width: int,
    dtype: str,
    smallest: float,
    largest: float,
    codes: Any,
    held: Any,
    squared_error: Any,
    squared_norm: Any,
    /,
) -> None: ...
def decode_uniform(
    codes: Any, scale: Any, offset: Any | None, bits: int, width: int, out: Any, /
) -> None: ...
def widen_halves(patterns: Any, out: Any, /) -> None: ...

# Blocks.
def encode_blocks(
    codec: int,
    dtype: int,
    now: Any,
    before: Any,
    out: Any,
    states: Any,
    codes: Any,
    words: Any,
    steps: Any,
    table: Any,
    low: int,
    high: int,
    /,
) -> tuple[int, float, float]: ...
def decode_blocks(
    codec: int,
    dtype: int,
    rows: Any,
    first: int,
    count: int,
    codes: Any,
    words: Any,
    steps: Any,
    table: Any,
    data: Any,
    /,
) -> None: ...
def encode_sparse(
    itemsize: int,
    most: int,
    now: Any,
    before: Any,
    states: Any,
    counts: Any,
    at: Any,
    changes: Any,
    /,
) -> tuple[int, int]: ...
def apply_sparse(
    itemsize: int,
    rows: Any,
    first: int,
    count: int,
    counts: Any,
    at: Any,
    changes: Any,
    data: Any,
    /,
) -> None: ...

# Checksums.
def crc32c_blocks(
    data: Any, out: Any | None, block_bytes: int, used: int, crc: int, sums: Any, /
) -> bool: ...
