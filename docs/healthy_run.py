import jax
import jax.numpy as jnp
import optax

import jls


def loss_fn(params, x):
    hidden = jnp.tanh(x.astype(jnp.float16) @ params["w1"].astype(jnp.float16))
    out = (hidden @ params["w2"].astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean((out - jnp.sin(3 * x)) ** 2)


# A short run needs a short growth_interval; the default is 2000. The first scale is too
# large on purpose, to show how the run finds a better one.
optimizer = jls.loss_scaled(optax.adam(0.01), jls.dynamic(2.0**24, growth_interval=60))


def step(carry, key):
    params, state = carry
    x = jax.random.normal(key, (256, 1))
    loss, grads = jls.value_and_grad(loss_fn)(state, params, x)
    updates, state = optimizer.update(grads, state, params, value=loss)
    params = optax.apply_updates(params, updates)
    return (params, state), {"loss": loss} | jls.metrics(state)


keys = jax.random.split(jax.random.key(0), 3)
params = {
    "w1": jax.random.normal(keys[0], (1, 32)),
    "w2": jax.random.normal(keys[1], (32, 1)) / 6,
}
history = jls.History()
history.append(jls.metrics(optimizer.init(params)))
carry, logged = jax.lax.scan(
    step, (params, optimizer.init(params)), jax.random.split(keys[2], 600)
)
history.append(logged)  # one transfer for all 600 steps

print(history.summary())
print(jls.health(carry[1], carry[0], optimizer=optimizer))
figure = history.plot()
