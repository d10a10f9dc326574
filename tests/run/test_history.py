import io
import math
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import jls
from jls._tools.run.columns import skip_counts

PARAMS = {"w": jnp.ones(2)}
GRADS = [1.0, math.inf, math.inf, 1.0, 1.0, 1.0]


def optimizer():
    return jls.loss_scaled(optax.sgd(0.1), jls.dynamic(8.0, growth_interval=2))


def step(state, grad):
    grads = {"w": jnp.stack([grad, jnp.float32(1.0)])}
    _, state = optimizer().update(grads, state, PARAMS)
    return state, jls.metrics(state) | {"loss": 1.0 / state.steps.astype(jnp.float32)}


def one_by_one(grads=GRADS):
    history, state = jls.History(), optimizer().init(PARAMS)
    for grad in grads:
        state, metrics = step(state, jnp.float32(grad))
        history.append(metrics)
    return history


def report(**changes):
    fields = {
        "loss": jnp.float32(0.5),
        "skipped": jnp.asarray(False),
        "loss_scale": jnp.float32(1024.0),
        "learning_rate": {"head": jnp.float32(0.5), "body": jnp.float32(0.25)},
        "global_norm": jnp.float32(3.0),
        "local_norm": {"layer/kernel": jnp.float32(2.0)},
        "size": None,
        "dropped": jnp.int32(0),
        "aux": None,
        "skip_reason": jnp.int32(0),
    }
    return jls.types.StepReport(**fields | changes)


def stacked(**columns):
    history = jls.History()
    history.append({name: np.asarray(values) for name, values in columns.items()})
    return history


@pytest.fixture
def transfers(monkeypatch):
    """What went through `jax.device_get`."""
    seen = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: seen.append(x) or device_get(x))
    return seen


# Appending.


def test_a_run_is_read_as_arrays_rows_and_keys():
    history = one_by_one()
    assert len(history) == 6
    assert history.keys()[0] == "step"
    assert set(history.keys()) == {"step", "loss", *jls.metrics(optimizer().init({}))}
    assert history["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert history["loss_scale"].tolist() == [8, 4, 2, 2, 4, 4]
    assert history["skips"].dtype == np.int64
    assert history["applied"].tolist() == [True, False, False, True, True, True]
    assert history["applied"].dtype == bool
    assert history["loss"].dtype == np.float64
    row = list(history)[1]
    assert (row["step"], row["applied"], row["loss"]) == (2, False, 0.5)
    assert "loss" in history
    assert "los" not in history
    assert repr(history).startswith("History(6 rows: step, loss_scale, applied")


def test_what_a_scan_stacked_equals_appending_one_by_one():
    state = optimizer().init(PARAMS)
    grads = jnp.array(GRADS, jnp.float32)
    _, metrics = jax.jit(lambda s: jax.lax.scan(step, s, grads))(state)
    history = jls.History()
    history.append(metrics)
    assert sorted(history.keys()) == sorted(one_by_one().keys())
    for name in history.keys():  # noqa: SIM118, iterating gives rows
        np.testing.assert_array_equal(history[name], one_by_one()[name])


def test_an_append_is_one_transfer_of_all_values(transfers):
    history = jls.History()
    metrics = jls.metrics(optimizer().init(PARAMS))
    history.append(metrics, loss=jnp.float32(0.5), epoch=3)
    history.append(report())
    history.append({"loss": jnp.ones(5), "loss_scale": jnp.ones(5)})
    assert len(transfers) == 3
    assert set(transfers[0]) == {*metrics, "loss", "epoch"}
    history.summary()
    history.plot()
    assert len(transfers) == 3


def test_keys_may_come_and_go():
    history = jls.History()
    history.append({"loss": 0.5})
    history.append({"accuracy": 1, "done": True})
    history.append({"loss": math.nan, "accuracy": None})
    np.testing.assert_array_equal(history["loss"], [0.5, np.nan, np.nan])
    np.testing.assert_array_equal(history["accuracy"], [np.nan, 1.0, np.nan])
    np.testing.assert_array_equal(history["done"], [np.nan, 1.0, np.nan])
    assert [row["accuracy"] for row in history] == [None, 1, None]
    assert [row["loss"] is None for row in history] == [False, True, False]


def test_history_takes_the_scalars_of_aux_and_leaves_out_the_rest():
    history = jls.History()
    aux = {"accuracy": jnp.float32(0.5), "logits": jnp.ones((2, 3)), "name": "a"}
    history.append(report(aux=aux))
    assert history["aux/accuracy"].tolist() == [0.5]
    assert not {"aux", "aux/logits", "aux/name"} & set(history.keys())
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), report(aux=aux["accuracy"]))
    history.append(stacked)
    assert history["aux"].tolist()[1:] == [0.5, 0.5]


def test_a_report_is_recorded_with_its_dicts_flat():
    history = jls.History()
    history.append(report(), epoch=7)
    assert list(history) == [
        {
            "step": 1,
            "loss": 0.5,
            "skipped": False,
            "loss_scale": 1024.0,
            "learning_rate/head": 0.5,
            "learning_rate/body": 0.25,
            "global_norm": 3.0,
            "local_norm/layer/kernel": 2.0,
            "dropped": 0,
            "skip_reason": 0,
            "epoch": 7,
        }
    ]


def run_with_reports(by_scan):
    """Four steps, of which the second is skipped for its loss."""
    step = jls.train_step(lambda p, batch: jnp.sum(p["w"] * batch), optimizer())
    batches = jnp.ones((4, 2)).at[1].set(jnp.nan)

    def body(carry, batch):
        params, state, report = step(*carry, batch)
        return (params, state), (report, jls.metrics(state))

    carry, history = (PARAMS, optimizer().init(PARAMS)), jls.History()
    if by_scan:
        _, (report, metrics) = jax.jit(lambda c: jax.lax.scan(body, c, batches))(carry)
        history.append(report, **metrics)
        return history
    for batch in batches:
        carry, (report, metrics) = jax.jit(body)(carry, batch)
        history.append(report, **metrics)
    return history


@pytest.mark.parametrize("by_scan", [False, True])
def test_a_report_and_the_metrics_say_what_happened_in_each_step(by_scan):
    history = run_with_reports(by_scan)
    assert history["step"].tolist() == [1, 2, 3, 4]
    assert history["skip_reason"].tolist() == [0, 2, 0, 0]
    assert history["skipped"].tolist() == [False, True, False, False]
    assert history["applied"].tolist() == [True, False, True, True]
    assert history["last_skip_reason"].tolist() == [0, 2, 2, 2]
    assert history["consecutive_skips"].tolist() == [0, 1, 0, 0]
    assert "skipped     1 of 4 steps (25.0%), up to 1 in a row" in history.summary()


def test_what_is_given_by_name_goes_before_the_metrics():
    history = jls.History()
    history.append(report(), loss=0.25, **jls.metrics(optimizer().init(PARAMS)))
    assert history["loss"] == [0.25]
    assert history["loss_scale"] == [8.0]
    assert history["skips"] == [0]


@pytest.mark.parametrize(
    ("metrics", "step", "expected"),
    [
        ({"loss": 1.0}, None, [11]),
        ({"loss": 1.0, "steps": 40}, None, [40]),
        ({"loss": 1.0, "steps": 40, "step": 50}, None, [50]),
        ({"loss": 1.0, "steps": 40, "step": 50}, 60, [60]),
        ({"loss": 1.0}, 2.5, [2.5]),
        ({"loss": 1.0}, jnp.int32(3), [3]),
        ({"loss": np.ones(3)}, None, [11, 12, 13]),
        ({"loss": np.ones(3), "steps": np.arange(3)}, None, [0, 1, 2]),
        ({"loss": np.ones(3)}, range(5, 8), [5, 6, 7]),
        ({"loss": np.ones(0)}, None, []),
    ],
)
def test_a_step_is_given_or_in_the_metrics_or_counted(metrics, step, expected):
    history = jls.History()
    history.append({"loss": 1.0}, step=10)
    history.append(metrics, step=np.array(step) if isinstance(step, range) else step)
    assert history["step"].tolist() == [10, *expected]


@pytest.mark.parametrize(
    "value",
    [
        *(np.float16(0.1), np.float32(0.1), np.float64(0.1), np.longdouble(0.1)),
        *(jnp.bfloat16(0.1), jnp.float8_e4m3fn(0.5), jnp.int4(-3), np.uint64(2**63)),
        *(True, np.True_, jnp.asarray(True), 2**62, -(2**63), 1e-320, -math.inf),
    ],
    ids=repr,
)
def test_every_kind_of_number_is_recorded_exactly(value):
    history = jls.History()
    history.append({"value": value})
    (got,) = history["value"].tolist()
    assert type(got) in (bool, int, float)
    assert got == np.asarray(value)
    assert isinstance(got, bool) == (np.asarray(value).dtype == bool)
    assert list(history) == [{"step": 1, "value": got}]


def test_a_record_outlives_the_donated_buffer():
    value = jnp.float32(0.5) + 0
    history = jls.History()
    history.append({"loss": value})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not every platform donates
        jax.jit(lambda x: x + 1, donate_argnums=0)(value).block_until_ready()
    assert history["loss"] == [0.5]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("0.5", TypeError, "loss must be a real number .* got str '0.5'"),
        ([0.5], TypeError, r"loss must be a real number .* got list\."),
        (1j, TypeError, "loss must be a real number .* got complex 1j"),
        (2**64, TypeError, "loss must be .* at most 64 bits, .* got int 18446744"),
        (np.array("a"), TypeError, "loss must be a real number .* got <U1"),
        (jnp.complex64(1), TypeError, "loss must be a real number .* got complex64"),
        (jax.random.key(0), TypeError, "loss must be a real number .* got key<fry>"),
        (np.ones((2, 3)), ValueError, r"loss must be a scalar.* got shape \(2, 3\)"),
    ],
    ids=str,
)
def test_a_bad_value_is_named(value, error, message):
    with pytest.raises(error, match=message):
        jls.History().append({"loss": value})


@pytest.mark.parametrize(
    "metrics", [None, 0.5, "loss", [("loss", 1)], jls.dynamic().init()], ids=repr
)
def test_metrics_must_be_a_dict_or_a_report(metrics):
    message = f"metrics must be a dict .*StepReport, got {type(metrics).__name__}"
    with pytest.raises(TypeError, match=message):
        jls.History().append(metrics)


def test_a_traced_value_is_named():
    with pytest.raises(ValueError, match=r"loss must be concrete.*call this outside"):
        jax.jit(lambda x: jls.History().append({"loss": x}))(1.0)


@pytest.mark.parametrize(
    ("metrics", "step", "message"),
    [
        ({"a": np.ones(2), "b": np.ones(3)}, None, r"b must have .* of a, \(2,\), got"),
        ({"a": np.ones(2), "b": 1.0}, None, r"b must have the shape of a.*shape \(\)"),
        ({"a": np.ones(2)}, 4, "step must have the shape of a"),
        ({"a": 1.0}, math.nan, "step must be finite, got nan"),
        ({"a/b": 1.0, "a": {"b": 2.0}}, None, "a/b must be given once"),
        ({}, None, "metrics must have at least one value"),
        ({"a": None}, None, "metrics must have at least one value"),
    ],
)
def test_a_bad_append_appends_nothing(metrics, step, message):
    history = one_by_one()
    before = list(history)
    with pytest.raises(ValueError, match=message):
        history.append(metrics, step=step)
    assert list(history) == before


def test_a_key_that_was_not_recorded_is_a_key_error_that_lists_the_others():
    with pytest.raises(KeyError, match="no 'los' was recorded, only step, loss"):
        stacked(loss=[1.0])["los"]


def test_the_columns_make_a_table_as_pandas_takes_it():
    history = stacked(loss=[1.0, 2.0])
    history.append({"accuracy": 0.5})
    table = dict(history)
    assert list(table) == ["step", "loss", "accuracy"]
    assert {column.shape for column in table.values()} == {(3,)}


# The summary.


def test_summary_of_a_run():
    assert one_by_one().summary() == (
        "recorded    6 steps (1 to 6)\n"
        "skipped     2 of 6 steps (33.3%), up to 2 in a row\n"
        "loss scale  2^3 first, 2^2 last, 2^1 lowest, 2^3 highest\n"
        "            1 growth, 2 backoffs\n"
        "loss        1 first, 0.1667 last, 0.1667 best (step 6)"
    )


def test_summary_of_reports_counts_their_skips():
    history = jls.History()
    for skipped in (True, False, True, True, False, True):
        loss = math.nan if skipped else 0.5
        history.append(report(skipped=skipped, loss=loss))
    assert "skipped     4 of 6 steps (66.7%), up to 2 in a row" in history.summary()
    assert "2^10 throughout" in history.summary()
    assert "nan first, nan last, 0.5 best (step 2); 4 inf or NaN" in history.summary()
    assert history.summary().endswith("from which line.")


def test_summary_of_every_tenth_step_has_the_counts_of_the_run():
    history = jls.History()
    for steps, skips, in_a_row in ((10, 4, 0), (20, 4, 0), (30, 11, 6)):
        state = {"steps": steps, "skips": skips, "consecutive_skips": in_a_row}
        history.append(state | {"applied": in_a_row == 0, "loss_scale": 8.0})
    lines = history.summary().splitlines()
    assert lines[1] == "skipped     11 of 30 steps (36.7%), up to 6 in a row"
    assert lines[3].startswith("Not every step was recorded")
    assert lines[4].startswith("The last step was skipped")


def test_summary_does_not_know_of_a_last_row_without_counts():
    history = stacked(steps=[1, 2], skips=[0, 1], consecutive_skips=[0, 1])
    assert "The last step was skipped" in history.summary()
    history.append({"loss": 1.0})
    assert "The last step was skipped" not in history.summary()
    assert "1 of 2 steps (50.0%), up to 1 in a row" in history.summary()


@pytest.mark.parametrize(("step", "is_said"), [(3, False), (4, True)])
def test_summary_says_of_one_missing_step_that_not_all_were_recorded(step, is_said):
    summary = stacked(loss_scale=[8.0, 4.0, 2.0], step=[1, 2, step]).summary()
    assert ("Not every step was recorded" in summary) == is_said


def test_skips_of_another_run_do_not_count_against_those_before():
    columns = {"step": [10, 20, 1, 2], "skips": [3, 5, 0, 1], "applied": [True] * 4}
    assert skip_counts(columns).tolist() == [0, 2, 0, 1]


def test_summary_has_lines_of_at_most_80_columns():
    scales = [2.0**10, 3e30, 12345678.0, 2.0**-20]
    history = stacked(loss_scale=scales, applied=[True, False, False, True])
    assert max(map(len, history.summary().splitlines())) <= 80


def test_summary_of_skips_between_the_rows_knows_of_one_in_a_row_at_least():
    counts = {"steps": [10, 20], "skips": [4, 5], "consecutive_skips": [0, 0]}
    assert "5 of 20 steps (25.0%), up to 1 in a row" in stacked(**counts).summary()


def test_summary_of_a_state_before_its_first_step_has_no_skips():
    history = jls.History()
    state = optimizer().init(PARAMS)
    history.append(jls.metrics(state))
    assert history.summary() == (
        "recorded    1 step (0)\nskipped     0 of 0 steps\nloss scale  2^3 throughout"
    )
    assert drawn(history.plot().axes[0], "|") == []
    # Recorded, it shows what the first step did.
    history.append(step(state, jnp.float32(jnp.inf))[1])
    assert "1 backoff" in history.summary()
    assert drawn(history.plot().axes[1], "|") == [1]


def test_summary_of_little_says_little():
    assert jls.History().summary() == "No steps recorded."
    assert stacked(accuracy=[0.5]).summary() == "recorded    1 step (1)"
    bad = stacked(loss=[math.nan, math.inf]).summary()
    assert bad.endswith("loss        nan first, inf last; 2 inf or NaN")


# The progress line.


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"accuracy": 0.5}, ""),
        (
            {"loss": 0.231, "loss_scale": 2.0**15, "skips": 3, "consecutive_skips": 0},
            "loss 0.231  scale 2^15  skips 3 (0 in a row)",
        ),
        ({"loss": np.float32(0.1), "loss_scale": 1000}, "loss 0.1  scale 1000"),
        ({"loss_scale": 0.125, "loss": math.nan}, "loss nan  scale 2^-3"),
        ({"loss_scale": 12345.678, "loss": -math.inf}, "loss -inf  scale 1.235e+04"),
        ({"loss_scale": 1, "skips": 2}, "scale 2^0  skips 2"),
        ({"loss_scale": jnp.float32(0)}, "scale 0"),
        (report(), "loss 0.5  scale 2^10"),
        (report(skipped=True, loss=math.inf), "loss inf  scale 2^10  skipped"),
    ],
    ids=str,
)
def test_line_is_the_last_row(metrics, line):
    history = jls.History()
    assert history.line() == ""
    history.append({"loss": 9.0, "loss_scale": 9.0, "skips": 9, "skipped": True})
    history.append(metrics)
    assert history.line() == line


# The plot.


def drawn(panel, marker):
    """The x of the marks of one kind."""
    lines = [line for line in panel.lines if line.get_marker() == marker]
    points = [pair for line in lines for pair in line.get_xydata().tolist()]
    return [x for x, y in points if np.isfinite(y)]


def labels(panel):
    legend = panel.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def test_plot_shows_loss_scale_and_norm_with_every_skip():
    history = stacked(
        loss=[2.0, np.nan, 1.5, 1.0, 0.5, 0.25],
        loss_scale=[8.0, 4.0, 2.0, 2.0, 4.0, 4.0],
        applied=[True, False, False, True, True, True],
        grad_norm=[1.0, np.nan, np.inf, 1.0, 1.0, 1.0],
    )
    figure = history.plot()
    figure.savefig(io.BytesIO())
    loss, scale, norm = figure.axes
    assert [p.get_ylabel() for p in figure.axes] == [
        "loss",
        "loss scale",
        "gradient norm",
    ]
    assert [panel.get_yscale() for panel in figure.axes] == ["log"] * 3
    assert scale.yaxis.get_transform().base == 2
    ticks = [text.get_text() for text in scale.get_yticklabels()]
    assert {"$2^{1}$", "$2^{2}$", "$2^{3}$"} <= set(ticks)
    for panel in figure.axes:
        assert drawn(panel, "|") == [2, 3]
        assert panel.get_xlim()[0] < 1 < 6 < panel.get_xlim()[1]
    assert (drawn(scale, "^"), drawn(scale, "v")) == ([5], [2, 3])
    assert labels(loss) == ["skipped steps (2)"]
    assert labels(scale) == ["growth (1)", "backoff (2)"]
    assert drawn(loss, "o") == [1, 3, 4, 5, 6]
    assert drawn(norm, "o") == [1, 4, 5, 6]
    assert norm.get_xlabel() == "step"


@pytest.mark.parametrize("count", [8, 100])
def test_a_line_has_a_gap_where_a_value_is_not_finite(count):
    losses = np.linspace(2.0, 1.0, count)
    losses[[2, 4]] = np.nan, np.inf
    history = stacked(loss=losses, loss_scale=np.full(count, 8.0))
    line, *others = history.plot().axes[0].lines
    (y,) = [line.get_ydata()]
    assert np.isnan(y).nonzero()[0].tolist() == [2, 4]
    # What stands alone is no line: it is a point.
    points = [x.get_xdata().tolist() for x in others if x.get_marker() == "o"]
    assert points == ([[4]] if count == 100 else [])


def test_rows_without_a_value_make_no_gap():
    history = jls.History()
    for i in range(100):
        history.append({"loss_scale": 8.0} | ({"loss": 1.0 + i} if i % 10 == 0 else {}))
    line = history.plot().axes[0].lines[0]
    assert line.get_xdata().tolist() == [*range(1, 101, 10)]
    assert np.isfinite(line.get_ydata()).all()


def test_a_long_line_has_a_gap_where_no_row_of_a_part_is_finite():
    losses = np.ones(5000)
    losses[1000:1100], losses[3000] = np.nan, np.inf
    y = stacked(loss=losses).plot().axes[0].lines[0].get_ydata()
    assert np.isnan(y).sum() == 32  # parts of three rows


@pytest.mark.parametrize(
    ("reason", "backoffs"), [(1, "1 or 2"), (2, "1"), (4, "1"), (None, "1 or 2")]
)
def test_a_first_step_that_was_skipped_may_be_a_backoff(reason, backoffs):
    """No row has the loss scale before it, and a hysteresis may have kept it."""
    reasons = {} if reason is None else {"skip_reason": [reason, 1, 0]}
    history = stacked(
        loss_scale=[4.0, 2.0, 2.0], skipped=[True, True, False], **reasons
    )
    assert f"backoff ({backoffs})" in labels(history.plot().axes[0])
    noun = "backoff" if backoffs == "1" else "backoffs"
    assert f"0 growths, {backoffs} {noun}" in history.summary()


def test_plot_of_the_scale_is_a_step_line_through_every_change():
    line = one_by_one().plot().axes[1].lines[0]
    assert line.get_drawstyle() == "steps-post"
    assert line.get_xydata().tolist() == [[1, 8], [2, 4], [3, 2], [5, 4], [6, 4]]


def test_plot_of_every_tenth_step_marks_the_rows_after_skips():
    history = stacked(
        loss_scale=[8.0, 4.0, 4.0, 4.0],
        steps=[10, 20, 30, 40],
        skips=[3, 5, 5, 9],
        applied=[True, True, True, False],
    )
    (panel,) = history.plot().axes
    assert drawn(panel, "|") == [20, 40]
    assert "skipped steps (6)" in labels(panel)


def test_plot_marks_a_bad_loss_that_no_skip_explains():
    (panel,) = stacked(loss=[1.0, np.nan, np.inf], applied=[1, 0, 1]).plot().axes
    assert drawn(panel, "x") == [3]
    assert "loss inf or NaN (1)" in labels(panel)
    history = jls.History()
    for metrics in ({"loss": 1.0}, {"accuracy": 1.0}, {"loss": 0.5}):
        history.append(metrics)
    assert drawn(history.plot().axes[0], "x") == []  # missing, not NaN


def test_plot_of_a_loss_that_is_not_all_positive_has_a_linear_axis():
    assert stacked(loss=[1.0, -1.0]).plot().axes[0].get_yscale() == "linear"
    assert stacked(loss=[1.0, 0.0]).plot().axes[0].get_yscale() == "linear"
    assert stacked(loss=[1.0, math.nan, 2.0]).plot().axes[0].get_yscale() == "log"


@pytest.mark.cover(1)
@pytest.mark.parametrize("loss", [1.0, 0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("skipped", [True, False])
def test_plot_of_a_single_step(loss, skipped):
    history = jls.History()
    history.append(report(loss=loss, skipped=skipped, global_norm=jnp.float32(loss)))
    figure = history.plot()
    figure.savefig(io.BytesIO())
    assert len(figure.axes) == 3
    finite = math.isfinite(loss)
    assert len(drawn(figure.axes[0], "o")) == finite
    assert [text.get_text() for text in figure.axes[0].texts] == (
        [] if finite else ["no finite value"]
    )
    assert drawn(figure.axes[1], "o") == [1]
    assert len(drawn(figure.axes[1], "|")) == skipped


@pytest.mark.parametrize(
    "loss",
    [
        [1e-45, 3e38],
        [1e-45],
        [-3e38, 3e38],
        [1, 2],
        [True, False],
        [0.5, 0.50001],
        [7.0] * 3,
    ],
)
def test_plot_of_odd_losses(loss):
    stacked(loss=loss).plot().savefig(io.BytesIO())


@pytest.mark.parametrize("scales", [[0.0], [math.nan, math.nan], [1000.0, 3.0], [1e30]])
def test_plot_of_odd_scales(scales):
    stacked(loss_scale=scales).plot().savefig(io.BytesIO())


def test_plot_of_a_long_run_has_few_marks():
    n = 100_000
    rng = np.random.default_rng(0)
    skipped = np.arange(n) % 3 == 1
    history = stacked(
        loss=np.where(skipped, np.nan, rng.lognormal(size=n)),
        loss_scale=np.where(skipped, 4.0, 8.0),
        skipped=skipped,
        global_norm=rng.lognormal(size=n),
    )
    figure = history.plot()
    figure.savefig(io.BytesIO(), dpi=100)
    loss, scale, _ = figure.axes
    assert 200 < len(drawn(loss, "|")) <= 400
    assert 60 < len(drawn(scale, "^")) <= 120
    assert labels(loss) == ["median and range of 50 rows", f"skipped steps ({n // 3})"]
    assert max(len(line.get_xdata()) for line in loss.lines) <= 2000
    band = loss.collections[0].get_paths()[0].vertices
    finite = history["loss"][~skipped]
    assert (band[:, 1].min(), band[:, 1].max()) == (finite.min(), finite.max())


def test_plot_draws_into_given_axes_and_returns_their_figure():
    history = one_by_one()
    figure = Figure()
    above, below = figure.subplots(2, 1)
    assert history.plot([above, below]) is figure
    assert (above.get_ylabel(), below.get_ylabel()) == ("loss", "loss scale")
    single = Figure().subplots()
    assert stacked(loss=[1.0]).plot(single) is single.figure
    with pytest.raises(ValueError, match=r"2 \(loss, loss scale\), got 1"):
        history.plot(single)
    with pytest.raises(TypeError, match="axes must be matplotlib's Axes, got 'loss'"):
        history.plot(["loss", "loss scale"])


def test_plot_of_nothing_is_an_error_that_says_what_is_missing():
    with pytest.raises(ValueError, match=r"at least one row.* got no rows"):
        jls.History().plot()
    with pytest.raises(ValueError, match=r"loss_scale, global_norm .*only step, accur"):
        stacked(accuracy=[0.5]).plot()


def test_a_notebook_shows_the_figure_once_and_pyplot_knows_nothing_of_it():
    code = (
        "import sys, jls; h = jls.History(); h.append({'loss': 1.0}); f = h.plot(); "
        "print(f._repr_png_()[1:4], 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "b'PNG' False"


def test_without_matplotlib_only_the_plot_is_missing():
    code = """if True:
        import sys
        sys.modules["matplotlib"] = None
        import jls
        history = jls.History()
        history.append({"loss": 1.0})
        print(history.summary())
        try:
            history.plot()
        except ImportError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "1 step" in done.stdout
    assert "needs the package matplotlib, which is not installed" in done.stdout
    assert "pip install matplotlib" in done.stdout


@pytest.mark.parametrize("skips", [1, 2, 3, 4])
def test_a_line_says_how_to_find_the_scale_while_no_step_is_applied(skips):
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    params = jnp.ones(2)
    state, history = optimizer.init(params), jls.History()
    advice = "  jls.calibrate finds the scale"
    for _ in range(skips):
        _, state = optimizer.update(params * jnp.inf, state, params)
        history.append(jls.metrics(state))
    assert history.line().endswith(advice) == (skips >= 3)
    assert ("jls.calibrate" in str(jls.health(state))) == (skips >= 3)
    _, state = optimizer.update(params, state, params)
    history.append(jls.metrics(state))
    assert not history.line().endswith(advice)
