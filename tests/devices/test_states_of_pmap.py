"""The tools on a state with an axis of devices, as `jax.pmap` keeps it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jls

pytestmark = pytest.mark.standard_promotion

COUNT = jax.device_count()


def make():
    mean = optax.stateless(lambda grads, params: lax.pmean(grads, "d"))
    inner = optax.chain(mean, optax.sgd(0.1))
    return jls.loss_scaled(inner, jls.dynamic(2.0**20), axis_name="d")


def stacked(tree):
    return jax.tree.map(lambda x: jnp.stack([x] * COUNT), tree)


def loss_fn(params, x):
    half = params["w"].astype(jnp.float16)
    return jnp.mean((x.astype(jnp.float16) @ half).astype(jnp.float32) ** 2)


def test_what_the_tools_say_to_write_runs_for_a_state_of_pmap():
    optimizer = make()
    params = {"w": jnp.ones(4)}
    step = jax.pmap(jls.train_step(loss_fn, optimizer), axis_name="d")
    args = stacked(params), stacked(optimizer.init(params)), jnp.ones((COUNT, 2, 4))
    made = jls.calibrate(step, *args)
    opt_state = jls.set_loss_scale(args[1], made.init_scale)
    params, opt_state, report = step(args[0], opt_state, args[2])
    assert not report.skipped.any()
    numbers = jls.host_metrics(opt_state)
    assert (numbers["steps"], numbers["skips"]) == (1, 0)
    assert numbers["loss_scale"] == made.init_scale
    assert jls.health(opt_state, params).verdict == "ok"
    bad = args[2].at[0, 0, 0].set(jnp.nan)
    why = jls.why(step, params, opt_state, bad)
    assert why.births[0].place.operation == "argument"


def test_why_names_the_line_inside_pmap():
    def log_loss(params, x):
        return jnp.mean(jnp.log(x @ params["w"]))

    optimizer, params = make(), {"w": jnp.ones(4)}
    step = jax.pmap(jls.train_step(log_loss, optimizer), axis_name="d")
    args = stacked(params), stacked(optimizer.init(params)), jnp.zeros((COUNT, 2, 4))
    place = jls.why(step, *args).births[0].place
    assert (place.operation, place.function) == ("log", "log_loss")
    assert place.file == __file__
