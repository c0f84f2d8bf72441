# SPDX-License-Identifier: Apache-2.0
"""Batches of raw Criteo files, or of synthetic Zipf traffic.

A batch is a pure function of the source's arguments and the step, so a resumed run sees the same
data as an uninterrupted one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from dlrm_jax.model import NUMERIC

#: Categorical features of a Criteo sample.
CATEGORIES = 26
_FIELDS = 1 + NUMERIC + CATEGORIES
#: The file offset of every such number of lines is indexed.
_INDEX_LINES = 1024
_SCAN_BYTES = 64 * 2**20

#: Rows of C1 to C26 in the Criteo Kaggle data, 33.8 million in all.
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
#: Rows of the tables in the continuous checkpointing thesis.
THESIS_ROWS = (80_000,) * 8


class Batch(NamedTuple):
    """One batch.

    Attributes:
      numeric: (batch, 13) float32, of order 1.
      ids: for each table, the row of each sample, (batch,) int32, or its rows, (batch, lookups),
        which the model adds up.
      labels: clicks, (batch,) float32, 0 or 1.
    """

    numeric: np.ndarray
    ids: dict[str, np.ndarray]
    labels: np.ndarray


class Source(Protocol):
    """A source of batches."""

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step; the same on every call."""
        ...


def table_rows(tables: str, scale: float = 1.0) -> dict[str, int]:
    """Returns table names C1, C2, ... with their row counts.

    Args:
      tables: ``thesis``, ``kaggle``, or a text file with one row count per line.
      scale: factor on the row counts; every table gets at least 3 rows.

    Raises:
      ValueError: the file does not hold 1 to 26 numbers.
    """
    if tables == "thesis":
        rows: Sequence[int] = THESIS_ROWS
    elif tables == "kaggle":
        rows = KAGGLE_ROWS
    else:
        words = Path(tables).read_text().split()
        if not 0 < len(words) <= CATEGORIES or not all(word.isdecimal() for word in words):
            raise ValueError(
                f"{tables}: expected 1 to {CATEGORIES} row counts, one per line, found "
                f"{' '.join(words[:5])!r}"
            )
        rows = [int(word) for word in words]
    return {f"C{i + 1}": max(3, round(count * scale)) for i, count in enumerate(rows)}


class CriteoFile:
    """A Criteo file, read in order and repeatedly.

    The first line distinguishes two raw formats: the tab-separated one of the Kaggle data (label,
    13 integers, 26 hexadecimal categories, empty if unknown), and the comma-separated one with a
    header. Category k is hashed into table ``Ck``, whose row 0 means unknown.
    """

    def __init__(self, path: str | Path, rows: Mapping[str, int], batch_size: int):
        """Indexes the lines; parses nothing yet.

        Args:
          path: the file.
          rows: row count of each table, by name; table i holds category i.
          batch_size: samples in each batch.

        Raises:
          ValueError: the file is in neither format.
        """
        self._path = Path(path)
        self._rows = dict(rows)
        self._batch_size = batch_size
        with self._path.open("rb") as file:
            first = file.readline()
        self._separator = b"\t" if b"\t" in first else b","
        if first.count(self._separator) != _FIELDS - 1:
            raise ValueError(
                f"{path}: expected {_FIELDS} fields separated by tabs or commas in the first line, "
                f"found {first.count(self._separator) + 1}"
            )
        header = len(first) if first.startswith(b"label") else 0
        self._starts, self.lines = _index_lines(self._path, header)
        if self.lines == 0:
            raise ValueError(f"{path}: expected samples, found none")

    def batch(self, step: int) -> Batch:
        """See ``Source``: lines from ``step * batch_size`` on, wrapping around at the end."""
        lines: list[bytes] = []
        position = step * self._batch_size % self.lines
        while len(lines) < self._batch_size:
            count = min(self._batch_size - len(lines), self.lines - position)
            lines += self._read(position, count)
            position = 0
        return self._parsed(lines)

    def _read(self, first: int, count: int) -> list[bytes]:
        known, skipped = divmod(first, _INDEX_LINES)
        with self._path.open("rb") as file:
            file.seek(self._starts[known])
            for _ in range(skipped):
                file.readline()
            return [file.readline() for _ in range(count)]

    def _parsed(self, lines: Sequence[bytes]) -> Batch:
        fields = [line.rstrip(b"\r\n").split(self._separator) for line in lines]
        for line in fields:
            if len(line) != _FIELDS:
                raise ValueError(
                    f"{self._path}: expected {_FIELDS} fields in every line, found {len(line)} in "
                    f"{self._separator.join(line)[:60]!r}"
                )
        labels = np.array([float(line[0]) for line in fields], np.float32)
        numbers = [[float(text or "nan") for text in line[1 : 1 + NUMERIC]] for line in fields]
        ids = {
            name: np.array([hashed_row(line[1 + NUMERIC + i], count) for line in fields], np.int32)
            for i, (name, count) in enumerate(self._rows.items())
        }
        return Batch(_scaled(np.array(numbers)), ids, labels)


def hashed_row(category: bytes, rows: int) -> int:
    """Returns the row of a category in a table of ``rows`` rows; 0 for the empty category.

    Example:
      >>> hashed_row(b"", 100), hashed_row(b"05db9164", 100), hashed_row(b"05db9164", 1000)
      (0, 14, 680)
    """
    return 1 + zlib.crc32(category) % (rows - 1) if category else 0


class ZipfTraffic:
    """Synthetic traffic: Zipf-distributed ids, and clicks that depend on them and are learnable.

    Each row has a hidden weight, and the click's log-odds are the sum of the weights of a sample's
    rows and of its numeric features.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        batch_size: int,
        *,
        exponent: float,
        seed: int,
        lookups: int = 1,
    ):
        """Draws the hidden weights of the numeric features.

        Args:
          rows: row count of each table, by name.
          batch_size: samples in each batch.
          exponent: exponent of the Zipf law; 0 draws ids uniformly.
          seed: seed of all random numbers.
          lookups: rows of each table that a sample uses.
        """
        self._rows = dict(rows)
        self._lookups = lookups
        self._batch_size = batch_size
        self._exponent = exponent
        self._seed = seed
        self._weights = np.random.default_rng([seed, 0]).normal(size=NUMERIC) / np.sqrt(NUMERIC)

    def batch(self, step: int) -> Batch:
        """See ``Source``."""
        random = np.random.default_rng([self._seed, 1, step])
        numeric = random.normal(size=(self._batch_size, NUMERIC)).astype(np.float32)
        odds = numeric @ self._weights - 0.7
        ids = {}
        for number, (name, count) in enumerate(self._rows.items()):
            drawn = zipf_rows(random, count, self._batch_size * self._lookups, self._exponent)
            rows = drawn.reshape(self._batch_size, self._lookups)
            weights = _hidden_weights(rows, number).sum(1) / np.sqrt(self._lookups)
            odds += weights * 2 / np.sqrt(len(self._rows))
            ids[name] = rows if self._lookups > 1 else drawn
        clicks = random.random(self._batch_size) < 1 / (1 + np.exp(-odds))
        return Batch(numeric, ids, clicks.astype(np.float32))


def zipf_rows(random: np.random.Generator, rows: int, count: int, exponent: float) -> np.ndarray:
    """Draws ``count`` row indices, int32, from a Zipf law over ``rows`` rows.

    Inverts the continuous law bounded to [1, rows + 1). A bijection scatters the ranks over the
    table, since popular rows are not adjacent in real hashed data.
    """
    uniform = random.random(count)
    if exponent == 1.0:
        ranks = np.power(rows + 1.0, uniform)
    else:
        power = 1.0 - exponent
        ranks = np.power(1 + uniform * (np.power(rows + 1.0, power) - 1), 1 / power)
    ranks = np.minimum(ranks.astype(np.int64) - 1, rows - 1)
    return (ranks * _coprime(rows) % rows).astype(np.int32)


def _coprime(rows: int) -> int:
    """A multiplier coprime to ``rows``, near its golden section."""
    start = max(1, round(rows * 0.618))
    return next(number for number in range(start, 2 * rows + 2) if np.gcd(number, rows) == 1)


def _hidden_weights(ids: np.ndarray, table: int) -> np.ndarray:
    """A fixed pseudo-random number in [-1, 1) for each row of a table."""
    mixed = ids.astype(np.uint64) + np.uint64(table << 32)
    # The finalizer of SplitMix64; the overflow is intended.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed.astype(np.float64) / 2**63 - 1


def _scaled(numbers: np.ndarray) -> np.ndarray:
    """Scales counts to order 1: log(1 + x), with 0 for negative and unknown ones."""
    known = np.nan_to_num(numbers, nan=0.0)
    return np.log1p(np.maximum(known, 0.0)).astype(np.float32)


def _index_lines(path: Path, start: int) -> tuple[list[int], int]:
    """(position of every ``_INDEX_LINES``th line, number of lines) from byte ``start`` on."""
    size = path.stat().st_size
    starts, lines = [start], 0
    with path.open("rb") as file:
        file.seek(start)
        position, ended = start, True
        while piece := file.read(_SCAN_BYTES):
            ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n"))
            # Line n starts after the end of line n - 1.
            numbers = np.arange(lines + 1, lines + 1 + len(ends))
            chosen = ends[numbers % _INDEX_LINES == 0]
            starts += [position + int(end) + 1 for end in chosen]
            lines += len(ends)
            position += len(piece)
            ended = piece.endswith(b"\n")
    return starts, lines + (0 if ended or size == start else 1)
