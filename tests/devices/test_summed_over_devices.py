"""`jls.check_step` on gradients that `shard_map` has summed, beside a mean of the loss.

The right value of each step is that of the same step on one device with all data.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jls
from jls._program.jaxprs import to_varying

pytestmark = pytest.mark.standard_promotion

CODE = "summed over devices"
N = 4
MESH = Mesh(np.array(jax.devices()[:N]), ("data",))
GRID = Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "data"))
RNG = np.random.default_rng(0)
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32),
    "v": jnp.asarray(RNG.normal(size=4), jnp.float32),
}
X = jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32)


def losses(params, x):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2


def loss_fn(params, x):
    return jnp.mean(losses(params, x))


def mean(tree):
    return lax.pmean(tree, "data")


def total(tree):
    return lax.psum(tree, "data")


def over_n(tree):
    return jax.tree.map(lambda x: x / N, tree)


def plain(loss_fn, opt_state, *args, **options):
    return jax.value_and_grad(loss_fn, **options)(*args)


def scaled(loss_fn, opt_state, *args, **options):
    return jls.value_and_grad(loss_fn, **options)(opt_state, *args)


def scaled_by_hand(loss_fn, opt_state, *args):
    def scaled(*args):
        return jls.scale(opt_state, loss_fn(*args))

    loss, grads = jax.value_and_grad(scaled)(*args)
    return jls.unscale(opt_state, (loss, grads))


def autocast(loss_fn, opt_state, *args):
    return scaled(jls.autocast(loss_fn, jnp.float16), opt_state, *args)


SGD = optax.sgd(0.1)
ways = pytest.mark.parametrize("grad", [plain, scaled, scaled_by_hand, autocast])


def check(grads_of, grad, mesh=MESH, rule=SGD, **options):
    """The result for a step, and by what its update is larger than the true one."""
    if grad is plain:
        optimizer = jls.skip_nonfinite(rule, axis_name=mesh.axis_names)
    else:
        scaler = jls.dynamic(2.0**7)
        optimizer = jls.loss_scaled(rule, scaler, axis_name=mesh.axis_names)

    def step(params, opt_state, x):
        loss, grads = grads_of(grad, opt_state, params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    step = jax.jit(jax.shard_map(step, mesh=mesh, **specs, **options))
    opt_state = optimizer.init(PARAMS)
    new, _ = step(PARAMS, opt_state, X)
    true = jax.grad(loss_fn)(PARAMS, X)["v"]
    factor = jnp.vdot((PARAMS["v"] - new["v"]) / 0.1, true) / jnp.vdot(true, true)
    return jls.check_step(step, PARAMS, opt_state, X), round(float(factor), 2)


# Wrong: four times the true update.


def mean_of_both(grad, opt_state, params, x):
    loss, grads = grad(loss_fn, opt_state, params, x)
    return mean((loss, grads))  # the wrong line


def mean_of_the_loss(grad, opt_state, params, x):
    loss, grads = grad(loss_fn, opt_state, params, x)
    return mean(loss), grads


def mean_made_by_hand(grad, opt_state, params, x):
    loss, grads = grad(loss_fn, opt_state, params, x)
    return total(loss) / lax.axis_size("data"), over_n(total(grads))


def jitted_inside(grad, opt_state, params, x):
    loss, grads = grad(jax.jit(loss_fn), opt_state, params, x)
    return jax.jit(mean)((loss, grads))


def with_remat(grad, opt_state, params, x):
    loss, grads = grad(jax.checkpoint(loss_fn), opt_state, params, x)
    return mean(loss), mean(grads)


def mean_of_an_average_over_tokens(grad, opt_state, params, x):
    """The loss uses a sum over devices, and is summed again."""

    def loss_fn(params, x):
        return jnp.sum(losses(params, x)) / total(jnp.float32(len(x))) * N

    return mean(grad(loss_fn, opt_state, params, x))


WRONG = [
    mean_of_both,
    mean_of_the_loss,
    mean_made_by_hand,
    jitted_inside,
    with_remat,
    mean_of_an_average_over_tokens,
]


@ways
@pytest.mark.parametrize("grads_of", WRONG)
def test_sums_beside_a_mean_of_the_loss_are_broken(grads_of, grad):
    result, factor = check(grads_of, grad)
    assert factor == N
    assert result.broken == (CODE,), str(result)
    said = "gradients are summed over 'data' already: average the loss instead of"
    assert result.seen[CODE].startswith(said)


@ways
def test_sum_that_the_optimizer_makes_a_mean_is_not_tried(grad):
    rule = optax.chain(optax.scale(1 / N), optax.sgd(0.1))
    result, factor = check(mean_of_both, grad, rule=rule)
    assert factor == 1
    assert result.ok, str(result)
    assert CODE in result.not_tried


def test_the_line_is_that_of_the_mean_of_the_gradients():
    result, _ = check(mean_of_both, scaled)
    place = result.where[CODE]
    code = mean.__code__
    assert (place.function, place.line) == ("mean", code.co_firstlineno + 1)
    assert place.operation == "psum"


def test_sum_over_one_axis_of_two_is_broken():
    result, factor = check(mean_of_both, scaled, GRID)
    assert factor == N
    assert result.broken == (CODE,), str(result)


# Right.


def mean_inside(grad, opt_state, params, x):
    return grad(lambda p: mean(loss_fn(p, x)), opt_state, params)


def mean_inside_and_again(grad, opt_state, params, x):
    loss, grads = grad(lambda p: mean(loss_fn(p, x)), opt_state, params)
    return mean((loss, grads))


def local_sums_over_a_global_count(grad, opt_state, params, x):
    def loss_fn(params):
        return jnp.sum(losses(params, x)) / total(jnp.float32(len(x)))

    loss, grads = grad(loss_fn, opt_state, params)
    return total(loss), grads


def sums_over_n(grad, opt_state, params, x):
    loss, grads = grad(loss_fn, opt_state, params, x)
    return mean(loss), over_n(grads)


def sums_over_n_before_the_mean(grad, opt_state, params, x):
    loss, grads = grad(loss_fn, opt_state, params, x)
    return mean(loss), mean(over_n(grads))


def loss_over_n(grad, opt_state, params, x):
    loss, grads = grad(lambda p: loss_fn(p, x) / N, opt_state, params)
    return total(loss), grads


def varying_params(grad, opt_state, params, x):
    own = jax.tree.map(lambda x: to_varying(x, frozenset({"data"})), params)
    return mean(grad(loss_fn, opt_state, own, x))


def reduce_scatter(grad, opt_state, params, x):
    own = jax.tree.map(lambda x: to_varying(x, frozenset({"data"})), params)
    loss, grads = grad(loss_fn, opt_state, own, x)
    shards = jax.tree.map(lambda x: lax.psum_scatter(x, "data") / N, grads)

    def gathered(shard):
        zeros = jnp.zeros((N, *shard.shape), shard.dtype)
        return total(to_varying(zeros, frozenset({"data"})).at[_index()].set(shard))

    return mean(loss), jax.tree.map(gathered, shards)


def _index():
    return lax.axis_index("data")


def loss_beside_its_mean(grad, opt_state, params, x):
    """What is averaged afterwards was averaged inside, too."""
    if grad in (scaled_by_hand, autocast):
        return mean_inside(grad, opt_state, params, x)

    def loss_fn_(params):
        loss = loss_fn(params, x)
        return mean(loss), loss

    (_, loss), grads = grad(loss_fn_, opt_state, params, has_aux=True)
    return mean(loss), grads


def loss_beside_a_part_of_it(grad, opt_state, params, x):
    """A part of the whole is differentiated, and the whole is given."""
    if grad in (scaled_by_hand, autocast):
        return mean_inside(grad, opt_state, params, x)

    def loss_fn_(params):
        loss = loss_fn(params, x)
        return loss / N, loss

    (_, loss), grads = grad(loss_fn_, opt_state, params, has_aux=True)
    return mean(loss), grads


def another_loss_beside_it(grad, opt_state, params, x):
    """The loss that is given is an auxiliary output."""
    if grad in (scaled_by_hand, autocast):
        return mean_inside(grad, opt_state, params, x)

    def loss_fn_(params):
        loss = mean(loss_fn(params, x))
        return loss, jnp.mean(jnp.abs(losses(params, x)))

    (_, loss), grads = grad(loss_fn_, opt_state, params, has_aux=True)
    return mean(loss), grads


def divided_by_a_rule(grad, opt_state, params, x):
    """A backward pass of the user's own makes a mean of the sum."""

    @jax.custom_vjp
    def averaged(loss):
        return loss

    averaged.defvjp(lambda loss: (loss, None), lambda _, given: (given / N,))
    loss, grads = grad(lambda p: averaged(loss_fn(p, x)), opt_state, params)
    return mean(loss), grads


def seed_of_a_mean(grad, opt_state, params, x):
    """A backward pass that the user begins with 1 / n."""
    if grad is not plain:
        return mean_inside(grad, opt_state, params, x)
    loss, pull = jax.vjp(lambda p: loss_fn(p, x), params)
    (grads,) = pull(to_varying(jnp.float32(1 / N), frozenset({"data"})))
    return mean(loss), grads


SEEN = [
    mean_inside,
    mean_inside_and_again,
    local_sums_over_a_global_count,
    sums_over_n,
    sums_over_n_before_the_mean,
    loss_over_n,
    varying_params,
]
NOT_SEEN = [
    reduce_scatter,
    loss_beside_its_mean,
    loss_beside_a_part_of_it,
    another_loss_beside_it,
    divided_by_a_rule,
    seed_of_a_mean,
]


@ways
@pytest.mark.parametrize("grads_of", [*SEEN, *NOT_SEEN])
def test_right_form_is_right(grads_of, grad):
    result, factor = check(grads_of, grad)
    assert factor == 1
    assert result.ok, str(result)
    if grads_of not in NOT_SEEN:
        assert not result.not_tried, str(result)


@ways
def test_mean_without_checks_is_right(grad):
    result, factor = check(mean_of_both, grad, check_vma=False)
    assert factor == 1
    assert result.ok, str(result)
    assert CODE in result.not_applicable


@ways
def test_mean_inside_over_one_axis_of_two_is_right(grad):
    result, factor = check(mean_inside, grad, GRID)
    assert factor == 1
    assert result.ok, str(result)


def sums_on_purpose(grad, opt_state, params, x):
    loss, grads = grad(loss_fn, opt_state, params, x)
    return total(loss), grads


@ways
def test_sums_on_purpose_are_right(grad):
    result, factor = check(sums_on_purpose, grad)
    assert factor == N  # as meant
    assert result.ok, str(result)
    assert not result.not_tried, str(result)


def test_loss_that_is_not_given_is_not_tried():
    optimizer = jls.skip_nonfinite(optax.sgd(0.1), axis_name="data")

    def step(params, opt_state, x):
        grads = mean(jax.grad(loss_fn)(params, x))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    step = jax.jit(jax.shard_map(step, mesh=MESH, **specs))
    result = jls.check_step(step, PARAMS, optimizer.init(PARAMS), X)
    assert result.ok
    assert result.not_tried == {CODE: "the update is not given the loss"}
