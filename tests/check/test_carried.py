"""Which results `jls.check_step` takes for the new values of which arguments."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
import steps
from steps import plain, plain_params

import jls
from jls._tools.check.check import read_step

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
]

small = functools.partial(plain, inner=optax.adam(0.1))


def read(step, *args, **options):
    runner, _ = read_step(step, args, {}, **options)
    return runner


def carried(step, *args, **options):
    """The path among the results of each leaf that comes back, by its name."""
    runner = read(step, *args, **options)
    items = runner.subject.items
    return {
        items[i].name: "/".join(x) for i, x in runner.subject.carried.sources.items()
    }


def with_more(returns, *more, **changes):
    """A step that takes more arguments and returns `returns(old, new, *more)`.

    Old and new are the parameters and the state of the optimizer.
    """
    step, (params, opt_state, batch) = small(**changes)

    @jax.jit
    def outer(params, opt_state, batch, *more):
        new = step(params, opt_state, batch)[:2]
        return returns((params, opt_state), new, *more)

    return outer, params, opt_state, batch, *more


OTHER = jax.tree.map(lambda x: x + 1, plain_params())


def average(old, new):
    return jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, old, new)


# What comes back, and where the new parameters are, and the other tree.
RESULTS = {
    "in order": (lambda old, new, other: new, "0", None),
    "the state first": (lambda old, new, other: new[::-1], "1", None),
    "nested": (lambda old, new, other: {"b": {"c": new[0]}, "a": new[1]}, "b/c", None),
    "the old ones first": (lambda old, new, other: (old[0], *new), "1", None),
    "a frozen copy first": (lambda old, new, other: (other, *new), "1", None),
    "an average first": (
        lambda old, new, other: (average(other, new[0]), *new),
        "1",
        "0",
    ),
    "something made of the old ones first": (
        lambda old, new, other: (jax.tree.map(jnp.sin, old[0]), *new),
        "1",
        None,
    ),
    "something made of them first": (
        lambda old, new, other: (jax.tree.map(jnp.sin, new[0]), *new),
        "1",
        None,
    ),
}


@pytest.mark.parametrize("results", RESULTS)
def test_new_parameters_are_found_wherever_they_are(results):
    returns, params, other = RESULTS[results]
    found = carried(*with_more(returns, OTHER))
    for name in ("w1", "w2"):
        assert found[f"params/{name}"] == f"{params}/{name}"
        assert found.get(f"argument 3/{name}") == (other and f"{other}/{name}")


def test_parameters_that_a_skip_changes_come_before_an_average():
    """Nothing stays there, so that both follow the parameters."""
    returns, params, other = RESULTS["an average first"]
    found = carried(*with_more(returns, OTHER, wrap=steps.decay_outside))
    assert found["params/w1"] == f"{params}/w1"
    assert found["argument 3/w1"] == f"{other}/w1"


def test_fields_that_come_back_by_themselves_are_found():
    step, (params, opt_state, batch) = small()

    @jax.jit
    def whole(run, batch):
        new = step(run["params"], run["opt"], batch)
        return new[1], new[0]

    found = carried(whole, {"params": params, "opt": opt_state, "n": 3.0}, batch)
    assert found["run/params/w1"] == "1/w1"
    assert found["run/opt/scaler_state/loss_scale"] == "0/scaler_state/loss_scale"
    assert "run/n" not in found


COUNTS = {"epoch": jnp.int32(0)}


def test_counts_pair_in_order_if_there_are_equally_many():
    def both(old, new, a, b):
        return *new, {"epoch": a["epoch"] + 1}, {"epoch": b["epoch"] * 2}

    def one(old, new, a, b):
        return *new, {"epoch": a["epoch"] + b["epoch"]}

    found = carried(*with_more(both, COUNTS, COUNTS))
    assert (found["argument 3/epoch"], found["argument 4/epoch"]) == (
        "2/epoch",
        "3/epoch",
    )
    assert "argument 3/epoch" not in carried(*with_more(one, COUNTS, COUNTS))


def test_labels_that_come_back_as_they_were_are_data():
    found = carried(*with_more(lambda old, new, labels: (*new, labels), COUNTS))
    assert "argument 3/epoch" not in found


def test_an_array_alone_pairs_if_all_before_it_come_back():
    step, (params, opt_state, batch) = small()

    @jax.jit
    def counts(params, opt_state, batch, count):
        return *step(params, opt_state, batch), count + 1

    @jax.jit
    def counts_first(params, opt_state, count, batch):
        return *step(params, opt_state, batch), count + 1

    count = jnp.int32(0)
    assert "count" not in carried(counts, params, opt_state, batch, count)
    assert carried(counts_first, params, opt_state, count, batch)["count"] == "3"


def test_predictions_are_data_and_said_to_be_doubtful():
    def returns(old, new, data):
        return *new, {"x": jnp.tanh(data["x"] @ data["x"])}

    data = {"x": jnp.ones((3, 3))}
    runner = read(*with_more(returns, data))
    (doubtful,) = runner.subject.carried.doubtful
    assert runner.subject.items[doubtful].name == "argument 3/x"
    frozen = read(*with_more(lambda old, new, x: (*new, x), data))
    assert not frozen.subject.carried.doubtful


def test_states_of_bare_scalers_pair_in_order():
    scaler = jls.dynamic(2.0**10)

    @jax.jit
    def step(a, b, x):
        return scaler.adjust(a, x > 0), scaler.adjust(b, x > 1), x

    found = carried(step, scaler.init(), scaler.init(), jnp.float32(1.0))
    assert (found["a/loss_scale"], found["b/loss_scale"]) == (
        "0/loss_scale",
        "1/loss_scale",
    )


def test_what_stays_open_is_an_error_with_the_candidates():
    """A state that the step makes anew may be either result."""
    scaler = jls.dynamic(2.0**10)

    @jax.jit
    def step(state, x):
        return x, {"a": scaler.init(), "b": scaler.init()}

    match = r"'state' may be any of its results 1/a, 1/b.* carried=\(0, 1\)"
    with pytest.raises(ValueError, match=match):
        read(step, scaler.init(), jnp.float32(1.0))
