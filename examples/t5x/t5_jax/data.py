# SPDX-License-Identifier: Apache-2.0
"""Text as batches of span corruption: spans are removed from the input and become the target.

    text     Thank you for inviting me to your party last week .
    inputs   Thank you <0> me to your party <1> week . </s>
    targets  <0> for inviting <1> last <2> </s>

Source: Raffel et al., arXiv:1910.10683, section 3.1.4.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from t5_jax.model import PAD

#: Ids common to every vocabulary. Words follow, and the sentinels are the last ids.
END, UNKNOWN = 1, 2
_FIRST = 3
SENTINELS = 100
_UNKNOWN_WORD = "<unk>"

#: T5's share of masked tokens, and its mean span length.
_NOISE_DENSITY, _SPAN_TOKENS = 0.15, 3.0
_LEAST_TEXT = 2

#: Text files of the repository, used if no text is given.
_CLONE = Path(__file__).resolve().parents[3]
_CLONE_FILES = ("*.md", "docs/**/*.md", "deltackpt/**/*.py", "examples/**/*.py", "tests/**/*.py")


class Batch(NamedTuple):
    """One batch, padded with ``PAD``.

    Attributes:
      inputs: the text with sentinels in place of spans, (batch, inputs) int32.
      targets: each sentinel followed by the span that it replaces, (batch, targets) int32.
    """

    inputs: np.ndarray
    targets: np.ndarray


class Vocabulary(Protocol):
    """Maps text to ids and back. The last ``SENTINELS`` ids are sentinels, in descending order."""

    @property
    def size(self) -> int:
        """Number of ids: rows of the input embedding."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, (tokens,) int32."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids that are words or bytes."""
        ...


class Words:
    """The whitespace-separated words of a text, most frequent first."""

    def __init__(self, text: str):
        """Counts the words."""
        counts = collections.Counter(text.split())
        # WikiText has its rare words replaced already.
        del counts[_UNKNOWN_WORD]
        self._words = [word for word, _ in counts.most_common()]
        self._ids = {word: _FIRST + i for i, word in enumerate(self._words)}

    @property
    def size(self) -> int:
        """See ``Vocabulary``."""
        return _FIRST + len(self._words) + SENTINELS

    def encode(self, text: str) -> np.ndarray:
        """See ``Vocabulary``; unknown words are ``UNKNOWN``."""
        return np.array([self._ids.get(word, UNKNOWN) for word in text.split()], np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """See ``Vocabulary``; white space becomes a blank."""
        words = (_UNKNOWN_WORD if i == UNKNOWN else self._words[i - _FIRST] for i in ids)
        return " ".join(words)


class Bytes:
    """The UTF-8 bytes of a text."""

    @property
    def size(self) -> int:
        """See ``Vocabulary``."""
        return _FIRST + 256 + SENTINELS

    def encode(self, text: str) -> np.ndarray:
        """See ``Vocabulary``."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + _FIRST

    def decode(self, ids: Iterable[int]) -> str:
        """See ``Vocabulary``."""
        return bytes(i - _FIRST for i in ids).decode()


class Lengths(NamedTuple):
    """Token counts of one sample.

    Attributes:
      text: tokens taken from the text.
      noise: masked tokens among them.
      spans: number of masked spans.
      inputs: total input tokens, with padding if another token of text would not fit.
      targets: total target tokens: spans, their sentinels, a final sentinel, ``END``.
    """

    text: int
    noise: int
    spans: int
    inputs: int
    targets: int


def lengths(inputs: int) -> Lengths:
    """Returns the largest sample that fits after masking.

    Args:
      inputs: number of tokens of the corrupted text, including ``END``.

    Raises:
      ValueError: the length is too short for a span, or needs too many sentinels.

    Example:
      >>> lengths(128)
      Lengths(text=141, noise=21, spans=7, inputs=128, targets=30)
    """
    # The shortest text keeps one word, masks one, and gets a sentinel and the end.
    text = _LEAST_TEXT
    while _corrupted(text + 1) <= inputs:
        text += 1
    noise, spans = _cut(text)
    # One more sentinel ends the target.
    if _corrupted(text) > inputs or spans >= SENTINELS:
        raise ValueError(
            f"input length: expected at least {_corrupted(_LEAST_TEXT)} tokensand at most "
            f"{SENTINELS - 1} masked spans, found {inputs} tokens with {spans} spans"
        )
    return Lengths(text, noise, spans, inputs, noise + spans + 2)


def _cut(text: int) -> tuple[int, int]:
    """Numbers of tokens to mask and of spans, for a text length."""
    noise = min(max(round(text * _NOISE_DENSITY), 1), text - 1)
    return noise, max(round(noise / _SPAN_TOKENS), 1)


def _corrupted(text: int) -> int:
    """Number of input tokens for a text length."""
    noise, spans = _cut(text)
    return text - noise + spans + 1


class SpanCorruption:
    """Batches of corrupted windows of a text."""

    def __init__(
        self, text: str, vocabulary: Vocabulary, batch_size: int, input_length: int, *, seed: int
    ):
        """Encodes the text.

        Args:
          text: the training text; windows wrap around at its end.
          vocabulary: vocabulary of the text.
          batch_size: samples in each batch.
          input_length: number of input tokens per sample.
          seed: seed of windows and spans.

        Raises:
          ValueError: the text is empty, or the length is out of range.
        """
        self._ids = vocabulary.encode(text)
        if not self._ids.size:
            raise ValueError("text: expected at least one word, found none")
        self._size = vocabulary.size
        self._batch_size = batch_size
        self._seed = seed
        self.lengths = lengths(input_length)

    def batch(self, step: int) -> Batch:
        """Returns the batch of a training step: a pure function of the arguments and the step."""
        random = np.random.default_rng([self._seed, step])
        inputs = np.full((self._batch_size, self.lengths.inputs), PAD, np.int32)
        targets = np.full((self._batch_size, self.lengths.targets), PAD, np.int32)
        for row in range(self._batch_size):
            start = int(random.integers(self._ids.size))
            window = np.arange(start, start + self.lengths.text)
            noise = random_spans(random, self.lengths)
            corrupted, spans = corrupt(self._ids.take(window, mode="wrap"), noise, self._size)
            inputs[row, : corrupted.size] = corrupted
            targets[row, : spans.size] = spans
        return Batch(inputs, targets)


def random_spans(random: np.random.Generator, lengths: Lengths) -> np.ndarray:
    """Returns which tokens to mask, (text,) bool, as in T5's ``random_spans_noise_mask``.

    Text and spans alternate, text first; both are divided at random into one piece per span.
    """
    kept = _pieces(random, lengths.text - lengths.noise, lengths.spans)
    cut = _pieces(random, lengths.noise, lengths.spans)
    pieces = np.stack([kept, cut], axis=1).ravel()
    return np.repeat(np.arange(pieces.size) % 2 == 1, pieces)


def corrupt(
    tokens: np.ndarray, noise: np.ndarray, vocabulary_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Replaces spans of a text by sentinels.

    Args:
      tokens: (tokens,) int32.
      noise: which of them to mask, (tokens,) bool.
      vocabulary_size: the sentinels are the last ids below it.

    Returns:
      Inputs and targets, both int32 and ended by ``END``.

    Example:
      >>> inputs, targets = corrupt(
      ...     np.array([5, 6, 7, 8]), np.array([False, True, True, False]), 200)
      >>> inputs.tolist(), targets.tolist()
      ([5, 199, 8, 1], [199, 6, 7, 198, 1])
    """
    starts = noise & ~np.concatenate([[False], noise[:-1]])
    sentinels = vocabulary_size - np.cumsum(starts)
    inputs = np.where(starts, sentinels, tokens)[starts | ~noise]
    spans = np.insert(tokens[noise], np.flatnonzero(starts[noise]), sentinels[starts])
    ending = sentinels[-1] - 1
    return _ended(inputs), _ended(np.append(spans, ending))


def _ended(tokens: np.ndarray) -> np.ndarray:
    return np.append(tokens, END).astype(np.int32)


def text_of(path: Path | None) -> str:
    """Returns a text file, or by default this repository's documentation and sources."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    files = (file for pattern in _CLONE_FILES for file in sorted(_CLONE.glob(pattern)))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _pieces(random: np.random.Generator, items: int, count: int) -> np.ndarray:
    """Divides ``items`` into ``count`` pieces of at least one, each division equally likely."""
    cuts = 1 + np.sort(random.choice(items - 1, count - 1, replace=False))
    return np.diff(cuts, prepend=0, append=items)
