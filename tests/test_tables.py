# SPDX-License-Identifier: Apache-2.0
"""Selecting tables, finding slots, and splitting and joining states."""

from __future__ import annotations

import collections
import re
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from deltackpt import errors, touched
from deltackpt.format import records
from deltackpt.format.manifest import Layout
from deltackpt.policies import CodecChoice
from deltackpt.state.tables import Split, Tables, join, split
from deltackpt.state.touch_state import Marks, match_marks, matched


def table(rows: int, width: int = 4, dtype: Any = jnp.float32, start: float = 0.0) -> jax.Array:
    return jnp.arange(start, start + rows * width).reshape(rows, width).astype(dtype)


def params() -> dict[str, Any]:
    return {
        "emb": table(6),
        "tower": {"emb": table(6, start=100), "w": table(4, 3)},
        "bias": jnp.ones(3),
    }


def state_of(tx: optax.GradientTransformation, tree: Any = None) -> TrainState:
    return TrainState.create(apply_fn=None, params=params() if tree is None else tree, tx=tx)


TABLES = Tables(select=["params/emb", "params/tower/emb"])


def slots_of(layout: Layout, name: str) -> dict[str, str]:
    """Slot name to the path of its leaf."""
    (entry,) = (entry for entry in layout.tables if entry.name == name)
    return {
        field.removeprefix("slot."): "/".join(str(step) for _, step in path)
        for field, path in entry.leaves.items()
        if field != "values"
    }


def joined(template: Any, pieces: Split, marks: Any = None) -> Any:
    return join(template, pieces.layout, pieces.fields, pieces.dense, marks)


def refused(state: Any, message: str, **chosen: Any) -> None:
    with pytest.raises(errors.TableSelectionError, match=message):
        split(state, Tables(**chosen))


def names_in(layout: Layout) -> list[str]:
    return [entry.name for entry in layout.tables]


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


# Slots.


def _labels(tree):
    return {name: "a" if name in ("emb", "bias") else "b" for name in tree}


OPTIMIZERS = {
    "adam": (lambda: optax.adam(1e-3), {"0/mu", "0/nu"}),
    "adagrad": (lambda: optax.adagrad(1e-3), {"0/sum_of_squares"}),
    "plain transformation": (optax.scale_by_adam, {"mu", "nu"}),
    "nested chain": (
        lambda: optax.chain(optax.clip(1.0), optax.chain(optax.trace(0.9), optax.scale(1.0))),
        {"1/0/trace"},
    ),
    "multi_transform": (
        lambda: optax.multi_transform({"a": optax.adagrad(1.0), "b": optax.adam(1.0)}, _labels),
        {"inner_states/a/inner_state/0/sum_of_squares"},
    ),
    "masked": (
        lambda: optax.masked(
            optax.adam(1e-3), {"emb": True, "tower": {"emb": False, "w": True}, "bias": True}
        ),
        {"inner_state/0/mu", "inner_state/0/nu"},
    ),
    "masked by prefix": (
        lambda: optax.masked(optax.trace(0.9), {"emb": True, "tower": False, "bias": False}),
        {"inner_state/trace"},
    ),
    "MultiSteps": (
        lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        {"inner_opt_state/0/mu", "inner_opt_state/0/nu", "acc_grads"},
    ),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        {"inner_state/0/mu", "inner_state/0/nu"},
    ),
    "track": (lambda: touched.track(optax.adam(1e-3), "**/emb"), {"inner/0/mu", "inner/0/nu"}),
    "adafactor": (lambda: optax.adafactor(1e-3, min_dim_size_to_factor=2), {"0/v_col"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_never_gets_the_slots_of_another(name):
    make, expected = OPTIMIZERS[name]
    layout = split(state_of(make()), TABLES).layout
    emb, tower = slots_of(layout, "params/emb"), slots_of(layout, "params/tower/emb")
    assert {slot.removeprefix("opt_state/") for slot in emb} == expected
    assert all(path == f"{slot}/emb" for slot, path in emb.items())
    assert all(path == f"{slot}/tower/emb" for slot, path in tower.items())
    if name == "multi_transform":
        where = "opt_state/inner_states/b/inner_state/0"
        assert set(tower) == {f"{where}/mu", f"{where}/nu"}
    elif name.startswith("masked"):
        assert tower == {}
    else:
        assert set(tower) == set(emb)


def test_factored_statistics_are_always_written():
    layout = split(state_of(optax.adafactor(1e-3, min_dim_size_to_factor=2)), TABLES).layout
    (group,) = layout.groups
    always = {spec.name: spec.always for spec in group.fields}
    assert always == {"values": False, "slot.opt_state/0/v_col": True}


def test_always_by_pattern():
    state = state_of(optax.adam(1e-3))
    for pattern in ("mu", "opt_state/*/mu", "**/mu"):
        (group,) = split(state, Tables(select=TABLES.select, always=(pattern,))).layout.groups
        assert [spec.name for spec in group.fields if spec.always] == ["slot.opt_state/0/mu"]
    message = r"'v' matches no slot(.|\n)*opt_state/0/nu"
    refused(state, message, select=TABLES.select, always=("v",))


def test_statistics_of_other_first_axes_are_dense():
    statistics = ({"emb": jnp.zeros(count)} for count in (4, 6, 1))
    state = {
        "params": {"emb": table(6)},
        "opt_state": optax.FactoredState(jnp.int32(0), *statistics),
    }
    pieces = split(state, Tables(select="params/emb"))
    assert set(slots_of(pieces.layout, "params/emb")) == {"opt_state/v_col"}
    assert set(pieces.dense["opt_state"]) == {"count", "v", "v_row"}


def test_an_average_of_the_params_is_dense_unless_declared():
    state = {"params": params(), "ema": params(), "opt_state": optax.adam(1.0).init(params())}
    pieces = split(state, TABLES)
    assert set(slots_of(pieces.layout, "params/emb")) == {"opt_state/0/mu", "opt_state/0/nu"}
    assert "emb" in pieces.dense["ema"]
    declared = Tables(select="params/emb", slots={"params/emb": {"ema": "ema/{name}"}})
    assert slots_of(split(state, declared).layout, "params/emb") == {"ema": "ema/emb"}


def test_explicit_slots():
    state = {
        "tables": {"a": table(6), "b": table(5)},
        "accumulators": {"a": jnp.zeros(6), "b": jnp.zeros(5)},
        "wrong": jnp.zeros(7),
    }
    chosen = Tables(select="tables/*", slots={"tables/*": {"sum": "accumulators/{name}"}})
    layout = split(state, chosen).layout
    assert slots_of(layout, "tables/a") == {"sum": "accumulators/a"}
    assert slots_of(layout, "tables/b") == {"sum": "accumulators/b"}
    for slots, message in (
        ({"tabels/*": {}}, r"'tabels/\*' matches no table(.|\n)*  tables/a"),
        ({"tables/*": {"sum": "accumulators/*"}}, r"expected one leaf, found\n  accumulators/a"),
        ({"tables/*": {"sum": "acc/{name}"}}, r"'acc/a' matches nothing(.|\n)*  accumulators/a"),
        ({"tables/a": {"sum": "wrong"}}, r"expected 6 rows, found that wrong has shape \(7,\)"),
        ({"tables/*": {"sum": "accumulators/a"}}, "expected 5 rows|claimed more than once"),
        ({"tables/a": {"sum": "tables/a"}}, r"claimed more than once:\n  tables/a"),
    ):
        refused(state, message, select="tables/*", slots=slots)


def test_a_slot_whose_name_is_too_long_for_a_folder_is_refused():
    """Slots that are found are named after their path in the optimizer state."""
    label = "encoder/" * 30
    tx = optax.multi_transform(
        {label: optax.adam(1e-3)}, lambda tree: jax.tree.map(lambda _: label, tree)
    )
    state = {"params": {"emb": table(6)}, "opt_state": tx.init({"emb": table(6)})}
    refused(state, "too long; name the slots with", select="params/emb")
    path = f"opt_state/inner_states/{label}/inner_state/0/mu/emb"
    named = split(state, Tables(select="params/emb", slots={"params/emb": {"mu": path}}))
    assert slots_of(named.layout, "params/emb") == {"mu": path}


def test_no_slots_at_all():
    pieces = split(state_of(optax.adam(1e-3)), Tables(select="params/emb", slots={}))
    assert slots_of(pieces.layout, "params/emb") == {}
    assert "emb" in pieces.dense["opt_state"]["0"]["mu"]


def test_ambiguous_slots_are_an_error_that_lists_the_params_trees():
    towers = {"user": {"emb": table(6)}, "item": {"emb": table(6)}}
    state = {
        "towers": towers,
        "opt_state": {name: optax.adam(1.0).init(tree) for name, tree in towers.items()},
    }
    message = r"more than one(.|\n)*towers/item\n  towers/user"
    refused(state, message, select="towers/user/emb")
    refused(state, "more than one", select=["towers/user/emb", "towers/item/emb"])
    declared = {"mu": "opt_state/user/0/mu/emb"}
    chosen = Tables(select="towers/user/emb", slots={"towers/*/emb": declared})
    assert slots_of(split(state, chosen).layout, "towers/user/emb") == declared


def test_a_slot_and_a_dense_leaf_of_one_path_are_refused():
    """A restore finds a template's leaf by its path, and would take the slot's."""
    state = {"emb": table(6), "sums": {"emb": np.zeros(6)}, "sums/emb": np.ones(6)}

    def in_sums(path, leaf):
        return path[0][1] == "sums"

    message = r"more than one leaf:\n  sums/emb\n"
    refused(state, message, select="emb", slots={"emb": {"sum": in_sums}})


@pytest.mark.parametrize("inner", [np.ones(6), {"b": np.ones(6)}])
def test_dense_leaves_of_one_path_are_refused(inner):
    """Otherwise, one would be stored in the place of the other. An OrderedDict is not sorted."""
    state = {"emb": table(6), "sums": collections.OrderedDict([("1", inner), (1, np.zeros(6))])}
    refused(state, r"more than one leaf:\n  sums/1\n", select="emb")


def test_a_table_whose_path_is_not_unicode_is_refused():
    state = {"tables": {"\ud800": table(6)}}
    refused(state, r"lone surrogates(.|\n)*tables/\\ud800\n", select="tables/*")


def test_masked_slots_keep_their_table_if_types_are_lost():
    """Without MaskedNode ``{emb: ...}`` alone could be the slots of ``tower`` as well."""
    tx = optax.multi_transform({"a": optax.adagrad(1.0), "b": optax.sgd(1.0)}, _labels)
    plain = joined(None, split(state_of(tx), Tables(select=TABLES.select, slots={})))
    assert isinstance(plain["opt_state"], dict)
    layout = split(plain, TABLES).layout
    where = "opt_state/inner_states/a/inner_state/0/sum_of_squares"
    assert slots_of(layout, "params/emb") == {where: f"{where}/emb"}
    assert slots_of(layout, "params/tower/emb") == {}


# Selection.


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ("params/emb", ["params/emb"]),
        ("params/*", ["params/bias", "params/emb"]),
        ("params/*/emb", ["params/tower/emb"]),
        ("**/emb", ["params/emb", "params/tower/emb"]),
        ("params/**", ["params/bias", "params/emb", "params/tower/emb", "params/tower/w"]),
        ("params/e?b", ["params/emb"]),
        (re.compile("params/.*emb"), ["params/emb", "params/tower/emb"]),
        (["params/emb", re.compile(".*/w")], ["params/emb", "params/tower/w"]),
        (lambda path, leaf: leaf.shape == (6, 4), ["params/emb", "params/tower/emb"]),
        (lambda path, leaf: path[-1] == ("dict", "w"), ["params/tower/w"]),
    ],
)
def test_selection(select, names):
    assert names_in(split({"params": params()}, Tables(select=select)).layout) == names


def test_optimizer_states_are_never_searched():
    layout = split(state_of(optax.adam(1e-3)), Tables(select="**/emb")).layout
    assert names_in(layout) == ["params/emb", "params/tower/emb"]


def test_selection_errors_list_the_paths():
    state = {"params": params(), "step": 3, "scale": jnp.ones(()), "key": jax.random.key(0)}
    for select, message in (
        (["params/emb", "params/embed"], r"'params/embed' matches nothing(.|\n)*tower/emb"),
        (lambda path, leaf: False, "selects none of"),
        ("step", "step is a int, not an array"),
        ("scale", "scale is a scalar"),
        ("key", "key has dtype key"),
    ):
        refused(state, message, select=select)
    refused({"emb": jnp.zeros((0, 4))}, "without elements", select="emb")
    message = "codec: pattern 'params/x' matches no table"
    refused(state, message, select="params/emb", codec={"params/x": "bf16"})


def test_two_tables_of_one_name_are_an_error():
    state = {"a/b": table(3), "a": {"b": table(3)}}
    refused(state, "more than one leaf:\n  a/b", select="a/b")


@pytest.mark.parametrize("select", ["", [], 3, [3], None])
def test_an_invalid_selection_is_an_option_error(select):
    with pytest.raises(errors.OptionError, match="select"):
        Tables(select=select)


# Groups.


def test_groups_are_deterministic_and_split_by_shape_dtype_codec_slots_and_sharding():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    devices = jax.make_mesh((8,), ("rows",))
    rows = NamedSharding(devices, P("rows"))
    tree = {
        "a": table(8),
        "b": table(16),
        "bf16": table(8, dtype=jnp.bfloat16),
        "wide": table(8, 5),
        "codec": table(8),
        "sharded": jax.device_put(table(8), rows),
        "also": jax.device_put(table(24), NamedSharding(devices, P("rows", None))),
        "replicated": jax.device_put(table(8), NamedSharding(devices, P())),
        "flat": jnp.zeros(8),
    }
    state = {"params": tree, "opt_state": optax.adagrad(1.0).init({"b": tree["b"]})}
    chosen = Tables(select="params/*", codec={"params/codec": "bf16", "params/c*": "raw"})
    found = split(state, chosen)
    layout = found.layout
    groups = {}
    for entry in layout.tables:
        placed = (entry.name.removeprefix("params/"), entry.offset)
        groups.setdefault(entry.group, []).append(placed)
    assert groups == {
        "g0": [("a", 0), ("b", 8), ("replicated", 24)],
        "g1": [("also", 0), ("sharded", 24)],
        "g2": [("bf16", 0)],
        "g3": [("codec", 0)],
        "g4": [("flat", 0)],
        "g5": [("wide", 0)],
    }
    assert [group.rows for group in layout.groups] == [32, 32, 8, 8, 8, 8]
    assert found.codecs["g3"]["values"] == CodecChoice(delta="bf16")
    assert layout.groups[4].fields[0].trailing == ()
    backwards = {"params": dict(reversed(tree.items())), "opt_state": state["opt_state"]}
    assert split(backwards, chosen).layout == layout
    assert split(backwards, Tables(select="params/*", codec=chosen.codec)).layout == layout


def test_slot_signature_is_part_of_a_group():
    tx = optax.multi_transform({"a": optax.adagrad(1.0), "b": optax.adam(1.0)}, _labels)
    layout = split(state_of(tx), TABLES).layout
    assert len(layout.groups) == 2
    assert [len(group.fields) for group in layout.groups] == [2, 3]


def test_abstract_leaves_give_the_same_layout():
    state = state_of(touched.track(optax.adam(1e-3), "**/emb"))
    abstract = jax.eval_shape(lambda: state)
    pieces = split(abstract, TABLES)
    assert pieces.layout == split(state, TABLES).layout
    assert isinstance(pieces.fields["params/emb"]["values"], jax.ShapeDtypeStruct)
    host = jax.tree.map(np.asarray, state)
    assert split(host, TABLES).layout == pieces.layout


def test_a_remembered_layout_is_not_used_for_another_state():
    chosen = Tables(select="emb")
    for rows in (3, 4, 3):
        assert split({"emb": table(rows)}, chosen).layout.tables[0].rows == rows
    (group,) = split({"emb": table(3, dtype=jnp.int32)}, chosen).layout.groups
    assert group.fields[0].dtype == "int32"
    assert split({"emb": table(3), "more": 1}, chosen).dense == {"more": 1}


def test_an_unhashable_state_is_split_too():
    @flax.struct.dataclass
    class State:
        emb: jax.Array
        config: dict = flax.struct.field(pytree_node=False)

    state = State(table(3), {"a": [1]})
    assert_same(joined(state, split(state, Tables(select="emb"))), state)


# Split and join.


class Pair(NamedTuple):
    left: Any
    right: Any


_leaves = st.one_of(
    st.builds(lambda n: np.arange(n, dtype=np.float32), st.integers(0, 4)),
    st.builds(lambda n: np.full((n, 2), n, np.int16), st.integers(1, 3)),
    st.integers(-5, 5),
    st.just(1.5),
    st.none(),
    st.just(optax.EmptyState()),
    st.just(optax.MaskedNode()),
)
_keys = st.text("ab./%_~ ", max_size=3) | st.sampled_from(["..", "zarr.json", "1"])
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.dictionaries(_keys, inner, max_size=3),
        st.dictionaries(st.integers(-3, 3), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(_keys, _leaves, min_size=1, max_size=2).map(flax.core.freeze),
    ),
    max_leaves=12,
)


@given(tree=_trees, rows=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_join_undoes_split(tree, rows):
    state = {"TABLE": np.arange(rows * 2.0).reshape(rows, 2), "rest": tree}
    pieces = split(state, Tables(select="TABLE"))
    assert_same(joined(state, pieces), state)
    assert all(step for leaf in pieces.layout.dense for step in leaf.key)
    assert not any("." in step for leaf in pieces.layout.dense for step in leaf.key)
    assert len({leaf.key for leaf in pieces.layout.dense}) == len(pieces.layout.dense)
    layout = records.from_bytes(
        records.to_bytes(pieces.layout, "layout"), Layout, name="layout", magic="layout"
    )
    assert layout == pieces.layout
    plain = join(None, layout, pieces.fields, pieces.dense, None)
    assert_same(plain, {"TABLE": state["TABLE"], "rest": _as_plain(tree)})


def _as_plain(node: Any) -> Any:
    """Returns a state as a restore without a template returns it."""
    if isinstance(node, (dict, flax.core.FrozenDict)):
        return {key: _as_plain(child) for key, child in node.items()}
    if isinstance(node, Pair):
        return {"left": _as_plain(node.left), "right": _as_plain(node.right)}
    if isinstance(node, (optax.EmptyState, optax.MaskedNode)):
        return None
    if isinstance(node, (list, tuple)):
        return [_as_plain(child) for child in node]
    return node


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_join_keeps_the_types_of_a_train_state(name):
    state = state_of(OPTIMIZERS[name][0]())
    pieces = split(state, TABLES)
    abstract = jax.eval_shape(lambda: state)
    if pieces.touched is not None:
        fresh = touched.fresh(pieces.touched, int(pieces.touched.identity))
        assert_same(joined(abstract, pieces, fresh), state)
    back = joined(abstract, pieces)
    # A re-created TouchState has no identity of its own.
    plain = jax.tree.map(
        lambda node: touched.fresh(node) if touched.is_touch_state(node) else node,
        state,
        is_leaf=touched.is_touch_state,
    )
    assert_same(back, plain)
    assert isinstance(back, TrainState)


def test_the_touch_state_is_never_saved_and_comes_back_fresh():
    state = state_of(touched.track(optax.adagrad(0.1), "**/emb"))
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    pieces = split(state, TABLES)
    assert pieces.touched is not None and int(pieces.touched.clock) == 1
    assert pieces.layout.tracking_paths == ((("attr", "opt_state"), ("attr", "touched")),)
    assert not any(name in str(pieces.layout.dense) for name in ("clock", "stamps", "touched"))
    back = joined(state, pieces)
    assert int(back.opt_state.touched.clock) == 0
    assert not back.opt_state.touched.stamps["emb"].any()
    assert_same(joined(state, pieces, pieces.touched), state)
    with pytest.raises(errors.TrackingError, match="lacks tables\n  tower/emb"):
        joined(state, pieces, touched.init({"emb": state.params["emb"]}))


def test_extra_leaves_of_a_template_are_named():
    state = {"emb": table(3), "w": jnp.ones(2)}
    with pytest.raises(errors.TemplateMismatch, match="found more:\n  more/x\n  v"):
        joined({**state, "v": 1, "more": {"x": 2}}, split(state, Tables(select="emb")))


def test_chosen_tables_alone_without_a_template():
    state = {"params": params(), "opt_state": optax.adam(1.0).init(params())}
    pieces = split(state, TABLES)
    chosen = {"params/emb": {"values": pieces.fields["params/emb"]["values"]}}
    back = join(None, pieces.layout, chosen, {}, None)
    assert list(back) == ["params"] and list(back["params"]) == ["emb"]


# NNX.


class Model(nnx.Module):
    def __init__(self, rngs):
        self.emb = nnx.Embed(6, 4, rngs=rngs)
        self.tower = nnx.Dict(emb=nnx.Embed(6, 4, rngs=rngs))
        self.norm = nnx.BatchNorm(4, rngs=rngs)


@pytest.mark.parametrize("form", ["state", "split", "module", "pure dict"])
@pytest.mark.parametrize("masked", [False, True])
def test_nnx_paths_are_canonical_and_slots_are_found(form, masked):
    model = Model(nnx.Rngs(0))
    tx = optax.adam(1e-3)
    if masked:
        tx = optax.multi_transform(
            {"a": tx, "b": optax.sgd(0.1)},
            lambda tree: jax.tree_util.tree_map_with_path(
                lambda path, _: "b" if "tower" in str(path) else "a", tree
            ),
        )
    tx = touched.track(tx, "**/embedding")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state: Any = {"model": model, "optimizer": optimizer}
    if form == "state":
        state = {name: nnx.state(node) for name, node in state.items()}
    elif form == "split":
        state = {"graph": nnx.split(model)[0], **{n: nnx.split(v)[1] for n, v in state.items()}}
    elif form == "pure dict":
        state = {name: nnx.to_pure_dict(nnx.state(node)) for name, node in state.items()}
    pieces = split(state, Tables(select="model/**/embedding"))
    assert names_in(pieces.layout) == ["model/emb/embedding", "model/tower/emb/embedding"]
    where = "optimizer/opt_state/inner/" + ("inner_states/a/inner_state/" if masked else "")
    emb = slots_of(pieces.layout, "model/emb/embedding")
    assert emb == {f"{where}0/{slot}": f"{where}0/{slot}/emb/embedding" for slot in ("mu", "nu")}
    tower = slots_of(pieces.layout, "model/tower/emb/embedding")
    assert set(tower) == (set() if masked else set(emb))
    assert pieces.touched is not None
    assert match_touched(pieces.touched, pieces.layout) == {
        "model/emb/embedding": "emb/embedding",
        "model/tower/emb/embedding": "tower/emb/embedding",
    }
    assert "clock" not in str(pieces.layout.dense)
    assert all(isinstance(f, jax.Array) for t in pieces.fields.values() for f in t.values())
    assert_same(joined(state, pieces, pieces.touched), state)
    again = touched.find(joined(state, pieces))
    assert again is not None and int(again.clock) == 0


# Stamps of tables.


def match_touched(state: touched.TouchState, layout: Layout) -> dict[str, str]:
    match_marks([Marks("", state)], layout)
    return matched(state, layout)


def stamps(*names: str, rows: int = 6) -> touched.TouchState:
    return touched.init({name: jnp.zeros((rows, 1)) for name in names})


@pytest.mark.parametrize(
    "names", [("params/emb", "params/tower/emb"), ("emb", "tower/emb", "unused")]
)
def test_stamps_are_matched_by_name_then_by_the_longest_suffix(names):
    layout = split({"params": params()}, TABLES).layout
    assert match_touched(stamps(*names), layout) == dict(zip(TABLES.select, names, strict=False))


@pytest.mark.parametrize(
    ("names", "rows", "message"),
    [
        (["emb"], 6, r"'emb' fit more than one(.|\n)*  params/tower/emb"),
        (["tower/emb"], 6, r"params/emb: expected stamps of it(.|\n)*  tower/emb"),
        (["mb", "tower/emb"], 6, "expected stamps of it"),
        (["emb", "tower/emb"], 7, "expected 6 stamps, found 7"),
    ],
)
def test_stamps_that_do_not_fit_are_named(names, rows, message):
    with pytest.raises(errors.TrackingError, match=message):
        match_touched(stamps(*names, rows=rows), split({"params": params()}, TABLES).layout)
