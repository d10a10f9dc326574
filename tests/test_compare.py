"""What `jls.compare` says, and of what; `tests/compare` has many pairs for it."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import pytest
from jax import lax

import jls

ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6)), jnp.float32)
SQUARE = jnp.asarray(np.random.default_rng(1).normal(size=(6, 6)), jnp.float32)


def layer(w, x, scale=1.0):
    return jnp.sum(jnp.tanh(x @ w * scale) ** 2)


half_as_large = functools.partial(layer, scale=0.5)


def test_the_operation_is_named_with_its_lines_and_errors():
    found = jls.compare(layer, half_as_large, SQUARE, ROWS)
    birth = found.birth
    assert birth.a == birth.b
    assert (birth.a.operation, birth.a.function) == ("mul", "layer")
    assert birth.code[0] == "return jnp.sum(jnp.tanh(x @ w * scale) ** 2)"
    assert birth.dtype == "float32"
    assert birth.inputs_error == 0
    assert 0.2 < birth.error < 0.8
    assert not found.equal
    assert found.results.keys() == {"result"}
    assert found.results["result"] > 0.1


def test_text_has_at_most_twelve_lines_of_eighty_columns():
    found = jls.compare(jax.grad(layer), jax.grad(half_as_large), SQUARE, ROWS)
    lines = str(found).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("jls.compare: they part at mul (float32): its operands")
    assert repr(found) == str(found)
    assert "both: tests/test_compare.py:" in str(found).replace("\n    ", " ")


def both(x, y):
    return {"x": jnp.tanh(x), "y": jnp.cos(y)}


OTHERWISE = {
    "results": lambda x, y: {"x": jnp.cos(y), "y": jnp.tanh(x)},
    "arguments": lambda x, y: both(y, x),
    "one of them": lambda x, y: both(x, y) | {"y": jnp.tanh(x)},
    "an argument": lambda x, y: both(x, y) | {"x": x},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_values_in_other_places_are_no_rounding(name):
    found = jls.compare(both, OTHERWISE[name], ROWS, ROWS + 1.0)
    assert not found.equal
    assert max(found.results.values()) > 0.1
    assert "jls.compare: equal" not in str(found)


def test_where_the_operations_agree_it_says_so():
    found = jls.compare(both, OTHERWISE["results"], ROWS, ROWS + 1.0)
    assert str(found).splitlines()[-1] == (
        "  The operations agree: their results are in other places."
    )


UNPAIRED = {
    "of one": (lambda x: {"a": x, "b": 2 * x}, "result.b[5, 6] of a"),
    "of the other": (lambda x: {"a": x}, "result.c[5, 6] of b"),
    "many": (
        lambda x: dict.fromkeys("abde", x),
        "result.b[5, 6] and 2 more of a; result.c[5, 6] of b",
    ),
}


@pytest.mark.parametrize("name", UNPAIRED)
def test_results_that_only_one_program_has_are_named(name):
    a, words = UNPAIRED[name]
    b = {"a": lambda x: {"a": x}, "b": lambda x: {"a": x, "c": 3 * x}}
    found = jls.compare(a, b["a" if name == "of one" else "b"], ROWS)
    assert found.equal
    assert (
        str(found) == f"jls.compare: equal, to the last bit.\n  Not compared: {words}."
    )


def test_of_equal_programs_it_says_nothing():
    found = jls.compare(layer, jax.jit(layer), SQUARE, ROWS)
    assert str(found) == "jls.compare: equal, to the last bit."
    assert (found.birth, found.only_a, found.only_b) == (None, (), ())

    # Of many sums, in another order some differ in the last bit on every CPU.
    def of_rows(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2, axis=1)

    def in_columns(w, x):
        return sum(jnp.tanh(x @ column) ** 2 for column in w.T[::-1])

    rows = jnp.concatenate([ROWS, SQUARE] * 9) * jnp.linspace(0.1, 1, 99)[:, None]
    found = jls.compare(of_rows, in_columns, jnp.tile(SQUARE, 2), rows)
    assert found.equal
    assert (found.birth, found.only_a, found.only_b) == (None, (), ())
    assert 0 < found.results["result"] < 1e-6


def test_an_operation_of_one_program_alone_is_named():
    def with_bias(w, x):
        shifted = x @ w + 0.5
        return jnp.sum(jnp.tanh(shifted) ** 2)

    def without(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    found = jls.compare(with_bias, without, SQUARE, ROWS)
    assert [x.operation for x in found.only_a] == ["add"]
    assert found.only_b == ()
    assert found.birth.a.operation == "tanh"
    assert "only a: add, tests/test_compare.py" in str(found)
    turned = jls.compare(without, with_bias, SQUARE, ROWS)
    assert [x.operation for x in turned.only_b] == ["add"]


def test_what_is_behind_a_difference_is_not_named():
    """The second mistake is there too, and its operand differs already."""

    def twice(w, x, scale):
        return jnp.cos(jnp.sin(x @ w * scale) * scale)

    found = jls.compare(
        functools.partial(twice, scale=1.0),
        functools.partial(twice, scale=1.1),
        SQUARE,
        ROWS,
    )
    assert found.birth.inputs_error == 0
    errors = {place.operation: error for place, error in found.errors}
    assert errors["dot_general"] == 0 < errors["sin"]


def test_the_first_iteration_that_differs_is_named():
    def scanned(x, at, is_reversed):
        def body(carry, i):
            carry = jnp.sin(carry) + 0.1 * x
            return jnp.where(i == at, carry * 1.5, carry), carry

        steps = jnp.arange(12)
        return lax.scan(body, x, steps, reverse=is_reversed)

    for is_reversed in (False, True):
        right = functools.partial(scanned, at=99, is_reversed=is_reversed)
        wrong = functools.partial(scanned, at=4, is_reversed=is_reversed)
        birth = jls.compare(right, wrong, ROWS).birth
        assert birth.a.operation == "eq"
        birth = jls.compare(
            right, functools.partial(scanned, at=4, is_reversed=is_reversed), ROWS
        ).birth
        assert birth.a.iteration == (4,), is_reversed


def test_an_iteration_of_a_while_loop_is_named():
    def looped(x, factor):
        def body(carry):
            i, y = carry
            y = jnp.sin(y) + 0.1 * x
            return i + 1, jnp.where(i == 3, y * factor, y)

        return lax.while_loop(lambda carry: carry[0] < 30, body, (0, x))[1]

    right, wrong = (functools.partial(looped, factor=x) for x in (1.0, 1.5))
    birth = jls.compare(right, wrong, ROWS).birth
    assert birth.a.operation == "mul"
    assert birth.a.iteration == (0,)  # it is computed in each, and taken in one


def test_rounding_that_grows_is_no_difference():
    """A sum that cancels: its relative error is as large as itself."""

    def centered(x):
        return jnp.sum(x - x.mean(), axis=0).sum()

    def otherwise(x):
        return jnp.sum(x, axis=1).sum() - x.size * x.mean()

    found = jls.compare(centered, otherwise, ROWS + 1.0)
    assert found.equal
    assert found.birth is None


def test_a_mask_does_not_hide_the_rest():
    def masked(x, more):
        mask = jnp.arange(x.shape[1]) < 3
        return jnp.tanh(jnp.where(mask, x, -1e9) + more)

    right, wrong = (functools.partial(masked, more=x) for x in (0.5, 0.501))
    assert jls.compare(right, wrong, ROWS).birth.a.operation == "add"


def test_a_choice_that_falls_otherwise_is_followed():
    def chosen(x, limit):
        return jnp.sum(jnp.where(x > limit, x, 0.1 * x))

    right, wrong = (functools.partial(chosen, limit=x) for x in (0.0, 0.5))
    assert jls.compare(right, wrong, ROWS).birth.a.operation == "gt"


def test_a_choice_that_falls_otherwise_by_rounding_is_a_note():
    def chosen(x):
        return jnp.sum(jnp.where(x > 0.3, 1.0, 2.0) * jnp.arange(1.0, 6.0))

    x = jnp.array([0.3, 0.1, 0.5, 0.2, 0.4])
    found = jls.compare(jls.fingerprint(chosen, x), chosen, x + 9e-8)
    assert found.results["result"] > 0.01
    assert found.equal
    assert found.birth is None
    assert "A choice falls otherwise by rounding: tests/test_compare.py" in str(found)


def test_what_is_computed_twice_counts_once():
    def loss_fn(w, x, is_again, scale=1.0):
        def block(w, x):
            return jnp.sin(jnp.tanh(x @ w) * scale)

        block = jax.checkpoint(block) if is_again else block
        return jnp.sum(block(w, block(w, x)) ** 2)

    right = jax.grad(functools.partial(loss_fn, is_again=False))
    assert jls.compare(
        right, jax.grad(functools.partial(loss_fn, is_again=True)), SQUARE, ROWS
    ).equal
    wrong = jax.grad(functools.partial(loss_fn, is_again=True, scale=1.1))
    birth = jls.compare(right, wrong, SQUARE, ROWS).birth
    assert (birth.a.operation, birth.a.function) == ("mul", "block")
    assert not birth.a.is_backward
    assert birth.error < 0.2


def test_a_gradient_that_is_stopped():
    def stopped(w, x, is_stopped):
        y = jnp.tanh(x @ w)
        y = lax.stop_gradient(y) if is_stopped else y
        return jnp.sum(jnp.sin(y) * (x @ w))

    right, wrong = (jax.grad(functools.partial(stopped, is_stopped=x)) for x in (0, 1))
    found = jls.compare(right, wrong, SQUARE, ROWS)
    assert not found.equal
    assert found.only_b[0].operation == "stop_gradient"


def test_a_wrong_promise_of_a_scatter_is_named():
    """Its values are the same on a CPU, and its gradient is not."""

    def stored(x, at, unique_indices):
        table = jnp.zeros((5, 6)).at[at].set(jnp.sin(x), unique_indices=unique_indices)
        return jnp.sum(jnp.cos(table) * SQUARE[:5])

    args = ROWS, jnp.array([0, 3, 3, 1, 3])
    right, wrong = (functools.partial(stored, unique_indices=x) for x in (False, True))
    assert jls.compare(right, wrong, *args).equal
    assert jls.compare(wrong, wrong, *args).equal  # it is deterministic, on a CPU
    found = jls.compare(jax.grad(right), jax.grad(wrong), *args)
    assert not found.equal
    lines = {place.line for place in (*found.only_a, *found.only_b)}
    assert lines == {inspect.getsourcelines(stored)[1] + 1}


# Half precision.


def net(params, x, scale=1.0):
    hidden = jax.nn.relu(x @ params["one"])
    hidden = hidden * scale
    return jnp.mean((hidden @ params["two"]) ** 2)


PARAMS = {"one": SQUARE, "two": SQUARE.T}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounding(dtype):
    cast = jax.value_and_grad(jls.autocast(net, dtype))
    found = jls.compare(jax.value_and_grad(net), cast, PARAMS, ROWS)
    assert found.equal
    assert found.birth is None
    assert max(found.results.values()) > 1e-4  # of the program as it is
    assert "which rounding explains" in str(found)


def test_a_mistake_in_half_precision_is_found():
    wrong = functools.partial(net, scale=1.001)  # less than one rounding of bfloat16
    cast = jax.value_and_grad(jls.autocast(wrong, "bfloat16"))
    for pair in itertools.permutations((jax.value_and_grad(net), cast)):
        birth = jls.compare(*pair, PARAMS, ROWS).birth
        assert (birth.a.operation, birth.b.operation) == ("mul", "mul")
        assert birth.error < 0.01


def test_a_cast_by_hand_is_a_note():
    def rounded(params, x):
        x = x.astype(jnp.bfloat16).astype(jnp.float32)
        return net(params, x)

    found = jls.compare(net, rounded, PARAMS, ROWS)
    assert found.equal
    assert "Rounds to bfloat16 here: tests/test_compare.py" in " ".join(
        str(found).split()
    )


def test_the_line_at_which_most_rounding_comes_in_is_one_of_the_user():
    """Not the line of what unscales the gradients, which is of none."""

    def loss_fn(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) @ params["v"]))

    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.static(1024.0))
    w, v, x = map(jax.random.key, range(3))
    params = {"w": jax.random.normal(w, (8, 8)), "v": jax.random.normal(v, (8, 4))}
    args = params, optimizer.init(params), jax.random.normal(x, (16, 8))
    steps = (
        jls.train_step(loss_fn, optimizer, compute_dtype=dtype)
        for dtype in (None, jnp.float16)
    )
    text = " ".join(str(jls.compare(*steps, *args)).split())
    assert "Most of it comes in at mul, tests/test_compare.py" in text


# Two runs of one program.


def test_what_is_not_deterministic_is_named():
    count = itertools.count()

    def noise(x):
        return x + np.float32(1e-7) * next(count)

    def step(x):
        y = jnp.sin(x)
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        return jnp.cos(jax.pure_callback(noise, shape, y)).sum()

    found = jls.compare(step, step, ROWS)
    assert found.birth.a.operation == "pure_callback"
    assert not found.equal


def test_two_runs_of_one_program_are_equal_to_the_last_bit():
    step = jax.jit(jax.value_and_grad(layer))
    assert str(jls.compare(step, step, SQUARE, ROWS)).endswith("to the last bit.")


@pytest.mark.parametrize("shape", [None, (5, 6)])
def test_a_number_that_each_trace_draws_is_named(shape):
    draws = np.random.default_rng(0)

    def step(x):
        return jnp.sum(jnp.sin(x) * jnp.asarray(draws.normal(size=shape), x.dtype))

    def fixed(x):
        return jnp.sum(jnp.sin(x) * jnp.asarray(given, x.dtype))

    given = draws.normal(size=shape)
    found = jls.compare(step, step, ROWS)
    assert not found.equal
    assert found.birth.a.operation == ("argument" if shape else "mul")
    assert ("Each trace of the function makes it anew" in str(found)) == bool(shape)
    assert str(jls.compare(fixed, fixed, ROWS)).endswith("to the last bit.")


def test_results_of_another_shape_differ():
    def column(x):
        return {"a": x, "c": 3 * x.T}

    found = jls.compare(column, lambda x: {"a": x, "c": 3 * x}, ROWS)
    assert str(found).splitlines() == [
        "jls.compare: the results differ, and no operation that both have parts them.",
        "  Those of one shape are equal, to the last bit.",
        "  Not compared: result.c[6, 5] of a; result.c[5, 6] of b.",
    ]
    assert not found


def sum_of_products(x, w):
    return sum(x[:, i : i + 1] * w[i : i + 1] for i in range(len(w)))


def test_what_an_operation_is_given_otherwise_is_named():
    def attention(x, w, is_swapped):
        key, value = jnp.sin(x @ w), jnp.cos(x @ w)
        key, value = (value, key) if is_swapped else (key, value)
        return jnp.tanh(key) @ jnp.exp(value).T

    right, wrong = (functools.partial(attention, is_swapped=x) for x in (False, True))
    found = jls.compare(right, wrong, ROWS, SQUARE)
    assert found.birth.a.operation == "tanh"
    assert [place.operation for place in found.birth.operands_a] == ["sin"]
    assert [place.operation for place in found.birth.operands_b] == ["cos"]
    text = " ".join(str(found).split())
    assert "part at tanh (float32), which a and b give other operands: by" in text
    assert "only a gives it: sin, tests/test_compare.py" in text
    found = jls.compare(layer, half_as_large, SQUARE, ROWS)
    assert (found.birth.operands_a, found.birth.operands_b) == ((), ())


def test_an_operand_that_is_computed_otherwise_is_no_other_operand():
    def one(x, w):
        return jnp.sin(x @ w) * 1.1

    def other(x, w):
        return jnp.sin(sum_of_products(x, w)) * 1.2

    birth = jls.compare(one, other, ROWS, SQUARE).birth
    assert (birth.a.operation, birth.operands_a, birth.operands_b) == ("mul", (), ())


def test_what_one_program_gives_early_and_the_other_late_explains_nothing():
    """The first product of one has the bits of the second one of the other."""

    def step(x, moment, most):
        return 0.1 * (jnp.sin(x) * most) + moment

    right, wrong = (functools.partial(step, most=x) for x in (1.0, 0.1))
    found = jls.compare(right, wrong, ROWS, 0.1 * ROWS)
    assert not found.equal
    assert found.birth


def repeated(x, w, count):
    return lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ w), x)


def repeated_by_while(x, w, count):
    def body(carry):
        return carry[0] + 1, jnp.tanh(carry[1] @ w)

    return lax.while_loop(lambda carry: carry[0] < count, body, (0, x))[1]


@pytest.mark.parametrize("loop", [repeated, repeated_by_while])
@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("after", [lambda x: x, lambda x: 2 * jnp.sin(x)])
def test_a_loop_that_runs_once_more_is_named(loop, count, after):
    def right(x, w):
        return after(loop(x, w, count))

    def wrong(x, w):
        return after(loop(x, w, count + 1))

    found = jls.compare(right, wrong, ROWS, SQUARE)
    assert not found.equal
    assert found.birth is None
    said = f"A loop runs {count} times in a, and {count + 1} times in b: tests/"
    assert said in " ".join(str(found).split())
    assert jls.compare(right, jax.jit(right), ROWS, SQUARE).equal


def test_more_flags_differ_than_rounding_explains():
    def kept(x, w, product, least):
        y = product(x, w)
        return jnp.where(y > least, y, 0)

    rows = jnp.concatenate([ROWS, SQUARE, SQUARE.T] * 9)
    right = functools.partial(kept, product=jnp.matmul, least=0.5)
    for least in (0.5, 1.0):
        other = functools.partial(kept, product=sum_of_products, least=least)
        found = jls.compare(right, other, rows, SQUARE)
        assert found.equal == (least == 0.5)
    assert found.birth.a.operation == "gt"
    assert 0 < found.birth.inputs_error < 1e-6


def test_a_number_that_is_rounded_where_the_program_is_written_is_no_mistake():
    def scores(x, w, dtype, size=8):
        return (x.astype(dtype) @ w.astype(dtype) / size**0.5).astype(jnp.float32)

    in_float32 = functools.partial(scores, dtype=jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float16):
        in_half = functools.partial(scores, dtype=dtype)
        assert jls.compare(in_float32, in_half, ROWS, SQUARE).equal
        assert jls.compare(in_half, in_float32, ROWS, SQUARE).equal
        wrong = functools.partial(in_half, size=6)
        assert jls.compare(in_float32, wrong, ROWS, SQUARE).birth.a.operation == "div"


# Fingerprints.


def test_a_fingerprint_is_compared_as_its_program(tmp_path):
    path = tmp_path / "layer.npz"
    made = jls.fingerprint(jax.grad(layer), SQUARE, ROWS)
    made.save(path)
    loaded = jls.types.Fingerprint.load(path)
    assert loaded[:-3] == made[:-3]
    assert loaded.made_by == made.made_by
    for name, run in made.runs.items():
        for one, other in zip(run, loaded.runs[name], strict=True):
            assert all(map(np.array_equal, one, other))
    assert jls.compare(loaded, jax.grad(layer), SQUARE, ROWS).equal
    wrong = jls.fingerprint(jax.grad(half_as_large), SQUARE, ROWS)
    direct = jls.compare(jax.grad(layer), jax.grad(half_as_large), SQUARE, ROWS)
    assert jls.compare(loaded, wrong).birth == direct.birth


def test_a_fingerprint_holds_no_values(tmp_path):
    path = tmp_path / "layer.npz"
    jls.fingerprint(layer, SQUARE, ROWS).save(path)
    with np.load(path) as file:
        words = np.concatenate([file[name].view(np.uint8) for name in file.files])
    assert SQUARE.tobytes()[:8] not in words.tobytes()


def test_another_argument_is_named():
    made = jls.fingerprint(layer, SQUARE, ROWS)
    found = jls.compare(made, layer, SQUARE, ROWS + 0.1)
    assert found.birth.a.operation == "argument"
    assert found.birth.a.module == "x"
    assert str(found).startswith("jls.compare: an argument differs, by")


@pytest.mark.parametrize("jitted", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
def test_what_the_functions_close_over_is_named_if_it_differs(jitted):
    def closing_over(w):
        return jitted(lambda x: layer(w, x))

    first, second = map(closing_over, (SQUARE, 1.5 * SQUARE))
    found = jls.compare(first, second, ROWS)
    assert found.birth.a.operation == "argument"
    assert "what the functions close over differs" in str(found)
    text = " ".join(str(found).split())
    assert "float32[6, 6]. Pass it as an argument" in text
    assert "First dot_general takes it, tests/test_compare.py" in text
    assert jls.compare(first, jitted(lambda x: layer(SQUARE, x)), ROWS).equal


def test_arrays_that_are_closed_over_in_another_order_do_not_differ():
    other = SQUARE.T + 1

    def one(x):
        return jnp.tanh(x @ SQUARE) + jnp.sin(x @ other)

    def again(x):
        return (jnp.sin(x @ other) + jnp.tanh(x @ SQUARE)) * jnp.float32(1.1)

    def scaled(x):
        x = x * jnp.float32(1.1)
        return jnp.sin(x @ other) + jnp.tanh(x @ SQUARE)

    found = jls.compare(one, again, ROWS)
    assert not found.equal
    assert found.birth is None
    assert [place.operation for place in found.only_b] == ["mul"]
    found = jls.compare(one, scaled, ROWS)
    assert found.birth.a.operation == "dot_general"
    assert [place.operation for place in found.only_b] == ["mul"]


def test_it_is_true_if_they_are_equal():
    assert jls.compare(layer, layer, SQUARE, ROWS)
    assert not jls.compare(layer, half_as_large, SQUARE, ROWS)


def test_the_command_line_says_what_the_call_says(tmp_path, capsys):
    from jls.__main__ import main

    for name, fun in (("a", layer), ("b", half_as_large)):
        jls.fingerprint(fun, SQUARE, ROWS).save(tmp_path / f"{name}.npz")
    paths = [str(tmp_path / f"{name}.npz") for name in "ab"]
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *paths])
    assert stopped.value.code == 1
    found = jls.compare(layer, half_as_large, SQUARE, ROWS)
    assert capsys.readouterr().out == f"{found}\n"
    main(["compare", paths[0], paths[0]])
    assert capsys.readouterr().out == "jls.compare: equal, to the last bit.\n"


def test_a_compiled_program_is_compared_by_its_results():
    compiled = jax.jit(layer).lower(SQUARE, ROWS).compile()
    assert jls.compare(layer, compiled, SQUARE, ROWS).equal
    found = jls.compare(half_as_large, compiled, SQUARE, ROWS)
    assert not found.equal
    assert found.birth is None
    assert "its operations cannot be read" in str(found)
    assert jls.compare(compiled, compiled, SQUARE, ROWS).equal


def test_the_picture_marks_the_birth():
    matplotlib.use("Agg")
    found = jls.compare(layer, half_as_large, SQUARE, ROWS)
    (axes,) = found.plot().axes
    assert "mul" not in axes.get_title(loc="left")
    assert "test_compare.py" in axes.get_title(loc="left")
    drawn, mark = axes.get_lines()
    assert len(drawn.get_ydata()) == len(found.errors)
    (at,) = mark.get_xdata()
    assert found.errors[at][0] == found.birth.a


# Bad input.


@pytest.mark.parametrize(
    ("a", "b", "args", "error", "message"),
    [
        (
            layer,
            3,
            (),
            TypeError,
            "b must be a function or a jls.types.Fingerprint, got",
        ),
        ("x.npz", layer, (), TypeError, r"Write jls.types.Fingerprint.load\('x.npz'\)"),
        (
            layer(SQUARE, ROWS),
            layer,
            (),
            TypeError,
            r"Write jls.compare\(a, b, \*args\)",
        ),
        (layer, layer, (SQUARE,), TypeError, r"'x'. Write jls.compare\(a, b, w, x\)"),
        (
            layer,
            lambda w, x: {"y": x},
            (SQUARE, ROWS),
            ValueError,
            "result of one name",
        ),
    ],
)
def test_bad_input(a, b, args, error, message):
    with pytest.raises(error, match=message):
        jls.compare(a, b, *args)


def test_bad_fingerprints(tmp_path):
    made = jls.fingerprint(jnp.tanh, ROWS)
    with pytest.raises(TypeError, match="a and b are fingerprints"):
        jls.compare(made, made, ROWS)
    with pytest.raises(ValueError, match=r'path must end in "\.npz"'):
        made.save(tmp_path / "x.npy")
    np.savez(tmp_path / "other.npz", x=np.ones(2))
    with pytest.raises(ValueError, match=r"must be a file that.*fingerprint\(step, \*"):
        jls.types.Fingerprint.load(tmp_path / "other.npz")
    with np.load(tmp_path / "other.npz") as file, pytest.raises(TypeError, match="Npz"):
        jls.compare(file, jnp.tanh, ROWS)
    with pytest.raises(ValueError, match="must be given the same arguments, got x of"):
        jls.compare(made, jnp.tanh, ROWS[0])


def test_fingerprints_are_compared_by_compare_alone():
    made, other = (jls.fingerprint(jnp.tanh, ROWS) for _ in range(2))
    for compared in (lambda: made == other, lambda: made != other):
        with pytest.raises(TypeError, match=r"Write jls\.compare\(a, b\)\.equal\.$"):
            compared()
    assert made in [made]
    assert not made != made  # noqa: SIM202
    assert len({made, other}) == 2
    assert jls.compare(made, other).equal


def test_a_fingerprint_of_another_format_is_refused(tmp_path, monkeypatch):
    made, path = jls.fingerprint(jnp.tanh, ROWS), tmp_path / "x.npz"
    monkeypatch.setattr("jls._tools.compare.fingerprint.FORMAT", 7)
    made.save(path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has a fingerprint of format 7"):
        jls.types.Fingerprint.load(path)


def test_nothing_is_donated():
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    given = jnp.ones(3)
    assert jls.compare(step, jax.jit(lambda x: x + x), given).equal
    assert not given.is_deleted()


def test_a_result_that_differs_and_what_it_is_made_of_does_not_is_no_rounding():
    """How often a `while` in another loop runs is not known."""

    def once(x, w, count):
        def body(carry, _):
            return repeated_by_while(carry, w, count), None

        return lax.scan(body, x, None, length=1)[0]

    right, wrong = (functools.partial(once, count=x) for x in (3, 4))
    found = jls.compare(right, wrong, ROWS, SQUARE)
    assert not found.equal
    assert "the results differ, and no operation that both have parts" in str(found)
    assert jls.compare(right, jax.jit(right), ROWS, SQUARE).equal
