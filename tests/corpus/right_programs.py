"""Right steps in the style of real programs, which carry more than a model.

What a program changes on purpose in every step, also in one that is skipped, is no
mistake: a buffer, an environment, noise, a record.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import steps
from flax import nnx
from steps import BATCH, SCALER, X, Y, half, plain, plain_loss, plain_params, wrap

import jls

PROGRAMS = {}


def program(make):
    PROGRAMS[make.__name__] = make
    return make


def run_layers(params, x):
    x = x.astype(jnp.float16)
    for layer in half(params[:-1]):
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    last = half(params[-1])
    return (x @ last["w"] + last["b"]).astype(jnp.float32)


def layers(seed, *sizes):
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    return [
        {"w": jax.random.normal(key, (rows, columns)) / 2, "b": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, sizes[:-1], sizes[1:], strict=False)
    ]


def train(optimizer, opt_state, params, loss_fn, *args):
    loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, *args)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss


# Reinforcement learning.


class Buffer(NamedTuple):
    observation: Any
    action: Any
    reward: Any
    following: Any
    at: Any


def new_buffer():
    observations = jax.random.normal(jax.random.key(9), (16, 3))
    return Buffer(
        observations, jnp.zeros(16), jnp.zeros(16), observations + 0.1, jnp.int32(8)
    )


def store(buffer, *transition):
    parts = zip(buffer[:-1], transition, strict=True)
    new = [part.at[buffer.at % 16].set(value) for part, value in parts]
    return Buffer(*new, buffer.at + 1)


def q_loss(params, target, buffer, chosen):
    value = run_layers(params, buffer.observation[chosen]).max(1)
    following = run_layers(target, buffer.following[chosen]).max(1)
    return jnp.mean((value - buffer.reward[chosen] - 0.9 * following) ** 2)


def act(params, observation):
    """An action, and what the environment answers."""
    action = jnp.tanh(run_layers(params, observation[None]).mean())
    following = jnp.clip(observation + 0.1 * action, -5, 5)
    return action, -jnp.sum(following**2), following


def learn_then_act(update_target, optimizer=None):
    optimizer = optimizer or wrap(optax.adam(1e-2))

    def step(params, target, opt_state, buffer, observation, key, count):
        key, now = jax.random.split(key)
        chosen = jax.random.randint(now, (8,), 0, jnp.minimum(buffer.at, 16))
        params, opt_state, loss = train(
            optimizer, opt_state, params, q_loss, target, buffer, chosen
        )
        target = update_target(params, target, opt_state, count)
        transition = act(params, observation)
        buffer = store(buffer, observation, *transition)
        return (
            (params, target, opt_state, buffer, transition[-1], key, count + 1),
            loss,
        )

    params = layers(0, 3, 8, 2)
    rest = new_buffer(), jnp.ones(3), jax.random.key(1), jnp.int32(0)
    return step, (params, params, optimizer.init(params), *rest)


def follow(params, target, opt_state, count):
    moved = optax.incremental_update(params, target, 0.05)
    return jls.select(opt_state.applied, moved, target)


def in_one_state(step, args):
    names = "params", "target", "opt_state", "buffer", "observation", "key", "count"

    @jax.jit
    def whole(state):
        new, loss = step(*(state[name] for name in names))
        return dict(zip(names, new, strict=True)), loss

    return whole, (dict(zip(names, args, strict=True)),)


@program
def q_learning_with_a_buffer():
    """The new parameters act: other transitions than in a step that is applied."""
    step, args = learn_then_act(follow)
    return jax.jit(step), args


@program
def q_learning_with_sgd():
    """The buffer has as many leaves as the parameters, and there are no moments."""
    step, args = learn_then_act(follow, wrap(optax.sgd(0.1)))
    return jax.jit(step), args


@program
def q_learning_in_one_state():
    return in_one_state(*learn_then_act(follow))


@program
def target_that_is_copied_every_other_step():
    def copy(params, target, opt_state, count):
        return optax.periodic_update(params, target, count, 2)

    return in_one_state(*learn_then_act(copy))


@program
def q_learning_with_a_bare_scale():
    inner = optax.adam(1e-2)

    @jax.jit
    def step(state, scale):
        params, opt_state, buffer = state["params"], state["opt_state"], state["buffer"]
        loss, grads = jls.value_and_grad(q_loss)(
            scale, params, params, buffer, jnp.arange(8)
        )
        finite = jls.all_finite(grads)
        updates, new_state = inner.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = jls.select(finite, new, (params, opt_state))
        transition = act(params, state["observation"])
        state = {
            "params": params,
            "opt_state": opt_state,
            "buffer": store(buffer, state["observation"], *transition),
            "observation": transition[-1],
        }
        return state, SCALER.adjust(scale, finite), loss

    params = layers(0, 3, 8, 2)
    state = {"params": params, "opt_state": inner.init(params), "buffer": new_buffer()}
    return step, ({**state, "observation": jnp.ones(3)}, SCALER.init())


@program
def actor_and_critic_with_observations_normalized():
    """Nothing but the state: the fault goes into a parameter of the actor."""
    optimizer = wrap(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)))

    def loss_fn(params, seen, action, reward):
        advantage = reward - run_layers(params["critic"], seen)[:, 0]
        made = run_layers(params["actor"], seen).mean(1)
        weight = jax.lax.stop_gradient(advantage)
        return jnp.mean(weight * (made - action) ** 2) + jnp.mean(advantage**2)

    @jax.jit
    def step(state):
        params, observations = state["params"], state["observations"]
        mean = state["mean"] + 0.1 * (observations.mean(0) - state["mean"])
        action, reward, following = jax.vmap(act, in_axes=(None, 0))(
            params["actor"], observations - mean
        )
        params, opt_state, loss = train(
            optimizer,
            state["opt_state"],
            params,
            loss_fn,
            observations - mean,
            action,
            reward,
        )
        return {
            "params": params,
            "opt_state": opt_state,
            "observations": following,
            "mean": mean,
        }, loss

    params = {"actor": layers(0, 3, 8, 2), "critic": layers(1, 3, 8, 1)}
    state = {"params": params, "opt_state": optimizer.init(params)}
    return step, ({**state, "observations": X[:4, :3], "mean": jnp.zeros(3)},)


# Two models, of which one has no loss scale.


def generator_with_a_scale(*sizes):
    one, two = wrap(optax.adam(1e-2)), optax.adam(1e-2)

    def score_loss(g, d, z, y):
        fake = run_layers(d, run_layers(g, z))
        return jnp.mean(jax.nn.softplus(fake) + jax.nn.softplus(-run_layers(d, y)))

    def fool_loss(g, d, z):
        return jnp.mean(jax.nn.softplus(-run_layers(d, run_layers(g, z))))

    @jax.jit
    def step(params, opt_state, z, y):
        g, d = params["g"], params["d"]
        grads = jax.grad(score_loss, argnums=1)(g, d, z, y)
        updates, state = two.update(grads, opt_state["d"], d)
        new = optax.apply_updates(d, updates), state
        d, d_state = jls.select(jls.all_finite(grads), new, (d, opt_state["d"]))
        g, g_state, loss = train(one, opt_state["g"], g, fool_loss, d, z)
        return {"g": g, "d": d}, {"g": g_state, "d": d_state}, loss

    g, d = layers(0, 4, 8, 2), layers(1, *sizes)
    opt_state = {"g": one.init(g), "d": two.init(d)}
    return step, ({"g": g, "d": d}, opt_state, X, Y)


PROGRAMS |= {
    "discriminator_as_deep": lambda: generator_with_a_scale(2, 8, 1),
    "discriminator_deeper": lambda: generator_with_a_scale(2, 4, 4, 1),
}


# Noise in the parameters, in every step.


def shaken(params, key, size=0.01):
    keys = jax.random.split(key, len(params))
    return {
        name: leaf + size * jax.random.normal(key, leaf.shape)
        for key, (name, leaf) in zip(keys, params.items(), strict=True)
    }


@program
def langevin_with_a_key_carried():
    step, (params, opt_state, batch) = plain(inner=optax.sgd(0.1))

    @jax.jit
    def noisy(params, opt_state, key, batch):
        key, now = jax.random.split(key)
        params, opt_state, loss = step(params, opt_state, batch)
        return shaken(params, now), opt_state, key, loss

    return noisy, (params, opt_state, jax.random.key(0), batch)


@program
def langevin_with_a_key_as_argument():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def noisy(params, opt_state, batch, key):
        params, opt_state, loss = step(params, opt_state, batch)
        return shaken(params, key), opt_state, loss

    return noisy, (params, opt_state, batch, jax.random.PRNGKey(0))


@program
def langevin_with_a_seed_that_is_counted():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def noisy(state, batch):
        now = jax.random.fold_in(jax.random.key(0), state["count"])
        params, opt_state, loss = step(state["params"], state["opt_state"], batch)
        count = state["count"] + 1
        params = shaken(params, now)
        return {"params": params, "opt_state": opt_state, "count": count}, loss

    state = {"params": params, "opt_state": opt_state, "count": jnp.int32(0)}
    return noisy, (state, batch)


@program
def noise_added_outside():
    return plain(wrap=lambda inner: optax.chain(wrap(inner), optax.add_noise(1, 0, 0)))


@program
def nnx_noise_from_its_streams():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.rngs = steps.Model(rngs), rngs

        def __call__(self, x):
            return self.inner(x)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = jls.value_and_grad(steps.nnx_loss, transform=nnx.value_and_grad)(
            optimizer, model, batch
        )
        optimizer.update(model, grads, value=loss)
        noisy = jax.tree.map(
            lambda leaf: (
                leaf + 0.01 * jax.random.normal(model.rngs.noise(), leaf.shape)
            ),
            nnx.state(model, nnx.Param),
        )
        nnx.update(model, noisy)
        return loss

    model = Model(nnx.Rngs(0, noise=1))
    optimizer = nnx.Optimizer(model, wrap(optax.sgd(0.1)), wrt=nnx.Param)
    return step, (model, optimizer, BATCH)


@program
def perturbed_copy_that_explores():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def explores(state, batch):
        key, now = jax.random.split(state["key"])
        params, opt_state, loss = step(state["params"], state["opt_state"], batch)
        return {
            "params": params,
            "opt_state": opt_state,
            "explorer": shaken(params, now, state["size"]),
            "size": jnp.where(opt_state.applied, 0.99, 1.01) * state["size"],
            "key": key,
        }, loss

    state = {"params": params, "opt_state": opt_state, "explorer": params}
    state |= {"size": jnp.float32(0.1), "key": jax.random.key(0)}
    return explores, (state, batch)


# Records of what was.


@program
def records_of_loss_and_scale():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def recorded(state, batch):
        params, opt_state, loss = step(state["params"], state["opt_state"], batch)
        skipped = 1.0 - opt_state.applied
        scale = jls.loss_scale(opt_state)
        return {
            "params": params,
            "opt_state": opt_state,
            "last": {"loss": loss, "skips": 0.9 * state["last"]["skips"] + skipped},
            "scales": jnp.roll(state["scales"], 1).at[0].set(scale),
        }, loss

    last = {"loss": jnp.float32(0), "skips": jnp.float32(0)}
    state = {"params": params, "opt_state": opt_state, "last": last}
    return recorded, ({**state, "scales": jnp.zeros(8)}, batch)


@program
def last_norms_and_no_loss():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(state, batch):
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        norms = jnp.stack([jnp.linalg.norm(leaf) for leaf in jax.tree.leaves(grads)])
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state, "norms": norms}

    params = plain_params()
    state = {"params": params, "opt_state": optimizer.init(params)}
    return step, ({**state, "norms": jnp.zeros(2)}, BATCH)


@program
def rates_cut_after_a_skip():
    optimizer = wrap(optax.scale_by_adam())

    @jax.jit
    def step(state, batch):
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        rates = state["rates"]
        updates = {name: -rates[name] * update for name, update in updates.items()}
        factor = jnp.where(opt_state.applied, 1.01, 0.5)
        return {
            "params": optax.apply_updates(params, updates),
            "opt_state": opt_state,
            "rates": {name: factor * rate for name, rate in rates.items()},
        }, loss

    params = plain_params()
    rates = {"w1": jnp.float32(0.01), "w2": jnp.float32(0.02)}
    state = {"params": params, "opt_state": optimizer.init(params), "rates": rates}
    return step, (state, BATCH)


# Parameters that are one array.


def one_array(params, wrong=False, inner=None):
    """An environment moves beside the parameters, in every step."""
    optimizer = wrap(inner or optax.sgd(0.05, momentum=0.9))

    def loss_fn(params, x):
        return jnp.mean((x.astype(jnp.float16) * params.astype(jnp.float16)) ** 2)

    @jax.jit
    def step(params, opt_state, env, x):
        new, opt_state, loss = train(optimizer, opt_state, params, loss_fn, x)
        if wrong:
            grads = jax.grad(loss_fn)(params, x)
            new = params - 0.05 * grads
        return new, opt_state, {"position": 0.9 * env["position"] + 0.1}, loss

    return step, (params, optimizer.init(params), {"position": jnp.zeros(6)}, X)


@program
def one_array_beside_an_environment():
    return one_array(jnp.full(4, 0.5))


@program
def one_number_beside_an_environment():
    return one_array(jnp.float32(0.5))


# Data, and a memory of it.


@program
def memory_of_batches():
    """Continual learning: the batch is stored as it came, and replayed."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(state, batch):
        memory, at = state["memory"], state["at"]
        both = {name: jnp.concatenate([batch[name], memory[name]]) for name in batch}
        params, opt_state, loss = train(
            optimizer, state["opt_state"], state["params"], plain_loss, both
        )
        memory = {
            name: jax.lax.dynamic_update_slice(memory[name], batch[name], (at, 0))
            for name in batch
        }
        state = {"params": params, "opt_state": opt_state, "memory": memory}
        return {**state, "at": (at + 8) % 16}, loss

    params = plain_params()
    state = {"params": params, "opt_state": optimizer.init(params), "at": jnp.int32(0)}
    memory = {"x": jnp.tile(X[::-1], (2, 1)), "y": jnp.tile(Y[::-1], (2, 1))}
    return step, ({**state, "memory": memory}, BATCH)


@program
def last_batch_without_its_bad_numbers():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def keeps(state, batch):
        params, opt_state, loss = step(state["params"], state["opt_state"], batch)
        last = jnp.where(jnp.isfinite(batch["x"]), batch["x"], 0)
        return {"params": params, "opt_state": opt_state, "last": last}, loss

    return keeps, ({"params": params, "opt_state": opt_state, "last": X}, batch)


def recurrent(repair):
    """Truncated backpropagation through time, with the hidden state carried."""
    optimizer = wrap(optax.adam(1e-2))

    def loss_fn(params, hidden, x, y):
        p = half(params)

        def cell(hidden, x):
            hidden = jnp.tanh(x.astype(jnp.float16) @ p["in"] + hidden @ p["over"])
            return hidden, hidden @ p["out"]

        hidden, made = jax.lax.scan(cell, hidden.astype(jnp.float16), x)
        return steps.mse(made, {"y": y}), hidden.astype(jnp.float32)

    @jax.jit
    def step(state, x, y):
        params, opt_state = state["params"], state["opt_state"]
        (loss, hidden), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params, state["hidden"], x, y
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        hidden = repair(opt_state.applied, hidden)
        return {"params": params, "opt_state": opt_state, "hidden": hidden}, loss

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"in": (4, 6), "over": (6, 6), "out": (6, 2)}
    params = {
        name: jax.random.normal(key, shape) / 3
        for key, (name, shape) in zip(keys[:3], shapes.items(), strict=True)
    }
    x, y = (
        jax.random.normal(key, (5, 2, size))
        for key, size in zip(keys[3:], (4, 2), strict=True)
    )
    state = {"params": params, "opt_state": optimizer.init(params)}
    return step, ({**state, "hidden": jnp.zeros((2, 6))}, x, y)


PROGRAMS["hidden_state_reset_by_a_skip"] = functools.partial(
    recurrent, lambda applied, hidden: jnp.where(applied, hidden, 0)
)
PROGRAMS["hidden_state_reset_if_not_finite"] = functools.partial(
    recurrent, lambda applied, hidden: jnp.where(jnp.isfinite(hidden), hidden, 0)
)


@program
def bare_scale_that_waits_for_every_other_call():
    @jax.jit
    def step(params, scale, count, x):
        def update(params, scale):
            loss, grads = jls.value_and_grad(
                lambda p: jnp.mean((half(x) @ half(p["w"])).astype(jnp.float32) ** 2)
            )(scale, params)
            finite = jls.all_finite(grads)
            new = optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))
            new = jls.select(finite, new, params)
            return new, SCALER.adjust(scale, finite), loss

        def wait(params, scale):
            return params, scale, jnp.float32(0)

        is_due = count["n"] % 2 == 1
        params, scale, loss = jax.lax.cond(is_due, update, wait, params, scale)
        return params, scale, {"n": count["n"] + 1}, loss

    return step, ({"w": jnp.ones(4)}, SCALER.init(), {"n": jnp.int32(0)}, X)
