"""The promises of the library, a test each, jitted and eager."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

BATCHES = [1.0, np.inf, 2.0, np.nan, np.nan, 3.0, 0.5]  # the loss is finite at 1 and 2


def make(inner=None, **kwargs):
    kwargs = {"growth_interval": 2} | kwargs
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    return jls.loss_scaled(inner, jls.dynamic(8.0, **kwargs))


def make_params():
    return {"w": jnp.array([0.5, -1.5]), "b": jnp.float32(-0.0)}


def loss_fn(params, x):
    """Finite at x = inf, where its gradient is not."""
    return jnp.sum(jnp.tanh(params["w"] * x)) + params["b"] ** 2


def make_step(optimizer):
    def step(params, state, x):
        loss, grads = jls.value_and_grad(loss_fn)(state, params, x)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    return step


def run(step, params, state, batches=BATCHES):
    for x in batches:
        params, state, _ = step(params, state, jnp.float32(x))
    return params, state


def test_promise_01_a_visible_gradient_is_a_true_gradient(jit_or_eager):
    params, x = make_params(), jnp.float32(0.3)
    expected = jax.grad(loss_fn)(params, x)
    for scale in (2.0**-3, 8.0, 2.0**20):
        state = jls.static(scale).init()
        grads = jit_or_eager(jls.grad(loss_fn))(state, params, x)
        chex.assert_trees_all_equal(grads, expected)
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    grads = jit_or_eager(jls.grad(lambda p, x: loss_fn(p, x).astype(jnp.float32)))(
        jls.static(8.0).init(), half, jnp.float16(0.3)
    )
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


def test_promise_01_the_wrapper_never_unscales(jit_or_eager):
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0))
    params = jnp.ones(2)
    grads = jnp.array([0.25, -3.0])
    updates, _ = jit_or_eager(optimizer.update)(grads, optimizer.init(params), params)
    assert np.array_equal(updates, -grads)


def test_promise_02_a_scale_that_changes_never_touches_older_gradients(jit_or_eager):
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0, growth_interval=1))
    params = jnp.float32(1.0)
    grad = jit_or_eager(jls.grad(lambda p: 3.0 * p))
    state, grads, scales = optimizer.init(params), [], []
    for _ in range(4):
        scales.append(float(jls.loss_scale(state)))
        grads.append(float(grad(state, params)))
        _, state = jit_or_eager(optimizer.update)(jnp.float32(1.0), state, params)
    assert scales == [8.0, 16.0, 32.0, 64.0]
    assert grads == [3.0] * 4


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_promise_03_a_bad_step_is_never_committed_however_many_there_are(bad):
    optimizer = make()
    params, state = make_params(), optimizer.init(make_params())
    grads = {"w": jnp.array([1.0, bad], jnp.float32), "b": jnp.array(1.0)}

    def step(carry, _):
        updates, state = optimizer.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), state.applied

    (new, state), applied = jax.lax.scan(step, (params, state), length=1000)
    assert not applied.any()
    assert_identical(new, params)
    assert (state.steps, state.skips, state.consecutive_skips) == (1000, 1000, 1000)
    assert jls.loss_scale(state) == 1.0


def test_promise_03_a_bad_loss_is_never_committed(jit_or_eager):
    optimizer, params = make(), make_params()
    state, grads = optimizer.init(params), make_params()
    updates, new = jit_or_eager(optimizer.update)(grads, state, params, value=jnp.nan)
    assert not new.applied
    assert_identical(optax.apply_updates(params, updates), params)
    assert_identical(new.scaler_state, state.scaler_state)
    assert new.nonfinite_losses == 1


def test_promise_04_a_skipped_step_is_atomic_and_bitwise(jit_or_eager):
    inner = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.ema(0.9),
        optax.MultiSteps(optax.adamw(optax.linear_schedule(0.1, 0.0, 9)), 2)
        .gradient_transformation(),
    )  # fmt: skip
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0, growth_interval=2))
    params = make_params()
    step = jit_or_eager(make_step(optimizer))
    params, state = run(step, params, optimizer.init(params), [1.0, 2.0, 0.5])
    for bad in (np.nan, np.inf, np.inf):
        new_params, new_state = run(step, params, state, [bad])
        assert_identical(new_params, params)
        assert_identical(new_state.inner_state, state.inner_state)
    assert not new_state.applied
    assert np.signbit(params["b"]) == np.signbit(new_params["b"])


def test_promise_04_the_updates_of_a_skipped_step_are_minus_zero(jit_or_eager):
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0))
    params = {"w": jnp.array([-0.0, 0.0, 1.0]), "z": jnp.array([complex(-0.0, -0.0)])}
    grads = {"w": jnp.array([jnp.nan, 0.0, 1.0]), "z": jnp.array([1.0 + 2.0j])}
    updates, _ = jit_or_eager(optimizer.update)(grads, optimizer.init(params), params)
    for leaf in (updates["w"], updates["z"].real, updates["z"].imag):
        assert np.all(leaf == 0)
        assert np.signbit(leaf).all()
    assert_identical(optax.apply_updates(params, updates), params)


def test_promise_05_one_decision_over_a_named_axis():
    # The multi-device forms are in tests/devices; vmap binds an axis as they do.
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0), axis_name="i")
    params = jnp.float32(1.0)

    def step(grad):
        updates, state = optimizer.update(grad, optimizer.init(params), params)
        return updates, state

    updates, states = jax.vmap(step, axis_name="i")(jnp.array([1.0, jnp.inf, 2.0]))
    assert not states.applied.any()
    assert updates.tolist() == [0.0] * 3
    assert states.scaler_state.loss_scale.tolist() == [4.0] * 3
    updates, _ = jax.vmap(step, axis_name="i")(jnp.array([1.0, 3.0, 2.0]))
    assert updates.tolist() == [-1.0, -3.0, -2.0]  # never averaged


def test_promise_06_one_trace_and_no_transfer_over_50_steps():
    optimizer = make()
    step = make_step(optimizer)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def counted(params, state, x):
        return step(params, state, x)

    batches = [jnp.float32(BATCHES[i % len(BATCHES)]) for i in range(50)]
    params, state = make_params(), optimizer.init(make_params())
    with jax.transfer_guard("disallow"):
        for x in batches:
            params, state, _ = counted(params, state, x)
            jls.metrics(state)
    assert state.steps == 50
    assert 0 < state.skips < 50


def test_promise_06_scan_while_loop_vmap_and_donation_agree_with_a_loop():
    optimizer = make()
    step, batches = make_step(optimizer), jnp.array(BATCHES, jnp.float32)
    start = (make_params(), optimizer.init(make_params()))
    expected = run(jax.jit(step), *start)

    def scan_step(carry, x):
        return step(*carry, x)[:2], None

    scanned, _ = jax.jit(lambda *c: jax.lax.scan(scan_step, c, batches))(*start)

    def while_step(carry):
        i, *rest = carry
        return i + 1, *step(*rest, batches[i])[:2]

    def still(carry):
        return carry[0] < len(batches)

    looped = jax.jit(lambda *c: jax.lax.while_loop(still, while_step, (0, *c)))(*start)
    members = jax.tree.map(lambda x: jnp.stack([x, x]), start)
    vmapped = run(jax.vmap(step, (0, 0, None)), *members)
    donated = jax.tree.map(jnp.copy, start)
    donated = run(jax.jit(step, donate_argnums=(0, 1)), *donated)
    compiled = jax.jit(step).lower(*start, batches[0]).compile()
    for result in (scanned, looped[1:], donated, run(compiled, *start)):
        chex.assert_trees_all_close(result, expected, rtol=1e-6)
    for member in range(2):
        result = jax.tree.map(lambda x, m=member: x[m], vmapped)
        chex.assert_trees_all_close(result, expected, rtol=1e-6)


def test_promise_06_export_keeps_the_step_and_knows_the_states_of_jls():
    optimizer = jls.loss_scaled(optax.sgd(0.5, momentum=0.9), jls.dynamic(8.0))
    step = jax.jit(make_step(optimizer))
    args = (make_params(), optimizer.init(make_params()), jnp.float32(2.0))
    exported = jax.export.export(step)(*args)
    assert_identical(exported.call(*args), step(*args))
    adjust = jax.export.export(jax.jit(jls.dynamic(8.0).adjust))
    state = jls.dynamic(8.0).init()
    again = jax.export.deserialize(adjust(state, np.bool_(False)).serialize())
    assert again.call(state, np.bool_(False)) == (4.0, 0, 0)


def test_promise_06_every_leaf_of_a_state_has_a_buffer_of_its_own():
    def init(params):  # as optax.contrib.schedule_free does: the state is the params
        zero = jnp.zeros(())
        return {"z": params, "again": params, "zero": (zero, zero), "n": np.zeros(2)}

    inner = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    shared = jnp.zeros((), jnp.int32)
    shares = jls.types.LossScaler(
        lambda: jls.types.ScalerState(jnp.float32(8.0), shared, shared), lambda s, f: s
    )
    params = make_params()
    for make_state in (
        jls.loss_scaled(inner, shares).init,
        jax.jit(jls.loss_scaled(inner, shares).init),
    ):
        state = make_state(params)
        value = jnp.float32(4.0)
        leaves = [
            *jax.tree.leaves((state, params, shared, value)),
            jls.loss_scale(jls.set_loss_scale(state, value)),
        ]
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
def test_promise_06_the_state_is_strongly_typed_and_a_fixed_point_of_update():
    optimizer = make()
    params = {"h": jnp.ones(2, jnp.bfloat16), "w": jnp.ones(2)}
    state = optimizer.init(params)
    updates, new = jax.eval_shape(optimizer.update, params, state, params)
    chex.assert_trees_all_equal_structs(new, state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, False)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
def test_promise_07_every_leaf_kind_is_safe(jit_or_eager):
    float0 = np.zeros(2, jax.dtypes.float0)
    key = jax.random.key(0)

    def grads(bad):
        return {
            "w": jnp.array([1.0, bad], jnp.float32),
            "z": jnp.array([1.0 + 1.0j]),
            "h": jnp.ones(2, jnp.bfloat16),
            "f8": jnp.ones(2, jnp.float8_e4m3fn),
            "n": None,
            "i": jnp.int32(3),
            "b": jnp.asarray(True),
            "k": key,
            "m": optax.MaskedNode(),
        }

    def update(updates, state, params=None):
        assert updates["f"] is jnp.tanh
        assert updates["0"] is float0
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    state = optimizer.init(grads(1.0))

    def step(grads, state):  # static leaves cannot pass through jit's arguments
        return optimizer.update(grads | {"f": jnp.tanh, "0": float0}, state)[0]

    def arrays_only(grads, state):
        updates = step(grads, state)
        assert updates.pop("f") is jnp.tanh
        assert updates.pop("0") is float0
        return updates

    good = jit_or_eager(arrays_only)(grads(2.0), state)
    assert good["w"].tolist() == [1.0, 2.0]
    assert (good["h"].dtype, good["i"].item(), good["b"].item()) == ("float32", 3, True)
    assert (good["f8"].dtype, good["f8"].tolist()) == ("float32", [1.0, 1.0])
    bad = jit_or_eager(arrays_only)(grads(np.nan), state)
    assert bad["w"].tolist() == [0.0, 0.0]
    assert (bad["i"].item(), bad["b"].item(), bad["n"]) == (0, False, None)
    assert bad["m"] == optax.MaskedNode()
    assert jnp.array_equal(jax.random.key_data(bad["k"]), jax.random.key_data(key))


def test_promise_07_complex_and_float64_are_never_narrowed():
    with jax.enable_x64(True):
        optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0))
        params = {"d": jnp.float64(0.0), "z": jnp.complex128(0.0)}
        grads = {"d": jnp.float64(1e300), "z": jnp.complex128(1e300 + 1j)}
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        assert state.applied
        assert (updates["d"], updates["z"]) == (-1e300, -1e300 - 1j)
        assert state.scaler_state.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("tree", [{}, None, (), {"m": optax.MaskedNode(), "n": None}])
def test_promise_07_an_empty_tree_is_finite(tree):
    optimizer = jls.loss_scaled(optax.adam(0.1), jls.dynamic(8.0))
    updates, state = optimizer.update(tree, optimizer.init(tree), tree)
    assert updates == tree
    assert state.applied


@pytest.mark.parametrize("exponent", [1, 10, 24])
def test_promise_08_powers_of_two_give_the_same_bits(exponent):
    optimizer = jls.loss_scaled(optax.adamw(0.1), jls.static(1.0))
    step = jax.jit(make_step(optimizer))
    params, batches = make_params(), [0.3, 0.7, 0.2, 1.1, 0.4]
    at_one = optimizer.init(params)
    scaled = jls.set_loss_scale(at_one, 2.0**exponent)
    expected, _ = run(step, params, at_one, batches)
    assert_identical(run(step, params, scaled, batches)[0], expected)


def test_promise_09_the_scale_stays_within_its_bounds():
    scaler = jls.dynamic(8.0, growth_interval=1, min_scale=2.0, max_scale=64.0)
    rng = np.random.default_rng(0)

    def step(state, flag):
        new = scaler.adjust(state, flag)
        return new, (state.loss_scale, new.loss_scale)

    flags = rng.random(2000) < np.repeat([0.2, 0.8], 1000)
    _, (old, new) = jax.lax.scan(step, scaler.init(), jnp.asarray(flags))
    assert new.min() == 2.0
    assert new.max() == 64.0
    assert np.all((new <= old)[~flags])


def test_promise_10_resume_from_bytes_pickle_and_numpy_is_exact():
    optimizer = make()
    step, params = jax.jit(make_step(optimizer)), make_params()
    saved = run(step, params, optimizer.init(params), BATCHES[:3])
    expected = run(step, *saved, BATCHES[3:])
    fresh = (params, optimizer.init(params))
    for restored in (
        serialization.from_bytes(fresh, serialization.to_bytes(saved)),
        pickle.loads(pickle.dumps(saved)),
        jax.tree.map(np.asarray, saved),
    ):
        assert_identical(run(step, *restored, BATCHES[3:]), expected)


def test_promise_11_the_reported_loss_is_the_true_one_on_overflow_steps_too(
    jit_or_eager,
):
    optimizer, params = jls.loss_scaled(optax.sgd(0.5)), jnp.float32(3.0)
    state = jls.set_loss_scale(optimizer.init(params), 2.0**126)

    def step(params, state):
        loss, grads = jls.value_and_grad(lambda p: 100 * p)(state, params)
        return loss, optimizer.update(grads, state, params, value=loss)[1]

    loss, new_state = jit_or_eager(step)(params, state)
    assert loss == 300.0
    assert not new_state.applied
    assert new_state.nonfinite_losses == 0
    assert jls.loss_scale(new_state) == 2.0**125


def test_promise_12_nothing_is_silent():
    optimizer = make()
    _, state = run(
        jax.jit(make_step(optimizer)), make_params(), optimizer.init(make_params())
    )
    metrics = jax.device_get(jls.metrics(state))
    expected = {
        "loss_scale": 8.0,
        "applied": True,
        "steps": 7,
        "skips": 3,
        "consecutive_skips": 0,
        "nonfinite_losses": 2,
        "nonfinite_updates": 0,
        "last_skip_reason": 2,
    }
    assert {name: metrics[name] for name in expected} == expected


def test_promise_12_counters_stop_at_the_int32_maximum():
    optimizer, params = make(), make_params()
    largest = jnp.int32(2**31 - 1)
    names = "steps", "skips", "consecutive_skips", "nonfinite_losses"
    state = optimizer.init(params)._replace(**dict.fromkeys(names, largest))
    _, state = optimizer.update(params, state, params, value=jnp.nan)
    assert [getattr(state, name) for name in names] == [2**31 - 1] * 4
