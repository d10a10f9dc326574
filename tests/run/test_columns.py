"""What a step logs: metrics on the host, of a state and of a report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jls

pytestmark = pytest.mark.standard_promotion

PARAMS = {"layer": {"w": jnp.ones(2)}}
GOOD, BAD = jnp.array([3.0, 4.0]), jnp.array([jnp.nan, 1.0])


def halving(count):
    return 0.5**count


OPTIMIZER = jls.loss_scaled(optax.sgd(halving), jls.dynamic(8.0), spikes=jls.spikes())


def loss_fn(params, batch):
    aux = {
        "accuracy": jnp.float32(0.5),
        "parts": (jnp.int32(3), jnp.log(batch[0] - 3.0)),
        "logits": batch,
        "phase": jnp.complex64(1j),
        "key": jax.random.key(0),
    }
    return jnp.sum(params["layer"]["w"] * batch), aux


def one_step(batch, **options):
    step = jax.jit(
        jls.train_step(
            loss_fn, OPTIMIZER, has_aux=True, learning_rate=halving, **options
        )
    )
    return step(PARAMS, OPTIMIZER.init(PARAMS), batch)[2]


def strict(numbers):
    """What a strict reader makes of it; it knows neither inf nor NaN."""
    return json.loads(json.dumps(numbers, allow_nan=False))


@pytest.mark.parametrize(
    "make",
    [
        lambda: jls.dynamic().init(),
        lambda: jls.loss_scaled(optax.sgd(0.1)).init(PARAMS),
        lambda: OPTIMIZER.init(PARAMS),  # limits of inf
        lambda: OPTIMIZER.update(PARAMS, OPTIMIZER.init(PARAMS), value=1.0)[1],
        lambda: jls.skip_nonfinite(
            optax.sgd(0.1), spikes=jls.presets.olmo_spikes()
        ).init(PARAMS),
        lambda: jls.types.StaticState(jnp.float32(jnp.inf)),
    ],
    ids=["scaler", "wrapper", "spikes", "one step", "another policy", "scale of inf"],
)
def test_the_metrics_of_every_state_are_strict_json(make):
    state = make()
    numbers = jls.metrics(state, host=True)
    exact = jax.device_get(jls.metrics(state))
    assert list(numbers) == list(jls.metrics(state))
    assert strict(numbers) == {
        name: value.item() if np.isfinite(value) else None
        for name, value in exact.items()
    }


def test_a_limit_of_nothing_is_none():
    numbers = jls.metrics(OPTIMIZER.init(PARAMS), host=True)
    assert (numbers["limit_loss"], numbers["judged_loss"]) == (None, 0.0)


def test_a_report_comes_whole():
    numbers = jls.metrics(one_step(GOOD, local_norm=True), host=True)
    assert strict(numbers) == numbers
    assert numbers == {
        "loss": 7.0,
        "skipped": False,
        "loss_scale": 8.0,
        "learning_rate": 1.0,
        "global_norm": 5.0,
        "local_norm/layer/w": 5.0,
        "size/layer/w": 2,
        "dropped": 0,
        "aux/accuracy": 0.5,
        "aux/parts/0": 3,
        "aux/parts/1": None,  # log(0)
        "skip_reason": 0,
        "limit_loss": None,  # inf
        "limit_norm": None,
    }
    assert type(numbers["skipped"]) is bool


def test_a_report_of_a_bad_step_is_strict_json_too():
    numbers = jls.metrics(one_step(BAD), host=True)
    assert strict(numbers) == numbers
    assert numbers["skipped"] is True
    assert numbers["skip_reason"] == jls.types.SkipReason.LOSS
    assert numbers["loss"] is numbers["global_norm"] is numbers["limit_loss"] is None
    assert not {"local_norm", "size", "update_norm"} & numbers.keys()


def test_a_report_has_each_field_once_in_its_order():
    report = one_step(GOOD)._replace(learning_rate={"a": 0.5, "b": 0.25})
    names = [name.split("/")[0] for name in jls.metrics(report, host=True)]
    fields = jls.types.StepReport._fields
    assert list(dict.fromkeys(names)) == [x for x in fields if x in names]
    assert names.count("learning_rate") == 2
    assert "scale_moves" not in names


def test_a_report_is_one_transfer(monkeypatch):
    report, transfers, device_get = one_step(GOOD), [], jax.device_get
    monkeypatch.setattr(
        jax, "device_get", lambda x: transfers.append(x) or device_get(x)
    )
    jls.metrics(report, host=True)
    assert len(transfers) == 1


def test_a_stacked_report_names_what_takes_it():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), one_step(GOOD))
    with pytest.raises(ValueError, match=r"one step, got .*shape \(2,\).*History"):
        jls.metrics(stacked, host=True)
    last = jls.metrics(jax.tree.map(lambda x: x[-1], stacked), host=True)
    assert last["loss"] == 7.0


def test_a_traced_report_is_an_error():
    with pytest.raises(
        TypeError, match=r"report must be concrete.*on what the step returned"
    ):
        jax.jit(lambda report: jls.metrics(report, host=True) and 0)(one_step(GOOD))
