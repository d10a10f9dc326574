"""The tools on a state with an axis of devices, as `jax.pmap` keeps it."""

import functools

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
    numbers = jls.metrics(opt_state, host=True)
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


def reports_of(loss_fn, steps=0):
    """The report of a step under pmap, or of several that a scan inside stacks."""
    optimizer, params = make(), {"w": jnp.ones(4)}
    train_step = jls.train_step(loss_fn, optimizer)

    def one(carried, batch):
        *carried, report = train_step(*carried, batch)
        return tuple(carried), report

    def all_steps(params, opt_state, batch):
        batches = jnp.stack([batch] * steps) if steps else batch
        run = functools.partial(lax.scan, one) if steps else one
        return run((params, opt_state), batches)[1]

    batch = jnp.arange(COUNT * 8.0).reshape(COUNT, 2, 4) / 100
    args = stacked(params), stacked(optimizer.init(params)), batch
    return jax.pmap(all_steps, axis_name="d")(*args)


def mean_loss(params, x):
    return lax.pmean(loss_fn(params, x), "d")


@pytest.mark.parametrize("steps", [0, 3])
def test_a_report_of_pmap_is_a_row_of_each_step_and_not_of_each_device(steps):
    report = reports_of(mean_loss, steps)
    # The norm is of the gradients of each device: it is averaged inside the wrapper.
    report = report._replace(global_norm=None)
    one = jax.tree.map(lambda a: a[0], report)
    history, of_one = jls.History(), jls.History()
    history.append(report)
    of_one.append(one)
    assert len(history) == max(steps, 1)
    assert list(history) == list(of_one)
    if not steps:
        assert jls.metrics(report, host=True) == jls.metrics(one, host=True)


def test_devices_that_differ_in_a_report_are_told_to_average():
    report = reports_of(loss_fn)
    history = jls.History()
    for read in (history.append, functools.partial(jls.metrics, host=True)):
        with pytest.raises(
            ValueError, match=r"differ in loss: .*pmean.*a\[0\]"
        ) as told:
            read(report)
        assert "jls.check_in_sync" in str(told.value)
    assert len(history) == 0


def test_a_nan_on_all_devices_is_one_value():
    report = reports_of(lambda params, x: jnp.nan * mean_loss(params, x))
    history = jls.History()
    history.append(report)
    assert len(history) == 1
    assert history["skipped"].tolist() == [True]


@pytest.mark.parametrize("count", [1, COUNT])
def test_steps_that_a_scan_stacked_stay_steps(count):
    """As many as there are devices, each of which has the batch of a step."""
    optimizer, params = jls.loss_scaled(optax.sgd(0.1)), {"w": jnp.ones(4)}
    train_step = jls.train_step(loss_fn, optimizer)

    def one(carried, batch):
        *carried, report = train_step(*carried, batch)
        return tuple(carried), report

    mesh = jax.sharding.Mesh(jax.devices()[:count], ("d",))
    by_device = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    batches = jax.device_put(jnp.ones((count, 2, 4)), by_device)
    carried = params, optimizer.init(params)
    report = jax.jit(functools.partial(lax.scan, one))(carried, batches)[1]
    assert report.loss.sharding.device_set == by_device.device_set
    for given in (report, jax.device_get(report)):
        history = jls.History()
        history.append(given)
        assert history["step"].tolist() == list(range(1, count + 1))
