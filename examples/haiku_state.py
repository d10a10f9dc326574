# SPDX-License-Identifier: Apache-2.0
"""Haiku: a residual network with batch norm, which `transform_with_state` carries.

`python haiku_state.py` takes ten seconds on a CPU. jmp's policies say in which dtype
each module computes. The task is to tell sine, square and triangle waves apart.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import jls
import jmp
import numpy as np
import optax

POLICY = jmp.get_policy("params=float32,compute=float16,output=float32")
# Statistics are taken in float32, and handed on in the dtype of the other layers.
NORM_POLICY = jmp.Policy(jnp.float32, jnp.float32, POLICY.compute_dtype)


class Block(hk.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.width, self.stride = width, stride

    def __call__(self, x, is_training):
        y = hk.Conv1D(self.width, 5, self.stride, with_bias=False)(x)
        y = hk.BatchNorm(True, True, 0.9)(y, is_training)
        return jax.nn.relu(y + hk.Conv1D(self.width, 1, self.stride)(x))


class Net(hk.Module):
    def __init__(self, widths):
        super().__init__()
        self.widths = widths

    def __call__(self, x, is_training):
        for width in self.widths:
            x = Block(width, stride=2)(x, is_training)
        return hk.Linear(3)(x.mean(axis=1))


def make_batch(rng, batch_size, length):
    """Waves of any frequency and phase under noise, and which of the three each is."""
    labels = rng.integers(3, size=batch_size)
    frequency, start = rng.uniform([[2], [0]], [[6], [1]], size=(2, batch_size))
    phase = start[:, None] + frequency[:, None] * np.linspace(0, 1, length)
    sine = np.sin(2 * np.pi * phase)
    square = np.sign(sine)
    triangle = 2 / np.pi * np.arcsin(sine)
    waves = np.choose(labels[:, None], [sine, square, triangle])
    waves = waves + 0.5 * rng.normal(size=waves.shape)
    return waves[..., None].astype(np.float32), labels


def main(steps=200, widths=(16, 32, 32), batch_size=64, length=64):
    hk.mixed_precision.set_policy(Net, POLICY)
    hk.mixed_precision.set_policy(hk.BatchNorm, NORM_POLICY)
    net = hk.transform_with_state(lambda *inputs: Net(widths)(*inputs))

    def loss_fn(params, state, batch):
        waves, labels = batch
        logits, state = net.apply(params, state, None, waves, True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        accuracy = jnp.mean(logits.argmax(-1) == labels)
        return losses.mean(), state, accuracy

    optimizer = optax.adamw(1e-3)
    optimizer = jls.loss_scaled(optimizer, jls.dynamic(growth_interval=25))
    train_step = jls.train_step(loss_fn, optimizer, carried=True, has_aux=True)

    step, rng = jax.jit(train_step, donate_argnums=(0, 1, 2)), np.random.default_rng(0)
    waves, labels = make_batch(rng, 500, length)
    params, state = net.init(jax.random.key(0), waves, True)
    opt_state = optimizer.init(params)
    predict = jax.jit(lambda *run: net.apply(*run, None, waves, False)[0].argmax(-1))
    for i in range(1, steps + 1):
        batch = make_batch(rng, batch_size, length)
        params, opt_state, state, report = step(params, opt_state, state, batch)
        if i % (steps // 5) == 0:
            loss, train = report.loss, report.aux
            test = np.mean(predict(params, state) == labels)
            print(f"step {i:3}  loss {loss:.3f}  train {train:.3f}  test {test:.3f}")
    print(jls.health(opt_state, params, optimizer=optimizer))
    return params, opt_state, state


if __name__ == "__main__":
    main()
