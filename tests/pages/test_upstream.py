"""What docs/upstream.md would give to optax passes optax's own tests, and does more."""

import doctest
import functools
import importlib.metadata
import inspect
import re
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_own_tests
import pytest
from shared import INF, NAN, ONE, W, assert_identical

import jls

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # optax's tests use pmap
]

PAGE = (Path(__file__).parents[2] / "docs" / "upstream.md").read_text()
OURS = types.SimpleNamespace(**optax_own_tests.proposed())
GIVES_IN = "self.assertTrue(bool(jnp.isnan(jax.tree.flatten(params)[0][0])))"
VERSION = tuple(map(int, importlib.metadata.version("optax").split(".")[:3]))
has_these_tests = pytest.mark.skipif(VERSION < (0, 2, 8), reason="other tests")


@has_these_tests
@pytest.mark.parametrize("name", optax_own_tests.candidates())
def test_tests_of_apply_if_finite_pass_but_where_it_gives_in(name):
    said = optax_own_tests.tests_of_apply_if_finite(*optax_own_tests.candidates()[name])
    assert sorted(said.values()) == [[], [GIVES_IN], [GIVES_IN], [GIVES_IN]]


@has_these_tests
@pytest.mark.parametrize("name", optax_own_tests.wrappers())
def test_common_tests_of_contrib_pass_but_for_the_dtype_of_jls(name):
    failed = optax_own_tests.common_tests_of_contrib(*optax_own_tests.wrappers()[name])
    bad = [test for test, problems in failed.items() if problems]
    assert len(failed) == 16
    assert bad == (["test_preserve_dtype0"] if name == "jls.skip_nonfinite" else [])


def test_examples_in_the_docstrings_print_what_they_say():
    module = types.ModuleType("upstream")
    vars(module).update(vars(OURS))
    runner = doctest.DocTestRunner()
    with mock.patch.multiple(optax.contrib, create=True, **public()):
        for name, function in public().items():
            for test in doctest.DocTestFinder().find(function, name, globs={}):
                runner.run(test)
    failed, attempted = runner.summarize(verbose=False)
    assert failed == 0
    assert attempted > 20


def public():
    return {
        name: value
        for name, value in vars(OURS).items()
        if inspect.isfunction(value)
        and value.__globals__["__file__"] == str(optax_own_tests.PROPOSED)
        and name[0] != "_"
    }


def test_page_names_each_function():
    assert set(re.findall(r"^\d\. `(\w+)`", PAGE, re.M)) == set(public())


def trajectory(optimizer, gradients, values=None, read=lambda state: state):
    """The params and what is read of the state after each step."""

    def step(carry, inputs):
        params, state = carry
        gradient, value = inputs
        updates, state = optimizer.update(gradient, state, params, value=value)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, read(state))

    values = jnp.ones(len(gradients)) if values is None else values
    start = W, optimizer.init(W)
    return jax.lax.scan(step, start, (gradients, values))[1]


@pytest.mark.parametrize(
    ("inner", "interval"), [(optax.adamw(0.1), 1), (optax.sgd(0.1, momentum=0.9), 3)]
)
def test_params_and_inner_state_are_those_of_jls(inner, interval):
    """And so is the scale, on 40 steps of which half are bad."""
    kinds = np.random.default_rng(0).integers(0, 6, 40)
    gradients = jnp.stack(
        [{0: INF, 1: NAN}.get(kind, ONE * (kind + 1.0)) for kind in kinds]
    )
    values = jnp.where(kinds == 2, jnp.nan, 1.0)
    ours = trajectory(
        OURS.loss_scaled(inner, 8.0, growth_interval=interval),
        gradients,
        values,
        lambda s: (s.inner_state.inner_state, s.loss_scale, s.inner_state.total_skips),
    )
    theirs = trajectory(
        jls.loss_scaled(inner, jls.dynamic(8.0, growth_interval=interval)),
        gradients,
        values,
        lambda s: (s.inner_state, jls.loss_scale(s), s.skips),
    )
    assert_identical(ours, theirs)
    assert len(set(np.asarray(ours[1][1]).tolist())) > 3  # the scale moved


def test_devices_agree():
    optimizer = OURS.skip_nonfinite(
        optax.sgd(0.1), OURS.spike_guard(4), axis_name="device"
    )
    run = functools.partial(trajectory, optimizer, read=lambda state: state.skip_reason)
    step = jnp.arange(12)
    for bad, reason in (jnp.inf, 1), (1e3, 3):
        here = jnp.where(step == 9, bad, 1.0)[:, None] * ONE
        two = jnp.stack([here, jnp.ones_like(here)])
        params, reasons = jax.vmap(run, axis_name="device")(two)
        assert_identical(
            reasons, jnp.where(step == 9, reason, 0) * jnp.ones((2, 1), int)
        )
        assert_identical(params[0], params[1])


def test_table_is_right_about_apply_if_finite_and_us():
    """The other rows are of docs/comparison.md as well, and asked there."""

    def old(inner):
        return optax.apply_if_finite(inner, 10)

    def step(wrap, inner, gradient, params=W, value=1.0):
        optimizer = wrap(inner)
        value = jnp.float32(value)
        state = optimizer.init(params)
        updates, _ = optimizer.update(gradient, state, params, value=value)
        return optax.apply_updates(params, updates)

    narrow = W.astype(jnp.float16)
    with pytest.raises(TypeError, match="cond branches"):
        step(old, optax.adam(0.1), narrow)
    stepped = step(OURS.skip_nonfinite, optax.adam(0.1), narrow)
    np.testing.assert_allclose(stepped, W - 0.1 * jnp.sign(W), rtol=1e-3)

    sgd = optax.sgd(0.1)
    assert not np.array_equal(step(old, sgd, ONE, value=jnp.nan), W)
    assert_identical(step(OURS.skip_nonfinite, sgd, ONE, value=jnp.nan), W)

    zero = jnp.array([-0.0, -0.0])
    assert not np.signbit(step(old, sgd, INF, zero)).any()
    assert_identical(step(OURS.skip_nonfinite, sgd, INF, zero), zero)


def spike_steps(guard, norms):
    return trajectory(
        OURS.skip_nonfinite(optax.sgd(0.0), guard),
        jnp.stack([norms, jnp.zeros_like(norms)], 1),
        read=lambda state: state.skip_reason == 3,
    )[1]


def test_spikes_are_skipped_and_a_new_level_is_learnt():
    norms = 1 + 0.05 * jax.random.normal(jax.random.key(0), (400,))
    norms = norms.at[99].set(50.0).at[159].set(25.0).at[10].set(50.0)
    skipped = np.asarray(spike_steps(OURS.spike_guard(), norms))
    assert np.flatnonzero(skipped).tolist() == [99, 159]
    skipped = spike_steps(OURS.spike_guard(), norms.at[200:].multiply(10.0))
    assert np.sum(skipped[200:]) == 4
    rounded = jnp.ones(400).at[300].set(1 + 2.0**-7).at[350].set(1.1)
    assert np.flatnonzero(spike_steps(OURS.spike_guard(), rounded)).tolist() == [350]


def test_no_run_skips_more_than_the_budget():
    norms = jnp.exp(3 * jax.random.normal(jax.random.key(1), (3000,)))
    norms = jnp.maximum(norms, 1.02 ** jnp.arange(3000.0))
    skipped = np.asarray(spike_steps(OURS.spike_guard(32, 3.0, 2.0), norms))
    counts = np.cumsum(np.append(0, skipped))
    assert counts[-1] > 20
    for steps in (32, 100, 500, 3000):
        most = np.max(counts[steps:] - counts[:-steps])
        assert most <= 2 + steps * 2 / 32


@pytest.mark.skipif(not hasattr(jls, "spikes"), reason="jls has no spikes yet")
def test_guard_decides_as_that_of_jls():
    norms = jnp.exp(jax.random.normal(jax.random.key(2), (1000,)))
    norms = norms.at[jnp.arange(80, 1000, 37)].multiply(100.0)
    ours = spike_steps(OURS.spike_guard(), norms)
    optimizer = jls.skip_nonfinite(optax.sgd(0.0), spikes=jls.spikes())
    gradients = jnp.stack([norms, jnp.zeros_like(norms)], 1)
    theirs = trajectory(optimizer, gradients, read=lambda state: ~state.applied)[1]
    assert 4 < ours.sum() < 100
    assert_identical(ours, theirs)
