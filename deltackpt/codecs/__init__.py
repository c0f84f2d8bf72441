# SPDX-License-Identifier: Apache-2.0
"""Codecs: how rows are stored. They need only numpy, so readers without jax can use them.

Decode arithmetic is normative: see ``docs/reference/format.md``. Lossy codecs are encoded by
``deltackpt.save.encode``.
"""

from deltackpt.codecs.row_codecs import (
    ONES,
    RAW_POSITIONS,
    RAW_ROWS,
    SUFFIXES,
    ZEROS,
    Codec,
    Lossless,
    ShorterFloat,
    StoredArray,
    Uniform,
    array_name,
    decode_block,
    get,
    is_constant,
    is_lossless,
    names,
    parse_codec,
    wider,
)
from deltackpt.format.dtypes import can_store, dtype_of, stored_dtype, without_elements

__all__ = [
    "RAW_ROWS",
    "RAW_POSITIONS",
    "Codec",
    "ONES",
    "SUFFIXES",
    "ZEROS",
    "Lossless",
    "ShorterFloat",
    "StoredArray",
    "Uniform",
    "array_name",
    "can_store",
    "decode_block",
    "dtype_of",
    "get",
    "is_constant",
    "is_lossless",
    "names",
    "parse_codec",
    "stored_dtype",
    "wider",
    "without_elements",
]
