# SPDX-License-Identifier: Apache-2.0
"""The codec protocol, the registry, and whole blocks through it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import ml_dtypes
import numpy as np

from deltackpt.blocks import VALUES, EncodedBlock, RowBlock
from deltackpt.codecs.dtypes import dtype_of, stored_dtype
from deltackpt.errors import OptionError
from deltackpt.manifest import GroupEntry


class Codec(Protocol):
    """Encodes the rows of one field.

    Pure and stateless: the same values give the same arrays. A codec yields one or more arrays,
    named by suffix; the main one has the suffix ``""``.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    #: Whether the stored bits are the values' own: ``encode`` and ``decode`` are views.
    zero_copy: ClassVar[bool]

    def stored(
        self, trailing: tuple[int, ...], dtype: np.dtype
    ) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        """Suffix to (trailing shape, stored dtype) for rows of that shape and dtype.

        Raises:
          OptionError: the codec cannot hold such rows.
        """
        ...

    def encode(self, values: np.ndarray) -> Mapping[str, np.ndarray]:
        """Suffix to array for (n, *trailing) rows; may be views of them."""
        ...

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """Writes the rows into ``out``, (n, *trailing) of the table's dtype."""
        ...

    def relative_error_bound(self, dtype: np.dtype) -> float:
        """Most |decoded - value| / |value| of a finite, normal value."""
        ...


class _Raw:
    """The bits as they are."""

    name: ClassVar[str] = "raw"
    lossless: ClassVar[bool] = True
    zero_copy: ClassVar[bool] = True

    def stored(
        self, trailing: tuple[int, ...], dtype: np.dtype
    ) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        return {"": (trailing, stored_dtype(dtype))}

    def encode(self, values: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"": values.view(stored_dtype(values.dtype))}

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        np.copyto(out.view(arrays[""].dtype), arrays[""])

    def relative_error_bound(self, dtype: np.dtype) -> float:
        return 0.0


class _BFloat16:
    """float32 rows as bfloat16, rounded to nearest even; NaN and infinities stay what they are."""

    name: ClassVar[str] = "bf16"
    lossless: ClassVar[bool] = False
    zero_copy: ClassVar[bool] = False

    def stored(
        self, trailing: tuple[int, ...], dtype: np.dtype
    ) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        if dtype != np.float32:
            raise OptionError(
                f"codec bf16: expected float32 rows, found {dtype.name}; use codec raw"
            )
        return {"": (trailing, np.dtype(np.uint16))}

    def encode(self, values: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"": values.astype(ml_dtypes.bfloat16).view(np.uint16)}

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        # A bfloat16 is the upper half of a float32.
        np.left_shift(arrays[""], 16, out=out.view(np.uint32), dtype=np.uint32)

    def relative_error_bound(self, dtype: np.dtype) -> float:
        return 2.0**-8


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (_Raw(), _BFloat16())}


def get(name: str) -> Codec:
    """The codec of a name.

    Raises:
      OptionError: there is none.
    """
    try:
        return _CODECS[name]
    except KeyError:
        raise OptionError(
            f"codec {name!r}: expected one of {sorted(_CODECS)}, found an unknown name; choose "
            "one of them, or install a newer deltackpt if a checkpoint asks for it"
        ) from None


def decode_block(encoded: EncodedBlock, group: GroupEntry) -> RowBlock:
    """Decodes the fields of a block, as the group describes them; views where no bit changes."""
    fields = {}
    for spec in group.fields:
        if spec.name not in encoded.arrays:
            continue
        codec, dtype = get(spec.codec), dtype_of(spec.dtype)
        names = {
            suffix: f"{spec.name}.{suffix}" if suffix else spec.name
            for suffix in codec.stored(spec.trailing, dtype)
        }
        arrays = {suffix: encoded.arrays[name] for suffix, name in names.items()}
        if codec.zero_copy:
            fields[spec.name] = arrays[""].view(dtype)
            continue
        trailing = spec.trailing
        if spec.name == VALUES and trailing:
            trailing = (encoded.columns[1] - encoded.columns[0], *trailing[1:])
        fields[spec.name] = np.empty((len(encoded.rows), *trailing), dtype)
        codec.decode(arrays, fields[spec.name])
    return RowBlock(encoded.group, encoded.rows, encoded.columns, fields)
