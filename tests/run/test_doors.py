"""What the tools for a run take: states of devices, no optimizer for parameters."""

import collections
import functools
import json

import flax
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jls

ON_HOST = functools.partial(jls.metrics, host=True)

pytestmark = pytest.mark.standard_promotion

OPTIMIZER = jls.loss_scaled(optax.adam(0.1), jls.dynamic(1024.0))
PARAMS = {"w": jnp.ones(3)}
STATE = OPTIMIZER.init(PARAMS)


def stacked(tree, count=2):
    """As `jax.pmap` keeps it."""
    return jax.tree.map(lambda x: jnp.stack([x] * count), tree)


def notes_of(told):
    return "\n".join(getattr(told.value, "__notes__", []))


# Parameters.


@pytest.mark.parametrize("given", [OPTIMIZER, 3, "x", jnp.arange(3), {"n": 1}])
def test_what_holds_no_floating_array_is_no_parameters(given):
    with pytest.raises(TypeError, match="params must hold floating-point arrays, got"):
        jls.health(STATE, given)


def test_an_optimizer_in_their_place_is_told_its_keyword():
    bad = {"w": jnp.full(3, jnp.nan)}
    with pytest.raises(TypeError, match="optimizer=optimizer"):
        jls.health(STATE, OPTIMIZER)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="optimizer"):
        jls.health(STATE, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param))
    assert jls.health(STATE, bad, optimizer=OPTIMIZER).verdict == "poisoned"
    assert jls.health(STATE, {}).numbers["poisoned"] is False


def test_parameters_before_the_state_are_told_the_order():
    with pytest.raises(ValueError, match=r"order is jls\.health\(opt_state, params\)"):
        jls.health(PARAMS, STATE)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"jls\.health\(optimizer, model\)"):
        jls.health(model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param))
    with pytest.raises(
        ValueError, match=r"must carry one state of jls.* got dict with"
    ):
        jls.health(PARAMS, PARAMS)


def test_a_parameter_of_one_element_that_is_minus_inf_is_no_mask():
    for shape in ((), (1,)):
        params = {"w": jnp.full(shape, -jnp.inf)}
        state = OPTIMIZER.init(params)._replace(steps=jnp.int32(3))
        health = jls.health(state, params)
        assert health.verdict == "poisoned"
        assert not health.safe_to_save


# States of several devices.


def test_a_state_of_devices_that_agree_is_read_and_set():
    state, params = stacked(STATE), stacked(PARAMS)
    assert jls.metrics(state, host=True) == jls.metrics(STATE, host=True)
    assert jls.health(state, params).sentence == jls.health(STATE, PARAMS).sentence
    new = jls.set_loss_scale(state, 8.0)
    assert jls.metrics(new, host=True)["loss_scale"] == 8.0
    assert new.scaler_state.loss_scale.tolist() == [8.0, 8.0]
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
    bare = stacked(STATE.scaler_state)
    assert jls.metrics(bare, host=True) == {"loss_scale": 1024.0}
    for read in (jls.metrics, jls.loss_scale):
        with pytest.raises(ValueError, match=r"lambda a: a\[0\], state"):
            read(state)


def test_what_is_not_finite_on_one_device_is_found():
    params = stacked(PARAMS)
    params["w"] = params["w"].at[1, 0].set(jnp.nan)
    assert jls.health(stacked(STATE), params).verdict == "poisoned"


@pytest.mark.parametrize("read", [jls.health, ON_HOST])
def test_devices_that_differ_are_named(read):
    state = stacked(STATE)._replace(skips=jnp.array([0, 1]))
    with pytest.raises(ValueError, match=r"differ in skips: see jls\.check_in_sync"):
        read(state)


# Words.


def test_a_run_without_a_loss_scale_is_told_of_none():
    optimizer = jls.skip_nonfinite(optax.adam(0.1))
    state = optimizer.init(PARAMS)
    for loss, value in ((1.0, 1.0), (jnp.nan, 1.0), (1.0, jnp.nan), (1.0, 1.0)):
        grads = jax.tree.map(lambda x, v=value: v * x, PARAMS)
        assert "scale" not in jls.health(state, PARAMS).sentence
        _, state = optimizer.update(grads, state, PARAMS, value=jnp.float32(loss))
        text = str(jls.health(state, PARAMS, optimizer=optimizer))
        assert "scale" not in text, text
    history = jls.History()
    history.append(jls.metrics(state))
    assert "scale" not in history.line() + history.summary()


@pytest.mark.parametrize("known", [True, False])
def test_finite_gradients_behind_a_clip_are_not_called_inf(known):
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    for inner, huge in ((clip, 1e20), (clip, jnp.inf), (optax.adam(0.1), jnp.inf)):
        optimizer = jls.loss_scaled(inner)
        state = optimizer.init(PARAMS)
        for size in (1.0, huge):
            grads = {"w": jnp.array([1.0, size, 1.0])}
            _, state = optimizer.update(grads, state, PARAMS, value=jnp.float32(1))
        given = optimizer if known else None
        text = jls.health(state, PARAMS, optimizer=given).sentence
        words = "were inf, NaN, or over 1.8e19 in norm"
        assert (words in text) == (known and inner is clip)


def test_numbers_are_strict_json():
    state = STATE._replace(
        scaler_state=STATE.scaler_state._replace(loss_scale=jnp.float32(jnp.inf))
    )
    numbers = jls.health(state, PARAMS).numbers
    assert numbers["loss_scale"] is None
    json.dumps(numbers, allow_nan=False)


def test_metrics_of_a_report_are_its_scalars():
    _, _, report = jls.apply_gradients(OPTIMIZER, PARAMS, STATE, PARAMS)
    metrics = jax.jit(jls.metrics)(report)
    assert set(metrics) == set(jls.metrics(report, host=True))
    assert not metrics["skipped"]


# Doors for those who come from elsewhere.


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("scale", "jls.value_and_grad"),
        ("unscale_", "jls.value_and_grad"),
        ("step", "optimizer.update"),
        ("update", "optimizer.update"),
        ("get_scale", "jls.loss_scale"),
    ],
)
def test_what_a_scaler_does_elsewhere_is_told(name, write):
    with pytest.raises(AttributeError, match=f"{write}.*coming_from"):
        getattr(jls.dynamic(), name)
    assert not hasattr(jls.dynamic(), name)


def test_a_scaler_of_another_library_is_told_what_does_it():
    with pytest.raises(AttributeError, match=r"jls\.loss_scaled\(optimizer\).*table"):
        jls.GradScaler  # noqa: B018
    with pytest.raises(AttributeError, match=r"jls\.presets\.flax"):
        jls.DynamicScale  # noqa: B018
    for name, write in {
        "DynamicLossScale": r"jls\.loss_scaled\(optimizer, jls\.dynamic\(\)\)",
        "StaticLossScale": r"jls\.loss_scaled\(optimizer, jls\.static\(scale\)\)",
        "NoOpLossScale": r"jls\.skip_nonfinite\(optimizer\)",
        "LossScaleOptimizer": r"jls\.loss_scaled\(optimizer, jls\.dynamic\(\)\)",
        "select_tree": r"jls\.select\(finite, new, old\)",
        **dict.fromkeys(
            ("Policy", "get_policy", "cast_to_half", "float16", "bfloat16"),
            r"jls\.autocast\(loss_fn, jnp\.float16\)",
        ),
    }.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': {write}"):
            getattr(jls, name)
    with pytest.raises(AttributeError, match="has no attribute 'grow'"):
        jls.dynamic().grow  # noqa: B018


def test_text_is_neither_finite_nor_not():
    for text in ("abc", {"loss": "nan"}):
        with pytest.raises(TypeError, match="tree must hold numbers"):
            jls.all_finite(text)
    assert jls.all_finite({"loss": 1.0, "name": "nan"})


def test_a_loss_by_position_is_told_its_keyword():
    with pytest.raises(TypeError, match="value=loss"):
        OPTIMIZER.update(PARAMS, STATE, PARAMS, jnp.float32(1.0))


def test_gradients_of_another_tree_are_told():
    rule = r"^updates must be the gradients of params, but .*'v'"
    with pytest.raises(ValueError, match=rule) as told:
        OPTIMIZER.update({"v": jnp.ones(3)}, STATE, PARAMS)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("form", ["update", "step"])
def test_a_state_of_a_model_of_other_shapes_is_told(form):
    params = {"w": jnp.ones(5)}
    step = jls.train_step(lambda params, x: jnp.mean(x * params["w"]), OPTIMIZER)
    rule = r"has shape \(3,\) at '0/mu/w', where these params make \(5,\).*init\(params"
    call = step if form == "step" else OPTIMIZER.update
    args = (params, STATE, jnp.ones(1)) if form == "step" else (params, STATE, params)
    with pytest.raises(ValueError, match=rule):
        call(*args)


def test_a_state_of_other_parameters_is_noted_where_the_loss_fails():
    step = jls.train_step(lambda params, x: jnp.mean(x * params["w"]), OPTIMIZER)
    with pytest.raises(KeyError) as told:
        step({"v": jnp.ones(3)}, STATE, jnp.ones(3))
    assert "opt_state was not made for these params" in notes_of(told)
    with pytest.raises(TypeError) as told:  # its own fault alone
        step(PARAMS, STATE, jnp.ones(4))
    assert "opt_state" not in notes_of(told)


def test_nothing_is_noted_where_the_loss_of_nnx_fails():
    def loss_fn(model, x):
        raise KeyError("a slip in the loss")

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    with pytest.raises(KeyError) as told:
        nnx.jit(jls.train_step(loss_fn))(model, optimizer, jnp.ones(2))
    assert "opt_state" not in notes_of(told)


def test_text_among_the_parameters_is_told_by_its_path():
    for leaf, name in (("layer", "str"), (jnp.tanh, "jnp|Pjit|ufunc|function")):
        rule = rf"params must hold arrays, got .*({name}).* at 'kind'.*eqx\.filter"
        with pytest.raises(TypeError, match=rule):
            OPTIMIZER.init({"w": jnp.ones(3), "kind": leaf})


def test_swapped_arguments_of_upgrade_state_are_told():
    saved = {"inner_state": 1}
    with pytest.raises(TypeError, match="target comes first"):
        jls.upgrade_state(saved, STATE)


def test_a_loss_function_that_takes_more_is_told_how_it_is_called():
    step = jls.train_step(lambda params, x, y: 0.0, OPTIMIZER)
    rule = r"called as loss_fn\(params or state, batch\).*\(params, x, y\)"
    with pytest.raises(TypeError, match=rule):
        step(PARAMS, STATE, jnp.ones(3))


def test_an_nnx_optimizer_for_train_step_is_told_to_be_left_out():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    with pytest.raises(
        TypeError, match=r"left out .*jls\.train_step\(loss_fn\)"
    ) as told:
        jls.train_step(lambda model, x: 0.0, optimizer)
    assert len(str(told.value)) < 400


def test_nnx_takes_arguments_of_the_loss_by_keyword():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def loss_fn(model, x, scale=2.0):
        return scale * jnp.mean(model(x) ** 2)

    grad_fn = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
    x = jnp.ones((2, 3))
    loss, _ = grad_fn(optimizer, model, x=x)
    assert loss == grad_fn(optimizer, model, x)[0]


def test_a_scaler_in_the_place_of_the_optimizer_is_told():
    with pytest.raises(TypeError, match=r"got its scaler.*jls\.loss_scaled\(inner"):
        jls.health(STATE, PARAMS, optimizer=jls.dynamic())


def test_the_optimizer_in_the_place_of_its_new_state_is_told():
    with pytest.raises(
        TypeError, match=r"got LossScaledTransformation.*optimizer\.init\(params"
    ):
        jls.upgrade_state(OPTIMIZER, {})


def test_a_saved_state_is_told_what_restores_it():
    saved = flax.serialization.to_state_dict(STATE)
    for read in (jls.health,):
        with pytest.raises(ValueError, match=r"jls\.upgrade_state\(optimizer\.init"):
            read(saved)


def test_a_bare_optimizer_beside_a_state_of_jls_is_told():
    step = jls.train_step(lambda params, x: jnp.mean(x * params["w"]), optax.adam(0.1))
    with pytest.raises(ValueError, match=r"got one without a wrapper"):
        step(PARAMS, STATE, jnp.ones(1))


def test_a_loss_function_that_a_decorator_gives_more_is_called_as_it_is():
    def with_factor(fun):
        @functools.wraps(fun)
        def wrapped(params, x):
            return fun(params, x, 3.0)

        return wrapped

    @with_factor
    def loss_fn(params, x, factor):
        return factor * jnp.mean(x * params["w"])

    step = jax.jit(jls.train_step(loss_fn, OPTIMIZER))
    *_, report = step(PARAMS, STATE, jnp.ones(1))
    assert report.loss == 3.0


def test_parameters_called_init_and_update_are_parameters():
    params = collections.namedtuple("Layers", ["init", "update"])(
        jnp.ones(2), jnp.ones(2)
    )
    state = OPTIMIZER.init(params)
    assert jls.health(state, params).verdict == "no step"


# States that a program keeps as leaves by path.


def flat(separator="/", prefix="opt"):
    leaves, _ = jax.tree_util.tree_flatten_with_path(STATE)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="|").split("|")
        for path, _ in leaves
    ]
    paths = [(prefix, *path) if prefix else tuple(path) for path in paths]
    names = paths if separator is None else map(separator.join, paths)
    return dict(zip(names, (leaf for _, leaf in leaves), strict=True))


def loss_fn(params, x):
    return jnp.mean(x * params["w"])


TAKE_A_STATE = {
    "loss_scale": jls.loss_scale,
    "set_loss_scale": lambda state: jls.set_loss_scale(state, 2.0),
    "metrics": jls.metrics,
    "metrics on the host": ON_HOST,
    "health": jls.health,
    "check_in_sync": jls.check_in_sync,
    "scale": lambda state: jls.scale(state, 1.0),
    "value_and_grad": lambda state: jls.value_and_grad(loss_fn)(state, PARAMS, 1.0),
    "unwrap_state": jls.unwrap_state,
    "wrap_state": lambda state: jls.wrap_state(OPTIMIZER, state, PARAMS),
    "upgrade_state": lambda state: jls.upgrade_state(STATE, state),
    "update": lambda state: OPTIMIZER.update(PARAMS, state, PARAMS),
    "apply_gradients": lambda state: jls.apply_gradients(
        OPTIMIZER, PARAMS, state, PARAMS
    ),
    "train_step": lambda state: jls.train_step(loss_fn, OPTIMIZER)(PARAMS, state, 1.0),
    "check_step": lambda state: jls.check_step(lambda state: state, state),
    "calibrate": lambda state: jls.calibrate(lambda state: state, state),
}


@pytest.mark.parametrize("name", TAKE_A_STATE)
def test_a_state_as_leaves_by_path_is_told_how_to_be_put_together(name):
    with pytest.raises((TypeError, ValueError)) as told:
        TAKE_A_STATE[name](flat())
    message = str(told.value)
    assert "'opt/scaler_state/loss_scale'" in message
    assert "flat dict" in message
    assert "docs/questions/faq.md" in message  # which is tested
    assert len(message) < 600


@pytest.mark.parametrize("prefix", ["", "opt"])
@pytest.mark.parametrize("separator", ["/", ".", None])
@pytest.mark.parametrize("underscore", ["", "_"])
def test_leaves_by_any_path_are_told_by_their_key(separator, prefix, underscore):
    leaves = flat(separator, prefix)
    if separator:
        leaves = {name.replace("_", underscore): x for name, x in leaves.items()}
    with pytest.raises(ValueError, match=r"loss_?scale'\)? is a leaf .* a flat dict"):
        jls.loss_scale(leaves)


@pytest.mark.parametrize("given", [{"loss_scale": 2.0}, {"scaler_state": {}}, {1: 2}])
def test_other_dicts_are_not_taken_for_leaves_by_path(given):
    with pytest.raises(ValueError, match="must carry a loss scale") as told:
        jls.loss_scale(given)
    assert "flat dict" not in str(told.value)


# One thing in the place of another.


@pytest.fixture(scope="module")
def calibration():
    return jls.types.Calibration(init_scale=1024.0, keep="head")


def test_a_calibration_in_the_place_of_a_scale_is_told_its_field(calibration):
    for call in (
        lambda: jls.set_loss_scale(STATE, calibration),
        lambda: jls.dynamic(calibration),
        lambda: jls.static(calibration),
    ):
        with pytest.raises(TypeError, match=r"got Calibration\. Pass .*init_scale\.$"):
            call()


def test_a_calibration_in_the_place_of_keep_is_told_its_field(calibration):
    with pytest.raises(TypeError, match=r"Pass its field: result\.keep\.$"):
        jls.autocast(jnp.sum, jnp.float16, keep=calibration)


def test_a_list_of_names_in_the_place_of_keep_is_told_the_expression():
    with pytest.raises(TypeError, match=r"Write keep='embed\|head'\.$"):
        jls.autocast(jnp.sum, jnp.float16, keep=["head", "embed"])


def test_an_autocast_without_a_dtype_is_told_what_to_write():
    with pytest.raises(TypeError, match=r"jls\.autocast\(fun, jnp\.bfloat16\)"):
        jls.autocast(jnp.sum)


def test_a_dtype_that_numpy_takes_for_another_is_shown_as_it_was_written():
    with pytest.raises(ValueError, match=r"jnp\.float16, .* got str 'f16'"):
        jls.autocast(jnp.sum, "f16")


@pytest.mark.parametrize("given", [{"x": jnp.ones(3)}, "train"])
def test_one_batch_or_a_name_is_no_queue(given):
    with pytest.raises(TypeError, match="batches must be an iterable of batches"):
        jls.requeue(given)


def test_a_bare_optimizer_of_nnx_is_told_how_it_is_wrapped():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    wrap = r"nnx\.Optimizer\(model, jls\.skip_nonfinite\(tx\)"
    with pytest.raises(ValueError, match=wrap), jls.atomic(optimizer, model):
        pass
    with pytest.raises(ValueError, match=wrap):
        jls.health(optimizer, model)


@pytest.mark.parametrize("scaler", [jls.dynamic, jls.static, jls.presets.torch])
def test_an_optimizer_in_the_place_of_a_scale_is_told_where_it_goes(scaler):
    with pytest.raises(TypeError, match=r"jls\.loss_scaled\(optimizer, scaler\)\.$"):
        scaler(optax.adam(0.1))


def test_swapped_arguments_of_wrap_state_are_told():
    saved = optax.adam(0.1).init(PARAMS)
    with pytest.raises(ValueError, match=r"it had: jls\.wrap_state\(optimizer, inner"):
        jls.wrap_state(OPTIMIZER, PARAMS, saved)
    jls.wrap_state(OPTIMIZER, saved, PARAMS)
    # Of an optimizer without a state both orders may look alike.
    bare = jls.loss_scaled(optax.identity())
    jls.wrap_state(bare, optax.identity().init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="in structure, shapes and dtypes"):
        jls.wrap_state(OPTIMIZER, optax.sgd(0.1).init(PARAMS), PARAMS)
