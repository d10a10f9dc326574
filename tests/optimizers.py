"""Every optimizer that optax and optax.contrib export, inside `jls.loss_scaled`.

The tables say how each one is called. What cannot work is in a table as well, with the
reason, and `test_every_exported_transformation_is_listed` lets none be forgotten. One
optimizer of each kind is tried by tests/test_optimizers.py, each by tests/corpus.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from shared import bits

import jls

MARKS = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings(
        "ignore:.*parameters are b?float16:UserWarning",
        # optax's own old names and arguments are tested as well.
        "ignore:.(optimistic_adam|seed). is deprecated:DeprecationWarning",
        "ignore:inject_stateful_hyperparams is deprecated:DeprecationWarning",
        # optax.lbfgs writes float32 gradients into a memory of the parameters' dtype.
        "ignore:scatter inputs have incompatible types:FutureWarning",
    ),
]

# A letter is a step: all Finite, one Inf, all NaN.
PATTERN = "FIFNFF"
SCALES = [8.0, 4.0, 4.0, 2.0, 2.0, 4.0]
MEMBERS = [PATTERN, "FFFFFF", "NFFIFF"]


def called(names, **kwargs):
    return dict.fromkeys(names.split(), kwargs)


# By name: the arguments of the factory, or something that makes the transformation.
# Steps are large enough to move a bfloat16 parameter.
OPTIMIZERS = {
    **called(
        "acprop adabelief adagrad adam adamax adamaxw adamw adan ademamix adopt "
        "amsgrad fromage galore lamb lion madgrad momo momo_adam muon nadam nadamw "
        "novograd optimistic_adam optimistic_adam_v2 optimistic_gradient_descent radam "
        "rmsprop rprop schedule_free_adamw schedule_free_sgd sgd sign_sgd signum "
        "simplified_ademamix sm3 sophia yogi",
        learning_rate=0.1,
    ),
    **called("adadelta adafactor dowg", learning_rate=1.0),
    **called("cocob lbfgs polyak_sgd"),
    **called("dadapt_adamw prodigy", estim_lr0=0.1, eps=1e-4),
    "dog": {"init_step": ("heuristic", 0.1)},
    "lars": {"learning_rate": 10.0},
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1), s_init=0.1),
    "noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), contrib.reduce_on_plateau(patience=1, cooldown=1)
    ),
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(0.1)
    ),
}

# The parts that optimizers are made of, in float32 only.
TRANSFORMS = {
    **called(
        "add_decayed_weights apply_every centralize hutchinson_estimator_diag_hessian "
        "identity keep_params_nonnegative normalize normalize_by_update_norm "
        "scale_by_acprop scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan "
        "scale_by_ademamix scale_by_adopt scale_by_amsgrad scale_by_belief "
        "scale_by_cocob scale_by_factored_rms "
        "scale_by_galore scale_by_lbfgs scale_by_lion scale_by_novograd "
        "scale_by_optimistic_gradient scale_by_param_block_norm "
        "scale_by_param_block_rms scale_by_polyak scale_by_radam scale_by_rms "
        "scale_by_rss scale_by_sign scale_by_simplified_ademamix scale_by_sm3 "
        "scale_by_stddev scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans"
    ),
    **called(
        "scale_by_learning_rate scale_by_madgrad scale_by_rprop", learning_rate=0.1
    ),
    **called("ema trace", decay=0.5),
    "adaptive_grad_clip": {"clipping": 0.5},
    "add_noise": {"eta": 0.1, "gamma": 0.5, "key": 0},
    "apply_if_finite": {"inner": optax.adam(0.1), "max_consecutive_errors": 2},
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "clip": {"max_delta": 1.0},
    "clip_by_block_rms": {"threshold": 0.5},
    "clip_by_global_norm": {"max_norm": 1.0},
    **called(
        "conditionally_mask conditionally_transform",
        inner=optax.adam(0.1),
        should_transform_fn=lambda step: step % 2 == 0,
    ),
    "flatten": {"inner": optax.adam(0.1)},
    "freeze": {"mask": {"b": True, "s": False, "w": False}},
    **{
        name: lambda wrap=name: getattr(optax, wrap)(optax.adam)(learning_rate=0.1)
        for name in ("inject_hyperparams", "inject_stateful_hyperparams")
    },
    "masked": {"inner": optax.adam(0.1), "mask": {"b": True, "s": False, "w": True}},
    "named_chain": lambda: optax.named_chain(
        ("clip", optax.clip(1.0)), ("adam", optax.adam(0.1))
    ),
    **called(
        "multi_transform partition",
        transforms={"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)},
        param_labels={"b": "sgd", "s": "adam", "w": "adam"},
    ),
    "scale": {"step_size": -0.1},
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4)
    ),
    # optax 0.2.6 takes the root of the gradient there.
    "scale_by_distance_over_gradients": lambda: optax.chain(
        optax.stateless(lambda updates, _: jax.tree.map(jnp.abs, updates)),
        optax.scale_by_distance_over_gradients(),
    ),
    "scale_by_muon": lambda: contrib.scale_by_muon(
        weight_dimension_numbers={k: contrib.MuonDimensionNumbers() for k in "bsw"}
    ),
    "scale_by_schedule": {"step_size_fn": optax.linear_schedule(-0.1, -0.2, 4)},
    "scale_by_zoom_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_zoom_linesearch(4)
    ),
    "selective_transform": {
        "optimizer": optax.adam(0.1),
        "freeze_mask": {"b": True, "s": False, "w": False},
    },
    "snapshot": {"measure_name": "mean", "measure": lambda updates: updates["s"]},
    "stateless": {"f": lambda updates, params: jax.tree.map(jnp.negative, updates)},
    "stateless_with_tree_map": {"f": lambda update, param: -update * param},
    "with_extra_args_support": {"tx": optax.adam(0.1)},
}

# Those that take more than `value`, the loss, or not even that.
EXTRAS = {
    "hutchinson_estimator_diag_hessian": ["value", "obj_fn"],
    "lbfgs": ["value", "grad", "value_fn"],
    "sam": [],  # its update takes `grad_fn` and no other extra argument
    "scale_by_backtracking_linesearch": ["value", "grad", "value_fn"],
    "scale_by_zoom_linesearch": ["value", "grad", "value_fn"],
    "sophia": ["value", "obj_fn"],
}

# Those that are not for parameters of every shape: sm3 has no scalars.
_NO_SCALARS = {"b": (3,), "s": (1,), "w": (4, 3)}
SHAPES = {
    "scale_by_distance_over_gradients": _NO_SCALARS,
    "scale_by_muon": {"b": (3, 2), "s": (1, 1), "w": (4, 3)},
    "scale_by_sm3": _NO_SCALARS,
    "sm3": _NO_SCALARS,
}

# By name: why parameters narrower than float32 are a TypeError. True gradients are
# float32, and such gradients are a TypeError without jls too. Keep float32 weights.
CANNOT_NARROW = {
    "galore": "the branches of its lax.cond take the dtypes of gradients and state",
    "mechanize": "its lax.clamp wants the gradients' dtype to be that of the state",
    "novograd": "the branches of its lax.cond take the dtypes of gradients and state",
}

# By name: why, as optax sets them up, hardly a float16 step comes out finite. The table
# above gives them constants that float16 can hold.
NONFINITE_IN_FLOAT16 = {
    "dadapt_adamw": "estim_lr0=1e-6 times a moment and eps=1e-8 are 0 there: 0 / 0",
    "prodigy": "estim_lr0=1e-6 times a bias correction is 0 there: 0 / 0",
}

# Those that take a gradient per example, and make one update of them.
PER_EXAMPLE = {
    "differentially_private_aggregate": lambda: (
        contrib.differentially_private_aggregate(9.0, 0.1, key=0)
    ),
    "dpsgd": lambda: contrib.dpsgd(0.1, 9.0, 0.1, seed=0),
}

# By name: the transformation, the message of the ValueError, and the reason.
CANNOT = {
    "lookahead": (
        lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
        "inner must not contain optax.lookahead, which",
        "its gradients are those of a half of its parameters; wrap its fast optimizer",
    ),
    "measure_with_ema": (
        lambda: optax.measure_with_ema(optax.tree.norm, 0.9),
        "optimizer's update must keep its structure",
        "it returns a measurement in place of updates; it is made for optax.monitor",
    ),
    "monitor": (
        lambda: optax.monitor({"norm": optax.tree.norm}),
        "optimizer's state must keep its structure",
        "its state gains entries in the first update; jax.lax.scan refuses it too",
    ),
}

# By name: what in it might see a NaN, so that it gets ones in place of bad gradients.
# All others get them as they are: else a skip would cost a pass over them.
MIGHT_SEE_NAN = {
    "galore": "svd",
    "lbfgs": "a line search",
    "scale_by_backtracking_linesearch": "a line search",
    "scale_by_galore": "svd",
    "scale_by_zoom_linesearch": "a line search",
}

NOT_TRANSFORMATIONS = {
    "bias_correction": "averages",
    "init_empty_state": "is half of one",
    "matrix_inverse_pth_root": "is linear algebra",
    "schedule_free_eval_params": "reads a state",
    "sigmoid_binary_cross_entropy": "is a loss",
    "update_infinity_moment": "averages",
    "update_moment": "averages",
    "update_moment_per_elem_norm": "averages",
}


def exported(table):
    """Those of `table` that the installed optax has."""
    return [name for name in table if name in {*dir(optax), *dir(contrib)}]


def make(name):
    how = {**OPTIMIZERS, **TRANSFORMS}[name]
    if callable(how):
        return how()
    factory = getattr(optax, name, None) or getattr(contrib, name)
    return factory(**how)


def initial_params(name, dtype):
    shapes = SHAPES.get(name, {"b": (3,), "s": (), "w": (4, 3)})
    if name == "split_real_and_imaginary" and dtype == "float32":
        dtype = "complex64"
    sizes = {key: int(np.prod(shape)) for key, shape in shapes.items()}
    return {
        key: jnp.linspace(-1.75, 2.5, sizes[key] + 1)[1:].reshape(shape).astype(dtype)
        for key, shape in shapes.items()
    }


def loss_fn(params):
    wide = jax.tree.map(
        lambda p: p.astype(jnp.promote_types(p.dtype, jnp.float32)), params
    )
    errors = [wide["b"] - 0.25, 0.5 * (wide["s"] + 1.0), wide["w"] + 0.5]
    return sum(jnp.sum(jnp.square(jnp.abs(e))) for e in errors) / 2


def poison(params, letter):
    """What to add to the gradients."""
    clean = {
        k: np.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))
        for k, p in params.items()
    }
    if letter == "I":
        clean["w"].flat[1] = np.inf
    if letter == "N":
        clean = {key: np.full_like(g, np.nan) for key, g in clean.items()}
    return clean


def extra_arguments(name, value, grads):
    every = {"value": value, "grad": grads, "value_fn": loss_fn, "obj_fn": loss_fn}
    return {key: every[key] for key in EXTRAS.get(name, ["value"])}


def make_step(name, traces=None):
    optimizer = jls.loss_scaled(make(name), jls.dynamic(8.0, growth_interval=2))

    def step(carry, poisons):
        if traces is not None:
            traces.append(name)
        params, state = carry
        value, grads = jls.value_and_grad(loss_fn)(state, params)
        grads = jax.tree.map(jnp.add, grads, poisons)
        extra = extra_arguments(name, value, grads)
        updates, state = optimizer.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, state, updates)

    return optimizer, step


def to_numpy(tree):
    def leaf_to_numpy(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return jax.tree.map(leaf_to_numpy, tree)


def signature(tree):
    return jax.tree.map(
        lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree
    )


def assert_skipped_and_stepped(history, pattern):
    """`history` starts with the initial state, whose updates are not looked at."""
    for (old_params, old, _), (params, new, updates), letter in zip(
        history, history[1:], pattern, strict=False
    ):
        assert new.applied == (letter == "F")
        if letter != "F":
            assert bits(params) == bits(old_params)
            assert bits(new.inner_state) == bits(old.inner_state)
            for update in jax.tree.leaves(updates):
                parts = np.atleast_1d(update).view(np.float32)
                assert np.all((parts == 0) & np.signbit(parts))
    final_params, final, _ = history[-1]
    assert all(np.isfinite(p).all() for p in final_params.values())
    assert final.steps == len(pattern)
    assert final.skips == len(pattern) - pattern.count("F")
    assert final.consecutive_skips == final.nonfinite_losses == 0


@functools.cache
def run_jitted(name, dtype):
    """The history of a run of one jitted step, and whether its optimizer is blind."""
    traces = []
    optimizer, step = make_step(name, traces)
    step = jax.jit(step)
    params = initial_params(name, dtype)
    carry = params, optimizer.init(params)
    before = signature(carry)
    history = [to_numpy((*carry, params))]
    # The form for those that are not blind has no rule for derivatives.
    program = step.trace(carry, poison(params, "F")).jaxpr
    is_blind = "custom_jvp_call" in {e.primitive.name for e in program.eqns}
    for letter in PATTERN:
        carry, out = step(carry, poison(params, letter))
        history.append(to_numpy(out))
    assert signature(carry) == before
    assert len(traces) == 1
    assert_infs_are_scalars(history[0][1], history[1][1])
    return history, is_blind


def assert_infs_are_scalars(*states):
    """What `jls.health` takes for granted: elsewhere in a state an inf is a fault."""
    for leaf in jax.tree.leaves([state.inner_state for state in states]):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            assert np.isfinite(leaf).all() or (leaf.shape == () and leaf == np.inf)


def assert_skips_whole_steps(name, dtype):
    """Of one jitted step: what it rolls back, its scales, and whether it is blind."""
    if dtype != "float32" and name in CANNOT_NARROW:
        with pytest.raises(TypeError, match=r"equal output types|the same dtypes"):
            run_jitted(name, dtype)
        return
    history, is_blind = run_jitted(name, dtype)
    assert is_blind == (name not in MIGHT_SEE_NAN)
    assert_skipped_and_stepped(history, PATTERN)
    if name in TRANSFORMS:
        return
    assert [state.scaler_state.loss_scale for _, state, _ in history[1:]] == SCALES
    assert bits(history[-1][0]) != bits(history[0][0])
    if dtype != "float32":
        coarse = 0.25 if dtype == "bfloat16" else 0.1
        for key, param in run_jitted(name, "float32")[0][-1][0].items():
            np.testing.assert_allclose(
                history[-1][0][key].astype(param.dtype), param, rtol=0, atol=coarse
            )


def assert_steps_like_the_optimizer_alone(name):
    alone = optax.with_extra_args_support(make(name))

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss_fn)(params)
        extra = extra_arguments(name, value, grads)
        updates, state = alone.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params = initial_params(name, "float32")
    state = alone.init(params)
    for _ in range(PATTERN.count("F")):
        params, state = step(params, state)
    final_params, final, _ = run_jitted(name, "float32")[0][-1]
    for actual, expected in zip(
        jax.tree.leaves((final_params, final.inner_state)),
        jax.tree.leaves(to_numpy((params, state))),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def assert_members_skip_on_their_own(name, dtype):
    traces = []
    optimizer, step = make_step(name, traces)
    params = initial_params(name, dtype)
    members = [jax.tree.map(lambda p, k=k: p * (1 + k), params) for k in range(3)]
    stacked = jax.tree.map(lambda *p: jnp.stack(p), *members)
    rows = [
        jax.tree.map(lambda *p: np.stack(p), *(poison(params, x) for x in letters))
        for letters in zip(*MEMBERS, strict=True)
    ]
    poisons = jax.tree.map(lambda *p: np.stack(p), *rows)

    @jax.jit
    def run(params, poisons):
        carry = params, jax.vmap(optimizer.init)(params)
        return carry, *jax.lax.scan(jax.vmap(step), carry, poisons)

    start, _, out = to_numpy(run(stacked, poisons))
    assert len(traces) == 1
    for k, pattern in enumerate(MEMBERS):
        first = jax.tree.map(lambda x, k=k: x[k], start)
        rest = [jax.tree.map(lambda x, k=k, t=t: x[t, k], out) for t in range(6)]
        assert_skipped_and_stepped([(*first, first[0]), *rest], pattern)
        assert bits(rest[-1][0]) != bits(first[0])
    if name == "galore":
        return  # singular vectors of these gradients depend on how the CPU rounds
    alone = run_jitted(name, dtype)[0][-1][0]
    close = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}[dtype]
    for key, param in out[0].items():
        wide = np.result_type(param.dtype, np.float32)
        np.testing.assert_allclose(
            param[-1, 0].astype(wide), alone[key].astype(wide), rtol=close, atol=close
        )
