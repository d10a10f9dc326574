"""Checkpoints of an older jls become states of this one; all others are an error."""

import pickle
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from shared import assert_close, assert_identical
from test_scaler_laws import SCALERS

import jls
from jls._upgrade import ADDED

pytestmark = pytest.mark.standard_promotion

FOLDER = Path(__file__).parent / "checkpoints"
sys.path.append(str(FOLDER))
import make  # noqa: E402, how the files were made

OLD = "dynamic", "adaptive"
NEW_FIELDS = ADDED[jls.LossScaledState]


def read(name, form, tmp_path):
    """What a library restores without a target."""
    if form == "msgpack":
        data = (FOLDER / "before_0.1.0" / f"{name}.msgpack").read_bytes()
        return serialization.msgpack_restore(data)
    with zipfile.ZipFile(FOLDER / "before_0.1.0" / f"{name}.orbax.zip") as file:
        file.extractall(tmp_path / name)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(tmp_path / name).item_metadata.tree
        as_numpy = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
        )
        return checkpointer.restore(tmp_path / name, restore_args=as_numpy)


def restored(folder, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, *target)


def saved(state, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", state)
        checkpointer.wait_until_finished()
    return folder / "saved"


# Files of an older version.


@pytest.mark.parametrize("form", ["msgpack", "orbax"])
@pytest.mark.parametrize("name", OLD)
def test_checkpoint_of_an_older_jls_goes_on(name, form, tmp_path):
    raw = read(name, form, tmp_path)
    assert not set(NEW_FIELDS) & set(raw["opt_state"])
    target = make.fresh(name)
    state = jls.upgrade_state(target, raw)
    assert jax.tree.structure(state) == jax.tree.structure(target)
    opt_state = state.opt_state
    # Bit for bit what is in the file; the new fields as at the start.
    for field in NEW_FIELDS:
        assert_identical(getattr(opt_state, field), getattr(target.opt_state, field))
    again = serialization.to_state_dict(state)
    for field in NEW_FIELDS:
        del again["opt_state"][field]
    in_file = serialization.to_state_dict(raw)
    assert_identical(jax.tree.leaves(again), jax.tree.leaves(in_file))
    assert (opt_state.steps, opt_state.skips) == (7, 2)
    # It goes on as the same run in this version does.
    reference = make.trained(name)
    for grad in (1.0, jnp.inf, 2.0):
        state = make.step(state, jnp.float32(grad))
        reference = make.step(reference, jnp.float32(grad))
    assert_close(state.params, reference.params, rtol=1e-5)
    assert_close(jls.eval_params(state), jls.eval_params(reference), rtol=1e-5)
    assert_identical(jls.loss_scale(state), jls.loss_scale(reference))
    assert jls.metrics(state)["skips"] == 3
    assert jls.metrics(state)["skip_reason"] == 1


def test_without_the_upgrade_an_older_checkpoint_is_an_error(tmp_path):
    state = make.trained("dynamic")
    before = jax.tree.map(np.array, state)
    with pytest.raises(ValueError, match="nonfinite_updates"):
        serialization.from_bytes(
            state, (FOLDER / "before_0.1.0" / "dynamic.msgpack").read_bytes()
        )
    read("dynamic", "orbax", tmp_path)
    with pytest.raises(ValueError, match="nonfinite_updates"):
        restored(tmp_path / "dynamic", state)
    assert_identical(state, before)


def test_fixtures_are_small():
    files = [f for f in FOLDER.rglob("*") if f.suffix in (".msgpack", ".zip")]
    assert len(files) == 16
    assert all(file.stat().st_size < 20_000 for file in files)


def test_fields_of_states_are_only_ever_appended():
    """As in 0.1.0, then those of ADDED in order: see the rule in jls/_upgrade.py."""
    first = {
        jls.LossScaleState: "loss_scale finite_count nonfinite_count",
        jls.LossScaledState: "inner_state scaler_state applied steps skips "
        "consecutive_skips nonfinite_losses",
        jls.AdaptiveState: "loss_scale finite_count nonfinite_count growth_count "
        "interval_index",
        jls.LogMaxState: "loss_scale finite_count window_count ceiling "
        "previous_ceiling overflow_ceiling",
        jls.ParamsEmaState: "count weight ema",
    }
    assert set(ADDED) <= set(first)
    for state_type, names in first.items():
        assert state_type._fields == (*names.split(), *ADDED.get(state_type, ()))
    types = {
        value
        for name, value in vars(jls).items()
        if name.endswith("State") and isinstance(value, type)
    }
    assert types == set(first)


# States of this version, in all forms in which a library gives them.


def forms(state, folder):
    yield serialization.msgpack_restore(serialization.to_bytes(state))
    yield serialization.to_state_dict(state)
    yield restored(saved(state, folder))
    yield jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("name", SCALERS)
def test_every_policy_is_restored_from_a_state_dict(name):
    optimizer = jls.loss_scaled(optax.adamw(0.1), SCALERS[name]())
    params = {"w": jnp.ones(2)}
    _, state = optimizer.update(
        {"w": jnp.array([1.0, 2.0])}, optimizer.init(params), params
    )
    raw = serialization.msgpack_restore(serialization.to_bytes(state))
    assert_identical(jls.upgrade_state(optimizer.init(params), raw), state)
    scaler_state = serialization.to_state_dict(state.scaler_state)
    fresh_scaler = SCALERS[name]().init()
    assert_identical(jls.upgrade_state(fresh_scaler, scaler_state), state.scaler_state)


def test_every_kind_of_node_and_leaf_is_restored(tmp_path):
    params = {
        "list": [jnp.ones(2, jnp.bfloat16), jnp.full((1, 2), 2.0, jnp.float16)],
        "tuple": (jnp.arange(3), None, ()),
        "deep": {"a": {"": jnp.ones((), jnp.complex64)}, "b": {3: jnp.ones(1)}},
    }
    inner = optax.chain(optax.adamw(0.1), optax.masked(optax.sgd(0.1), lambda p: False))
    optimizer = jls.loss_scaled(optax.chain(inner, jls.params_ema(0.5)))
    with pytest.warns(UserWarning, match="float16"):
        target = optimizer.init(params)
    state = jax.tree.map(lambda leaf: leaf + 1 if leaf.dtype != bool else ~leaf, target)
    for form in forms(state, tmp_path):
        assert_identical(jls.upgrade_state(target, form), state)


def test_train_state_is_restored_with_its_step(tmp_path):
    target = make.fresh("dynamic")
    state = target
    for _ in range(2):
        state = make.step(state, jnp.float32(1.0))
        raws = list(forms(state, tmp_path / str(int(state.step))))[:3]
        for form in [*raws, state]:
            new = jls.upgrade_state(target, form)
            assert_identical(new, state)
            assert new.tx is target.tx
    for form in [*list(forms(target, tmp_path))[:3], target]:
        new = jls.upgrade_state(state, form)  # a Python number into an array
        assert_identical(new.step, jnp.int32(0))
        assert jls.upgrade_state(target, form).step == 0


def test_state_of_nnx_as_it_is_in_memory_is_restored():
    tx = jls.loss_scaled(optax.adam(0.1), jls.dynamic(8.0))
    optimizer = nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    optimizer.opt_state = jls.set_loss_scale(optimizer.opt_state, 32.0)
    target = nnx.clone(optimizer).opt_state
    target = jls.set_loss_scale(target, 4.0)
    for saved in (optimizer.opt_state, nnx.state(optimizer)["opt_state"]):
        new = jls.upgrade_state(target, saved)
        assert jls.loss_scale(new) == 32.0
        assert jax.tree.structure(new) == jax.tree.structure(target)
    with pytest.raises(
        ValueError, match=r"has opt_state, .*pass the opt_state of saved"
    ):
        jls.upgrade_state(target, optimizer)


def test_keys_of_random_numbers_are_restored(tmp_path):
    inner = optax.GradientTransformation(
        lambda p: {"key": jax.random.key(3)}, lambda u, s, p=None: (u, s)
    )
    optimizer = jls.loss_scaled(inner)
    state = optimizer.init(jnp.ones(2))
    state = state._replace(inner_state={"key": jax.random.key(7)})
    target = optimizer.init(jnp.ones(2))
    new = jls.upgrade_state(target, restored(saved(state, tmp_path)))
    assert new.inner_state["key"] == jax.random.key(7)


def test_nnx_optimizer_is_restored(tmp_path):
    def start():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        tx = jls.loss_scaled(optax.adam(0.1), jls.dynamic(8.0, growth_interval=3))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def update(model, optimizer, factor):
        grads = jax.tree.map(lambda p: p * factor, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)

    model, optimizer = start()
    update(model, optimizer, 1.0)
    update(model, optimizer, jnp.inf)
    pure = nnx.to_pure_dict(nnx.state(optimizer))
    raws = [
        restored(saved(nnx.state(optimizer), tmp_path)),
        serialization.msgpack_restore(
            serialization.msgpack_serialize(serialization.to_state_dict(pure))
        ),
    ]
    for raw in raws:
        for field in NEW_FIELDS:
            del raw["opt_state"][field]
        other, again = start()
        nnx.update(other, nnx.state(model))
        again.opt_state = jls.upgrade_state(again.opt_state, raw["opt_state"])
        assert jls.metrics(again)["skips"] == 1
        assert jls.metrics(again)["skip_reason"] == 0
        fork = nnx.clone(model), nnx.clone(optimizer)
        update(*fork, 1.0)
        update(other, again, 1.0)
        assert_identical(nnx.state(other), nnx.state(fork[0]))
        assert_identical(
            nnx.state(again.opt_state.inner_state),
            nnx.state(fork[1].opt_state.inner_state),
        )


def test_result_shares_no_buffer_and_can_be_donated():
    optimizer = jls.loss_scaled(optax.adam(0.1), jls.dynamic(8.0))
    params = jnp.ones((64, 64))
    target, state = optimizer.init(params), optimizer.init(params)
    raw = serialization.to_state_dict(jax.tree.map(np.asarray, state))
    for field in NEW_FIELDS:
        del raw[field]
    on_device = jax.tree.map(jnp.asarray, raw)
    for form in (raw, on_device):
        new = jls.upgrade_state(target, form)
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)]
        foreign = [
            x.unsafe_buffer_pointer() for x in jax.tree.leaves((target, on_device))
        ]
        foreign += [x.__array_interface__["data"][0] for x in jax.tree.leaves(raw)]
        assert len(set(pointers)) == len(pointers)
        assert not set(pointers) & set(foreign)
        jax.jit(optimizer.update, donate_argnums=1)(params, new, params)
    assert_identical(target, optimizer.init(params))
    assert all(not leaf.weak_type for leaf in jax.tree.leaves(target))


# What does not fit.


def raw_of(optimizer, params):
    return serialization.msgpack_restore(serialization.to_bytes(optimizer.init(params)))


def without(raw, *names):
    return {name: part for name, part in raw.items() if name not in names}


SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {"w": jnp.ones(2), "b": jnp.ones(1)}
WRAPPED = jls.loss_scaled(SGD, jls.dynamic(8.0))
RAW = raw_of(WRAPPED, PARAMS)
OTHER = r"Make target with the optimizer and the parameters that were saved\."


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        pytest.param(
            RAW | {"mood": np.float32(1.0)},
            r"at the root, in LossScaledState, it also has mood\. A newer jls",
            id="newer",
        ),
        pytest.param(
            without(RAW, "skips", "skip_reason"),
            r"in LossScaledState, it lacks skips\.",
            id="a field of the first version",
        ),
        pytest.param(
            raw_of(SGD, PARAMS),
            r"lacks inner_state, scaler_state, applied, .*also has 0\. .*wrap_state",
            id="saved without jls",
        ),
        pytest.param(
            raw_of(jls.loss_scaled(SGD, jls.adaptive()), PARAMS),
            r"at 'scaler_state', in LossScaleState, it also has growth_count, "
            r"interval_index\. It is the state of another policy",
            id="another policy",
        ),
        pytest.param(
            raw_of(jls.loss_scaled(SGD, jls.log_max()), PARAMS),
            r"lacks nonfinite_count and also has .*ceiling.* another policy",
            id="log_max",
        ),
        pytest.param(
            raw_of(jls.loss_scaled(optax.adam(0.1)), PARAMS),
            r"at 'inner_state/0', in TraceState, it lacks trace and also has count, "
            rf"mu, nu\. {OTHER}",
            id="another optimizer",
        ),
        pytest.param(
            raw_of(WRAPPED, PARAMS | {"c": jnp.ones(2)}),
            rf"'inner_state/0/trace', in dict, it also has c\. {OTHER}",
            id="another parameter",
        ),
        pytest.param(
            raw_of(WRAPPED, {"w": jnp.ones(3), "b": jnp.ones(1)}),
            r"float32 of shape \(2,\) at 'inner_state/0/trace/w', as target has, got "
            r"float32 of shape \(3,\)",
            id="another shape",
        ),
        pytest.param(
            RAW | {"steps": np.float32(1.0)},
            r"int32 of shape \(\) at 'steps', as target has, got float32 of shape \(\)",
            id="another dtype",
        ),
        pytest.param(RAW | {"steps": None}, "at 'steps', .* got None", id="None"),
        pytest.param(RAW | {"steps": "7"}, "at 'steps', .* got a str", id="text"),
        pytest.param(
            RAW | {"nonfinite_leaves": np.zeros(3, bool)},
            r"bool of shape \(2,\) at 'nonfinite_leaves'",
            id="another number of leaves",
        ),
        pytest.param(
            RAW | {"scaler_state": np.float32(8.0)},
            r"saved must have LossScaleState\(.*\) at 'scaler_state', .* got float32",
            id="a scale alone",
        ),
        pytest.param(
            np.ones(2), r"at the root, as target has, got float64", id="array"
        ),
        pytest.param(b"bytes", "at the root, as target has, got a bytes", id="bytes"),
        pytest.param(
            object(),
            r"saved must have LossScaledState\(.* at the root, .* got a object\. Pass "
            r"nested dicts, .* flax\.serialization\.to_state_dict\(object\)",
            id="object",
        ),
        pytest.param(
            RAW | {"scaler_state": object()},
            "at 'scaler_state', .* got a object. Pass nested dicts",
            id="object within",
        ),
        pytest.param({}, r"lacks inner_state, .* jls\.wrap_state", id="nothing"),
    ],
)
def test_upgrade_names_what_does_not_fit_and_changes_nothing(saved, message):
    target = WRAPPED.init(PARAMS)
    before = jax.tree.map(np.array, target)
    with pytest.raises(ValueError, match=message):
        jls.upgrade_state(target, saved)
    with pytest.raises(ValueError, match="target"):
        jls.upgrade_state((target, 0), [saved, 0])
    assert_identical(target, before)


def test_a_policy_with_the_fields_of_another_is_told_apart():
    """Those of `dynamic` are the first of `adaptive`: no reason to fill in the rest."""
    target = jls.loss_scaled(SGD, jls.adaptive()).init(PARAMS)
    with pytest.raises(ValueError, match="lacks growth_count, interval_index"):
        jls.upgrade_state(target, RAW)


def test_bare_target_for_a_wrapped_checkpoint_says_unwrap():
    with pytest.raises(ValueError, match=r"saved with jls: .* jls\.unwrap_state"):
        jls.upgrade_state(SGD.init(PARAMS), RAW)


def test_target_of_shapes_is_an_error():
    target = jax.eval_shape(WRAPPED.init, PARAMS)
    with pytest.raises(TypeError, match="ShapeDtypeStruct at 'inner_state/0/trace/b'"):
        jls.upgrade_state(target, RAW)


def test_pickle_of_an_older_version_is_an_error():
    """Why the documentation says that a pickle is for one version."""

    class Older:  # pickled as a NamedTuple is: its type, and its fields
        def __reduce__(self):
            return jls.LossScaledState, tuple(WRAPPED.init(PARAMS)[: -len(NEW_FIELDS)])

    data = pickle.dumps(Older())
    with pytest.raises(TypeError, match="nonfinite_updates"):
        pickle.loads(data)


def test_a_fixed_scale_of_an_older_version_gets_its_mark():
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    target = optimizer.init({"w": jnp.ones(2)})
    saved = serialization.to_state_dict(target)
    saved["scaler_state"]["finite_count"] = np.int32(0)
    upgraded = jls.upgrade_state(target, saved)
    assert_identical(upgraded, target)
