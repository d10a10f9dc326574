"""`jls.bfloat16_params` on eight devices: the layout changes no bit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from shared import assert_identical, is_placed_as

import jls

pytestmark = pytest.mark.standard_promotion

P = PartitionSpec
BF16 = jnp.bfloat16
DEVICES = np.array(jax.devices())
SHAPES = {"w": (16, 32), "b": (64,)}
LAYOUTS = {
    "replicated": {"w": P(), "b": P()},
    "fsdp": {"w": P("a"), "b": P("a")},
    "columns": {"w": P(None, "a"), "b": P()},
    "both": {"w": P("a", "b"), "b": P(("a", "b"))},
    "swapped": {"w": P("b", "a"), "b": P("b")},
}
ROUNDINGS = pytest.mark.parametrize("rounding", ["stochastic", "exact"])


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))


def make_inputs():
    rng = np.random.default_rng(0)
    start = {k: jnp.float32(rng.normal(size=shape)) for k, shape in SHAPES.items()}
    grads = [
        {k: jnp.float32(rng.normal(size=shape)) for k, shape in SHAPES.items()}
        for _ in range(3)
    ]
    return jax.tree.map(lambda x: x.astype(BF16), start), grads


def placed(tree, mesh, specs):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
    )


def make_optimizer(rounding, **kwargs):
    # Products with powers of two are exact: programs that are compiled apart, and fuse
    # other operations, agree in the last bit.
    inner = optax.sgd(2.0**-10, momentum=0.5)
    return jls.skip_nonfinite(jls.bfloat16_params(inner, rounding=rounding), **kwargs)


def run(optimizer, params, all_grads):
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        return jls.apply_gradients(optimizer, grads, state, params)[:2]

    state = optimizer.init(params)
    for grads in all_grads:
        params, state = step(params, state, grads)
    assert len(traces) == 1
    return params, state


@ROUNDINGS
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit_of_a_jitted_step(layout, kind, rounding):
    optimizer = make_optimizer(rounding)
    params, grads = make_inputs()
    expected = jax.device_get(run(optimizer, params, grads))
    mesh, specs = make_mesh(kind), LAYOUTS[layout]
    with jax.set_mesh(mesh):
        there = placed(params, mesh, specs)
        new, state = run(optimizer, there, [placed(g, mesh, specs) for g in grads])
        assert is_placed_as(new, there)
        if rounding == "exact":
            assert is_placed_as(state.inner_state.rest, there)
        assert_identical(jax.device_get((new, state)), expected)


@pytest.mark.parametrize("layout", ["fsdp", "columns", "both"])
def test_sharded_step_moves_no_parameter_between_devices(layout):
    """Random numbers of the whole array are made where they are needed."""
    optimizer = jls.bfloat16_params(optax.adamw(1e-3))
    mesh, specs = make_mesh(), LAYOUTS[layout]
    params, grads = make_inputs()
    params, grads = (placed(x, mesh, specs) for x in (params, grads[0]))
    state = optimizer.init(params)

    def update(grads, state, params):
        return optimizer.update(grads, state, params)

    text = jax.jit(update).lower(grads, state, params).compile().as_text()
    moves = r"(all-gather|all-to-all|collective-permute|reduce-scatter)\("
    assert not re.findall(moves, text)


def specs_of(state, spec):
    return jax.tree.map(lambda x: spec if x.ndim == 2 else P(), state)


def mapped_step(optimizer, state, params_spec, check_vma):
    specs = specs_of(state, params_spec)

    @jax.jit
    def step(params, state, x):
        def inner(params, state, x):
            def loss_fn(params):
                loss = jnp.sum(jnp.square(x)) * jnp.sum(params.astype(jnp.float32))
                return lax.pmean(loss, "d") if check_vma else loss

            grads = jax.grad(loss_fn)(params)
            if not check_vma:
                grads = lax.pmean(grads, "d")
            params, state, _ = jls.apply_gradients(optimizer, grads, state, params)
            return params, state

        return jax.shard_map(
            inner,
            mesh=Mesh(DEVICES, "d"),
            in_specs=(params_spec, specs, P("d")),
            out_specs=(params_spec, specs),
            check_vma=check_vma,
        )(params, state, x)

    return step


@ROUNDINGS
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
def test_replicas_in_shard_map_draw_alike(check_vma, rounding):
    optimizer = make_optimizer(rounding, axis_name="d")
    params = jnp.ones((16, 64), BF16)
    state = optimizer.init(params)
    step = mapped_step(optimizer, state, P(), check_vma)
    for _ in range(2):
        params, state = step(params, state, jnp.arange(8.0))
    for array in jax.tree.leaves((params, state)):
        first, *others = [
            np.asarray(x.data).tobytes() for x in array.addressable_shards
        ]
        assert {first} == set(others)
    assert rounding == "exact" or len(np.unique(np.asarray(params))) > 1


def test_shards_in_shard_map_draw_numbers_of_their_own():
    """A device sees only its own part, whose indices begin at 0."""
    n = 2**14
    inner = jls.bfloat16_params(optax.adamw(1e-3))
    optimizer = jls.skip_nonfinite(inner, axis_name="d")
    params = jnp.ones((8, n), BF16)
    state = optimizer.init(params)
    step = mapped_step(optimizer, state, P("d"), True)
    params, _ = step(params, state, jnp.ones(8))
    # 1 - 1e-3 (1 + 1e-4) is a quarter of the way from 1 to its lower neighbor.
    drawn = np.asarray(params) < 1
    share = drawn.mean()
    assert abs(share - 1.0001e-3 * 256) < 0.01
    for i in range(8):
        for j in range(i):
            both = (drawn[i] & drawn[j]).mean()
            assert abs(both - share**2) < 5 * share / np.sqrt(n)


def test_a_shard_that_differs_is_not_watched():
    """The new state is one for all devices, as the specs of its arrays say."""
    optimizer = jls.bfloat16_params(optax.sgd(0.1))
    mesh = Mesh(DEVICES, ("d",))
    params = {"w": jnp.ones((16, 32), BF16)}
    state = optimizer.init({"w": jnp.ones((2, 32), BF16)})  # of one device

    def step(params, state):
        return optimizer.update(params, state, params)[1]

    specs = {"mesh": mesh, "in_specs": (P("d"), P()), "out_specs": P()}
    after = jax.jit(jax.shard_map(step, **specs))(params, state)
    assert not jax.device_get(after.made).any()
