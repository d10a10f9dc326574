"""What `jls.check_step` reads in the program of a step. No step is run."""

import cProfile
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
import steps
from steps import BATCH, plain, plain_loss, plain_params, wrap

import jls
from jls._tools.check.check import read_step
from jls._tools.check.mistakes.skips import is_average, is_noise
from jls._tools.check.mistakes.table import MISTAKES

# The mistakes that are planted here are warned of too.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
]

small = functools.partial(plain, inner=optax.sgd(0.1))


def read(step, args):
    return read_step(step, args, {})


def broken(step, args):
    _, findings = read(step, args)
    return set(findings.of("broken"))


def leaf_of(runner, path):
    return ["/".join(item.path) for item in runner.subject.items].index(path)


def of_right(change):
    """Something done to right gradients."""

    def gradients(state, loss_fn, params, transform):
        loss, grads = steps.right_gradients(state, loss_fn, params, transform)
        return loss, jax.tree.map(change, grads)

    return gradients


def test_a_step_is_read_under_a_profiler():
    with cProfile.Profile() as profile:
        runner, findings = read(*plain())
    assert runner.subject.reading
    assert not findings.of("broken")
    names = {entry.code for entry in profile.getstats()}
    assert plain_loss.__code__ in names  # which it saw too


def scaled_loss_told(state, loss_fn, params, transform):
    loss, grads = steps.right_gradients(state, loss_fn, params, transform)
    return jls.scale(state, loss), grads


def half_unscaled(state, loss_fn, params, transform):
    loss, grads = steps.right_gradients(state, loss_fn, params, transform)
    return loss, {**grads, "w2": jls.scale(state, grads["w2"])}


# How the gradients are made, and the code.
GRADIENTS = {
    "not scaled": (steps.unscaled_gradients, "not scaled"),
    "scaled by another state": (steps.foreign_gradients, "not scaled"),
    "unscaled twice": (steps.twice_unscaled, "scale leaks"),
    "never unscaled": (steps.never_unscaled, "scale leaks"),
    "clipped while scaled": (steps.clipped_while_scaled, "scale leaks"),
    "scaled in part": (half_unscaled, "scale leaks"),
    "the scaled loss told": (scaled_loss_told, "scale leaks"),
    "narrowed": (
        of_right(lambda g: g.astype(jnp.float16).astype(jnp.float32)),
        "gradients narrowed",
    ),
}


def cleaned_while_scaled(state, loss_fn, params, transform):
    """The loss is told, and NaN where the loss scale is: a skip for another reason."""
    del transform
    scaled, grads = jax.value_and_grad(lambda p: jls.scale(state, loss_fn(p)))(params)
    grads = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), grads)
    return scaled / jls.loss_scale(state), jls.unscale(state, grads)


def test_gradients_that_are_cleaned_while_scaled_are_doubted_and_tried():
    step, args = small(cleaned_while_scaled)
    runner, _ = read(step, args)
    assert len(runner.subject.cleaned) == 2
    assert jls.check_step(step, *args).broken == ("overflow hidden",)


def test_a_choice_that_scaled_values_do_not_make_is_no_cleaning():
    def masked(state, loss_fn, params, transform):
        loss, grads = steps.right_gradients(state, loss_fn, params, transform)
        scaled = jls.scale(state, grads)
        scaled = jax.tree.map(lambda g, w: jnp.where(w > 9, 0, g), scaled, params)
        return loss, jls.unscale(state, scaled)

    runner, findings = read(*small(masked))
    assert not runner.subject.cleaned
    assert findings.status("overflow hidden") == "right"


@pytest.mark.parametrize("name", GRADIENTS)
def test_mistake_in_the_gradients_is_read(name):
    gradients, code = GRADIENTS[name]
    assert broken(*small(gradients)) == {code}


def test_leak_that_an_optimizer_of_signs_hides_is_read():
    """It trains alike with gradients of any size."""
    _, findings = read(*plain(steps.twice_unscaled, inner=optax.sign_sgd(0.1)))
    text = findings.of("broken")["scale leaks"].text
    assert "the gradients are divided by the loss scale once too often" in text


RIGHT = {
    "as they are": lambda g: g,
    "bfloat16 and back": lambda g: g.astype(jnp.bfloat16).astype(jnp.float32),
    "scaled, float16 and back": (
        lambda g: (g * 1024.0).astype(jnp.float16).astype(jnp.float32) / 1024.0
    ),
}


@pytest.mark.parametrize("how", RIGHT)
def test_right_step_is_proved(how):
    _, findings = read(*small(of_right(RIGHT[how])))
    read_off = {x.code for x in MISTAKES if x.needs == "updates"}
    assert {"overflow hidden", *read_off} <= findings.of("right").keys()
    assert not findings.of("broken")


@pytest.mark.parametrize("told", steps.TOLD)
def test_loss_that_is_not_passed_is_read(told):
    assert broken(*small(tell=steps.TOLD[told])) == {"loss not passed"}


def test_scale_of_1_that_moves_is_not_switched_off():
    step, (params, opt_state, batch) = small(steps.unscaled_gradients)
    opt_state = jls.set_loss_scale(opt_state, 1.0)
    assert broken(step, (params, opt_state, batch)) == {"not scaled"}


def step_with(change=lambda updates, old, new: updates, choose=lambda old, new: new):
    """A step that changes its updates, and returns a state chosen from (old, new)."""
    optimizer = wrap(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, new = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, change(updates, opt_state, new))
        return params, choose(opt_state, new), loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


def test_updates_that_are_scaled_leak():
    step = step_with(change=lambda updates, old, new: jls.scale(old, updates))
    assert broken(*step) == {"scale leaks"}


def test_scale_after_the_update_is_another():
    """The update may have changed it."""

    def by(scaled, unscaled):
        def change(updates, *states):
            updates = jls.scale(states[scaled], updates)
            return jls.unscale(states[unscaled], updates)

        return change

    assert broken(*step_with(by(0, 1))) == {"scale leaks"}
    assert broken(*step_with(by(0, 0))) == broken(*step_with(by(1, 1))) == set()


# A scaler that is never told.


def test_state_that_a_skip_undoes_is_stuck():
    def choose(old, new):
        return jls.select(new.applied, new, old)

    _, findings = read(*step_with(choose=choose))
    assert "an overflow is one for ever" in findings.of("broken")["scale stuck"].text


def test_scaler_that_is_put_back_is_stuck():
    def choose(old, new):
        return new._replace(scaler_state=old.scaler_state)

    assert broken(*step_with(choose=choose)) == {"scale stuck"}
    assert broken(*step_with()) == set()


# Gradients that may lose an inf.

CLEANED = {
    "nan_to_num": jnp.nan_to_num,
    "clipped by element": lambda g: jnp.clip(g, -1.0, 1.0),
    "zero where it is not finite": lambda g: jnp.where(jnp.isfinite(g), g, 0.0),
    "squashed": jnp.tanh,
    "divided by themselves": lambda g: 1 / (1 + jnp.abs(g)),
    "cleaned, then cast": lambda g: jnp.nan_to_num(g).astype(jnp.bfloat16),
}
KEPT = {
    "as they are": lambda g: g,
    "times a number": lambda g: 0.5 * g,
    "turned": lambda g: g[::-1],
    "added to what is cleaned": lambda g: g + jnp.clip(g, -1.0, 1.0),
    "clipped by their norm": lambda g: g * jnp.minimum(1, 1 / jnp.linalg.norm(g)),
    "chosen from two of them": lambda g: jnp.where(g > 1, 2 * g, g),
}


@pytest.mark.parametrize("how", CLEANED)
def test_gradients_that_may_lose_an_inf_are_found(how):
    runner, findings = read(*small(of_right(CLEANED[how])))
    assert len(runner.subject.cleaned) == 2
    assert findings.status("overflow hidden") is None


@pytest.mark.parametrize("how", KEPT)
def test_gradients_that_keep_an_inf_are_proved(how):
    runner, findings = read(*small(of_right(KEPT[how])))
    assert not runner.subject.cleaned
    assert findings.status("overflow hidden") == "right"


# What a skip changes.


def test_parameters_that_a_skip_may_change_are_found():
    runner, _ = read(*small())
    assert runner.subject.trained <= runner.subject.kept
    runner, _ = read(*small(wrap=steps.decay_outside))
    changed = runner.subject.trained - runner.subject.kept
    assert changed == {leaf_of(runner, f"params/w{i}") for i in (1, 2)}


def followed(follow):
    """A step with a second tree, `target`, moved by (params, target)."""
    step, (params, opt_state, batch) = small()

    @jax.jit
    def outer(params, target, opt_state, batch):
        params, opt_state, loss = step(params, opt_state, batch)
        return params, jax.tree.map(follow, params, target), opt_state, loss

    target = jax.tree.map(lambda x: x + 1, params)
    return outer, (params, target, opt_state, batch)


AVERAGES = {
    "one step towards the parameters": (lambda p, t: t + 0.1 * (p - t), True),
    "a sum with weights": (lambda p, t: 0.9 * t + 0.1 * p, True),
    "a quotient": (lambda p, t: (3 * t + p) / 4, True),
    "a copy": (lambda p, t: p * 1.0 + 0.0 * t, True),
    "a sum that grows": (lambda p, t: t + 0.1 * p, False),
    "a sum that decays": (lambda p, t: 0.9 * t + 0.05 * p, False),
    "a difference": (lambda p, t: t - 0.1 * p, False),
    "a quotient that decays": (lambda p, t: (3 * t + p) / 5, False),
}


@pytest.mark.parametrize("how", AVERAGES)
def test_weights_of_an_average_add_up_to_1(how):
    follow, is_right = AVERAGES[how]
    runner, _ = read(*followed(follow))
    assert is_average(runner.subject, leaf_of(runner, "target/w1")) == is_right


def test_parameters_that_a_skip_decays_a_little_are_no_average():
    """Their weight is 1 but for rounding."""

    def decay(inner):
        return optax.chain(wrap(inner), optax.add_decayed_weights(1e-5))

    runner, _ = read(*small(wrap=decay))
    leaf = leaf_of(runner, "params/w1")
    assert leaf in runner.subject.trained - runner.subject.kept
    assert not is_average(runner.subject, leaf)


def test_noise_is_told_from_what_is_not_random():
    optimizer = wrap(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state, key, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        new = optax.apply_updates(params, updates)
        noise = jax.random.normal(key, new["w1"].shape)
        return {"w1": new["w1"] + noise, "w2": 0.9 * new["w2"]}, opt_state, loss

    params = plain_params()
    args = params, optimizer.init(params), jax.random.key(0), BATCH
    runner, _ = read(step, args)
    assert is_noise(runner.subject, leaf_of(runner, "params/w1"))
    assert not is_noise(runner.subject, leaf_of(runner, "params/w2"))


# Values that are read at the host.


@pytest.mark.parametrize("get", [float, jax.device_get], ids=["float", "device_get"])
def test_value_that_the_host_reads_is_read(get):
    step, args = small()

    def reads(*args):
        result = step(*args)
        get(result[-1])
        return result

    assert broken(reads, args) == {"host sync"}


def test_value_that_the_host_reads_once_in_three_traces_is_right():
    step, args = small()
    calls = []

    def reads(*args):
        result = step(*args)
        calls.append(None)
        if len(calls) < 3:
            float(result[-1])
        return result

    assert broken(reads, args) == set()
