# SPDX-License-Identifier: Apache-2.0
"""What `jls.why` says, and of what; `tests/origin` has many programs for it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jls
from jls._program.control import Key
from jls._tools.origin import case, record


def roots(x):
    return jnp.sum(jnp.sqrt(x))


def half(x):
    return x.astype(jnp.float16)


def loss_fn(params, batch):
    hidden = jnp.tanh(half(batch["x"]) @ half(params["kernel"]))
    return 300 * jnp.mean(hidden.astype(jnp.float32) ** 2)


PARAMS = {"kernel": jnp.ones((3, 4)), "steps": jnp.zeros((), jnp.int32)}
BATCH = {"x": jnp.ones((5, 3))}


def made(scaler, **options):
    trained = {"kernel": jnp.ones((3, 4))}
    optimizer = jls.loss_scaled(optax.sgd(0.1), scaler, **options)
    step = jax.jit(jls.train_step(loss_fn, optimizer), donate_argnums=(0, 1))
    return step, trained, optimizer.init(trained)


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


# The text.


def test_text_of_a_derivative():
    why = jls.why(jax.grad(roots), jnp.array([0.0, 4.0]))
    line = roots.__code__.co_firstlineno + 1
    assert str(why) == repr(why)
    assert str(why).splitlines() == [
        "jls.why: not finite: the result.",
        "",
        f"  tests/test_why.py:{line} in roots, backward",
        "      return jnp.sum(jnp.sqrt(x))",
        "  div made inf of up to 0.5, divided by numbers from 0 to 2 (float32)",
        "",
        "The derivative of a square root, and of a norm, is inf at 0. Keep the "
        "argument",
        "away from 0: jnp.sqrt(x + 1e-12)",
    ]


def test_text_of_what_came_in():
    why = jls.why(loss_fn, PARAMS, {"x": jnp.full((5, 3), jnp.nan)})
    assert str(why).splitlines() == [
        "jls.why: not finite: the result.",
        "",
        "  NaN came in: batch/x (float32)",
        "",
        "It came in with the arguments: nothing in this program made it.",
    ]


def test_text_of_several_arguments_has_nothing_later():
    x = jnp.array([jnp.nan, 1.0])
    text = str(jls.why(lambda x, y: jnp.sum(x + y), x, x))
    assert "Later" not in text
    assert text.index("came in: x") < text.index("came in: y")

    def fun(x, y):
        return jnp.sum(x) + jnp.sum(jnp.log(y))

    text = str(jls.why(fun, jnp.array([jnp.inf, 1.0]), jnp.zeros(2)))
    assert text.index("came in: x") < text.index("Later") < text.index("log made")

    mask = jnp.full(3, -jnp.inf)
    text = str(jls.why(lambda x, mask: jax.nn.softmax(x + mask), jnp.ones(3), mask))
    assert text.index("sub made") < text.index("came in: mask")
    assert "Later" not in text


def test_text_of_what_is_finite():
    why = jls.why(roots, jnp.ones(2))
    assert str(why) == "jls.why: no inf and no NaN reaches a result."
    assert why == jls.types.Why()
    assert not why


def test_text_of_a_step_whose_loss_scale_is_too_large():
    step, params, opt_state = made(jls.dynamic(2.0**20))
    why = jls.why(step, params, opt_state, BATCH)
    assert why.results == ("gradient of kernel",)
    assert why
    (birth,) = why.births
    assert (birth.kind, birth.dtype) == ("inf", "float16")
    assert birth.place.is_backward
    note = " ".join(str(why).splitlines()[1:]).strip()
    assert note.startswith("It is the loss scale of 2^20: at 2^11 all of this is")
    assert "Compute this line" not in note  # no line of the program is to blame


def test_text_has_others_after_the_first_and_counts_the_rest():
    def many(x):
        return sum(jnp.log(x * i) for i in range(8))

    why = jls.why(many, jnp.zeros(2))
    assert len(why.births) == 1  # all of them stand in one line

    def apart(x):
        return [
            jnp.log(x),
            jnp.log(x * 2),
            jnp.log(x * 3),
            jnp.log(x * 4),
            jnp.log(x * 5),
            jnp.log(x * 6),
            jnp.log(x * 7),
        ]

    text = str(jls.why(apart, jnp.zeros(2)))
    assert text.startswith(
        "jls.why: not finite: result[0], result[1], result[2] and 4 more."
    )
    assert text.count("log made -inf of 0") == 6
    assert "and 1 more, see .births" in text


@pytest.mark.parametrize(
    ("fun", "x", "advice"),
    [
        (lambda x: x**-0.5, 0.0, "The derivative of a square root|negative exponent"),
        (jax.grad(lambda x: x**0.3), 0.0, "A power of 0 with a negative exponent"),
        (lambda x: x**0.3, -1.0, "A negative number to a power"),
        (jnp.log, 0.0, "The logarithm of 0. Use jax.nn.log_softmax"),
        (jnp.log, -1.0, "The logarithm of a negative number"),
        (jnp.log1p, -1.0, r"The logarithm of 1 \+ x"),
        (jnp.sqrt, -1.0, "The square root of a negative number"),
        (lambda x: 1 / x, 0.0, "A quotient by 0"),
        (jax.grad(jnp.log), 0.0, "The logarithm of 0. Use jax.nn.log_softmax"),
        (jax.grad(lambda x: jnp.log(x + 1) / x), 0.0, "A quotient by 0"),
        (jnp.exp, 100.0, r"exp is over 3.4028e\+38 from 88.72 on"),
        (lambda x: jnp.exp(half(x)), 12.0, "exp is over 65504 from 11.09 on"),
        (jnp.exp2, 200.0, r"exp2 is over 3.4028e\+38 from 128 on"),
        # No wider type helps: bfloat16 ends where float32 does.
        (
            lambda x: x.astype(jnp.bfloat16) * x.astype(jnp.bfloat16),
            1e30,
            r"Over 3.39e\+38, the largest bfloat16\. Make its operands",
        ),
        (half, 1e5, "Over 65504, the largest float16. Compute this line in float32"),
        (lambda x: x * x, 1e30, r"Over 3.403e\+38, the largest float32"),
        (lambda x: x.astype(jnp.float8_e4m3fn), 1e3, "Over 448, the largest float8"),
        (lambda x: jnp.take(x[None], 3), 0.0, "An index out of range"),
        (lambda x: jnp.linalg.cholesky(x[None, None]), -1.0, "not positive definite"),
        (lambda x: x * jnp.nan, 0.0, "written in the program as a number"),
        (
            jax.grad(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0)),
            0.0,
            r"(?s)square root.*0 times inf: a jnp.where hides this value",
        ),
        (
            lambda x: jax.nn.softmax(jnp.where(x[None] > 0, x, -jnp.inf)),
            0.0,
            "inf - inf: a softmax or logsumexp over a row",
        ),
    ],
)
def test_known_patterns_get_advice(fun, x, advice):
    why = jls.why(fun, jnp.float32(x))
    text = str(why).replace("\n", " ")
    assert re.search(advice, text), text


ROWS = jnp.array([[-jnp.inf] * 3, [0.0, 1.0, 2.0]])


def with_a_running_maximum(scores):
    def body(carry, x):
        old, total = carry
        new = jnp.maximum(old, x)
        return (new, total * jnp.exp(old - new) + jnp.exp(x - new)), ()

    start = jnp.full(2, -jnp.inf), jnp.zeros(2)
    return lax.scan(body, start, scores.T)[0]


SOFTMAXES = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "by hand": lambda x: jnp.exp(x - jnp.max(x, 1, keepdims=True)),
    "of a part": lambda x: jax.nn.softmax(x, where=jnp.arange(3) < 2),
    "float16": lambda x: jax.nn.softmax(x.astype(jnp.float16)),
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, 1, keepdims=True),
    "entropy of labels": lambda x: optax.softmax_cross_entropy_with_integer_labels(
        x, jnp.array([0, 1])
    ),
    "running maximum": with_a_running_maximum,
}
# Their infs are no row of a softmax.
OTHERS = {
    "variance": lambda x: jnp.mean(x**2) - jnp.mean(x) ** 2,
    "deviation": lambda x: x - x.mean(),
    "deviation of maxima": lambda x: jnp.max(x, 1) - jnp.max(x, 1).mean(),
    "difference": lambda x: x - 2 * x,
}


@pytest.mark.parametrize("name", [*SOFTMAXES, *OTHERS])
def test_a_difference_of_infs_is_a_softmax_if_a_maximum_is_subtracted(name):
    why = jls.why(SOFTMAXES.get(name) or OTHERS[name], ROWS)
    found = {x.advice[:20] for x in why.births if x.place.operation == "sub"}
    assert found == {"inf - inf: a softmax" if name in SOFTMAXES else ""}


@pytest.mark.parametrize("norm", [nnx.BatchNorm, nnx.LayerNorm])
def test_a_variance_that_overflows_is_no_softmax(norm):
    layer = norm(4, rngs=nnx.Rngs(0))
    why = jls.why(lambda layer, x: layer(x).sum(), layer, 1e30 * jnp.eye(4))
    assert [x.place.operation for x in why.births] == ["square", "sub"]
    assert "softmax" not in str(why)


def test_first_operations_of_one_line_are_told_once():
    def body(carry, x):
        return carry / x, jnp.log(x)

    why = jls.why(lambda x: lax.scan(body, 1.0, x), jnp.array([1.0, 0.0, 0.0]))
    iterations = [birth.place.iteration for birth in why.births]
    assert iterations == [(1,), (1,)]  # not once more for the third round


def test_what_is_bad_in_rounds_in_a_row_is_told_of_the_first():
    def fun(x):
        return lax.scan(lambda carry, x: (jnp.log(x), ()), 1.0, x)[0]

    assert first_of(fun, jnp.array([0.0, 1.0, 0.0, 0.0])) == ("log", 1, (2,))


# Control flow, and what does no harm.


def first_of(fun, *args):
    """The first birth's operation, its line after that of `fun`, and the iteration."""
    place = jls.why(fun, *args).births[0].place
    start = fun.__code__.co_firstlineno
    return place.operation, place.line - start, place.iteration


def test_a_branch_that_gives_its_operand_back():
    def fun(x):
        y = jnp.log(x)
        return lax.cond(jnp.sum(y) < 0, lambda y: y, lambda y: y * 0.0, y)

    assert first_of(fun, jnp.zeros(2))[:2] == ("log", 1)


def test_a_branch_that_is_a_number():
    def fun(x):
        return lax.cond(x > 0, lambda: jnp.nan, lambda: 0.0)

    assert jls.why(fun, 1.0).births[0].place.operation == "constant"
    assert not jls.why(fun, -1.0).births


def test_the_branch_that_was_taken():
    def body(carry, i):
        bad = lax.cond(i == 2, lambda c: c / 0.0, lambda c: c + 1.0, carry)
        return bad, bad

    def fun(x):
        return lax.scan(body, x, jnp.arange(5))

    why = jls.why(fun, jnp.float32(1.0))
    assert why.births[0].place.operation == "div"
    assert why.births[0].place.iteration == (2,)


def test_a_loop_that_goes_on_after_its_bad_round():
    def inner(i, x):
        return lax.fori_loop(
            0, jnp.int32(2) + 0 * i, lambda j, x: x + 1.0 / (2.0 - i + 1.0 - j), x
        )

    def fun(x):
        return lax.while_loop(
            lambda c: c[0] < 4, lambda c: (c[0] + 1, inner(c[0], c[1])), (0, x)
        )[1]

    birth = jls.why(fun, jnp.float32(1.0)).births[0]
    assert (birth.place.operation, birth.place.iteration) == ("div", (2, 1))


def test_a_scan_that_begins_at_the_end():
    def fun(x):
        return lax.scan(lambda c, z: (c / z, ()), 1.0, x, reverse=True)[0]

    assert first_of(fun, jnp.array([1.0, 0.0, 1.0])) == ("div", 1, (1,))


def test_lanes_of_a_loop_that_end_apart():
    def fun(first, last):
        def body(c):
            return c[0] + 1.0, c[1] + 1.0 / (c[0] - 2.0)

        return lax.while_loop(lambda c: c[0] < last, body, (first, 0.0))[1]

    lanes = jax.vmap(fun)
    birth = jls.why(lanes, jnp.array([0.0, 0.0]), jnp.array([1.0, 4.0])).births[0]
    assert (birth.place.operation, birth.place.iteration) == ("div", (2,))
    # The first lane has ended where it would make inf, and the second goes on.
    why = jls.why(lanes, jnp.array([0.0, 4.0]), jnp.array([2.0, 9.0]))
    assert why == jls.types.Why()


def test_nan_after_an_inf_that_did_no_harm():
    def fun(x):
        def body(c):
            i, x = c
            y = jnp.log(x - jnp.where(i == 3, 2.0, 1.0))  # log(0), later log(-1)
            return i + 1, x + jnp.where(i < 3, 0.0, y)

        return lax.while_loop(lambda c: c[0] < 5, body, (0, x))[1]

    birth = jls.why(fun, jnp.float32(1.0)).births[0]
    assert (birth.kind, birth.place.iteration) == ("nan", (3,))


def test_a_product_with_a_sign_that_the_loop_has_not_kept():
    def fun(x):
        def body(c):
            i, x = c
            y = x + jnp.log(jnp.where(i == 0, 1.0, 0.0))
            return i + 1, jnp.sign(y) * y  # of the sign iteration 2 is kept, with a NaN

        return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    assert first_of(fun, jnp.float32(1.0)) == ("log", 3, (1,))


def test_a_lane_that_has_ended_is_not_to_blame():
    @jax.vmap
    def fun(x, n):
        def body(c):
            i, x = c
            y = jnp.sqrt(x - jnp.where(i == 3, 9.0, 0.0))
            return i + 1, y * ((n - i) / (n - i))  # NaN for a lane from its end on

        return lax.while_loop(lambda c: c[0] < n, body, (0.0, x))[1]

    place = jls.why(fun, jnp.ones(2), jnp.array([1.0, 4.0])).births[0].place
    assert (place.operation, place.iteration) == ("sqrt", (3,))


def test_an_overflow_beside_a_mask():
    def fun(scores, mask):
        scores = jnp.where(mask, scores, -jnp.inf)
        scores = scores * 1e30
        return jax.nn.softmax(scores)

    mask = jnp.array([True, True, False])
    assert first_of(fun, jnp.full(3, 1e30), mask)[:2] == ("mul", 2)
    assert not jls.why(fun, jnp.ones(3), mask).births


def test_exp_of_a_mask_and_of_what_is_too_large():
    def fun(scores, mask):
        return jnp.exp(jnp.where(mask, scores, -jnp.inf)).sum()

    assert first_of(fun, jnp.array([1.0, 100.0]), jnp.array([False, True]))[:2] == (
        "exp",
        1,
    )


def test_what_a_where_does_not_take_is_not_to_blame():
    def fun(x, b):
        return jnp.where(x > 0, jnp.log(x), b / b)

    assert first_of(fun, jnp.array([-1.0, 1.0]), jnp.zeros(2))[0] == "div"


def test_what_a_scatter_drops_is_not_to_blame_for_another_kind():
    def fun(x):
        dropped = jnp.log(x - 3.0)
        y = jnp.exp(x + 200.0)
        return y.at[jnp.array([8, 9])].set(dropped)

    births = jls.why(fun, jnp.ones(2)).births
    assert [x.place.operation for x in births] == ["exp"]


def test_a_reference_that_is_changed_in_place():
    if not hasattr(jax, "new_ref"):
        pytest.skip("this jax has no references")

    def fun(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2.0
        return jnp.log(ref[...])

    assert first_of(fun, jnp.zeros(2))[0] == "log"


def test_settings_that_one_turns_on_to_find_a_nan():
    def fun(x):
        return jnp.log(x)

    settings = (
        jax.disable_jit(),
        jax.checking_leaks(),
        jax.transfer_guard("disallow"),
        jax.debug_key_reuse(True),
    )
    x = jnp.zeros(2)
    for setting in settings:
        with setting:
            assert first_of(fun, x)[0] == "log"


def test_a_long_chain_compiles_soon():
    """Anew for each operation, XLA would compute all that it has fused before."""

    def fun(x):
        for _ in range(60):
            x = jnp.sin(x) * 1.01 + 0.1
        return jnp.log(x - x)

    assert jls.why(fun, jnp.ones(3)).births[0].place.operation == "log"


# The loss scale.


def test_after_a_skip_the_scale_of_the_skipped_step_is_tried():
    step, params, opt_state = made(jls.dynamic(2.0**12))
    params, opt_state, report = step(params, opt_state, BATCH)
    assert report.skipped
    why = jls.why(step, params, opt_state, BATCH)
    assert why.is_from_scale
    assert why.births[0].dtype == "float16"
    assert why.notes[0].startswith("The last step was skipped at a higher loss scale")
    assert "at 2^11 all of this is finite, at 2^12 it is not" in why.notes[0]


def test_no_scale_is_tried_that_the_skips_do_not_explain():
    step, params, opt_state = made(jls.dynamic(2.0**6))
    bad = {"x": BATCH["x"].at[0].set(jnp.nan)}
    params, opt_state, _ = step(params, opt_state, bad)
    why = jls.why(step, params, opt_state, BATCH)  # 2^12 would overflow
    assert not why.births
    assert why.is_from_scale is None
    assert why.notes[0].startswith("Not reproduced: the last step was skipped, but")


def test_a_true_nan_is_not_from_the_scale():
    step, params, opt_state = made(jls.dynamic(8.0))
    bad = {"x": BATCH["x"].at[0, 0].set(jnp.nan)}
    why = jls.why(step, params, opt_state, bad)
    assert why.results == ("loss", "gradient of kernel")
    assert why.births[0].place == jls.types.Place("argument", module="batch/x")
    assert why.is_from_scale is False
    assert why.notes == ("No loss scale mends it: it is there at 2^-24 too",)


def records_of(array):
    """The number of records in each run of a program for `array` in the batch."""
    counts = []

    class Counting(record.RecordedProgram):
        def __call__(self, *args, **kwargs):
            found = super().__call__(*args, **kwargs)
            inputs = {Key.ARGUMENTS: ()}
            counts.append(len(jax.tree.leaves(found.tree | inputs)))
            return found

    step, params, opt_state = made(jls.dynamic(8.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case, "RecordedProgram", Counting)
        assert jls.why(step, params, opt_state, {"x": array}).births
    return counts


def test_nan_that_came_in_is_told_without_a_record_of_each_operation():
    few = records_of(BATCH["x"].at[0, 0].set(jnp.nan))
    every = records_of(BATCH["x"].at[0, 0].set(jnp.inf))
    assert max(few) <= 4 < 3 * max(few) < min(every)


def test_nan_that_came_in_hides_no_other_birth():
    def fun(x, y):
        return jnp.log(x), 2 * y

    why = jls.why(fun, jnp.zeros(2), jnp.full(2, jnp.nan))
    assert {birth.place.operation for birth in why.births} == {"log", "argument"}


def test_nan_that_stands_for_nothing_is_not_to_blame_for_a_quotient():
    def mean_of_known(x):
        known = ~jnp.isnan(x)
        return jnp.sum(jnp.where(known, x, 0.0)) / jnp.sum(known.astype(x.dtype))

    why = jls.why(mean_of_known, jnp.full(3, jnp.nan))
    assert why.births[0].place.operation == "div"


def test_a_loop_that_nan_ends_is_not_run_without_it():
    def grown(step, x):
        return lax.while_loop(lambda x: x < 10.0, lambda x: x + step, x)

    why = jls.why(grown, jnp.float32(jnp.nan), jnp.float32(1.0))
    assert why.births[0].place.module == "step"


def test_what_a_function_prints_is_not_printed_for_each_argument(capsys):
    def shown(x, y):
        jax.debug.print("called {}", x.shape)
        return x + y

    nan = jnp.full(2, jnp.nan)
    assert jls.why(shown, nan, nan).births
    jax.effects_barrier()
    assert capsys.readouterr().out.count("called") <= 1


def test_nan_that_reaches_no_result_is_not_named():
    def fun(x, y, z):
        return jnp.where(jnp.isnan(x), 0.0, x) * y + 0.0 * jnp.nan_to_num(z)

    nan = jnp.full(2, jnp.nan)
    why = jls.why(fun, nan, nan, nan)
    assert [birth.place.module for birth in why.births] == ["y"]


def test_a_scale_below_the_lowest_is_halved_once():
    step, params, opt_state = made(jls.static(2.0**-30))
    bad = {"x": BATCH["x"].at[0, 0].set(jnp.nan)}
    why = jls.why(step, params, opt_state, bad)
    assert why.is_from_scale is False
    assert why.notes == ("No loss scale mends it: it is there at 2^-31 too",)


def test_without_a_scale_nothing_is_said_of_it():
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    step = jls.train_step(lambda params, x: jnp.log(params @ x), optimizer)
    params = jnp.ones(2)
    why = jls.why(step, params, optimizer.init(params), jnp.zeros(2))
    assert why.results == ("loss", "gradient of params")
    assert why.is_from_scale is None
    assert why.births[0].place.operation == "log"


def test_a_scale_that_is_no_number_is_said():
    step, params, opt_state = made(jls.dynamic(8.0))
    scaler_state = opt_state.scaler_state._replace(loss_scale=jnp.float32(jnp.inf))
    why = jls.why(step, params, opt_state._replace(scaler_state=scaler_state), BATCH)
    assert why.is_from_scale is None
    assert "The loss scale is inf" in str(why)


def test_a_spike_is_no_fault():
    optimizer = jls.loss_scaled(
        optax.sgd(0.1), jls.static(1.0), spikes=jls.spikes(max_norm=1e-3)
    )
    params = {"kernel": PARAMS["kernel"]}
    step = jls.train_step(loss_fn, optimizer)
    opt_state = optimizer.init(params)
    _, skipped, report = step(params, opt_state, BATCH)
    assert report.skipped
    for state in opt_state, skipped:
        assert jls.why(step, params, state, BATCH) == jls.types.Why()


def test_a_bare_scaler():
    scaler = jls.dynamic(2.0**20)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jls.value_and_grad(loss_fn)(state, params, batch)
        finite = jls.all_finite(grads)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return jls.select(finite, new, params), scaler.adjust(state, finite), loss

    params = {"kernel": PARAMS["kernel"]}
    why = jls.why(step, params, scaler.init(), BATCH)
    assert why.results == ("what is checked for inf and NaN",)
    assert why.is_from_scale
    assert jls.why(step, params, jls.set_loss_scale(scaler.init(), 8.0), BATCH) == (
        jls.types.Why()
    )


def test_of_two_optimizers_the_one_that_skips_is_named():
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(8.0))
    step = jls.train_step(lambda p, x: jnp.sum(jnp.log(p["w"] * x)), optimizer)

    def both(actor, critic, x):
        return step(*actor, x + 1.0), step(*critic, x)

    params = {"w": jnp.ones(2)}
    start = params, optimizer.init(params)
    why = jls.why(both, start, start, jnp.zeros(2))
    assert why.results == ("loss (critic/1)", "gradient of 0/w (critic/1)")


def test_updates_that_are_bad_alone():
    inner = optax.stateless(lambda updates, params: {"kernel": updates["kernel"] / 0})
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0), check_updates=True)
    params = {"kernel": PARAMS["kernel"]}
    why = jls.why(
        jls.train_step(loss_fn, optimizer), params, optimizer.init(params), BATCH
    )
    assert why.results[0] == "update of kernel"
    assert why.births[0].place.operation == "div"
    assert not why.births[0].place.is_backward


# Arguments.


def test_arguments_are_as_before_and_alive():
    step, params, opt_state = made(jls.dynamic(2.0**20))
    before = copied((params, opt_state, BATCH))
    jls.why(step, params, opt_state, BATCH)  # the step donates them
    after = (params, opt_state, BATCH)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.array_equal(x, y)
    jls.why(jax.jit(lambda x: x * 2, donate_argnums=0), BATCH["x"])
    assert not BATCH["x"].is_deleted()


def test_arguments_of_all_kinds():
    def fun(x, *, scale, label="a", rest=None):
        assert label == "a"
        return jnp.log(x * scale)

    for x in (np.zeros(3, np.float32), np.float32(0), 0.0, jnp.zeros(3)):
        why = jls.why(functools.partial(fun, scale=2.0), x)
        assert why.births[0].place.operation == "log"
    why = jls.why(fun, jnp.ones(3), scale=float("nan"))
    assert why.births[0].place.module == "scale"
    why = jls.why(fun, jnp.ones(3), scale=np.array([1.0, np.inf, 1.0]), label="a")
    assert (why.births[0].kind, why.births[0].place.module) == ("inf", "scale")


def test_a_float_that_python_reads():
    def fun(x, rate):
        return jnp.log(x) if rate > 0 else x

    assert jls.why(fun, jnp.zeros(2), 1.0).births[0].place.operation == "log"
    assert not jls.why(fun, jnp.zeros(2), -1.0).births


def test_a_mask_of_minus_inf_comes_after_what_it_spoils():
    def fun(scores, mask):
        return jax.nn.softmax(scores + mask)

    why = jls.why(fun, jnp.ones(3), jnp.full(3, -jnp.inf))
    assert [birth.place.operation for birth in why.births] == ["sub", "argument"]
    assert jls.why(fun, jnp.ones(3), jnp.zeros(3).at[1].set(-jnp.inf)).births == ()


def test_arguments_come_in_their_order():
    def fun(params, x, y):
        return params["a"] + params["b"] + x + y

    for bad in jnp.full((2, 2), jnp.array([[jnp.inf], [jnp.nan]])):
        why = jls.why(fun, {"b": bad, "a": bad}, bad, bad)
        paths = [birth.place.module for birth in why.births]
        assert paths == ["params/a", "params/b", "x", "y"]


def of_a_logarithm(x, zero):
    return jnp.exp(x) + jnp.log(x - 50.0)


def of_a_product(x, zero):
    return (3.0 * x) * (2.0 * x) * 1e10


def of_a_product_with_a_number(x, zero):
    return 1e20 * (x + 1.0)


def of_a_quotient(x, zero):
    return 1.0 / (x - 2.0) + x


def of_a_quotient_by_a_number(x, zero):
    return (x + 1.0) / zero


@pytest.mark.parametrize(
    ("step", "text", "advice"),
    [
        (of_a_logarithm, "log made NaN (float32)", "logarithm of a negative number"),
        (of_a_product, "mul made inf (float32)", "Over 3.403e+38"),
        (
            of_a_product_with_a_number,
            "mul made inf of up to 1e+20 (float32)",
            "Over 3.403e+38",
        ),
        (of_a_quotient, "div made inf of up to 1 (float32)", "A quotient by 0"),
        (
            of_a_quotient_by_a_number,
            "div made inf by a division by 0 (float32)",
            "A quotient by 0",
        ),
    ],
)
def test_numbers_that_a_while_loop_has_not_kept_are_left_out(step, text, advice):
    """Of an operand that is bad in a later iteration it keeps that one."""

    def fun(x, zero):
        state = lax.while_loop(
            lambda state: state[0] < 8,
            lambda state: (state[0] + 1, step(state[1], zero)),
            (0, x),
        )
        return state[1]

    why = jls.why(fun, jnp.full(2, 2.0), 0.0)
    event, *_ = [x.strip() for x in str(why).splitlines() if " made " in x]
    assert event == text
    assert advice in why.births[0].advice


SIGNS = {
    "a logarithm of 0": (lambda x: jnp.log(x - x), "log made -inf of 0"),
    "a negative quotient": (lambda x: -1 / (x - x), "div made -inf of"),
    "both signs": (lambda x: jnp.array([-1.0, 1.0]) / (x - x), "div made inf of"),
    "an exponential": (lambda x: jnp.exp(x * 1000), "exp made inf of"),
    "a constant": (lambda x: jnp.where(x > 0, -jnp.inf, x), "-inf is a number of the"),
    "NaN too": (lambda x: jnp.log(x - jnp.array([1.0, 2.0])), "log made NaN of"),
}


@pytest.mark.parametrize("name", SIGNS)
def test_an_inf_is_told_with_its_sign(name):
    fun, text = SIGNS[name]
    why = jls.why(fun, jnp.ones(2))
    assert f"  {text}" in str(why)
    assert why.births[0].is_negative == ("-inf" in text)


def test_what_is_inf_on_purpose_is_told_only_if_nothing_else_is():
    why = jls.why(lambda x: jnp.where(x > 0, jnp.inf, x), jnp.ones(2))
    assert [birth.place.operation for birth in why.births] == ["constant"]
    assert "inf is a number of the program here" in str(why)
    why = jls.why(lambda x: (jnp.where(x > 0, jnp.inf, x), jnp.log(x - x)), jnp.ones(2))
    assert [birth.place.operation for birth in why.births] == ["log"]


# When the run does not repeat.


def sequence(*values):
    """A function that gives the next of these numbers each time it runs."""
    left = list(values)

    def fun(x):
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return x + jax.pure_callback(lambda: np.float32(left.pop(0)), result)

    return fun


def test_what_only_single_operations_show_is_said_to_be_so():
    why = jls.why(jax.jit(sequence(1.0, np.inf, np.inf)), 1.0)
    assert why.births[0].place.operation == "pure_callback"
    assert why.notes[0].startswith("Compiled as one program, everything was finite")


def test_what_is_not_reproduced_is_said():
    why = jls.why(jax.jit(sequence(1.0, np.inf, 1.0)), 1.0)
    assert (why.births, why.results) == ((), ())
    assert why.notes[0].startswith("Not reproduced: the function gives inf or NaN")
    assert str(why).startswith("jls.why: not reproduced: the function")


# Bad input.


def test_what_is_no_function():
    with pytest.raises(TypeError, match=r"^fun must be a function, got int 3\.$"):
        jls.why(3)
    compiled = jax.jit(roots).lower(jnp.ones(2)).compile()
    with pytest.raises(TypeError, match=r"compiled ahead of time\. Pass the function"):
        jls.why(compiled, jnp.ones(2))


def test_errors_of_the_function_are_its_own():
    def raises(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jls.why(raises, jnp.ones(2))


def test_a_function_that_reads_values_is_told_so():
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        jls.why(lambda x: jnp.ones(2) if float(x[0]) > 0 else x, jnp.ones(2))
    assert caught.value.__notes__[-1].startswith("jls.why traces the function")


def test_results_without_floats():
    with pytest.raises(
        ValueError, match=r"got 1 results? without .*nothing to look at"
    ):
        jls.why(lambda x: x > 0, jnp.ones(2))


def test_donated_arguments():
    x = jnp.ones(2)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(
        ValueError, match=r"^x was donated to an earlier call, and is no"
    ):
        jls.why(roots, x)


def test_debug_nans_does_not_stop_it():
    with jax.debug_nans(True), jax.debug_infs(True):
        assert jls.why(jnp.log, jnp.zeros(2)).births


def test_it_is_for_the_host():
    with pytest.raises(ValueError, match="x must be concrete, got a traced array"):
        jax.jit(lambda x: jls.why(roots, x).is_from_scale)(jnp.ones(2))


def test_parameters_that_came_in_far_too_large_are_said_before_any_line():
    def loss_fn(params, x):
        return jnp.mean(jnp.exp(x @ params["w"]))

    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    for size, says_so in ((1e8, True), (100.0, False)):
        params = {"w": jnp.array([1.0, size])}
        why = jls.why(step, params, optimizer.init(params), jnp.ones((2, 2)))
        text = str(why)
        assert ("The parameters that came in reach 1e+08 (params/w)" in text) == says_so
        if says_so:
            assert text.index("came in reach") < text.index("exp made inf")
            assert "Clip the argument" not in text


def exploding(params, x):
    return jnp.sum(jnp.exp(x @ params["w"]))


FORMS = {
    "gradient": (jax.grad(exploding), "The parameters that came in reach"),
    "both": (jax.jit(jax.value_and_grad(exploding)), "The parameters that came in"),
    "loss": (
        exploding,
        "What came in reaches 1e+18 (params/w). If that is a parameter, the run",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_without_a_step_too(form):
    fun, words = FORMS[form]
    params, x = {"w": jnp.full(2, 1e18)}, jnp.ones((3, 2))
    text = " ".join(str(jls.why(fun, params, x)).split())
    assert words in text
    assert "(params/w)" in text
    assert "Look at the learning rate" in text
    assert text.index("the run diverged before") < text.index("exp made inf")
    assert "Clip the argument" not in text
    of_the_batch = jls.why(fun, {"w": jnp.ones(2)}, 1e18 * x)
    of_the_line = jls.why(fun, {"w": jnp.full(2, 100.0)}, x)
    assert not jls.why(lambda w: jnp.exp(w), params["w"]).is_early
    assert not of_the_batch.is_early
    assert not of_the_line.is_early


def test_a_number_that_is_written_came_in_with_no_argument():
    why = jls.why(lambda: jnp.exp(jnp.full(2, 1e18)))
    assert why.births
    assert not why.is_early


@pytest.mark.cover(1)
@pytest.mark.parametrize("init_scale", [2.0**15, 2.0**20])  # 2^20 is inf in float16
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_state_that_is_kept_in_half(dtype, init_scale):
    """And is widened before the update."""
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(init_scale))

    def cast(tree, dtype):
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            tree,
        )

    @jax.jit
    def step(w, state, x):
        state = cast(state, jnp.float32)
        loss, grads = jls.value_and_grad(
            lambda w: jnp.mean((half(x) @ half(w)).astype(jnp.float32) ** 2)
        )(state, w)
        updates, state = optimizer.update(grads, state, w, value=loss)
        return optax.apply_updates(w, updates), cast(state, dtype), loss

    w, x = jnp.ones((4, 1)), jnp.ones((8, 4))
    state = cast(optimizer.init(w), dtype)
    came_in = jls.why(step, w, state, jnp.full((8, 4), jnp.nan))
    assert "NaN came in: x (float32)" in str(came_in)
    why = jls.why(step, w, state, x)
    calibration = jls.calibrate(step, w, state, x)
    assert calibration.init_scale == 2.0**11
    if jnp.isinf(state.scaler_state.loss_scale):
        assert "inf came in: state/scaler_state/loss_scale" in str(why)
        assert "The scale is inf now." in str(calibration)
    else:
        assert why.is_from_scale


@pytest.mark.parametrize("ask", [jls.why, jls.calibrate, jls.check_step])
def test_what_a_queue_keeps_of_a_batch_is_told_where_the_batch_is(ask):
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    step = jls.train_step(lambda params, x: jnp.sum(params["w"] * x), optimizer)
    bad = jls.types.BadBatch(3, jnp.ones(2), jls.types.SkipReason.LOSS)
    for given in (bad, (bad,)):
        with pytest.raises(TypeError, match=r"got a BadBatch.*queue\.bad\[0\]\.batch"):
            ask(step, params, optimizer.init(params), given)


def test_a_number_just_over_1_is_not_printed_as_1():
    """The arccosine of 1 is 0."""
    over = jnp.nextafter(jnp.float32(1.0), jnp.float32(2.0))
    for x, words in ((over, "1.00000012"), (-over, "-1.00000012")):
        assert f"acos made NaN of {words} (float32)" in str(jls.why(jnp.arccos, x))
