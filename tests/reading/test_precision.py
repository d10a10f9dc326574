"""How much of a step is half, and what the headlines say of it. No step is run."""

import functools
import itertools
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from right_kinds import KINDS
from right_programs import PROGRAMS
from right_steps import RIGHT as RIGHT_STEPS
from shared import assert_identical

import jls
from jls._tools.check.check import read_step
from jls._tools.reading.precision import in_words, look_at

# Steps with a mistake are warned of too.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
]

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16
NO_HALF = "no product is half: the loss scale does nothing"
NO_HALF_FOLLOWS = "no product that follows it is half: the loss scale does nothing"
BFLOAT16 = "bfloat16 needs no loss scale: jls.skip_nonfinite"
NOT_SCALED = "its gradients are not scaled: dot_general in float16, at "
IN_LOSS = NOT_SCALED.replace("at ", "of a gradient inside the loss, at ")


def look(step, *args, **kwargs):
    runner, *_ = read_step(step, args, kwargs, None)
    subject = runner.subject
    assert subject.reading is not None
    return look_at(subject.reading, [subject.scales[k] for k in subject.live])


def moving(inner=None):
    return jls.loss_scaled(inner or optax.sgd(0.1), jls.dynamic(1024.0))


def skipping():
    return jls.skip_nonfinite(optax.sgd(0.1))


# Four layers, of 8 * 16, 16 * 16, 16 * 16 and 16 * 2 weights, on a batch of 4.
SIZES = [8, 16, 16, 16, 2]
LAYERS = list(itertools.pairwise(SIZES))
FORWARD = [4 * i * o for i, o in LAYERS]
# Each layer has the gradient of its weights; all but the first that of its inputs.
WORK = [(2 if i == 0 else 3) * n for i, n in enumerate(FORWARD)]
BATCH = jnp.ones((4, 8)), jnp.ones((4, 2))
PARAMS = [jnp.full(shape, 0.1) for shape in LAYERS]


def apply(params, x, dtypes):
    for w, dtype in zip(params, dtypes, strict=True):
        x = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
    return x.astype(F32)


def loss_with(dtypes):
    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((apply(params, x, dtypes) - y) ** 2)

    return loss_fn


def step_of(loss_fn, params=PARAMS, batch=BATCH, optimizer=None, **options):
    optimizer = optimizer or moving()
    step = jax.jit(jls.train_step(loss_fn, optimizer, **options))
    return step, params, optimizer.init(params), batch


def step_by_hand(gradients):
    """A step with the loss and the gradients that `gradients` makes of its state."""
    optimizer = moving()

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = gradients(opt_state, params, batch)
        params, opt_state, _ = jls.apply_gradients(
            optimizer, grads, opt_state, params, value=loss
        )
        return params, opt_state

    return step, PARAMS, optimizer.init(PARAMS), BATCH


def plain(dtypes, optimizer, **options):
    return step_of(loss_with(dtypes), optimizer=optimizer, **options)


def linen(dtypes, optimizer, **options):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for (_, size), dtype in zip(LAYERS, dtypes, strict=True):
                x = jnp.tanh(nn.Dense(size, use_bias=False, dtype=dtype)(x))
            return x.astype(F32)

    net = Net()
    params = net.init(jax.random.key(0), BATCH[0])
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optimizer)

    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((net.apply(params, x) - y) ** 2)

    def of_state(state, batch):
        return loss_fn(state.params, batch)

    return jax.jit(jls.train_step(of_state, **options)), state, BATCH


def with_nnx(dtypes, optimizer, **options):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                nnx.Linear(i, o, use_bias=False, dtype=dtype, rngs=rngs)
                for (i, o), dtype in zip(LAYERS, dtypes, strict=True)
            )

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x.astype(F32)

    def loss_fn(model, batch):
        x, y = batch
        return jnp.mean((model(x) - y) ** 2)

    model = Net(nnx.Rngs(0))
    wrapped = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    return nnx.jit(jls.train_step(loss_fn, **options)), model, wrapped, BATCH


def equinox(dtypes, optimizer, **options):
    keys = jax.random.split(jax.random.key(0), 4)
    model = [
        eqx.nn.Linear(i, o, use_bias=False, key=key)
        for (i, o), key in zip(LAYERS, keys, strict=True)
    ]

    def loss_fn(model, batch):
        x, y = batch
        for layer, dtype in zip(model, dtypes, strict=True):
            half = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), layer)
            x = jnp.tanh(jax.vmap(half)(x.astype(dtype)))
        return jnp.mean((x.astype(F32) - y) ** 2)

    step = eqx.filter_jit(jls.train_step(loss_fn, optimizer, **options))
    return step, model, optimizer.init(eqx.filter(model, eqx.is_array)), BATCH


LIBRARIES = [plain, linen, with_nnx, equinox]
# The dtypes of the four layers, the optimizer, `compute_dtype`, and the headline.
HALF_DONE = f"float16 in {100 * (WORK[0] + WORK[3]) / sum(WORK):.0f} % of the "
STEPS = {
    "float32": ([F32] * 4, moving, F32, NO_HALF),
    "half done": ([F16, F32, F32, F16], moving, F32, f"{HALF_DONE}multiplications"),
    "float16 by hand": ([F16] * 4, moving, F32, ""),
    "float16, but for the last layer": ([F16] * 3 + [F32], moving, F32, ""),
    "autocast": ([F32] * 4, moving, F16, ""),
    "bfloat16 under a scale": ([BF16] * 4, moving, F32, BFLOAT16),
    "bfloat16": ([BF16] * 4, skipping, F32, ""),
    "float32 under skip_nonfinite": ([F32] * 4, skipping, F32, ""),
    "autocast to bfloat16": ([F32] * 4, skipping, BF16, ""),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_shares_are_those_worked_out_by_hand(library, name):
    dtypes, optimizer, compute_dtype, headline = STEPS[name]
    seen = look(*library(dtypes, optimizer(), compute_dtype=compute_dtype))
    assert seen.headline == headline
    is_little = headline in (NO_HALF, STEPS["half done"][-1])
    assert seen.write.startswith("jls.train_step(..., compute_dtype=") == is_little
    if compute_dtype != F32:
        dtypes = [compute_dtype] * 4
    expected = {}
    for i, dtype in enumerate(dtypes):
        number, count = expected.get(dtype.dtype.name, (0, 0))
        expected[dtype.dtype.name] = (number + (3 if i else 2), count + WORK[i])
    found = {x: (n, share) for x, n, share in seen.precision.products}
    assert found == {
        x: (n, pytest.approx(count / sum(WORK))) for x, (n, count) in expected.items()
    }
    assert sum(share for _, _, share in seen.precision.products) == pytest.approx(1)
    assert {reason for _, reason in seen.precision.wide} <= {"by the model"}


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_under_a_static_scale_nothing_is_said(scale):
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.static(scale))
    assert look(*plain([F32] * 4, optimizer)).headline == ""


def test_a_scaler_without_a_wrapper_is_told_too():
    scaler = jls.dynamic()

    def step_with(dtypes):
        @jax.jit
        def step(params, state, batch):
            _, grads = jls.value_and_grad(loss_with(dtypes))(state, params, batch)
            finite = jls.all_finite(grads)
            new = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
            return jls.select(finite, new, params), scaler.adjust(state, finite)

        return look(step, PARAMS, scaler.init(), BATCH).headline

    assert step_with([F32] * 4) == NO_HALF
    assert step_with([F16] * 4) == ""


# Right programs in which something is float32 that no gradient goes through.


def cast(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def half_loss(params, batch, targets):
    x, _ = batch
    return jnp.mean((apply(params, x, [F16] * 4) - targets) ** 2)


def teacher_in_float32():
    teacher = [jnp.full(shape, 0.2) for shape in LAYERS]

    def loss_fn(params, batch):
        targets = sum(apply(teacher, batch[0], [F32] * 4) for _ in range(9))
        return half_loss(params, batch, targets)

    return step_of(loss_fn)


def target_network_in_float32():
    optimizer = moving()

    @jax.jit
    def step(params, opt_state, target, batch):
        def loss_fn(params):
            values = sum(apply(target, batch[0], [F32] * 4) for _ in range(9))
            return half_loss(params, batch, 1.0 + 0.9 * values)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        params, opt_state, _ = jls.apply_gradients(
            optimizer, grads, opt_state, params, value=loss
        )
        new = optax.incremental_update(params, target, 0.1)
        return params, opt_state, jls.select(opt_state.applied, new, target)

    target = [2 * w for w in PARAMS]
    return step, PARAMS, optimizer.init(PARAMS), target, BATCH


def rollout_in_float32():
    def gradients(opt_state, params, batch):
        def act(x, _):
            y = apply(params, x, [F32] * 4)
            return x + jnp.sum(y, 1, keepdims=True), x

        x, _ = lax.scan(act, batch[0], length=20)

        def loss_fn(params):
            return half_loss(params, (lax.stop_gradient(x), None), batch[1])

        return jls.value_and_grad(loss_fn)(opt_state, params)

    return step_by_hand(gradients)


def lora_on_a_frozen_base():
    base = [w.astype(F16) for w in PARAMS]
    adapters = [(jnp.zeros((i, 2)), jnp.ones((2, o))) for i, o in LAYERS]

    def loss_fn(adapters, batch):
        x, y = batch
        for w, (a, b) in zip(base, adapters, strict=True):
            x = x.astype(F16)
            x = jnp.tanh(x @ w + x @ a.astype(F16) @ b.astype(F16))
        return jnp.mean((x.astype(F32) - y) ** 2)

    return step_of(loss_fn, adapters)


def inference_in_a_while_loop():
    """A fixed point is found in float32, and is data to what trains."""

    def loss_fn(params, batch):
        def more(x):
            return jnp.tanh(x @ jnp.ones((8, 8)) / 16)

        x = lax.while_loop(lambda x: jnp.sum(x) > 1, more, batch[0])
        x = lax.stop_gradient(x)
        return half_loss(params, (x, None), batch[1])

    return step_of(loss_fn)


def remat(params, batch):
    x, y = batch
    for w in params:
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x.astype(F16), w.astype(F16))
    return jnp.mean((x.astype(F32) - y) ** 2)


def remat_with_masks(params, batch):
    """What is computed once more begins with numbers of the program."""
    w = params[1].astype(F16)

    @jax.checkpoint
    def attend(x):
        scores = jnp.where(jnp.eye(4, dtype=bool), x @ x.T, -1e4)
        return jax.nn.softmax(scores) @ x @ w

    x = jnp.tanh(batch[0].astype(F16) @ params[0].astype(F16))
    return jnp.mean(attend(attend(x)).astype(F32) ** 2)


@jax.custom_vjp
def layer(x, w):
    return jnp.tanh(x @ w)


def layer_bwd(saved, cotangent):
    x, w = saved
    hidden = jnp.tanh(x @ w)  # once more
    cotangent = cotangent * (1 - hidden**2)
    return cotangent @ w.T, x.T @ cotangent


layer.defvjp(lambda x, w: (layer(x, w), (x, w)), layer_bwd)


def custom_rule(params, batch):
    x, y = batch
    for w in params:
        x = layer(x.astype(F16), w.astype(F16))
    return jnp.mean((x.astype(F32) - y) ** 2)


def scan_over_layers(params, batch, dtype=F16):
    def body(x, w):
        return jnp.tanh(x @ w), None

    x = batch[0].astype(dtype) @ params[0].astype(dtype)
    x, _ = lax.scan(
        jax.checkpoint(body), x, jnp.stack([*params[1:3]] * 3).astype(dtype)
    )
    return jnp.mean(x.astype(F32) ** 2)


def convolutions(dtype):
    params = [jnp.full((3, 3, 2, 4), 0.1), jnp.full((3, 3, 1, 4), 0.1)]

    def loss_fn(params, batch):
        x = batch.astype(dtype)
        for kernel, stride, groups in zip(params, (2, 1), (1, 4), strict=True):
            x = lax.conv_general_dilated(
                x,
                kernel.astype(dtype),
                (stride, stride),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )
        return jnp.mean(x.astype(F32) ** 2)

    return step_of(loss_fn, params, jnp.ones((2, 8, 8, 2)))


def experts(dtype):
    params = jnp.full((3, 8, 2), 0.1)

    def loss_fn(params, batch):
        sizes = jnp.array([1, 1, 2], jnp.int32)
        x = lax.ragged_dot(batch[0].astype(dtype), params.astype(dtype), sizes)
        return jnp.mean((x.astype(F32) - batch[1]) ** 2)

    return step_of(loss_fn, params)


@jax.custom_vjp
def quantized(x, w):
    x8, w8 = (jnp.round(8 * v).astype(jnp.int8) for v in (x, w))
    y = lax.dot(x8, w8, preferred_element_type=jnp.int32)
    return y.astype(x.dtype) / 64


quantized.defvjp(lambda x, w: (quantized(x, w), (x, w)), layer_bwd)


def int8_forwards(params, batch):
    x, y = batch
    for w in params:
        x = quantized(x.astype(F16), w.astype(F16))
    return jnp.mean((x.astype(F32) - y) ** 2)


def penalty(params, batch, scale=1.0):
    """A gradient inside of the loss, scaled by a number of the user's or not."""

    def energy(x):
        return scale * jnp.sum(apply(params, x, [F16] * 4))

    slope = jax.grad(energy)(batch[0]) / scale
    return jnp.mean(apply(params, batch[0], [F16] * 4)) + jnp.mean(slope**2)


def scaled_penalty(checkpoint=lambda fun: fun):
    """A gradient inside of the loss, with the loss scale of its own state."""

    def gradients(opt_state, params, batch):
        def loss_fn(params, batch):
            @checkpoint
            def energy(x):
                return jnp.sum(apply(params, x, [F16] * 4))

            slope = jls.grad(energy)(opt_state, batch[0])
            return jnp.mean(energy(batch[0])) + jnp.mean(slope**2)

        return jls.value_and_grad(loss_fn)(opt_state, params, batch)

    return step_by_hand(gradients)


def weighed_by_a_forward_pass():
    """True gradients, times a number of a forward pass in float16."""

    def gradients(opt_state, params, batch):
        loss_fn = loss_with([F16] * 4)
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
        weight = 1 + loss_fn(params, batch)
        return loss, jax.tree.map(lambda g: g * weight, grads)

    return step_by_hand(gradients)


def elementwise_float16(params, batch):
    return jnp.mean((params[0].astype(F16) * 2).astype(F32) ** 2)


def foreign(params, batch):
    """What a foreign kernel computes in half is not known to be little."""
    x = apply(params, batch[0], [F32] * 4).astype(BF16)
    kind = jax.ShapeDtypeStruct(x.shape, F32)
    told = jax.pure_callback(lambda x: x.astype("float32"), kind, lax.stop_gradient(x))
    return jnp.mean(apply(params, batch[0], [F32] * 4) + told)


def accumulated():
    return step_of(loss_with([F16] * 4), micro_batches=2)


def clipped_and_averaged():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return step_of(
        loss_with([F16] * 4),
        optimizer=moving(optax.MultiSteps(inner, every_k_schedule=2)),
    )


RIGHT = {
    "teacher": teacher_in_float32,
    "target network": target_network_in_float32,
    "rollout": rollout_in_float32,
    "LoRA": lora_on_a_frozen_base,
    "while": inference_in_a_while_loop,
    "remat": lambda: step_of(remat),
    "remat with masks": lambda: step_of(remat_with_masks, PARAMS[:2]),
    "custom_vjp": lambda: step_of(custom_rule),
    "scan": lambda: step_of(scan_over_layers, PARAMS[:3]),
    "convolutions": lambda: convolutions(F16),
    "experts": lambda: experts(F16),
    "int8": lambda: step_of(int8_forwards),
    "penalty with a scale": scaled_penalty,
    "penalty with a scale, computed again": lambda: scaled_penalty(jax.checkpoint),
    "weighed": weighed_by_a_forward_pass,
    "elementwise": lambda: step_of(elementwise_float16, PARAMS[:1]),
    "foreign kernel": lambda: step_of(foreign),
    "micro-batches": accumulated,
    "MultiSteps": clipped_and_averaged,
    "autocast of remat": lambda: step_of(
        functools.partial(scan_over_layers, dtype=F32), PARAMS[:3], compute_dtype=F16
    ),
    "autocast of experts": lambda: autocast(experts(F32)),
}


OF_CORPUS = ["sac_in_one_dict", "muon", "ppo_with_shuffled_minibatches"]


@pytest.mark.parametrize("name", OF_CORPUS)
def test_a_temperature_and_an_optimizer_of_matrices_raise_nothing(name):
    step, args, *_ = (KINDS | PROGRAMS | RIGHT_STEPS)[name]()
    assert look(step, *args).headline == ""


def test_products_of_an_optimizer_are_not_the_model_s():
    step, args, *_ = RIGHT_STEPS["muon"]()
    found = [reason for _, reason in look(step, *args).precision.wide]
    assert set(found) == {"optimizer"}


def test_a_penalty_is_named_for_the_network_that_it_trains():
    step, args, *_ = KINDS["wgan_gp"]()
    headline = look(step, *args).headline
    assert headline.startswith(IN_LOSS)
    assert headline.endswith(" (opt_state/critic/scaler_state)")


def autocast(made):
    """The same loss, rewritten."""
    _, params, _, batch = made

    def loss_fn(params, batch):
        sizes = jnp.array([1, 1, 2], jnp.int32)
        x = lax.ragged_dot(batch[0], params, sizes)
        return jnp.mean((x - batch[1]) ** 2)

    return step_of(loss_fn, params, batch, compute_dtype=F16)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_in_float16_raises_nothing(name):
    assert look(*RIGHT[name]()).headline == ""


def student_in_float32():
    teacher = [w.astype(F16) for w in PARAMS]

    def loss_fn(params, batch):
        targets = apply(teacher, batch[0], [F16] * 4)
        return jnp.mean((apply(params, batch[0], [F32] * 4) - targets) ** 2)

    return step_of(loss_fn)


def lora_on_a_float32_base():
    adapters = [(jnp.zeros((i, 2)), jnp.ones((2, o))) for i, o in LAYERS]

    def loss_fn(adapters, batch):
        x, y = batch
        for w, (a, b) in zip(PARAMS, adapters, strict=True):
            half = x.astype(F16) @ a.astype(F16) @ b.astype(F16)
            x = jnp.tanh(x @ w + half.astype(F32))
        return jnp.mean((x - y) ** 2)

    return step_of(loss_fn, adapters)


INTEGERS = jnp.ones((2, 2), jnp.int32)


def without_a_scale():
    def gradients(opt_state, params, batch):
        return jax.value_and_grad(loss_with([F16] * 4))(params, batch)

    return step_by_hand(gradients)


def one_of_two_losses_without_a_scale():
    def gradients(opt_state, params, batch):
        loss_fn = loss_with([F16] * 4)
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
        more = jax.grad(lambda params: 0.1 * remat(params, batch))(params)
        return loss, jax.tree.map(jnp.add, grads, more)

    return step_by_hand(gradients)


def two_networks():
    """A generator in float16, and a critic that was forgotten."""
    optimizer = moving()

    @jax.jit
    def step(g, d, g_state, d_state, batch):
        def judge(g, d):
            made = apply(g, batch[0], [F16] * 4)
            return jnp.mean(jnp.tanh(made @ d))

        g_loss, g_grads = jls.value_and_grad(judge)(g_state, g, d)
        d_loss, d_grads = jls.value_and_grad(judge, argnums=1)(d_state, g, d)
        g, g_state, _ = jls.apply_gradients(
            optimizer, g_grads, g_state, g, value=g_loss
        )
        d, d_state, _ = jls.apply_gradients(
            optimizer, d_grads, d_state, d, value=d_loss
        )
        return g, d, g_state, d_state

    d = jnp.ones((2, 2))
    return step, PARAMS, d, optimizer.init(PARAMS), optimizer.init(d), BATCH


def in_rows(loss_fn, wrap=lambda body: body):
    """A scan over the examples; what does not depend on them, JAX moves out of it."""

    def scanned(params, batch):
        body = wrap(lambda total, row: (total + loss_fn(params, row), None))
        rows = jax.tree.map(lambda x: x[:, None], batch)
        return lax.scan(body, jnp.float32(0.0), rows)[0]

    return scanned


@jax.custom_vjp
def recomputes(params, batch):
    return loss_with([F16] * 4)(params, batch)


recomputes.defvjp(
    lambda params, batch: (recomputes(params, batch), (params, batch)),
    lambda saved, ct: (
        jax.vjp(lambda params: loss_with([F16] * 4)(params, saved[1]), saved[0])[1](ct)[
            0
        ],
        None,
    ),
)


AROUND = {
    "remat": jax.checkpoint,
    "remat twice": lambda fun: jax.checkpoint(jax.checkpoint(fun)),
    "jit and remat": lambda fun: jax.jit(jax.checkpoint(jax.jit(fun))),
    "scan": in_rows,
    "remat in a scan": lambda fun: in_rows(fun, jax.checkpoint),
    "cond": lambda fun: (
        lambda params, batch: lax.cond(
            batch[0].sum() > 0, fun, lambda params, _: jnp.sum(params[0]), params, batch
        )
    ),
    "map": lambda fun: (
        lambda params, batch: lax.map(
            lambda row: fun(params, jax.tree.map(lambda x: x[None], row)), batch
        ).mean()
    ),
    "vmap": lambda fun: (
        lambda params, batch: jax.vmap(
            lambda row: fun(params, jax.tree.map(lambda x: x[None], row))
        )(batch).mean()
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_penalty_is_found_inside_of(name):
    assert look(*step_of(AROUND[name](penalty))).headline.startswith(IN_LOSS)


def penalty_of_a_linear_end(params, batch):
    """Its first backward product is of parameters alone: JAX moves it out of a loop."""
    first = params[0].astype(F16)
    last = first[:1].T

    def energy(x):
        return jnp.sum((jnp.tanh(x.astype(F16) @ first) @ last).astype(F32))

    return energy(batch[0]) + jnp.mean(jax.grad(energy)(batch[0]) ** 2)


def test_a_penalty_is_found_where_a_part_of_it_is_moved_out_of_a_loop():
    step = step_of(in_rows(penalty_of_a_linear_end), PARAMS[:1])
    assert look(*step).headline.startswith(IN_LOSS)


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("loss_fn", [loss_with([F16] * 4), recomputes])
def test_a_loss_without_a_penalty_has_none_inside_of(name, loss_fn):
    assert look(*step_of(AROUND[name](loss_fn))).headline == ""


WRONG = {
    "student": (student_in_float32, NO_HALF_FOLLOWS),
    "LoRA": (lora_on_a_float32_base, "float16 in "),
    "convolutions": (lambda: convolutions(F32), NO_HALF),
    "experts": (lambda: experts(F32), NO_HALF),
    "scan": (
        lambda: step_of(functools.partial(scan_over_layers, dtype=F32), PARAMS[:3]),
        NO_HALF,
    ),
    "bfloat16 in a scan": (
        lambda: step_of(functools.partial(scan_over_layers, dtype=BF16), PARAMS[:3]),
        BFLOAT16,
    ),
    "no product": (
        lambda: step_of(lambda w, x: jnp.mean((w * x) ** 2), jnp.ones(3), jnp.ones(3)),
        NO_HALF,
    ),
    "not scaled": (without_a_scale, NOT_SCALED),
    "one loss of two": (one_of_two_losses_without_a_scale, NOT_SCALED),
    "penalty": (lambda: step_of(penalty), IN_LOSS),
    "penalty under autocast": (
        lambda: step_of(
            lambda params, batch: jnp.mean(
                jax.grad(lambda x: jnp.sum(apply(params, x, [F32] * 4)))(batch[0]) ** 2
            ),
            compute_dtype=F16,
        ),
        IN_LOSS,
    ),
    "critic": (two_networks, f"{NO_HALF_FOLLOWS} (d_state/scaler_state)"),
}


def test_what_has_no_product_is_not_told_to_cast_one():
    make, _ = WRONG["no product"]
    assert look(*make()).write == "jls.skip_nonfinite"


@pytest.mark.parametrize("name", WRONG)
def test_what_a_loss_scale_misses_is_in_the_headline(name):
    make, headline = WRONG[name]
    assert look(*make()).headline.startswith(headline)


def test_the_line_that_is_not_scaled_is_named():
    _, _, after = look(*without_a_scale()).headline.rpartition("/")
    file, line = after.split(":")
    assert file == "test_precision.py"
    source = Path(__file__).read_text().splitlines()[int(line) - 1]
    assert "x.astype(dtype) @ w.astype(dtype)" in source


# Why a product is wide.


def reasons(loss_fn, params=PARAMS[1], **options):
    precision = look(*step_of(loss_fn, params, jnp.ones((4, 16)), **options)).precision
    return [reason for _, reason in precision.wide]


def scoped(w, x):
    with jax.named_scope("router"):
        x = x @ w
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def test_keep_is_a_reason_forwards_and_backwards():
    assert reasons(scoped, compute_dtype=F16, keep="router") == ["keep"] * 2
    assert reasons(scoped, compute_dtype=F16) == []


def in_block(place):
    return place.function == "block"


def block(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def in_a_loop(w, x):
    return jnp.mean(lax.scan(lambda x, _: (block(w, x), ()), x, length=2)[0] ** 2)


@jax.custom_vjp
def ruled(w, x):
    return block(w, x)


ruled.defvjp(
    lambda w, x: (block(w, x), (w, x)),
    lambda saved, ct: (saved[1].T @ ct, block(saved[0], ct)),
)


WHOLE = {
    "block": lambda w, x: jnp.mean(block(w, x) ** 2),
    "jit": lambda w, x: jnp.mean(jax.jit(block)(w, x) ** 2),
    "scan": in_a_loop,
    "remat": lambda w, x: jnp.mean(jax.checkpoint(block)(w, x) ** 2),
    "rule": lambda w, x: jnp.mean(ruled(w, x) ** 2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_keep_is_the_reason_where_it_finds_all_products(name):
    step = step_of(
        WHOLE[name], PARAMS[1], jnp.ones((4, 16)), compute_dtype=F16, keep=in_block
    )
    seen = look(*step)
    assert {reason for _, reason in seen.precision.wide} == {"keep"}
    assert (
        seen.headline == "keep leaves no product in half: the loss scale does nothing"
    )
    assert seen.write == "a narrower keep; to stay in float32, jls.skip_nonfinite"
    plain = step_of(WHOLE[name], PARAMS[1], jnp.ones((4, 16)))
    for run in (
        lambda step, *args: step(*args),
        lambda step, *args: step.__wrapped__(*args),
    ):
        assert_identical(run(*step), run(*plain))


def test_what_keep_does_not_find_has_its_own_reason_where_nothing_is_half():
    def loss_fn(w, x):
        y = jnp.matmul(x, w, precision="highest") + block(w, x)
        return jnp.mean(y) + jnp.vdot(y, y)

    found = reasons(loss_fn, compute_dtype=F16, keep=in_block)
    assert set(found) == {"keep", "precision=", "inner product", "outer product"}


def decays(w, x):
    """Mamba's: the outer product of the steps and of a matrix."""
    step = jax.nn.softplus(x @ w)
    decay = jnp.exp(jnp.einsum("le,es->les", step, -jnp.exp(w[:, :4])))
    return jnp.mean((decay.sum(-1) @ w) ** 2)


def only_an_outer_product(w, x):
    decay = jnp.exp(jnp.einsum("le,es->les", x * w[0], -jnp.exp(w[:, :4])))
    return jnp.mean(decay**2)


def repeated(loss_fn):
    def repeats(w, x):
        return lax.scan(lambda sum, _: (sum + loss_fn(w, x), ()), 0.0, length=2)[0]

    return repeats


@pytest.mark.cover(1)
@pytest.mark.parametrize("wrapped", [lambda f: f, jax.checkpoint, jax.jit, repeated])
@pytest.mark.parametrize("loss_fn", [decays, only_an_outer_product])
def test_an_outer_product_and_its_derivative_have_one_reason(loss_fn, wrapped):
    found = reasons(wrapped(loss_fn), compute_dtype=F16)
    assert set(found) <= {"outer product"}


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (lambda w, x: jnp.mean(x @ w), {"by the model"}),
        # The derivative of an inner product is an outer one.
        (
            lambda w, x: jnp.vdot(x @ w, x),
            {"by the model", "inner product", "outer product"},
        ),
        (
            lambda w, x: jnp.mean((x[0, :, None] @ x[:1, :]) @ w),
            {"by the model", "outer product"},
        ),
        (lambda w, x: jnp.mean(jnp.matmul(x, w, precision="highest")), {"precision="}),
        (lambda w, x: jnp.mean(w * lax.dot(INTEGERS, INTEGERS)[0, 0]), {"integer"}),
        (
            lambda w, x: jnp.mean(
                w * lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x.T @ x, x)[0]
            ),
            {"while"},
        ),
    ],
)
def test_each_reason(loss_fn, expected):
    def stopped(w, x):
        return loss_fn(w, lax.stop_gradient(x))

    assert set(reasons(stopped)) == expected
    step = step_of(stopped, PARAMS[1], jnp.ones((4, 16)))
    text = in_words(look(*step).precision)
    assert ("; one round of each `while` counts" in text) == ("while" in expected)


def test_float64_is_a_reason():
    with jax.enable_x64(True):
        w, x = jnp.ones((16, 16), jnp.float64), jnp.ones((4, 16), jnp.float64)
        seen = look(*step_of(lambda w, x: jnp.mean(x @ w), w, x))
    assert {reason for _, reason in seen.precision.wide} == {"float64"}
    assert [row[0] for row in seen.precision.products] == ["float64"]
    assert seen.headline == NO_HALF


def test_precision_is_at_most_five_lines_of_80_columns():
    def loss_fn(w, x):
        y = x @ w
        y += jnp.matmul(x, w, precision="highest") + jnp.vdot(x, x)
        y += (x[0, :, None] @ x[:1, :]) @ w[:, 0] @ x.T[:, :1]
        y += lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x.T @ x, x)[:, :1]
        y += lax.dot(INTEGERS, INTEGERS)[0, 0]
        return jnp.mean(y)

    step = step_of(lambda w, x: loss_fn(w, lax.stop_gradient(x)), PARAMS[1], X)
    precision = look(*step).precision
    assert len({reason for _, reason in precision.wide}) == 6
    lines = str(precision).splitlines()
    assert len(lines) == 5
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("float32 in ")
    assert lines[-1].startswith("wide too: ")
    assert str(jls.types.Precision()) == "no matrix products."


X = jnp.ones((4, 16))
