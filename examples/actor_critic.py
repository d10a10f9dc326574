# SPDX-License-Identifier: Apache-2.0
"""Actor and critic (TD3) swing up a pendulum: two optimizers, two target networks.

`python actor_critic.py` takes twenty seconds on a CPU. The pendulum is written in JAX,
below.
"""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import jls
import optax
from flax import linen as nn
from flax.training import train_state

GAMMA, TAU, NOISE, LENGTH = 0.98, 0.01, 0.2, 200


def reset(key):
    """Angle and speed of a pendulum that hangs somewhere; at 0 it stands upright."""
    return jax.random.uniform(key, (2,), minval=-1.0) * jnp.array([jnp.pi, 1.0])


def act(pendulum, action):
    """The pendulum 0.05 s later, and the reward: 0 upright and at rest, else less."""
    angle, speed = pendulum
    torque = 2 * action[0]
    off = jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi
    reward = -0.1 * (off**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = jnp.clip(speed + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8.0, 8.0)
    return jnp.stack([angle + 0.05 * speed, speed]), reward


def observe(pendulum):
    angle, speed = pendulum[..., 0], pendulum[..., 1]
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), speed / 8], axis=-1)


class MLP(nn.Module):
    outputs: int = 1
    dtype: Any = jnp.float32  # of the activations; parameters are float32

    @nn.compact
    def __call__(self, *inputs):
        x = jnp.concatenate(inputs, axis=-1)
        for _ in range(2):
            x = nn.relu(nn.Dense(64, dtype=self.dtype)(x))
        return nn.Dense(self.outputs, dtype=jnp.float32)(x)


class TrainState(train_state.TrainState):
    target: flax.core.FrozenDict  # parameters that follow at a distance

    def follow(self):
        new = optax.incremental_update(self.params, self.target, TAU)
        return self.replace(target=new)


def policy(actor, params, pendulum):
    return nn.tanh(actor.apply_fn(params, observe(pendulum)))


def q_values(critic, params, pendulum, action):
    """Two estimates each: the smaller one is the target."""
    return critic.apply_fn(params, observe(pendulum), action)


def critic_loss(critic, batch, actor, key):
    pendulum, action, reward, later = batch
    noise = jnp.clip(NOISE * jax.random.normal(key, action.shape), -0.5, 0.5)
    next_action = jnp.clip(policy(actor, actor.target, later) + noise, -1.0, 1.0)
    next_value = q_values(critic, critic.target, later, next_action).min(axis=-1)
    goal = jax.lax.stop_gradient(reward + GAMMA * next_value)
    values = q_values(critic, critic.params, pendulum, action)
    return jnp.mean((values - goal[:, None]) ** 2)


def actor_loss(actor, batch, critic):
    pendulum = batch[0]
    action = policy(actor, actor.params, pendulum)
    return -q_values(critic, critic.params, pendulum, action)[:, 0].mean()


def train(key, updates, envs=8, batch_size=128):
    """Returns both states, and the mean reward of each step of the pendulums."""
    dtype = jnp.float16
    optimizer = optax.adam(1e-3)
    optimizer = jls.loss_scaled(optimizer, jls.dynamic(growth_interval=200))
    actor_net, critic_net = MLP(1, dtype), MLP(2, dtype)
    key, actor_key, critic_key = jax.random.split(key, 3)
    actor_params = actor_net.init(actor_key, jnp.zeros(3))
    critic_params = critic_net.init(critic_key, jnp.zeros(3), jnp.zeros(1))
    actor, critic = (
        TrainState.create(
            apply_fn=net.apply, params=params, target=params, tx=optimizer
        )
        for net, params in ((actor_net, actor_params), (critic_net, critic_params))
    )
    learn_critic = jls.train_step(critic_loss)
    learn_actor = jls.train_step(actor_loss)

    def update(carry, step):
        actor, critic, pendulum, memory, key = carry
        key, *keys = jax.random.split(key, 6)
        starts = jax.vmap(reset)(jax.random.split(keys[0], envs))
        pendulum = jnp.where(step % LENGTH == 0, starts, pendulum)
        action = policy(actor, actor.params, pendulum)
        noise = NOISE * jax.random.normal(keys[1], action.shape)
        action = jnp.clip(action + noise, -1.0, 1.0)
        later, reward = jax.vmap(act)(pendulum, action)
        seen = pendulum, action, reward, later
        memory = jax.tree.map(lambda x, new: x.at[step].set(new), memory, seen)

        rows = jax.random.randint(keys[2], (batch_size,), 0, step + 1)
        columns = jax.random.randint(keys[3], (batch_size,), 0, envs)
        batch = jax.tree.map(lambda x: x[rows, columns], memory)
        critic, _ = learn_critic(critic, batch, actor=actor, key=keys[4])
        actor, _ = learn_actor(actor, batch, critic=critic)
        return (actor.follow(), critic.follow(), later, memory, key), reward.mean()

    shapes = (envs, 2), (envs, 1), (envs,), (envs, 2)
    memory = tuple(jnp.zeros((updates, *shape)) for shape in shapes)
    carry = actor, critic, jnp.zeros((envs, 2)), memory, key
    (actor, critic, *_), rewards = jax.lax.scan(update, carry, jnp.arange(updates))
    return actor, critic, rewards


def main(updates=3000, **options):
    run = jax.jit(train, static_argnums=1, static_argnames=tuple(options))
    actor, critic, rewards = run(jax.random.key(0), updates, **options)
    for part in range(5):
        some = slice(part * updates // 5, (part + 1) * updates // 5)
        print(f"update {some.stop:4}  reward of a step {rewards[some].mean():.3f}")
    print("steps skipped", [int(jls.metrics(x)["skips"]) for x in (critic, actor)])
    return actor, critic, rewards


if __name__ == "__main__":
    main()
