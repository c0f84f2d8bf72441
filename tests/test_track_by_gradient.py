# SPDX-License-Identifier: Apache-2.0
"""``track(rule="gradient")``: marks as ``rule="bits"`` does; refuses optimizers it cannot track."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deltackpt import touched
from deltackpt.errors import OptionError, TrackingError
from deltackpt.resources import host_memory
from deltackpt.tracking import by_gradient

ROWS = 40
LABELS = {"tables": {"users": "sparse", "items": "sparse"}, "kernel": "dense"}
QUALIFIED = {
    "sgd": lambda: optax.sgd(0.1),
    "scheduled": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 10)),
    "adagrad": lambda: optax.adagrad(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)),
    "clipped by value": lambda: optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "named": lambda: optax.named_chain(("one", optax.sgd(0.1))),
    "several": lambda: optax.multi_transform(
        {"sparse": optax.adagrad(0.1), "dense": optax.adamw(0.1)}, LABELS
    ),
    "masked": lambda: optax.chain(
        optax.masked(optax.adagrad(0.1), lambda tree: _of(tree, "tables")),
        optax.masked(optax.adam(0.1), lambda tree: _of(tree, "kernel")),
    ),
}
#: Their updates are +0.0 for rows without a gradient, which would turn -0.0 in a table into +0.0.
ZEROS = {
    "frozen": optax.set_to_zero,
    "nothing": optax.identity,
    "ascent": lambda: optax.scale(0.1),
    "one frozen of several": lambda: optax.multi_transform(
        {"sparse": optax.sgd(0.1), "frozen": optax.set_to_zero(), "dense": optax.adam(0.1)},
        {"tables": {"users": "frozen", "items": "sparse"}, "kernel": "dense"},
    ),
    "one frozen, Adagrad": lambda: optax.multi_transform(
        {"sparse": optax.adagrad(0.1), "frozen": optax.set_to_zero()},
        {"tables": {"users": "frozen", "items": "sparse"}, "kernel": "sparse"},
    ),
    "frozen at last": lambda: optax.chain(
        optax.sgd(0.1), optax.masked(optax.set_to_zero(), lambda tree: _of(tree, "users"))
    ),
    "frozen at first": lambda: optax.chain(
        optax.masked(optax.set_to_zero(), lambda tree: _of(tree, "users")), optax.sgd(0.1)
    ),
    "masked alone": lambda: optax.masked(optax.sgd(0.1), lambda tree: _of(tree, "items")),
    "freeze": lambda: optax.chain(
        optax.adagrad(0.1), optax.transforms.freeze(_of(params(), "users"))
    ),
    "selective": lambda: optax.transforms.selective_transform(
        optax.sgd(0.1), freeze_mask=_of(params(), "users")
    ),
}
REFUSED = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "decay": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "frozen beside Adam": lambda: optax.multi_transform(
        {"sparse": optax.adam(0.1), "frozen": optax.set_to_zero()},
        {"tables": {"users": "frozen", "items": "sparse"}, "kernel": "sparse"},
    ),
    "decay of a frozen table": lambda: optax.chain(
        optax.set_to_zero(), optax.add_decayed_weights(0.1)
    ),
    "nonnegative": lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "accumulated": lambda: optax.MultiSteps(optax.sgd(0.1), 100).gradient_transformation(),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "factored": lambda: optax.adafactor(0.1),
    "other half": lambda: optax.multi_transform(
        {"sparse": optax.adam(0.1), "dense": optax.sgd(0.1)}, LABELS
    ),
    "one of two": lambda: optax.multi_transform(
        {"sparse": optax.adagrad(0.1), "dense": optax.adam(0.1)},
        {"tables": {"users": "sparse", "items": "dense"}, "kernel": "dense"},
    ),
    "written by hand": lambda: optax.chain(optax.sgd(0.1), _later()),
    "in need of more": lambda: optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None, **more: (more["loss"] and updates, state),
    ),
}


def _later() -> optax.GradientTransformation:
    """Changes all rows after its hundredth step: no trial is that long."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        late = (state["count"] > 100).astype(jnp.float32)
        return jax.tree.map(lambda u: u + late, updates), {"count": state["count"] + 1}

    return optax.GradientTransformation(lambda params: {"count": jnp.zeros((), int)}, update)


def _of(tree: Any, chunk: str) -> Any:
    """Returns which leaves of a tree have a part in their paths."""
    return jax.tree.map_with_path(lambda path, _: chunk in jax.tree_util.keystr(path), tree)


def _stamps(state: Any) -> Any:
    found = touched.find(state)
    assert found is not None
    return found.stamps


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    users = rng.standard_normal((ROWS, 4)).astype(np.float32)
    users[::5] = -0.0
    return {
        "tables": {"users": jnp.asarray(users), "items": jnp.ones((ROWS, 3))},
        "kernel": jnp.ones((4, 4)),
    }


def gradients(seed: int, has_nan: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), params())
    for table in grads["tables"].values():
        rows = rng.choice(ROWS, 5, replace=False)
        table[rows] = rng.standard_normal((5, table.shape[1]))
        table[rng.choice(ROWS)] = -0.0
        table[rng.choice(ROWS), 0] = 1e-30
    grads["kernel"] += np.nan if has_nan else 1.0
    return jax.tree.map(jnp.asarray, grads)


@pytest.mark.parametrize("has_nan", [False, True])
@pytest.mark.parametrize("name", QUALIFIED)
def test_every_changed_row_is_marked_and_few_others(name, has_nan):
    found = {}
    for rule in ("bits", "gradient"):
        optimizer = touched.track(QUALIFIED[name](), "tables/*", rule=rule)
        now, state = params(), jax.jit(optimizer.init)(params())
        step = jax.jit(optimizer.update)
        for seed in range(5):
            updates, state = step(gradients(seed, has_nan and seed == 3), state, now)
            now = optax.apply_updates(now, updates)
        found[rule] = now, _stamps(state)
    for one, other in zip(*(jax.tree.leaves(found[rule][0]) for rule in found), strict=True):
        np.testing.assert_array_equal(one, other)
    for table, stamps in found["bits"][1].items():
        moved, marked = np.asarray(stamps), np.asarray(found["gradient"][1][table])
        assert (marked >= moved).all() and moved.any()
        # The NaN of the fourth step may reach every row; the others mark those with gradients.
        assert marked.min() >= 4 if has_nan else (marked == 0).sum() > ROWS // 4


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", ZEROS)
def test_a_zero_update_changes_no_bit_of_a_row_without_a_gradient(name, jitted):
    optimizer, plain = touched.track(ZEROS[name](), "tables/*", rule="gradient"), ZEROS[name]()

    def step(grads: Any, state: Any, now: Any) -> Any:
        updates, state = optimizer.update(grads, state, now)
        return updates, optax.apply_updates(now, updates), state

    step = jax.jit(step) if jitted else step
    now, state, expected = params(), optimizer.init(params()), plain.init(params())
    for seed in range(3):
        grads = gradients(seed)
        updates, then, after = step(grads, state, now)
        others, expected = plain.update(grads, expected, now)
        for one, other in zip(*map(jax.tree.leaves, (updates, others)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        for table, stamps in _stamps(after).items():
            short = table.removeprefix("tables/")
            old, new = (np.asarray(tree["tables"][short]).view(np.uint32) for tree in (now, then))
            marked = np.asarray(stamps) > np.asarray(_stamps(state)[table])
            assert not (old != new).any(axis=1)[~marked].any() and marked.sum() < ROWS
        now, state = then, after


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_may_change_other_rows_is_refused(name):
    optimizer = touched.track(REFUSED[name](), "tables/*", rule="gradient")
    tables = {"tables": {n: jnp.ones((200, 160)) for n in ("users", "items")}}
    for init in (optimizer.init, jax.jit(optimizer.init)):
        with pytest.raises(TrackingError, match=r'rule="gradient".* use rule="bits"'):
            init(tables | {"kernel": jnp.ones((4, 4))})


def test_a_single_table_may_qualify():
    """The optimizer of another table does not disqualify this one."""
    optimizer = touched.track(REFUSED["one of two"](), "tables/users", rule="gradient")
    state = optimizer.init(params())
    assert list(_stamps(state)) == ["tables/users"]


@pytest.mark.parametrize("has_nan", [False, True])
@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec(None, "x")], ids=str)
def test_a_sharded_table(spec, has_nan):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = NamedSharding(mesh, spec)

    def place(tree: Any) -> Any:
        users = jax.device_put(tree["tables"]["users"], sharding)
        return {**tree, "tables": {**tree["tables"], "users": users}}

    optimizer = touched.track(optax.adagrad(0.1), "tables/*", rule="gradient")
    now = place(params())
    state = optimizer.init(now)
    given = gradients(1)
    if has_nan:
        given["tables"]["users"] = given["tables"]["users"].at[2, 1].set(np.nan)
    _, state = jax.jit(optimizer.update)(place(given), state, now)
    stamps = _stamps(state)["tables/users"]
    assert stamps.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(spec[0])), 1)
    expected = (np.asarray(given["tables"]["users"]).view(np.uint32) != 0).any(axis=1)
    np.testing.assert_array_equal(np.asarray(stamps) > 0, expected | has_nan)


@pytest.mark.parametrize("spec", [None, PartitionSpec("x"), PartitionSpec(None, "x")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int32", "bool"])
@pytest.mark.parametrize("length", [16, 64, 100, 67])
def test_any_element_of_a_long_row_marks_it(length, dtype, spec):
    """Rows are compared in pieces: each element, in whatever piece, counts."""
    rows = 2 * length
    gradient = np.zeros((rows, 1, length), np.dtype(dtype))
    gradient[2 * np.arange(length), 0, np.arange(length)] = 1
    nans = np.zeros(rows, bool)
    if jnp.issubdtype(dtype, jnp.inexact):
        gradient[2 * np.arange(0, length, 3), 0, np.arange(0, length, 3)] = np.nan
        nans[::6] = True
    placed = jnp.asarray(gradient)
    if spec is not None and length % 4 == 0:
        mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
        spec = PartitionSpec(*spec) if spec[0] else PartitionSpec(None, None, "x")
        placed = jax.device_put(gradient, NamedSharding(mesh, spec))
    for found, expected in zip(by_gradient.touched_rows(placed), (np.arange(rows) % 2 == 0, nans)):
        np.testing.assert_array_equal(found, expected)
    other = jax.device_put(jnp.zeros_like(placed), placed.sharding)
    differing = touched.track(optax.stateless(lambda updates, _: updates), "*")
    _, state = differing.update({"t": placed}, differing.init({"t": other}), {"t": other})
    np.testing.assert_array_equal(np.asarray(_stamps(state)["t"]) > 0, np.arange(rows) % 2 == 0)


def test_gradients_of_the_host_may_be_reused_after_an_update():
    """jax aliases them on CPUs; here an earlier program delays its reads."""
    table = {"emb": jnp.zeros((4096, 64))}
    optimizer = touched.track(optax.sgd(0.1), "emb", rule="gradient")
    state = optimizer.init(table)
    given = host_memory.empty_buffer((4096, 64), np.dtype(np.float32))
    slow = jax.jit(lambda one: one @ one @ one)
    busy = slow(jnp.ones((1500, 1500)))
    for _ in range(3):
        given.fill(1.0)
        busy = slow(busy)
        found = _stamps(optimizer.update({"emb": given}, state, table)[1])
        given.fill(0.0)
        assert (np.asarray(found["emb"]) == 1).all()


def test_an_unknown_rule_is_refused():
    with pytest.raises(OptionError, match="rule"):
        touched.track(optax.sgd(0.1), "tables/*", rule="norm")  # pyright: ignore[reportArgumentType]
