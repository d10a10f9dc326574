"""Wrong steps of many kinds, and the code that `jls.check_step` must find in each.

`WRONG` maps a name to a `Wrong`: what makes the step and its arguments, the code of the
mistake, and the codes that follow from it, which may be found besides. A code outside
of these is a false alarm.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import steps
from steps import BATCH, SCALER, half, mse, plain_params, wrap

import jls


class Wrong(NamedTuple):
    make: Callable[[], tuple]  # () -> (step, args) or (step, args, kwargs)
    code: str
    also: frozenset[str] = frozenset()


WRONG: dict[str, Wrong] = {}


def add(name, make, code, *also):
    if name in WRONG:
        raise ValueError(f"there are two steps called {name!r}")
    WRONG[name] = Wrong(make, code, frozenset(also))


def wrong(code, *also):
    def added(make):
        add(make.__name__, make, code, *also)
        return make

    return added


# What a NaN that gets through leaves behind, whatever let it through.
SPOILED = "nan committed", "not atomic", "never recovers"


# How the gradients are made, besides the ways of `steps`.


def never_unscaled(state, loss_fn, params, transform):
    def scaled(params):
        loss = loss_fn(params)
        return jls.scale(state, loss), loss

    (_, loss), grads = transform(scaled, has_aux=True)(params)
    return loss, grads


def scaled_loss_told(state, loss_fn, params, transform):
    scaled, grads = transform(lambda p: jls.scale(state, loss_fn(p)))(params)
    return scaled, jls.unscale(state, grads)


def unscaled_after_adjust(state, loss_fn, params, transform):
    loss, grads = never_unscaled(state, loss_fn, params, transform)
    adjusted = SCALER.adjust(state.scaler_state, jls.all_finite(grads))
    return loss, jls.unscale(adjusted, grads)


def scaled_in_the_loss(state, loss_fn, params, transform):
    """As those do who scaled by hand before."""
    return steps.right_gradients(
        state, lambda p: jls.scale(state, loss_fn(p)), params, transform
    )


def of_right(change):
    """Something done to right gradients."""

    def gradients(state, loss_fn, params, transform):
        loss, grads = steps.right_gradients(state, loss_fn, params, transform)
        return loss, jax.tree.map(change, grads)

    return gradients


def emptied(grad):
    return jnp.where(jnp.isfinite(grad), grad, 0.0)


def narrowed(grad):
    return grad.astype(jnp.float16)


def narrowed_and_back(grad):
    return grad.astype(jnp.float16).astype(jnp.float32)


GRADIENTS = {
    "jax.value_and_grad": (steps.unscaled_gradients, "not scaled"),
    "scaled by another state": (steps.foreign_gradients, "not scaled"),
    "unscaled twice": (steps.twice_unscaled, "scale leaks"),
    "scaled twice": (steps.twice_scaled, "scale leaks"),
    "scaled in the loss": (scaled_in_the_loss, "scale leaks"),
    "never unscaled": (never_unscaled, "scale leaks"),
    "scaled loss told": (scaled_loss_told, "scale leaks"),
    "clipped while scaled": (steps.clipped_while_scaled, "scale leaks"),
    "unscaled after adjust": (unscaled_after_adjust, "scale leaks"),
    "narrowed": (of_right(narrowed), "gradients narrowed"),
    "narrowed and back": (of_right(narrowed_and_back), "gradients narrowed"),
    "nan_to_num": (of_right(jnp.nan_to_num), "overflow hidden", *SPOILED),
    "emptied where not finite": (of_right(emptied), "overflow hidden", *SPOILED),
}
TOLD = {"nothing": steps.tell_nothing, "valeu=": steps.misspell}


# Each mistake in plain JAX, under each optimizer, with and without clipping inside.

INNERS = {
    "sgd": lambda: optax.sgd(1e-3),
    "adam": lambda: optax.adam(1e-3),
    "lion": lambda: optax.lion(1e-4),
    "adafactor": lambda: optax.adafactor(1e-3),
}


def clipped(make):
    return lambda: optax.chain(optax.clip_by_global_norm(30.0), make())


INNERS |= {f"clip and {name}": clipped(make) for name, make in INNERS.items()}


def sigmoid_loss(params, batch):
    """An inf in one element of its error reaches all gradients as inf, none as NaN."""
    p = half(params)
    hidden = jax.nn.sigmoid(batch["x"].astype(jnp.float16) @ p["w1"])
    return mse(hidden @ p["w2"], batch)


# One error stands out, so that its element overflows first, and alone.
OUTLIER = {**BATCH, "y": BATCH["y"].at[0, 0].set(16.0)}


def mlp(make_inner, gradients=steps.right_gradients, tell=steps.tell, wrap=wrap):
    optimizer = wrap(make_inner())

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = gradients(
            opt_state, lambda p: sigmoid_loss(p, batch), params, jax.value_and_grad
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, **tell(loss))
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return step, (params, optimizer.init(params), OUTLIER)


def clip_outside(inner):
    return optax.chain(optax.clip(10.0), wrap(inner))


def unscaled_after_update(make_inner):
    optimizer = wrap(make_inner())

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = never_unscaled(
            opt_state, lambda p: sigmoid_loss(p, batch), params, jax.value_and_grad
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        updates = jls.unscale(opt_state, updates)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return step, (params, optimizer.init(params), OUTLIER)


def flax_apply_gradients(make_inner):
    @jax.jit
    def step(state, batch):
        loss, grads = jls.value_and_grad(
            lambda params: steps.linen_loss(state, params, batch)
        )(state.opt_state, state.params)
        return state.apply_gradients(grads=grads), loss

    return step, (steps.linen_state(wrap(make_inner())), BATCH)


for inner, make_inner in INNERS.items():
    for mistake, (gradients, *codes) in GRADIENTS.items():
        make = functools.partial(mlp, make_inner, gradients=gradients)
        add(f"{mistake}, {inner}", make, *codes)
    for told, tell in TOLD.items():
        make = functools.partial(mlp, make_inner, tell=tell)
        add(f"told {told}, {inner}", make, "loss not passed")
    add(
        f"elementwise clip outside, {inner}",
        functools.partial(mlp, make_inner, wrap=clip_outside),
        "overflow hidden",
        *SPOILED,
    )
    add(
        f"weight decay outside, {inner}",
        functools.partial(mlp, make_inner, wrap=steps.decay_outside),
        "not atomic",
    )
    add(
        f"unscaled after update, {inner}",
        functools.partial(unscaled_after_update, make_inner),
        "scale leaks",
    )
    add(
        f"apply_gradients of Flax, {inner}",
        functools.partial(flax_apply_gradients, make_inner),
        "loss not passed",
    )
