"""What `jls.check_step` notes of bfloat16 parameters that stand still."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jls

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:.*parameters are bfloat16"),
]

BF16 = jnp.bfloat16
X = jnp.float32(np.random.default_rng(0).normal(size=(16, 8)))


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"].astype(jnp.float32))
    return jnp.mean(jnp.square(hidden @ params["v"].astype(jnp.float32) - 1))


def make_params(dtype):
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(8, 32)), "v": rng.normal(size=32)}
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), params)


def notes_of(inner, dtype=BF16):
    optimizer = jls.skip_nonfinite(inner)
    params = make_params(dtype)
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    check = jls.check_step(step, params, optimizer.init(params), X)
    assert check.ok
    return [x for x in check.notes if "lost" in x or "cannot fall" in x]


def test_updates_that_are_lost_are_counted():
    lost, *others = notes_of(optax.adam(1e-5, b2=0.95))
    assert not others
    share = int(lost.split(" %")[0])
    # A weight under 512 x 1e-5 moves: 1 of 200 or so.
    assert 90 < share <= 100
    assert "params/v, params/w" in lost
    assert "Write jls.bfloat16_params(inner)" in lost
    (some,) = notes_of(optax.adam(1e-3, b2=0.95))
    assert 5 < int(some.split(" %")[0]) < 95


def test_count_is_that_of_the_updates():
    """By hand, of the second step, whose updates optax makes."""
    half = optax.stateless(lambda u, _: u | {"w": u["w"].at[:, :16].set(0.0)})
    inner = optax.chain(optax.sgd(1e-2), half)
    optimizer, params = jls.skip_nonfinite(inner), make_params(BF16)
    state = optimizer.init(params)
    for _ in range(2):
        grads = jax.grad(loss_fn)(params, X)
        updates, state = optimizer.update(grads, state, params)
        before, params = params, optax.apply_updates(params, updates)
    same = [
        np.asarray(a == b)
        for a, b in zip(*map(jax.tree.leaves, (before, params)), strict=True)
    ]
    moving = [np.asarray(u != 0) for u in jax.tree.leaves(updates)]
    lost = sum(np.sum(a & b) for a, b in zip(same, moving, strict=True))
    (note,) = notes_of(inner)
    assert abs(float(note.split(" %")[0]) - 100 * lost / sum(map(np.sum, moving))) < 2


def test_second_moment_that_cannot_fall_is_named():
    (note,) = [x for x in notes_of(optax.adam(1e-2)) if "cannot fall" in x]
    assert "opt_state/inner_state/0/nu/v" in note
    assert "b2=0.999" in note
    assert not [x for x in notes_of(optax.adam(1e-2, b2=0.99)) if "cannot fall" in x]


@pytest.mark.filterwarnings("ignore:no parameter is bfloat16")
@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
def test_under_the_wrapper_nothing_is_noted(rounding):
    assert not notes_of(jls.bfloat16_params(optax.adam(1e-6), rounding=rounding))


@pytest.mark.parametrize("mu_dtype", [BF16, None])
def test_float32_parameters_are_left_alone(mu_dtype):
    assert not notes_of(optax.adam(1e-6, mu_dtype=mu_dtype), jnp.float32)


def test_nnx_step_is_noted_and_its_model_stays():
    model = nnx.Linear(8, 1, param_dtype=BF16, rngs=nnx.Rngs(0))
    for inner, count in [
        (optax.adam(1e-6), 2),
        (jls.bfloat16_params(optax.adam(1e-6)), 0),
    ]:
        optimizer = nnx.Optimizer(model, jls.skip_nonfinite(inner), wrt=nnx.Param)
        before = nnx.state(model)
        step = nnx.jit(
            jls.train_step(lambda model, x: jnp.mean(jnp.square(model(x) - 1)))
        )
        check = jls.check_step(step, model, optimizer, X)
        found = [x for x in check.notes if "lost" in x or "cannot fall" in x]
        assert len(found) == count, found
        assert all(
            map(np.array_equal, *map(jax.tree.leaves, (before, nnx.state(model))))
        )


def test_moments_of_float32_parameters_are_looked_at_too():
    """As of an optimizer of one's own, which stores them in bfloat16."""
    adam = optax.scale_by_adam()

    def narrow(state):
        return state._replace(nu=jax.tree.map(lambda x: x.astype(BF16), state.nu))

    def update(updates, state, params=None):
        updates, new = adam.update(updates, state, params)
        return updates, narrow(new)

    inner = optax.GradientTransformation(
        lambda params: narrow(adam.init(params)), update
    )
    (note,) = notes_of(optax.chain(inner, optax.scale(-1e-3)), jnp.float32)
    assert "cannot fall" in note


@pytest.mark.cover(1)
@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
@pytest.mark.parametrize("guard", [jls.skip_nonfinite, jls.loss_scaled])
def test_step_under_the_wrapper_is_read_to_the_end(guard, rounding):
    """Its parameters come out of bits, which follow the gradients all the same."""
    clip = optax.clip_by_global_norm(1.0)
    inner = optax.chain(clip, optax.adam(1e-3))
    optimizer = guard(jls.bfloat16_params(inner, rounding=rounding))
    params = make_params(BF16)
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    check = jls.check_step(step, params, optimizer.init(params), X)
    assert check.ok
    assert not check.not_tried


def test_mistakes_under_the_wrapper_are_found():
    optimizer = jls.loss_scaled(jls.bfloat16_params(optax.sgd(0.1)), jls.dynamic(64.0))

    @jax.jit
    def forgetful(params, opt_state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, new_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda p: p * BF16(0.5), params), new_state

    params = make_params(BF16)
    broken = jls.check_step(forgetful, params, optimizer.init(params), X).broken
    assert broken == ("not scaled", "not atomic")


# What follows the parameters.


def notes_of_following(dtype, follow):
    optimizer = jls.skip_nonfinite(jls.bfloat16_params(optax.adam(1e-3)))
    params = make_params(BF16)
    train = jls.train_step(loss_fn, optimizer)

    @jax.jit
    def step(params, average, state, x):
        params, state, report = train(params, state, x)
        return params, follow(params, average), state, report

    average = jax.tree.map(lambda p: p.astype(dtype), params)
    check = jls.check_step(step, params, average, optimizer.init(params), X)
    assert check.ok
    return [x for x in check.notes if "stands still" in x]


def by_hand(params, average):
    return jax.tree.map(
        lambda a, p: (0.999 * a + 0.001 * p).astype(a.dtype), average, params
    )


def by_optax(params, average):
    return optax.incremental_update(params, average, 0.005)


@pytest.mark.parametrize("follow", [by_hand, by_optax])
def test_average_in_bfloat16_stands_still(follow):
    (note,) = notes_of_following(BF16, follow)
    assert "average/v, average/w" in note
    assert not notes_of_following(jnp.float32, follow)


def test_what_follows_at_once_does_not():
    assert not notes_of_following(BF16, lambda params, average: params)


# How gradients add up.


def notes_of_step(step, params, state, batch):
    return jls.check_step(step, params, state, batch).notes


def hand_written(optimizer, loss):
    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return step


def lookup(params, tokens):
    return jnp.mean(jnp.square(params["w"][tokens].astype(jnp.float32)))


def loop(params, xs):
    def body(h, x):
        return jnp.tanh(x + h @ params["w"][:, :8].astype(jnp.float32)), None

    return jnp.mean(jax.lax.scan(body, jnp.zeros((16, 8)), xs)[0])


@pytest.mark.parametrize(
    ("loss", "batch"),
    [(lookup, jnp.arange(64) % 8), (loop, jnp.stack([X] * 4))],
)
def test_gradients_that_add_up_in_bfloat16_are_noted(loss, batch):
    optimizer = jls.skip_nonfinite(jls.bfloat16_params(optax.adam(1e-3)))
    params = {"w": make_params(BF16)["w"]}
    state = optimizer.init(params)
    notes = notes_of_step(hand_written(optimizer, loss), params, state, batch)
    (note,) = [x for x in notes if "add up in bfloat16" in x]
    assert "test_still.py" in note
    ours = jax.jit(jls.train_step(loss, optimizer))
    assert not [x for x in notes_of_step(ours, params, state, batch) if "add up" in x]


def test_step_without_a_half_product_is_noted():
    optimizer = jls.skip_nonfinite(jls.bfloat16_params(optax.adam(1e-3)))
    params = make_params(BF16)
    state = optimizer.init(params)
    for dtype, count in [(None, 1), (BF16, 0)]:
        step = jax.jit(jls.train_step(loss_fn, optimizer, compute_dtype=dtype))
        notes = notes_of_step(step, params, state, X)
        assert len([x for x in notes if "all products are float32" in x]) == count
