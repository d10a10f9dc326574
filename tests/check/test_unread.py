"""`jls.check_step` on steps without a program to read: nothing is guessed."""

import jax
import jax.numpy as jnp
import optax
import pytest
import steps
from steps import plain, plain_loss, plain_params

import jls
from jls._tools.check.mistakes.table import MISTAKES

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
]

UNREAD = {x.code for x in MISTAKES if x.needs == "updates"} | {"state narrowed"}


def check(step, args, carried=(0, 1)):
    """Checks a step that is compiled ahead of time."""
    compiled = step.lower(*args).compile()
    return jls.check_step(compiled, *args, carried=carried)


def test_what_reading_alone_settles_is_not_tried():
    result = check(*plain())
    assert result.ok
    assert set(result.not_tried) == UNREAD
    assert set(result.not_tried.values()) == {
        "there is no program to read: the step is compiled ahead of time"
    }
    headline = " ".join(str(result).splitlines()[:2])
    assert "no mistake in 8 of 13 that apply. Not tried: not scaled, scale" in headline


def test_what_comes_back_must_be_named():
    match = r"program to read, out of argument 0, argument 1, .*carried=\(0, 1\)"
    with pytest.raises(ValueError, match=match):
        check(*plain(), carried=None)


def test_gradients_that_fit_at_any_scale_hide_no_overflow():
    """At 2^126 nothing overflows, so the step comes out as it was."""
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    step = jax.jit(
        jls.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), optimizer)
    )
    params = {"w": jnp.ones(4)}
    result = check(step, (params, optimizer.init(params), jnp.ones((2, 4))))
    assert result.ok
    assert set(result.not_tried) == UNREAD


def test_overflow_that_no_one_sees_is_not_tried():
    """The gradients are not scaled, or something cleans them: who knows?"""
    result = check(*plain(steps.unscaled_gradients))
    assert result.ok
    assert "the step was applied" in result.not_tried["overflow hidden"]
    assert "not scaled" in result.not_tried


# What may be an average, noise or a buffer.


def test_what_moves_in_a_skip_is_not_called_broken():
    result = check(*plain(wrap=steps.decay_outside))
    assert result.ok
    reason = result.not_tried["not atomic"]
    assert "the step was skipped, but it changed argument 0/w1" in reason
    assert "Without a program to read, that may be right" in reason


def test_what_stays_nan_is_not_called_broken():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def outer(params, opt_state, total, batch):
        params, opt_state, loss = step(params, opt_state, batch)
        return params, opt_state, total + loss

    result = check(outer, (params, opt_state, jnp.zeros(()), batch), (0, 1, 2))
    assert result.ok
    assert "stayed in argument 2" in result.not_tried["nan committed"]


# What runs show by themselves.


def test_parameters_that_never_move_again_are_named():
    args = plain(steps.with_the_scale_alone, wrap=steps.accumulate_outside)
    assert check(*args).broken == ("never recovers",)


def test_state_that_comes_back_as_it_was_is_named():
    step, args = plain()
    forgets = jax.jit(lambda params, *args: (step(params, *args)[0], args[0]))
    assert check(forgets, args).broken == ("no step",)


def test_bare_scaler_may_be_stuck():
    result = check(*steps.never_adjusted())
    assert "scale stuck" in result.not_tried


# Steps that read at the host.


def test_a_read_at_the_host_is_named_also_if_nothing_else_is():
    step, args = plain()

    def reads(*args):
        result = step(*args)
        float(result[-1])
        return result

    result = jls.check_step(reads, *args)
    assert result.broken == ("host sync",)
    assert "carried must name" in result.not_tried["not atomic"]
    assert not any(note.startswith("Carried:") for note in result.notes)
    named = jls.check_step(reads, *args, carried=(0, 1))
    assert named.broken == ("host sync",)
    assert set(named.not_tried) == UNREAD


def test_what_does_not_apply_does_not_without_a_program():
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    step = jax.jit(jls.train_step(plain_loss, optimizer))
    params = plain_params()
    result = check(step, (params, optimizer.init(params), steps.BATCH))
    assert "static and 1" in result.not_applicable["not scaled"]
    assert "static and 1" not in result.not_tried.get("scale leaks", "")
