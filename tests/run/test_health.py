import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jls

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(1)}
SCALER = jls.dynamic(8.0, growth_interval=2, min_scale=2.0, max_scale=32.0)


def make(scaler):
    inner = optax.stateless(lambda updates, _: jax.tree.map(jnp.sqrt, updates))
    optimizer = jls.loss_scaled(inner, scaler, check_updates=True)
    return optimizer.init, jax.jit(optimizer.update)


DEFAULT = make(SCALER)
OPTIMIZER = jls.loss_scaled(optax.sgd(0.1), SCALER)
VALUES = {".": 1.0, "l": 1.0, "o": jnp.inf, "u": -1.0}


def unwrapped(health):
    """What `str` gives, on one line."""
    return " ".join(str(health).splitlines())


def after(steps, scaler=None):
    """The state after steps: . good, o overflow, l bad loss, u bad update."""
    init, update = DEFAULT if scaler is None else make(scaler)
    state = init(PARAMS)
    for step in steps:
        grads = {"w": jnp.ones(2), "b": jnp.full(1, VALUES[step])}
        loss = jnp.float32(jnp.nan if step == "l" else 1.0)
        _, state = update(grads, state, PARAMS, value=loss)
    return state


@pytest.mark.parametrize(
    ("steps", "verdict", "words"),
    [
        ("", "no step", r"no step was made yet, .*loss scale is 8\. What to do"),
        (".", "ok", "0 of 1 step was skipped so far; the loss scale is 8."),
        ("o", "calibrating", "the first step was skipped while .* to 4 now"),
        ("o.", "ok", "1 of 2"),
        (
            ".o",
            "recovering",
            r"1 in a row; the loss scale is 4. 1 of 2 steps was .*Not finite: b\.",
        ),
        (".ooo", "at floor", r"loss scale of 2 is at its floor \(3 skipped in a row\)"),
        (
            "....",
            "at ceiling",
            r"32 can grow no further\. No step was ever skipped\. What",
        ),
        ("..u...", "at ceiling", r"32 can grow no further\. What to do"),
        (".l", "non-finite loss", r"no loss scale can cure \(1 of 2 steps so far\)"),
        ("l", "non-finite loss", r"\(1 of 1 step so far\)\. What to do: docs/quest"),
        (".u", "non-finite update", r"or into an update too large .* \(1 of 2 steps"),
        (".oooo", "stalled", "last 4 steps were all skipped, .* for its gradients"),
        (".llll", "stalled", "the last one for its loss, and nothing is being learned"),
        (".uuuu", "stalled", "the last one for its updates, and nothing is being"),
    ],
)
def test_verdict_and_sentence(steps, verdict, words):
    health = jls.health(
        after(steps), PARAMS, optimizer=OPTIMIZER, max_consecutive_skips=3
    )
    assert health.verdict == verdict
    assert re.search(words, health.sentence), health.sentence
    assert unwrapped(health) == f"{verdict}: {health.sentence} {health.ask}"
    assert max(map(len, str(health).splitlines())) <= 80
    assert health.sentence.endswith((".", "?"))
    assert "  " not in health.sentence


def test_the_text_under_a_scale_that_moves_ends_with_the_question_for_half():
    tx = jls.loss_scaled(optax.sgd(0.1))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for given, arguments in (
        ((tx.init(PARAMS), PARAMS), "step, params, opt_state, batch"),
        ((state,), "step, state, batch"),
        ((optimizer, model), "step, model, optimizer, batch"),
    ):
        last = str(jls.health(*given)).splitlines()[-1]
        assert last == f"Half precision? print(jls.check_step({arguments}))"
    inner = optax.sgd(0.1)
    for still in (jls.skip_nonfinite(inner), jls.loss_scaled(inner, jls.static(8.0))):
        health = jls.health(still.init(PARAMS))
        assert health.ask == ""
        assert "Half precision?" not in str(health)


@pytest.mark.parametrize(("steps", "is_asked"), [(1000, True), (1001, False)])
def test_a_run_that_is_well_for_long_is_not_asked_again(steps, is_asked):
    state = after(".")._replace(steps=jnp.int32(steps))
    assert jls.health(state).verdict == "ok"
    assert bool(jls.health(state).ask) == is_asked
    assert ("Half precision?" in str(jls.health(state))) == is_asked
    skipped = after(".o")._replace(steps=jnp.int32(steps))
    assert jls.health(skipped).verdict == "recovering"
    assert jls.health(skipped).ask


def reference(steps, limit, floor, ceiling):
    """The verdict in plain Python, from the steps themselves."""
    scale, good, tail = 8.0, 0, 0
    for step in steps:
        tail = 0 if step == "." else tail + 1
        if step in ".u":  # a bad update is a finite step for the scaler
            good += 1
            if good == 2:
                scale, good = min(scale * 2, ceiling), 0
        elif step == "o":
            scale, good = max(scale / 2, floor), 0
    if tail > limit:
        return "stalled"
    if tail and steps[-1] != "o":
        return {"l": "non-finite loss", "u": "non-finite update"}[steps[-1]]
    if tail and scale <= floor:
        return "at floor"
    if tail:
        return "recovering" if "." in steps else "calibrating"
    if not steps:
        return "no step"
    return "at ceiling" if scale >= ceiling else "ok"


def test_all_short_runs_follow_the_reference():
    for length in range(5):
        for steps in itertools.product(".olu", repeat=length):
            health = jls.health(
                after(steps), optimizer=OPTIMIZER, max_consecutive_skips=3
            )
            assert health.verdict == reference(steps, 3, 2.0, 32.0), steps


@pytest.mark.parametrize(
    ("params", "inner", "verdict"),
    [
        ({"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(1)}, None, "poisoned"),
        ({"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(1)}, None, "poisoned"),
        (PARAMS, {"mean": jnp.float32(jnp.nan)}, "poisoned"),
        (PARAMS, {"best": jnp.float32(jnp.inf)}, "ok"),
    ],
)
def test_poison_is_seen_where_the_parameters_are_given(params, inner, verdict):
    state = after(".")._replace(inner_state=inner)
    assert jls.health(state, params).verdict == verdict
    assert jls.health(state).verdict == "ok"


@pytest.mark.parametrize(
    ("scaler", "steps", "verdict"),
    [
        (jls.presets.deepspeed(init_scale=2.0, delayed_shift=1), ".o", "at floor"),
        (jls.presets.megatron(), ".", "ok"),
        (jls.presets.mindspore(2**24, 2, 1000), ".", "ok"),
        (jls.dynamic(2.0**25, max_scale=2.0**40), ".", "ok"),
        (jls.dynamic(2.0**24), ".", "at ceiling"),
        (jls.dynamic(0.5, min_scale=2.0**-20), ".o", "recovering"),
        (jls.dynamic(1.0, backoff_interval=9), "o", "at floor"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bounds_come_from_the_optimizer_or_are_not_known(scaler, steps, verdict):
    state = after(steps, scaler)
    optimizer = jls.loss_scaled(optax.sgd(0.1), scaler)
    health = jls.health(state, optimizer=optimizer)
    assert health.verdict == verdict
    assert health.numbers["max_scale"] == scaler.hyperparameters["max_scale"]
    # The state alone does not know them.
    health = jls.health(state)
    assert health.verdict in ("ok", "recovering", "calibrating")
    assert health.numbers["min_scale"] is None
    assert health.numbers["max_scale"] is None


def test_without_bounds_nothing_is_said_of_where_the_scale_goes():
    state = after("ooo", jls.dynamic(8.0))  # at its floor, which nobody knows
    sentence = jls.health(state).sentence
    assert "the loss scale is 1. If it is still coming down" in sentence
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(8.0))
    assert jls.health(state, optimizer=optimizer).verdict == "at floor"


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), optax.chain(OPTIMIZER), OPTIMIZER.update, {}]
)
def test_an_optimizer_without_the_wrapper_is_an_error(optimizer):
    message = r"optimizer must be what jls.* pass the parameters too: jls.health\(opt_"
    with pytest.raises(TypeError, match=message):
        jls.health(after("."), optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), OPTIMIZER.update, {}])
def test_that_parameters_are_missing_is_said_only_where_they_are(optimizer):
    with pytest.raises(TypeError, match=r"or have it inside, got \w+\.$"):
        jls.health(after("."), PARAMS, optimizer=optimizer)


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (jls.dynamic(8.0), jls.static(1.0)),
        (jls.static(1.0), jls.dynamic()),
        (jls.dynamic(8.0), jls.presets.mindformers_adaptive(8.0, 2, 20)),
    ],
)
def test_an_optimizer_of_another_kind_is_an_error(made, given):
    optimizer = jls.loss_scaled(optax.sgd(0.1), given)
    with pytest.raises(ValueError, match="optimizer must be the one that made state"):
        jls.health(after(".", made), optimizer=optimizer)


@pytest.mark.parametrize("bound", ["low", None, jnp.ones(2)])
def test_bounds_that_are_no_numbers_are_not_known(bound):
    adjust = jax.tree_util.Partial(lambda s, flag, min_scale, max_scale: s)
    adjust.keywords.update(min_scale=bound, max_scale=8.0)
    scaler = jls.types.LossScaler(jls.dynamic(8.0).init, adjust)
    optimizer = jls.loss_scaled(optax.sgd(0.1), scaler)
    health = jls.health(after("."), optimizer=optimizer)
    assert (health.verdict, health.numbers["max_scale"]) == ("ok", None)


def test_a_scale_with_equal_bounds_never_moves():
    scaler = jls.dynamic(8.0, min_scale=8.0, max_scale=8.0)
    optimizer = jls.loss_scaled(optax.sgd(0.1), scaler)
    assert jls.health(after("..", scaler), optimizer=optimizer).verdict == "ok"
    health = jls.health(after(".o", scaler), optimizer=optimizer)
    assert health.verdict == "recovering"
    assert "never moves" in health.sentence


@pytest.mark.parametrize("scale", [1.0, 8.0, 2.0**24])
def test_a_static_scale_has_no_bounds_and_does_not_move(scale):
    for optimizer in (jls.loss_scaled(optax.sgd(0.1), jls.static(scale)), None):
        state = after(".oo", jls.static(scale))
        for changed in (state, jls.set_loss_scale(state, scale)):
            health = jls.health(changed, optimizer=optimizer)
            assert health.verdict == "recovering"
            says_so = "and never moves. 2 of 3 steps" in health.sentence
            assert says_so == (scale != 1)
            assert "2 in a row" in health.sentence
        assert jls.health(after("o", jls.static(scale))).verdict == "recovering"
        assert jls.health(after(".", jls.static(scale))).verdict == "ok"


def halved(state, grads_finite):
    scale = jnp.where(grads_finite, state.loss_scale, state.loss_scale / 2)
    return state._replace(loss_scale=scale)


@pytest.mark.parametrize("make_first", [jls.static, jls.dynamic])
def test_a_scaler_of_ones_own_has_no_bounds(make_first):
    own = jls.types.LossScaler(make_first(8.0).init, halved)
    state = after(".o", own)
    optimizer = jls.loss_scaled(optax.sgd(0.1), own)
    health = jls.health(state, optimizer=optimizer)
    assert health.verdict == "recovering"
    assert "static" not in health.sentence
    assert health.numbers["max_scale"] is None


def test_a_reason_that_is_not_known_is_not_named():
    state = after(".oo")._replace(last_skip_reason=jnp.int32(0))
    sentence = jls.health(state, max_consecutive_skips=1).sentence
    assert "2 steps were all skipped, and nothing is being learned" in sentence


def test_what_is_poisoned_is_not_what_the_last_step_was_skipped_for():
    params = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(1)}
    assert "Not finite" not in str(jls.health(after(".o"), params))


def test_the_scaler_is_found_in_a_train_state_and_an_nnx_optimizer():
    scaler = jls.dynamic(16.0, min_scale=4.0)
    optimizer = jls.loss_scaled(optax.sgd(0.1), scaler)
    bad = jax.tree.map(lambda x: x * jnp.inf, PARAMS)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optimizer)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    ours = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    for _ in range(2):
        expected = "no step" if state.step == 0 else "calibrating"
        assert jls.health(state).verdict == expected
        state = state.apply_gradients(grads=bad)
        params = nnx.state(model, nnx.Param)
        ours.update(model, jax.tree.map(lambda x: x * jnp.inf, params))
    assert jls.health(state).verdict == "at floor"
    assert jls.health(ours).verdict == "at floor"
    assert jls.health(state.opt_state).verdict == "calibrating"
    assert jls.health(state.opt_state, optimizer=optimizer).verdict == "at floor"
    assert jls.health(ours.opt_state, optimizer=ours).verdict == "at floor"


def test_large_scales_print_as_powers_of_two():
    health = jls.health(after("", jls.dynamic(2.0**22)))
    assert "loss scale is 2^22." in health.sentence
    assert "loss scale is 2^15." in jls.health(after("", jls.dynamic())).sentence


@pytest.mark.filterwarnings("ignore:1 of 1 parameters are bfloat16")
@pytest.mark.parametrize("guard", [jls.skip_nonfinite, jls.loss_scaled])
def test_it_says_nothing_of_whether_bfloat16_parameters_move(guard):
    """No state knows which updates were rounded away: `jls.check_step` runs steps."""
    params = {"w": jnp.full(4096, 0.1, jnp.bfloat16)}
    grads = jax.tree.map(jnp.ones_like, params)
    sgd = optax.sgd(1e-6)
    ours = [jls.bfloat16_params(sgd, rounding=x) for x in ("stochastic", "exact")]
    said, moved = [], []
    for inner in (sgd, *ours):
        optimizer = guard(inner)
        new, state = params, optimizer.init(params)
        for _ in range(3):
            new, state, _ = jls.apply_gradients(optimizer, grads, state, new)
        said.append(jls.health(state, new, optimizer=optimizer, grads=grads))
        masters = jls.master_params(new, state)["w"]
        moved.append(bool(jnp.any(masters != jls.master_params(params, ())["w"])))
    assert moved == [False, True, True]
    assert said[0] == said[1] == said[2]
    assert said[0].sentence.startswith("0 of 3 steps were skipped so far")
    found = dict(new, w=new["w"].at[0].set(jnp.nan))
    assert jls.health(state, found).verdict == "poisoned"


@pytest.mark.parametrize(
    ("grads", "kwargs", "verdict", "words"),
    [
        (jnp.array([1.0, 1e-3, 0.0, jnp.nan]), {}, "ok", "loss scale is 8."),
        # Below 2**-14 / 8, the smallest normal float16: one of four nonzero values.
        (
            jnp.array([1.0, 1e-3, 1e-6, 1e-2, 0.0]),
            {},
            "underflow",
            "^25% of the gradients are too small for float16 at the loss scale of 8, "
            "and lose precision or vanish. What to do: docs",
        ),
        (jnp.array([1.0, 1e-3, 1e-6, 1e-2, 0.0]), {"max_small": 0.25}, "ok", ""),
        (jnp.array([1e-6, 1.0]), {"dtype": jnp.bfloat16}, "ok", ""),
        (jnp.array([2000.0, 1e-6]), {}, "underflow", "^50% of the gradients"),
        (jnp.full(3, 1e-9), {}, "underflow", "^100% of the gradients"),
        (
            jnp.zeros(3),
            {},
            "underflow",
            "^all gradients are 0, or too small for float16",
        ),
        (jnp.full(3, jnp.nan), {}, "ok", ""),
        ({"n": 3, "empty": jnp.ones(0)}, {}, "ok", ""),
        (jnp.array([2e-38, 1e38]), {"dtype": jnp.bfloat16, "max_small": 0.0}, "ok", ""),
    ],
)
def test_gradients_too_small_for_the_scale_are_an_underflow(
    grads, kwargs, verdict, words
):
    health = jls.health(after("."), grads=grads, optimizer=OPTIMIZER, **kwargs)
    assert health.verdict == verdict
    assert re.search(words, health.sentence), health.sentence


def test_the_small_share_is_that_of_rounding():
    rng = np.random.default_rng(0)
    grads = np.exp2(rng.uniform(-30, 0, 1000)).astype(np.float32)
    state, narrow = after("."), (grads * np.float32(8)).astype(np.float16)
    numbers = jls.health(state, grads=grads).numbers
    expected = np.mean(narrow < np.finfo(np.float16).smallest_normal)
    assert numbers["small"] == pytest.approx(expected)
    assert 0.1 < expected < 0.9


def test_both_parts_of_a_complex_gradient_are_looked_at():
    grads = jnp.array([complex(1e-9, 1.0), complex(0.0, 1e-9)])  # 3 are not zero
    assert jls.health(after("."), grads=grads).numbers["small"] == np.float32(2 / 3)


@pytest.mark.parametrize("shape", [(), (3,)])  # XLA CPU flushes the first
def test_gradients_that_are_subnormal_are_not_called_zero(shape):
    numbers = jls.health(after("."), grads=np.full(shape, 1e-40, np.float32)).numbers
    assert (numbers["small"], numbers["all_zero"]) == (1.0, False)


@pytest.mark.parametrize(
    ("dtype", "error", "got"),
    [
        (jnp.int32, TypeError, "int32"),
        ("no dtype", TypeError, "'no dtype'"),
        (None, TypeError, "None"),
        (jnp.complex64, TypeError, "complex64"),
        (jnp.float64, ValueError, "float64"),
        (jnp.float8_e8m0fnu, ValueError, "float8_e8m0fnu"),
        (jnp.float4_e2m1fn, ValueError, "float4_e2m1fn"),
    ],
)
def test_a_dtype_that_is_no_float_of_8_to_32_bits_is_refused(dtype, error, got):
    with pytest.raises(error, match=f"dtype must be a floating-point .* got {got}"):
        jls.health(after("."), dtype=dtype)


def test_the_edge_of_the_small_is_where_rounding_gives_a_normal_number():
    edge = np.float32((2.0**-14 - 2.0**-25) / 8)  # a tie, which rounds up
    for value, expected in ((edge, 0.0), (np.nextafter(edge, np.float32(0)), 0.5)):
        grads = np.array([value, 1.0], np.float32)
        assert jls.health(after("."), grads=grads).numbers["small"] == expected


def test_a_skipped_step_comes_before_an_underflow_and_that_before_the_ceiling():
    grads = jnp.full(3, 1e-9)
    assert jls.health(after(".o"), grads=grads).verdict == "recovering"
    assert jls.health(after("...."), optimizer=OPTIMIZER).verdict == "at ceiling"
    assert (
        jls.health(after("...."), grads=grads, optimizer=OPTIMIZER).verdict
        == "underflow"
    )


def test_a_bad_loss_blames_no_parameter():
    init, update = DEFAULT
    bad = {"w": jnp.full(2, jnp.nan), "b": jnp.full(1, jnp.nan)}
    _, state = update(bad, init(PARAMS), PARAMS, value=jnp.float32(jnp.nan))
    assert "Not finite" not in str(jls.health(state, PARAMS))


@pytest.mark.parametrize(
    ("steps", "params", "safe"),
    [
        (".o", PARAMS, True),
        (".l", PARAMS, True),
        (".oooo", PARAMS, False),
        (".", {"w": jnp.full(2, jnp.nan), "b": jnp.ones(1)}, False),
    ],
)
def test_safe_to_save_unless_poisoned_or_stalled(steps, params, safe):
    health = jls.health(
        after(steps), params, optimizer=OPTIMIZER, max_consecutive_skips=3
    )
    assert health.safe_to_save is safe


def test_numbers_are_those_of_metrics_in_python():
    state = after("..o")
    numbers = jls.health(state, PARAMS, optimizer=OPTIMIZER).numbers
    metrics = {name: value.item() for name, value in jls.metrics(state).items()}
    assert numbers == metrics | {
        "last_skip_reason": jls.types.SkipReason.GRADIENTS,
        "is_static": False,
        "poisoned": False,
        "poisoned_leaves": {"params": [], "opt_state": []},
        "masks": {},
        "nonfinite_leaves": ["b"],
        "min_scale": 2.0,
        "max_scale": 32.0,
    }


def test_raise_if_carries_the_verdict_and_warn_if_warns():
    state = after(".o")
    with pytest.raises(jls.UnhealthyError, match="recovering: the grad") as caught:
        jls.health(state, raise_if=["stalled", "recovering"])
    assert caught.value.health.numbers["skips"] == 1
    with pytest.warns(UserWarning, match="recovering: the gradients of the last"):
        jls.health(state, warn_if=("recovering",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jls.health(state, raise_if=["stalled"], warn_if=["poisoned"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"raise_if": ["dead"]}, ValueError, "raise_if must be verdicts out of"),
        (
            {"warn_if": "stalled"},
            ValueError,
            r"warn_if must be verdicts .* got 'stalled'. Write warn_if=\['stalled'\]",
        ),
        ({"raise_if": "dead"}, ValueError, "raise_if must be verdicts .* got 'dead'"),
        (
            {"max_consecutive_skips": 0},
            ValueError,
            "max_consecutive_skips must be from 1",
        ),
        ({"max_consecutive_skips": 2.0}, TypeError, "max_consecutive_skips must be an"),
        ({"params": {"w": jnp.ones(2)}}, ValueError, "got 1 floating-point leaves"),
        ({"optimizer": SCALER}, TypeError, "optimizer must be what jls.loss_scaled"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        jls.health(after("."), **options)


def test_tracing_and_states_without_a_wrapper_are_refused():
    with pytest.raises(ValueError, match="state must be concrete"):
        jax.jit(lambda state: jls.health(state) and 0)(after("."))
    for scaler in (jls.dynamic(), jls.static(), jls.hysteresis()):
        message = r"State, which has no counters: its .* is jls.loss_scale\(state\)"
        with pytest.raises(ValueError, match=message):
            jls.health(scaler.init())
    with pytest.raises(
        ValueError, match=r"got dict with 0 of them\. What a run without"
    ):
        jls.health({"w": jnp.ones(2)})


def test_health_of_every_kind_of_state():
    tx = jls.loss_scaled(optax.sgd(0.1))
    train_state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    train_state = train_state.apply_gradients(grads=PARAMS)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))
    assert jls.health(train_state, train_state.params).verdict == "ok"
    assert jls.health(optimizer, nnx.state(model, nnx.Param)).verdict == "ok"
    assert jls.health(optimizer, model).verdict == "ok"
    assert jls.health((train_state.opt_state, 3)).verdict == "ok"


def test_state_of_numbers_of_python_is_read_as_one_of_arrays():
    state = after(".o")
    numbers = jax.tree.map(lambda x: x.item() if jnp.ndim(x) == 0 else x, state)
    assert jls.health(numbers, PARAMS) == jls.health(state, PARAMS)
