"""What is rolled back where it is computed is what a select at the end rolls back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export, lax
from jax.experimental import pallas
from jax.extend.core import Primitive
from shared import NAN, ONE, W, assert_identical

import jls
from jls._program.jaxprs import opened, programs_in, varying_axes
from jls._rollback import prepare, roll_back_unless

OLD = [
    jnp.array([1.0, -0.0, 3.0]),
    jnp.array([4.0, 5.0, 6.0]),
    jnp.int32(7),
]


def moments(mean, other, count):
    """The update, here `other`, is computed from what is kept."""
    mean = 0.5 * mean + 0.25 * other
    count = count + 1
    return [mean, mean / jnp.sqrt(count), count]


def swapped(mean, other, count):
    return [other, mean, count]


def same_twice(mean, other, count):
    new = mean * other
    return [new, new, count - 1]


def old_and_new(mean, other, count):
    """One leaf becomes what another was, and that one changes."""
    return [other, other * 2, count]


def constants(mean, other, count):
    return [jnp.zeros(3), other * jnp.array([1.0, 2.0, 3.0]), jnp.int32(5)]


def in_a_branch(mean, other, count):
    mean, other = lax.cond(
        count > 5, lambda: (mean + other, other), lambda: (mean, mean - other)
    )
    return [mean, other + mean, count]


def in_a_loop(mean, other, count):
    def body(carry):
        return carry[0] + 1, carry[1] * 0.5 + other

    steps, mean = lax.while_loop(lambda carry: carry[0] < 3, body, (0, mean))
    total, rows = lax.scan(lambda c, x: (c + x, c * x), jnp.float32(1.0), mean)
    return [rows, other + total, count + steps]


def in_a_jit(mean, other, count):
    return jax.jit(moments)(mean, other, count)


def not_a_number(mean, other, count):
    return [mean / 0, other * jnp.nan, count * 0 - 1]


@jax.custom_jvp
def squared(x):
    return x * x


@squared.defjvp
def _(primals, tangents):
    return squared(*primals), 2 * primals[0] * tangents[0]


def by_own_rule(mean, other, count):
    return [squared(mean), squared(mean) + other, count]


STEPS = [
    moments,
    swapped,
    same_twice,
    old_and_new,
    constants,
    in_a_branch,
    in_a_loop,
    in_a_jit,
    not_a_number,
    by_own_rule,
]


def guarded(step):
    def run(flag, *old):
        prepared = prepare(lambda _: step(*old), [], is_traced=True)
        return roll_back_unless(flag, flag, prepared, list(old))

    return run


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_step_is_applied_whole_or_rolled_back(step, flag):
    expected = jax.jit(step)(*OLD) if flag else list(OLD)
    for run in (jax.jit(guarded(step)), jax.jit(guarded(step), donate_argnums=(1, 2))):
        assert_identical(run(jnp.asarray(flag), *map(jnp.copy, OLD)), expected)
    eager = guarded(step)(jnp.asarray(flag), *OLD)
    assert_identical(eager, step(*OLD) if flag else list(OLD))


@pytest.mark.parametrize("step", STEPS)
def test_each_member_of_a_vmap_decides_for_itself(step):
    flags = jnp.array([True, False, True])
    many = jax.tree.map(lambda x: jnp.stack([x, x + 1, x - 1]), OLD)
    results = jax.jit(jax.vmap(guarded(step)))(flags, *many)
    expected = jax.jit(jax.vmap(step))(*many)
    for i, flag in enumerate(flags):
        of_one = [x[i] for x in (expected if flag else many)]
        assert_identical([x[i] for x in results], of_one)


def test_a_step_is_traced_once_for_all_platforms():
    """Once for each would take JAX twice as long for a large model."""
    program = jax.make_jaxpr(guarded(moments))(jnp.asarray(True), *OLD)
    assert str(program).count(" sqrt ") == 1


def equations_in(program):
    for equation in opened(program).jaxpr.eqns:
        yield equation
        for inner in programs_in(equation):
            yield from equations_in(inner)


def test_what_differs_between_devices_is_known_to_differ():
    """A new value that is the same on all devices, where each has kept its own."""

    def step(mean, other):
        mean = 2 * other
        return [mean, other + mean]

    def run(flag, *old):
        prepared = prepare(lambda _: step(*old), [], is_traced=True)
        return roll_back_unless(flag, flag, prepared, list(old))

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), "d")
    each, same = jax.P("d"), jax.P()
    specs = {"in_specs": (same, each, same), "out_specs": [each, same]}
    run = jax.shard_map(run, mesh=mesh, **specs)
    program = jax.make_jaxpr(run)(jnp.asarray(True), *OLD[:2])
    for equation in equations_in(program):
        if equation.primitive.name in ("add", "mul", "select_n"):
            atoms = [*equation.invars, *equation.outvars]
            assert len({varying_axes(atom) for atom in atoms}) == 1


def test_derivatives_go_through():
    def loss(flag, mean, step):
        return jnp.sum(step(flag, mean, *OLD[1:])[0] ** 2)

    for step in (moments, in_a_branch, by_own_rule):
        for flag in (True, False):
            ours = jax.jit(jax.grad(lambda m, f=flag, s=step: loss(f, m, guarded(s))))
            bare = jax.grad(
                lambda m, f=flag, s=step: jnp.sum((s(m, *OLD[1:])[0] if f else m) ** 2)
            )
            np.testing.assert_allclose(ours(OLD[0]), bare(OLD[0]), rtol=1e-6)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("bad", [0, 1])
def test_derivatives_through_a_skipped_step_are_finite(bad):
    """Adam divides by 0 when it has not stepped yet: 0 times that would be NaN."""

    def trained(learning_rate, b2):
        optimizer = jls.loss_scaled(
            optax.adam(learning_rate, b2=b2), jls.dynamic(8.0), check_updates=False
        )
        params = jnp.array([1.0, 2.0])
        state = optimizer.init(params)
        for i in range(3):
            grads = jnp.full(2, jnp.nan) if i == bad else params
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return jnp.sum(params**2)

    eager = jax.grad(trained, argnums=(0, 1))(0.1, 0.75)
    assert all(np.isfinite(eager))
    jitted = jax.jit(jax.grad(trained, argnums=(0, 1)))(0.1, 0.75)
    np.testing.assert_allclose(jitted, eager, rtol=1e-3)


@pytest.mark.standard_promotion
def test_a_loop_until_convergence_never_sees_nan():
    limit = 1000

    def halved(updates, state, params=None):
        def body(carry):
            return carry[0] / 2, carry[1] + 1

        def goes_on(carry):
            return ~(jnp.max(jnp.abs(carry[0])) < 0.5) & (carry[1] < limit)

        updates, count = lax.while_loop(goes_on, body, (updates, 0))
        return updates, jnp.maximum(state, count)

    inner = optax.chain(
        optax.scale_by_adam(),
        optax.GradientTransformation(lambda params: jnp.int32(0), halved),
    )
    counts = []

    def counting(updates, state, params=None):
        updates, state = inner.update(updates, state, params)
        jax.debug.callback(lambda x: counts.append(int(x)), state[1])
        return updates, state

    for update in (inner.update, counting):
        counted = optax.GradientTransformation(inner.init, update)
        optimizer = jls.loss_scaled(counted, jls.dynamic(8.0), check_updates=False)
        state = optimizer.init(jnp.ones(2))
        step = jax.jit(optimizer.update)
        _, state = step(jnp.full(2, jnp.nan), state, jnp.ones(2))
        _, state = step(jnp.ones(2), state, jnp.ones(2))
        assert 0 < state.inner_state[1] < limit
    jax.effects_barrier()
    assert len(counts) == 2
    assert max(counts) < limit  # what the skipped step has seen, too


def test_keys_and_narrow_numbers_are_leaves_like_others():
    old = [jax.random.key(3), jnp.bfloat16(2.0), jnp.float8_e5m2(0.5), jnp.bool_(True)]

    def step(key, wide, narrow, flag):
        return [jax.random.split(key)[0], wide * 3, narrow * narrow, ~flag]

    for flag in (True, False):
        new = jax.jit(guarded(step))(jnp.asarray(flag), *old)
        expected = step(*old) if flag else old
        data = [[jax.random.key_data(x[0]), *x[1:]] for x in (new, expected)]
        assert_identical(*data)


def test_effects_happen_once():
    seen = []

    def step(mean, other, count):
        jax.debug.callback(lambda x: seen.append(int(x)), count)
        return moments(mean, other, count)

    jax.block_until_ready(jax.jit(guarded(step))(jnp.asarray(True), *OLD))
    jax.effects_barrier()
    assert seen == [7]


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_host_function_never_sees_a_state_that_is_not_kept(is_nested, jit_or_eager):
    def host(mean):
        if not np.isfinite(mean).all():
            raise ValueError("the host saw what is not kept")
        return np.asarray(mean)

    def ask(mean):
        shape = jax.ShapeDtypeStruct(mean.shape, mean.dtype)
        return jax.pure_callback(host, shape, mean)

    ask = jax.jit(ask) if is_nested else ask

    def step(mean, other, count):
        count = count + 1
        return [mean, ask(other / jnp.sqrt(count)), count]

    old = [*OLD[:2], jnp.int32(0)]
    for flag in (False, True):
        new = jit_or_eager(guarded(step))(jnp.asarray(flag), *old)
        assert_identical(new, jax.jit(step)(*old) if flag else old)


def loop(x):
    return lax.while_loop(lambda x: jnp.any(x > 1), lambda x: x / 2, x)


def host_function(x):
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def foreign(x):
    return jax.ffi.ffi_call("unknown", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def exported(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return export.export(jax.jit(jnp.negative))(shape).call(x)


def pallas_kernel(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = -x_ref[...]

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(kernel, out, interpret=True)(x)


def made_by_another_library(x):
    primitive = Primitive("sin_of_theirs")
    primitive.def_abstract_eval(lambda x: x)
    return primitive.bind(x)


SEES_NAN = [
    loop,
    host_function,
    foreign,
    exported,
    pallas_kernel,
    made_by_another_library,
    jnp.linalg.eigvalsh,
    lambda x: lax.igamma(x, x),
]
BLIND = [jnp.sin, jax.nn.softmax, jnp.sort, lambda x: x @ x, jax.nn.relu]
AROUND = {
    "bare": lambda f: f,
    "jit": lambda f: jax.jit(jax.jit(f)),
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, lambda x: x, x),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_only_what_is_known_to_be_blind_gets_a_nan(around):
    """Anything else might not end: it gets ones, and is selected at the end."""

    def gets_nan(function):
        def step(mean, other, count):
            square = jnp.outer(other, other)
            return [mean, around(function)(square)[0] + other, count]

        jaxpr = jax.make_jaxpr(guarded(step))(jnp.asarray(True), *OLD)
        return any(e.primitive.name == "custom_jvp_call" for e in jaxpr.eqns)

    def rows(function):
        return lambda x: jnp.broadcast_to(function(x).ravel()[: len(x)], x.shape)

    assert [f for f in SEES_NAN if gets_nan(rows(f))] == []
    assert [f for f in BLIND if not gets_nan(rows(f))] == []


@pytest.mark.standard_promotion
@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adamw(0.1)])
def test_no_tracer_outlives_its_trace(inner):
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    with jax.checking_leaks():
        state = optimizer.init(W)
        _, state = jax.jit(optimizer.update)(ONE, state, W)
        jax.jit(jax.grad(lambda w: optimizer.update(w, state, W)[0].sum()))(W)
    assert state.applied


def test_the_state_changes_in_place_and_is_read_once(on_cpu):
    """What all this is for."""
    args = [jnp.asarray(True), *jnp.ones((3, 1 << 16))]

    def step(flag, grads, mean, param):
        mean = 0.5 * mean + grads
        return [mean, param - 0.125 * mean / (jnp.abs(mean) + 1)]

    def ours(flag, *old):
        prepared = prepare(lambda _: step(flag, *old), [], is_traced=True)
        return roll_back_unless(flag, flag, prepared, list(old[1:]))

    def at_the_end(flag, *old):
        new = step(flag, *old)
        return [jnp.where(flag, x, y) for x, y in zip(new, old[1:], strict=True)]

    def figures(run):
        compiled = jax.jit(run, donate_argnums=(2, 3)).lower(*args).compile()
        cost = compiled.cost_analysis()["bytes accessed"]
        return np.array([cost, compiled.memory_analysis().temp_size_in_bytes])

    assert np.all(figures(ours) <= figures(step) + 1024)
    assert np.all(figures(at_the_end) > figures(step) + 1024)


# What the optimizer does not hold -----------------------------------------------------


def test_select_rolls_back_what_the_optimizer_does_not_hold():
    """flax F10: batch_stats of a NaN step stayed, and `step` advanced."""
    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(8.0))

    @jax.jit
    def step(carry, x):
        w, state, rest = carry
        grads = jls.grad(lambda w: jnp.sum(w * x))(state, w)
        updates, state = optimizer.update(grads, state, w)
        new = {"mean": 0.9 * rest["mean"] + 0.1 * x, "step": rest["step"] + 1}
        rest = jls.select(state.applied, new, rest)
        return optax.apply_updates(w, updates), state, rest

    carry = W, optimizer.init(W), {"mean": jnp.zeros(2), "step": 0}
    clean, bad = step(carry, ONE), step(step(carry, NAN), ONE)
    assert_identical((clean[0], clean[2]), (bad[0], bad[2]))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear, self.norm = (
            nnx.Linear(2, 2, rngs=rngs),
            nnx.BatchNorm(2, rngs=rngs),
        )

    def __call__(self, x):
        return self.norm(self.linear(x))


@pytest.mark.standard_promotion
def test_nnx_batch_norm_can_be_rolled_back():
    """flax R5, R14: an inf input stayed in the mean of BatchNorm."""
    model = Net()
    tx = jls.loss_scaled(optax.adam(0.5), jls.dynamic(8.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, x):
        return jnp.mean(model(x) ** 3)

    @nnx.jit
    def step(model, optimizer, x):
        old = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        differentiate = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
        _, grads = differentiate(optimizer, model, x)
        optimizer.update(model, grads)
        new = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        applied = jls.metrics(optimizer)["applied"]
        nnx.update(model, jls.select(applied, new, old))

    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model)))
    x = jnp.array([[1.0, 2.0], [3.0, 5.0]])
    step(model, optimizer, x.at[0, 0].set(jnp.inf))
    assert_identical(nnx.to_pure_dict(nnx.state(model)), before)
    assert jls.loss_scale(optimizer) == 4.0
    step(model, optimizer, x)
    assert jls.metrics(optimizer)["applied"]
    assert jls.all_finite(nnx.to_pure_dict(nnx.state(model)))
    assert jnp.any(model.norm.mean.get_value() != before["norm"]["mean"])
