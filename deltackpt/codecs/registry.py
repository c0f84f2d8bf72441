# SPDX-License-Identifier: Apache-2.0
"""Codecs by name, and decoding of whole blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import numpy as np

from deltackpt.codecs.codec import Codec, Lossless
from deltackpt.codecs.floats import BFLOAT16, FLOAT16
from deltackpt.codecs.lossless import BytePlanes, Constant, Raw
from deltackpt.codecs.uniform import UNIFORM
from deltackpt.errors import OptionError
from deltackpt.format.blocks import EncodedBlock, RowBlock
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.segments import FieldSpec

_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Raw(), BytePlanes(), BFLOAT16, FLOAT16, *UNIFORM)
}

#: Codecs of rows without an id: of their values and slots, and of their key column.
ZEROS, ONES = "zeros", "ones"
_CONSTANTS = {ZEROS: Constant(ZEROS, 0x00), ONES: Constant(ONES, 0xFF)}

#: Suffixes of the rows that a lossy codec does not hold, as they are, and of their positions.
BESIDE, BESIDE_AT = "raw", "raw_at"
#: Every suffix of a stored array.
SUFFIXES = ("scale", "offset", BESIDE, BESIDE_AT)

#: What holds rows more precisely than a codec of so many bits.
_WIDER_BITS = {2: "3", 3: "4", 4: "8"}


def names() -> list[str]:
    """Returns the names of all codecs that an option can name."""
    return sorted(_CODECS)


def get(name: str) -> Codec:
    """Returns the codec of a name.

    Raises:
      OptionError: the name is unknown.
    """
    try:
        return _CODECS[name]
    except KeyError:
        raise OptionError(
            f"codec {name!r}: expected one of {names()}, found an unknown name; choose one of "
            "them (codes are packed in 2, 3, 4 or 8 bits), or install a newer deltackpt if a "
            "checkpoint asks for it"
        ) from None


def of_segment(name: str) -> Codec:
    """Returns the codec of a field of a segment: one that an option can name, or a constant.

    Raises:
      OptionError: the name is unknown.
    """
    return _CONSTANTS.get(name) or get(name)


def is_constant(name: str) -> bool:
    """Returns whether a codec stores nothing, because all bits of its rows are equal."""
    return name in _CONSTANTS


def is_lossless(codec: Codec) -> TypeGuard[Lossless]:
    """Returns whether a codec is lossless, so that decoding returns a view."""
    return codec.lossless


def wider(name: str) -> str:
    """Returns the next more precise codec: more bits of the same kind, then bf16, then raw.

    Examples:
      >>> wider("adaptive2"), wider("int8"), wider("bf16")
      ('adaptive3', 'bf16', 'raw')
    """
    family, bits = name.rstrip("2348"), name[-1:]
    if get(name).lossless:
        return "raw"
    if bits.isdecimal() and int(bits) in _WIDER_BITS:
        found = family + _WIDER_BITS[int(bits)]
        return found if found in _CODECS else f"int{_WIDER_BITS[int(bits)]}"
    return "raw" if name in (BFLOAT16.name, FLOAT16.name) else BFLOAT16.name


def array_name(field: str, suffix: str) -> str:
    """Returns the name of a field's stored array."""
    return f"{field}.{suffix}" if suffix else field


def decode_block(encoded: EncodedBlock, specs: Iterable[FieldSpec]) -> RowBlock:
    """Decodes the fields of a block by their specs; returns views if no bit changes.

    Specs are those of the block's segment: ``Segment.spec``.
    """
    fields = {
        spec.name: _decoded(encoded, spec)
        for spec in specs
        if spec.name in encoded.arrays or is_constant(spec.codec)
    }
    return RowBlock(encoded.group, encoded.rows, encoded.columns, fields)


def _decoded(encoded: EncodedBlock, spec: FieldSpec) -> np.ndarray:
    codec, dtype = of_segment(spec.codec), dtype_of(spec.dtype)
    names = {suffix: array_name(spec.name, suffix) for suffix in codec.stored(spec.trailing, dtype)}
    arrays = {suffix: encoded.arrays[name] for suffix, name in names.items()}
    if arrays and is_lossless(codec):
        return codec.rows_view(arrays[""], dtype)
    out = np.empty((len(encoded.rows), *spec.trailing), dtype)
    codec.decode(arrays, out)
    return out
