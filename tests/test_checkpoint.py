"""States that are wrapped, unwrapped and upgraded.

jls comes into a running job and goes out of it, and the optimizer does not notice;
checkpoints of an older jls become states of this one, and all others are an error.
"""

import functools
import pickle
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from shared import assert_close, assert_identical, bad_leaves, bits, run
from test_scaler_laws import SCALERS

import jls
from jls._nnx import read_variables
from jls._state import find, is_wrapper_state
from jls._types import FIELDS

pytestmark = pytest.mark.standard_promotion

GRADS = [{"w": jnp.array([1.0, -2.0]), "b": jnp.float32(x)} for x in (1.0, 2.0, 3.0)]
BAD = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.float32(1.0)}


def make_params():
    return {"w": jnp.array([0.5, -1.5]), "b": jnp.float32(2.0)}


@functools.cache
def make_inner():
    accumulated = optax.MultiSteps(optax.adamw(0.1), 2).gradient_transformation()
    return optax.chain(optax.clip_by_global_norm(1.0), accumulated)


@functools.cache
def make():
    return jls.loss_scaled(make_inner(), jls.dynamic(8.0, growth_interval=2))


def step(optimizer, params, state, grads):
    updates, state = jitted(optimizer.update)(grads, state, params)
    return optax.apply_updates(params, updates), state


jitted = functools.cache(jax.jit)


def pointers(*trees):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]


def test_wrapped_state_goes_on_where_the_bare_one_was():
    params, bare = run(make_inner(), make_params(), GRADS)
    state = jls.wrap_state(make(), bare, params)
    chex.assert_trees_all_equal_structs(state, make().init(params))
    assert_identical(state.inner_state, bare)
    assert_identical(
        state._replace(inner_state=()),
        make().init(())._replace(inner_state=(), nonfinite_leaves=jnp.zeros(2, bool)),
    )
    skipped, after_skip = step(make(), params, state, BAD)
    assert_identical(skipped, params)
    for grads in GRADS:
        expected, bare = step(make_inner(), params, bare, grads)
        params, after_skip = step(make(), params, after_skip, grads)
        # To a rounding: the two are programs of their own.
        assert_close((params, after_skip.inner_state), (expected, bare))
    assert (after_skip.steps, after_skip.skips) == (4, 1)


def test_wrapped_state_is_that_of_init_for_the_compiler():
    params, bare = run(make_inner(), make_params(), GRADS)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def traced(grads, state, params):
        return make().update(grads, state, params)

    traced(BAD, make().init(params), params)
    _, state = traced(BAD, jls.wrap_state(make(), bare, params), params)
    traced(BAD, state, params)


def test_wrapped_state_shares_no_buffer_with_what_it_was_given():
    def init(params):  # as optax.contrib.schedule_free does: the state is the params
        return params, jnp.zeros(())

    inner = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    params = make_params()
    bare = inner.init(params)
    state = jls.wrap_state(jls.loss_scaled(inner), bare, params)
    assert len(set(pointers(state))) == len(pointers(state))
    assert not set(pointers(state)) & set(pointers(params, bare))
    twice = jnp.ones(2), jnp.ones(())
    shared = jax.tree.map(lambda x: x, (params | {"w": twice[0]}, params["b"]))
    state = jls.wrap_state(jls.loss_scaled(inner), shared, params)
    assert len(set(pointers(state))) == len(pointers(state))
    jax.tree.map(lambda leaf: leaf.delete(), state)
    assert_identical(shared[0]["w"], twice[0])


def test_wrap_takes_what_numpy_and_flax_restore():
    params, bare = run(make_inner(), make_params(), GRADS)
    data = serialization.to_bytes(bare)
    restored = serialization.from_bytes(make_inner().init(params), data)
    for given in (restored, jax.tree.map(np.asarray, bare)):
        state = jls.wrap_state(make(), given, params)
        assert_identical(state.inner_state, bare)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    raw = serialization.msgpack_restore(data)
    given = jls.upgrade_state(make_inner().init(params), raw)
    assert_identical(jls.wrap_state(make(), given, params).inner_state, bare)


@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
def test_wrap_works_for_skip_nonfinite_and_every_kind_of_leaf():
    def init(params):
        return {"key": jax.random.key(3), "none": None, "n": jnp.int32(4), "p": params}

    inner = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    optimizer = jls.skip_nonfinite(inner)
    params = {"": jnp.ones(2, jnp.bfloat16), "c": {"": jnp.ones(1, jnp.complex64)}}
    state = jls.wrap_state(optimizer, inner.init(params), params)
    assert jls.loss_scale(state) == 1.0
    assert state.inner_state["key"] == jax.random.key(3)
    assert state.inner_state["none"] is None
    assert_identical(state.inner_state["p"], params)


def test_wrap_and_unwrap_work_traced(jit_or_eager):
    """As a target for Orbax: jax.eval_shape of it."""
    params, bare = run(make_inner(), make_params(), GRADS)
    wrap = jit_or_eager(lambda bare, params: jls.wrap_state(make(), bare, params))
    assert_identical(wrap(bare, params), jls.wrap_state(make(), bare, params))
    unwrap = jit_or_eager(jls.unwrap_state)
    assert_identical(unwrap(jls.wrap_state(make(), bare, params)), bare)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            optax.sgd(0.1).init,
            r"'1' is an EmptyState in inner_state, a MultiStepsState in its state\.",
        ),
        (
            lambda p: make_inner().init({"w": p["w"]}),
            r"'1/inner_opt_state/0/mu/b' is only in its state\. Wrap",
        ),
        (lambda p: make().init(p), r"wrapped already\. Go on from it as it is; of an "),
        (
            lambda p: serialization.to_state_dict(make_inner().init(p)),
            r"inner_state is a dict, its state a tuple\. .*questions/checkpoints\.md",
        ),
        (
            lambda p: make_inner().init(p | {"w": jnp.ones(3)}),
            r"'1/inner_opt_state/0/mu/w' is float32\[3\] in inner_state, float32\[2\]",
        ),
        (
            lambda p: make_inner().init(p | {"b": jnp.bfloat16(1.0)}),
            r"'1/inner_opt_state/0/mu/b' is bfloat16\[\] in inner_state, float32\[\]",
        ),
        (lambda p: None, "inner_state is None, its state a tuple"),
        (lambda p: 3.0, r"inner_state is float 3\.0, its state a tuple"),
    ],
)
def test_wrap_names_the_first_difference(given, message):
    params = make_params()
    with pytest.raises(ValueError, match=message):
        jls.wrap_state(make(), given(params), params)


def test_wrap_names_the_wrong_optimizer():
    params = make_params()
    chained = optax.chain(make(), optax.scale(1.0))
    for optimizer in (make_inner(), chained):
        with pytest.raises(TypeError, match=r"optimizer must be made by jls\.loss_"):
            jls.wrap_state(optimizer, make_inner().init(params), params)


def test_unwrapped_state_goes_on_where_the_wrapped_one_was():
    params, state = run(make(), make_params(), [*GRADS, BAD])
    bare = jls.unwrap_state(state)
    chex.assert_trees_all_equal_structs(bare, make_inner().init(params))
    for grads in GRADS:
        expected, state = step(make(), params, state, grads)
        params, bare = step(make_inner(), params, bare, grads)
        assert_close((params, bare), (expected, state.inner_state))


def test_unwrap_reaches_every_wrapper_however_nested():
    params = make_params()
    labels = {"w": "a", "b": "b"}

    def nested(wrap):
        parts = {"a": wrap(optax.adam(0.1)), "b": wrap(optax.sgd(0.1, momentum=0.5))}
        return optax.chain(optax.clip(1.0), optax.multi_transform(parts, labels))

    state = nested(jls.loss_scaled).init(params)
    assert_identical(jls.unwrap_state(state), nested(lambda inner: inner).init(params))


def test_unwrap_names_what_has_no_wrapper():
    for state in (optax.adam(0.1).init(jnp.ones(2)), jls.dynamic().init(), None):
        with pytest.raises(ValueError, match=r"must carry a state of jls\.loss"):
            jls.unwrap_state(state)


def test_train_state_gets_the_wrapper_and_loses_it():
    def fresh(tx):
        return TrainState.create(apply_fn=None, params=make_params(), tx=tx)

    bare, optimizer = make_inner(), make()
    state = fresh(bare).apply_gradients(grads=GRADS[0])
    reference = state
    state = state.replace(
        tx=optimizer,
        opt_state=jls.wrap_state(optimizer, state.opt_state, state.params),
    )
    state = state.apply_gradients(grads=BAD).apply_gradients(grads=GRADS[1])
    assert jls.metrics(state)["skips"] == 1
    state = jls.unwrap_state(state).replace(tx=bare)
    state = state.apply_gradients(grads=GRADS[2])
    for grads in GRADS[1:]:
        reference = reference.apply_gradients(grads=grads)
    assert_identical(
        (state.params, state.opt_state), (reference.params, reference.opt_state)
    )
    assert (state.step, reference.step) == (4, 3)


def test_nnx_optimizer_gets_the_wrapper_and_loses_it():
    def fresh(tx):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def update(model, optimizer, factor):
        grads = jax.tree.map(lambda p: p * factor, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)

    model, old = fresh(optax.adam(0.1))
    reference, plain = fresh(optax.adam(0.1))
    update(model, old, 1.0)
    new = nnx.Optimizer(model, jls.loss_scaled(optax.adam(0.1)), wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    with pytest.raises(ValueError, match=r"questions/checkpoints\.md"):
        jls.wrap_state(jls.loss_scaled(optax.adam(0.1)), old.opt_state, params)
    new.opt_state = new.opt_state._replace(inner_state=old.opt_state)
    update(model, new, jnp.nan)
    update(model, new, 1.0)
    assert jls.metrics(new)["skips"] == 1
    old = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    old.opt_state = jls.unwrap_state(new.opt_state)
    update(model, old, 1.0)
    for _ in range(3):
        update(reference, plain, 1.0)
    assert_identical(nnx.state(model), nnx.state(reference))
    assert_identical(nnx.state(old.opt_state), nnx.state(plain.opt_state))


# Checkpoints of an older jls ----------------------------------------------------------


FOLDER = Path(__file__).parent / "checkpoints"
sys.path.append(str(FOLDER))
import make as checkpoints  # noqa: E402, how the files were made

# Those of a spike policy are nothing without one.
NEW_FIELDS = [
    name for name, field in FIELDS.items() if field.since and not field.is_of_policy
]


def read(name, form, tmp_path, version):
    """What a library restores without a target."""
    if form == "msgpack":
        data = (FOLDER / version / f"{name}.msgpack").read_bytes()
        return serialization.msgpack_restore(data)
    with zipfile.ZipFile(FOLDER / version / f"{name}.orbax.zip") as file:
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


def raw_of(optimizer, params):
    return serialization.msgpack_restore(serialization.to_bytes(optimizer.init(params)))


def without(raw, *names):
    return {name: part for name, part in raw.items() if name not in names}


SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {"w": jnp.ones(2), "b": jnp.ones(1)}
WRAPPED = jls.loss_scaled(SGD, jls.dynamic(8.0))
RAW = raw_of(WRAPPED, PARAMS)
ADAPTIVE = jls.presets.mindformers_adaptive(4.0, 2, 20)
OTHER = r"Make target with the optimizer and the parameters that were saved\."


# Files of older versions.


def by_path(tree):
    """The leaves as dicts of Flax have them, by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(serialization.to_state_dict(tree))
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in flat}


SAVED = [(path.parent.name, path.stem) for path in sorted(FOLDER.glob("*/*.msgpack"))]


def test_there_is_a_checkpoint_of_each_scaler_policy_and_place():
    assert {version for version, _ in SAVED} == {"0.4.0"}
    assert {name for _, name in SAVED} == set(checkpoints.optimizers())
    assert set(jls.presets.__all__) <= set(checkpoints.optimizers())


# Those whose states have the fields of another one's.
ALIKE = {"torch", "paddle", "paddle_doc", "keras", "flax", "mindspore", "megatron"}
ALIKE |= {"cumulative", "levanter_spikes", "maxtext_spikes", "olmo_spikes"}


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("version", "name"),
    [
        pytest.param(*saved, marks=pytest.mark.more if saved[1] in ALIKE else ())
        for saved in SAVED
    ],
)
def test_checkpoint_of_an_older_version_goes_on(version, name, tmp_path):
    target, trained = checkpoints.fresh(name), checkpoints.trained(name)
    raw = read(name, "msgpack", tmp_path, version)
    raws = [raw]
    if (FOLDER / version / f"{name}.orbax.zip").exists():
        raws.append(read(name, "orbax", tmp_path, version))
    for form in raws:
        state = jls.upgrade_state(target, form)
        chex.assert_trees_all_equal_structs(state, target)
        # Bit for bit what is in the file; what was added since is as at the start.
        values, saved = by_path(state), by_path(raw)
        start = by_path(target)
        for path in values.keys() - saved.keys():
            assert FIELDS[path.rpartition("/")[2]].since > version
            assert_identical(values[path], start[path])
            del values[path]
        assert_identical(values, saved)
        # It goes on as the same run in this version does.
        reference = trained
        for grad in (1.0, jnp.inf, 2.0):
            state = checkpoints.step(state, jnp.float32(grad))
            reference = checkpoints.step(reference, jnp.float32(grad))
        chex.assert_trees_all_close(state.params, reference.params, rtol=1e-5)
        ours, theirs = (
            [jls.metrics(node) for _, node in find(x.opt_state, is_wrapper_state)]
            for x in (state, reference)
        )
        chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize(
    ("saved", "target", "scale"),
    [
        (jls.static(64.0), jls.static(8.0), 64.0),  # set by hand, or by the code then
        (jls.static(64.0), jls.dynamic(8.0), 8.0),
        (jls.static(64.0), ADAPTIVE, 4.0),
        (jls.dynamic(2.0**16), jls.static(8.0), 8.0),
        (jls.dynamic(2.0**16), jls.dynamic(8.0), 2.0**16),
    ],
)
@pytest.mark.parametrize("form", ["state dict", "object"])
def test_static_and_moving_scales_never_take_each_others(saved, target, scale, form):
    raw = jls.loss_scaled(SGD, saved).init(PARAMS)._replace(steps=jnp.int32(7))
    if form == "state dict":
        raw = serialization.to_state_dict(raw)
    new = jls.loss_scaled(SGD, target).init(PARAMS)
    state = jls.upgrade_state(new, raw)
    assert jls.loss_scale(state) == scale
    assert state.steps == 7
    chex.assert_trees_all_equal_structs(state, new)
    if scale == target.init().loss_scale:
        assert_identical(state.scaler_state, new.scaler_state)
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state, new))]
        assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("boxed", [True, False], ids=["orbax", "raw"])
@pytest.mark.parametrize(
    ("saved", "target", "expected"),
    [
        ((8.0,), jls.static(1.0), (8.0,)),
        ((8.0,), jls.dynamic(4.0), (4.0, 0, 0)),
        ((8.0, 5, 1), jls.dynamic(4.0), (8.0, 5, 1)),
        ((8.0, 5, 1), jls.static(4.0), (4.0,)),
        ((8.0, 5, 1, 2, 3), ADAPTIVE, (8.0, 5, 1, 2, 3)),
    ],
)
def test_scaler_state_of_an_nnx_optimizer_is_restored(saved, target, expected, boxed):
    """Orbax writes {"value": x} for each variable of NNX."""
    names = "loss_scale", "finite_count", "nonfinite_count", "growth_count"
    raw = dict(zip((*names, "rung"), saved, strict=False))
    raw = {
        name: np.asarray(x, np.float32 if name == "loss_scale" else np.int32)
        for name, x in raw.items()
    }
    if boxed:
        raw = {name: {"value": x} for name, x in raw.items()}
    tx = jls.loss_scaled(optax.adam(0.1), target)
    optimizer = nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    state = jls.upgrade_state(optimizer.opt_state.scaler_state, raw)
    values = tuple(leaf.get_value().item() for leaf in state)
    assert values == expected
    assert type(state) is type(target.init())


@pytest.mark.parametrize(
    ("target", "scales", "counts"),
    [
        (jls.static(1024.0), [2.0, 4.0, 8.0], None),
        (jls.dynamic(512.0), [512.0] * 3, [0, 0, 0]),
    ],
)
def test_static_states_of_an_ensemble(target, scales, counts):
    """`jax.vmap` over seeds stacks them."""
    optimizer = jls.loss_scaled(SGD, target)
    new = jax.vmap(lambda i: optimizer.init({"w": jnp.ones(2) * i}))(jnp.arange(3.0))
    raw = serialization.to_state_dict(new)
    raw["scaler_state"] = {"loss_scale": np.array([2.0, 4.0, 8.0], np.float32)}
    state = jls.upgrade_state(new, raw).scaler_state
    assert state.loss_scale.tolist() == scales
    if counts:
        assert state.finite_count.tolist() == counts


SPIKY = jls.skip_nonfinite(SGD, spikes=jls.spikes(window=4))


def spiky(params):
    """A state after a spike, with a number of its own in each field of a signal."""
    state = SPIKY.init(params)
    for size in (1.0, 2.0, 3.0, 99.0):
        grads = jax.tree.map(lambda p, size=size: jnp.ones_like(p) * size, params)
        _, state = SPIKY.update(grads, state, params, value=jnp.float32(size / 2))
    return state


@pytest.mark.parametrize("boxed", [True, False], ids=["orbax", "raw"])
def test_spikes_of_an_nnx_optimizer_are_restored(boxed):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, SPIKY, wrt=nnx.Param)
    state = spiky(read_variables(nnx.state(model, nnx.Param)))
    raw = jax.tree.map(np.asarray, serialization.to_state_dict(state))
    box = (lambda x: {"value": x}) if boxed else (lambda x: x)
    upgraded = jls.upgrade_state(optimizer.opt_state, jax.tree.map(box, raw))
    read = jax.tree.leaves(read_variables(upgraded))
    assert sorted(bits(read)) == sorted(bits(state))
    assert upgraded.last_skip_reason.get_value() == jls.types.SkipReason.SPIKE
    assert upgraded.spike_state.limit.get_value().shape == (2,)
    assert type(upgraded.spike_state) is jls.types.SpikeState


def test_spikes_of_an_ensemble_are_restored():
    stacked = {"w": jnp.arange(1.0, 7.0).reshape(3, 2)}
    state = jax.vmap(spiky)(stacked)
    target = jax.vmap(SPIKY.init)(stacked)
    raw = serialization.to_state_dict(state)
    assert_identical(jls.upgrade_state(target, raw), state)


class Own(NamedTuple):
    loss_scale: jax.Array


def test_a_scale_of_ones_own_that_moves_is_not_taken_for_a_static_one():
    moving = jls.types.LossScaler(lambda: Own(jnp.float32(2.0**16)), lambda s, f: s)
    own, guarded = jls.loss_scaled(SGD, moving), jls.skip_nonfinite(SGD)
    saved = own.init(PARAMS)
    assert jls.loss_scale(jls.upgrade_state(guarded.init(PARAMS), saved)) == 1.0
    saved = guarded.init(PARAMS)
    assert jls.loss_scale(jls.upgrade_state(own.init(PARAMS), saved)) == 2.0**16


@pytest.mark.parametrize("index", [None, "1", np.array([1, 2], np.int32)])
def test_an_index_that_is_no_number_is_named(index):
    optimizer = jls.loss_scaled(SGD, ADAPTIVE)
    raw = serialization.to_state_dict(optimizer.init(PARAMS))
    raw["scaler_state"]["rung"] = index
    with pytest.raises(ValueError, match=r"at 'scaler_state/rung'"):
        jls.upgrade_state(optimizer.init(PARAMS), raw)


def test_a_scaler_of_ones_own_with_a_scale_alone_keeps_it():
    own = jls.types.LossScaler(lambda: Own(jnp.float32(8.0)), lambda state, flag: state)
    optimizer = jls.loss_scaled(SGD, own)
    saved = jls.set_loss_scale(optimizer.init(PARAMS), 64.0)
    state = jls.upgrade_state(
        optimizer.init(PARAMS), serialization.to_state_dict(saved)
    )
    assert_identical(state, saved)


def test_without_the_upgrade_a_checkpoint_that_lacks_a_field_is_an_error():
    state = checkpoints.trained("dynamic")
    before = jax.tree.map(np.array, state)
    raw = serialization.to_state_dict(state)
    del raw["opt_state"]["nonfinite_updates"]
    with pytest.raises(ValueError, match="nonfinite_updates"):
        serialization.from_state_dict(state, raw)
    assert_identical(state, before)


def test_fixtures_are_small():
    files = [f for f in FOLDER.rglob("*") if f.suffix in (".msgpack", ".zip")]
    assert len(files) == 30
    assert all(file.stat().st_size < 20_000 for file in files)


def test_fields_of_states_are_only_ever_appended():
    """As at first, then those that have a version in FIELDS, in order."""
    first = {
        jls.types.StaticState: "loss_scale",
        jls.types.ScalerState: "loss_scale finite_count nonfinite_count",
        jls.types.LossScaledState: "inner_state scaler_state applied steps skips "
        "consecutive_skips nonfinite_losses",
        jls.types.AdaptiveState: "loss_scale finite_count nonfinite_count growth_count "
        "rung",
        jls.types.Bfloat16ParamsState: "inner_state rest count made strayed",
        jls.types.ParamsEmaState: "count weight ema",
        jls.types.SpikeState: "seen kept tokens found value limit steady_share",
    }
    for state_type, names in first.items():
        since = FIELDS if state_type is jls.types.LossScaledState else {}
        added = [name for name, field in since.items() if field.since]
        assert state_type._fields == (*names.split(), *added)
    types = {
        value
        for name in dir(jls.types)
        if name.endswith("State")
        and isinstance(value := getattr(jls.types, name), type)
    }
    assert types == set(first)


# States of this version, in all forms in which a library gives them.


def forms(state, folder):
    yield serialization.msgpack_restore(serialization.to_bytes(state))
    yield serialization.to_state_dict(state)
    yield restored(saved(state, folder))
    yield jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("name", SCALERS)
def test_every_scaler_is_restored_from_a_state_dict(name):
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
    target = checkpoints.fresh("dynamic")
    state = target
    for _ in range(2):
        state = checkpoints.step(state, jnp.float32(1.0))
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
        chex.assert_trees_all_equal_structs(new, target)
    with pytest.raises(ValueError, match=r"has opt_state, .*questions/checkpoints.md"):
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
        assert jls.metrics(again)["last_skip_reason"] == 0
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


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        pytest.param(
            RAW | {"mood": np.float32(1.0)},
            rf"at the root, in LossScaledState, it also has mood\. {OTHER}",
            id="newer",
        ),
        pytest.param(
            without(RAW, "skips", "last_skip_reason"),
            r"in LossScaledState, it lacks skips\.",
            id="a field of the first version",
        ),
        pytest.param(
            raw_of(SGD, PARAMS),
            r"lacks inner_state, scaler_state, applied, .*also has 0\. .*points\.md",
            id="saved without jls",
        ),
        pytest.param(
            raw_of(jls.loss_scaled(SGD, ADAPTIVE), PARAMS),
            r"at 'scaler_state', in ScalerState, it also has growth_count, "
            r"rung\. .*Other changes: docs/questions/checkpoints\.md",
            id="another scaler",
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
            r"float32\[2\] at 'inner_state/0/trace/w', as target has, got "
            r"float32\[3\]",
            id="another shape",
        ),
        pytest.param(
            RAW | {"steps": np.float32(1.0)},
            r"int32\[\] at 'steps', as target has, got float32 ",
            id="another dtype",
        ),
        pytest.param(RAW | {"steps": None}, "at 'steps', .* got None", id="None"),
        pytest.param(RAW | {"steps": "7"}, r"at 'steps', .* got str '7'\.", id="text"),
        pytest.param(
            RAW | {"nonfinite_leaves": np.zeros(3, bool)},
            r"bool\[2\] at 'nonfinite_leaves'",
            id="another number of leaves",
        ),
        pytest.param(
            RAW | {"scaler_state": np.float32(8.0)},
            r"saved must have a ScalerState at 'scaler_state', .* got float32",
            id="a scale alone",
        ),
        pytest.param(
            np.ones(2), r"at the root, as target has, got float64", id="array"
        ),
        pytest.param(
            b"bytes", r"at the root, as target has, got bytes b'bytes'\.", id="bytes"
        ),
        pytest.param(
            object(),
            r"saved must have a LossScaledState at the root, .* got object <.*>\. Pass "
            r"nested dicts, .* flax\.serialization\.to_state_dict\(object\)",
            id="object",
        ),
        pytest.param(
            RAW | {"scaler_state": object()},
            r"at 'scaler_state', .* got object <.*>\. Pass nested dicts",
            id="object within",
        ),
        pytest.param(
            {}, r"lacks inner_state, .*questions/checkpoints\.md", id="nothing"
        ),
        *[
            pytest.param(
                RAW | {"scaler_state": RAW["scaler_state"] | {"loss_scale": scale}},
                r"2\^-126 to 2\^126 at 'scaler_state/loss_scale', got .*target has",
                id=f"a scale of {scale!r}",
            )
            for scale in (
                np.float32(np.nan),
                np.float32(0.0),
                np.float32(-8.0),
                np.float32(np.inf),
                0.0,
                1e300,
            )
        ],
        *[
            pytest.param(
                RAW | {"steps": count},
                r"from 0 to 2\^31 - 1 at 'steps', got .*target has",
                id=f"a count of {count!r}",
            )
            for count in (2**40, 2**70, -5, np.int32(-1))
        ],
        pytest.param(
            RAW | {"scaler_state": RAW["scaler_state"] | {"finite_count": 2**40}},
            rf"fits into int32 at 'scaler_state/finite_count', got 1099.* {OTHER}",
            id="a count of a scaler",
        ),
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


def test_a_number_that_its_dtype_cannot_hold_is_named():
    target = {"x": jnp.ones((), jnp.float16), "y": jnp.zeros((), jnp.int8)}
    assert jls.upgrade_state(target, {"x": 3.0, "y": 7}) == {"x": 3.0, "y": 7}
    with pytest.raises(ValueError, match=r"fits into float16 at 'x', got 1e\+300"):
        jls.upgrade_state(target, {"x": 1e300, "y": 7})
    with pytest.raises(ValueError, match="fits into int8 at 'y', got 300"):
        jls.upgrade_state(target, {"x": 3.0, "y": 300})


def test_state_without_parameters_can_be_saved_everywhere(tmp_path, jit_or_eager):
    for i, tree in enumerate(({"frozen": jnp.arange(2)}, {"free": None}, {})):
        optimizer = jls.loss_scaled(optax.sgd(0.1, momentum=0.9))
        state = optimizer.init(tree)
        update = jit_or_eager(optimizer.update)
        _, state = update(tree, state, tree, value=jnp.nan)
        assert state.skips == 1
        params = None if jax.tree.leaves(tree) else tree  # integers are none
        assert params is None or bad_leaves(state, params) == []
        assert jls.health(state, params).numbers["skips"] == 1
        raw = restored(saved(state, tmp_path / str(i)))
        assert_identical(jls.upgrade_state(optimizer.init(tree), raw), state)


def test_a_scaler_with_the_fields_of_another_is_an_error():
    """Those of `dynamic` are the first of another: no reason to fill in the rest."""
    target = jls.loss_scaled(SGD, ADAPTIVE).init(PARAMS)
    with pytest.raises(ValueError, match="lacks growth_count, rung"):
        jls.upgrade_state(target, RAW)


def test_a_scaler_state_without_a_scale_is_an_error():
    for scaler in (jls.static(8.0), jls.dynamic(8.0)):
        target = jls.loss_scaled(SGD, scaler).init(PARAMS)
        for parts in ({}, {"finite_count": np.int32(0)}):
            with pytest.raises(ValueError, match="lacks loss_scale"):
                jls.upgrade_state(target, RAW | {"scaler_state": parts})


def test_bare_target_for_a_wrapped_checkpoint_says_unwrap():
    with pytest.raises(
        ValueError, match=r"also has inner_state, .*questions/checkpoints\.md"
    ):
        jls.upgrade_state(SGD.init(PARAMS), RAW)


def test_target_of_shapes_is_an_error():
    target = jax.eval_shape(WRAPPED.init, PARAMS)
    with pytest.raises(TypeError, match="ShapeDtypeStruct at 'inner_state/0/trace/b'"):
        jls.upgrade_state(target, RAW)


def test_pickle_of_an_older_version_is_an_error():
    """Why the documentation says that a pickle is for one version."""

    class Older:  # pickled as a NamedTuple is: its type, and its fields
        def __reduce__(self):
            return jls.types.LossScaledState, tuple(WRAPPED.init(PARAMS)[:7])

    data = pickle.dumps(Older())
    with pytest.raises(TypeError, match="nonfinite_updates"):
        pickle.loads(data)


# A spike policy.


def with_spikes(policy, *sizes, state=None):
    """The optimizer, and its state after steps with gradients of these sizes."""
    optimizer = jls.loss_scaled(
        optax.sgd(0.1, momentum=0.9), jls.dynamic(8.0), spikes=policy
    )
    params = {"w": jnp.ones(2)}
    state = optimizer.init(params) if state is None else state
    for size in sizes:
        grads = {"w": jnp.full(2, size)}
        _, state = optimizer.update(grads, state, params, value=jnp.float32(size))
    return optimizer, state


SIZES = [1.0, 1.1, 0.9, 1.0, 50.0, 60.0, 1.0, 2.0, 70.0]


@pytest.mark.parametrize(
    "at",
    [pytest.param(at, marks=[pytest.mark.more] * (at > 5)) for at in (2, 5, 6, 9)],
    ids=lambda at: f"after {at}",
)
def test_a_run_with_spikes_goes_on_in_its_warm_up_and_with_half_spent_tokens(
    at, tmp_path
):
    policy = jls.spikes(window=8, budget=2)
    _, whole = with_spikes(policy, *SIZES)
    assert whole.spikes > 1
    _, state = with_spikes(policy, *SIZES[:at])
    target = with_spikes(policy)[1]
    for form in forms(state, tmp_path):
        restored_state = jls.upgrade_state(target, form)
        assert_identical(restored_state, state)
        _, resumed = with_spikes(policy, *SIZES[at:], state=restored_state)
        assert_identical(resumed, whole)


def test_a_state_without_spikes_warms_up_under_a_policy(tmp_path):
    _, state = with_spikes(None, 1.0, 2.0)
    _, target = with_spikes(jls.spikes(window=8))
    for form in forms(state, tmp_path):
        new = jls.upgrade_state(target, form)
        assert_identical(new.inner_state, state.inner_state)
        assert_identical(new.spike_state, target.spike_state)
        assert (new.steps, new.spikes) == (2, 0)
    # Also without the fields.
    raw = serialization.to_state_dict(state)
    del raw["spikes"], raw["spike_state"]
    assert_identical(jls.upgrade_state(target, raw), new)


@pytest.mark.parametrize(
    "policy", [None, jls.spikes(window=16), jls.presets.spike_limit(9.0)]
)
def test_a_state_of_another_spike_policy_says_what_to_do(policy, tmp_path):
    _, state = with_spikes(jls.spikes(window=8), 1.0, 2.0)
    _, target = with_spikes(policy)
    for form in forms(state, tmp_path):
        with pytest.raises(ValueError, match="delete 'spikes' and 'spike_state'"):
            jls.upgrade_state(target, form)
    raw = serialization.to_state_dict(state)
    del raw["spikes"], raw["spike_state"]
    dropped = state._replace(spikes=(), spike_state=())
    for form in (raw, dropped):
        assert jls.upgrade_state(target, form).steps == 2


BAD_NUMBERS = {
    "seen": (np.nan, np.inf, -np.inf),
    "kept": (-1, 16, 2**31 - 1),
    "tokens": (np.nan, -5.0, -np.inf),
    "found": (-7,),
    "value": (np.nan,),
    "limit": (np.nan,),
    "steady_share": (np.nan, -0.1, 1.5),
}
PAIRS = [(name, bad) for name, numbers in BAD_NUMBERS.items() for bad in numbers]


@pytest.mark.parametrize(("name", "bad"), PAIRS)
def test_spike_states_that_no_run_can_have_are_an_error(name, bad):
    target, state = (
        with_spikes(jls.spikes(window=8), *sizes)[1] for sizes in ([], SIZES)
    )
    raw = serialization.to_state_dict(state)
    numbers = np.array(raw["spike_state"][name])
    numbers.flat[-1] = bad
    raw["spike_state"] = raw["spike_state"] | {name: numbers}
    with pytest.raises(ValueError, match="saved must have a") as caught:
        jls.upgrade_state(target, raw)
    message = str(caught.value)
    assert f"at 'spike_state/{name}', got {numbers.flat[-1]}. No run" in message
    assert len(message) < 200  # never all of the window
    # As an object too.
    spikes = state.spike_state._replace(**{name: jnp.asarray(numbers)})
    with pytest.raises(ValueError, match=f"spike_state/{name}"):
        jls.upgrade_state(target, state._replace(spike_state=spikes))


@pytest.mark.cover(1)
@pytest.mark.parametrize("budget", [0, 2.5, 4, None])
@pytest.mark.parametrize("max_norm", [None, 55.0])
def test_every_spike_state_of_a_run_is_taken(budget, max_norm):
    policy = jls.spikes(window=8, budget=budget, max_norm=max_norm)
    _, target = with_spikes(policy)
    state = target
    for size in [*SIZES, 1e30, 3e38, 0.0, jnp.nan, *range(20)]:  # a norm that is inf
        raw = serialization.to_state_dict(state)
        assert_identical(jls.upgrade_state(target, raw), state)
        _, state = with_spikes(policy, size, state=state)
    assert budget is not None or state.spike_state.tokens == jnp.inf


def test_a_reason_that_no_version_knows_is_an_error():
    raw = RAW | {"last_skip_reason": np.int32(7)}
    with pytest.raises(
        ValueError, match=r"from 0 to 5, a jls\.types\.SkipReason, at 'last"
    ):
        jls.upgrade_state(WRAPPED.init(PARAMS), raw)


def test_a_policy_with_a_state_of_its_own_is_restored(tmp_path):
    policy = jls.types.SpikePolicy(
        lambda: {"most": jnp.float32(9.0), "n": jnp.int32(0)},
        lambda state, loss, norm: (state | {"n": state["n"] + 1}, norm > state["most"]),
    )
    _, state = with_spikes(policy, 1.0, 20.0)
    assert (state.spikes, state.spike_state["n"]) == (1, 2)
    for form in forms(state, tmp_path):
        assert_identical(jls.upgrade_state(with_spikes(policy)[1], form), state)


def test_wrap_and_unwrap_with_spikes():
    params = {"w": jnp.ones(2)}
    optimizer, fresh = with_spikes(jls.spikes(window=8))
    inner = optax.sgd(0.1, momentum=0.9).init(params)
    assert_identical(jls.wrap_state(optimizer, inner, params), fresh)
    assert_identical(jls.unwrap_state(fresh), inner)
