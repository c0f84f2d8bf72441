# SPDX-License-Identifier: Apache-2.0
"""Codecs of dense leaves: blocks of 256 elements, most of them as changes of a reference.

A *reference* is the decoded block of the parent. A *relative* codec stores the change from it, so
errors do not add up along a chain: each save corrects the errors of the previous one. Other codecs
need no reference, and a reader starts with the newest block that uses one of them.

Decode arithmetic is normative: in float32 a product without rounding error (a code of at most 8
bits, a scale of at most 11), then one sum, rounded once; the result is the same whether they are
fused or not. Subnormal numbers follow IEEE 754. A sum is subnormal only if the reference is
and the code is 0: scales are so large that a sum that nearly cancels is 0 or far from subnormal.
Compilers that flush subnormal numbers to 0, such as XLA on the CPU, must not change blocks that
contain one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from deltackpt.codecs import logarithms, registry
from deltackpt.codecs.block_codec import FLOATS, BlockCodec
from deltackpt.codecs.codec import StoredArray
from deltackpt.codecs.uniform import Uniform
from deltackpt.codecs.widening import widened
from deltackpt.errors import OptionError
from deltackpt.format.dense_blocks import BLOCK
from deltackpt.format.dtypes import stored_dtype

#: Blocks that are encoded or decoded at once: 1 MiB of float32. With fewer, the calls cost more
#: than the cache saves.
PIECE_BLOCKS = 1024


def bits_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the unsigned integer dtype with the size of a dtype."""
    return np.dtype(f"u{dtype.itemsize}")


@dataclasses.dataclass(frozen=True)
class Whole:
    """Stores the unchanged bits."""

    name: str = "raw"
    lossless: bool = True
    relative: bool = False

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return True

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        return {"": StoredArray((BLOCK,), stored_dtype(dtype))}

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``."""
        np.copyto(out.view(arrays[""].dtype), arrays[""])


@dataclasses.dataclass(frozen=True)
class Planes:
    """Byte planes, compressed by zstd: of the bits, or of their XOR with a reference.

    Trained bf16 weights ten steps later: 0.23 of their bytes as XOR, 0.7 without.
    """

    name: str
    relative: bool
    lossless: bool = True

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return True

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        return {"": StoredArray((BLOCK, dtype.itemsize), np.dtype(np.uint8), byte_planes=True)}

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``."""
        bits = bits_dtype(out.dtype)
        found = np.ascontiguousarray(arrays[""]).view(bits).reshape(out.shape)
        if self.relative:
            assert reference is not None
            np.bitwise_xor(found, reference.view(bits), out=out.view(bits))
        else:
            np.copyto(out.view(bits), found)


@dataclasses.dataclass(frozen=True)
class Sparse:
    """The changed elements of a block: their count, positions, and XOR with the reference.

    A bf16 element takes 3 bytes before zstd, so the codec pays off if at most a tenth of the
    elements changed. The XOR has few bits set, which zstd exploits.
    """

    name: str = "sparse"
    lossless: bool = True
    relative: bool = True

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return True

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        return {
            "count": StoredArray((), np.dtype(np.uint16), zstd=True),
            "at": StoredArray((), np.dtype(np.uint8), zstd=True, ragged=True),
            "": StoredArray((), bits_dtype(dtype), zstd=True, ragged=True),
        }

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``."""
        assert reference is not None
        if reference is not out:
            np.copyto(out, reference)
        self.change(arrays, np.arange(len(out)), out)

    def change(self, arrays: Mapping[str, np.ndarray], blocks: np.ndarray, out: np.ndarray) -> None:
        """Applies changes to blocks in place.

        Args:
          arrays: suffix to stored array, of n blocks.
          blocks: (n,) indices of rows of ``out``, ascending.
          out: (m, 256), contiguous: the earlier values.

        Raises:
          ValueError: as for ``decode``.
        """
        count, at, changed = arrays["count"].astype(np.int64), arrays["at"], arrays[""]
        total = int(count.sum())
        if len(count) != len(blocks) or total != len(at) or total != len(changed):
            raise ValueError(f"{total} elements of {len(blocks)} blocks, found {len(at)}")
        places = np.repeat(blocks * BLOCK, count)
        places += at
        if not (places[1:] > places[:-1]).all():
            raise ValueError("expected ascending positions, found unsorted ones")
        flat = out.reshape(-1).view(changed.dtype)
        flat[places] ^= changed


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A uniform code with a scale for each block."""

    name: str
    code: Uniform
    lossless: bool = False
    relative: bool = False

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return dtype in FLOATS

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        found = self.code.stored((BLOCK,), np.dtype(np.float32))
        return {name: one._replace(zstd=True) for name, one in found.items()}


@dataclasses.dataclass(frozen=True)
class Difference(_Linear):
    """The difference to the reference, by a symmetric uniform code with a scale for each block."""

    relative: bool = True

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``."""
        assert reference is not None
        room = np.empty((2, min(len(out), PIECE_BLOCKS), BLOCK), np.float32)
        for start in range(0, len(out), PIECE_BLOCKS):
            part = slice(start, start + PIECE_BLOCKS)
            before, found = widened(reference[part], room[0]), room[1, : len(out[part])]
            self.code.decode({name: array[part] for name, array in arrays.items()}, found)
            # The same result whether the product and the sum are fused or not.
            if out.dtype == np.float32:
                np.add(before, found, out=out[part])
            else:
                found += before
                np.copyto(out[part], found, casting="unsafe")


@dataclasses.dataclass(frozen=True)
class Alone(_Linear):
    """A symmetric uniform code of the values themselves; needs no reference."""

    relative: bool = False

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``."""
        for start in range(0, len(out), PIECE_BLOCKS):
            part = slice(start, start + PIECE_BLOCKS)
            self.code.decode({name: array[part] for name, array in arrays.items()}, out[part])


def _uniform(name: str) -> Uniform:
    found = registry.get(name)
    assert isinstance(found, Uniform)
    return found


_CODECS: dict[str, BlockCodec] = {
    codec.name: codec
    for codec in (
        Whole(),
        Planes("planes", relative=False),
        Planes("xor", relative=True),
        Sparse(),
        Difference("ef8", _uniform("symmetric8")),
        Difference("ef4", _uniform("symmetric4")),
        # First moments are spread around zero: without an offset their codes take a tenth less
        # after zstd, and what is zero stays so.
        Alone("int8", _uniform("symmetric8")),
        *logarithms.LOGARITHMS,
    )
}
#: Name for options and figures: the smallest lossless encoding of each block. Manifests contain
#: the names of the encodings.
LOSSLESS = "lossless"
#: Keeps positive values positive, without a reference.
LOGARITHM = "log8"
#: The next more precise codec; those that are not listed are followed by ``lossless``.
_WIDER = {"ef4": "ef8", "log4": "log8"}


def names() -> list[str]:
    """Returns the names for options."""
    return [LOSSLESS, *sorted(name for name, codec in _CODECS.items() if not codec.lossless)]


def get(name: str) -> BlockCodec:
    """Returns the codec of a name in a manifest.

    Raises:
      OptionError: the name is unknown.
    """
    try:
        return _CODECS[name]
    except KeyError:
        raise OptionError(
            f"codec {name!r} of dense leaves: expected one of {sorted(_CODECS)}, found an unknown "
            "name; install a newer deltackpt if a checkpoint asks for it"
        ) from None


def is_linear(name: str) -> bool:
    """Returns whether small values may become 0 or change sign if the block also has large ones."""
    return isinstance(_CODECS.get(name), _Linear)


def wider(name: str) -> str:
    """Returns the next more precise codec."""
    return _WIDER.get(name, LOSSLESS)
