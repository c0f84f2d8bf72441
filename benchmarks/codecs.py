# SPDX-License-Identifier: Apache-2.0
"""Codecs: bits and error of rows and blocks, and the speed of encoding and decoding.

Encoding is timed from rows in host memory to packed arrays in memory ("encode"), and to the arrays
of a step in the page cache, including Zarr metadata and checksums ("encode and store"). Decoding is
timed from stored arrays in memory to rows in a table. Blocks of dense leaves are encoded against
the decoded parent, including the search for unchanged blocks and the measurement of errors, and
decoded in place. Everything uses two threads, as saves and restores do. All bars are ratios to a
plain copy of the same bytes by two threads in the same round.

python benchmarks/codecs.py --json codecs.json
python benchmarks/codecs.py --scale 0.02 --repeats 2 --steps 5      # a smoke test
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import coded_blocks
import jax
import numpy as np
import ways  # noqa: F401  (makes the example importable)
from dlrm_jax import data, trainer
from report import Report, Sample, arguments, percent, speed

from deltackpt import codecs
from deltackpt.codecs import Codec
from deltackpt.errors import OptionError
from deltackpt.format.blocks import VALUES, EncodedBlock
from deltackpt.format.dense_blocks import BLOCK
from deltackpt.format.segments import Encoding, FieldSpec
from deltackpt.layers import merge
from deltackpt.layers.targets import Target
from deltackpt.policies import Choice, CodecChoice
from deltackpt.resources import memory
from deltackpt.resources.runtime import Runtime
from deltackpt.save import fields
from deltackpt.save.fields import Field
from deltackpt.save.pieces import HostPiece, ahead, piece_rows
from deltackpt.storage import arrays
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.parts import ArrayPlace

ROWS, WIDTH = 400_000, 64
PLAIN = ("bf16", "fp16", "int8", "int4", "int3", "int2", "symmetric8", "symmetric4")
SEARCHED = ("greedy4", "greedy2", "adaptive8", "adaptive4", "adaptive3", "adaptive2")
ALL = ("raw", "lossless", *PLAIN, *SEARCHED)
#: Multiples of the time of a plain copy: to encode, to encode with a search, and to decode.
PLAIN_BAR, SEARCHED_BAR, DECODE_BAR = 6.0, 25.0, 4.0
#: Seconds for a GB of bf16 weights of which 1 % changed, lossless.
SPARSE_BAR = 1.0
_THREADS = 2
#: Training steps between the base and the measured delta.
_DELTA_STEPS = 10


class Stored(NamedTuple):
    """Written rows: their arrays in memory, and the time it took."""

    arrays: dict[str, np.ndarray]
    encoding: Encoding
    relative_error: float
    seconds: float


def write(root: Path, name: str, rows: np.ndarray, pool: Runtime) -> Stored:
    """Writes rows with a codec, as a save's background part does, and reads the arrays."""
    field = Field(
        name=VALUES,
        trailing=rows.shape[1:],
        dtype=rows.dtype,
        tables=["t"],
        bounds=np.array([0, len(rows)]),
        choice=CodecChoice(delta=name),
        planned=Choice(codec=name, reason=name),
    )
    batch = FileBatch(root, fsync=False)
    place = ArrayPlace(root, 0, name, batch)

    def pieces(codec: Codec):
        limit = len(rows) if codec.lossless else piece_rows(rows.shape[1:])
        for start in range(0, len(rows), limit):
            yield HostPiece(rows[start : start + limit])

    started = time.perf_counter()
    stored = fields.write_field(place, field, pieces, pool)
    seconds = time.perf_counter() - started
    found = {}
    for entry in stored.arrays.entries:
        found[entry.name] = np.empty(entry.shape, np.dtype(entry.dtype))
        directory = place.directory(entry.name)
        arrays.read_array(directory, entry, 0, entry.shape[0], found[entry.name])
    encoding = stored.encoding
    (error,), (norm,) = encoding.squared_error, encoding.squared_norm
    relative = (error / norm) ** 0.5 if norm else 0.0
    shutil.rmtree(root / "part.0")
    return Stored(found, encoding, relative, seconds)


def encoded(name: str, rows: np.ndarray, pool: Runtime) -> float:
    """Seconds until all rows are encoded in memory."""
    codec, limit = codecs.get(name), piece_rows(rows.shape[1:])
    pieces = (HostPiece(rows[start : start + limit]) for start in range(0, len(rows), limit))
    started = time.perf_counter()
    for _ in ahead(codec, pieces, pool):
        pass
    return time.perf_counter() - started


def decode(name: str, stored: Stored, table: np.ndarray, pool: Runtime) -> float:
    """Seconds until all rows are decoded into the table."""
    spec = FieldSpec(name=VALUES, trailing=table.shape[1:], dtype="float32", codec=name)
    columns = (0, table.shape[1])
    target = Target(group="g", field=VALUES, rows=(0, len(table)), columns=columns, buffer=table)

    def merged(start: int) -> None:
        stop = min(start + step, len(table))
        part = {key: array[start:stop] for key, array in stored.arrays.items()}
        block = EncodedBlock("g", range(start, stop), columns, part)
        merge.apply(codecs.decode_block(block, [spec]), [target])

    step = 1 << 14  # As a restore does: decoded rows stay in the cache.
    started = time.perf_counter()
    list(pool.map(merged, range(0, len(table), step)))
    return time.perf_counter() - started


def copy(rows: np.ndarray, table: np.ndarray, pool: Runtime) -> float:
    """Seconds of a plain copy of the rows, the limit of the memory."""
    step = -(-len(rows) // _THREADS)
    parts = [slice(start, start + step) for start in range(0, len(rows), step)]
    started = time.perf_counter()
    list(pool.map(lambda part: np.copyto(table[part], rows[part]), parts))
    return time.perf_counter() - started


def trained(steps: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows and Adagrad slots in a delta of the thesis DLRM after some training."""
    rows = data.table_rows("thesis", scale)
    sizes = trainer.ModelOptions(rows=rows)
    source = data.ZipfTraffic(rows, max(32, round(2048 * scale)), exponent=1.07, seed=0)
    state, step = trainer.init_state(sizes, 0), trainer.train_step(sizes)
    for number in range(steps):
        if number == steps - min(steps, _DELTA_STEPS):
            clock = int(state.touched.clock)
        state, _, _ = step(state, source.batch(number))
    touched = {
        name: np.flatnonzero(np.asarray(state.touched.stamps[name]) > clock)
        for name in state.tables
    }
    values = [np.asarray(state.tables[name])[found] for name, found in touched.items()]
    slots = [np.asarray(state.accumulators[name])[found] for name, found in touched.items()]
    return np.concatenate(values), np.concatenate(slots)


def measure_speeds(root: Path, rows: np.ndarray, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds per GB of rows by (operation, codec), round by round."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    table = memory.empty_buffer(rows.shape, rows.dtype)
    gigabytes = rows.nbytes / 1e9
    with Runtime(_THREADS) as pool:
        for number in range(rounds + 1):
            seconds = {("copy", "copy"): copy(rows, table, pool)}
            for name in ALL:
                stored = write(root, name, rows, pool)
                seconds["encode and store", name] = stored.seconds
                if name in (*PLAIN, *SEARCHED):
                    seconds["encode", name] = encoded(name, rows, pool)
                if name != "lossless":  # zstd is undone when its chunks are read
                    seconds["decode", name] = decode(name, stored, table, pool)
            if number:
                for key, value in seconds.items():
                    found[key].append(value / gigabytes)
    return found


def add_speeds(report: Report, found: dict[tuple[str, str], list[float]]) -> None:
    """Adds lines of encoding and decoding speed, relative to a copy of the rows."""
    copied = Sample(tuple(found["copy", "copy"]))
    for what in ("encode", "encode and store", "decode"):
        for name in ALL:
            if (what, name) in found:
                measured = Sample(tuple(found[what, name]))
                line = f"{name}: {what}"
                bar = _bar(what, name)
                report.compare(line, measured, "copy of rows", copied, speed, bar=bar)
        report.section()


def _bar(what: str, name: str) -> float | None:
    if what == "decode":
        return DECODE_BAR
    if what == "encode":
        return SEARCHED_BAR if name in SEARCHED else PLAIN_BAR
    return None


def add_blocks(report: Report, count: int, rounds: int) -> None:
    """Adds lines of blocks of dense leaves."""
    with Runtime(_THREADS) as pool:
        for case in coded_blocks.cases(count):
            found = coded_blocks.measure(case, rounds, pool)
            copied = Sample(tuple(found.seconds["copy"]))
            for what, bar in (("encode", PLAIN_BAR), ("decode", DECODE_BAR)):
                measured = Sample(tuple(found.seconds[what]))
                line = f"{case.name}: {what}"
                report.compare(line, measured, "copy of the leaf", copied, speed, bar=bar)
                if (
                    case.codec == "lossless"
                    and case.now.dtype.name == "bfloat16"
                    and what == "encode"
                ):
                    report.state(line, measured, speed, bar=SPARSE_BAR)
            report.state(f"{case.name}: stored before zstd", Sample((found.stored,)), percent)
            if found.error:
                report.state(f"{case.name}: relative l2 error", Sample((found.error,)), percent)
            report.section()


def add_errors(report: Report, root: Path, inputs: dict[str, np.ndarray]) -> None:
    """Adds lines of bits and errors."""
    with Runtime(_THREADS) as pool:
        for source, rows in inputs.items():
            for name in ALL:
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
                report.compare(f"{source}, {name}: bits of a row", bits, "float32", raw, plainly)
                if stored.relative_error:
                    error = Sample((stored.relative_error,))
                    report.state(f"{source}, {name}: relative l2 error", error, percent)
            report.section()


def plainly(value: float) -> str:
    """A number with one decimal."""
    return f"{value:.1f}"


def run(options: argparse.Namespace, root: Path) -> None:
    """Measures and prints the table."""
    count = max(1000, round(ROWS * options.scale))
    random = np.random.default_rng(0)
    rows = memory.empty_buffer((count, WIDTH), np.dtype(np.float32))
    rows[:] = random.standard_normal((count, WIDTH), np.float32)
    values, slots = trained(options.steps, options.scale)
    heavy = random.standard_t(3, (min(count, 50_000), WIDTH)).astype(np.float32)
    inputs = {
        "Gaussian": rows[:50_000],
        "Student t, 3": heavy,
        "trained rows": values,
        "trained slots": slots,
    }
    report = Report(
        "Codecs",
        sizes=f"Speeds: {count:,} rows of {WIDTH} float32, Gaussian, two threads; leaves: as many "
        f"numbers; trained: "
        f"{len(values):,} rows that {_DELTA_STEPS} of {options.steps} steps of the thesis DLRM "
        f"touched (Zipf 1.07); {options.repeats} interleaved rounds, median (range)",
    )
    add_speeds(report, measure_speeds(root, rows, options.repeats))
    add_blocks(report, max(100, rows.size // BLOCK), options.repeats)
    add_errors(report, root, inputs)
    report.show(options.json, options.markdown)


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps for trained rows")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory(prefix="codecs-", dir=options.directory) as place:
        run(options, Path(place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
