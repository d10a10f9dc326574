"""`shard_map` and `pmap` over eight devices: one decision for all of them.

Device `d` sees the input d, so that the mean of the gradients is 3.5 and their sum 28.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from shared import assert_identical, bits
from test_faults import test_promises_hold_on_all_devices_under_shard_map  # noqa: F401

import jls

P = PartitionSpec
DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES, ("d",))
GRID = Mesh(DEVICES.reshape(2, 4), ("a", "b"))
X = jnp.arange(8.0)
BAD = X.at[3].set(jnp.inf)
checks = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
meshes = pytest.mark.parametrize(
    ("mesh", "axis_name"),
    [(MESH, "d"), (GRID, ("a", "b"))],
    ids=["name", "tuple"],
)


def sharded(mesh, in_specs, out_specs, check_vma=True):
    return functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
    )


def make(axis_name=None):
    inner = optax.sgd(0.5, momentum=0.5)
    return jls.loss_scaled(inner, jls.dynamic(8.0), axis_name=axis_name)


def specs_of(state, split):
    """Everything replicated but the arrays with an axis, which are split."""

    def spec(leaf):  # the scalars and the flags are one for all
        return P() if jnp.ndim(leaf) == 0 or leaf.dtype == jnp.bool_ else split

    return jax.tree.map(spec, state)


def test_there_are_eight_devices():
    assert jax.device_count() == 8


@meshes
@checks
def test_replicas_skip_together_and_agree(mesh, axis_name, check_vma):
    """S1, S2, S4, R12: shards decided apart, their scales and params drifted."""
    optimizer = make(axis_name)
    split = P(axis_name)

    @jax.jit
    @sharded(mesh, (P(), P(), split), (P(), P(), split), check_vma)
    def step(w, state, x):
        def loss_fn(w):
            loss = jnp.sum(w * x)
            return lax.pmean(loss, axis_name) if check_vma else loss

        grads = jls.grad(loss_fn)(state, w)
        if not check_vma:
            grads = lax.pmean(grads, axis_name)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state, jls.loss_scale(state)[None]

    w = jnp.float32(1.0)
    new, state, scales = step(w, optimizer.init(w), BAD)
    assert new == w
    assert state.skips == 1
    assert scales.tolist() == [4.0] * 8
    new, state, _ = step(new, state, X)
    assert new == 1.0 - 0.5 * 3.5
    for copies in (leaf.addressable_shards for leaf in jax.tree.leaves(state)):
        assert len({np.asarray(copy.data).tobytes() for copy in copies}) == 1


@meshes
@checks
def test_sharded_params_keep_their_own_gradients(mesh, axis_name, check_vma):
    """S1, S5, R12: pmean averaged the gradients of different parameters."""
    optimizer = make(axis_name)
    split = P(axis_name)
    w = jnp.ones(8)
    specs = specs_of(optimizer.init(w), split)

    @jax.jit
    @sharded(mesh, (split, specs, split), (split, specs), check_vma)
    def step(w, state, x):
        grads = jls.grad(lambda w: jnp.sum(w * x))(state, w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    new, state = step(w, optimizer.init(w), BAD)
    assert new.tolist() == w.tolist()
    assert jax.tree.leaves(state.inner_state)[0].tolist() == [0.0] * 8
    assert jls.loss_scale(state) == 4.0
    new, state = step(new, state, X)
    assert new.tolist() == (1.0 - 0.5 * X).tolist()


@pytest.mark.parametrize("check_updates", [False, True])
def test_updates_that_are_bad_on_one_shard_are_skipped_on_all(check_updates):
    """S1: the second check has to agree as well."""
    inner = optax.stateless(lambda updates, params: updates / params)
    optimizer = jls.loss_scaled(
        inner, jls.dynamic(8.0), axis_name="d", check_updates=check_updates
    )
    w = jnp.ones(8).at[3].set(0.0)
    specs = specs_of(optimizer.init(w), P("d"))

    @jax.jit
    @sharded(MESH, (P("d"), specs), (P("d"), specs))
    def step(w, state):
        updates, state = optimizer.update(jnp.ones(1), state, w)
        return updates, state

    updates, state = step(w, optimizer.init(w))
    assert state.applied == (not check_updates)
    assert jnp.isfinite(updates).tolist() == [check_updates or d != 3 for d in range(8)]


@checks
def test_gradients_are_what_jax_makes_of_them(check_vma):
    """flax S4d, S7: the pmean of axis_name was a no-op, gradients 8 times too big."""
    state = jls.dynamic(8.0).init()

    def gradient(differentiate, per_device):
        @jax.jit
        @sharded(MESH, (P(), P("d")), P("d"), check_vma)
        def apply(w, x):
            return differentiate(lambda w: jnp.sum(w * x) / per_device)(w)[None]

        return apply(jnp.float32(1.0), X).tolist()

    for per_device in (1.0, 8.0):
        ours = gradient(lambda f: lambda w: jls.grad(f)(state, w), per_device)
        assert ours == gradient(jax.grad, per_device)
    if check_vma:
        assert ours == [3.5] * 8


def test_loss_stays_local_and_a_bad_one_counts_everywhere():
    """flax S4b: the loss was not averaged, so its inf stayed on one device."""
    optimizer = make("d")

    @jax.jit
    @sharded(MESH, (P(), P(), P("d")), (P(), P(), P("d")))
    def step(w, state, x):
        loss, grads = jls.value_and_grad(lambda w: jnp.sum(w + x))(state, w)
        updates, state = optimizer.update(grads, state, w, value=loss)
        return optax.apply_updates(w, updates), state, loss[None]

    w = jnp.float32(1.0)
    new, state, losses = step(w, optimizer.init(w), BAD)
    assert losses.tolist() == (1.0 + BAD).tolist()
    assert new == w
    assert state.nonfinite_losses == 1
    assert jls.loss_scale(state) == 8.0


def test_sum_of_gradients_over_devices_is_in_float32():
    """S6: a psum of scaled float16 gradients overflowed."""
    state = jls.dynamic(2.0**4).init()

    @jax.jit
    @sharded(MESH, (P("d"), P("d")), P())
    def total(w, x):
        def loss_fn(w):
            return jnp.sum((w * x).astype(jnp.float32))

        return lax.psum(jls.grad(loss_fn)(state, w), "d")

    half = jnp.float16
    assert total(jnp.ones(8, half), jnp.full(8, 2000.0, half)).tolist() == [16000.0]
    assert total(jnp.ones(8, half), jnp.full(8, 4000.0, half)).tolist() == [32000.0]


@meshes
def test_all_finite_is_one_flag_for_all_devices(mesh, axis_name):
    """S8: a flag of sharded data cannot leave shard_map as replicated."""
    flag = jax.jit(
        sharded(mesh, P(axis_name), P())(lambda x: jls.all_finite(x, axis_name))
    )
    assert flag(X)
    assert not flag(BAD)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_plain_jit_on_sharded_arrays_needs_no_axis_name(axis_type):
    """S3: a control that worked."""
    optimizer = make()
    mesh = Mesh(DEVICES, ("d",), axis_types=(axis_type,))
    split, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    w = jax.device_put(jnp.ones(8), split)

    @jax.jit
    def step(w, state, x):
        grads = jls.grad(lambda w: jnp.sum(w * x))(state, w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    with jax.set_mesh(mesh):
        new, state = step(w, optimizer.init(w), jax.device_put(BAD, split))
        assert new.tolist() == w.tolist()
        assert new.sharding == split
        assert state.applied.sharding.is_equivalent_to(whole, 0)
        new, state = step(new, state, jax.device_put(X, split))
    assert new.tolist() == (1.0 - 0.5 * X).tolist()
    assert jls.loss_scale(state) == 4.0


@pytest.mark.parametrize("axis_name", ["d", None])
def test_run_scans_inside_shard_map(axis_name):
    """R12: the carry stays replicated; averaged gradients need no axis_name."""
    optimizer = make(axis_name)

    @jax.jit
    @sharded(MESH, (P(), P(), P(None, "d")), (P(), P()))
    def train(w, state, xs):
        def step(carry, x):
            w, state = carry
            grads = jls.grad(lambda w: lax.pmean(jnp.sum(w * x), "d"))(state, w)
            updates, state = optimizer.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), None

        return lax.scan(step, (w, state), xs)[0]

    w = jnp.float32(1.0)
    new, state = train(w, optimizer.init(w), jnp.stack([BAD, X]))
    assert new == 1.0 - 0.5 * 3.5
    assert state.skips == 1


def test_decision_that_is_not_reduced_cannot_leave_shard_map():
    """S1, S8: without axis_name each device would have a scale of its own."""
    optimizer = make()
    w = jnp.ones(8)
    specs = specs_of(optimizer.init(w), P("d"))

    @jax.jit
    @sharded(MESH, (P("d"), specs), specs)
    def step(w, state):
        return optimizer.update(w, state, w)[1]

    with pytest.raises(ValueError, match=r"got None, but they differ over \['d'\]"):
        step(w, optimizer.init(w))


def test_forgotten_axis_name_is_explained():
    """S1: gradients that differ, and a state that does not."""
    optimizer = make()
    w = jnp.float32(1.0)

    @jax.jit
    @sharded(MESH, (P(), P("d")), P("d"))
    def step(w, x):
        return optimizer.update(jnp.sum(x), optimizer.init(w), w)[0][None]

    with pytest.raises(ValueError, match=r"got None, but they differ over \['d'\]"):
        step(w, X)


def test_a_run_on_a_mesh_compiles_once():
    """Scalars of the state that start on one device come back on the mesh."""
    home = NamedSharding(MESH, P("d"))
    w = jax.device_put(jnp.ones(8), home)
    optimizer = make()
    step = jax.jit(lambda w, state: optimizer.update(w, state, w))
    state = optimizer.init(w)
    for _ in range(3):
        _, state = step(w, state)
    step(w, jls.set_loss_scale(state, jax.device_put(jnp.float32(4.0))))
    assert step._cache_size() == 1


def test_pmap_replicas_agree():
    """flax S4: pmap with axis_name."""
    optimizer = make("d")

    @functools.partial(jax.pmap, axis_name="d", in_axes=(None, None, 0))
    def step(w, state, x):
        grads = lax.pmean(jls.grad(lambda w: jnp.sum(w * x))(state, w), "d")
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.float32(1.0)
    for x, new, scale in ((BAD, 1.0, 4.0), (X, 1.0 - 0.5 * 3.5, 8.0)):
        news, states = step(w, optimizer.init(w), x)
        assert news.tolist() == [new] * 8
        assert states.scaler_state.loss_scale.tolist() == [scale] * 8


# jls.train_step: device d sees four examples of value d, the last of which may be bad.

ROWS = jnp.repeat(X, 4)[:, None] * jnp.ones(8)
OVERFLOW = ROWS.at[13, 0].set(2.0**15)  # in float16, on its way back; on device 3
layouts = pytest.mark.parametrize("layout", ["replicated", "fsdp"])


def half_loss(w, x):
    return jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32))


def mean_over(axis_name):
    """The user's mean, for where JAX does not add up: first inside the optimizer."""
    return optax.stateless(lambda grads, params: lax.pmean(grads, axis_name))


@pytest.mark.parametrize("check_updates", [False, True])
@meshes
@checks
def test_mean_may_come_first_inside(mesh, axis_name, check_vma, check_updates):
    """The updates of a skip are -0.0 on all devices, as the parameters are one."""
    inner = optax.chain(mean_over(axis_name), optax.sgd(0.5))
    optimizer = jls.loss_scaled(
        inner, jls.dynamic(8.0), axis_name=axis_name, check_updates=check_updates
    )

    @jax.jit
    @sharded(mesh, (P(), P(), P(axis_name)), (P(), P()), check_vma)
    def step(w, state, x):
        return optimizer.update(x, state, w)

    w = jnp.ones(1)
    updates, state = step(w, optimizer.init(w), BAD)
    assert_identical(updates, jnp.array([-0.0]))
    assert state.skips == 1
    updates, state = step(w, state, X)
    assert updates.tolist() == [-0.5 * 3.5]


def train_state(axis_name, mean=None):
    inner = optax.sgd(0.5, momentum=0.5)
    if mean:
        inner = optax.chain(mean, inner)
    scaler = jls.dynamic(64.0, growth_interval=3)
    tx = jls.loss_scaled(inner, scaler, axis_name=axis_name)
    state = TrainState.create(apply_fn=None, params=jnp.ones(8), tx=tx)
    return state.replace(step=jnp.int32(0))


def reports_of_all(step):
    def with_reports(state, x):
        state, report = step(state, x)
        return state, jax.tree.map(lambda leaf: leaf[None], report)

    return with_reports


@meshes
@checks
@layouts
def test_train_step_takes_one_decision(mesh, axis_name, check_vma, layout):
    """Where the user's mean belongs: in the loss, if JAX adds up the gradients."""
    is_split = layout == "fsdp"
    split = P(axis_name)

    def loss_fn(state, x):
        w = state.params
        loss = half_loss(lax.all_gather(w, axis_name, tiled=True) if is_split else w, x)
        if check_vma:
            return lax.pmean(loss, axis_name)
        return loss / 8 if is_split else loss  # the gather's transpose adds up

    by_hand = not (check_vma or is_split)
    state = train_state(axis_name, mean_over(axis_name) if by_hand else None)
    step = jls.train_step(loss_fn, micro_batches=2 if mesh is MESH else 1)
    specs = specs_of(state, split if is_split else P())
    step = jax.jit(
        sharded(mesh, (specs, split), (specs, split), check_vma)(reports_of_all(step))
    )
    momentum, expected = 0.0, 1.0
    for x, scale in (ROWS, 64.0), (OVERFLOW, 32.0), (ROWS, 32.0), (ROWS, 32.0):
        before = bits((state.params, state.opt_state.inner_state))
        state, reports = step(state, x)
        after = bits((state.params, state.opt_state.inner_state))
        is_bad = x is OVERFLOW
        assert (before == after) == is_bad
        assert reports.skipped.tolist() == [is_bad] * 8
        assert reports.loss_scale.tolist() == [scale] * 8
        assert jnp.all(jnp.isfinite(reports.loss))
        if not is_bad:
            momentum = 0.5 * momentum + 3.5
            expected -= 0.5 * momentum
        assert state.params.tolist() == [expected] * 8
    assert state.opt_state.skips == 1
    for copies in (x.addressable_shards for x in jax.tree.leaves(state.opt_state)):
        if copies[0].data.shape == ():
            assert len({np.asarray(copy.data).tobytes() for copy in copies}) == 1


@pytest.mark.parametrize("is_deep", [False, True], ids=["outermost", "in a chain"])
@checks
def test_micro_batch_is_dropped_by_all_devices_or_by_none(check_vma, is_deep):
    """One dropped its own alone, or its flag could not leave the loop."""
    odd = jnp.arange(32) % 2 == 1  # examples of the second micro-batch
    x = jnp.where(odd[:, None], 2 * ROWS, ROWS)

    def loss_fn(state, x):
        loss = half_loss(state.params, x)
        return lax.pmean(loss, "d") if check_vma else loss

    state = train_state("d", None if check_vma else mean_over("d"))
    if is_deep:
        tx = optax.chain(state.tx, optax.scale(1.0))
        state = state.replace(tx=tx, opt_state=tx.init(state.params))
    step = jls.train_step(loss_fn, micro_batches=2, drop="micro_batch")
    specs = specs_of(state, P())
    step = jax.jit(
        sharded(MESH, (specs, P("d")), (specs, P("d")), check_vma)(reports_of_all(step))
    )
    state, reports = step(state, x.at[13, 0].set(2.0**15))
    assert reports.dropped.tolist() == [1] * 8
    assert not reports.skipped.any()
    assert reports.loss_scale.tolist() == [32.0] * 8
    assert state.params.tolist() == [1.0 - 0.5 * 3.5] * 8
    state, reports = step(state, x.at[13].set(jnp.inf))
    assert reports.dropped.tolist() == [1] * 8
    assert reports.loss_scale.tolist() == [32.0] * 8  # no scale mends a bad loss
    assert jnp.all(jnp.isfinite(reports.loss))


def test_axes_that_stay_automatic_need_no_name():
    """shard_map over one axis of two: jit decides for the other."""
    optimizer = make("a")
    w = jax.device_put(jnp.ones(8), NamedSharding(GRID, P("b")))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=GRID,
        in_specs=(P(), P(), P("a")),
        out_specs=(P(), P()),
        axis_names={"a"},
    )
    def step(w, state, x):
        grads = jls.grad(lambda w: lax.pmean(jnp.sum(w * x[0]), "a"))(state, w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    x = jax.device_put(jnp.stack([X, X + 2]), NamedSharding(GRID, P("a", "b")))
    new, state = step(w, optimizer.init(w), x.at[1, 5].set(jnp.inf))
    assert new.tolist() == w.tolist()
    assert jls.loss_scale(state) == 4.0
    new, state = step(new, state, x)
    assert new.tolist() == (1.0 - 0.5 * (X + 1)).tolist()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_train_step_under_pmap(micro_batches):
    """The mean is inside the optimizer; each device holds a state of its own."""
    state = train_state("d", mean_over("d"))
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), state)

    def loss_fn(state, x):
        return half_loss(state.params, x)

    step = jax.pmap(jls.train_step(loss_fn, micro_batches=micro_batches), axis_name="d")
    for x, scale in (OVERFLOW, 32.0), (ROWS, 32.0), (OVERFLOW, 16.0):
        before = bits((state.params, state.opt_state.inner_state))
        state, report = step(state, x.reshape(8, 4, 8))
        after = bits((state.params, state.opt_state.inner_state))
        assert (before == after) == (x is OVERFLOW)
        assert report.skipped.tolist() == [x is OVERFLOW] * 8
        assert report.loss_scale.tolist() == [scale] * 8
    assert state.params.tolist() == [[1.0 - 0.5 * 3.5] * 8] * 8
    assert state.opt_state.skips.tolist() == [2] * 8


def carrying(w, seen, x):
    """The mean of what all devices saw goes on to the next step."""
    loss = half_loss(w, x)
    return loss, lax.pmean(jnp.mean(x), "d"), {"local loss": loss[None]}


@checks
def test_plain_step_carries_and_reports_aux_on_all_devices(check_vma):
    def loss_fn(w, seen, x):
        loss, seen, aux = carrying(w, seen, x)
        return (lax.pmean(loss, "d") if check_vma else loss), seen, aux

    tx = train_state("d", None if check_vma else mean_over("d")).tx
    plain = jls.train_step(loss_fn, tx, carried=True, has_aux=True)

    def step(w, opt_state, seen, x):
        *state, report = plain(w, opt_state, seen, x)
        return (*state, report.skipped, report.aux)

    w, seen = jnp.ones(8), jnp.float32(0.0)
    specs = P(), specs_of(tx.init(w), P()), P()
    step = jax.jit(
        sharded(MESH, (*specs, P("d")), (*specs, P(), P("d")), check_vma)(step)
    )
    state = w, tx.init(w), seen
    *state, skipped, aux = step(*state, ROWS)
    assert not skipped
    assert state[2] == 3.5
    assert aux["local loss"].shape == (8,)
    *state, skipped, aux = step(*state, OVERFLOW)
    assert skipped
    assert state[2] == 3.5
    assert jls.loss_scale(state[1]) == 32.0


def test_plain_step_under_pmap():
    tx = train_state("d", mean_over("d")).tx
    step = jls.train_step(carrying, tx, carried=True, has_aux=True)
    step = jax.pmap(step, axis_name="d")
    w = jnp.ones(8)
    state = jax.tree.map(
        lambda leaf: jnp.stack([leaf] * 8), (w, tx.init(w), jnp.float32(0.0))
    )
    for x, mean in (ROWS, 3.5), (2 * OVERFLOW, 3.5), (2 * ROWS, 7.0):
        *state, report = step(*state, x.reshape(8, 4, 8))
        assert report.skipped.tolist() == [mean == 3.5 and x is not ROWS] * 8
        assert state[2].tolist() == [mean] * 8
        assert report.aux["local loss"].shape == (8, 1)


@pytest.mark.standard_promotion
def test_the_recipe_skips_on_eight_devices(capsys):
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "recipes/devices.md").read_text(encoding="utf-8")
    names = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["True 32768.0", "False 16384.0"]
    assert len(names["x"]) == 8
    assert names["opt_state"].nonfinite_losses == 0


# Spikes.


@meshes
@checks
@pytest.mark.parametrize("has_loss", [True, False], ids=["loss", "no loss"])
def test_a_spike_on_one_device_skips_the_step_on_all(
    mesh, axis_name, check_vma, has_loss
):
    """Unreduced: the worst device decides. Nothing else is averaged or compared."""
    inner = optax.sgd(0.5, momentum=0.5)
    optimizer = jls.skip_nonfinite(
        inner, axis_name=axis_name, spikes=jls.spikes(window=4)
    )
    split = P(mesh.axis_names)
    params = jnp.ones(8)
    state = jax.eval_shape(optimizer.init, jnp.ones(1))
    specs = jax.tree.map(
        lambda leaf: split if leaf.shape == (1,) and leaf.dtype != bool else P(), state
    )

    def init(params):
        return optimizer.init(params)

    def step(params, state, grads, loss):
        extra = {"value": loss[0]} if has_loss else {}
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    make = sharded(mesh, (split,), specs, check_vma)(init)
    run = sharded(mesh, (split, specs, split, split), (split, specs), check_vma)(step)
    state, run = jax.jit(make)(params), jax.jit(run)
    for wild in [None, None, None, None, 3, None]:
        before = params, state.inner_state
        grads = X + 1 if wild is None else (X + 1).at[wild].set(1e4)
        params, state = run(params, state, grads, jnp.ones(8))
        assert bool(state.applied) == (wild is None)
        if wild is not None:
            assert_identical(before, (params, state.inner_state))
            assert jls.metrics(state)["judged_norm"] == 1e4
    assert state.spikes == 1
    for leaf in jax.tree.leaves(state.spike_state):
        assert leaf.sharding.is_fully_replicated


def test_a_spike_under_plain_jit_on_a_mesh_is_one_decision():
    sharding = NamedSharding(Mesh(DEVICES, ("d",)), P("d"))
    params = jax.device_put(jnp.ones(8), sharding)
    optimizer = jls.skip_nonfinite(optax.sgd(0.5), spikes=jls.spikes(window=4))
    state, whole = optimizer.init(params), optimizer.init(jnp.ones(8))
    step = jax.jit(optimizer.update)
    for size in [1.0, 1.1, 0.9, 1.0, 50.0, 1.0]:
        grads = jnp.full(8, size)
        _, state = step(jax.device_put(grads, sharding), state, params)
        _, whole = step(grads, whole, jnp.ones(8))
        assert state.applied == whole.applied
        assert state.spike_state.value[1] == whole.spike_state.value[1]
    assert state.spikes == 1
    assert step._cache_size() == 2  # one for each placement


@pytest.mark.filterwarnings("ignore:.*pmap")
def test_a_spike_under_pmap_is_one_decision():
    optimizer = jls.skip_nonfinite(
        optax.sgd(0.5), axis_name="d", spikes=jls.spikes(window=4)
    )
    params = jnp.ones((8, 2))
    state = jax.pmap(optimizer.init)(params)
    step = jax.pmap(optimizer.update, axis_name="d")
    for wild in [False, False, False, True, False]:
        grads = jnp.ones((8, 2)).at[5].mul(100.0 if wild else 1.0)
        _, state = step(grads, state, params)
        assert state.applied.tolist() == [not wild] * 8


def clip_over_devices(axis_name):
    """A clip by the global norm of parameters that are split over devices."""

    def update(grads, state, params=None):
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(grads))
        norm = jnp.sqrt(lax.psum(squares, axis_name))
        return jax.tree.map(lambda x: x / jnp.maximum(norm, 1.0), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@checks
@pytest.mark.parametrize(("size", "applied"), [(1e10, True), (1.5e19, False)])
def test_the_clip_of_optax_is_the_check_of_each_device(size, applied, check_vma):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    optimizer = jls.loss_scaled(inner, axis_name="d")
    params = {"a": jnp.zeros(8), "b": jnp.zeros(8)}
    state = optimizer.init(params)
    specs = P("d"), specs_of(state, P()), P("d")

    @jax.jit
    @sharded(MESH, specs, specs[:2], check_vma)
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    grads = jax.tree.map(lambda x: jnp.full_like(x, size), params)
    new, state = step(params, state, grads)
    assert state.applied == applied
    assert np.any(new["a"] != 0) == applied


@checks
@pytest.mark.parametrize(("size", "applied"), [(1e10, True), (1.5e19, False)])
def test_a_norm_that_overflows_only_over_all_devices_skips(size, applied, check_vma):
    """The square of each device's part is finite, their sum over devices is not."""
    inner = optax.chain(clip_over_devices("d"), optax.sgd(1.0))
    optimizer = jls.loss_scaled(inner, axis_name="d")
    w = jnp.zeros(8)
    state = optimizer.init(w)
    specs = specs_of(state, P())

    @jax.jit
    @sharded(MESH, (P("d"), specs, P("d")), (P("d"), specs), check_vma)
    def step(w, state, grads):
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    new, state = step(w, state, jnp.full(8, size, jnp.float32))
    assert state.applied == applied
    assert np.any(new != 0) == applied
