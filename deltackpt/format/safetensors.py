# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files. No I/O.

A file is the header's length as 8 little-endian bytes, the header as JSON padded to a multiple of
8, then the tensors' bytes in the header's order, without gaps. The safetensors library writes whole
files from memory; this project streams rows, and checks what it reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import dtypes

#: The header's entry that is not a tensor.
METADATA = "__metadata__"
#: Name of each dtype in the format.
NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {written: name for name, written in NAMES.items()}
_LENGTH_BYTES = 8


class Tensor(NamedTuple):
    """One tensor of a file.

    Attributes:
      dtype: its dtype, one of ``NAMES``.
      shape: its shape.
    """

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Returns the first bytes of a file, before the tensors' bytes.

    Args:
      tensors: name to tensor, in the order of their bytes.
      metadata: further entries.
    """
    found: dict[str, object] = {METADATA: metadata}
    at = 0
    for name, one in tensors.items():
        offsets = [at, at + one.nbytes]
        dtype = NAMES[one.dtype.name]
        found[name] = {"dtype": dtype, "shape": list(one.shape), "data_offsets": offsets}
        at += one.nbytes
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parsed(data: bytes, shown: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Returns the metadata and the tensors of a file, which share its memory.

    Args:
      data: the whole file.
      shown: its name in errors.

    Raises:
      Damaged: it is truncated, or not such a file.
    """
    try:
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        found = json.loads(data[_LENGTH_BYTES:start])
        metadata = {str(key): str(text) for key, text in found.pop(METADATA, {}).items()}
        arrays: dict[str, np.ndarray] = {}
        end = start
        for name, one in found.items():
            tensor = Tensor(dtypes.dtype_of(_DTYPES[one["dtype"]]), tuple(map(int, one["shape"])))
            if min(tensor.shape, default=0) < 0 or [*one["data_offsets"]] != [
                end - start,
                end - start + tensor.nbytes,
            ]:
                raise ValueError(f"{name} at {one['data_offsets']}")
            flat = np.frombuffer(data, np.uint8, tensor.nbytes, end)
            arrays[name] = flat.view(tensor.dtype).reshape(tensor.shape)
            end += tensor.nbytes
        if end != len(data):
            raise ValueError(f"{len(data) - end} bytes after the tensors")
        return metadata, arrays
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(shown, "a safetensors file", str(error)) from error
