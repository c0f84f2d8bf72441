# SPDX-License-Identifier: Apache-2.0
"""Every kind of leaf: it is restored bit for bit, or refused before the save starts."""

from __future__ import annotations

import datetime
import enum
import fractions
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import model
import numpy as np
import pytest
from etils import epath
from flat_options import manager_options

import deltackpt
from deltackpt import inspect, serving, touched
from deltackpt.errors import TableSelectionError, TemplateMismatch, UnsupportedLeaf
from deltackpt.handlers import orbax_dense, v0
from deltackpt.restore import placing
from deltackpt.state import tables

TABLES = deltackpt.Tables(select="table", slots={"table": {"sum": "sum"}})


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    RED = 1


def array(dtype: Any) -> np.ndarray:
    return np.arange(4).reshape(2, 2).astype(dtype)


#: Supported dense leaves.
STORABLE = {
    "none": None,
    "bool": True,
    "int": -3,
    "int64": -(2**63),
    "uint64": 2**64 - 1,
    "int enum": Level.LOW,
    "float": 0.1,
    "text": "a text",
    "no text": "",
    "empty dict": {},
    "empty list": [],
    "empty tuple": (),
    "numpy bool": np.bool_(True),
    "numpy int8": np.int8(3),
    "numpy float64": np.float64(0.1),
    "numpy complex64": np.complex64(1 + 2j),
    "bfloat16": ml_dtypes.bfloat16(1.5),
    "float8": ml_dtypes.float8_e4m3fn(1.5),
    "no axes": np.array(0.1),
    "booleans": array(bool),
    "int64s": array(np.int64) + 2**40,
    "uint64s": array(np.uint64) + np.uint64(2**63),
    "complex128s": array(np.complex128),
    "bfloat16s": array(ml_dtypes.bfloat16),
    "float8s": array(ml_dtypes.float8_e5m2),
    "float4s": array(ml_dtypes.float4_e2m1fn),
    "int4s": array(ml_dtypes.int4),
    "int2s": np.array([1, -1], ml_dtypes.int2),
    "other order of bytes": array(">f4"),
    "order of columns": np.asfortranarray(array(np.float32)),
    "a view": np.arange(10.0)[::2],
    "no elements": np.zeros((0, 3), ml_dtypes.bfloat16),
    "no elements of uint4": np.zeros((0, 3), ml_dtypes.uint4),
    "no elements, other order": np.zeros((2, 0), ">i8"),
    "jax": jnp.ones((2, 3)),
    "jax bfloat16": jnp.ones(3, jnp.bfloat16),
    "jax int4": jnp.ones(3, jnp.int4),
    "jax float8": jnp.ones(3, jnp.float8_e4m3fn),
    "jax complex64": jnp.array([1 + 2j]),
    "jax no elements": jnp.zeros((0, 2)),
    "key": jax.random.key(1),
    "keys": jax.random.split(jax.random.key(1), 3),
    "key of another kind": jax.random.key(1, impl="rbg"),
    "keys of another kind": jax.random.split(jax.random.key(2, impl="rbg"), 3),
    "key of a third kind": jax.random.key(1, impl="unsafe_rbg"),
    "raw key": jax.random.PRNGKey(1),
}

#: Unsupported leaves: Orbax would refuse them, lose data, or fail in the background.
REFUSED = {
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "complex": 1 + 2j,
    "too large": 2**64,
    "too small": -(2**63) - 1,
    "date": datetime.datetime(2020, 1, 1),
    "object": object(),
    "function": len,
    "enum": Colour.RED,
    "set": {1},
    "fraction": fractions.Fraction(1, 2),
    "path": Path("/x"),
    "placeholder": ...,
    "abstract": jax.ShapeDtypeStruct((2,), jnp.float32),
    "text of ours": "deltackpt:empty:float32:0,3",
    "numpy text": np.str_("abc"),
    "numpy date": np.datetime64("2020-01-01"),
    "half a character": "\ud800",
    "texts": np.array(["ab", "c"]),
    "byte texts": np.array([b"ab"]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "objects": np.array([None, 1], object),
    "records": np.zeros(2, [("a", "i4")]),
    "long doubles": np.zeros(2, np.longdouble),
    "masked": np.ma.array([1, 2], mask=[0, 1]),
    "uint4": np.array([1, 3], ml_dtypes.uint4),
    "jax uint4": jnp.ones(3, jnp.uint4),
    "float6": np.array([1.0], ml_dtypes.float6_e2m3fn),
    "float0": np.zeros(2, jax.dtypes.float0),
    "no keys": jax.random.split(jax.random.key(1), 3)[:0],
}


def manager(root: Path, **options: Any) -> deltackpt.CheckpointManager:
    handlers = {"embeddings": TABLES}
    return deltackpt.CheckpointManager(root, handlers=handlers, options=manager_options(**options))


def with_tables(leaves: dict[str, Any]) -> dict[str, Any]:
    return {"table": jnp.ones((4, 2)), "sum": jnp.zeros(4), "leaves": leaves}


def bits(leaf: Any) -> bytes:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same_leaf(found: Any, expected: Any, name: str = "") -> None:
    """Bit for bit, Python scalars included."""
    assert isinstance(found, jax.Array) == isinstance(expected, jax.Array), name
    if not isinstance(expected, jax.Array):
        assert type(found) is type(expected), name
    if not hasattr(expected, "dtype"):
        assert found == expected, name
        return
    assert (found.dtype, np.shape(found)) == (expected.dtype, np.shape(expected)), name
    assert bits(found) == bits(expected), name


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Iterator[deltackpt.CheckpointManager]:
    """A step with every leaf that can be stored."""
    with manager(tmp_path_factory.mktemp("leaves") / "root") as saver:
        model.commit(saver, 1, with_tables(STORABLE))
        yield saver


def as_abstract(leaf: Any) -> Any:
    """The leaf as ``jax.eval_shape`` returns it, if JAX supports its dtype."""
    if not isinstance(leaf, jax.Array):
        narrow = hasattr(leaf, "dtype") and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
        if not narrow or not leaf.dtype.isnative:
            return leaf
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)


def native(leaf: Any) -> Any:
    """Values in native byte order, as they are stored."""
    return leaf.astype(leaf.dtype.newbyteorder("=")) if isinstance(leaf, np.ndarray) else leaf


def _inspected(stored: Any, root: Path) -> dict[str, Any]:
    dense = inspect.open(stored._run.root.path)[1].dense
    return {name: dense[f"leaves/{name}"].value for name in STORABLE}


def _served(stored: Any, root: Path) -> dict[str, Any]:
    with serving.follow(stored._run.root.path, poll_secs=None) as live:
        live.advance()
        with live.version() as version:
            dense = version.dense
            return {path.removeprefix("leaves/"): np.array(dense[path]) for path in dense}


def _rows(stored: Any, root: Path) -> dict[str, Any]:
    arrays = {
        name: native(leaf)
        for name, leaf in STORABLE.items()
        if isinstance(leaf, np.ndarray) and leaf.size and leaf.ndim
    }
    handlers = {"embeddings": deltackpt.Tables(select="*")}
    with deltackpt.CheckpointManager(root, handlers=handlers) as saver:
        model.commit(saver, 1, arrays)
        found = saver.read(1, dict.fromkeys(arrays)).tables
    return {name: fields["values"] for name, fields in found.items()}


def restored(stored: Any, template: Any) -> dict[str, Any]:
    return stored.restore(1, with_tables(template)).state["leaves"]


def read(stored: Any, template: Any) -> dict[str, Any]:
    return stored.read_state(1, {"leaves": template}).state["leaves"]


ABSTRACT = {name: as_abstract(leaf) for name, leaf in STORABLE.items()}
#: Every way to read leaves: with a template like them, an abstract one, or none.
WAYS = {
    "restore": lambda stored, root: restored(stored, STORABLE),
    "read_state": lambda stored, root: read(stored, STORABLE),
    "restore, abstract": lambda stored, root: restored(stored, ABSTRACT),
    "read_state, abstract": lambda stored, root: read(stored, ABSTRACT),
    "restore, no template": lambda stored, root: stored.restore(1).state["leaves"],
    "inspect": _inspected,
    "serving": _served,
    "read": _rows,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_read_a_leaf_gives_its_bits_and_its_kind(way, stored, tmp_path):
    found = WAYS[way](stored, tmp_path / "root")
    assert len(found) > 10 if way in ("serving", "read") else found.keys() == STORABLE.keys()
    for name, value in found.items():
        leaf = STORABLE[name]
        if way in ("restore", "read_state"):
            assert_same_leaf(value, leaf, name)
        elif not hasattr(leaf, "dtype"):
            assert np.all(value == leaf) or (leaf == () and value == []), name
        else:
            assert np.shape(value)[: np.ndim(leaf)] == np.shape(leaf), name
            assert bits(native(value)) == bits(native(leaf)), name
            if "abstract" in way:
                assert value.dtype == leaf.dtype, name


@pytest.mark.parametrize("leaves", [STORABLE, ABSTRACT], ids=["concrete", "abstract"])
def test_a_key_of_one_implementation_is_never_read_as_another(stored, leaves):
    names = ("key", "key of another kind", "key of a third kind")
    for name, other in itertools.permutations(names, 2):
        with pytest.raises(TemplateMismatch, match=f"leaves/{name}: expected"):
            read(stored, {name: leaves[other]})
        with pytest.raises(TemplateMismatch, match=f"leaves/{name}: expected"):
            restored(stored, {**STORABLE, name: leaves[other]})


@pytest.mark.parametrize("leaf", [np.arange(3.0), 3, "a text", None, {}], ids=str)
def test_a_state_may_be_a_single_leaf(leaf, tmp_path):
    handlers = {"embeddings": deltackpt.Tables(select=())}
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers) as saver:
        model.commit(saver, 1, leaf)
        for template in (leaf, None):
            np.testing.assert_equal(saver.restore(1, template).state, leaf)


class Side(str, enum.Enum):  # noqa: UP042 - The text of a StrEnum is its value.
    USER = "user"


#: Their texts differ from what msgpack stores of them, or it stores nothing.
KEYS = [Side.USER, Level.LOW, 1 << 64, -(1 << 63) - 1]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_leaf_with_an_unusual_key_is_read_by_its_path(key, tmp_path):
    state = {"table": {key: jnp.ones((4, 2))}, "dense": {key: jnp.zeros(3)}}
    handlers = {"embeddings": deltackpt.Tables(select="table/*")}
    empty = jax.tree.map(lambda leaf: leaf - 1, state)
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers) as saver:
        model.commit(saver, 1, state)
        model.assert_same(saver.restore(1, empty).state, state)
        found = saver.read_state(1, empty)
        assert not found.missing and not found.unused
        model.assert_same(found.state, state)


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_leaf_is_refused_before_the_save_starts(name, tmp_path):
    with manager(tmp_path / "root") as saver:
        with pytest.raises(UnsupportedLeaf, match=r"leaves/odd ") as caught:
            saver.save(1, with_tables({"odd": REFUSED[name], "even": jnp.ones(2)}))
        assert "save again" not in str(caught.value)
        assert "save(items=...)" in str(caught.value)
        assert not list(saver._run.root.path.glob("1*"))
        saver.save(1, with_tables({"even": jnp.ones(2)}))


def test_all_unsupported_leaves_are_named(tmp_path):
    with manager(tmp_path) as saver, pytest.raises(UnsupportedLeaf) as caught:
        saver.save(1, with_tables({"odd": b"abc", "date": datetime.date(2020, 1, 1)}))
    assert "leaves/odd is bytes" in str(caught.value)
    assert "leaves/date is a date" in str(caught.value)


ONES = jnp.ones(3)
TEXT = "leaves/a/~/c is stored as a string, whose"
#: Leaves of a first save, of a second that is refused, and the message.
ODD = {
    # Orbax cannot write a string at such a path, as in haiku's "linear/~/w"; arrays have them.
    "text": ({"a/~/b": ONES, "a~1/b": "a text"}, {"a/~/b": ONES, "a/~/c": "a text"}, TEXT),
    "no elements": (
        {"a/~/b": ONES, "a~1/b": jnp.zeros((0, 2))},
        {"a/~/b": ONES, "a/~/c": jnp.zeros((0, 2))},
        TEXT,
    ),
    # It would replace another leaf.
    "slash": ({"a": ONES}, {"a": ONES, "a/": ONES}, "leaves/a/ has a path that ends with '/'"),
    "not unicode": ({"a": ONES}, {"\ud800": ONES}, r"leaves/\\ud800 has a lone surrogate"),
    "abstract": (
        {"a": ONES},
        {"a": jax.ShapeDtypeStruct(ONES.shape, ONES.dtype, sharding=ONES.sharding)},
        "leaves/a is a ShapeDtypeStruct",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_path_or_an_abstract_state_is_refused_before_the_save_starts(case, tmp_path):
    sound, odd, message = ODD[case]
    with manager(tmp_path) as saver:
        saver.save(1, with_tables(sound))
        with pytest.raises(UnsupportedLeaf, match=message) as caught:
            saver.save(2, with_tables(odd))
        assert str(caught.value).encode()
        saver.wait_until_finished()
        assert saver.all_steps() == [1]


def test_leaves_are_checked_once_except_those_whose_value_matters():
    asked: list[Any] = []

    def fault(leaf: Any, key: Sequence[str]) -> str | None:
        asked.append(leaf)
        return orbax_dense.fault(leaf, key)

    choice = deltackpt.Tables(select="table")
    state = with_tables({"a": jnp.ones(2), "count": 3, "b": np.ones(2)})
    tables.split(state, choice, dense_fault=fault)
    assert len(asked) == 4
    asked.clear()
    tables.split(state, choice, dense_fault=fault)
    assert asked == [3]
    state["leaves"]["count"] = 2**64
    with pytest.raises(UnsupportedLeaf, match="leaves/count is an integer of more than 64 bits"):
        tables.split(state, choice, dense_fault=fault)


@pytest.mark.parametrize("dtype", [">f4", ">i8", np.longdouble, jax.dtypes.float0, "masked"])
@pytest.mark.parametrize("name", ["table", "sum"])
def test_a_table_or_slot_that_would_be_restored_with_other_values_is_refused(dtype, name, tmp_path):
    state, message = with_tables({}), "cast it"
    if dtype == "masked":
        state[name] = np.ma.array(state[name], mask=False)
        message = rf"\b{name} is a masked array, whose mask"
    else:
        state[name] = np.zeros(state[name].shape, dtype)
    with manager(tmp_path) as saver:
        with pytest.raises(TableSelectionError, match=message):
            saver.save(1, state)
        assert saver.all_steps() == []


#: Calls that read a state.
READERS = {
    "save": lambda saver, state, marks: saver.save(2, state, touched=marks),
    "log": lambda saver, state, marks: saver.append(2, state, touched=marks),
    "next_save": lambda saver, state, marks: saver.next_save(state, touched=marks),
    "verify_tracking": lambda saver, state, marks: saver.verify_tracking(state, touched=marks),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_state_without_values_is_refused_by_name_before_the_save_starts(reader, tmp_path):
    state = with_tables({"kernel": jnp.ones(2), "key": jax.random.key(1)})
    marks = touched.init({"table": state["table"]})
    with manager(tmp_path, wal=deltackpt.WalOptions()) as saver:
        model.commit(saver, 1, state, touched=marks)

        def refused(change: str, given: Any, with_marks: Any, fault: str) -> None:
            with pytest.raises(UnsupportedLeaf, match=rf"\n +{change} {fault}"):
                READERS[reader](saver, given, with_marks)

        def traced(state: Any, marks: Any) -> int:
            refused("leaves/kernel", state, None, "is a tracer")
            refused("touched", kept, marks, "is a tracer")
            refused("leaves/opt", {**kept, "leaves": {"opt": marks}}, None, "is a tracer")
            return 0

        kept = jax.tree.map(lambda leaf: leaf.copy(), state)
        jax.jit(traced)(state, marks)
        jax.make_jaxpr(traced)(state, marks)
        donated = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf, tree), donate_argnums=0)
        for name in ("table", "sum", "leaves/kernel", "leaves/key"):
            gone = jax.tree.map(lambda leaf: leaf.copy(), state)
            donated(gone["leaves"][name[7:]] if "/" in name else gone[name])
            refused(name, gone, marks, "was deleted")
        donated(marks)
        refused("touched", kept, marks, "was deleted")
        refused("leaves/opt", {**kept, "leaves": {"opt": marks}}, None, "was deleted")
        assert saver.all_steps() == [1] and saver.recovery_points() == []
        assert saver.save(3, kept).kind == "base"


# Templates.


@pytest.mark.parametrize("how", ["restore", "restore_latest", "read_state"])
def test_a_template_of_tracers_is_refused_by_name(how, stored):
    def call(kernel: Any) -> Any:
        template = with_tables({"jax": kernel})
        give = getattr(stored, how)
        return give(template) if how == "restore_latest" else give(1, template)

    with pytest.raises(TemplateMismatch, match=r"found tracers\n +leaves/jax\n"):
        jax.jit(call)(jnp.ones((2, 3)))


WIDE = {
    "int64": np.full(3, 2**40 + 5),
    "uint64": np.array([2**63 + 5], np.uint64),
    "float64": np.array([0.1]),
    "complex128": np.array([0.1j]),
    "scalar": np.float64(0.1),
    "number": 2**40 + 5,
    "no elements": np.zeros((0, 2), np.int64),
}


def wide_state() -> dict[str, Any]:
    large = 2**40 + 5
    return {"table": np.full((4, 2), large), "sum": np.full(4, large), "leaves": {**WIDE}}


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Iterator[deltackpt.CheckpointManager]:
    """A step with 64-bit leaves, written and read with 64-bit types disabled in JAX."""
    with manager(tmp_path_factory.mktemp("wide") / "root") as saver:
        model.commit(saver, 1, wide_state())
        yield saver


@pytest.mark.parametrize(
    ("name", "shown"),
    [("table", "table table, values"), ("sum", r"table table, slot\.sum")]
    + [(name, f"dense leaf leaves/{name}") for name in WIDE],
)
@pytest.mark.parametrize("kind", ["abstract", "array", "sharded"])
def test_a_template_that_jax_would_truncate_to_32_bits_is_refused(wide, name, shown, kind):
    template = wide_state()
    inside = template if name in template else template["leaves"]
    leaf = np.asarray(inside[name])
    if kind == "array":
        with jax.enable_x64(True):
            inside[name] = jnp.asarray(inside[name])
    else:
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        placed = sharding if kind == "sharded" else None
        inside[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)
    with pytest.raises(TemplateMismatch, match=f"step 1, {shown}: .*jax_enable_x64.*numpy"):
        wide.restore(1, template)
    with pytest.raises(TemplateMismatch):
        wide.restore_latest(template)


def test_64_bit_leaves_are_restored_as_numpy_arrays(wide):
    expected = wide_state()
    found, whole = wide.restore(1, expected).state, wide.restore(1).state
    for name in ("table", "sum"):
        assert_same_leaf(found[name], expected[name], name)
        assert_same_leaf(whole[name], expected[name], name)
    for name, leaf in WIDE.items():
        assert_same_leaf(found["leaves"][name], leaf, name)
    rows = wide.read(1, {"table": (1, 3)}).tables["table"]["values"]
    assert rows.tolist() == [[2**40 + 5] * 2] * 2


def test_the_handlers_also_refuse_to_truncate_64_bits(wide):
    item = wide._run.root.step_dir(1) / "embeddings"
    asked = placing.abstract_of(deltackpt.reading.stored_saves.read_save(item.parent))
    with pytest.raises(TemplateMismatch, match="table table, .*jax_enable_x64"):
        v0.DeltaHandler().restore(epath.Path(item), args=v0.DeltaRestore(asked))


def test_a_state_may_be_nested_almost_as_deep_as_the_stack(tmp_path):
    leaf = state = np.arange(3.0)
    for number in range(700):
        state = {"a": state} if number % 2 else [state]
    with manager(tmp_path) as saver:
        model.commit(saver, 1, with_tables({"deep": state}))
        found = saver.restore(1).state["leaves"]["deep"]
    for number in reversed(range(700)):
        found = found["a" if number % 2 else 0]
    np.testing.assert_array_equal(found, leaf)


def test_a_number_that_the_template_cannot_hold_is_refused(tmp_path):
    numbers = {"count": 2**40, "share": 0.1, "flag": True}
    with manager(tmp_path) as saver:
        model.commit(saver, 1, with_tables(numbers))
        model.commit(saver, 2, with_tables({**numbers, "count": 2**20}))
        template = jax.eval_shape(lambda: with_tables({**numbers, "count": 1}))
        with pytest.raises(TemplateMismatch, match=r"leaves/count: .*int32\[\].*1099511627776"):
            saver.restore(1, template)
        found = saver.restore(2, template).state["leaves"]
    assert int(found["count"]) == 2**20
    assert found["share"] == jnp.float32(0.1)
    assert bool(found["flag"])


@pytest.mark.parametrize(
    ("stored_leaf", "asked"),
    [
        (jnp.ones(3), None),
        (jnp.ones(3), {}),
        (3, None),
        ("text", None),
        (np.zeros((0, 2)), None),
        (np.zeros((0, 2)), np.zeros((0, 3))),
        (np.zeros((0, 2)), "text"),
        ("text", np.zeros((0, 2))),
        (1.5, 1),
        (2, True),
        (jnp.ones(3), 3),
        (jnp.ones(3), "text"),
        (3, "text"),
        (3, jnp.ones(3)),
        (jnp.ones(2), jax.random.key(0)),
        (jax.random.key(0), jnp.ones(2)),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
        (jax.random.key(0), jax.random.split(jax.random.key(0), 3)),
        (None, jnp.ones(3)),
        (jnp.ones(3), object()),
    ],
    ids=lambda leaf: "object" if type(leaf) is object else repr(leaf).replace("\n", " ")[:30],
)
def test_a_template_of_another_kind_of_leaf_is_refused(stored_leaf, asked, tmp_path):
    with manager(tmp_path) as saver:
        model.commit(saver, 1, with_tables({"leaf": stored_leaf}))
        with pytest.raises(TemplateMismatch, match=r"dense leaf leaves/leaf: expected .* found"):
            saver.restore(1, with_tables({"leaf": asked}))


def test_leaves_that_the_template_lacks_are_named(stored):
    fewer = {name: leaf for name, leaf in STORABLE.items() if name not in ("none", "keys")}
    with pytest.raises(TemplateMismatch, match=r"would be lost\n.*\n.*keys.*\n.*leaves/none"):
        restored(stored, fewer)
    with pytest.raises(TemplateMismatch, match="leaves/further.*no such"):
        restored(stored, {**STORABLE, "further": None})


def test_placeholders_skip_dense_leaves_and_those_of_tables_name_another_call(stored):
    found = restored(stored, {**STORABLE, "keys": ...})
    assert found["keys"] is ...
    assert_same_leaf(found["jax"], STORABLE["jax"], "jax")
    for name in ("table", "sum"):
        with pytest.raises(TableSelectionError, match=rf"{name}.*read\(step, tables\)"):
            stored.restore(1, {**with_tables(STORABLE), name: ...})
