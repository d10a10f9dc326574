"""A step of `jls.train_step` that nobody jitted is named, once; others are not."""

import copy
import warnings
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, PartitionSpec

import jls

pytestmark = pytest.mark.standard_promotion

P = PartitionSpec
SIZE = 2**8  # its square is the least number of parameters that is warned of
OPTIMIZER = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(8.0))
X = jnp.ones(SIZE)


def loss_fn(params, x, **kwargs):
    return jnp.mean(params["w"] @ x)


def plain(size=SIZE):
    params = {"w": jnp.ones((size, SIZE))}
    return jls.train_step(loss_fn, OPTIMIZER), (params, OPTIMIZER.init(params), X)


def linen():
    params = plain()[1][0]
    state = TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)
    return jls.train_step(lambda state, x: loss_fn(state.params, x)), (state, X)


def of_nnx():
    model = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    step = jls.train_step(lambda model, x: jnp.mean(model(x)))
    return step, (model, optimizer, X)


def equinox():
    model = eqx.nn.MLP(SIZE, 1, SIZE, 1, key=jax.random.key(0))
    step = jls.train_step(lambda model, x: jnp.mean(model(x)), OPTIMIZER)
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, opt_state, X)


def warned(step, *args, calls=3):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            step(*args)
    assert all(one.category is jls.JlsWarning for one in caught)
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (plain, "step = jax.jit(jls.train_step(loss_fn, optimizer)), once"),
        (linen, "step = jax.jit(jls.train_step(loss_fn)), once"),
        (of_nnx, "step = nnx.jit(jls.train_step(loss_fn)), once"),
        (equinox, "step = eqx.filter_jit(jls.train_step(loss_fn, optimizer)), once"),
    ],
)
def test_second_call_of_a_step_that_is_not_jitted_is_warned_of(make, line):
    step, args = make()
    assert warned(step, *args, calls=1) == []
    (message,) = warned(step, *args)
    assert "not jitted" in message
    assert line in message
    assert warned(step, *args) == []
    again = make()[0]  # another step
    assert len(warned(again, *args)) == 1


def test_numpy_arrays_and_keywords_are_no_way_out():
    step, args = plain()
    assert len(warned(partial(step, rng=1), *jax.device_get(args))) == 1


def stacked(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)


def map_seeds(step, args):
    params, opt_state, x = args
    axes = 0, 0, None
    return warned(jax.vmap(step, axes), stacked(params), stacked(opt_state), x)


def scan(step, args):
    params, opt_state, x = args

    def run(params, opt_state):
        def body(state, x):
            *state, report = step(*state, x)
            return tuple(state), report.loss

        return jax.lax.scan(body, (params, opt_state), x[None])

    return warned(run, params, opt_state) + warned(jax.jit(run), params, opt_state)


def shard(step, args):
    mesh = jax.make_mesh((1,), ("d",), (AxisType.Auto,))
    split = jax.shard_map(
        lambda *args: step(*args)[:2],
        mesh=mesh,
        in_specs=(P(), P(), P("d")),
        out_specs=P(),
        check_vma=False,
    )
    return warned(split, *args) + warned(jax.jit(split), *args)


def compile_ahead(step, args):
    return warned(lambda: jax.jit(step).lower(*args).compile()(*args))


def without_jit(step, args):
    with jax.disable_jit():
        return warned(step, *args)


def captured(step, args):
    """Nothing of a jitted function is an argument."""
    return warned(jax.jit(lambda: step(*args)[:2])) + warned(
        lambda: jax.lax.scan(lambda c, _: (step(*args)[2].loss, c), 0.0, length=2)
    )


QUIET = {
    "jit": lambda step, args: warned(jax.jit(step), *args),
    "vmap over seeds": map_seeds,
    "vmap over batches": lambda step, args: warned(
        jax.vmap(step, (None, None, 0)), *args[:2], args[2][None]
    ),
    "scan": scan,
    "shard_map": shard,
    "ahead of time": compile_ahead,
    "eval_shape": lambda step, args: warned(partial(jax.eval_shape, step), *args),
    "disable_jit": without_jit,
    "captured": captured,
    "check_step": lambda step, args: warned(partial(jls.check_step, step), *args),
}


@pytest.mark.parametrize(
    "how",
    [
        # Without a jit they take seconds.
        pytest.param(how, marks=[pytest.mark.more] * how.startswith(("shard", "vmap")))
        for how in QUIET
    ],
)
def test_step_that_is_compiled_or_run_so_on_purpose_is_not(how):
    step, args = plain()
    assert QUIET[how](step, args) == []
    # It was no call that counts: two more have to come.
    assert warned(step, *args, calls=1) == []
    assert len(warned(step, *args, calls=1)) == 1


@pytest.mark.parametrize(
    ("make", "jit"),
    [
        (linen, jax.jit),
        (of_nnx, nnx.jit),
        (equinox, eqx.filter_jit),
        (lambda: plain(SIZE - 1), lambda step: step),  # small
    ],
)
def test_jitted_steps_and_small_ones_are_not(make, jit):
    step, args = make()
    assert warned(jit(step), *args) == []


def test_bound_nnx_step_is_not():
    step, (model, optimizer, x) = of_nnx()
    assert warned(nnx.cached_partial(nnx.jit(step), model, optimizer), x) == []
    closes_over_the_batch = nnx.jit(lambda *args: step(*args, np.ones(SIZE, "f4")))
    assert warned(closes_over_the_batch, model, optimizer) == []


def pickled(step):
    cloudpickle = pytest.importorskip("cloudpickle")
    return cloudpickle.loads(cloudpickle.dumps(step))


@pytest.mark.parametrize("again", [pickled, copy.copy, copy.deepcopy])
def test_steps_are_pickled_and_copied_as_before(again):
    step, args = plain()
    for other in (again(step), jax.jit(again(step))):
        params, _, report = other(*args)
        assert not report.skipped
        assert bool(jnp.all(params["w"] < 1))
