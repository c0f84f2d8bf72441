# SPDX-License-Identifier: Apache-2.0
"""Codecs of rows: bits and error, and the speed of encoding and decoding; and blocks of leaves.

"Encode" is timed from rows in host memory to packed arrays in memory. "Encode and store" ends with
the arrays of a step in the page cache, including Zarr metadata and checksums. Decoding is
timed from stored arrays in memory to rows in a table.
Everything uses two threads, as saves and restores do. All targets are ratios to a plain copy of the
same bytes by two threads in the same round.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import report as reports
import ways
from dlrm_jax import data, trainer
from report import Figures, Report, Sample, interleaved, percent, speed, timed

from deltackpt import codecs, kernels
from deltackpt.codecs import Codec, block_codecs
from deltackpt.errors import OptionError
from deltackpt.format import naming
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.row_blocks import BLOCK, VALUES, EncodedBlock, Encoding, FieldSpec
from deltackpt.layers import merge
from deltackpt.layers.targets import Target
from deltackpt.policies import PlannedCodec
from deltackpt.resources import host_memory
from deltackpt.resources.runtime import Runtime
from deltackpt.save import block_codes, shard
from deltackpt.save.block_codes import EncodedBlocks, LeafDelta
from deltackpt.save.capture import BusyClock, HostPiece, encode_ahead, piece_rows
from deltackpt.save.shard import Field
from deltackpt.storage import arrays
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.zarr_writer import ZarrSegmentSink

ROWS, WIDTH = 400_000, 64
PLAIN = ("bf16", "fp16", "int8", "int4", "int3", "int2", "symmetric8", "symmetric4")
SEARCHED = ("greedy4", "greedy2", "adaptive8", "adaptive4", "adaptive3", "adaptive2")
ALL = ("raw", "lossless", *PLAIN, *SEARCHED)
PUBLISHED = ("raw", "lossless", "bf16", "fp16", "int8", "int4") + SEARCHED[2:]
#: Multiples of the time of a plain copy, with compiled kernels: to encode, and to decode.
_ENCODE_BARS = {"int4": 1.5, "int8": 1.5, "symmetric4": 1.5, "symmetric8": 1.5, "bf16": 1.5}
_PLAIN_BAR, _SEARCHED_BAR, _DECODE_BAR = 3.0, 12.0, 4.0
_THREADS = 2
#: Training steps between the base and the measured delta.
_DELTA_STEPS = 10


class Stored(NamedTuple):
    """Written rows: their arrays in memory, and the time to write and to decompress them."""

    arrays: dict[str, np.ndarray]
    encoding: Encoding
    relative_error: float
    seconds: float
    decompress_secs: float


def write(root: Path, name: str, rows: np.ndarray, pool: Runtime) -> Stored:
    """Writes rows with a codec, as a save's background part does, and reads the arrays."""
    field = Field(
        name=VALUES,
        trailing=rows.shape[1:],
        dtype=rows.dtype,
        tables=["t"],
        bounds=np.array([0, len(rows)]),
        planned=PlannedCodec(codec=name, reason=name),
    )
    place = ZarrSegmentSink(root, 0, FileBatch(root, fsync=False), name)

    def pieces(codec: Codec):
        limit = len(rows) if codec.lossless else piece_rows(rows.shape[1:])
        for start in range(0, len(rows), limit):
            yield HostPiece(rows[start : start + limit])

    started = time.perf_counter()
    stored = shard.write_field(place, field, pieces, pool, BusyClock())
    seconds = time.perf_counter() - started
    found, decompress = {}, 0.0
    for entry in stored.arrays:
        found[entry.name] = np.empty(entry.shape, np.dtype(entry.dtype))
        directory = naming.array_dir(root, 0, name, entry.name)
        started = time.perf_counter()
        arrays.read_array(directory, entry, 0, entry.shape[0], found[entry.name])
        # A plain array is merged from the bytes of its file.
        decompress += time.perf_counter() - started if entry.compressed else 0.0
    (error,), (norm,) = stored.encoding.squared_error, stored.encoding.squared_norm
    shutil.rmtree(root / "shard.0")
    loss = (error / norm) ** 0.5 if norm else 0.0
    return Stored(found, stored.encoding, loss, seconds, decompress)


def encode_secs(name: str, rows: np.ndarray, pool: Runtime) -> float:
    codec, limit = codecs.get(name), piece_rows(rows.shape[1:])
    pieces = (HostPiece(rows[start : start + limit]) for start in range(0, len(rows), limit))
    return timed(lambda: deque(encode_ahead(codec, pieces, pool, BusyClock()), maxlen=0))


def decode_secs(name: str, stored: Stored, table: np.ndarray, pool: Runtime) -> float:
    spec = FieldSpec(name=VALUES, trailing=table.shape[1:], dtype="float32", codec=name)
    columns = (0, table.shape[1])
    target = Target(group="g", field=VALUES, rows=(0, len(table)), columns=columns, buffer=table)
    step = 1 << 14  # As a restore does: decoded rows stay in the cache.

    def merged(start: int) -> None:
        stop = min(start + step, len(table))
        chunk = {key: array[start:stop] for key, array in stored.arrays.items()}
        block = EncodedBlock("g", range(start, stop), columns, chunk)
        merge.apply(codecs.decode_block(block, [spec]), [target])

    return timed(lambda: list(pool.map(merged, range(0, len(table), step))))


def trained(steps: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows and Adagrad slots in a delta of the thesis DLRM after some training."""
    rows = data.table_rows("thesis", scale)
    sizes = trainer.ModelOptions(rows=rows)
    source = data.ZipfTraffic(rows, max(32, round(2048 * scale)), exponent=1.07, seed=0)
    state, step, clock = trainer.init_state(sizes, 0), trainer.train_step(sizes), 0
    for number in range(steps):
        if number == steps - min(steps, _DELTA_STEPS):
            clock = int(state.touched.clock)
        state, _, _ = step(state, source.batch(number))
    touched = {n: np.flatnonzero(np.asarray(state.touched.stamps[n]) > clock) for n in state.tables}
    values, slots = (
        np.concatenate([np.asarray(leaves[name])[found] for name, found in touched.items()])
        for leaves in (state.tables, state.accumulators)
    )
    return values, slots


def measure_speeds(root: Path, rows: np.ndarray, rounds: int) -> Figures:
    """Seconds per GB of rows by codec and operation."""
    table = host_memory.empty_buffer(rows.shape, rows.dtype)

    def per_gb(found: dict[str, float]) -> dict[str, float]:
        return {what: value / rows.nbytes * 1e9 for what, value in found.items()}

    def coded(name: str) -> dict[str, float]:
        stored = write(root, name, rows, pool)
        found = {"encode and store": stored.seconds}
        if name in (*PLAIN, *SEARCHED):
            found["encode"] = encode_secs(name, rows, pool)
        found["decode"] = stored.decompress_secs + decode_secs(name, stored, table, pool)
        return per_gb(found)

    with Runtime(_THREADS) as pool:
        candidates: dict[str, Callable[[], dict[str, float]]] = {
            name: functools.partial(coded, name) for name in ALL
        }
        candidates["copy"] = lambda: per_gb({"copy": ways.copy_secs(rows, table, pool)})
        return interleaved(rounds, candidates)


def add_speeds(report: Report, found: Figures) -> None:
    """Adds lines of encoding and decoding speed, relative to a copy of the rows."""
    copied = found("copy", "copy")
    for what, name in itertools.product(("encode", "encode and store", "decode"), ALL):
        if (name, what) not in found:
            continue
        bar = _DECODE_BAR if what == "decode" and name != "lossless" else None
        if what == "encode" and kernels.available():
            bar = _SEARCHED_BAR if name in SEARCHED else _ENCODE_BARS.get(name, _PLAIN_BAR)
        measured = found(name, what)
        report.compare(f"{name}: {what}", measured, "copy of rows", copied, speed, bar=bar)
    report.section()


def add_errors(
    report: Report, root: Path, inputs: dict[str, np.ndarray]
) -> dict[tuple[str, str], tuple[float, Sample]]:
    """Adds lines of bits and errors; returns bytes of a row and error, by input and codec."""
    found: dict[tuple[str, str], tuple[float, Sample]] = {}
    with Runtime(_THREADS) as pool:
        for (source, rows), name in itertools.product(inputs.items(), ALL):
            try:
                codecs.get(name).check(rows.shape[1:], rows.dtype)
            except OptionError:
                continue
            stored = write(root, name, rows, pool)
            if stored.encoding.codec != name:
                report.note(f"{source}: stored {stored.encoding.reason}.")
                continue
            bits = Sample((8 * stored.encoding.nbytes / len(rows),))
            raw = Sample((float(32 * np.prod(rows.shape[1:])),))
            title = f"{source}, {name}"
            report.compare(f"{title}: bits of a row", bits, "float32", raw, "{:.1f}".format)
            error = Sample((stored.relative_error,))
            report.state(f"{title}: relative l2 error", error, percent)
            found[source, name] = bits.median / 8, error
    report.section()
    return found


# Blocks of dense leaves.

#: Targets for blocks, as multiples of the time of a plain copy: to encode some cases, to
#: encode others, and to decode.
BARS = {"ef4 of float32": 2.0}
ENCODE_BAR, DECODE_BAR = 6.0, 4.0
#: Seconds for a GB of bf16 weights of which 1 % changed, lossless.
SPARSE_BAR = 1.0
#: Blocks that a thread decodes at once.
_SPAN_BLOCKS = 1 << 12


class Case(NamedTuple):
    """A leaf of (blocks, 256), and how it is coded."""

    name: str
    codec: str
    before: np.ndarray  # What the parent decodes to.
    now: np.ndarray  # One step later.


def cases(count: int) -> Iterator[Case]:
    """The cases with so many blocks, one at a time."""
    random = np.random.default_rng(0)
    before = random.standard_normal((count, BLOCK), np.float32)
    # An optimizer step: most changes are small, some are not.
    change = random.standard_normal((count, BLOCK), np.float32)
    change *= np.float32(1e-3) * random.standard_exponential((count, 1), np.float32)
    moments = np.square(before)
    later = moments * np.exp2(20 * change)
    for dtype in ("float32", "bfloat16"):
        kind = dtype_of(dtype)
        for codec in ("ef4", "ef8", "int8", "log4", "log8"):
            old, new = (moments, later) if "log" in codec else (before, before + change)
            yield Case(f"{codec} of {dtype}", codec, old.astype(kind), new.astype(kind))
        weights = before.astype(kind)
        found = weights.copy()
        places = random.integers(0, found.size, found.size // 100)
        found.reshape(-1).view(block_codecs.bits_dtype(kind))[places] ^= 1
        yield Case(f"exact, 1 % of {dtype} changed", "lossless", weights, found)


def measure_block(case: Case, pool: Runtime) -> dict[str, float]:
    """Copies, encodes and decodes a leaf: seconds per GB, and the stored share and error."""
    out = host_memory.empty_buffer(case.now.shape, case.now.dtype)
    bits = block_codecs.bits_dtype(case.now.dtype)
    leaves: list[LeafDelta] = []

    def encode() -> None:
        leaves.append(block_codes.encode_leaf(case.now, case.before, case.codec, None, pool))

    def decode() -> None:
        work = [one for piece in leaf.pieces for one in _spans(piece, out.dtype)]
        list(pool.map(lambda piece: _apply(piece, out), work))

    seconds = {"copy": ways.copy_secs(case.now, out, pool), "encode": timed(encode)}
    [leaf] = leaves
    np.copyto(out, case.before)
    seconds["decode"] = timed(decode)
    assert np.array_equal(out.view(bits), np.asarray(leaf.decoded).view(bits))
    stored = sum(piece.nbytes for piece in leaf.pieces) / case.now.nbytes
    other = {"stored": stored, "error": leaf.error}
    pool.memory.give_back([leaf.decoded])
    return {what: value / case.now.nbytes * 1e9 for what, value in seconds.items()} | other


def _spans(piece: EncodedBlocks, dtype: np.dtype) -> Iterator[EncodedBlocks]:
    """Parts of encoded blocks, which threads decode over the parent."""
    stored = block_codecs.get(piece.codec).stored(dtype)
    counts = piece.arrays["count"] if any(one.ragged for one in stored.values()) else ()
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    for start in range(0, len(piece.blocks), _SPAN_BLOCKS):
        chunk = slice(start, min(start + _SPAN_BLOCKS, len(piece.blocks)))
        values = slice(*ends[[chunk.start, chunk.stop]]) if len(counts) else chunk
        arrays = {
            suffix: piece.arrays[suffix][values if one.ragged else chunk]
            for suffix, one in stored.items()
        }
        yield EncodedBlocks(piece.codec, piece.blocks[chunk], arrays)


def _apply(piece: EncodedBlocks, out: np.ndarray) -> None:
    first, last = int(piece.blocks[0]), int(piece.blocks[-1]) + 1
    rows = range(first, last) if last - first == len(piece.blocks) else piece.blocks
    block_codecs.get(piece.codec).decode(piece.arrays, rows, out)


def add_blocks(report: Report, count: int, rounds: int) -> None:
    """Adds lines for leaves of ``count`` blocks."""
    with Runtime(_THREADS, memory_bytes=1 << 30) as pool:
        for case in cases(count):
            found = interleaved(rounds, {"": functools.partial(measure_block, case, pool)})
            bars = {"encode": BARS.get(case.name, ENCODE_BAR), "decode": DECODE_BAR}
            for what, bar in bars.items():
                mine, copied = found("", what), found("", "copy")
                report.compare(f"{case.name}: {what}", mine, "a copy", copied, speed, bar=bar)
            if case.codec == "lossless" and case.now.dtype.name == "bfloat16":
                line = f"{case.name}: encode"
                report.state(line, found("", "encode"), speed, bar=SPARSE_BAR)
            for what in ("stored", "error"):
                share = Sample(found("", what).values[:1])
                report.state(f"{case.name}: {what}", share, percent)
    report.section()


def all_codecs(report: Report, options: argparse.Namespace, root: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    count = max(1000, round(ROWS * options.scale))
    random = np.random.default_rng(0)
    rows = host_memory.empty_buffer((count, WIDTH), np.dtype(np.float32))
    rows[:] = random.standard_normal((count, WIDTH), np.float32)
    values, slots = trained(options.steps, options.scale)
    heavy = random.standard_t(3, (min(count, 50_000), WIDTH)).astype(np.float32)
    inputs = {"Gaussian": rows[:50_000], "Student t, 3": heavy}
    inputs |= {"trained rows": values, "trained slots": slots}
    report.sizes = (
        f"Speeds: {count:,} rows of {WIDTH} float32, Gaussian, two threads; leaves: as many "
        f"elements; trained: {len(values):,} rows that {_DELTA_STEPS} of {options.steps} steps of "
        f"the thesis DLRM touched (Zipf 1.07)"
    )
    found = measure_speeds(root, rows, options.repeats)
    add_speeds(report, found)
    add_blocks(report, max(100, rows.size // BLOCK), options.repeats)
    errors = add_errors(report, root, inputs)
    speeds: list[list] = []
    sizes: list[list] = []
    for name in PUBLISHED:
        cells = [(found(name, what), speed) for what in ("encode and store", "decode")]
        error = errors.get(("trained rows", name))
        speeds.append([f"`{name}`", *cells, (error[1], percent) if error else ""])
        if error := errors.get(("Gaussian", name)):
            sizes.append([f"`{name}`", f"{error[0]:.0f}", (error[1], percent)])
    report.publish("codecs", ("codec", "encode and store", "decode", "error"), speeds)
    report.publish("sizes", ("codec", f"bytes per row of {WIDTH}", "relative L2 error"), sizes)


if __name__ == "__main__":
    # Training steps, for trained rows.
    reports.main("Codecs", all_codecs, steps=150)
