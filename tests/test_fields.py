"""One home for a fact: what reads the tables of fields, signals and verdicts agrees."""

import ast
import inspect
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jls
from jls._tools.run import columns, health, history, history_plot
from jls._tools.run.verdict import TABLE, Facts
from jls._types import FIELDS, SIGNALS, Event, LossScaledState, logged, spike_metrics
from jls.types import SpikeState, StepReport

PARAMS = {"w": jnp.ones(2)}
OPTIMIZER = jls.loss_scaled(optax.sgd(0.1), spikes=jls.spikes(window=4))
LOGGED = {name for name, field in FIELDS.items() if field.is_logged}
COUNTERS = {name: field for name, field in FIELDS.items() if field.counts}
DOCS = Path(__file__).parents[1] / "docs"


# The fields of the state.


def test_every_field_has_its_facts_in_the_order_of_the_state():
    assert tuple(FIELDS) == LossScaledState._fields


def test_a_field_is_a_metric_if_the_table_says_so():
    state = OPTIMIZER.init(PARAMS)
    metrics = set(jls.metrics(state))
    assert set(logged(state)) == LOGGED <= metrics
    others = {"loss_scale", "spikes_found", *spike_metrics(state.spike_state)}
    assert metrics == LOGGED | others
    assert set(jls.metrics(state, host=True)) == metrics
    plain = jls.skip_nonfinite(optax.sgd(0.1)).init(PARAMS)
    assert LOGGED - set(jls.metrics(plain)) == {"spikes"}


@pytest.mark.parametrize("place", ["jls.metrics", "repr", "health", "the page"])
def test_every_metric_is_seen(place):
    state = OPTIMIZER.init(PARAMS)
    texts = {
        "jls.metrics": inspect.getdoc(jls.metrics),
        "repr": repr(state),
        "health": " ".join(jls.health(state).numbers),
        "the page": (DOCS / "questions/healthy_run.md").read_text(encoding="utf-8")
        + (DOCS / "questions/spikes.md").read_text(encoding="utf-8"),
    }
    assert [name for name in sorted(LOGGED) if name not in texts[place]] == []


def test_a_field_with_a_dtype_starts_at_zero():
    state = OPTIMIZER.init(PARAMS)
    for name, field in FIELDS.items():
        if field.dtype is not None:
            value = getattr(state, name)
            assert (value.dtype, value.shape, int(value)) == (field.dtype, (), 0), name


def test_every_event_is_counted():
    assert {field.counts for field in COUNTERS.values()} == set(get_args(Event))


# Gradient, loss, and whether parts of the gradients were left out; and the event that
# such a step is, beside "step" and, if it is not applied, "skip".
STEPS = {
    None: (1.0, 1.0, False),
    "nonfinite loss": (1.0, np.nan, False),
    "spike": (1e6, 1.0, False),
    "nonfinite update": (-1.0, 1.0, False),
    "partial overflow": (1.0, 1.0, True),
}


def _sqrt(updates, state, params=None):
    return jax.tree.map(jnp.sqrt, updates), state


@pytest.mark.parametrize("event", STEPS)
def test_a_counter_counts_its_event_and_no_other(event, jit_or_eager):
    inner = optax.GradientTransformation(lambda params: (), _sqrt)
    optimizer = jls.skip_nonfinite(
        inner, spikes=jls.spikes(window=4), check_updates=True
    )
    update = jit_or_eager(optimizer.update)
    state = optimizer.init(PARAMS)
    for _ in range(4):
        _, state = update({"w": jnp.ones(2)}, state, PARAMS, value=jnp.float32(1.0))
    grad, loss, is_partial = STEPS[event]
    grads = {"w": jnp.full(2, jnp.float32(grad))}
    given = {"value": jnp.float32(loss), "partial_overflow": jnp.asarray(is_partial)}
    _, new = update(grads, state, PARAMS, **given)
    happened = {"step"} if event is None else {"step", "skip", event}
    happened -= {"skip"} if is_partial else set()
    for name, field in COUNTERS.items():
        expected = int(getattr(state, name)) + (field.counts in happened)
        assert getattr(new, name) == expected, name


def test_a_step_that_is_skipped_was_not_applied_in_part():
    state = OPTIMIZER.init(PARAMS)
    for bad in ({"grad": jnp.nan}, {"loss": jnp.nan}):
        grads = {"w": jnp.full(2, bad.get("grad", 1.0))}
        value = jnp.float32(bad.get("loss", 1.0))
        _, state = OPTIMIZER.update(
            grads, state, PARAMS, value=value, partial_overflow=True
        )
    assert (state.skips, state.partial_overflows) == (2, 0)


def test_the_last_step_alone_restarts_a_consecutive_count():
    state = OPTIMIZER.init(PARAMS)
    consecutive = [name for name, field in COUNTERS.items() if field.is_consecutive]
    for grad in (jnp.inf, jnp.inf, 1.0):
        before = state
        _, state = OPTIMIZER.update({"w": jnp.full(2, grad)}, state, PARAMS)
    for name in consecutive:
        assert (getattr(before, name), getattr(state, name)) == (2, 0)
    assert consecutive == ["consecutive_skips"]


def test_a_new_field_reaches_health_by_itself():
    """A metric that no verdict knows of is a fact all the same."""
    facts = Facts(rewinds=3, is_static=True, min_scale=None, max_scale=None)
    assert facts.rewinds == 3
    with pytest.raises(AttributeError, match="no attribute 'rewind'"):
        _ = facts.rewind


# Columns of a History.


def columns_read():
    """The names of columns, literals, that the record of a run looks up."""
    readers = {"column", "_known"}
    for module in (columns, history, history_plot):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", None))
            if name in readers and len(node.args) > 1:
                argument = node.args[1]
                if isinstance(argument, ast.Constant):
                    yield argument.value


def test_a_history_reads_columns_that_there_are():
    metrics = set(jls.metrics(OPTIMIZER.init(PARAMS)))
    read = set(columns_read())
    assert len(read) > 6
    # Given by name to `append`, by custom.
    assert read - {"step", "grad_norm"} <= metrics | set(StepReport._fields)


# Signals.


def test_every_signal_has_its_arrays_its_metrics_and_its_column():
    state = jls.spikes(window=4).init()
    assert isinstance(state, SpikeState)
    for field in ("seen", "kept", "value", "limit"):
        assert len(getattr(state, field)) == len(SIGNALS)
    names = {f"{kind}_{signal}" for signal in SIGNALS for kind in ("judged", "limit")}
    assert set(spike_metrics(state)) == names
    assert {name for name in names if name.startswith("limit")} <= set(
        StepReport._fields
    )


# Verdicts.


def test_the_verdicts_are_those_of_the_table_in_its_order():
    assert tuple(row.verdict for row in TABLE) == get_args(jls.types.Verdict)


@pytest.mark.parametrize("verdict", get_args(jls.types.Verdict))
def test_every_verdict_is_in_the_docs_and_tested(verdict):
    page = (DOCS / "questions/healthy_run.md").read_text(encoding="utf-8")
    assert f"\n| {verdict} |" in page
    assert f'"{verdict}"' in inspect.getdoc(health.health)
    folder = Path(__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("run/*.py")]
    more = ("test_applied.py", "test_spikes.py")
    texts += [(folder / name).read_text(encoding="utf-8") for name in more]
    assert f'"{verdict}"' in "".join(texts)


# States of scalers.

# What `jls.set_loss_scale` restarts, and what it leaves: these say how the scale moves
# from now on, not when it moves next.
RESTARTED = {"finite_count", "nonfinite_count"}
LEFT = {"growth_count", "rung"}


def test_set_loss_scale_knows_every_field_of_a_scaler():
    """Add a new field to one of the two, and to `set_loss_scale` if it restarts."""
    states = [getattr(jls.types, x) for x in dir(jls.types) if x.endswith("State")]
    scaler_states = [x._fields for x in states if "loss_scale" in x._fields]
    assert len(scaler_states) >= 3
    assert set().union(*scaler_states) - {"loss_scale"} == RESTARTED | LEFT
