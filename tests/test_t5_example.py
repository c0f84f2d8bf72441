# SPDX-License-Identifier: Apache-2.0
"""The T5 example: its model, its span corruption, and the exactness of a resumed run."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "t5x"))

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from running import comparison, demonstration, journal
from t5_jax import data, demo, main, model, trainer

import deltackpt
from deltackpt.format import row_blocks
from deltackpt.tracking import fingerprints

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "t5x"
TEXT = "the quick brown fox jumps over the lazy dog and runs away from it " * 40


def sizes_of(rows: int) -> model.Sizes:
    """The smallest model, with one layer in each stack."""
    return model.Sizes(rows=rows, **model.NAMED["tiny"] | {"layers": 1})


SIZES = sizes_of(200)


def bucket_oracle(offset: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """The bucket in integer arithmetic: ranges grow by powers of the ratio of the distances."""
    first, distance = 0, max(-offset, 0)
    if bidirectional:
        buckets //= 2
        first, distance = buckets * (offset > 0), abs(offset)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    steps = buckets - exact
    # exact * (max_distance / exact) ** (j / steps) <= distance, raised to the power of steps
    ranges = max(
        j for j in range(steps) if exact ** (steps - j) * max_distance**j <= distance**steps
    )
    return first + exact + ranges


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 64), (8, 20)])
def test_relative_positions_fall_into_the_buckets_of_t5(bidirectional, buckets, max_distance):
    offsets = np.arange(-300, 301).reshape(1, -1)
    found = model.relative_position_buckets(
        offsets, bidirectional=bidirectional, buckets=buckets, max_distance=max_distance
    )
    expected = [bucket_oracle(int(o), bidirectional, buckets, max_distance) for o in offsets[0]]
    assert found.tolist() == [expected]


def normalised(stream, scale):
    return stream / np.sqrt(np.mean(stream**2, axis=-1, keepdims=True) + 1e-6) * scale


def attended(params, queries, memory, mask, bias, heads):
    """One attention over one sample, head by head and query by query."""
    query, key, value = (
        read @ params[name]["kernel"]
        for read, name in ((queries, "query"), (memory, "key"), (memory, "value"))
    )
    width = query.shape[-1] // heads
    mixed = np.zeros(query.shape)
    for head in range(heads):
        piece = slice(head * width, (head + 1) * width)
        for i in range(len(query)):
            scores = key[:, piece] @ query[i, piece] + bias[head, i]
            weights = np.where(mask[i], np.exp(scores - scores[mask[i]].max()), 0)
            mixed[i, piece] = weights / weights.sum() @ value[:, piece]
    return mixed @ params["out"]["kernel"]


def gated(params, read):
    gate = read @ params["wi_0"]["kernel"]
    cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    hidden = 0.5 * gate * (1 + np.tanh(cubic)) * (read @ params["wi_1"]["kernel"])
    return hidden @ params["wo"]["kernel"]


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def drawn(random, shapes):
    """Random parameters in float64."""
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape) * 0.1, shapes)


def test_encoder_layer_equals_a_numpy_reference(random):
    length = 7
    stream = random.normal(size=(1, length, SIZES.d_model))
    visible = np.array([True] * 5 + [False] * 2)[None, None, None]
    bias = random.normal(size=(1, SIZES.heads, length, length))
    layer = model.EncoderLayer(SIZES)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), stream, visible, bias, True)["params"]
    params = drawn(random, shapes)
    found = layer.apply({"params": params}, jnp.asarray(stream), visible, bias, True)

    read = normalised(stream[0], params["pre_attention_layer_norm"]["scale"])
    mask = np.broadcast_to(visible[0, 0], (length, length))
    middle = stream[0] + attended(params["attention"], read, read, mask, bias[0], SIZES.heads)
    read = normalised(middle, params["pre_mlp_layer_norm"]["scale"])
    np.testing.assert_allclose(found[0], middle + gated(params["mlp"], read), rtol=1e-4, atol=1e-4)


def test_attention_to_another_sequence_equals_a_numpy_reference(random):
    queries, memory = random.normal(size=(4, SIZES.d_model)), random.normal(size=(9, SIZES.d_model))
    mask = np.ones((4, 9), bool)
    mask[:, 6:] = False
    attention = model.Attention(SIZES)
    arguments = (queries[None], memory[None], mask[None, None], None, True)
    shapes = jax.eval_shape(attention.init, jax.random.key(0), *arguments)["params"]
    params = drawn(random, shapes)
    found = attention.apply({"params": params}, *map(jnp.asarray, arguments[:3]), None, True)
    expected = attended(params, queries, memory, mask, np.zeros((SIZES.heads, 4, 1)), SIZES.heads)
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def initial() -> trainer.TrainState:
    return trainer.init_state(trainer.TrainOptions(sizes=SIZES, seed=4))


def test_initial_queries_compensate_for_unscaled_scores(initial):
    kernels = initial.params["encoder"]["layers_0"]["attention"]
    assert np.std(kernels["query"]["kernel"]) == pytest.approx((128 * 64) ** -0.5, rel=0.05)
    assert np.std(kernels["key"]["kernel"]) == pytest.approx(128**-0.5, rel=0.05)
    assert np.std(trainer.embedding(initial.params)) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("name", "parameters"), [("small", 76_961_152), ("base", 247_577_856)])
def test_sizes_are_those_of_the_published_models(name, parameters):
    sizes = model.Sizes(rows=32_128, **model.NAMED[name])
    state = trainer.abstract_state(trainer.TrainOptions(sizes=sizes))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == parameters


@pytest.fixture(scope="module")
def network(initial):
    """Logits as a function of inputs and decoder inputs, on initial parameters."""
    apply = jax.jit(model.T5(SIZES).apply)
    return lambda *arguments: np.asarray(apply({"params": initial.params}, *arguments))


def test_no_target_depends_on_later_ones(network, random):
    inputs = random.integers(1, SIZES.rows, size=(2, 12)).astype(np.int32)
    targets = random.integers(1, SIZES.rows, size=(2, 8)).astype(np.int32)
    other = targets.copy()
    other[:, 5:] = random.integers(1, SIZES.rows, size=(2, 3))
    first, second = network(inputs, targets), network(inputs, other)
    np.testing.assert_array_equal(first[:, :5], second[:, :5])
    assert not np.allclose(first[:, 5:], second[:, 5:])


def test_padding_changes_nothing(network, random):
    inputs = random.integers(1, SIZES.rows, size=(2, 12)).astype(np.int32)
    targets = random.integers(1, SIZES.rows, size=(2, 8)).astype(np.int32)
    padded = [np.pad(ids, ((0, 0), (0, 5))) for ids in (inputs, targets)]
    found, expected = network(*padded), network(inputs, targets)
    np.testing.assert_allclose(found[:, :8], expected, rtol=1e-4, atol=1e-4)
    losses = [
        model.cross_entropy(logits, ids, 1e-4)
        for logits, ids in ((found, padded[1]), (expected, targets))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_the_decoder_reads_each_target_one_position_later():
    shifted = model.shifted_right(jnp.array([[7, 8, 1], [9, 1, 0]]))
    assert shifted.tolist() == [[model.PAD, 7, 8], [model.PAD, 9, 1]]


def put_together(inputs: list[int], targets: list[int], size: int) -> list[int]:
    """Restores the text: replaces each sentinel of the inputs with its span of the targets."""
    spans: dict[int, list[int]] = {}
    for token in targets:
        if token >= size - data.SENTINELS:
            span = spans.setdefault(token, [])
        else:
            span.append(token)
    return [piece for token in inputs for piece in spans.get(token, [token])]


@given(tokens=st.lists(st.integers(3, 40), min_size=1, max_size=60), seed=st.integers(0, 2**32 - 1))
def test_inputs_and_targets_together_are_the_text(tokens, seed):
    size = 3 + 38 + data.SENTINELS
    noise = np.random.default_rng(seed).random(len(tokens)) < 0.4
    noise[0] = True  # At least one.
    inputs, targets = (ids.tolist() for ids in data.corrupt(np.array(tokens), noise, size))
    assert inputs.pop() == targets.pop() == data.END
    assert put_together(inputs, targets, size) == tokens
    spans = [token for token in inputs if token >= size - data.SENTINELS]
    assert spans == list(range(size - 1, size - 1 - len(spans), -1))
    assert targets[-1] == size - 1 - len(spans)


@given(inputs=st.integers(3, 600), seed=st.integers(0, 2**32 - 1))
def test_spans_have_their_share_and_the_inputs_are_full(inputs, seed):
    lengths = data.lengths(inputs)
    noise = data.random_spans(np.random.default_rng(seed), lengths)
    starts = np.flatnonzero(np.diff(noise, prepend=False) & noise)
    assert (noise.size, noise.sum(), starts.size) == lengths[:3]
    assert not noise[0] and noise[-1]
    corrupted, targets = data.corrupt(np.full(lengths.text, 5), noise, 300)
    assert inputs - 2 <= corrupted.size <= inputs
    assert targets.size == lengths.targets


@pytest.mark.parametrize("length", [2, 3000])
def test_lengths_that_cannot_be_corrupted_are_refused(length):
    with pytest.raises(ValueError, match="input length"):
        data.lengths(length)


def test_words_are_numbered_by_their_frequency():
    words = data.Words("b a b c\n a b <unk> <unk> <unk>")
    assert words.size == 3 + 3 + data.SENTINELS
    assert words.encode("b a c <unk> d").tolist() == [3, 4, 5, data.UNKNOWN, data.UNKNOWN]
    assert words.decode([3, 4, 5, data.UNKNOWN]) == "b a c <unk>"


@given(text=st.text())
def test_bytes_decode_to_their_text(text):
    vocabulary = data.Bytes()
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids.tolist()) == text
    assert all(2 < i < vocabulary.size - data.SENTINELS for i in ids)


def test_a_batch_is_text_and_depends_only_on_seed_and_step():
    words = data.Words(TEXT)
    first, again = (data.SpanCorruption(TEXT, words, 3, 40, seed=5) for _ in range(2))
    first.batch(0)
    batch = first.batch(7)
    for mine, theirs in zip(batch, again.batch(7), strict=True):
        assert mine.dtype == np.int32
        np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(batch.inputs, first.batch(8).inputs)
    for inputs, targets in zip(*batch, strict=True):
        kept = [[i for i in row if i not in (model.PAD, data.END)] for row in (inputs, targets)]
        assert words.decode(put_together(*kept, words.size)) in TEXT + TEXT


def test_a_text_without_words_is_refused():
    with pytest.raises(ValueError, match="found none"):
        data.SpanCorruption(" \n", data.Words(" \n"), 2, 32, seed=0)


def batch_of(first: int, second: int, rows: int) -> data.Batch:
    """A sample of two words with the second one masked out."""
    inputs, targets = data.corrupt(np.array([first, second]), np.array([False, True]), rows)
    return data.Batch(inputs[None], targets[None])


def looked_up(batch: data.Batch) -> set[int]:
    decoder_inputs = model.shifted_right(jnp.asarray(batch.targets))
    return {*batch.inputs.ravel().tolist(), *decoder_inputs.ravel().tolist()}


# Adafactor does not factor the statistics of a table with fewer than 128 rows.
@pytest.mark.parametrize(("rows", "dimensions"), [(200, 1), (110, 2)])
def test_step_marks_exactly_the_rows_that_it_changes(rows, dimensions):
    options, tables = trainer.TrainOptions(sizes=sizes_of(rows)), trainer.checkpoint_tables()
    first, *others = (batch_of(i, i + 1, rows) for i in (3, 5, 7))
    step = trainer.train_step(options)
    state, _ = step(trainer.init_state(options), first)
    split = deltackpt.handlers.split(state, tables)
    [(name, fields)] = split.fields.items()
    [always] = [slot for slot in fields if slot != row_blocks.VALUES]
    assert (fields[always].shape[0], fields[always].ndim) == (rows, dimensions)

    before = fingerprints.fingerprints(split.fields, split.layout)
    statistics = np.array(fields[always])
    clock = int(split.touched.clock)
    for batch in others:
        state, _ = step(state, batch)
    split = deltackpt.handlers.split(state, tables)
    [stamps] = split.touched.stamps.values()
    after = fingerprints.fingerprints(split.fields, split.layout)
    fingerprints.check_marked(before, after, {name: {"": stamps}}, {"": clock})
    marked = set(np.flatnonzero(np.asarray(stamps) > clock).tolist())
    assert marked == looked_up(others[0]) | looked_up(others[1])
    assert set(fingerprints.changed_rows(before[name], after[name]).tolist()) <= marked
    # The statistics of a row change forever after one lookup, so they are written as a whole.
    moved = np.asarray(split.fields[name][always]) != statistics
    assert {3, rows - 1} <= set(np.flatnonzero(moved.reshape(rows, -1).any(axis=1)).tolist())
    assert 3 not in marked


def test_a_run_learns():
    words = data.Words(TEXT)
    source = data.SpanCorruption(TEXT, words, 8, 32, seed=1)
    options = trainer.TrainOptions(sizes=sizes_of(words.size))
    state, step, losses = trainer.init_state(options), trainer.train_step(options), []
    for number in range(30):
        state, loss = step(state, source.batch(number))
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert step._cache_size() == 1  # type: ignore[attr-defined]


class Runs:
    """Runs of ``main.py`` on the same short text."""

    def __init__(self, root: Path):
        self._root = root
        self._text = root / "text.txt"
        self._text.write_text(TEXT)

    def trainer(self, name: str) -> demonstration.Trainer:
        """A run that is not started yet."""
        return demonstration.Trainer(
            script=SCRIPTS / "main.py",
            directory=self._root / name,
            journal=self._root / f"{name}.jsonl",
            arguments=[
                *(f"--text={self._text}", "--vocabulary=bytes", "--size=tiny", "--dropout=0.1"),
                *("--batch=2", "--input-length=32"),
                *("--steps=14", "--save-every=2", "--print-every=2"),
            ],
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "")
        yield Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(runs) -> demonstration.Trainer:
    """A run without interruption."""
    whole = runs.trainer("whole")
    whole.run()
    return whole


@pytest.mark.processes
def test_a_run_killed_in_a_save_resumes_exactly(runs, whole):
    killed = runs.trainer("killed")
    kills = demonstration.kill_in_a_save(killed, Console(quiet=True))
    killed.run("--resume")
    [end] = journal.read(whole.journal, "end")
    assert demonstration.show_comparison(killed, whole, kills, end["digest"], Console())
    base, *deltas = journal.read(killed.journal, "save")
    assert (base["kind"], base["rows"]) == ("base", data.Bytes().size)
    assert {entry["kind"] for entry in deltas} == {"delta"}
    # The text has 27 different bytes.
    assert all(0 < entry["rows"] < 40 for entry in deltas)


@pytest.mark.processes
def test_a_used_directory_is_not_trained_into_without_resume(whole):
    with pytest.raises(SystemExit, match="holds step 14: pass --resume"):
        main.main([f"--directory={whole.directory}", *whole.arguments])


def test_wikitext_is_cut_into_batches(shared):
    text = data.text_of(shared / "wikitext2.txt")
    words = data.Words(text)
    assert words.size > 10_000
    assert words.decode(words.encode(text).tolist()) == " ".join(text.split())
    batch = data.SpanCorruption(text, words, 4, 128, seed=0).batch(0)
    assert batch.inputs.shape == (4, 128)
    assert (batch.inputs != model.PAD).all() and (batch.targets != model.PAD).all()
    assert batch.inputs.max() == batch.targets.max() == words.size - 1


def test_without_a_file_the_text_comes_from_the_clone(repository):
    text = data.text_of(None)
    assert (repository / "README.md").read_text() in text
    assert Path(data.__file__).read_text() in text


def test_a_save_has_to_write_the_dense_weights_and_the_touched_rows():
    saved = functools.partial(comparison.Sample, blocked_secs=0, committed_secs=0)
    table = jax.ShapeDtypeStruct((100, 8), np.float32)
    ours = [
        saved(nbytes=5000, kind="delta", dense_nbytes=4000),
        saved(nbytes=7400, kind="base", dense_nbytes=4100),
        saved(nbytes=4900, kind="delta", dense_nbytes=3920),
    ]
    theirs = [saved(nbytes=8000), saved(nbytes=8000), saved(nbytes=7500)]
    share = demo.share_of_orbax(ours, theirs, [30, 10, 20], table)
    # A row takes 32 bytes, and a base has all rows.
    assert share.written == pytest.approx(4900 / 7500)
    needed = [(4000 + 960) / 8000, (4100 + 3200) / 8000, (3920 + 640) / 7500]
    assert share.least == pytest.approx(needed[0]) == pytest.approx(sorted(needed)[1])
    assert not share.holds
    assert dataclasses.replace(share, least=share.written - 0.019).holds


@pytest.mark.long
@pytest.mark.drawn("demos", 2)
def test_demo_proves_that_nothing_is_lost(tmp_path):
    text, found = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text(" ".join(map(str, range(5000))))
    done = subprocess.run(
        [
            *(sys.executable, SCRIPTS / "demo.py", f"--text={text}"),
            *(f"--directory={tmp_path}", f"--json={found}"),
        ],
        env=os.environ | {"XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
    )
    assert done.returncode == 0
    assert b"nothing was lost" in done.stdout
    [entry] = json.loads(found.read_text())
    assert entry["holds"] and entry["ratio"] <= entry["bar"]
