# SPDX-License-Identifier: Apache-2.0
"""Programs that `jls.why` once had wrong, marked as those of `programs` are.

The other tools were not measured on them, so the pages do not count them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from programs import Program

MORE: dict[str, Program] = {}


def program(**truth):
    def register(make):
        MORE[make.__name__] = Program(make, **truth)
        return make

    return register


@program(operation=("div",), is_backward=False, iteration=(2,))
def branch_that_is_not_taken_before():
    """The square root of -1 is dropped in each iteration, also in that of the NaN."""

    def body(c, i):
        z = jnp.where(i == 2, 0.0, 1.0)
        y = c * z / z  # <- here
        return c, jnp.where(y < 0, 0.0, jnp.sqrt(y))

    def loss_fn(x):
        return lax.scan(body, x, jnp.arange(4))[1].sum()

    return loss_fn, (jnp.array([1.0, -1.0]),)


@program(operation=("exp",), is_backward=False)
def inf_in_the_place_of_an_inf():
    """`jnp.hypot` chooses a number of its own where an operand is inf."""

    def loss_fn(x):
        h = jnp.exp(x)  # <- here
        return jnp.hypot(h, 1.0)

    return loss_fn, (jnp.float32(1000.0),)


@program(operation=("exp",), is_backward=False)
def inf_that_is_kept_by_a_where():
    def loss_fn(x):
        y = jnp.exp(x)  # <- here
        h = jnp.where(jnp.isinf(y), jnp.inf, 2 * y)
        return h - h.mean()

    return loss_fn, (jnp.array([1000.0, 1.0]),)


@program(operation=("constant",), is_backward=False, iteration=(2,))
def constant_in_a_loop():
    def body(c, i):
        return c + jnp.where(i == 2, jnp.inf, 0.0), i  # <- here

    return lambda x: lax.scan(body, x, jnp.arange(4))[0], (jnp.float32(1.0),)


@program(operation=("sqrt",), is_backward=False)
def lambda_under_piecewise():
    """JAX jits `jnp.piecewise` itself."""

    def root(x):
        return jnp.sqrt(x)  # <- here

    def loss_fn(x):
        branches = [lambda x: root(x), lambda x: x]
        return jnp.piecewise(x, [x < 0, x >= 0], branches)

    return loss_fn, (jnp.array([-1.0, 1.0]),)


@program(operation=("log",), is_backward=False)
def log_under_pmap():
    def loss_fn(x):
        return jnp.log(x - 1.0)  # <- here

    return lambda x: jax.pmap(loss_fn)(x), (jnp.ones((1, 3)),)
