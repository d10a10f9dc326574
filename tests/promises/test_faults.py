"""Ten thousand steps with bad numbers put in at random: every promise, at every step.

Gradients, losses and batches get NaN, inf, huge, subnormal and -0.0 elements. What has
to hold is computed beside the step, in the same loop, by the bits of the numbers and
without the help of jls. Each of the checks is one boolean for a step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from test_scaler_laws import SCALERS

import jls

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:.*parameters are bfloat16"),
]

NAN, INF = float("nan"), float("inf")
FAULTS = [NAN, INF, -INF, 1e38, -1e38, 1e-40, -0.0, 0.0]


def multi_steps():
    inner = optax.chain(optax.trace(0.9), optax.scale(-0.1))
    return optax.MultiSteps(inner, 3).gradient_transformation()


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "lion": lambda: optax.lion(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "multi_steps": lambda: optax.chain(multi_steps(), jls.params_ema(0.9)),
}
CLIPPED = "adamw"  # by the global norm
STEPS = 500


def pairs():
    """Each scaler with one optimizer, `dynamic` with all of them.

    Scalers that differ in numbers only take the same one: they share their program.
    """
    structures = [jax.tree.structure(make()) for make in SCALERS.values()]
    names = list(OPTIMIZERS)
    for name, structure in zip(SCALERS, structures, strict=True):
        yield name, names[structures.index(structure) % len(names)]
    yield from (("dynamic", name) for name in names)


def make_params():
    return {
        "w": jnp.array([[0.5, -1.5, -0.0], [1e-40, 3.0, -2.0]]),
        "h": jnp.array([0.5, -0.0, 2.0], jnp.bfloat16),
    }


def loss_fn(params, x):
    """Its gradient is no larger than x, wherever the parameters have got to."""
    terms = [jnp.sum(jnp.tanh(p.astype(jnp.float32)) * x) for p in params.values()]
    return functools.reduce(jnp.add, terms)


def draw(rng, steps, *more):
    """For each step a number for the batch, and the faults of everything."""

    def faults(size, probability):
        places = rng.integers(size, size=(steps, *more))
        hit = rng.random(places.shape) < probability
        values = rng.choice(np.array(FAULTS, np.float32), places.shape)
        return np.where(hit, places, -1), values

    sizes = {name: p.size for name, p in make_params().items()}
    return {
        "x": rng.normal(size=(steps, *more)).astype(np.float32),
        "of x": faults(1, 0.15),
        "of loss": faults(1, 0.1),
        "of grads": {name: faults(size, 0.12) for name, size in sizes.items()},
    }


def spoil(array, fault):
    """`array` with a number put in one place, or as it is."""
    place, value = fault
    spoilt = jnp.where(jnp.arange(array.size) == place, value, array.ravel())
    return spoilt.reshape(array.shape)


def bits(array):
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    width = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return lax.bitcast_convert_type(array, width)


def all_true(flags):
    return jnp.all(jnp.stack([jnp.all(flag) for flag in flags]))


def same_bits(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all_true([bits(a) == bits(b) for a, b in pairs])


def is_finite(array):
    """By its exponent."""
    exponent = jnp.uint32(0x7F80_0000)
    return (bits(array.astype(jnp.float32)) & exponent) != exponent


def flushed(tree):
    """`tree` with a 0 in the place of each subnormal number."""
    tiny = jnp.uint32(0x80_0000)

    def flush(x):
        pattern = bits(x.astype(jnp.float32)) & jnp.uint32(0x7FFF_FFFF)
        return jnp.where((pattern != 0) & (pattern < tiny), jnp.zeros_like(x), x)

    return jax.tree.map(flush, tree)


def has_no_nan(tree):
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return all_true([~jnp.isnan(x) for x in floats])


def bounds(scaler):
    keywords = scaler.hyperparameters
    keywords = getattr(keywords.get("adjust"), "keywords", keywords)
    return keywords.get("min_scale", 2.0**-126), keywords.get("max_scale", 2.0**126)


def make_step(scaler, inner, axis_name=None, is_clipped=False):
    optimizer = jls.loss_scaled(inner, scaler, axis_name=axis_name, check_updates=True)
    low, high = bounds(scaler)

    def everywhere(flag):
        if axis_name is None:
            return flag
        return lax.pmin(flag.astype(jnp.int32), axis_name) == 1

    def step(carry, drawn):
        params, state = carry
        x = spoil(drawn["x"], drawn["of x"])
        seen, grads = jls.value_and_grad(loss_fn)(state, params, x)
        loss = spoil(seen, drawn["of loss"])
        grads = {n: spoil(g, drawn["of grads"][n]) for n, g in grads.items()}
        updates, new = optimizer.update(grads, state, params, value=loss)
        moved = optax.apply_updates(params, updates)
        new_params = jls.select(new.applied, moved, params)

        # One flag for each leaf, in the order of jax.tree.leaves.
        looked_at = jax.tree.leaves(grads)
        if is_clipped:  # by the norm: the sum of the squares is looked at
            looked_at = [jnp.sum(g.astype(jnp.float32) ** 2) for g in looked_at]
            looked_at = [*looked_at, functools.reduce(jnp.add, looked_at)]
        leaves = jnp.stack([jnp.all(is_finite(g)) for g in looked_at])
        leaves = everywhere(leaves)
        grads_finite, loss_finite = jnp.all(leaves), everywhere(is_finite(loss))
        leaves = leaves[: len(grads)]
        acceptable = grads_finite & loss_finite
        applied, skipped = new.applied, ~new.applied
        old_scale = state.scaler_state.loss_scale
        scale = new.scaler_state.loss_scale
        reason = jnp.where(loss_finite, jnp.where(grads_finite, 3, 1), 2)
        no_update = jax.tree.map(lambda u: jnp.full_like(u, -0.0), updates)
        both = moved, params
        checks = {
            "the true loss is seen": bits(seen) == bits(loss_fn(params, x)),
            "no bad step is applied": acceptable | skipped,
            "every good step is": applied | ~acceptable | (new.last_skip_reason == 3),
            "params stay on a skip": applied | same_bits(new_params, params),
            "also by optax, if normal": applied | same_bits(*map(flushed, both)),
            "updates of a skip are -0.0": applied | same_bits(updates, no_update),
            "inner state stays on a skip": applied
            | same_bits(new.inner_state, state.inner_state),
            "params have no NaN": has_no_nan(new_params),
            "inner state has no NaN": has_no_nan(new.inner_state),
            "the scale is in its bounds": is_finite(scale)
            & (scale > 0)
            & (scale >= low)
            & (scale <= high),
            "an overflow raises no scale": grads_finite | (scale <= old_scale),
            "a bad loss keeps the scaler's state": loss_finite
            | same_bits(new.scaler_state, state.scaler_state),
            "steps": new.steps == state.steps + 1,
            "skips": new.skips == state.skips + skipped,
            "skips in a row": new.consecutive_skips
            == jnp.where(applied, 0, state.consecutive_skips + 1),
            "bad losses": new.nonfinite_losses == state.nonfinite_losses + ~loss_finite,
            "bad updates": new.nonfinite_updates
            == state.nonfinite_updates + (acceptable & skipped),
            "reason": new.last_skip_reason
            == jnp.where(applied, state.last_skip_reason, reason),
            "leaves": applied | acceptable | jnp.all(new.nonfinite_leaves == ~leaves),
        }
        return (new_params, new), (checks, new.last_skip_reason * skipped)

    return optimizer, step


@functools.partial(jax.jit, static_argnames="inner")
def run(scaler, drawn, *, inner):
    optimizer, step = make_step(
        scaler, OPTIMIZERS[inner](), is_clipped=inner == CLIPPED
    )
    params = make_params()
    return lax.scan(step, (params, optimizer.init(params)), drawn)


def assert_held(checks):
    for name, held in jax.device_get(checks).items():
        assert held.all(), f"{name}: not at step {np.argwhere(~held)[0] + 1}"


@pytest.mark.parametrize("inner", OPTIMIZERS)
def test_promises_hold_at_every_step(inner):
    rng = np.random.default_rng(0)
    for name, optimizer in pairs():
        if optimizer != inner:
            continue
        drawn = draw(rng, STEPS)
        (_, state), (checks, reasons) = run(SCALERS[name](), drawn, inner=inner)
        assert_held(checks)
        counts = np.bincount(reasons, minlength=4)
        assert counts.sum() == STEPS == state.steps
        assert (counts[:3] > 20).all(), name  # applied, bad gradients, bad loss
        # Bad updates; SGD takes bfloat16 to the end of its range, and leaves it there.
        assert counts[3] < STEPS / (2 if inner == "sgd" else 10), name


def test_promises_hold_in_a_loop_of_jitted_steps():
    optimizer, step = make_step(
        SCALERS["presets.mindformers_adaptive"](), OPTIMIZERS["sgd"]()
    )
    step = jax.jit(step, donate_argnums=0)
    drawn = draw(np.random.default_rng(1), 100)
    params = make_params()
    carry = params, optimizer.init(params)
    for i in range(100):
        carry, (checks, _) = step(carry, jax.tree.map(lambda x, i=i: x[i], drawn))
        assert_held(jax.tree.map(lambda x: x[None], checks))
    assert 10 < carry[1].skips < 50


@pytest.mark.parametrize(
    ("name", "inner"), [("dynamic", "multi_steps"), ("hysteresis", "sgd")]
)
def test_promises_hold_under_vmap(name, inner):
    drawn = draw(np.random.default_rng(2), 100, 8)
    members = jax.vmap(functools.partial(run, inner=inner), in_axes=(None, 1))
    (_, state), (checks, reasons) = members(SCALERS[name](), drawn)
    assert_held(checks)
    assert len(set(state.skips.tolist())) > 1
    assert {0, 1, 2} <= set(reasons.ravel().tolist())


@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")  # also elsewhere
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("name", "inner"), [("dynamic", "multi_steps"), ("hysteresis", "sgd")]
)
def test_promises_hold_on_all_devices_under_shard_map(name, inner):
    """One device here; tests/devices has eight, with faults of their own."""
    count = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), "data")
    optimizer, step = make_step(
        SCALERS[name](), OPTIMIZERS[inner](), "data", inner == CLIPPED
    )

    def device(drawn):
        params = make_params()
        mine = jax.tree.map(lambda x: x[:, 0], drawn)
        _, results = lax.scan(step, (params, optimizer.init(params)), mine)
        return jax.tree.map(lambda x: x[:, None], results)

    spec = PartitionSpec(None, "data")
    mapped = jax.shard_map(
        device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    drawn = draw(np.random.default_rng(3), 200, count)
    checks, reasons = jax.device_get(jax.jit(mapped)(drawn))
    assert_held(checks)
    assert (reasons == reasons[:, :1]).all()
    assert {0, 1, 2} <= set(reasons.ravel().tolist())


def test_ten_thousand_steps_are_taken_and_all_scalers_and_optimizers_seen():
    taken = list(pairs())
    assert len(taken) * STEPS >= 10_000
    assert {name for name, _ in taken} == set(SCALERS)
    assert {name for _, name in taken} == set(OPTIMIZERS)
