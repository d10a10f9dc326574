"""The runs of `jls.check_step`: what is compared, counted, planted and written down."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steps
from steps import plain

import jls
from jls._tools.check import runs
from jls._tools.check.check import read_step
from jls._tools.check.findings import Findings, away, broken, right, untried
from jls._tools.check.good_steps import take_good_steps
from jls._tools.check.leaves import as_numpy, is_rounding, same
from jls._tools.check.mistakes.table import MISTAKES
from jls._tools.check.planting import inf_is_applied

# The mistakes that are planted here are warned of too.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
]


# Values.


def moved_by(units, dtype):
    """1 and a number so many units in the last place above it."""
    eps = float(jnp.finfo(dtype).eps)
    return jnp.ones(3, dtype), jnp.array([1, 1, 1 + units * eps], dtype)


@pytest.mark.parametrize(
    ("dtype", "most"), [(jnp.float32, 4), (jnp.bfloat16, 1), (jnp.float16, 1)]
)
def test_rounding_is_a_few_units_in_the_last_place(dtype, most):
    assert is_rounding(*moved_by(most, dtype))
    assert not is_rounding(*moved_by(most + 1, dtype))


def test_nan_is_the_same_as_nan_and_inf_is_another():
    bad = jnp.array([jnp.nan, jnp.inf, 1.0])
    assert same(bad, bad)
    assert not same(bad, bad.at[0].set(0.0))
    assert not same(bad, bad.at[1].set(-jnp.inf))
    assert not same(bad, bad.at[2].set(1.0 + 1e-7))
    assert same(bad, bad.at[2].set(2.0), exempt=2)


# What a run did. A run is made up here: no step is compiled.


def run_of(runner, **new):
    """A run in which the leaves of the wrapper with these names have new values."""
    start, (scale,) = runner.start, runner.subject.scales
    at = scale.fields | scale.counters
    after = {at[x]: np.asarray(y, as_numpy(start[at[x]]).dtype) for x, y in new.items()}
    return runs.run_of(runner.subject, start, start, after), scale


def small(*args, **kwargs):
    return plain(*args, inner=optax.sgd(0.1), **kwargs)


@pytest.fixture(scope="module")
def runner():
    return read_step(*small(), {})[0]


def test_all_calls_of_a_wrapper_have_to_skip_to_be_a_skip(runner):
    for calls, skips, is_skip in [(1, 1, True), (1, 0, False), (2, 1, False)]:
        run, scale = run_of(runner, steps=calls, skips=skips)
        assert run.skipped == ({scale.at} if is_skip else set())
        assert run.skipped_once == ({scale.at} if skips else set())


def test_scaler_that_counts_down_has_backed_off(runner):
    def backed_off(**new):
        run, scale = run_of(runner, **new)
        return scale.at in run.backed_off

    assert backed_off(loss_scale=512.0)
    assert backed_off(nonfinite_count=1)
    assert not backed_off(finite_count=1)
    assert not backed_off(loss_scale=2048.0)


def test_another_scale_starts_the_count_to_its_growth_anew(runner):
    (scale,) = runner.subject.scales
    count = scale.fields["finite_count"]
    for before, after in [(3, 0), (-1, -1)]:
        runner.start[count] = np.int32(before)
        assert runs.at_scale(runner.start, scale, 2.0) == {scale.at: 2.0, count: after}


def test_next_step_starts_with_what_came_back_at_the_first_scale(runner):
    leaves, (scale,) = list(runner.start), runner.subject.scales
    run = runner.run(leaves, "a step", {scale.at: np.inf})
    assert run.given[scale.at] == np.inf
    assert leaves[scale.at] == run.next[scale.at] == 1024.0
    (steps,) = (i for i in run.changed if i == scale.counters["steps"])
    assert run.next[steps] == run.after[steps] == 1


def test_step_does_not_get_the_arrays_of_the_caller():
    """Nor one that stays on the device, since numpy has no weak types."""
    step, (params, opt_state, batch) = small()
    args = params, opt_state, {**batch, "weak": jnp.asarray(1.0)}
    assert args[2]["weak"].weak_type
    given = []

    def notes(*args):
        given.extend(x for x in jax.tree.leaves(args) if isinstance(x, jax.Array))
        return step(*args)

    runner, _ = read_step(notes, args, {})
    given.clear()
    runner.run(runner.start, "a run")
    assert len(given) == len(jax.tree.leaves(args))
    assert not {id(x) for x in given} & {id(x) for x in jax.tree.leaves(args)}
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(args)}
    assert not {x.unsafe_buffer_pointer() for x in given} & pointers


# Good steps.


def good_steps_of(step, args):
    runner, findings = read_step(step, args, {})
    good = take_good_steps(runner, is_idle=False)
    for mistake in MISTAKES:
        findings.take(mistake.code, [*mistake.of_good_steps(good)])
    return good.steps, findings


def test_second_step_may_compile_once_more():
    """As for the types that the first one returned."""
    step, args = small()
    calls = []

    def compiles_twice(*args):
        calls.append(None)  # the first call only traces
        return (jax.jit(lambda *a: step(*a)) if len(calls) == 3 else step)(*args)

    good, findings = good_steps_of(compiles_twice, args)
    assert [run.compiled for run in good] == [True, True, False]
    assert not findings.of("broken")


# A step that raises.


def raising(error, is_bad, *gradients):
    """A step that raises, once it runs, if its batch is bad."""
    step, args = small(*gradients)

    def checks(params, opt_state, batch):
        if not isinstance(batch["x"], jax.core.Tracer) and is_bad(batch["x"]):
            raise error
        return step(params, opt_state, batch)

    return checks, args


def test_an_error_in_a_trial_is_why_it_is_not_tried():
    error = FloatingPointError("NaN in the batch")
    step, args = raising(error, lambda x: bool(jnp.isnan(x).any()))
    result = jls.check_step(step, *args)
    assert result.ok
    reason = "the step raised FloatingPointError in NaN in batch/x"
    assert result.not_tried == {"NaN in batch/x": reason}


def test_an_error_of_a_good_step_is_raised_whatever_was_read():
    error = ValueError("the batch is of last year. Pass another")
    step, args = raising(error, lambda x: True, steps.twice_unscaled)
    with pytest.raises(ValueError, match="of last year"):
        jls.check_step(step, *args)


# An inf in a gradient.


def applied_with_inf(change):
    def gradients(state, loss_fn, params, transform):
        loss, grads = steps.right_gradients(state, loss_fn, params, transform)
        return loss, jax.tree.map(change, grads)

    runner, _ = read_step(*small(gradients), {})
    return inf_is_applied(runner.subject, runner.start, runner.subject.cleaned[0])


def test_inf_that_is_lost_is_told_from_one_that_is_kept():
    assert applied_with_inf(jnp.nan_to_num)
    # Reading doubts this one: each case of the choice would have to keep it.
    assert not applied_with_inf(lambda g: jnp.where(jnp.abs(g) < 1e30, g, jnp.inf))


# What is written down.


def test_mistake_that_was_found_stays_found():
    findings = Findings()
    found = right(), broken("it was compiled"), broken("it was compiled once more")
    findings.take("retraced", found)
    findings.take("retraced", [right(), untried("no run was left")])
    assert findings.of("broken")["retraced"].text == "it was compiled"


def test_what_is_not_applicable_is_no_mistake_and_not_untried():
    findings = Findings()
    found = untried("no run was left"), away("there is one device")
    findings.take("out of sync", [*found, right()])
    findings.mark_others_not_tried("the step stopped")
    assert findings.status("out of sync") == "does not apply"
    assert findings.status("retraced") == "not tried"


def test_what_was_not_tried_is_raised_if_asked_for():
    check = jls.types.StepCheck(not_tried={"retraced": "no run was left"})
    check.raise_if_broken()
    with pytest.raises(AssertionError, match="Not tried: retraced"):
        check.raise_if_broken(not_tried="raise")
