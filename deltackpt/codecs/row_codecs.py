# SPDX-License-Identifier: Apache-2.0
"""Codecs of rows: lossless, shorter floats, uniform quantization; found by name. Numpy only.

A lossless codec only defines how a field's bits are arranged in its stored array. A lossy one is
encoded by ``deltackpt.save.encode``, on the device or in the background, and decoded here, by numpy
or by ``deltackpt.kernels``.

With b bits, a byte has 8 / b positions, and a row of ``width`` codes takes ``plane = ceil(width * b
/ 8)`` bytes: byte j has code j in its lowest bits, code ``plane + j`` in the next, and so on, so
that packing and unpacking move whole runs of columns. For 3-bit codes, the lower two bits of each
code are stored first, then the third bits. Missing codes at the end are 0.

Source: Eisenman et al., "Check-N-Run", NSDI 2022, section 4.2 (symmetric, asymmetric, and adaptive
asymmetric: a greedy search of the range).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple, TypeGuard

import numpy as np

from deltackpt import kernels
from deltackpt.errors import OptionError
from deltackpt.format.dtypes import dtype_of, stored_dtype
from deltackpt.format.row_blocks import EncodedBlock, FieldSpec, RowBlock


class StoredArray(NamedTuple):
    """One stored array of a field, or of blocks of dense leaves.

    Attributes:
      trailing: shape of a row; of an element if it is ragged.
      dtype: stored dtype.
      byte_planes: whether chunks have their last axis first, and are compressed by zstd.
      zstd: whether chunks are compressed.
      ragged: whether the array ``count`` contains the number of elements of each row.
    """

    trailing: tuple[int, ...]
    dtype: np.dtype
    byte_planes: bool = False
    zstd: bool = False
    ragged: bool = False


class Codec(abc.ABC):
    """How the rows of one field are stored.

    Stateless and hashable. A codec has one or more stored arrays, named by suffix; the main one has
    the suffix ``""``, and the first axis of each is the rows. Rows that a lossy codec cannot
    represent are stored raw in additional arrays: see ``save.shard``.

    Attributes:
      name: in manifests and options.
      lossless: whether decoded rows are the rows bit for bit.
    """

    name: str
    lossless: ClassVar[bool] = False

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:  # noqa: B027
        """Checks that rows of a shape and dtype can be stored, and that they get smaller.

        Raises:
          OptionError: they cannot be stored, or would not get smaller.
        """

    @abc.abstractmethod
    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """Returns suffix to stored array, for rows of a given shape and dtype."""

    @abc.abstractmethod
    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """Decodes the rows into ``out``, (n, *trailing) of the table's dtype, contiguous."""

    def error_bound(self, rows: np.ndarray) -> np.ndarray:
        """Returns the largest l2 error of each representable row (n, *trailing), float64 (n,)."""
        return np.zeros(len(rows))


class Lossless(Codec):
    """A codec whose stored array is a view of the rows."""

    lossless = True

    @abc.abstractmethod
    def stored_view(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows (n, *trailing), contiguous, as the stored array."""

    @abc.abstractmethod
    def rows_view(self, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns the stored array as rows of ``dtype``."""

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """See ``Codec``."""
        np.copyto(self.stored_view(out), arrays[""])


class Raw(Lossless):
    """Stores the unchanged bits, so chunks can be read directly into their destination."""

    name = "raw"

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``Codec``."""
        return {"": StoredArray(trailing, stored_dtype(dtype))}

    def stored_view(self, rows: np.ndarray) -> np.ndarray:
        """See ``Lossless``."""
        return rows.view(stored_dtype(rows.dtype))

    def rows_view(self, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """See ``Lossless``."""
        return stored.view(dtype)


class BytePlanes(Lossless):
    """Byte planes of all elements of a chunk, compressed by zstd.

    This saves a seventh (measured 0.84 of normal, 0.86 of trained rows; zstd alone leaves 0.92 and
    0.94), at 1.5 GB/s on two cores: mantissas do not compress.
    """

    name = "lossless"

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:
        """See ``Codec``."""
        if dtype.itemsize == 1:
            raise OptionError(
                f"codec lossless: expected elements of at least two bytes, found {dtype.name}; use "
                "codec raw"
            )

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``Codec``."""
        return {"": StoredArray((*trailing, dtype.itemsize), np.dtype(np.uint8), True)}

    def stored_view(self, rows: np.ndarray) -> np.ndarray:
        """See ``Lossless``."""
        return rows.view(np.uint8).reshape(*rows.shape, rows.dtype.itemsize)

    def rows_view(self, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """See ``Lossless``."""
        return stored.view(dtype).reshape(stored.shape[:-1])


@dataclasses.dataclass(frozen=True)
class Constant(Codec):
    """Stores nothing: each byte of a row is ``byte``. A save chooses it for rows without an id."""

    name: str
    byte: int
    lossless: ClassVar[bool] = True

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``Codec``; there is no array."""
        return {}

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """See ``Codec``."""
        out.view(np.uint8)[...] = self.byte


@dataclasses.dataclass(frozen=True)
class ShorterFloat(Codec):
    """Stores float32 rows as a 16-bit float.

    It represents rows whose largest magnitude is 0 or in [smallest, largest]: from the smallest
    normal number, so that the error is relative to the row, to the greatest finite one whose square
    is far from overflow.

    Attributes:
      name: the codec's name.
      dtype: name of the 16-bit float dtype.
      mantissa_bits: number of explicit mantissa bits.
      smallest, largest: limits of the magnitude, as above.
    """

    name: str
    dtype: str
    mantissa_bits: int
    smallest: float
    largest: float

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:
        """See ``Codec``."""
        if dtype != np.float32:
            raise OptionError(
                f"codec {self.name}: expected float32 rows, found {dtype.name}; use codec raw"
            )

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``Codec``."""
        return {"": StoredArray(trailing, np.dtype(np.uint16))}

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """See ``Codec``; exact, since a float32 holds each shorter float."""
        if self.dtype == "bfloat16":
            # A bfloat16 is the upper half of a float32.
            np.left_shift(arrays[""], 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            kernels.widen_halves(arrays[""], out)

    def error_bound(self, rows: np.ndarray) -> np.ndarray:
        """See ``Codec``: half a unit in the last place; subnormal values may become 0."""
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float64)
        below = np.sqrt(flat.shape[1]) * self.smallest
        relative = 2.0 ** -(self.mantissa_bits + 1)
        unit = below * relative if self.dtype == "float16" else below
        return relative * np.linalg.norm(flat, axis=1) + unit


BFLOAT16 = ShorterFloat("bf16", "bfloat16", 7, 2.0**-126, 2.0**48)
FLOAT16 = ShorterFloat("fp16", "float16", 10, 2.0**-14, 65504.0)


#: Bits of a code to the (bits, shift within the code) of its parts, in the order of their bytes.
PARTS = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),), 8: ((8, 0),)}
_LOWER = np.uint64(0x0F0F0F0F0F0F0F0F)


def packed_bytes(width: int, bits: int) -> int:
    """Returns the bytes of ``width`` codes of ``bits`` bits.

    Examples:
      >>> packed_bytes(64, 3), packed_bytes(10, 3), packed_bytes(5, 4)
      (24, 5, 3)
    """
    return sum(plane_bytes(width, part) for part, _ in PARTS[bits])


def plane_bytes(width: int, bits: int) -> int:
    """Returns the columns of one plane: the codes at the same position of their bytes."""
    return -(-width * bits // 8)


def unpack(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Unpacks rows (n, packed_bytes) uint8 to codes (n, width) uint8.

    Examples:
      >>> unpack(np.array([[0x21, 0x43]], np.uint8), 4, 3).tolist()
      [[1, 3, 2]]
    """
    if bits == 8:
        return packed
    codes = np.empty((len(packed), width), np.uint8)
    if bits == 4 and width % 16 == 0 and packed.flags.c_contiguous:
        _unpack_words(packed.view(np.uint64), codes.view(np.uint64))
        return codes
    start = 0
    for part, shift in PARTS[bits]:
        plane = plane_bytes(width, part)
        held = packed[:, start : start + plane]
        start += plane
        for place in range(8 // part):
            out = codes[:, place * plane : (place + 1) * plane]
            code = held[:, : out.shape[1]] >> (place * part)
            code &= (1 << part) - 1
            if shift:
                out |= code << shift
            else:
                out[...] = code
    return codes


def _unpack_words(packed: np.ndarray, codes: np.ndarray) -> None:
    """Codes of 4 bits, 8 bytes at a time: thrice as fast."""
    half = packed.shape[1]
    np.bitwise_and(packed, _LOWER, out=codes[:, :half])
    np.right_shift(packed, 4, out=codes[:, half:])
    codes[:, half:] &= _LOWER


def pack(codes: np.ndarray) -> np.ndarray:
    """Packs 4-bit codes, (n, width) uint8, the inverse of ``unpack``; width is a multiple of 16.

    Examples:
      >>> codes = np.arange(16, dtype=np.uint8)[None]
      >>> bytes(pack(codes)[0, :3]).hex(), (unpack(pack(codes), 4, 16) == codes).all().item()
      ('8091a2', True)
    """
    words = np.ascontiguousarray(codes).view(np.uint64)
    half = words.shape[1] // 2
    # No code leaves its byte.
    packed = words[:, half:] << 4
    packed |= words[:, :half]
    return packed.view(np.uint8)


#: Magnitudes whose squares, steps and their inverses are normal float32 numbers. Rows whose
#: largest magnitude is neither 0 nor within are not representable.
SMALLEST, LARGEST = 2.0**-48, 2.0**48
#: In float16 tables: a decoded number may lie a step beyond the row, and must not overflow.
_LARGEST_FLOAT16 = 2.0**15
#: A row's parameters are float16 if its largest magnitude is below the first, and its scale is 0 or
#: at least the second; else they are bfloat16, which the sign bit of the scale indicates.
FLOAT16_BELOW, FLOAT16_SCALE = 2.0**15, 2.0**-16
BFLOAT16_FLAG = 0x8000
#: Parameters of one row in bytes, each.
_PARAMETER = np.dtype(np.float16)
#: Dtype to the relative rounding error of its numbers, and half of its least subnormal number.
_ROUNDING = {
    "float32": (0.0, 0.0),
    "bfloat16": (2.0**-8, 2.0**-126),
    "float16": (2.0**-11, 2.0**-25),
}
_DTYPES = tuple(_ROUNDING)


def largest(dtype: np.dtype) -> float:
    """Returns the largest magnitude of representable rows of a dtype."""
    return _LARGEST_FLOAT16 if dtype.name == "float16" else LARGEST


@dataclasses.dataclass(frozen=True)
class Uniform(Codec):
    """Codes k of a row x, decoded as ``(k - middle) * scale + offset``.

    Asymmetric codes cover [min, max] of the row with ``2**bits`` levels. Symmetric ones have no
    offset: 0 is exact, and one of the ``2**bits`` levels is unused.

    Attributes:
      name: the codec's name.
      bits: bits per code: 2, 3, 4 or 8.
      symmetric: whether codes are symmetric around 0, without an offset.
      bins: the greedy search shrinks the range in steps of ``1 / bins``, from the end with the
        smaller L2 error, and keeps the best range; 0 for no search.
      ratio: maximum share of the range that the search may remove.
      refits: number of least-squares fits of scale and offset to the codes after the search; a fit
        is kept only if it reduces the l2 error.
    """

    name: str
    bits: int
    symmetric: bool = False
    bins: int = 0
    ratio: float = 0.0
    refits: int = 0

    @property
    def middle(self) -> int:
        """Returns the code whose value is the offset."""
        return 1 << (self.bits - 1)

    @property
    def lowest(self) -> int:
        """Returns the lowest code minus the middle."""
        return 1 - self.middle if self.symmetric else -self.middle

    @property
    def highest(self) -> int:
        """Returns the highest code minus the middle."""
        return self.middle - 1

    @property
    def steps(self) -> int:
        """Returns the number of steps of the search."""
        return round(self.bins * self.ratio)

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:
        """See ``Codec``."""
        if dtype.name not in _DTYPES:
            raise OptionError(
                f"codec {self.name}: expected rows of {', '.join(_DTYPES)}, found {dtype.name}; "
                "use codec raw"
            )
        stored = sum(
            int(np.prod(array.trailing, dtype=np.int64)) * array.dtype.itemsize
            for array in self.stored(trailing, dtype).values()
        )
        raw = math.prod(trailing) * dtype.itemsize
        if stored >= raw:
            raise OptionError(
                f"codec {self.name}: expected rows wide enough to gain, found {dtype.name} rows of "
                f"shape {trailing}: {raw} bytes raw, {stored} encoded; use codec raw or "
                "bf16"
            )

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``Codec``."""
        codes = (packed_bytes(math.prod(trailing), self.bits),)
        arrays = {
            "": StoredArray(codes, np.dtype(np.uint8)),
            "scale": StoredArray((), _PARAMETER),
        }
        return arrays if self.symmetric else arrays | {"offset": StoredArray((), _PARAMETER)}

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """See ``Codec``: in float32, the product rounded, then the sum."""
        width = math.prod(out.shape[1:])
        if kernels.available() and out.dtype == np.float32 and out.flags.carray and width:
            kernels.decode_uniform(
                arrays[""], arrays["scale"], arrays.get("offset"), self.bits, out
            )
            return
        codes = unpack(arrays[""], self.bits, width)
        centred = (codes ^ 0x80).view(np.int8) if self.bits == 8 else codes.view(np.int8)
        if self.bits < 8:
            centred -= np.int8(self.middle)
        scale, offset = self._parameters(arrays)
        values = out.reshape(len(out), width)
        if out.dtype != np.float32:
            values = np.empty((len(out), width), np.float32)
        np.multiply(centred, scale[:, None], out=values)
        if offset is not None:
            np.add(values, offset[:, None], out=values)
        if out.dtype != np.float32:
            np.copyto(out.reshape(len(out), width), values, casting="same_kind")

    def _parameters(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
        """Scale and offset of each row, float32 (n,)."""
        is_bfloat16 = (arrays["scale"].view(np.uint16) & BFLOAT16_FLAG) != 0

        def widened(array: np.ndarray, mask: int) -> np.ndarray:
            patterns = array.view(np.uint16) & np.uint16(mask)
            as_bfloat16 = (patterns.astype(np.uint32) << 16).view(np.float32)
            return np.where(is_bfloat16, as_bfloat16, array.astype(np.float32))

        scale = widened(arrays["scale"], BFLOAT16_FLAG - 1)
        return scale, None if self.symmetric else widened(arrays["offset"], 0xFFFF)

    def error_bound(self, rows: np.ndarray) -> np.ndarray:
        """See ``Codec``: half a step for each element, and the rounding of the parameters.

        The search and the fits begin with the row's whole range and keep the best, so the bound of
        the plain codec also applies to them.
        """
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float64)
        low, high = flat.min(axis=1, initial=np.inf), flat.max(axis=1, initial=-np.inf)
        magnitude = np.maximum(-low, high)
        if self.symmetric:
            step = magnitude / self.highest
        else:
            step = (high - low) / (self.highest - self.lowest)
        # The codes reach a step beyond the row: there the encoder may take bfloat16 earlier.
        half = (magnitude + 2 * step < FLOAT16_BELOW) & ((step >= FLOAT16_SCALE) | (step == 0))
        # Of scale and offset together: the last place of float16 (2**-15 below its normal
        # numbers), or of bfloat16; and what float32 rounds on the way.
        rounding = np.where(half, 2.0**-9 * magnitude + 2.0**-24, 2.0**-6 * magnitude)
        rounding += np.where(half, 2.0**-25 / FLOAT16_SCALE * step * self.middle, 0)
        # Of the table's own dtype.
        own, unit = _ROUNDING[rows.dtype.name]
        each = step / 2 + rounding + own * (magnitude + step) + unit
        return np.sqrt(flat.shape[1]) * each


#: Bits, bins and ratios of Check-N-Run, section 5.2.
_SEARCHED = ((4, 45, 0.2), (3, 25, 0.5), (2, 25, 0.5))
UNIFORM = (
    *(Uniform(f"int{bits}", bits) for bits in (8, 4, 3, 2)),
    *(Uniform(f"symmetric{bits}", bits, symmetric=True) for bits in (8, 4, 3, 2)),
    *(Uniform(f"greedy{bits}", bits, bins=bins, ratio=ratio) for bits, bins, ratio in _SEARCHED),
    *(
        Uniform(f"adaptive{bits}", bits, bins=bins, ratio=ratio, refits=2)
        for bits, bins, ratio in _SEARCHED
    ),
    Uniform("adaptive8", 8, refits=2),
)
_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Raw(), BytePlanes(), BFLOAT16, FLOAT16, *UNIFORM)
}

#: Codecs of rows without an id: of their values and slots, and of their key column.
ZEROS, ONES = "zeros", "ones"
_CONSTANTS = {ZEROS: Constant(ZEROS, 0x00), ONES: Constant(ONES, 0xFF)}

#: Suffixes of the rows that a lossy codec does not hold, as they are, and of their positions.
RAW_ROWS, RAW_POSITIONS = "raw", "raw_at"
#: Every suffix of a stored array.
SUFFIXES = ("scale", "offset", RAW_ROWS, RAW_POSITIONS)

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


def parse_codec(name: str) -> Codec:
    """Returns the codec of a field of a segment: one that an option can name, or a constant."""
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
    codec, dtype = parse_codec(spec.codec), dtype_of(spec.dtype)
    names = {suffix: array_name(spec.name, suffix) for suffix in codec.stored(spec.trailing, dtype)}
    arrays = {suffix: encoded.arrays[name] for suffix, name in names.items()}
    if arrays and is_lossless(codec):
        return codec.rows_view(arrays[""], dtype)
    out = np.empty((len(encoded.rows), *spec.trailing), dtype)
    codec.decode(arrays, out)
    return out
