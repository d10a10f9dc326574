"""`jls.bfloat16_params` under a guard: whole steps, of each model library."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

BF16 = jnp.bfloat16
ROUNDINGS = ["stochastic", "exact"]
X = jnp.float32(np.random.default_rng(0).normal(size=(8, 4)))
BATCH = X, X @ jnp.array([1.0, -2.0, 0.5, 3.0])
BAD = X.at[0, 0].set(jnp.nan), BATCH[1]


def make_params():
    rng = np.random.default_rng(1)
    return {
        "w": jnp.float32(rng.normal(size=(4, 16))),
        "v": jnp.float32(rng.normal(size=16)),
    }


def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def loss_fn(params, batch):
    x, y = batch
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return jnp.mean(jnp.square(predict(wide, x) - y))


def narrow(tree):
    return jax.tree.map(lambda x: x.astype(BF16) if x.dtype == jnp.float32 else x, tree)


def wrapped(inner=None, **kwargs):
    inner = optax.adamw(1e-3) if inner is None else inner
    return jls.skip_nonfinite(jls.bfloat16_params(inner, **kwargs))


def is_rounded(params, state):
    """Whether parameters are float32 ones that were rounded to nearest."""
    masters = jls.master_params(params, state)
    assert_identical(jax.tree.map(lambda p: p.astype(BF16), masters), params)
    lost = jax.tree.map(lambda m, p: jnp.any(m != p), masters, params)
    return all(jax.tree.leaves(lost))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_plain_step_stores_what_the_optimizer_rounded(rounding, jit_or_eager):
    """`init` of bfloat16 parameters warns of nothing: here a warning is an error."""
    optimizer = wrapped(rounding=rounding)
    params = narrow(make_params())
    opt_state = optimizer.init(params)

    @jit_or_eager
    def by_hand(params, state, batch):
        loss, grads = jls.value_and_grad(loss_fn)(state, params, batch)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    step = jit_or_eager(jls.train_step(loss_fn, optimizer))
    theirs = params, opt_state
    for batch in (BATCH, BATCH, BAD, BATCH):
        before = params, opt_state.inner_state
        params, opt_state, report = step(params, opt_state, batch)
        theirs = by_hand(*theirs, batch)
        assert_identical((params, opt_state), theirs)
        assert report.skipped == (batch is BAD)
        same = [
            np.array_equal(a, b)
            for a, b in zip(
                *map(jax.tree.leaves, ((params, opt_state.inner_state), before)),
                strict=True,
            )
        ]
        assert all(same) if report.skipped else not all(same)
    assert rounding == "stochastic" or is_rounded(params, opt_state)
    assert opt_state.inner_state.count == 3


def test_apply_gradients_stores_the_rounded_value_and_returns_what_was_added():
    optimizer = wrapped(optax.sgd(0.1), rounding="exact")
    params = narrow(make_params())
    opt_state = optimizer.init(params)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.3), params)
    new, opt_state, _, updates = jls.apply_gradients(
        optimizer, grads, opt_state, params, return_updates=True
    )
    assert_identical(optax.apply_updates(params, updates), new)
    assert is_rounded(new, opt_state)


def linen_model():
    model = linen.Dense(1, param_dtype=BF16)
    params = model.init(jax.random.key(0), X)["params"]
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=wrapped(rounding="exact")
    )

    def loss(state, batch):
        x, y = batch
        return jnp.mean(
            jnp.square(state.apply_fn({"params": state.params}, x)[:, 0] - y)
        )

    return state, jax.jit(jls.train_step(loss))


def test_linen_step_moves_bfloat16_parameters():
    state, step = linen_model()
    for batch in (BATCH, BAD, BATCH):
        before = state
        state, report = step(state, batch)
        assert report.skipped == (batch is BAD)
        if batch is BAD:
            assert_identical(state.params, before.params)
            assert_identical(state.opt_state.inner_state, before.opt_state.inner_state)
    assert is_rounded(state.params, state)


@pytest.mark.parametrize("by_step", [True, False])
def test_nnx_step_moves_bfloat16_parameters(by_step):
    model = nnx.Linear(4, 1, param_dtype=BF16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, wrapped(rounding="exact"), wrt=nnx.Param)

    def loss(model, batch):
        x, y = batch
        return jnp.mean(jnp.square(model(x)[:, 0] - y))

    @nnx.jit
    def by_hand(model, optimizer, batch):
        grad_fn = jls.value_and_grad(loss, transform=nnx.value_and_grad)
        value, grads = grad_fn(optimizer, model, batch)
        optimizer.update(model, grads, value=value)

    step = nnx.jit(jls.train_step(loss)) if by_step else by_hand
    for batch in (BATCH, BAD, BATCH):
        before = jax.tree.map(jnp.copy, nnx.state((model, optimizer.opt_state)))
        step(model, optimizer, batch)
        after = nnx.state((model, optimizer.opt_state))
        kept = jax.tree.map(np.array_equal, before[0], after[0])
        assert all(jax.tree.leaves(kept)) or batch is not BAD
    params = nnx.state(model, nnx.Param)
    masters = jls.master_params(params, optimizer)
    assert_identical(jax.tree.map(lambda p: p.astype(BF16), masters), params)
    kernels = masters["kernel"].get_value(), params["kernel"].get_value()
    assert jnp.any(kernels[0] != kernels[1].astype(jnp.float32))
    assert jls.metrics(optimizer)["skips"] == 1


def test_nnx_moments_of_float32_parameters_stay_float32():
    model = nnx.BatchNorm(4, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    both = nnx.List([nnx.Linear(4, 4, param_dtype=BF16, rngs=nnx.Rngs(0)), model])
    optimizer = nnx.Optimizer(both, wrapped(optax.adam(0.1)), wrt=nnx.Param)
    (adam, *_) = optimizer.opt_state.inner_state.inner_state
    moments, params = (
        [x.dtype for x in jax.tree.leaves(tree)]
        for tree in (adam.mu, nnx.state(both, nnx.Param))
    )
    assert moments == params
    assert len(set(params)) == 2


def test_equinox_step_moves_bfloat16_parameters():
    model = narrow_equinox(eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0)))
    optimizer = wrapped(rounding="exact")
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss(model, batch):
        x, y = batch
        return jnp.mean(jnp.square(jax.vmap(model)(x.astype(BF16))[:, 0] - y))

    step = eqx.filter_jit(jls.train_step(loss, optimizer))
    for batch in (BATCH, BAD, BATCH):
        model, opt_state, report = step(model, opt_state, batch)
        assert report.skipped == (batch is BAD)
    assert is_rounded(eqx.filter(model, eqx.is_inexact_array), opt_state)


def narrow_equinox(model):
    return jax.tree.map(
        lambda x: x.astype(BF16) if eqx.is_inexact_array(x) else x, model
    )


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": BF16},
        {"micro_batches": 4},
        {"micro_batches": 4, "drop": "micro_batch", "compute_dtype": BF16},
        {"update_norm": True, "local_norm": True},
    ],
)
def test_options_of_the_step_work_as_with_any_optimizer(options):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    optimizer = jls.loss_scaled(jls.bfloat16_params(inner, rounding="exact"))
    params = narrow(make_params())
    opt_state = optimizer.init(params)
    step = jax.jit(jls.train_step(loss_fn, optimizer, **options))
    losses = []
    for _ in range(30):
        params, opt_state, report = step(params, opt_state, BATCH)
        losses.append(report.loss)
    assert losses[-1] < losses[0] / 2
    assert is_rounded(params, opt_state)


def labels(params):
    return {"w": "adam", "v": "sgd"}


PLACES = {
    "chain": lambda: optax.chain(
        optax.clip(1.0), jls.bfloat16_params(optax.adam(1e-3))
    ),
    "multi_steps": lambda: jls.bfloat16_params(optax.MultiSteps(optax.adam(1e-3), 2)),
    "multi_transform": lambda: optax.multi_transform(
        {
            "adam": jls.bfloat16_params(optax.adam(1e-3)),
            "sgd": jls.bfloat16_params(optax.sgd(1e-3), rounding="exact"),
        },
        labels,
    ),
    "multi_transform inside": lambda: jls.bfloat16_params(
        optax.multi_transform(
            {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3)}, labels
        )
    ),
    "masked": lambda: jls.bfloat16_params(
        optax.chain(
            optax.adam(1e-3),
            optax.masked(optax.add_decayed_weights(-1e-3), {"w": True, "v": False}),
        )
    ),
    "inject_hyperparams": lambda: jls.bfloat16_params(
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
    ),
    "params_ema": lambda: jls.bfloat16_params(
        optax.chain(optax.adam(1e-3), jls.params_ema(0.5))
    ),
    "params_ema outside": lambda: optax.chain(
        jls.bfloat16_params(optax.adam(1e-3)), jls.params_ema(0.5)
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_wrapper_may_be_anywhere_under_the_guard(place):
    optimizer = jls.skip_nonfinite(PLACES[place]())
    params = narrow(make_params())
    opt_state = optimizer.init(params)
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    for batch in (BATCH, BATCH, BAD, BATCH, BATCH):
        before = params, opt_state.inner_state
        params, opt_state, report = step(params, opt_state, batch)
        if batch is BAD:
            assert report.skipped
            assert_identical((params, opt_state.inner_state), before)
    assert all(x.dtype == BF16 for x in jax.tree.leaves(params))
    start = narrow(make_params())
    moved = jax.tree.map(lambda a, b: jnp.mean(a != b), params, start)
    assert moved["w"] > 0.2
    if place == "inject_hyperparams":
        assert report.learning_rate.dtype == jnp.float32
        assert report.learning_rate == jnp.float32(1e-3)


def test_guard_may_be_inside():
    optimizer = jls.bfloat16_params(
        jls.skip_nonfinite(optax.adam(1e-3)), rounding="exact"
    )
    params = narrow(make_params())
    opt_state = optimizer.init(params)
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    for batch in (BATCH, BAD, BATCH):
        before, params = params, step(params, opt_state, batch)
        params, opt_state, report = params
        assert report.skipped == (batch is BAD)
        if batch is BAD:
            assert_identical(params, before)
    assert is_rounded(params, opt_state)


def test_moments_of_the_spike_policy_stay_float32():
    guard = jls.skip_nonfinite(optax.adam(1e-3), spikes=jls.spikes())
    state = jls.bfloat16_params(guard).init(narrow(make_params())).inner_state
    floats = [x.dtype for x in jax.tree.leaves(state.spike_state)]
    assert BF16 not in floats
    assert state.inner_state[0].mu["w"].dtype == BF16


# Updates are not checked --------------------------------------------------------------


def hides_nan(inner):
    """Makes NaN of the updates of a good step."""
    return optax.chain(
        inner, optax.stateless(lambda u, _: jax.tree.map(lambda x: x * jnp.nan, u))
    )


@pytest.mark.cover(1)
@pytest.mark.parametrize("by_step", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_updates_of_bfloat16_parameters_are_not_checked(by_step, outside):
    """A check would read all updates and parameters once more."""
    params = narrow(make_params())

    def is_applied(inner, params):
        guard = jls.skip_nonfinite(inner)
        optimizer = optax.chain(guard, optax.identity()) if outside else guard
        state = optimizer.init(params)
        grads = jax.tree.map(jnp.ones_like, params)
        if by_step:
            _, state, report = jls.apply_gradients(optimizer, grads, state, params)
            return not report.skipped
        _, state = optimizer.update(grads, state, params)
        return bool(jls.metrics(state)["skips"] == 0)

    inner = hides_nan(optax.sgd(1.0))
    assert is_applied(jls.bfloat16_params(inner), params)
    with pytest.warns(jls.JlsWarning, match="2 of 2 parameters are bfloat16"):
        assert not is_applied(inner, params)
    half = params | {"v": params["v"].astype(jnp.float16)}
    with pytest.warns(jls.JlsWarning, match="1 of 2 parameters are float16"):
        assert not is_applied(jls.bfloat16_params(inner), half)


def test_warning_of_bfloat16_parameters_names_the_wrapper():
    params = narrow(make_params())
    with pytest.warns(jls.JlsWarning, match=r"Write jls\.bfloat16_params\(inner\)"):
        jls.skip_nonfinite(optax.sgd(0.1)).init(params)


def test_state_of_an_nnx_optimizer_is_upgraded():
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    start = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    saved = nnx.Optimizer(model, jls.skip_nonfinite(optax.adamw(1e-3)), wrt=nnx.Param)
    nnx.update(model, narrow(start))
    optimizer = nnx.Optimizer(model, wrapped(rounding="exact"), wrt=nnx.Param)
    optimizer.opt_state = nnx.data(
        jls.upgrade_state(optimizer.opt_state, saved.opt_state, params=start)
    )
    params = nnx.state(model, nnx.Param)
    masters = jls.master_params(params, optimizer)
    assert_identical(jax.tree.leaves(masters), jax.tree.leaves(start))
    back = jls.upgrade_state(saved.opt_state, optimizer.opt_state)
    assert_identical(jax.tree.leaves(back), jax.tree.leaves(saved.opt_state))
