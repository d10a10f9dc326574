"""Products in float8 on eight devices: what is sharded, and what it costs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jls
from jls._autocast import autocast, float8

pytestmark = pytest.mark.standard_promotion

P = PartitionSpec
FLOAT8 = jnp.float8_e4m3fn
LAYOUTS = {
    "data": (P(), P("a")),
    "fsdp": (P("a"), P("a")),
    "tensor": (P(None, "a"), P()),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(float8, "LEAST", 16)
    monkeypatch.setattr(autocast, "warn_of_chip", lambda: None)


def make_inputs():
    rng = np.random.default_rng(0)
    params = [jnp.float32(rng.normal(size=(64, 64)) / 8) for _ in range(2)]
    return params, jnp.float32(rng.normal(size=(128, 64)))


def loss_fn(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - 1) ** 2)


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("a",), axis_types=(kind,))


def placed(mesh, layout):
    params, x = make_inputs()
    of_params, of_data = LAYOUTS[layout]
    params = [jax.device_put(w, NamedSharding(mesh, of_params)) for w in params]
    return params, jax.device_put(x, NamedSharding(mesh, of_data))


def off(one, other):
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_jit_powers_are_those_of_whole_operands(layout):
    grad = jax.jit(jax.grad(jls.autocast(loss_fn, FLOAT8)))
    found, right = grad(*placed(make_mesh(), layout)), grad(*make_inputs())
    # Sums come in another order, so few results are rounded to another neighbor.
    assert off(found, right) < 0.05
    params, x = placed(make_mesh(), layout)
    x = x.at[:16].multiply(2.0**20)  # beside which the others vanish, on all devices
    y = jax.jit(jls.autocast(jnp.matmul, FLOAT8))(x, params[0])
    assert np.mean(y == 0) > 0.8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_are_one_scalar_for_each_operand_more(layout):
    args = placed(make_mesh(), layout)

    def collectives(dtype):
        compiled = jax.jit(jax.grad(jls.autocast(loss_fn, dtype))).lower(*args)
        text = compiled.compile().as_text()
        kinds = r"= (.*?) (?:all-reduce|all-gather|all-to-all|collective-permute)\("
        made = re.findall(kinds, text)
        shapes = [x for one in made for x in re.findall(r"\w+\[[\d,]*\]", one)]
        scalars = [x for x in shapes if x.endswith("[]")]
        return len(shapes) - len(scalars), len(scalars)

    arrays, scalars = collectives(FLOAT8)
    arrays16, scalars16 = collectives(jnp.bfloat16)
    assert arrays == arrays16 > 0
    # Two operands and a cotangent of each of the two products.
    assert 0 < scalars - scalars16 <= 6


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_each_part_has_its_own_power(check_vma):
    mesh = make_mesh()
    params, x = make_inputs()
    x = x.at[:16].multiply(2.0**20)  # of one device
    cast = jls.autocast(lambda params, x: params[0].T @ x.T, FLOAT8)
    found = jax.jit(
        jax.shard_map(
            cast,
            mesh=mesh,
            in_specs=(P(), P("a")),
            out_specs=P(None, "a"),
            check_vma=check_vma,
        )
    )(params, x)
    right = params[0].T @ x.T
    for i in range(8):
        part = np.s_[:, 16 * i : 16 * (i + 1)]
        assert off(found[part], right[part]) < 0.1
    assert np.mean(jax.jit(cast)(params, x) == 0) > 0.8  # beside the huge ones


def test_gradients_in_shard_map():
    mesh = make_mesh()
    params, x = make_inputs()

    def local(params, x):
        cast = jls.autocast(loss_fn, FLOAT8)
        return jax.grad(lambda p: jax.lax.pmean(cast(p, x), "a"))(params)

    found = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    )(params, x)
    assert off(found, jax.grad(loss_fn)(params, x)) < 0.1


def test_explicit_shardings():
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        params, x = placed(mesh, "data")
        found = jax.jit(jax.grad(jls.autocast(loss_fn, FLOAT8)))(params, x)
    assert off([np.asarray(w) for w in found], jax.grad(loss_fn)(*make_inputs())) < 0.1


def test_whole_step_is_skipped_if_one_device_has_an_inf():
    mesh = make_mesh()
    params, x = placed(mesh, "fsdp")
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    step = jax.jit(jls.train_step(loss_fn, optimizer, compute_dtype=FLOAT8))
    state = optimizer.init(params)
    new, state, report = step(params, state, x)
    assert not report.skipped
    _, _, report = step(new, state, x.at[100, 3].set(jnp.inf))
    assert report.skipped
