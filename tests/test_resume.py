"""A run that is saved and restored goes on as if nothing had been: bit for bit."""

import functools
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from shared import NAN, ONE, W, assert_identical, run
from test_scaler_laws import SCALERS

import jls

pytestmark = pytest.mark.standard_promotion

# The loss is finite at 1e38, its scaled gradient is not. Saved in mid-window.
BATCHES = [1.0, 1e38, 2.0, np.nan, 3.0, 0.5, 1e38, 1.0, 2.0]
SAVED_AFTER = 5
INNER = {
    "adamw": lambda: optax.adamw(0.1),
    "accumulation and average": lambda: optax.chain(
        optax.MultiSteps(optax.adamw(0.1), 2).gradient_transformation(),
        jls.params_ema(0.9),
    ),
}


def make_params():
    return {"w": jnp.array([0.5, -1.5]), "layers": [jnp.float32(-0.0), jnp.ones(3)]}


def loss_fn(params, x):
    return sum(jnp.sum(jnp.tanh(leaf) * x) for leaf in jax.tree.leaves(params))


def make_step(optimizer, traces=None, **jit_options):
    @functools.partial(jax.jit, **jit_options)
    def step(run, x):
        if traces is not None:
            traces.append(1)
        params, state, _ = run
        loss, grads = jls.value_and_grad(loss_fn)(state, params, x)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    return step


def train(step, run, batches):
    for x in batches:
        run = step(run, jnp.float32(x))
    return run


def start(optimizer):
    params = make_params()
    return params, optimizer.init(params), jnp.float32(0.0)


# How people save and restore: (what was saved, the same anew, a folder) -> restored.


def flax_bytes(run, fresh, folder):
    return serialization.from_bytes(fresh, serialization.to_bytes(run))


def flax_state_dict(run, fresh, folder):
    return serialization.from_state_dict(fresh, serialization.to_state_dict(run))


def pickled(run, fresh, folder):
    return pickle.loads(pickle.dumps(run))


def numpy_arrays(run, fresh, folder):
    np.savez(folder / "run.npz", *jax.tree.leaves(run))
    with np.load(folder / "run.npz") as file:
        return jax.tree.unflatten(jax.tree.structure(fresh), list(file.values()))


def orbax(run, fresh, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", run)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "orbax", fresh)


LIGHT_WAYS = [flax_bytes, flax_state_dict, pickled, numpy_arrays]
WAYS = [*LIGHT_WAYS, orbax]


@functools.cache
def runs(name, inner):
    """The step, the run when it is saved, at its end, and all traces of the step."""
    traces = []
    optimizer = jls.loss_scaled(INNER[inner](), SCALERS[name]())
    step = make_step(optimizer, traces)
    saved = train(step, start(optimizer), BATCHES[:SAVED_AFTER])
    assert jls.metrics(saved[1])["skips"] >= 2
    return step, saved, train(step, saved, BATCHES[SAVED_AFTER:]), traces


def fresh(name, inner):
    return start(jls.loss_scaled(INNER[inner](), SCALERS[name]()))


STRUCTURES = {jax.tree.structure(make()): name for name, make in SCALERS.items()}


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("dynamic", "adamw"),
        *(
            pytest.param(
                name,
                "accumulation and average",
                marks=() if name in STRUCTURES.values() else pytest.mark.more,
            )
            for name in SCALERS
        ),
    ],
)
def test_resume_is_exact_without_a_retrace(name, inner, tmp_path):
    step, saved, expected, traces = runs(name, inner)
    for way in LIGHT_WAYS:
        restored = way(saved, fresh(name, inner), tmp_path)
        assert_identical(restored, saved)
        assert_identical(train(step, restored, BATCHES[SAVED_AFTER:]), expected)
    assert len(traces) == 1


def test_resume_from_orbax_is_exact_without_a_retrace(tmp_path):
    """All scalers in one folder: each call of Orbax is slow.

    So is compiling for what it restores, which is committed to its device. Go on with
    one of each type of state.
    """
    inner = "accumulation and average"
    saved = {name: runs(name, inner)[1] for name in SCALERS}
    restored = orbax(saved, {name: fresh(name, inner) for name in SCALERS}, tmp_path)
    assert_identical(restored, saved)
    for name in ("dynamic", "presets.mindformers_adaptive", "user_written"):
        step, _, expected, traces = runs(name, inner)
        run = train(step, restored[name], BATCHES[SAVED_AFTER:])
        assert_identical(run, expected)
        assert len(traces) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_manager_saves_what_was_there_though_the_run_goes_on(is_async, tmp_path):
    """The state is donated to the next step while Orbax still writes."""
    optimizer = jls.loss_scaled(optax.adamw(0.1), jls.dynamic(8.0, growth_interval=3))
    step = make_step(optimizer, donate_argnums=0)
    expected = train(make_step(optimizer), start(optimizer), BATCHES)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=is_async
    )
    run = start(optimizer)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for index, x in enumerate(BATCHES):
            run = step(run, jnp.float32(x))
            if index % 2 == 0:
                manager.save(index, args=ocp.args.StandardSave(run))
        manager.wait_until_finished()
        assert_identical(run, expected)
        assert manager.all_steps() == [6, 8]
        for index in manager.all_steps():
            args = ocp.args.StandardRestore(start(optimizer))
            restored = manager.restore(index, args=args)
            assert_identical(train(step, restored, BATCHES[index + 1 :]), expected)


@pytest.mark.parametrize("way", WAYS)
def test_train_state_resumes_exactly(way, tmp_path):
    tx = jls.loss_scaled(optax.adamw(0.1), jls.dynamic(8.0, growth_interval=3))

    def state_loss(state, x):
        return loss_fn(state.params, x)

    def fresh():
        return TrainState.create(apply_fn=None, params=make_params(), tx=tx)

    step = jax.jit(lambda state, x: jls.train_step(state_loss)(state, x)[0])
    saved = train(step, fresh(), BATCHES[:SAVED_AFTER])
    if way is pickled:  # `tx` is made of closures, which cannot be
        parts = way((saved.step, saved.params, saved.opt_state), None, tmp_path)
        names = "step", "params", "opt_state"
        restored = fresh().replace(**dict(zip(names, parts, strict=True)))
    else:
        restored = way(saved, fresh(), tmp_path)
    assert_identical(
        train(step, restored, BATCHES[SAVED_AFTER:]),
        train(step, saved, BATCHES[SAVED_AFTER:]),
    )


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def test_nnx_model_and_optimizer_resume_exactly(tmp_path):
    def fresh():
        model = Model()
        tx = jls.loss_scaled(optax.adamw(0.1), jls.dynamic(8.0, growth_interval=3))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    step = nnx.jit(jls.train_step(lambda model, x: jnp.mean(model(x) ** 2)))
    x = jnp.arange(8.0).reshape(4, 2)

    def train(model, optimizer, flags):
        for is_bad in flags:
            step(model, optimizer, x.at[0, 0].set(jnp.inf if is_bad else 1.0))

    model, optimizer = fresh()
    train(model, optimizer, [0, 1, 0])
    restored_model, restored_optimizer = fresh()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "nnx", nnx.state((model, optimizer)))
        checkpointer.wait_until_finished()
        target = nnx.state((restored_model, restored_optimizer))
        restored = checkpointer.restore(tmp_path / "nnx", target)
    nnx.update((restored_model, restored_optimizer), restored)
    train(model, optimizer, [0, 1, 0])
    train(restored_model, restored_optimizer, [0, 1, 0])
    assert jls.metrics(optimizer)["skips"] == 2

    def arrays(model, optimizer):
        return [
            jax.random.key_data(leaf) if "key" in str(leaf.dtype) else leaf
            for leaf in jax.tree.leaves(nnx.state((model, optimizer)))
        ]

    assert_identical(
        arrays(restored_model, restored_optimizer), arrays(model, optimizer)
    )


# Only good checkpoints are kept.


def save_or_go_back(manager, index, run):
    """As in docs/questions/checkpoints.md."""
    params, state, _ = run
    health = jls.health(state, params, max_consecutive_skips=2)
    if health.safe_to_save:
        manager.save(index, args=ocp.args.StandardSave(run))
        return run, health.verdict
    manager.wait_until_finished()
    args = ocp.args.StandardRestore(run)
    return manager.restore(manager.latest_step(), args=args), health.verdict


def poisoned(run):
    """As if something besides the optimizer had written to a parameter."""
    params, state, loss = run
    return params | {"w": params["w"] * jnp.nan}, state, loss


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("bad_batches", "harm", "verdict"),
    [([1.0], poisoned, "poisoned"), ([np.nan] * 3, lambda run: run, "stalled")],
    ids=["poisoned", "stalled"],
)
def test_a_broken_run_does_not_overwrite_its_last_good_checkpoint(
    bad_batches, harm, verdict, is_async, tmp_path
):
    optimizer = jls.loss_scaled(optax.adamw(0.1), jls.dynamic(8.0, growth_interval=3))
    step = make_step(optimizer, donate_argnums=0)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, enable_async_checkpointing=is_async
    )
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        run = train(step, start(optimizer), BATCHES)
        good = jax.tree.map(np.array, run)
        run, said = save_or_go_back(manager, 1, run)
        assert said == "ok"
        for attempt in (2, 3):
            run = harm(train(step, run, bad_batches))
            run, said = save_or_go_back(manager, attempt, run)
            assert said == verdict
            assert manager.all_steps() == [1]
            assert_identical(run, good)
        run, said = save_or_go_back(manager, 4, train(step, run, [1.0]))
        manager.wait_until_finished()
        assert (said, manager.all_steps()) == ("ok", [4])


# Files that are broken or from elsewhere: the error is that of Flax or Orbax.


@pytest.fixture
def running():
    optimizer = jls.loss_scaled(optax.adamw(0.1), jls.dynamic(8.0, growth_interval=3))
    return train(make_step(optimizer), start(optimizer), BATCHES)


def test_truncated_or_foreign_bytes_leave_the_state_alone(running):
    run = running
    before = jax.tree.map(np.array, run)
    data = serialization.to_bytes(run)
    other = jls.loss_scaled(optax.sgd(0.1, momentum=0.9), jls.dynamic(4.0))
    foreign = serialization.to_bytes(start(other))
    bare = serialization.to_bytes((run[0], run[1].inner_state, run[2]))
    for bad in (
        data[:-9],
        data[: len(data) // 2],
        b"",
        b"no checkpoint",
        foreign,
        bare,
    ):
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
            serialization.from_bytes(run, bad)
        assert_identical(run, before)


def test_broken_or_foreign_orbax_folder_leaves_the_state_alone(running, tmp_path):
    run = running
    before = jax.tree.map(np.array, run)
    other = jls.loss_scaled(optax.sgd(0.1, momentum=0.9), jls.dynamic(4.0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "foreign", start(other))
        checkpointer.save(tmp_path / "broken", run)
        checkpointer.wait_until_finished()
        for file in (tmp_path / "broken").rglob("d/*"):
            file.write_bytes(file.read_bytes()[:20])
        for name in ("foreign", "broken", "missing"):
            with pytest.raises((ValueError, OSError)):
                checkpointer.restore(tmp_path / name, run)
            assert_identical(run, before)


@pytest.mark.standard_promotion
def test_state_resumes_from_a_checkpoint_bitwise():
    """jmp J12: invisible to flax.serialization, people saved the scale only."""
    scaler = jls.dynamic(8.0, growth_interval=3, backoff_interval=2)
    optimizer = jls.loss_scaled(optax.adam(0.5), scaler)
    _, state = run(optimizer, W, [NAN, ONE, ONE])
    saved = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(optimizer.init(W), saved)
    assert_identical(jax.tree.map(jnp.asarray, restored), state)
    update = jax.jit(optimizer.update)
    assert_identical(update(ONE, restored, W), update(ONE, state, W))
    assert_identical(pickle.loads(pickle.dumps(state)), state)
