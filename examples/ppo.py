# SPDX-License-Identifier: Apache-2.0
"""PPO on CartPole: all of the training in `lax.scan`, and `vmap` over the seeds.

`python ppo.py` takes twenty seconds on a CPU. The environment is written in JAX, below.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jls
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class Env(NamedTuple):
    physics: jax.Array  # position, velocity, angle, angular velocity
    time: jax.Array


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array
    time: jax.Array


def reset(key):
    return Env(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.int32(0))


def act(env, action, key):
    """The cart and its pole 0.02 s later, or a new episode, and whether it is one."""
    _, speed, angle, spin = env.physics
    force = jnp.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * spin**2 * jnp.sin(angle)) / 1.1
    turn = 9.8 * jnp.sin(angle) - jnp.cos(angle) * push
    turn = turn / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    speed_up = push - 0.05 * turn * jnp.cos(angle) / 1.1
    change = jnp.stack([speed, speed_up, spin, turn])
    moved = Env(env.physics + 0.02 * change, env.time + 1)
    fell = (jnp.abs(moved.physics[0]) > 2.4) | (jnp.abs(moved.physics[2]) > 0.2095)
    done = fell | (moved.time >= 500)
    return jax.tree.map(partial(jnp.where, done), reset(key), moved), done


class ActorCritic(nn.Module):
    dtype: Any = jnp.float32  # of the activations; parameters are float32

    @nn.compact
    def __call__(self, obs):
        def mlp(outputs, scale):
            x = obs
            for _ in range(2):
                init = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
                x = nn.tanh(nn.Dense(64, kernel_init=init, dtype=self.dtype)(x))
            init = nn.initializers.variance_scaling(scale, "fan_in", "normal")
            return nn.Dense(outputs, kernel_init=init, dtype=jnp.float32)(x)

        return mlp(2, 1e-4), mlp(1, 1.0)[..., 0]


def loss_fn(state, batch):
    transition, advantage, target = batch
    logits, value = state.apply_fn(state.params, transition.obs)
    log_probs = nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, transition.action[:, None], axis=-1)[:, 0]
    ratio = jnp.exp(log_prob - transition.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss = 0.5 * jnp.mean((value - target) ** 2)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
    return policy_loss + 0.5 * value_loss - 0.01 * entropy


def train(key, updates, envs=16, steps=64, epochs=4, minibatches=4):
    """Returns the state, and the number and total length of each update's episodes."""
    key, init_key, env_key = jax.random.split(key, 3)
    model = ActorCritic(dtype=jnp.float16)
    params = model.init(init_key, jnp.zeros(4))
    rate = optax.linear_schedule(1e-3, 0.0, updates * epochs * minibatches)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))
    optimizer = jls.loss_scaled(optimizer, jls.dynamic(growth_interval=200))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    train_step = jls.train_step(loss_fn)

    def interact(carry, key):
        state, env = carry
        keys = jax.random.split(key, envs + 1)
        logits, value = state.apply_fn(state.params, env.physics)
        action = jax.random.categorical(keys[0], logits)
        log_prob = jnp.take_along_axis(nn.log_softmax(logits), action[:, None], -1)
        next_env, done = jax.vmap(act)(env, action, keys[1:])
        reward, log_prob = jnp.full(envs, 0.1), log_prob[:, 0]
        seen = Transition(
            env.physics, action, log_prob, value, reward, done, env.time + 1
        )
        return (state, next_env), seen

    def advantage(carry, transition):
        advantage, next_value = carry
        goes_on = GAMMA * (1 - transition.done)
        delta = transition.reward + goes_on * next_value - transition.value
        advantage = delta + goes_on * LAMBDA * advantage
        return (advantage, transition.value), advantage

    def update(carry, key):
        state, env = carry
        keys = jax.random.split(key, 1 + epochs)
        interact_keys = jax.random.split(keys[0], steps)
        (_, env), seen = jax.lax.scan(interact, (state, env), interact_keys)
        _, last_value = state.apply_fn(state.params, env.physics)
        start = jnp.zeros(envs), last_value
        _, advantages = jax.lax.scan(advantage, start, seen, reverse=True)
        batch = seen, advantages, advantages + seen.value
        batch = jax.tree.map(lambda x: x.reshape(envs * steps, *x.shape[2:]), batch)
        order = jax.vmap(partial(jax.random.permutation, x=envs * steps))(keys[1:])
        order = order.reshape(epochs * minibatches, -1)

        def learn(state, chosen):
            return train_step(state, jax.tree.map(lambda x: x[chosen], batch))

        state, _ = jax.lax.scan(learn, state, order)
        return (state, env), (seen.done.sum(), jnp.sum(seen.done * seen.time))

    env = jax.vmap(reset)(jax.random.split(env_key, envs))
    keys = jax.random.split(key, updates)
    (state, _), episodes = jax.lax.scan(update, (state, env), keys)
    return state, episodes


def main(seeds=3, updates=150, **options):
    keys = jax.random.split(jax.random.key(0), seeds)
    run = jax.jit(jax.vmap(partial(train, updates=updates, **options)))
    states, (count, length) = run(keys)
    for part in range(5):
        some = slice(part * updates // 5, (part + 1) * updates // 5)
        mean = length[:, some].sum(1) / count[:, some].sum(1)
        each = "  ".join(f"{x:5.1f}" for x in mean)
        print(f"update {some.stop:3}  steps upright by seed  {each}")
    print("steps skipped by seed", jax.vmap(jls.metrics)(states)["skips"])
    return states


if __name__ == "__main__":
    main()
