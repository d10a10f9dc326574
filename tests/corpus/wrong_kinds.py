"""Wrong steps of many kinds, and the code that `jls.check_step` must find in each.

`WRONG` maps a name to a `Wrong`: what makes the step and its arguments, the code of the
mistake, the codes that follow from it, which may be found besides, and those that may
be found in its place. A code outside of these is a false alarm.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import steps
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from steps import BATCH, SCALER, half, mse, plain_params, wrap

import jls


class Wrong(NamedTuple):
    make: Callable[[], tuple]  # () -> (step, args) or (step, args, kwargs)
    code: str
    also: frozenset[str] = frozenset()
    instead: frozenset[str] = frozenset()  # codes that say the same: one is enough


WRONG: dict[str, Wrong] = {}


def add(name, make, code, *also, instead=()):
    if name in WRONG:
        raise ValueError(f"there are two steps called {name!r}")
    WRONG[name] = Wrong(make, code, frozenset(also), frozenset(instead))


def wrong(code, *also, instead=()):
    def added(make):
        add(make.__name__, make, code, *also, instead=instead)
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


def zeros_for_nonfinite(x):
    """Else an inf becomes 3.4e38, whose square a clip inside finds to be inf."""
    return jnp.nan_to_num(x, posinf=0.0, neginf=0.0)


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
    "nan_to_num": (of_right(zeros_for_nonfinite), "overflow hidden", *SPOILED),
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


def sigmoid(params, x):
    """An inf in one element of its error reaches all gradients as inf, none as NaN."""
    p = half(params)
    return jax.nn.sigmoid(x.astype(jnp.float16) @ p["w1"]) @ p["w2"]


def sigmoid_loss(params, batch):
    return mse(sigmoid(params, batch["x"]), batch)


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


# Programs of newcomers.


def four_numbers(gradients, inner, factor=1.0):
    """The commonest chain of all, on four parameters."""
    optimizer = jls.loss_scaled(inner)

    def loss_fn(p, x):
        made = x.astype(jnp.float16) @ p.astype(jnp.float16)
        return jnp.mean(made.astype(jnp.float32) ** 2) * factor

    @jax.jit
    def step(p, opt_state, x):
        loss, grads = gradients(
            opt_state, lambda p: loss_fn(p, x), p, jax.value_and_grad
        )
        updates, opt_state = optimizer.update(grads, opt_state, p, value=loss)
        return optax.apply_updates(p, updates), opt_state, loss

    p = jnp.ones(4)
    return step, (p, optimizer.init(p), jax.random.normal(jax.random.key(0), (16, 4)))


def forgotten_unscale(state, loss_fn, params, transform):
    """The scaled loss is returned and told, too."""
    return transform(lambda p: jls.scale(state, loss_fn(p)))(params)


CLIP = optax.clip_by_global_norm(1.0)

for name, inner in {
    "adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-3),
}.items():
    for mistake, gradients in {
        "unscale forgotten": forgotten_unscale,
        "true loss told": never_unscaled,
        "unscaled twice": steps.twice_unscaled,
        "clipped while scaled": steps.clipped_while_scaled,
    }.items():
        make = functools.partial(four_numbers, gradients, optax.chain(CLIP, inner))
        add(f"four numbers, {mistake}, clip and {name}", make, "scale leaks")

# Next to nothing is left of the update at the usual scale.
add(
    "small loss unscaled twice, sgd(1e3)",
    functools.partial(four_numbers, steps.twice_unscaled, optax.sgd(1e3), 1e-4),
    "scale leaks",
)


def under_a_policy(state, loss_fn, params, transform):
    """Compute and output types of a policy, applied to the gradients as well."""
    loss, grads = steps.right_gradients(state, loss_fn, params, transform)
    return loss, half(grads)


for name, inner in {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e3)}.items():
    add(
        f"gradients of a small loss in float16, {name}",
        functools.partial(four_numbers, under_a_policy, inner, 1e-6),
        "gradients narrowed",
    )


# A scaler without a wrapper.


def bare(take, scaler=SCALER):
    """`take(scaler, state, loss_fn, params)` -> loss, grads, whether to step, state."""
    inner = optax.adam(1e-2)

    @jax.jit
    def step(params, opt_state, state, batch):
        loss, grads, is_good, state = take(
            scaler, state, lambda p: sigmoid_loss(p, batch), params
        )
        updates, new_state = inner.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = jls.select(is_good, new, (params, opt_state))
        return params, opt_state, state, loss

    params = plain_params()
    return step, (params, inner.init(params), scaler.init(), BATCH)


def adjust_forgotten(scaler, state, loss_fn, params):
    loss, grads = jls.value_and_grad(loss_fn)(state, params)
    return loss, grads, jls.all_finite(grads), state


def adjust_dropped(scaler, state, loss_fn, params):
    loss, grads = jls.value_and_grad(loss_fn)(state, params)
    is_good = jls.all_finite(grads)
    scaler.adjust(state, is_good)  # and what it returns is lost
    return loss, grads, is_good, state


def adjust_before_unscale(scaler, state, loss_fn, params):
    loss, grads = never_unscaled(state, loss_fn, params, jax.value_and_grad)
    is_good = jls.all_finite(grads)
    state = scaler.adjust(state, is_good)
    return loss, jls.unscale(state, grads), is_good, state


def divided_by_the_new_scale(scaler, state, loss_fn, params):
    loss, grads = never_unscaled(state, loss_fn, params, jax.value_and_grad)
    is_good = jls.all_finite(grads)
    state = scaler.adjust(state, is_good)
    grads = jax.tree.map(lambda g: g / state.loss_scale, grads)
    return loss, grads, is_good, state


def bare_never_unscaled(scaler, state, loss_fn, params):
    loss, grads = never_unscaled(state, loss_fn, params, jax.value_and_grad)
    is_good = jls.all_finite(grads)
    return loss, grads, is_good, scaler.adjust(state, is_good)


def bare_unscaled_twice(scaler, state, loss_fn, params):
    loss, grads = jls.value_and_grad(loss_fn)(state, params)
    is_good = jls.all_finite(grads)
    return loss, jls.unscale(state, grads), is_good, scaler.adjust(state, is_good)


def bare_cleaned(scaler, state, loss_fn, params):
    loss, grads = jls.value_and_grad(loss_fn)(state, params)
    grads = jax.tree.map(jnp.nan_to_num, grads)
    is_good = jls.all_finite(grads)
    return loss, grads, is_good, scaler.adjust(state, is_good)


def bare_not_selected(scaler, state, loss_fn, params):
    loss, grads = jls.value_and_grad(loss_fn)(state, params)
    is_good = jls.all_finite(grads)
    return loss, grads, True, scaler.adjust(state, is_good)


SCALERS = {
    "dynamic": SCALER,
    "hysteresis": jls.hysteresis(2.0**10),
    "adaptive": jls.presets.mindformers_adaptive(2.0**10, 2, 20),
}
for name, scaler in SCALERS.items():
    for take in adjust_forgotten, adjust_dropped:
        make = functools.partial(bare, take, scaler)
        add(f"bare {name}, {take.__name__}", make, "scale stuck")
    for take in adjust_before_unscale, divided_by_the_new_scale:
        make = functools.partial(bare, take, scaler)
        add(f"bare {name}, {take.__name__}", make, "scale leaks")
for take in bare_never_unscaled, bare_unscaled_twice:
    add(take.__name__, functools.partial(bare, take), "scale leaks")
add(
    "bare_cleaned",
    functools.partial(bare, bare_cleaned),
    "overflow hidden",
    *SPOILED,
    instead=["nan committed"],
)
add(
    "bare_not_selected",
    functools.partial(bare, bare_not_selected),
    "nan committed",
    *SPOILED,
    "overflow hidden",
)


# A running loss beside the model: one NaN and it is NaN for ever.


def right_step(params, opt_state, batch, optimizer, **also):
    loss, grads = jls.value_and_grad(sigmoid_loss)(opt_state, params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=loss, **also)
    return optax.apply_updates(params, updates), opt_state, loss


def running_loss(declared):
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, running, batch):
        params, opt_state, loss = right_step(params, opt_state, batch, optimizer)
        return params, opt_state, 0.9 * running + 0.1 * loss, loss

    params = plain_params()
    args = params, optimizer.init(params), jnp.float32(1.0), BATCH
    return step, args, ({"carried": (0, 1, 2)} if declared else {})


add(
    "running loss, declared",
    functools.partial(running_loss, True),
    "nan committed",
    "not atomic",
)


@wrong("nan committed", "not atomic")
def running_loss_in_a_dict():
    optimizer = wrap(optax.lion(1e-3))

    @jax.jit
    def step(state, batch):
        params, opt_state, loss = right_step(
            state["params"], state["opt_state"], batch, optimizer
        )
        meters = {"loss": 0.9 * state["meters"]["loss"] + 0.1 * loss}
        return {"params": params, "opt_state": opt_state, "meters": meters}, loss

    params = plain_params()
    meters = {"loss": jnp.float32(1.0)}
    state = {"params": params, "opt_state": optimizer.init(params), "meters": meters}
    return step, (state, BATCH)


@wrong("nan committed", "not atomic")
def total_loss_in_a_train_state():
    class State(train_state.TrainState):
        total: Any

    @jax.jit
    def step(state, batch):
        loss, grads = jls.value_and_grad(
            lambda params: steps.linen_loss(state, params, batch)
        )(state.opt_state, state.params)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        new = {"params": params, "opt_state": opt_state, "total": state.total + loss}
        return state.replace(step=state.step + 1, **new), loss

    state = steps.linen_state(wrap(optax.adam(1e-2)))
    fields = {"apply_fn": state.apply_fn, "params": state.params, "tx": state.tx}
    return step, (State.create(**fields, total=jnp.float32(0.0)), BATCH)


# Something beside the trained parameters that does not move.


OF_TRAINED = {
    "jax.grad": (steps.unscaled_gradients, "not scaled"),
    "unscaled twice": (steps.twice_unscaled, "scale leaks"),
    "never unscaled": (never_unscaled, "scale leaks"),
    "scaled in the loss": (scaled_in_the_loss, "scale leaks"),
    "nan_to_num": (of_right(zeros_for_nonfinite), "overflow hidden", *SPOILED),
    "narrowed": (of_right(narrowed_and_back), "gradients narrowed"),
}


def lora(gradients, tell=steps.tell, inner=None, wrap=wrap):
    """The base comes back as it was."""
    optimizer = wrap(inner or optax.adam(1e-2))

    @jax.jit
    def step(base, low, opt_state, batch):
        def loss_fn(low):
            added = {name: low[name]["a"] @ low[name]["b"] for name in low}
            return sigmoid_loss(jax.tree.map(jnp.add, base, added), batch)

        loss, grads = gradients(opt_state, loss_fn, low, jax.value_and_grad)
        updates, opt_state = optimizer.update(grads, opt_state, low, **tell(loss))
        return base, optax.apply_updates(low, updates), opt_state, loss

    base = plain_params()
    low = {
        name: {
            "a": jax.random.normal(jax.random.key(1), (leaf.shape[0], 2)) / 2,
            "b": jnp.full((2, leaf.shape[1]), 0.1),
        }
        for name, leaf in base.items()
    }
    return step, (base, low, optimizer.init(low), OUTLIER)


def lora_of_one_shape(gradients, tell=steps.tell, inner=None, wrap=wrap):
    """The base and what is added to it look alike."""
    optimizer = wrap(inner or optax.adam(1e-2))

    @jax.jit
    def step(base, low, opt_state, batch):
        def loss_fn(low):
            return sigmoid_loss(jax.tree.map(jnp.add, base, low), batch)

        loss, grads = gradients(opt_state, loss_fn, low, jax.value_and_grad)
        updates, opt_state = optimizer.update(grads, opt_state, low, **tell(loss))
        return base, optax.apply_updates(low, updates), opt_state, loss

    base = plain_params()
    low = jax.tree.map(lambda x: jnp.full_like(x, 0.01), base)
    return step, (base, low, optimizer.init(low), OUTLIER)


def frozen_layer(gradients, tell=steps.tell, inner=None, wrap=wrap):
    """All but the last layer of an Equinox model are frozen."""
    model = eqx.nn.MLP(
        4, 2, 8, 1, activation=jax.nn.sigmoid, use_bias=False, key=jax.random.key(0)
    )
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda tree: tree.layers[-1].weight, spec, replace=True)
    optimizer = wrap(inner or optax.adam(1e-2))

    @eqx.filter_jit
    def step(model, opt_state, batch):
        trained, frozen = eqx.partition(model, spec)

        def loss_fn(trained):
            return steps.equinox_loss(eqx.combine(trained, frozen), batch)

        loss, grads = gradients(opt_state, loss_fn, trained, eqx.filter_value_and_grad)
        updates, opt_state = optimizer.update(grads, opt_state, trained, **tell(loss))
        return eqx.apply_updates(model, updates), opt_state, loss

    return step, (model, optimizer.init(eqx.filter(model, spec)), OUTLIER)


def teacher(gradients, tell=steps.tell, inner=None, wrap=wrap):
    """Distillation: the teacher is a field of the state that comes back."""
    optimizer = wrap(inner or optax.adam(1e-2))

    @jax.jit
    def step(state, batch):
        params, opt_state = state["params"], state["opt_state"]

        def loss_fn(params):
            taught = sigmoid(state["teacher"], batch["x"]).astype(jnp.float32)
            return sigmoid_loss(params, {**batch, "y": batch["y"] + taught})

        loss, grads = gradients(opt_state, loss_fn, params, jax.value_and_grad)
        updates, opt_state = optimizer.update(grads, opt_state, params, **tell(loss))
        params = optax.apply_updates(params, updates)
        return {**state, "params": params, "opt_state": opt_state}, loss

    params = plain_params()
    state = {"params": params, "opt_state": optimizer.init(params)}
    state["teacher"] = jax.tree.map(lambda x: -x, params)
    return step, (state, OUTLIER)


def copied_target(gradients, tell=steps.tell, inner=None, wrap=wrap):
    """Q-learning whose target is a copy of the parameters, made every 100 steps."""
    optimizer = wrap(inner or optax.adam(1e-2))

    @jax.jit
    def step(params, target, opt_state, count, batch):
        def loss_fn(params):
            following = sigmoid(target, batch["x"]).astype(jnp.float32)
            return sigmoid_loss(params, {**batch, "y": batch["y"] + 0.9 * following})

        loss, grads = gradients(opt_state, loss_fn, params, jax.value_and_grad)
        updates, opt_state = optimizer.update(grads, opt_state, params, **tell(loss))
        params = optax.apply_updates(params, updates)
        count = count + 1
        target = optax.periodic_update(params, target, count, 100)
        return params, target, opt_state, count, loss

    params = plain_params()
    args = params, params, optimizer.init(params), jnp.int32(0), OUTLIER
    return step, args


BESIDE = {
    "lora": lora,
    "lora of one shape": lora_of_one_shape,
    "frozen layer": frozen_layer,
    "teacher": teacher,
    "copied target": copied_target,
}
for name, program in BESIDE.items():
    for mistake, (gradients, *codes) in OF_TRAINED.items():
        add(f"{name}, {mistake}", functools.partial(program, gradients), *codes)
    right = steps.right_gradients
    for told, tell in TOLD.items():
        make = functools.partial(program, right, tell)
        add(f"{name}, told {told}", make, "loss not passed")
    make = functools.partial(program, steps.unscaled_gradients, inner=optax.sgd(0.01))
    add(f"{name}, jax.grad, sgd", make, "not scaled")
    make = functools.partial(program, steps.twice_unscaled, inner=optax.lion(1e-3))
    add(f"{name}, unscaled twice, lion", make, "scale leaks")
    make = functools.partial(program, right, wrap=steps.decay_outside)
    add(f"{name}, weight decay outside", make, "not atomic")


# Actor and critics, each with a target that follows: the form of TD3.


class Player(train_state.TrainState):
    target_params: Any


def player(seed, rows, columns, wrap=wrap):
    keys = jax.random.split(jax.random.key(seed))
    params = {
        "w1": jax.random.normal(keys[0], (rows, 8)) / 2,
        "w2": jax.random.normal(keys[1], (8, columns)) / 3,
    }
    return Player.create(
        apply_fn=sigmoid,
        params=params,
        target_params=params,
        tx=wrap(optax.adam(3e-4)),
    )


def join(*parts):
    return jnp.concatenate(parts, 1)


TRANSITIONS = {
    "observations": jax.random.normal(jax.random.key(1), (8, 3)),
    "actions": jax.random.uniform(jax.random.key(2), (8, 1)),
    "following": jax.random.normal(jax.random.key(3), (8, 3)),
    "rewards": jax.random.normal(jax.random.key(4), (8, 1)),
}


def bellman_loss(params, actor, target_params, batch):
    following = batch["following"]
    action = jnp.tanh(actor.apply_fn(actor.target_params, following))
    value = sigmoid(target_params, join(following, action)).astype(jnp.float32)
    aim = jax.lax.stop_gradient(batch["rewards"] + 0.99 * value)
    seen = join(batch["observations"], batch["actions"])
    return mse(sigmoid(params, seen), {"y": aim})


def actor_loss(params, critic, batch):
    observations = batch["observations"]
    action = jnp.tanh(sigmoid(params, observations))
    value = sigmoid(critic.params, join(observations, action))
    return -value.astype(jnp.float32).mean()


def with_loss(state, loss, grads):
    updates, opt_state = state.tx.update(
        grads, state.opt_state, state.params, value=loss
    )
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)


def without_loss(state, loss, grads):
    return state.apply_gradients(grads=grads)


def update_critics(gradients, commit):
    @jax.jit
    def step(actor, one, two, batch):
        made = []
        for critic, how in zip((one, two), gradients, strict=True):

            def loss_fn(params, target_params=critic.target_params):
                return bellman_loss(params, actor, target_params, batch)

            loss, grads = how(
                critic.opt_state, loss_fn, critic.params, jax.value_and_grad
            )
            made.append(commit(critic, loss, grads))
        return actor, *made, loss

    return step, (player(0, 3, 1), player(1, 4, 1), player(2, 4, 1), TRANSITIONS)


def update_actor(gradients, commit):
    """Targets follow, as they should, on a skip too or not."""

    def follow(state):
        target = optax.incremental_update(state.params, state.target_params, 0.005)
        return state.replace(target_params=target)

    @jax.jit
    def step(actor, critic, batch):
        loss, grads = gradients(
            actor.opt_state,
            lambda params: actor_loss(params, critic, batch),
            actor.params,
            jax.value_and_grad,
        )
        return follow(commit(actor, loss, grads)), follow(critic), loss

    return step, (player(0, 3, 1), player(1, 4, 1), TRANSITIONS)


RIGHT = steps.right_gradients
BARE = steps.unscaled_gradients

# With nothing but `tx` wrapped both must be found, each in a row of its own.
only_tx = functools.partial(update_critics, (BARE, BARE), without_loss)
add("critics, only tx wrapped: scale", only_tx, "not scaled", "loss not passed")
add("critics, only tx wrapped: loss", only_tx, "loss not passed", "not scaled")
make = functools.partial(update_critics, (RIGHT, RIGHT), without_loss)
add("critics, apply_gradients", make, "loss not passed")
for mistake, (gradients, *codes) in OF_TRAINED.items():
    make = functools.partial(update_critics, (RIGHT, gradients), with_loss)
    add(f"critics, {mistake} in the second", make, *codes)
    make = functools.partial(update_critics, (gradients, gradients), with_loss)
    add(f"critics, {mistake} in both", make, *codes)
    make = functools.partial(update_actor, gradients, with_loss)
    add(f"actor, {mistake}", make, *codes, "not atomic")
only_tx = functools.partial(update_actor, BARE, without_loss)
rest = "not scaled", "loss not passed", "not atomic"
add("actor, only tx wrapped: scale", only_tx, *rest)
add("actor, only tx wrapped: loss", only_tx, "loss not passed", *rest)


# Two networks against each other.


def gan(
    gradients=(RIGHT, RIGHT),
    tell=(steps.tell, steps.tell),
    wrap=(wrap, wrap),
    scales=(0, 1),
    inner=None,
):
    """Of each pair the first is the generator's, the second the discriminator's."""
    one, two = (wrap(inner or optax.adam(1e-3)) for wrap in wrap)

    def g_loss(g, d, z, real):
        score = sigmoid(d, sigmoid(g, z)).astype(jnp.float32)
        return jnp.mean(jax.nn.softplus(-score))

    def d_loss(d, g, z, real):
        fake = sigmoid(d, sigmoid(g, z)).astype(jnp.float32)
        score = sigmoid(d, real).astype(jnp.float32)
        return jnp.mean(jax.nn.softplus(fake)) + jnp.mean(jax.nn.softplus(-score))

    @jax.jit
    def step(g, d, g_state, d_state, z, real):
        states = g_state, d_state
        loss_g, grads_g = gradients[0](
            states[scales[0]], lambda g: g_loss(g, d, z, real), g, jax.value_and_grad
        )
        loss_d, grads_d = gradients[1](
            states[scales[1]], lambda d: d_loss(d, g, z, real), d, jax.value_and_grad
        )
        updates_g, g_state = one.update(grads_g, g_state, g, **tell[0](loss_g))
        updates_d, d_state = two.update(grads_d, d_state, d, **tell[1](loss_d))
        new = optax.apply_updates(g, updates_g), optax.apply_updates(d, updates_d)
        return *new, g_state, d_state, loss_g, loss_d

    g, d = player(3, 3, 5).params, player(4, 5, 1).params
    z = jax.random.normal(jax.random.key(5), (8, 3))
    real = jax.random.normal(jax.random.key(6), (8, 5))
    return step, (g, d, one.init(g), two.init(d), z, real)


for which, of in enumerate(("generator", "discriminator")):

    def pair(right, planted, which=which):
        return (planted, right) if which == 0 else (right, planted)

    for told, tell in TOLD.items():
        make = functools.partial(gan, tell=pair(steps.tell, tell))
        add(f"{of} told {told}", make, "loss not passed")
    make = functools.partial(gan, wrap=pair(wrap, steps.decay_outside))
    add(f"weight decay outside in the {of}", make, "not atomic")
    for mistake, (gradients, *codes) in OF_TRAINED.items():
        make = functools.partial(gan, gradients=pair(RIGHT, gradients))
        add(f"{of}, {mistake}", make, *codes)
    make = functools.partial(gan, scales=((1, 1), (0, 0))[which])
    add(f"{of} scaled by the other's state", make, "not scaled")

add("two states swapped", functools.partial(gan, scales=(1, 0)), "not scaled")
add(
    "two states swapped, sgd",
    functools.partial(gan, scales=(1, 0), inner=optax.sgd(0.01)),
    "not scaled",
)
add(
    "two states swapped, clip and lion",
    functools.partial(gan, scales=(1, 0), inner=optax.chain(CLIP, optax.lion(1e-3))),
    "not scaled",
)
tell_neither = functools.partial(gan, tell=(steps.tell_nothing,) * 2)
add("neither network's loss is told", tell_neither, "loss not passed")


# No loss comes back, or under a name of its own.


def returning(outputs, **mistake):
    step, args = mlp(lambda: optax.adam(1e-3), **mistake)
    return jax.jit(lambda *args: outputs(*step(*args))), args


def no_loss(params, opt_state, loss):
    return params, opt_state


def loss_in_a_dict(params, opt_state, loss):
    return params, opt_state, {"l": loss}


def its_root(params, opt_state, loss):
    return params, opt_state, {"rmse": jnp.sqrt(loss), "lr": jnp.float32(1e-3)}


for outputs in no_loss, loss_in_a_dict, its_root:
    for told, tell in TOLD.items():
        make = functools.partial(returning, outputs, tell=tell)
        add(f"{outputs.__name__}, told {told}", make, "loss not passed")
    for mistake, (gradients, *codes) in OF_TRAINED.items():
        make = functools.partial(returning, outputs, gradients=gradients)
        add(f"{outputs.__name__}, {mistake}", make, *codes)


@wrong("loss not passed")
def nothing_but_the_train_state_comes_back():
    step, args = flax_apply_gradients(lambda: optax.sgd(0.01))
    return jax.jit(lambda *args: step(*args)[0]), args


@wrong("loss not passed")
def nnx_step_that_returns_nothing():
    step, args = steps.nnx_step(tell=steps.tell_nothing)

    @nnx.jit
    def quiet(model, optimizer, batch):
        step(model, optimizer, batch)

    return quiet, args


def tell_a_constant(loss):
    return {"value": jnp.float32(0.0)}


add(
    "told a constant",
    functools.partial(mlp, lambda: optax.adam(1e-3), tell=tell_a_constant),
    "loss not passed",
)


# A small model in float32: what Adam and its like hide.


def in_float32(gradients, inner):
    optimizer = jls.loss_scaled(inner)

    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)

    @jax.jit
    def step(params, opt_state, x):
        loss, grads = gradients(
            opt_state, lambda p: loss_fn(p, x), params, jax.value_and_grad
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"w": jnp.ones((4, 8)) / 4, "v": jnp.ones((8, 1)) / 8}
    return step, (params, optimizer.init(params), BATCH["x"])


for name, inner in {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3),
}.items():
    for mistake, gradients in {
        "scaled in the loss": scaled_in_the_loss,
        "scaled twice": steps.twice_scaled,
        "never unscaled": never_unscaled,
        "unscale forgotten": forgotten_unscale,
    }.items():
        make = functools.partial(in_float32, gradients, inner)
        add(f"float32, {mistake}, {name}", make, "scale leaks")
        make = functools.partial(in_float32, gradients, optax.chain(CLIP, inner))
        add(f"float32, {mistake}, clip and {name}", make, "scale leaks")


# What one NaN spoils for ever.


def size_of(grads):
    return jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))


def divided_by_a_running_norm(shape, how):
    """The gradients are divided by a running norm, which a skip does not restore."""
    optimizer = wrap(optax.adam(1e-2))

    def train(params, opt_state, norm, batch):
        loss, grads = jls.value_and_grad(sigmoid_loss)(opt_state, params, batch)
        norm = 0.9 * norm + 0.1 * size_of(grads)
        grads = jax.tree.map(lambda g: g / (1e-3 + norm.mean()), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, norm, loss

    @jax.jit
    def of_dict(state, batch):
        *new, loss = train(*(state[name] for name in names), batch)
        return dict(zip(names, new, strict=True)), loss

    names = "params", "opt_state", "norm"
    params = plain_params()
    carried = params, optimizer.init(params), jnp.ones(shape)
    if how == "in a dict":
        return of_dict, (dict(zip(names, carried, strict=True)), BATCH)
    return jax.jit(train), (*carried, BATCH), {"carried": (0, 1, 2)}


def recurrent(how):
    """The hidden state goes on after a NaN."""
    optimizer = wrap(optax.adam(1e-2))

    def loss_fn(params, hidden, x, y):
        p = half(params)

        def cell(hidden, x):
            hidden = jnp.tanh(x.astype(jnp.float16) @ p["in"] + hidden @ p["over"])
            return hidden, hidden @ p["out"]

        hidden, made = jax.lax.scan(cell, hidden.astype(jnp.float16), x)
        return mse(made, {"y": y}), hidden.astype(jnp.float32)

    def train(params, opt_state, hidden, x, y):
        (loss, hidden), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params, hidden, x, y
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, hidden, loss

    @jax.jit
    def of_dict(state, x, y):
        *new, loss = train(*(state[name] for name in names), x, y)
        return dict(zip(names, new, strict=True)), loss

    names = "params", "opt_state", "hidden"
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"in": (4, 6), "over": (6, 6), "out": (6, 2)}
    params = {
        name: jax.random.normal(key, shape) / 3
        for key, (name, shape) in zip(keys[:3], shapes.items(), strict=True)
    }
    x = jax.random.normal(keys[3], (5, 2, 4))
    y = jax.random.normal(keys[4], (5, 2, 2))
    carried = params, optimizer.init(params), jnp.zeros((2, 6))
    if how == "in a dict":
        return of_dict, (dict(zip(names, carried, strict=True)), x, y)
    return jax.jit(train), (*carried, x, y), {"carried": (0, 1, 2)}


for how in "declared", "in a dict":
    for shape in (), (2,):
        make = functools.partial(divided_by_a_running_norm, shape, how)
        add(f"running norm of shape {shape}, {how}", make, "never recovers", *SPOILED)
    make = functools.partial(recurrent, how)
    add(f"hidden state, {how}", make, "never recovers", *SPOILED)


# A policy that skips spikes, and what undoes it.


def spiking(forget, inner=None):
    policy = jls.spikes()
    optimizer = jls.loss_scaled(inner or optax.adam(1e-3), SCALER, spikes=policy)

    @jax.jit
    def step(params, opt_state, batch):
        old = forget(opt_state, policy) if forget is forgotten_before else opt_state
        loss, grads = jls.value_and_grad(sigmoid_loss)(old, params, batch)
        updates, new = optimizer.update(grads, old, params, value=loss)
        if forget is not forgotten_before:
            new = forget(opt_state, new)
        return optax.apply_updates(params, updates), new, loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


def forgotten_before(old, policy):
    return old._replace(spike_state=policy.init())


def old_one_kept(old, new):
    return new._replace(spike_state=old.spike_state)


for name, inner in {
    "adam": optax.adam(1e-3),
    "clip and sgd": optax.chain(CLIP, optax.sgd(1e-3)),
}.items():
    for forget in forgotten_before, old_one_kept:
        make = functools.partial(spiking, forget, inner)
        add(f"spike state {forget.__name__}, {name}", make, "spike not skipped")


# The same mistakes in programs of other forms.


def train(optimizer, gradients, tell=steps.tell, loss_fn=sigmoid_loss):
    def step(params, opt_state, batch):
        loss, grads = gradients(
            opt_state, lambda p: loss_fn(p, batch), params, jax.value_and_grad
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, **tell(loss))
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def start(optimizer):
    params = plain_params()
    return params, optimizer.init(params)


def scan_of_steps(gradients, tell=steps.tell, wrap=wrap):
    optimizer = wrap(optax.adam(1e-3))
    step = train(optimizer, gradients, tell)

    @jax.jit
    def many(params, opt_state, batches):
        def body(carried, batch):
            *carried, loss = step(*carried, batch)
            return tuple(carried), loss

        carried, losses = jax.lax.scan(body, (params, opt_state), batches)
        return *carried, losses

    batches = jax.tree.map(lambda x: jnp.stack([x, x[::-1], x]), OUTLIER)
    return many, (*start(optimizer), batches)


def loop_of_steps(gradients, tell=steps.tell, wrap=wrap):
    optimizer = wrap(optax.chain(CLIP, optax.lion(1e-3)))
    step = train(optimizer, gradients, tell)

    @jax.jit
    def many(state, batch):
        def body(_, state):
            *new, loss = step(state["params"], state["opt_state"], batch)
            return {
                **dict(zip(("params", "opt_state"), new, strict=True)),
                "loss": loss,
            }

        return jax.lax.fori_loop(0, 2, body, state)

    params, opt_state = start(optimizer)
    state = {"params": params, "opt_state": opt_state, "loss": jnp.float32(0.0)}
    return many, (state, OUTLIER), {"carried": {0: ["params", "opt_state"]}}


def update_every_other_call(gradients, tell=steps.tell, wrap=wrap):
    optimizer = wrap(optax.adam(1e-3))
    step = train(optimizer, gradients, tell)

    @jax.jit
    def now_and_then(params, opt_state, count, batch):
        def keep(params, opt_state, batch):
            return params, opt_state, sigmoid_loss(params, batch)

        params, opt_state, loss = jax.lax.cond(
            count % 2 == 0, step, keep, params, opt_state, batch
        )
        return params, opt_state, count + 1, loss

    return now_and_then, (*start(optimizer), jnp.int32(0), OUTLIER)


def update_in_cond(gradients, tell=steps.tell, wrap=wrap):
    """The update alone is inside, and asks whether the loss is finite once more."""
    optimizer = wrap(optax.adafactor(1e-3))

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = gradients(
            opt_state, lambda p: sigmoid_loss(p, batch), params, jax.value_and_grad
        )

        def update(grads, opt_state, params):
            updates, opt_state = optimizer.update(
                grads, opt_state, params, **tell(loss)
            )
            return optax.apply_updates(params, updates), opt_state

        def keep(grads, opt_state, params):
            return params, opt_state

        params, opt_state = jax.lax.cond(
            jnp.isfinite(loss), update, keep, grads, opt_state, params
        )
        return params, opt_state, loss

    return step, (*start(optimizer), OUTLIER)


def ensemble(gradients, tell=steps.tell, wrap=wrap):
    optimizer = wrap(optax.adam(1e-3))
    step = jax.jit(jax.vmap(train(optimizer, gradients, tell), in_axes=(0, 0, None)))
    params = jax.tree.map(lambda x: jnp.stack([x, -x]), plain_params())
    return step, (params, jax.vmap(optimizer.init)(params), OUTLIER)


def micro_batches(gradients, tell=steps.tell, wrap=wrap, dtype=jnp.float32):
    optimizer = wrap(optax.adam(1e-3))

    @jax.jit
    def step(params, opt_state, batch):
        def body(total, part):
            made = gradients(
                opt_state, lambda p: sigmoid_loss(p, part), params, jax.value_and_grad
            )
            made = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, made)
            return made, None

        parts = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), params)
        (loss, grads), _ = jax.lax.scan(body, (jnp.float32(0.0), zeros), parts)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, **tell(loss / 2)
        )
        return optax.apply_updates(params, updates), opt_state, loss / 2

    return step, (*start(optimizer), OUTLIER)


class Run(NamedTuple):
    opt_state: Any
    params: Any
    steps: Any


def named_tuple_by_keyword(gradients, tell=steps.tell, wrap=wrap):
    optimizer = wrap(optax.adam(1e-3))
    step = train(optimizer, gradients, tell)

    @jax.jit
    def of_run(*, batch, run):
        params, opt_state, loss = step(run.params, run.opt_state, batch)
        return {"mse": loss}, Run(opt_state, params, run.steps + 1)

    params, opt_state = start(optimizer)
    return of_run, (), {"batch": OUTLIER, "run": Run(opt_state, params, jnp.int32(0))}


def recomputed(gradients, tell=steps.tell, wrap=wrap):
    optimizer = wrap(optax.sgd(1e-3, momentum=0.9))
    step = train(optimizer, gradients, tell, jax.checkpoint(sigmoid_loss))
    return jax.jit(step), (*start(optimizer), OUTLIER)


def batch_first(gradients, tell=steps.tell, wrap=wrap):
    optimizer = wrap(optax.adamw(1e-3))
    step = train(optimizer, gradients, tell)

    @jax.jit
    def reordered(x, y, opt_state, params):
        params, opt_state, loss = step(params, opt_state, {"x": x, "y": y})
        return loss, opt_state, sigmoid(params, x), params

    params, opt_state = start(optimizer)
    return reordered, (OUTLIER["x"], OUTLIER["y"], opt_state, params)


def eager(gradients, tell=steps.tell, wrap=wrap):
    optimizer = wrap(optax.sgd(1e-3))
    return train(optimizer, gradients, tell), (*start(optimizer), OUTLIER)


def haiku(gradients, tell=steps.tell, wrap=wrap):
    def forward(x):
        return hk.Linear(2)(jax.nn.sigmoid(hk.Linear(8, with_bias=False)(x)))

    model = hk.without_apply_rng(hk.transform(forward))
    optimizer = wrap(optax.adam(1e-3))

    def loss_fn(params, batch):
        return mse(model.apply(half(params), batch["x"].astype(jnp.float16)), batch)

    step = jax.jit(train(optimizer, gradients, tell, loss_fn))
    params = model.init(jax.random.key(0), BATCH["x"])
    return step, (params, optimizer.init(params), OUTLIER)


FORMS = {
    "scan of steps": scan_of_steps,
    "loop of steps": loop_of_steps,
    "every other call": update_every_other_call,
    "update in cond": update_in_cond,
    "ensemble": ensemble,
    "micro-batches": micro_batches,
    "named tuple": named_tuple_by_keyword,
    "recomputed": recomputed,
    "batch first": batch_first,
    "eager": eager,
    "haiku": haiku,
}
for name, form in FORMS.items():
    for mistake, (gradients, *codes) in OF_TRAINED.items():
        add(f"{name}, {mistake}", functools.partial(form, gradients), *codes)
    # Where the update asks for the loss itself, it need not be told.
    for told, tell in TOLD.items() if form is not update_in_cond else ():
        make = functools.partial(form, RIGHT, tell)
        add(f"{name}, told {told}", make, "loss not passed")
    make = functools.partial(form, RIGHT, wrap=steps.decay_outside)
    add(f"{name}, weight decay outside", make, "not atomic")

add(
    "micro-batches summed in float16",
    functools.partial(micro_batches, RIGHT, dtype=jnp.float16),
    "gradients narrowed",
)


# Libraries, with an inner optimizer that hides what it can.

for name, program in steps.PLACES.items():
    if name == "plain":
        continue
    inner = optax.chain(CLIP, optax.lion(1e-3))
    for mistake, (gradients, *codes) in GRADIENTS.items():
        # There is no scaler's state to adjust in an `nnx.Optimizer`.
        if not (name == "nnx" and mistake == "unscaled after adjust"):
            make = functools.partial(program, gradients, inner=inner)
            add(f"{name}, {mistake}", make, *codes)
    for told, tell in TOLD.items():
        make = functools.partial(program, tell=tell, inner=inner)
        add(f"{name}, told {told}", make, "loss not passed")
    make = functools.partial(program, inner=inner, wrap=steps.decay_outside)
    add(f"{name}, weight decay outside", make, "not atomic")


# What is done to gradients while they are scaled, and how else they are unscaled.


def while_scaled(change):
    def gradients(state, loss_fn, params, transform):
        loss, grads = never_unscaled(state, loss_fn, params, transform)
        return loss, jls.unscale(state, change(grads, params))

    return gradients


def decayed(grads, params):
    return jax.tree.map(lambda g, p: g + 1e-2 * p, grads, params)


def shaken(grads, params):
    key = jax.random.key(0)
    return jax.tree.map(lambda g: g + 0.1 * jax.random.normal(key, g.shape), grads)


def normalized(grads, params):
    size = size_of(grads) + 1e-6
    return jax.tree.map(lambda g: g / size, grads)


def signs(grads, params):
    return jax.tree.map(jnp.sign, grads)


def clipped_by_value(grads, params):
    return jax.tree.map(lambda g: jnp.clip(g, -1.0, 1.0), grads)


def clipped_by_unit(grads, params):
    clip = optax.adaptive_grad_clip(0.1)
    return clip.update(grads, clip.init(params), params)[0]


def squashed(grads, params):
    return jax.tree.map(jnp.tanh, grads)


WHILE_SCALED = decayed, shaken, normalized, signs, clipped_by_value, clipped_by_unit


def by_another(unscale):
    def gradients(state, loss_fn, params, transform):
        loss, grads = never_unscaled(state, loss_fn, params, transform)
        return loss, jax.tree.map(lambda g: unscale(g, jls.loss_scale(state)), grads)

    return gradients


UNSCALED_BY = {
    "a constant": lambda g, scale: g / 1024.0,
    "multiplying": lambda g, scale: g * scale,
    "the root": lambda g, scale: g / jnp.sqrt(scale),
    "twice the scale and one": lambda g, scale: g / (2.0 * scale + 1.0),
    "the logarithm": lambda g, scale: g / jnp.log2(scale),
}


def twice_by_hand(state, loss_fn, params, transform):
    def scaled(params):
        loss = loss_fn(params)
        return jls.loss_scale(state) * jls.scale(state, loss), loss

    (_, loss), grads = transform(scaled, has_aux=True)(params)
    return loss, jls.unscale(state, grads)


def by_a_constant(state, loss_fn, params, transform):
    def scaled(params):
        loss = loss_fn(params)
        return 1024.0 * loss, loss

    (_, loss), grads = transform(scaled, has_aux=True)(params)
    return loss, jax.tree.map(lambda g: g / 1024.0, grads)


def with_a_second_loss(state, loss_fn, params, transform):
    """The gradients of a penalty are added to those that are scaled still."""
    loss, grads = never_unscaled(state, loss_fn, params, transform)
    penalty = jax.grad(lambda p: 1e-3 * size_of(p) ** 2)(params)
    return loss, jls.unscale(state, jax.tree.map(jnp.add, grads, penalty))


def half_of_them(state, loss_fn, params, transform):
    """One layer by jax.grad, the other by jls."""

    def of_first(w1):
        return loss_fn({**params, "w1": w1})

    def of_second(w2):
        return loss_fn({**params, "w2": w2})

    loss, first = jax.value_and_grad(of_first)(params["w1"])
    return loss, {"w1": first, "w2": jls.grad(of_second)(state, params["w2"])}


def two_workers(state, loss_fn, params, transform):
    """What they send each other is float16."""
    loss, grads = steps.right_gradients(state, loss_fn, params, transform)
    sent = half(jax.tree.map(lambda g: jnp.stack([0.5 * g, 0.5 * g]), grads))
    return loss, jax.tree.map(lambda g: g.sum(0).astype(jnp.float32), sent)


def workers_in_vmap(state, loss_fn, params, transform):
    def worker(part):
        loss, grads = steps.right_gradients(
            state, lambda p: part * loss_fn(p), params, transform
        )
        total = jax.lax.psum(half(grads), "workers")
        return jax.lax.psum(loss, "workers"), total

    shares = jnp.array([0.5, 0.5])
    loss, grads = jax.vmap(worker, axis_name="workers")(shares)
    return loss[0], jax.tree.map(lambda g: g[0].astype(jnp.float32), grads)


def of_adam(name, gradients, code, *also):
    """Under Adam, where little is seen from outside, and under SGD, clipped."""
    make = functools.partial(mlp, lambda: optax.adam(1e-3), gradients)
    add(f"{name}, under adam", make, code, *also)
    inner = clipped(lambda: optax.sgd(1e-3))
    add(
        f"{name}, under sgd and clip",
        functools.partial(mlp, inner, gradients),
        code,
        *also,
    )


for change in WHILE_SCALED:
    of_adam(
        f"{change.__name__} while scaled",
        while_scaled(change),
        "scale leaks",
        "overflow hidden",
        *SPOILED,
    )
of_adam(
    "squashed while scaled",
    while_scaled(squashed),
    "scale leaks",
    *OF_TRAINED["nan_to_num"][1:],
)
for name, unscale in UNSCALED_BY.items():
    of_adam(f"unscaled by {name}", by_another(unscale), "scale leaks")
of_adam("scaled twice by hand", twice_by_hand, "scale leaks")
of_adam("a second loss while scaled", with_a_second_loss, "scale leaks")
of_adam("scaled by a constant", by_a_constant, "not scaled")
of_adam("two workers that send float16", two_workers, "gradients narrowed")
of_adam("workers in vmap that send float16", workers_in_vmap, "gradients narrowed")

# A clip by the norm over all leaves makes each depend on the scale.
for name in "adam", "sgd", "lion":
    make = functools.partial(mlp, INNERS[name], half_of_them)
    add(f"half of the parameters by jax.grad, {name}", make, "not scaled")


@jax.custom_vjp
def bounded(x):
    return x


def bounded_backward(_, ct):
    return (jnp.clip(ct, -1.0, 1.0),)


bounded.defvjp(lambda x: (x, None), bounded_backward)


@wrong("scale leaks", "overflow hidden", *SPOILED)
def layer_that_clamps_its_gradient():
    def loss_fn(params, batch):
        p = half(params)
        hidden = jax.nn.sigmoid(batch["x"].astype(jnp.float16) @ p["w1"])
        return mse(bounded(hidden) @ p["w2"], batch)

    optimizer = wrap(optax.adam(1e-3))
    step = jax.jit(train(optimizer, RIGHT, loss_fn=loss_fn))
    return step, (*start(optimizer), OUTLIER)


@wrong("scale leaks", "overflow hidden", *SPOILED)
def prediction_whose_gradient_is_clamped():
    def loss_fn(params, batch):
        return mse(bounded(sigmoid(params, batch["x"])), batch)

    optimizer = wrap(optax.sgd(1e-3))
    step = jax.jit(train(optimizer, RIGHT, loss_fn=loss_fn))
    return step, (*start(optimizer), OUTLIER)


# The state that scaled is not the one that is carried.


@wrong("not scaled")
def state_of_a_closure():
    optimizer = wrap(optax.adam(1e-3))
    params, first = start(optimizer)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(sigmoid_loss)(first, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, first, OUTLIER)


# Statistics of a batch that a skip does not take back.

STATISTICS = "nan committed", "not atomic"


@wrong(*STATISTICS)
def linen_statistics():
    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, dtype=jnp.float16)(x)
            x = nn.BatchNorm(use_running_average=False, dtype=jnp.float16)(x)
            return nn.Dense(2, dtype=jnp.float16)(nn.gelu(x))

    class State(train_state.TrainState):
        batch_stats: Any

    @jax.jit
    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            made, new = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return mse(made, batch), new["batch_stats"]

        (loss, batch_stats), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            state.opt_state, state.params
        )
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        return state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            batch_stats=batch_stats,
        ), loss

    model = Normalized()
    variables = model.init(jax.random.key(0), BATCH["x"])
    tx = wrap(optax.chain(CLIP, optax.sgd(0.01)))
    return step, (State.create(apply_fn=model.apply, tx=tx, **variables), BATCH)


@wrong(*STATISTICS)
def nnx_statistics():
    class Normalized(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.last = nnx.Linear(4, 2, dtype=jnp.float16, rngs=rngs)

        def __call__(self, x):
            return self.last(self.norm(x))

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = jls.value_and_grad(
            lambda model: steps.nnx_loss(model, batch), transform=nnx.value_and_grad
        )(optimizer, model)
        optimizer.update(model, grads, value=loss)
        return loss

    model = Normalized(nnx.Rngs(0))
    tx = wrap(optax.lion(1e-3))
    return step, (model, nnx.Optimizer(model, tx, wrt=nnx.Param), BATCH)


@wrong(*STATISTICS)
def haiku_statistics():
    def forward(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training=True)
        return hk.Linear(2)(jnp.tanh(x))

    model = hk.without_apply_rng(hk.transform_with_state(forward))
    optimizer = wrap(optax.adamw(1e-3))

    @jax.jit
    def step(params, state, opt_state, batch):
        def loss_fn(params):
            made, new = model.apply(params, state, batch["x"])
            return mse(made, batch), new

        (loss, state), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), state, opt_state, loss

    params, state = model.init(jax.random.key(0), BATCH["x"])
    return step, (params, state, optimizer.init(params), BATCH)


@wrong(*STATISTICS, "never recovers")
def equinox_statistics():
    class Normalized(eqx.Module):
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear

        def __init__(self):
            self.norm = eqx.nn.BatchNorm(4, "batch", mode="ema")
            self.last = eqx.nn.Linear(4, 2, key=jax.random.key(0))

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            return self.last(x), state

    optimizer = wrap(optax.adam(1e-3))

    def loss_fn(model, state, batch):
        made, state = jax.vmap(
            model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )(batch["x"], state)
        return mse(made, batch), state

    @eqx.filter_jit
    def step(model, state, opt_state, batch):
        (loss, state), grads = jls.value_and_grad(
            loss_fn, has_aux=True, transform=eqx.filter_value_and_grad
        )(opt_state, model, state, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    model, state = eqx.nn.make_with_state(Normalized)()
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, state, opt_state, BATCH)


# What the loss or the gradients depend on, averaged over steps.


def average(old, new):
    return jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, old, new)


class Average(NamedTuple):
    """`of(params, batch, grads, loss)` is what is averaged."""

    start: Any
    loss: Callable
    of: Callable
    grads: Callable = lambda new, grads: grads


def loss_as_it_is(old, params, batch):
    return sigmoid_loss(params, batch)


def loss_of_normalized(old, params, batch):
    return sigmoid_loss(params, {**batch, "x": batch["x"] - old["mean"]})


def loss_around_a_center(old, params, batch):
    made = sigmoid(params, batch["x"]).astype(jnp.float32)
    return mse(made - old["center"], batch)


def loss_with_a_baseline(old, params, batch):
    made = sigmoid(params, batch["x"]).astype(jnp.float32)
    advantage = batch["y"] - old["baseline"]
    return -jnp.mean(jax.nn.log_softmax(made) * advantage)


def loss_in_its_own_units(old, params, batch):
    return sigmoid_loss(params, batch) / (1e-3 + old["loss"])


def loss_of_codes(old, params, batch):
    made = sigmoid(params, batch["x"]).astype(jnp.float32)
    chosen = nearest(old["codes"], made) @ old["codes"]
    return mse(made, batch) + 0.1 * jnp.mean((made - chosen) ** 2)


def nearest(codes, made):
    distance = jnp.sum((made[:, None] - codes) ** 2, -1)
    return jax.nn.one_hot(distance.argmin(-1), len(codes))


def codes_of(params, batch, grads, loss):
    made = sigmoid(params, batch["x"]).astype(jnp.float32)
    codes = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    return {"codes": nearest(codes, made).T @ made / len(made)}


def like_params():
    return jax.tree.map(jnp.zeros_like, plain_params())


AVERAGES = {
    "mean of the observations": Average(
        {"mean": jnp.zeros(4)},
        loss_of_normalized,
        lambda params, batch, grads, loss: {"mean": batch["x"].mean(0)},
    ),
    "center of the predictions": Average(
        {"center": jnp.zeros(2)},
        loss_around_a_center,
        lambda params, batch, grads, loss: {
            "center": sigmoid(params, batch["x"]).astype(jnp.float32).mean(0)
        },
    ),
    "baseline of the rewards": Average(
        {"baseline": jnp.float32(0.0)},
        loss_with_a_baseline,
        lambda params, batch, grads, loss: {"baseline": batch["y"].mean()},
    ),
    "unit of the loss": Average(
        {"loss": jnp.float32(1.0)},
        loss_in_its_own_units,
        lambda params, batch, grads, loss: {"loss": loss},
    ),
    "codebook": Average({"codes": jnp.eye(3, 2)}, loss_of_codes, codes_of),
    "momentum by hand": Average(
        like_params(),
        loss_as_it_is,
        lambda params, batch, grads, loss: grads,
        lambda new, grads: new,
    ),
    "variance by hand": Average(
        like_params(),
        loss_as_it_is,
        lambda params, batch, grads, loss: jax.tree.map(jnp.square, grads),
        lambda new, grads: jax.tree.map(
            lambda v, g: g / (1e-6 + jnp.sqrt(v)), new, grads
        ),
    ),
}


def averaged(kind, in_a_dict, inner=None):
    optimizer = wrap(inner or optax.adam(1e-3))

    def step(params, opt_state, old, batch):
        loss, grads = jls.value_and_grad(functools.partial(kind.loss, old))(
            opt_state, params, batch
        )
        new = average(old, kind.of(params, batch, grads, loss))
        grads = kind.grads(new, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, new, loss

    @jax.jit
    def of_dict(state, batch):
        *new, loss = step(*(state[name] for name in names), batch)
        return dict(zip(names, new, strict=True)), {"loss": loss}

    names = "params", "opt_state", "average"
    carried = *start(optimizer), kind.start
    if in_a_dict:
        return of_dict, (dict(zip(names, carried, strict=True)), BATCH)
    return jax.jit(step), (*carried, BATCH)


for name, kind in AVERAGES.items():
    for in_a_dict in True, False:
        make = functools.partial(averaged, kind, in_a_dict)
        where = "in a dict" if in_a_dict else "alone"
        add(f"{name}, {where}", make, "never recovers", *SPOILED)
    make = functools.partial(averaged, kind, True, optax.sgd(1e-2))
    add(f"{name}, in a dict, sgd", make, "never recovers", *SPOILED)


# Accumulation by hand, over calls.


def accumulated(gradients, empty, unscale=lambda state, grads: grads):
    optimizer = wrap(optax.adam(1e-3))

    @jax.jit
    def step(state, batch):
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = gradients(
            opt_state, lambda p: sigmoid_loss(p, batch), params, jax.value_and_grad
        )
        total = jax.tree.map(jnp.add, state["total"], grads)
        is_last = (state["count"] + 1) % 2 == 0

        def update(total, opt_state, params):
            mean = jax.tree.map(lambda g: g / 2, unscale(opt_state, total))
            updates, opt_state = optimizer.update(mean, opt_state, params, value=loss)
            return optax.apply_updates(params, updates), opt_state

        def keep(total, opt_state, params):
            return params, opt_state

        params, opt_state = jax.lax.cond(
            is_last, update, keep, total, opt_state, params
        )
        total = jax.tree.map(lambda g: empty(g, is_last), total)
        new = {"params": params, "opt_state": opt_state, "total": total}
        return {**new, "count": state["count"] + 1}, loss

    params, opt_state = start(optimizer)
    state = {"params": params, "opt_state": opt_state, "total": like_params()}
    return step, ({**state, "count": jnp.int32(0)}, BATCH)


def by_product(total, is_last):
    return total * (1.0 - is_last)


def by_where(total, is_last):
    return jnp.where(is_last, 0.0, total)


add(
    "accumulated, emptied by a product",
    functools.partial(accumulated, RIGHT, by_product),
    "never recovers",
    *SPOILED,
)
for empty in by_product, by_where:
    make = functools.partial(accumulated, never_unscaled, empty, jls.unscale)
    add(f"accumulated scaled, {empty.__name__}", make, "scale leaks", *SPOILED)
make = functools.partial(accumulated, never_unscaled, by_where)
add("accumulated, never unscaled", make, "scale leaks", *SPOILED)
make = functools.partial(accumulated, BARE, by_where)
add("accumulated, jax.grad", make, "not scaled", *SPOILED)


# `jls.value_and_grad` refuses a wrapper inside `optax.MultiSteps`; other ways do not.


def accumulating_outside(gradients):
    def outside(inner):
        return optax.MultiSteps(wrap(inner), 2).gradient_transformation()

    return mlp(lambda: optax.lion(1e-3), gradients, wrap=outside)


def scaled_by_hand(state, loss_fn, params, transform):
    loss, grads = never_unscaled(state, loss_fn, params, transform)
    return loss, jls.unscale(state, grads)


for name, gradients, *codes in (
    ("by hand", scaled_by_hand, "never recovers"),
    ("jax.grad", BARE, "not scaled"),
    ("never unscaled", never_unscaled, "scale leaks"),
):
    make = functools.partial(accumulating_outside, gradients)
    add(f"MultiSteps outside, {name}", make, *codes, *SPOILED)


# What changes the parameters on a skip.


def changed_after(change):
    optimizer = wrap(optax.adam(1e-3))
    step = train(optimizer, RIGHT)
    first = plain_params()

    @jax.jit
    def changed(params, opt_state, batch):
        params, opt_state, loss = step(params, opt_state, batch)
        return jax.tree.map(change, params, first), opt_state, loss

    return changed, (*start(optimizer), BATCH)


def shrunk(p, first):
    return 0.999 * p


def thresholded(p, first):
    return jnp.sign(p) * jnp.maximum(jnp.abs(p) - 1e-3, 0.0)


def drawn_to_the_middle(p, first):
    return p - 1e-2 * (p - 0.5 * first)


def drawn_to_their_mean(p, first):
    return p - 1e-2 * (p - p.mean())


for change in shrunk, thresholded, drawn_to_the_middle, drawn_to_their_mean:
    add(change.__name__, functools.partial(changed_after, change), "not atomic")


@wrong("not atomic")
def shrunk_in_nnx():
    step, (model, optimizer, batch) = steps.nnx_step(inner=optax.sgd(0.01))

    @nnx.jit
    def shrinks(model, optimizer, batch):
        loss = step(model, optimizer, batch)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p: 0.999 * p, params))
        return loss

    return shrinks, (model, optimizer, batch)


@wrong("not atomic")
def shrunk_in_linen():
    step, (state, batch) = steps.linen(inner=optax.lion(1e-3))

    @jax.jit
    def shrinks(state, batch):
        state, loss = step(state, batch)
        params = jax.tree.map(lambda p: 0.999 * p, state.params)
        return state.replace(params=params), loss

    return shrinks, (state, batch)


@wrong("not atomic")
def shrunk_in_equinox():
    step, args = steps.equinox(inner=optax.adafactor(1e-3))

    @eqx.filter_jit
    def shrinks(model, opt_state, batch):
        model, opt_state, loss = step(model, opt_state, batch)
        model = jax.tree.map(
            lambda p: 0.999 * p if eqx.is_inexact_array(p) else p, model
        )
        return model, opt_state, loss

    return shrinks, args


OUTSIDE = {
    "momentum": lambda inner: optax.chain(wrap(inner), optax.trace(0.9)),
    "average of updates": lambda inner: optax.chain(wrap(inner), optax.ema(0.9)),
    "Adam": lambda inner: optax.chain(
        wrap(optax.identity()), optax.scale_by_adam(), optax.scale(-1e-3)
    ),
    "masked decay": lambda inner: optax.chain(
        wrap(inner), optax.add_decayed_weights(1e-2, {"w1": True, "w2": False})
    ),
}
for name, outside in OUTSIDE.items():
    make = functools.partial(mlp, lambda: optax.adam(1e-3), wrap=outside)
    add(f"{name} outside", make, "not atomic")


# A wrapper around a part of the parameters.


def beside_a_bare_one(inner):
    parts = {"guarded": wrap(inner), "bare": optax.sgd(1e-3)}
    return optax.partition(parts, {"w1": "guarded", "w2": "bare"})


def inside_a_mask(inner):
    return optax.masked(wrap(inner), {"w1": True, "w2": False})


for name, outside in {
    "partition with a bare part": beside_a_bare_one,
    "mask": inside_a_mask,
}.items():
    make = functools.partial(mlp, lambda: optax.adam(1e-3), wrap=outside)
    rest = "overflow hidden", "loss not passed"
    add(f"{name} outside", make, "nan committed", *SPOILED, *rest)


# A flag of another wrapper.


def statistics_of_real_data(flag):
    """The discriminator's, rolled back when the generator skips."""
    step, (g, d, g_state, d_state, z, real) = gan()

    @jax.jit
    def with_mean(g, d, g_state, d_state, d_mean, z, real):
        g, d, g_state, d_state, *losses = step(g, d, g_state, d_state, z, real)
        new = average(d_mean, {"mean": real.mean(0)})
        applied = {"generator": g_state.applied, "both": True}[flag]
        d_mean = jls.select(applied, new, d_mean)
        return g, d, g_state, d_state, d_mean, *losses

    mean = {"mean": jnp.zeros(real.shape[1])}
    return with_mean, (g, d, g_state, d_state, mean, z, real)


add(
    "statistics kept by the flag of the generator",
    functools.partial(statistics_of_real_data, "generator"),
    *STATISTICS,
)


@wrong("nan committed", *SPOILED)
def two_bare_scalers_with_flags_swapped():
    """Each network is kept if the gradients of the other are finite."""

    @jax.jit
    def step(one, two, one_scale, two_scale, left, right):
        loss, grads_one = jls.value_and_grad(sigmoid_loss)(one_scale, one, left)
        other, grads_two = jls.value_and_grad(sigmoid_loss)(two_scale, two, right)
        good_one, good_two = jls.all_finite(grads_one), jls.all_finite(grads_two)
        new_one, new_two = (
            jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
            for params, grads in ((one, grads_one), (two, grads_two))
        )
        one = jls.select(good_two, new_one, one)
        two = jls.select(good_one, new_two, two)
        one_scale = SCALER.adjust(one_scale, good_one)
        two_scale = SCALER.adjust(two_scale, good_two)
        return one, two, one_scale, two_scale, loss + other

    one = plain_params()
    two = jax.tree.map(lambda p: -p, one)
    return step, (one, two, SCALER.init(), SCALER.init(), BATCH, dict(OUTLIER))


# The updates are not applied, or the old state comes back.


def forgetting(step):
    """The step without what it makes of its first argument."""

    @jax.jit
    def forgets(params, *args):
        _, *others = step(params, *args)
        return params, *others

    return forgets


@wrong("no step")
def updates_that_are_never_applied():
    step, args = mlp(lambda: optax.adamw(1e-3))
    return forgetting(step), args


@wrong("no step")
def updates_of_one_network_that_are_never_applied():
    step, args = gan()
    return forgetting(step), args


@wrong("no step")
def updates_beside_batch_statistics_that_are_never_applied():
    step, (state, batch) = steps.linen()

    @jax.jit
    def forgets(state, batch):
        new, loss = step(state, batch)
        return new.replace(params=state.params), loss

    return forgets, (state, batch)


@wrong("no step", "scale stuck")
def train_state_with_the_old_opt_state():
    step, (state, batch) = steps.linen(inner=optax.lion(1e-3))

    @jax.jit
    def forgets(state, batch):
        new, loss = step(state, batch)
        return state.replace(params=new.params, step=new.step), loss

    return forgets, (state, batch)


@wrong("no step", "scale stuck")
def dict_with_the_old_opt_state():
    optimizer = wrap(optax.adam(1e-3))
    step = train(optimizer, RIGHT)

    @jax.jit
    def forgets(state, batch):
        params, _, loss = step(state["params"], state["opt_state"], batch)
        return {**state, "params": params}, loss

    params, opt_state = start(optimizer)
    return forgets, ({"params": params, "opt_state": opt_state}, BATCH)


@wrong("no step", "scale stuck")
def equinox_with_the_old_opt_state():
    step, args = steps.equinox(inner=optax.sgd(0.01))

    @eqx.filter_jit
    def forgets(model, opt_state, batch):
        model, _, loss = step(model, opt_state, batch)
        return model, opt_state, loss

    return forgets, args


@wrong("no step", "scale stuck")
def old_states_of_two_wrappers():
    step, args = gan()

    @jax.jit
    def forgets(g, d, g_state, d_state, z, real):
        g, d, _, _, *losses = step(g, d, g_state, d_state, z, real)
        return g, d, g_state, d_state, *losses

    return forgets, args


# The host waits, or compiles.


def with_host(after):
    step, args = mlp(lambda: optax.adam(1e-3))

    def waits(params, opt_state, batch):
        params, opt_state, loss = step(params, opt_state, batch)
        after(opt_state, loss)
        return params, opt_state, loss

    return waits, args


def stop_if_nan(opt_state, loss):
    if jnp.isnan(loss):
        raise FloatingPointError


def log_the_scale(opt_state, loss):
    return {"scale": float(jls.loss_scale(opt_state))}


def count_skips(opt_state, loss):
    return 0 if bool(opt_state.applied) else 1


def metrics_on_the_host(opt_state, loss):
    return jls.metrics(opt_state, host=True)


for after in stop_if_nan, log_the_scale, count_skips, metrics_on_the_host:
    add(after.__name__, functools.partial(with_host, after), "host sync")


@wrong("retraced")
def count_of_steps_is_static():
    step, args = mlp(lambda: optax.adam(1e-3))
    count = iter(range(10**6))

    @functools.partial(jax.jit, static_argnums=3)
    def numbered(params, opt_state, batch, number):
        params, opt_state, loss = step(params, opt_state, batch)
        return params, opt_state, loss * (number >= 0)

    return lambda *args: numbered(*args, next(count)), args


@wrong("retraced")
def jit_of_a_lambda_in_each_call():
    step, args = mlp(lambda: optax.sgd(1e-3))
    return lambda *args: jax.jit(lambda *args: step(*args))(*args), args


# Three wrappers, one of them around a single number, and Python numbers: SAC.


def soft_actor_critic(planted, gradients=RIGHT, commit=with_loss):
    """The mistake is in the network of the name `planted`."""

    def commit_to(name, state, loss, grads):
        return (commit if name == planted else with_loss)(state, loss, grads)

    @jax.jit
    def step(actor, critic, temperature, batch, discount, tau):
        def critic_loss(params):
            following = batch["following"]
            action = jnp.tanh(sigmoid(actor.params, following))
            value = sigmoid(critic.target_params, join(following, action))
            bonus = jnp.exp(temperature.params["log"])
            aim = batch["rewards"] + discount * (value.astype(jnp.float32) + bonus)
            seen = join(batch["observations"], batch["actions"])
            return mse(sigmoid(params, seen), {"y": jax.lax.stop_gradient(aim)})

        def temperature_loss(params):
            spread = jnp.mean(batch["actions"] ** 2)
            return jnp.exp(params["log"]) * (spread + 1.0)

        losses = {
            "critic": (critic, critic_loss),
            "actor": (actor, lambda p: actor_loss(p, critic, batch)),
            "temperature": (temperature, temperature_loss),
        }
        made = {}
        for name, (state, loss_fn) in losses.items():
            how = gradients if name == planted else RIGHT
            loss, grads = how(
                state.opt_state, loss_fn, state.params, jax.value_and_grad
            )
            made[name] = commit_to(name, state, loss, grads)
        critic = made["critic"]
        target = optax.incremental_update(critic.params, critic.target_params, tau)
        critic = critic.replace(target_params=target)
        return made["actor"], critic, made["temperature"], {"loss": loss}

    temperature = train_state.TrainState.create(
        apply_fn=sigmoid,
        params={"log": jnp.float32(0.5)},
        tx=wrap(optax.adam(3e-4)),
    )
    states = player(0, 3, 1), player(1, 4, 1), temperature
    return step, (*states, TRANSITIONS, 0.99, 0.005)


for name in "actor", "critic", "temperature":
    for mistake in "jax.grad", "unscaled twice", "never unscaled", "nan_to_num":
        gradients, *codes = OF_TRAINED[mistake]
        make = functools.partial(soft_actor_critic, name, gradients)
        add(f"three wrappers, {mistake} in the {name}", make, *codes, *SPOILED)
    make = functools.partial(soft_actor_critic, name, commit=without_loss)
    add(f"three wrappers, {name} told nothing", make, "loss not passed", "not atomic")
