# SPDX-License-Identifier: Apache-2.0
"""Codecs of dense leaves: blocks of 256 numbers, most of them as a change of a reference.

A *reference* is what a block was in the parent, as it decodes. A *relative* codec stores the change
from it, so that errors do not add up along a chain: each save corrects those of the one before. The
others need none, and a reader begins with the newest of them.

Decode arithmetic is normative: in float32 a product that has no rounding error (a code of at most 8
bits, a scale of at most 11), then one sum, rounded once; fused or not, it is the same number.
Subnormal numbers are those of IEEE 754. A sum is one only where the reference is one and the code
is 0: scales are so large that a sum which nearly cancels is 0, or far above. Compilers that take
subnormal numbers for 0, as XLA does on the CPU, must leave blocks alone that hold one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from deltackpt.codecs import logarithms, registry
from deltackpt.codecs.block_codec import FLOATS, BlockArray, BlockCodec
from deltackpt.codecs.uniform import Uniform
from deltackpt.codecs.widening import widened
from deltackpt.errors import OptionError
from deltackpt.format.dense_blocks import BLOCK
from deltackpt.format.dtypes import stored_dtype

#: Blocks that are encoded or decoded at once: of float32, 1 MiB; fewer pay more for the calls than
#: the cache saves.
PIECE_BLOCKS = 1024


def bits_dtype(dtype: np.dtype) -> np.dtype:
    """The unsigned integers that hold the bits of a dtype."""
    return np.dtype(f"u{dtype.itemsize}")


@dataclasses.dataclass(frozen=True)
class Whole:
    """The bits as they are."""

    name: str = "raw"
    lossless: bool = True
    relative: bool = False

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return True

    def stored(self, dtype: np.dtype) -> Mapping[str, BlockArray]:
        """See ``BlockCodec``."""
        return {"": BlockArray((BLOCK,), stored_dtype(dtype))}

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``."""
        np.copyto(out.view(arrays[""].dtype), arrays[""])


@dataclasses.dataclass(frozen=True)
class Planes:
    """The bytes of equal place side by side, by zstd: of the bits, or of the XOR with a reference.

    Trained bf16 weights ten steps later: 0.23 of their bytes as XOR, 0.7 as they are.
    """

    name: str
    relative: bool
    lossless: bool = True

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return True

    def stored(self, dtype: np.dtype) -> Mapping[str, BlockArray]:
        """See ``BlockCodec``."""
        return {"": BlockArray((BLOCK, dtype.itemsize), np.dtype(np.uint8), byte_planes=True)}

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
    """The numbers of a block that changed: how many, where, and their bits' XOR with the reference.

    A number of bf16 takes 3 bytes before zstd, so that it pays where at most a tenth changed; its
    XOR has few bits set, which zstd finds.
    """

    name: str = "sparse"
    lossless: bool = True
    relative: bool = True

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return True

    def stored(self, dtype: np.dtype) -> Mapping[str, BlockArray]:
        """See ``BlockCodec``."""
        return {
            "count": BlockArray((), np.dtype(np.uint16), zstd=True),
            "at": BlockArray((), np.dtype(np.uint8), zstd=True, ragged=True),
            "": BlockArray((), bits_dtype(dtype), zstd=True, ragged=True),
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
        """Changes blocks where they lie.

        Args:
          arrays: suffix to stored array, of n blocks.
          blocks: (n,) which rows of ``out`` these are, ascending.
          out: (m, 256), contiguous: what they were.

        Raises:
          ValueError: as ``decode``.
        """
        count, at, changed = arrays["count"].astype(np.int64), arrays["at"], arrays[""]
        total = int(count.sum())
        if len(count) != len(blocks) or total != len(at) or total != len(changed):
            raise ValueError(f"{total} numbers of {len(blocks)} blocks, found {len(at)}")
        places = np.repeat(blocks * BLOCK, count)
        places += at
        if not (places[1:] > places[:-1]).all():
            raise ValueError("places that ascend, found some that do not")
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

    def stored(self, dtype: np.dtype) -> Mapping[str, BlockArray]:
        """See ``BlockCodec``."""
        found = self.code.stored((BLOCK,), np.dtype(np.float32))
        return {name: BlockArray(one.trailing, one.dtype, zstd=True) for name, one in found.items()}


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
            # The same number whether the product and the sum are fused or not.
            if out.dtype == np.float32:
                np.add(before, found, out=out[part])
            else:
                found += before
                np.copyto(out[part], found, casting="unsafe")


@dataclasses.dataclass(frozen=True)
class Alone(_Linear):
    """A symmetric uniform code of the numbers themselves, which needs no reference."""

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
#: What an option may name: ``exact`` chooses the smallest of the lossless ones for each block.
EXACT = "exact"
#: What keeps positive numbers positive, without a reference.
LOGARITHM = "log8"
#: The next more precise one; what is not here is followed by ``exact``.
_WIDER = {"ef4": "ef8", "log4": "log8"}


def names() -> list[str]:
    """Names that an option may give."""
    return [EXACT, *sorted(name for name, codec in _CODECS.items() if not codec.lossless)]


def get(name: str) -> BlockCodec:
    """The codec of a name in a manifest.

    Raises:
      OptionError: there is none.
    """
    try:
        return _CODECS[name]
    except KeyError:
        raise OptionError(
            f"codec {name!r} of dense leaves: expected one of {sorted(_CODECS)}, found an unknown "
            "name; install a newer deltackpt if a checkpoint asks for it"
        ) from None


def is_linear(name: str) -> bool:
    """Whether small numbers of a block may become 0, or change their sign, beside large ones."""
    return isinstance(_CODECS.get(name), _Linear)


def wider(name: str) -> str:
    """The next more precise codec."""
    return _WIDER.get(name, EXACT)
