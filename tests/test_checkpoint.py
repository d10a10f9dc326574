"""jls comes into a running job and goes out of it; the optimizer does not notice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from shared import assert_identical, both, run

import jls

pytestmark = pytest.mark.standard_promotion

GRADS = [{"w": jnp.array([1.0, -2.0]), "b": jnp.float32(x)} for x in (1.0, 2.0, 3.0)]
BAD = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.float32(1.0)}


def make_params():
    return {"w": jnp.array([0.5, -1.5]), "b": jnp.float32(2.0)}


@functools.cache
def make_inner():
    accumulated = optax.MultiSteps(optax.adamw(0.1), 2).gradient_transformation()
    return optax.chain(optax.clip_by_global_norm(1.0), accumulated)


@functools.cache
def make():
    return jls.loss_scaled(make_inner(), jls.dynamic(8.0, growth_interval=2))


def step(optimizer, params, state, grads):
    updates, state = jitted(optimizer.update)(grads, state, params)
    return optax.apply_updates(params, updates), state


jitted = functools.cache(jax.jit)


def pointers(*trees):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]


def test_wrapped_state_goes_on_where_the_bare_one_was():
    params, bare = run(make_inner(), make_params(), GRADS)
    state = jls.wrap_state(make(), bare, params)
    assert jax.tree.structure(state) == jax.tree.structure(make().init(params))
    assert_identical(state.inner_state, bare)
    assert_identical(
        state._replace(inner_state=()),
        make().init(())._replace(inner_state=(), nonfinite_leaves=jnp.zeros(2, bool)),
    )
    skipped, after_skip = step(make(), params, state, BAD)
    assert_identical(skipped, params)
    for grads in GRADS:
        expected, bare = step(make_inner(), params, bare, grads)
        params, after_skip = step(make(), params, after_skip, grads)
        assert_identical(params, expected)
        assert_identical(after_skip.inner_state, bare)
    assert (after_skip.steps, after_skip.skips) == (4, 1)


def test_wrapped_state_is_that_of_init_for_the_compiler():
    params, bare = run(make_inner(), make_params(), GRADS)
    traces = []

    @jax.jit
    def traced(grads, state, params):
        traces.append(1)
        return make().update(grads, state, params)

    traced(BAD, make().init(params), params)
    _, state = traced(BAD, jls.wrap_state(make(), bare, params), params)
    traced(BAD, state, params)
    assert len(traces) == 1


def test_wrapped_state_shares_no_buffer_with_what_it_was_given():
    def init(params):  # as optax.contrib.schedule_free does: the state is the params
        return params, jnp.zeros(())

    inner = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    params = make_params()
    bare = inner.init(params)
    state = jls.wrap_state(jls.loss_scaled(inner), bare, params)
    assert len(set(pointers(state))) == len(pointers(state))
    assert not set(pointers(state)) & set(pointers(params, bare))
    twice = jnp.ones(2), jnp.ones(())
    shared = jax.tree.map(lambda x: x, (params | {"w": twice[0]}, params["b"]))
    state = jls.wrap_state(jls.loss_scaled(inner), shared, params)
    assert len(set(pointers(state))) == len(pointers(state))
    jax.tree.map(lambda leaf: leaf.delete(), state)
    assert_identical(shared[0]["w"], twice[0])


def test_wrap_takes_what_numpy_and_flax_restore():
    params, bare = run(make_inner(), make_params(), GRADS)
    data = serialization.to_bytes(bare)
    restored = serialization.from_bytes(make_inner().init(params), data)
    for given in (restored, jax.tree.map(np.asarray, bare)):
        state = jls.wrap_state(make(), given, params)
        assert_identical(state.inner_state, bare)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    raw = serialization.msgpack_restore(data)
    given = jls.upgrade_state(make_inner().init(params), raw)
    assert_identical(jls.wrap_state(make(), given, params).inner_state, bare)


def test_wrap_works_for_skip_nonfinite_and_every_kind_of_leaf():
    def init(params):
        return {"key": jax.random.key(3), "none": None, "n": jnp.int32(4), "p": params}

    inner = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    optimizer = jls.skip_nonfinite(inner)
    params = {"": jnp.ones(2, jnp.bfloat16), "c": {"": jnp.ones(1, jnp.complex64)}}
    state = jls.wrap_state(optimizer, inner.init(params), params)
    assert jls.loss_scale(state) == 1.0
    assert state.inner_state["key"] == jax.random.key(3)
    assert state.inner_state["none"] is None
    assert_identical(state.inner_state["p"], params)


def test_wrap_and_unwrap_work_traced():
    """As a target for Orbax: jax.eval_shape of it."""
    params, bare = run(make_inner(), make_params(), GRADS)
    for wrap in both(lambda bare, params: jls.wrap_state(make(), bare, params)):
        assert_identical(wrap(bare, params), jls.wrap_state(make(), bare, params))
    for unwrap in both(jls.unwrap_state):
        assert_identical(unwrap(jls.wrap_state(make(), bare, params)), bare)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            optax.sgd(0.1).init,
            r"at '1' it has EmptyState\(\), and .* MultiStepsState\(",
        ),
        (
            lambda p: make_inner().init({"w": p["w"]}),
            r"at '1/inner_opt_state/0/mu' it has dict\(w\), and .* dict\(b, w\)\. Wrap",
        ),
        (lambda p: make().init(p), "state of jls already"),
        (
            lambda p: serialization.to_state_dict(make_inner().init(p)),
            r"at the root it has dict\(0, 1\), .* jls\.upgrade_state",
        ),
        (
            lambda p: make_inner().init(p | {"w": jnp.ones(3)}),
            r"'1/inner_opt_state/0/mu/w' it has float32 of shape \(3,\), and the "
            r"optimizer float32 of shape \(2,\)",
        ),
        (
            lambda p: make_inner().init(p | {"b": jnp.bfloat16(1.0)}),
            r"'1/inner_opt_state/0/mu/b' it has bfloat16 .* Cast it",
        ),
        (lambda p: None, "at the root it has None"),
        (lambda p: 3.0, r"at the root it has a Python float of shape \(\)"),
    ],
)
def test_wrap_names_the_first_difference(given, message):
    params = make_params()
    with pytest.raises(ValueError, match=message):
        jls.wrap_state(make(), given(params), params)


def test_wrap_names_the_wrong_optimizer():
    params = make_params()
    chained = optax.chain(make(), optax.scale(1.0))
    for optimizer in (make_inner(), chained):
        with pytest.raises(TypeError, match=r"optimizer must be made by jls\.loss_"):
            jls.wrap_state(optimizer, make_inner().init(params), params)


def test_unwrapped_state_goes_on_where_the_wrapped_one_was():
    params, state = run(make(), make_params(), [*GRADS, BAD])
    bare = jls.unwrap_state(state)
    assert jax.tree.structure(bare) == jax.tree.structure(make_inner().init(params))
    for grads in GRADS:
        expected, state = step(make(), params, state, grads)
        params, bare = step(make_inner(), params, bare, grads)
        assert_identical(params, expected)
        assert_identical(bare, state.inner_state)


def test_unwrap_reaches_every_wrapper_however_nested():
    params = make_params()
    labels = {"w": "a", "b": "b"}

    def nested(wrap):
        parts = {"a": wrap(optax.adam(0.1)), "b": wrap(optax.sgd(0.1, momentum=0.5))}
        return optax.chain(optax.clip(1.0), optax.multi_transform(parts, labels))

    state = nested(jls.loss_scaled).init(params)
    assert_identical(jls.unwrap_state(state), nested(lambda inner: inner).init(params))


def test_unwrap_names_what_has_no_wrapper():
    for state in (optax.adam(0.1).init(jnp.ones(2)), jls.dynamic().init(), None):
        with pytest.raises(ValueError, match=r"must carry a state of jls\.loss"):
            jls.unwrap_state(state)


def test_train_state_gets_the_wrapper_and_loses_it():
    def fresh(tx):
        return TrainState.create(apply_fn=None, params=make_params(), tx=tx)

    bare, optimizer = make_inner(), make()
    state = fresh(bare).apply_gradients(grads=GRADS[0])
    reference = state
    state = state.replace(
        tx=optimizer,
        opt_state=jls.wrap_state(optimizer, state.opt_state, state.params),
    )
    state = state.apply_gradients(grads=BAD).apply_gradients(grads=GRADS[1])
    assert jls.metrics(state)["skips"] == 1
    state = jls.unwrap_state(state).replace(tx=bare)
    state = state.apply_gradients(grads=GRADS[2])
    for grads in GRADS[1:]:
        reference = reference.apply_gradients(grads=grads)
    assert_identical(
        (state.params, state.opt_state), (reference.params, reference.opt_state)
    )
    assert (state.step, reference.step) == (4, 3)


def test_nnx_optimizer_gets_the_wrapper_and_loses_it():
    def fresh(tx):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def update(model, optimizer, factor):
        grads = jax.tree.map(lambda p: p * factor, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)

    model, old = fresh(optax.adam(0.1))
    reference, plain = fresh(optax.adam(0.1))
    update(model, old, 1.0)
    new = nnx.Optimizer(model, jls.loss_scaled(optax.adam(0.1)), wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    with pytest.raises(ValueError, match=r"new\.opt_state\._replace"):
        jls.wrap_state(jls.loss_scaled(optax.adam(0.1)), old.opt_state, params)
    new.opt_state = new.opt_state._replace(inner_state=old.opt_state)
    update(model, new, jnp.nan)
    update(model, new, 1.0)
    assert jls.metrics(new)["skips"] == 1
    old = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    old.opt_state = jls.unwrap_state(new.opt_state)
    update(model, old, 1.0)
    for _ in range(3):
        update(reference, plain, 1.0)
    assert_identical(nnx.state(model), nnx.state(reference))
    assert_identical(nnx.state(old.opt_state), nnx.state(plain.opt_state))
