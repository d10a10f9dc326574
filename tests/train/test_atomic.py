"""A block of `jls.atomic` with several updates, with exceptions, changed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shared import assert_identical

import jls
from jls.types import SkipReason

pytestmark = pytest.mark.standard_promotion


class Module(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.25, rngs=nnx.Rngs(1))
        self.out = nnx.Linear(4, 3, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))


def make():
    model = Module()
    return model, nnx.Optimizer(model, jls.loss_scaled(optax.adam(0.1)), wrt=nnx.Param)


def contents(model, optimizer):
    """All that a skipped step leaves, on the host."""
    everything = nnx.state(model), optimizer.opt_state.inner_state
    values = jax.tree.leaves(jax.tree.map(lambda x: x, everything))
    return [
        np.array(jax.random.key_data(x) if is_key(x) else x)
        for x in map(jnp.asarray, values)
    ]


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


X = jax.random.normal(jax.random.key(0), (8, 4))
GOOD, BAD = 1.0, jnp.nan


def take(model, optimizer, x, factor):
    """A step of `optimizer` by hand on the loss times `factor`."""

    def loss_fn(model):
        return factor * jnp.mean(model(x) ** 2)

    grad_fn = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
    loss, grads = grad_fn(optimizer, model)
    optimizer.update(model, grads, value=loss)


@pytest.mark.cover(1)
@pytest.mark.parametrize("factors", [(BAD, GOOD), (GOOD, BAD), (GOOD, BAD, GOOD)])
@pytest.mark.parametrize("jit", [nnx.jit, lambda step: step], ids=["jit", "eager"])
def test_one_skip_in_a_block_rolls_back_all_of_it(factors, jit):
    """As a critic is trained several times, or gradients are added up by hand."""
    model, optimizer = make()

    @jit
    def step(model, optimizer, x, factors):
        with jls.atomic(optimizer, model):
            for factor in factors:
                take(model, optimizer, x, factor)

    before = contents(model, optimizer)
    step(model, optimizer, X, factors)
    assert_identical(contents(model, optimizer), before)
    metrics = jls.metrics(optimizer, host=True)
    lost = {name: metrics[name] for name in ("steps", "skips", "consecutive_skips")}
    assert set(lost.values()) == {len(factors)}
    assert metrics["last_skip_reason"] == SkipReason.LOSS
    assert not metrics["applied"]
    step(model, optimizer, X, (GOOD, GOOD))
    assert jls.metrics(optimizer, host=True)["applied"]
    assert any(map(np.any, map(np.not_equal, contents(model, optimizer), before)))


@pytest.mark.parametrize("bad", [0, 1])
def test_one_skip_rolls_back_the_other_optimizer_too(bad):
    models = [make() for _ in range(2)]
    before = [contents(*one) for one in models]

    @nnx.jit
    def step(models, x):
        (generator, of_generator), (critic, of_critic) = models
        with jls.atomic(of_generator, generator, critic, of_critic):
            for i, (model, optimizer) in enumerate(models):
                take(model, optimizer, x, BAD if i == bad else GOOD)

    step(models, X)
    for i, (model, optimizer) in enumerate(models):
        assert_identical(contents(model, optimizer), before[i])
        metrics, health = jls.metrics(optimizer), jls.health(optimizer, model)
        assert not metrics["applied"]
        assert metrics["skips"] == 1
        reason = SkipReason.LOSS if i == bad else SkipReason.ATOMIC
        assert metrics["last_skip_reason"] == reason
        assert health.verdict == ("non-finite loss" if i == bad else "recovering")
        is_with = "another optimizer in the block of jls.atomic" in health.sentence
        assert is_with == (i != bad)


def test_what_is_changed_by_hand_in_a_block_that_skips_goes_back():
    model, optimizer = make()
    before = contents(model, optimizer)
    with jls.atomic(optimizer, model):
        model.out.kernel.set_value(0.9 * model.out.kernel.get_value())
        take(model, optimizer, X, BAD)
    assert_identical(contents(model, optimizer), before)


def test_a_block_that_raises_leaves_all_as_it_was():
    model, optimizer = make()
    before = contents(model, optimizer)

    def step():
        with jls.atomic(optimizer, model):
            take(model, optimizer, X, GOOD)
            raise KeyError

    with pytest.raises(KeyError):
        step()
    assert not jls.metrics(optimizer)["applied"]
    assert_identical(contents(model, optimizer), before)


def test_a_block_with_one_update_moves_no_more_than_the_step_alone():
    """Of what the optimizer updates: it has rolled that back itself."""
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jls.loss_scaled(optax.adam(0.1)), wrt=nnx.Param)

    def by_hand(model, optimizer, x):
        take(model, optimizer, x, GOOD)

    def atomic(model, optimizer, x):
        with jls.atomic(optimizer, model):
            take(model, optimizer, x, GOOD)

    def moved(step):
        lowered = nnx.jit(step).lower(model, optimizer, jnp.ones((8, 64)))
        return lowered.compile().cost_analysis()["bytes accessed"]

    assert moved(atomic) < 1.01 * moved(by_hand)


def test_updates_in_a_loop_are_rolled_back_by_the_one_that_is_skipped():
    """The loop is traced once, and skips in its second round of three."""
    model, optimizer = make()
    before = contents(model, optimizer)

    @nnx.jit
    def step(model, optimizer, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry))
        def rounds(objects, factor):
            take(*objects, x, factor)
            return objects

        with jls.atomic(optimizer, model):
            rounds((model, optimizer), jnp.array([GOOD, BAD, GOOD]))

    step(model, optimizer, X)
    assert_identical(contents(model, optimizer), before)
    assert jls.metrics(optimizer)["skips"] == 3


@pytest.mark.parametrize("is_first", [True, False])
def test_an_update_that_is_lost_counts_for_the_reason_of_the_block(is_first):
    """As a good step of the same optimizer, and after a good block."""
    model, optimizer = make()
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    losses = [jnp.float32(jnp.nan if is_first == bad else 1) for bad in (True, False)]

    @nnx.jit
    def step(model, optimizer, losses):
        with jls.atomic(optimizer, model):
            for loss in losses:
                optimizer.update(model, grads, value=loss)

    step(model, optimizer, [jnp.float32(1), jnp.float32(1)])
    for names in (["skips"], ["consecutive_skips", "nonfinite_losses"]):
        assert [int(jls.metrics(optimizer)[name]) for name in names] == [0] * len(names)
    step(model, optimizer, losses)
    metrics = jls.metrics(optimizer, host=True)
    counted = "skips", "consecutive_skips", "nonfinite_losses"
    assert [metrics[name] for name in counted] == [2, 2, 2]
    assert (metrics["steps"], metrics["last_skip_reason"]) == (4, SkipReason.LOSS)
    step(model, optimizer, [jnp.float32(1), jnp.float32(1)])
    metrics = jls.metrics(optimizer, host=True)
    assert [metrics[name] for name in counted] == [2, 0, 2]


def test_a_block_that_was_not_entered_is_told():
    model, optimizer = make()
    with pytest.warns(jls.JlsWarning, match=r"not entered.*`with jls.atomic\(") as said:
        jls.atomic(optimizer, model)
    assert said[0].filename == __file__
    block = jls.atomic(optimizer, model)
    for _ in range(2):
        with block:  # hears nothing
            take(model, optimizer, X, GOOD)
    del block

    @jls.atomic(optimizer, model)
    def step(x):
        take(model, optimizer, x, GOOD)

    step(X)
    step(X)
    assert jls.metrics(optimizer)["steps"] == 4


def test_a_bare_optimizer_beside_is_rolled_back_too():
    model, optimizer = make()
    other = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = contents(model, optimizer)
    with jls.atomic(optimizer, model, other):
        take(model, optimizer, X, BAD)
        other.update(model, nnx.state(model, nnx.Param))
    assert_identical(contents(model, optimizer), before)


def test_a_block_inside_a_block_is_a_part_of_it():
    model, optimizer = make()
    other = nnx.Optimizer(model, jls.loss_scaled(optax.sgd(0.1)), wrt=nnx.Param)
    before = contents(model, optimizer)
    with jls.atomic(optimizer, model):
        take(model, optimizer, X, BAD)
        with jls.atomic(other, model):
            take(model, other, X, GOOD)
    assert_identical(contents(model, optimizer), before)
