"""Verdicts at their limits, and the numbers in their sentences: of states made by hand.

`tests/run/test_health.py` makes the runs.
"""

import math
import re
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import jls
from jls._tools.run.verdict import TABLE
from jls.types import SkipReason

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(1)}


def optimizer(policy=None, **options):
    bounds = {"min_scale": 2.0, "max_scale": 32.0} | options
    return jls.loss_scaled(optax.sgd(0.1), jls.dynamic(8.0, **bounds), spikes=policy)


PLAIN, GUARDED = optimizer(), optimizer(jls.spikes())


def made(by=PLAIN, scale=8.0, of_policy=None, **counts):
    """The state of a run that was counted so."""
    state = jls.set_loss_scale(by.init(PARAMS), scale)
    counts = {"steps": 100} | counts
    if "consecutive_skips" in counts:
        counts = {"last_skip_reason": SkipReason.GRADIENTS} | counts
    state = state._replace(**{name: jnp.int32(x) for name, x in counts.items()})
    if of_policy:
        old = state.spike_state
        new = {
            name: jnp.asarray(x, getattr(old, name).dtype)
            for name, x in of_policy.items()
        }
        state = state._replace(spike_state=old._replace(**new))
    return state


def verdict(by=PLAIN, **counts):
    return jls.health(made(by, **counts), optimizer=by).verdict


SENTENCES = {
    "recovering": (
        PLAIN,
        {"skips": 7, "consecutive_skips": 2},
        r"it was skipped, 2 in a row; the loss scale is 8\. 7 of 100 steps were",
    ),
    "at floor": (
        PLAIN,
        {"scale": 2.0, "skips": 7, "consecutive_skips": 3},
        r"loss scale of 2 is at its floor \(3 skipped in a row\)",
    ),
    "stalled": (
        PLAIN,
        {"steps": 1000, "skips": 70, "consecutive_skips": 51},
        "^the last 51 steps were all skipped, the last one for its gradients",
    ),
    "non-finite loss": (
        PLAIN,
        {
            "skips": 9,
            "consecutive_skips": 2,
            "last_skip_reason": SkipReason.LOSS,
            "nonfinite_losses": 5,
            "nonfinite_updates": 3,
        },
        r"\(5 of 100 steps so far\)",
    ),
    "non-finite update": (
        PLAIN,
        {
            "skips": 9,
            "consecutive_skips": 2,
            "last_skip_reason": SkipReason.UPDATES,
            "nonfinite_losses": 5,
            "nonfinite_updates": 3,
        },
        r"\(3 of 100 steps so far\)",
    ),
    "skipping": (
        GUARDED,
        {"skips": 60, "nonfinite_losses": 20, "nonfinite_updates": 17, "spikes": 9},
        "^60 of 100 steps were skipped so far, 14 for their gradients, 20 for their "
        "loss, 17 for their updates, 9 as spikes; the loss scale is 8",
    ),
    "dropping": (
        PLAIN,
        {"skips": 7, "partial_overflows": 60},
        "^60 of 100 steps were applied without a part",
    ),
    "ok": (
        PLAIN,
        {"skips": 7, "partial_overflows": 4},
        r"^7 of 100 steps were skipped so far; .* In 4 of them a part",
    ),
    "ok, with spikes": (
        GUARDED,
        {"skips": 7, "spikes": 3, "of_policy": {"found": 5}},
        "Spikes: 5 found, 3 skipped",
    ),
    "spike": (
        GUARDED,
        {
            "skips": 7,
            "consecutive_skips": 1,
            "last_skip_reason": SkipReason.SPIKE,
            "spikes": 3,
            "of_policy": {"found": 5, "value": [1.0, 9.0], "limit": [2.0, 8.5]},
        },
        r"gradient norm of 9 was over the limit of 8\.5 \(3 of 100 steps so far\)",
    ),
    "spiking": (
        GUARDED,
        {"skips": 7, "spikes": 3, "of_policy": {"found": 60, "steady_share": 0.1}},
        r"^60 of 100 steps were spikes, .* explains \(3 skipped\)",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_number_of_a_sentence_is_the_right_one(name):
    by, counts, words = SENTENCES[name]
    health = jls.health(made(by, **counts), optimizer=by)
    assert health.verdict == name.partition(",")[0]
    page = "What to do: docs/questions/healthy_run.md#"
    assert (page in health.sentence) == (health.verdict != "ok")
    assert re.search(words, health.sentence), health.sentence


def test_each_verdict_has_its_section_on_the_page():
    page = Path(__file__).parents[2] / "docs" / "questions" / "healthy_run.md"
    titles = re.findall(r"^### (.*)$", page.read_text(), re.MULTILINE)
    anchors = {title.lower().replace(" ", "-") for title in titles}
    assert {row.anchor for row in TABLE if row.verdict != "ok"} == anchors


@pytest.mark.parametrize(
    ("skips", "steps", "expected"),
    [(25, 30, "ok"), (26, 104, "skipping"), (26, 105, "ok")],
)
def test_skipping_begins_at_a_quarter_of_the_steps(skips, steps, expected):
    assert verdict(skips=skips, steps=steps) == expected
    # The same of what is left out.
    left_out = verdict(partial_overflows=skips, steps=steps)
    assert left_out == {"skipping": "dropping"}.get(expected, expected)


@pytest.mark.parametrize(
    ("counts", "policy", "expected"),
    [
        ({}, {"found": 18}, "ok"),
        ({}, {"found": 19}, "spiking"),
        # Those that were skipped did not enter the window; without a budget none did.
        ({"spikes": 1}, {"found": 19, "tokens": 3.0}, "ok"),
        ({"spikes": 1}, {"found": 19, "tokens": math.inf}, "spiking"),
    ],
)
def test_spiking_is_more_than_the_share_and_what_chance_adds(counts, policy, expected):
    """Of 100 steps 10 may be spikes; of 19 spikes chance may add 8.7, of 18 8.5."""
    policy = policy | {"steady_share": 0.1}
    assert verdict(GUARDED, of_policy=policy, **counts) == expected


@pytest.mark.parametrize(
    ("tokens", "spikes", "is_said"),
    [(1.0, 4, False), (0.9, 4, True), (0.0, 0, False)],
)
def test_a_budget_is_spent_where_less_than_one_step_is_left(tokens, spikes, is_said):
    policy = {"tokens": tokens, "found": 4}
    state = made(GUARDED, skips=spikes, spikes=spikes, of_policy=policy)
    assert ("The budget is spent" in jls.health(state).sentence) == is_said


def started_high(skips=5, scale=2.0**10, by=None, **counts):
    by = by or jls.loss_scaled(optax.sgd(0.1))  # from 2^15
    counts = {"applied": True, "skips": skips} | counts
    health = jls.health(made(by, scale, **counts), optimizer=by)
    return re.findall(
        r"All (\d+) skips brought the scale from (.*): start", str(health)
    )


SAID = [("5", "2^15 to 2^10")]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, SAID),
        ({"skips": 4, "scale": 2.0**11}, []),  # as many a run has
        ({"steps": 101}, []),
        ({"scale": 2.0**11}, []),  # it has grown, or one skip did not lower it
        ({"scale": 2.0**9}, []),
        ({"nonfinite_losses": 1}, []),
        ({"nonfinite_updates": 1}, []),
        ({"partial_overflows": 1}, []),
        ({"consecutive_skips": 1}, []),  # it may still come down
        ({"scale": 2.0**35}, []),  # "at ceiling"
        ({"scale": 2.0**20}, [("5", "2^25 to 2^20")]),  # set over the maximum by hand
        ({"scale": 2.0**19}, []),  # set by hand, to what the scaler might have reached
        ({"skips": 15, "scale": 1.0}, []),  # the last resort, not where to start
    ],
)
def test_a_scale_that_started_too_high_is_called_so(counts, said):
    found = started_high(**counts)
    assert [(skips, " ".join(rest.split())) for skips, rest in found] == said


@pytest.mark.parametrize(
    "scaler",
    [
        jls.dynamic(backoff_interval=2),
        jls.hysteresis(),
        jls.dynamic(growth_interval=50),
        jls.static(2.0**20),
    ],
)
def test_where_a_scale_has_started_is_known_of_no_other_rule(scaler):
    by = jls.loss_scaled(optax.sgd(0.1), scaler)
    assert not started_high(by=by, scale=2.0**20)


def test_a_scale_above_its_maximum_is_called_so_under_any_verdict():
    for counts in ({"steps": 0}, {"skips": 3, "consecutive_skips": 3}):
        health = jls.health(made(PLAIN, 64.0, **counts), optimizer=PLAIN)
        assert health.verdict in ("no step", "recovering")
        said = "The loss scale of 64 is above its maximum of 32: it was set by hand"
        assert said in health.sentence
        at_most = jls.health(made(PLAIN, 32.0, **counts), optimizer=PLAIN)
        assert "above its maximum" not in at_most.sentence


# Masks.

MASK = jnp.array([1.0, -jnp.inf])


@pytest.mark.parametrize(("skips", "expected"), [(25, "recovering"), (26, "poisoned")])
def test_a_mask_is_doubted_where_more_is_skipped_than_a_scale_takes_down(
    skips, expected
):
    state = made(steps=1000, skips=skips, consecutive_skips=skips)
    assert jls.health(state, PARAMS | {"w": MASK}).verdict == expected


def test_a_maximum_is_minus_inf_before_its_first_step_alone():
    most = {"most": jnp.full(3, -jnp.inf)}
    assert jls.health(made(steps=0), carried=most).verdict == "no step"
    assert jls.health(made(steps=1), carried=most).verdict == "poisoned"


@pytest.mark.parametrize(("name", "is_mask"), [("mask", True), ("unmask", False)])
def test_an_average_of_a_mask_has_its_whole_name(name, is_mask):
    state = made()._replace(inner_state={"mu": {name: MASK}})
    health = jls.health(state, {"mask": MASK, "unmask": jnp.ones(2)})
    assert health.verdict == ("ok" if is_mask else "poisoned")
    bad = [] if is_mask else ["mu/unmask"]
    assert health.numbers["poisoned_leaves"]["opt_state"] == bad


def test_a_complex_leaf_is_no_mask():
    leaf = {"z": jnp.array([1.0 + 0j, complex(-math.inf, 0)])}
    assert jls.health(made(), carried=leaf).verdict == "poisoned"
