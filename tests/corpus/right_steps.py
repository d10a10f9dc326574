"""Right steps of many kinds: `jls.check_step` may call none of them broken."""

import functools
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import steps
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from steps import BATCH, X, Y, half, mse, plain, plain_loss, plain_params, predict, wrap

import jls

RIGHT = {}


def right(make):
    RIGHT[make.__name__] = make
    return make


def with_inner(name, make_inner, **options):
    RIGHT[name] = lambda: plain(inner=make_inner(), **options)


def with_wrapper(name, wrapper):
    RIGHT[name] = lambda: plain(wrap=wrapper)


# The four libraries.

RIGHT |= {f"{name}_by_hand": make for name, make in steps.PLACES.items()}

# Scalers.

with_wrapper("static", lambda inner: jls.loss_scaled(inner, jls.static(128.0)))
with_wrapper("hysteresis", lambda inner: jls.loss_scaled(inner, jls.hysteresis(256.0)))
ADAPTIVE = jls.presets.mindformers_adaptive(256.0, 2, 20)
with_wrapper("adaptive", lambda inner: jls.loss_scaled(inner, ADAPTIVE))
with_wrapper("megatron", lambda inner: jls.loss_scaled(inner, jls.presets.megatron()))
with_wrapper("deepspeed", lambda inner: jls.loss_scaled(inner, jls.presets.deepspeed()))
with_wrapper(
    "every_step_grows",
    lambda inner: jls.loss_scaled(inner, jls.dynamic(2.0**8, growth_interval=1)),
)
with_wrapper("far_too_high", lambda inner: jls.loss_scaled(inner, jls.dynamic(2.0**24)))
with_wrapper("low", lambda inner: jls.loss_scaled(inner, jls.dynamic(2.0, min_scale=1)))
with_wrapper(
    "no_power_of_two", lambda inner: jls.loss_scaled(inner, jls.dynamic(1000.0))
)
with_wrapper("check_updates", lambda inner: jls.loss_scaled(inner, check_updates=True))

# Optimizers inside.

with_inner("sgd", lambda: optax.sgd(0.1))
with_inner("momentum", lambda: optax.sgd(0.1, momentum=0.9, nesterov=True))
with_inner("lion", lambda: optax.lion(1e-3))
with_inner("adafactor", lambda: optax.adafactor(1e-2))
with_inner("muon", lambda: optax.contrib.muon(1e-2))
with_inner(
    "clip_by_global_norm",
    lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
)
with_inner("clip_by_element", lambda: optax.chain(optax.clip(0.01), optax.sgd(0.1)))
with_inner("multi_steps_inside", lambda: optax.MultiSteps(optax.adam(1e-2), 4))
with_inner(
    "warm_up_from_0",
    lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 100)),
)
with_inner(
    "warm_up_and_accumulation",
    lambda: optax.MultiSteps(optax.sgd(optax.linear_schedule(0.0, 0.1, 10)), 3),
)
with_inner(
    "inject_hyperparams",
    lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 10)),
)
with_inner("params_ema", lambda: optax.chain(optax.adamw(1e-2), jls.params_ema(0.9)))
with_inner("schedule_free", lambda: optax.contrib.schedule_free_adamw(1e-2))
with_inner(
    "partition",
    lambda: optax.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"w1": "a", "w2": "b"}
    ),
)
with_inner("moments_in_bfloat16", lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16))
with_inner("prodigy", lambda: optax.contrib.prodigy(1.0))
with_inner("masked", lambda: optax.masked(optax.adam(1e-2), {"w1": True, "w2": False}))
with_inner(
    "lookahead_of_nothing", lambda: optax.chain(optax.identity(), optax.sgd(1.0))
)
with_inner(
    "add_noise", lambda: optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.1))
)
with_inner("donated", lambda: optax.adam(1e-2), donate_argnums=(0, 1))


@right
def inject_hyperparams_outside():
    def make(learning_rate):
        return jls.loss_scaled(optax.adam(learning_rate), steps.SCALER)

    schedule = optax.linear_schedule(0.1, 0.0, 10)
    return plain(wrap=lambda _: optax.inject_hyperparams(make)(schedule))


@right
def chained_outside():
    return plain(wrap=lambda inner: optax.chain(wrap(inner), optax.scale(0.5)))


@right
def eager():
    step, args = plain()
    return step.__wrapped__, args


@right
def jitted_inside():
    step, args = plain()
    return (lambda *a: step(*a)), args


@right
def ahead_of_time():
    step, args = plain()
    return step.lower(*args).compile(), args, {"carried": (0, 1)}


@right
def updates_every_other_call():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def alternate(params, opt_state, count, batch):
        new = step(params, opt_state, batch)
        old = params, opt_state, new[2]
        return *jls.select(count % 2 == 0, new, old), count + 1

    args = params, opt_state, jnp.int32(0), batch
    return alternate, args, {"carried": (0, 1, 2)}


@right
def batch_first_and_predictions_like_it():
    """An autoencoder: what comes back has the form of the first argument."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(x, params, opt_state):
        def loss_fn(params):
            predicted = predict(params, x).astype(jnp.float32)
            return mse(predicted, {"y": x}), predicted

        (loss, predicted), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return predicted, loss, optax.apply_updates(params, updates), opt_state

    params = {"w1": plain_params()["w1"], "w2": jnp.ones((8, 4)) / 4}
    return step, (X, params, optimizer.init(params))


@right
def inputs_that_may_be_missing():
    """NaN in the batch stands for a missing value, and is replaced."""
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def fills(params, opt_state, batch):
        x = jnp.where(jnp.isnan(batch["x"]), 0.0, batch["x"])
        return step(params, opt_state, {**batch, "x": x})

    return fills, (params, opt_state, batch)


@right
def learning_rate_as_an_argument():
    optimizer = wrap(optax.sgd(1.0))

    @jax.jit
    def step(rate, params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        updates = jax.tree.map(lambda u: rate * u, updates)
        return loss, optax.apply_updates(params, updates), opt_state

    params = plain_params()
    return step, (jnp.float32(0.1), params, optimizer.init(params), BATCH)


@right
def gradients_that_vanish_one_after_the_other():
    """The lower the scale, the less is left of the sum: but not in proportion."""
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(2.0**12))
    sizes = jnp.exp(jnp.linspace(-5.0, 0.5, 64)) * 64 * 2.0**-24

    @jax.jit
    def step(params, opt_state, x):
        def loss_fn(params):
            terms = x.astype(jnp.float16) * half(params)["w"]
            return jnp.mean(sizes * terms.astype(jnp.float32))

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"w": jnp.zeros(1)}
    return step, (params, optimizer.init(params), jnp.ones(64))


# Bare scaler states.


def bare(adjust_by, scaler=None):
    scaler = scaler or jls.dynamic(2.0**10)

    @jax.jit
    def step(w, state, x):
        def loss_fn(w):
            return jnp.mean((x.astype(jnp.float16) @ half(w)).astype(jnp.float32) ** 2)

        loss, grads = adjust_by(state, loss_fn, w)
        finite = jls.all_finite(grads)
        w = jls.select(finite, w - 0.1 * grads, w)
        return w, scaler.adjust(state, finite), loss

    return step, (jnp.ones(4), scaler.init(), X)


@right
def bare_scaler():
    return bare(lambda state, loss_fn, w: jls.value_and_grad(loss_fn)(state, w))


@right
def eager_with_a_loop():
    """A loop outside of jit is compiled in each call."""
    step, (w, state, x) = RIGHT["bare_scaler"]()

    def many(w, state, xs):
        def body(carry, x):
            w, state, loss = step(*carry, x)
            return (w, state), loss

        (w, state), losses = jax.lax.scan(body, (w, state), xs)
        return w, state, losses[-1]

    return many, (w, state, x[None])


@right
def bare_static_scale():
    return bare(
        lambda state, loss_fn, w: jls.value_and_grad(loss_fn)(state, w),
        jls.static(1024.0),
    )


@right
def bare_scaler_and_a_learning_rate():
    step, (w, state, x) = RIGHT["bare_scaler"]()

    @jax.jit
    def with_rate(rate, w, state, x):
        new, state, loss = step(w, state, x)
        return loss, w + rate * (new - w), state

    return with_rate, (jnp.float32(0.5), w, state, x)


@right
def bare_scale_and_unscale():
    def gradients(state, loss_fn, w):
        grads = jax.grad(lambda w: jls.scale(state, loss_fn(w)))(w)
        return loss_fn(w), jls.unscale(state, grads)

    return bare(gradients)


# bfloat16 and float32.


def narrow_step(wrapper, gradients, dtype):
    optimizer = wrapper(optax.adamw(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            p = jax.tree.map(lambda x: x.astype(dtype), params)
            hidden = jnp.tanh(batch["x"].astype(dtype) @ p["w1"])
            return mse(hidden @ p["w2"], batch)

        loss, grads = gradients(opt_state, loss_fn, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@right
def skip_nonfinite_in_bfloat16():
    def gradients(_, loss_fn, params):
        return jax.value_and_grad(loss_fn)(params)

    return narrow_step(jls.skip_nonfinite, gradients, jnp.bfloat16)


@right
def skip_nonfinite_with_value_and_grad():
    def gradients(state, loss_fn, params):
        return jls.value_and_grad(loss_fn)(state, params)

    return narrow_step(jls.skip_nonfinite, gradients, jnp.bfloat16)


@right
def float32_scaled():
    def gradients(state, loss_fn, params):
        return jls.value_and_grad(loss_fn)(state, params)

    return narrow_step(wrap, gradients, jnp.float32)


@right
def gradients_that_vanish():
    optimizer = jls.loss_scaled(optax.adam(1e-2), jls.dynamic(2.0**12))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            return plain_loss(params, batch) * 1e-4

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@right
def bfloat16_params():
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), plain_params())
    return step, (params, optimizer.init(params), BATCH)


@right
def bfloat16_params_that_move():
    optimizer = jls.loss_scaled(jls.bfloat16_params(optax.adamw(1e-2)))
    step = jax.jit(jls.train_step(plain_loss, optimizer))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), plain_params())
    return step, (params, optimizer.init(params), BATCH)


# Steps of another form.


@right
def outputs_in_another_order():
    step, args = plain()

    @jax.jit
    def swapped(*args):
        params, opt_state, loss = step(*args)
        return {"loss": loss, "state": (opt_state, params)}

    return swapped, args


@right
def gradients_come_back_too():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return grads, loss, optax.apply_updates(params, updates), opt_state

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@right
def one_dict():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def whole(run, batch):
        params, opt_state, loss = step(run["params"], run["opt"], batch)
        return {"params": params, "opt": opt_state, "loss": loss, "n": run["n"] + 1}

    run = {"params": params, "opt": opt_state, "n": jnp.int32(0)}
    return (
        whole,
        ({**run, "loss": jnp.float32(0)}, batch),
        {"carried": {0: ["params", "opt"]}},
    )


@right
def a_pair_as_one_argument():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def whole(run, batch):
        return step(*run, batch)

    return whole, ((params, opt_state), batch)


@right
def keyword_arguments():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def whole(*, batch, params, opt_state):
        return step(params, opt_state, batch)

    return whole, (), {"batch": batch, "params": params, "opt_state": opt_state}


@right
def own_metrics():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, x, y):
        def loss_fn(params):
            predicted = predict(params, x)
            return mse(predicted, {"y": y}), predicted

        (loss, predicted), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        metrics = {"grad_norm": norm, "loss": loss, **jls.metrics(opt_state)}
        params = optax.apply_updates(params, updates)
        return params, opt_state, predicted.astype(jnp.float32), metrics

    params = plain_params()
    return step, (params, optimizer.init(params), X, Y)


@right
def loss_of_other_data():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def both(params, opt_state, batch, test):
        other = plain_loss(params, test)
        params, opt_state, loss = step(params, opt_state, batch)
        return params, opt_state, {"test_loss": other, "train_loss": loss}

    return both, (params, opt_state, batch, half(batch))


@right
def mean_of_outputs_before_loss():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def both(params, opt_state, batch, probe):
        mean = predict(params, probe).astype(jnp.float32).mean()
        return *step(params, opt_state, batch)[:2], mean, plain_loss(params, batch)

    return both, (params, opt_state, batch, X + 1)


@right
def loss_without_bad_rows():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def clean(params, opt_state, batch):
        bad = jnp.isnan(batch["x"]).any(1) | jnp.isnan(batch["y"]).any(1)
        kept = jax.tree.map(lambda x: jnp.where(bad[:, None], 0, x), batch)
        params, opt_state, loss = step(params, opt_state, kept)
        return params, opt_state, batch["x"].mean(), batch["y"].mean(), loss

    return clean, (params, opt_state, batch)


@right
def weak_types_and_a_scale_far_too_high():
    """The types of the arguments change in the first step, as often as it is tried."""
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(2.0**24))

    def loss_fn(w, x):
        return jnp.mean((x.astype(jnp.float16) @ half(w)).astype(jnp.float32) ** 2)

    w = jnp.full((4, 3), 0.5)
    return jax.jit(jls.train_step(loss_fn, optimizer)), (w, optimizer.init(w), 30 * X)


@right
def state_that_moves_by_itself():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def moves(state, batch):
        params, opt_state, loss = step(state["params"], state["opt_state"], batch)
        place, speed = state["env"]
        state = {
            "params": params,
            "opt_state": opt_state,
            "temperatures": 0.99 * state["temperatures"],
            "env": (place + 0.1 * speed, speed - 0.1 * place),
            "rate": 0.5 * state["rate"],
        }
        return state, loss

    state = {
        "params": params,
        "opt_state": opt_state,
        "temperatures": jnp.ones(3),
        "env": (X[0], X[1]),
        "rate": jnp.float32(1),
    }
    return moves, (state, batch)


@right
def weights_normalized_in_each_step():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def normalized(params, opt_state, batch):
        params, opt_state, loss = step(params, opt_state, batch)
        params["w1"] /= jnp.linalg.norm(params["w1"], axis=0)
        return params, opt_state, loss

    params["w1"] /= jnp.linalg.norm(params["w1"], axis=0)
    return normalized, (params, opt_state, batch)


@right
def norm_before_loss():
    """The first scalar is not the loss: only its gradients are NaN in a fault."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return params, opt_state, optax.tree.norm(grads), loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@right
def numpy_batch():
    step, (params, opt_state, batch) = plain()
    return step, (params, opt_state, jax.tree.map(np.asarray, batch))


@right
def scan_of_steps():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def many(params, opt_state, batches):
        def body(carry, batch):
            params, opt_state, loss = step(*carry, batch)
            return (params, opt_state), loss

        (params, opt_state), losses = jax.lax.scan(body, (params, opt_state), batches)
        return params, opt_state, jnp.mean(losses)

    batches = jax.tree.map(lambda x: jnp.stack([x] * 3), batch)
    return many, (params, opt_state, batches)


@right
def integers_alone():
    """A batch without floating-point arrays: the fault goes into a parameter."""
    optimizer = wrap(optax.adamw(1e-2))

    @jax.jit
    def step(params, opt_state, tokens):
        def loss_fn(params):
            p = half(params)
            logits = (p["embed"][tokens[:, 0]] @ p["out"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens[:, 1]
            ).mean()

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    keys = jax.random.split(jax.random.key(0))
    params = {
        "embed": jax.random.normal(keys[0], (5, 4)),
        "out": jax.random.normal(keys[1], (4, 5)),
    }
    tokens = jnp.array([[0, 1], [2, 3], [4, 0]])
    return step, (params, optimizer.init(params), tokens)


@right
def mask_of_infinities_in_the_params():
    optimizer = wrap(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            scores = predict(params, batch["x"]).astype(jnp.float32)
            scores = jnp.concatenate([scores, scores[:, :1]], axis=1)
            mask = jax.lax.stop_gradient(params["mask"])
            return mse(jax.nn.softmax(scores + mask)[:, :2], batch)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {**plain_params(), "mask": jnp.array([0.0, 0.0, -jnp.inf])}
    return step, (params, optimizer.init(params), BATCH)


@right
def dropout_with_a_key():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(key, params, opt_state, batch):
        key, now = jax.random.split(key)

        def loss_fn(params):
            keep = jax.random.bernoulli(now, 0.8, batch["x"].shape)
            return plain_loss(params, {**batch, "x": batch["x"] * keep})

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return key, optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return step, (jax.random.key(0), params, optimizer.init(params), BATCH)


@right
def average_outside_rolled_back():
    step, args = plain()
    _, (params, opt_state, batch) = step, args

    @jax.jit
    def with_average(params, average, opt_state, batch):
        params, opt_state, loss = step(params, opt_state, batch)
        new = optax.incremental_update(params, average, 0.1)
        average = jls.select(opt_state.applied, new, average)
        return params, average, opt_state, loss

    return with_average, (params, params, opt_state, batch)


@right
def two_losses_with_two_scales(swapped=False):
    """A tiny GAN."""
    one, two = wrap(optax.adam(1e-2)), wrap(optax.sgd(0.1))

    def fake(g):
        return jnp.tanh(X.astype(jnp.float16) @ half(g)).astype(jnp.float32)

    def score(d, y):
        return (y.astype(jnp.float16) @ half(d)).astype(jnp.float32)

    def g_loss(g, d, y):
        return jnp.mean((score(d, fake(g)) - 1) ** 2)

    def d_loss(d, g, y):
        return jnp.mean(score(d, fake(g)) ** 2) + jnp.mean((score(d, y) - 1) ** 2)

    @jax.jit
    def step(g, d, g_state, d_state, y):
        scales = (d_state, g_state) if swapped else (g_state, d_state)
        loss_g, grads_g = jls.value_and_grad(g_loss)(scales[0], g, d, y)
        loss_d, grads_d = jls.value_and_grad(d_loss)(scales[1], d, g, y)
        updates_g, g_state = one.update(grads_g, g_state, g, value=loss_g)
        updates_d, d_state = two.update(grads_d, d_state, d, value=loss_d)
        new = optax.apply_updates(g, updates_g), optax.apply_updates(d, updates_d)
        return *new, g_state, d_state, loss_g, loss_d

    keys = jax.random.split(jax.random.key(0))
    g, d = jax.random.normal(keys[0], (4, 2)), jax.random.normal(keys[1], (2, 1))
    return step, (g, d, one.init(g), two.init(d), Y)


@right
def accumulation_by_hand():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        halves = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch)

        def body(total, part):
            made = jls.value_and_grad(plain_loss)(opt_state, params, part)
            return jax.tree.map(jnp.add, total, made), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(body, zeros, halves)
        updates, new_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), new_state, loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@right
def ensemble():
    """One state for each member."""
    optimizer = wrap(optax.adam(1e-2))

    def one(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.tree.map(lambda x: jnp.stack([x, -x]), plain_params())
    step = jax.jit(jax.vmap(one, in_axes=(0, 0, None)))
    return step, (params, jax.vmap(optimizer.init)(params), BATCH)


# Linen.


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: Any


class WithStatistics(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=jnp.float16)(x)
        x = nn.BatchNorm(use_running_average=False, dtype=jnp.float16)(x)
        x = nn.Dropout(0.25, deterministic=False)(nn.relu(x))
        return nn.Dense(2, dtype=jnp.float16)(x)


def statistics_state(tx):
    model = WithStatistics()
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    return TrainState.create(
        apply_fn=model.apply, tx=tx, key=jax.random.key(3), **model.init(keys, X)
    )


def statistics_loss(state, params, batch):
    key, dropout = jax.random.split(state.key)
    variables = {"params": params, "batch_stats": state.batch_stats}
    predicted, new = state.apply_fn(
        variables, batch["x"], mutable=["batch_stats"], rngs={"dropout": dropout}
    )
    return mse(predicted, batch), {"batch_stats": new["batch_stats"], "key": key}


@right
def linen_train_step():
    loss_fn = functools.partial(_with_own_params, steps.linen_loss)
    step = jax.jit(jls.train_step(loss_fn))
    return step, (steps.linen_state(wrap(optax.adamw(1e-2))), BATCH)


def _with_own_params(loss_fn, state, batch):
    return loss_fn(state, state.params, batch)


@right
def linen_batch_statistics_by_hand():
    @jax.jit
    def step(state, batch):
        def loss_fn(params):
            return statistics_loss(state, params, batch)

        (loss, new), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            state.opt_state, state.params
        )
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        applied = opt_state.applied
        return state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            batch_stats=jls.select(applied, new["batch_stats"], state.batch_stats),
            key=new["key"],
        ), loss

    return step, (statistics_state(wrap(optax.adam(1e-2))), BATCH)


# NNX.


class NnxWithStatistics(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=jnp.float16, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.last = nnx.Linear(8, 2, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def nnx_arguments(model=None):
    model = model or NnxWithStatistics(nnx.Rngs(0))
    tx = wrap(optax.adamw(1e-2))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), BATCH


@right
def nnx_train_step():
    return nnx.jit(jls.train_step(steps.nnx_loss)), nnx_arguments()


@right
def nnx_micro_batches():
    step = nnx.jit(jls.train_step(steps.nnx_loss, micro_batches=2, drop="micro_batch"))
    return step, nnx_arguments()


@right
def nnx_modules_returned_from_jax_jit():
    inner = jls.train_step(steps.nnx_loss)

    @jax.jit
    def step(model, optimizer, batch):
        report = inner(model, optimizer, batch)
        return model, optimizer, report

    return step, nnx_arguments()


@right
def nnx_merged_inside_jax_jit():
    inner = jls.train_step(steps.nnx_loss)
    model, optimizer, batch = nnx_arguments()
    graph, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        report = inner(model, optimizer, batch)
        return nnx.state((model, optimizer)), report.loss

    return step, (state, batch)


@right
def nnx_cached_partial():
    model, optimizer, batch = nnx_arguments()
    step = nnx.cached_partial(nnx.jit(jls.train_step(steps.nnx_loss)), model, optimizer)
    return step, (batch,)


@right
def nnx_with_metrics():
    @nnx.jit
    def step(model, optimizer, metrics, batch):
        loss, grads = jls.value_and_grad(steps.nnx_loss, transform=nnx.value_and_grad)(
            optimizer, model, batch
        )
        optimizer.update(model, grads, value=loss)
        metrics.update(loss=loss)

    model, optimizer, batch = nnx_arguments(steps.Model(nnx.Rngs(0)))
    return step, (
        model,
        optimizer,
        nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
        batch,
    )


@right
def nnx_statistics_by_hand():
    @nnx.jit
    def step(model, optimizer, batch):
        rest = nnx.filterlib.Not(nnx.Param)
        before = nnx.to_pure_dict(nnx.state(model, rest))
        loss, grads = jls.value_and_grad(steps.nnx_loss, transform=nnx.value_and_grad)(
            optimizer, model, batch
        )
        optimizer.update(model, grads, value=loss)
        after = nnx.to_pure_dict(nnx.state(model, rest))
        applied = jls.metrics(optimizer)["applied"]
        nnx.update(model, jls.select(applied, after, before))
        return loss

    return step, nnx_arguments()


# Equinox and Haiku.


@right
def equinox_donated():
    step, args = steps.equinox()
    return eqx.filter_jit(step.__wrapped__, donate="all-except-first"), args


@right
def haiku():
    def forward(x):
        return hk.Linear(2)(jnp.tanh(hk.Linear(8)(x)))

    model = hk.without_apply_rng(hk.transform(forward))
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            return mse(model.apply(half(params), batch["x"].astype(jnp.float16)), batch)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = model.init(jax.random.key(0), X)
    return step, (params, optimizer.init(params), BATCH)


# Layers that clip their own gradients.


@right
def fp8():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dot = nn.fp8_ops.Fp8DirectDotGeneralOp
            x = nn.Dense(16, dtype=jnp.bfloat16, dot_general_cls=dot)(x)
            return nn.Dense(2, dtype=jnp.bfloat16, dot_general_cls=dot)(x)

    model = Model()
    fp8 = "_overwrite_with_gradient"
    optimizer = wrap(optax.sgd(0.1))

    @jax.jit
    def step(variables, opt_state, batch):
        def loss_fn(variables):
            return mse(model.apply(variables, batch["x"]), batch)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, variables)
        params, old = variables["params"], variables[fp8]
        updates, opt_state = optimizer.update(
            grads["params"], opt_state, params, value=loss
        )
        # Their "gradients" are the next values, which were not scaled.
        new = jls.scale(opt_state, grads[fp8])
        new = jls.select(opt_state.applied & jls.all_finite(new), new, old)
        return (
            {"params": optax.apply_updates(params, updates), fp8: new},
            opt_state,
            loss,
        )

    variables = model.init(jax.random.key(0), X)
    return step, (variables, optimizer.init(variables["params"]), BATCH)


def nnx_values(objects):
    """What is in NNX objects, as arrays."""
    return jax.tree.map(
        lambda x: (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else np.array(x)
        ),
        nnx.to_pure_dict(nnx.state(objects)),
    )


# What comes back looks like something else.


def by_hand(params, opt_state, loss_fn, optimizer):
    loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss, grads


@right
def reconstructions_like_the_batch():
    """In the report of `jls.train_step`."""
    optimizer, params = wrap(optax.adam(1e-2)), {"w": jnp.eye(4)}

    def loss_fn(params, batch):
        made = (half(batch)["x"] @ half(params)["w"]).astype(jnp.float32)
        return jnp.mean((made - batch["x"]) ** 2), {"x": made}

    step = jax.jit(jls.train_step(loss_fn, optimizer, has_aux=True))
    return step, (params, optimizer.init(params), {"x": X})


@right
def reconstructions_after_the_loss():
    optimizer, params = wrap(optax.adam(1e-2)), {"w": jnp.eye(4)}

    def reconstruct(params, batch):
        return {"x": (half(batch)["x"] @ half(params)["w"]).astype(jnp.float32)}

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            return jnp.mean((reconstruct(params, batch)["x"] - batch["x"]) ** 2)

        new, opt_state, loss, _ = by_hand(params, opt_state, loss_fn, optimizer)
        return new, opt_state, loss, reconstruct(params, batch)

    return step, (params, optimizer.init(params), {"x": X})


@right
def gradients_nearer_than_the_parameters():
    """From zero, the gradients of a step are closer than what it makes of them."""
    optimizer = wrap(optax.sgd(2.0))
    params = jax.tree.map(jnp.zeros_like, {"w": jnp.ones((4, 2)), "b": jnp.ones(2)})

    @jax.jit
    def step(params, opt_state, x, y):
        def loss_fn(p):
            made = half(x) @ half(p["w"]) + half(p["b"])
            return mse(made, {"y": y})

        return by_hand(params, opt_state, loss_fn, optimizer)

    return step, (params, optimizer.init(params), X, Y)


@right
def a_frozen_copy_of_the_parameters():
    optimizer, params = wrap(optax.adam(1e-2)), plain_params()

    @jax.jit
    def step(reference, params, opt_state, batch):
        def loss_fn(p):
            gap = predict(p, batch["x"]) - predict(reference, batch["x"])
            return plain_loss(p, batch) + 0.1 * jnp.mean(gap.astype(jnp.float32) ** 2)

        return by_hand(params, opt_state, loss_fn, optimizer)

    return step, (params, params, optimizer.init(params), BATCH)


@right
def equal_trees_in_another_order():
    optimizer, params = wrap(optax.adam(1e-2)), plain_params()

    @jax.jit
    def step(params, average, opt_state, batch):
        new, opt_state, loss, _ = by_hand(
            params, opt_state, lambda p: plain_loss(p, batch), optimizer
        )
        moved = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, new)
        average = jls.select(opt_state.applied, moved, average)
        return average, new, opt_state, loss

    return step, (params, params, optimizer.init(params), BATCH)


@right
def two_equal_critics_in_another_order():
    optimizer, params = wrap(optax.adam(1e-2)), plain_params()

    @jax.jit
    def step(first, second, state1, state2, batch):
        def loss_fn(p):
            return plain_loss(p, batch)

        first, state1, loss1, _ = by_hand(first, state1, loss_fn, optimizer)
        second, state2, loss2, _ = by_hand(second, state2, loss_fn, optimizer)
        return loss1 + loss2, second, first, state2, state1

    states = [optimizer.init(params) for _ in range(2)]
    return step, (params, params, *states, BATCH)


@right
def modules_donated_to_jax_jit():
    _, (model, optimizer, batch) = steps.PLACES["nnx"]()
    train = jls.train_step(lambda model, batch: steps.nnx_loss(model, batch))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        report = train(model, optimizer, batch)
        return model, optimizer, report

    return step, (model, optimizer, batch)


@right
def lookahead_outside():
    optimizer = optax.lookahead(wrap(optax.sgd(0.1)), 2, 0.5)
    params = optax.LookaheadParams.init_synced(plain_params())

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params.fast, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (
            optax.apply_updates(params, updates),
            opt_state,
            jnp.where(loss < 9, 1, 0),
        )

    return step, (params, optimizer.init(params), BATCH)
