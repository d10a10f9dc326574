"""The recipes of the documentation do what they promise, and skip what is bad.

That they print what they say is tested with the other pages, in test_docs.py.
"""

import re
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from code_blocks import blocks, execute
from flax import nnx
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

RECIPES = Path(__file__).parents[2] / "docs/recipes"
# Page, section -> what moves on a good step, and must not on a bad one.
MODELS = {
    ("flax_linen", "Flax Linen"): ["params", "batch_stats"],
    ("flax_nnx", "Flax NNX"): ["kernel", "mean", "var", "count"],
    ("plain_jax", "Plain JAX, Haiku, Equinox"): ["in", "out"],
    ("plain_jax", "Equinox"): ["weight"],
}


def run(page, until=None):
    """Runs the code of a page, up to the end of a section; its names."""
    found = blocks((RECIPES / f"{page}.md").read_text(encoding="utf-8"))
    titles = [block.title for block in found]
    end = len(titles) - titles[::-1].index(until) if until else len(found)
    names = {"__name__": "recipe"}
    for block in found[:end]:
        if block.language == "python":
            names = execute(block.code, f"{page}.md", names)
    return names


def test_index_names_every_recipe():
    text = (RECIPES / "index.md").read_text(encoding="utf-8")
    for path in RECIPES.glob("*.md"):
        assert path.stem == "index" or f"]({path.name})" in text, path.name


@pytest.mark.parametrize("recipe", MODELS)
def test_recipe_steps_and_rolls_everything_back_on_a_bad_batch(recipe):
    names, (page, section) = run(*recipe), recipe
    model = "mlp" if section == "Equinox" else "params"
    train_step, x, y = names["train_step"], names["x"], names["y"]

    def step(x):
        """Whether the step says that it was skipped."""
        if page == "flax_linen":
            names["state"], report = train_step(names["state"], (x, y))
            return report.skipped
        if page == "flax_nnx":
            return train_step(names["model"], names["optimizer"], (x, y)).skipped
        args = train_step(names[model], names["opt_state"], (x, y))
        names[model], names["opt_state"], report = args
        return report.skipped

    def carried():
        if page == "flax_linen":
            return names["state"]
        return names["optimizer" if page == "flax_nnx" else "opt_state"]

    def arrays():
        """Copies of all that a bad batch could touch, by path."""
        if page == "flax_linen":
            state = names["state"]
            tree = {name: getattr(state, name) for name in MODELS[recipe]}
            tree["opt_state"] = state.opt_state.inner_state
        elif page == "flax_nnx":
            opt_state = nnx.state(names["optimizer"].opt_state.inner_state)
            tree = nnx.to_pure_dict(nnx.state(names["model"])), opt_state
        else:
            tree = names[model], names["opt_state"].inner_state
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {
            jax.tree_util.keystr(path): np.array(
                jax.random.key_data(leaf)
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                else leaf
            )
            for path, leaf in leaves
            if hasattr(leaf, "dtype")
        }

    assert jls.metrics(carried())["steps"] == 1
    for bad, skips in [(x, 0), (x.at[0, 0].set(jnp.inf), 1), (x, 1)]:
        before = arrays()
        skipped = step(bad)
        after = arrays()
        moved = [p for p in before if not np.array_equal(before[p], after[p])]
        if bad is x:
            assert all(any(part in p for p in moved) for part in MODELS[recipe])
        else:
            assert moved == []
        assert skipped == (bad is not x)
        assert jls.metrics(carried())["skips"] == skips
    assert all(np.isfinite(leaf).all() for leaf in arrays().values())


def test_step_without_optax_steps_and_skips():
    names = run("plain_jax")
    assert np.array_equal(names["w"], np.full(4, 0.9, np.float32))
    w, state = names["train_step"](
        names["w"], names["state"], jnp.full((8, 4), jnp.inf)
    )
    assert np.array_equal(w, names["w"])
    assert jls.loss_scale(state) == 2.0**14


def test_accumulation_recipe_leaves_out_the_bad_micro_batch(capsys):
    names = run("gradient_accumulation", "Within one step")
    assert capsys.readouterr().out.splitlines() == [
        "skipped False, dropped 0",
        "skipped True, dropped 0",
        "skipped False, dropped 0",
        "skipped False, dropped 1",
    ]
    assert np.all(names["w"] < 1)
    assert names["opt_state"].skips == 1


def test_average_is_of_the_applied_steps(capsys):
    names = run("optimizer", "An average of the parameters")
    assert names["opt_state"].skips == 1
    average = jls.eval_params(names["opt_state"])
    assert np.all(names["params"] < average)
    assert np.all(average < 1)


@pytest.mark.parametrize("bad", [12, 18])  # the last ones wait in the queue
def test_bad_batch_recipe_keeps_that_batch_and_finds_the_line(bad, capsys):
    text, names = (RECIPES / "bad_batch.md").read_text(encoding="utf-8"), {}
    for block in blocks(text):
        if block.language == "python":
            code = block.code.replace("index == 12", f"index == {bad}")
            names = execute(code, "bad_batch.md", names)
    printed = capsys.readouterr().out
    assert f", 1 bad, 0 waiting)\nbatch {bad}: GRADIENTS\n" in printed
    (kept,) = names["queue"].bad
    assert np.array_equal(kept.batch["one"][5], kept.batch["other"][5])
    state = names["opt_state"]
    assert state.steps - state.skips == 19  # each of the others was used
    assert state.skips == names["queue"].requeued + 1
    why = str(jls.why(names["step"], names["params"], state, kept.batch))
    assert "program.py:13 in loss_fn, backward\n      distance = jnp.sqrt(" in why


def test_devices_recipe_skips_what_overflows_on_one_device(capsys):
    """On one device here; on eight in tests/devices."""
    names = run("devices")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["True 32768.0", "False 16384.0"]
    assert names["opt_state"].nonfinite_losses == 0


def test_clipping_shows_the_trap(capsys):
    names = run("optimizer", "Clipping")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "optax [0. 0.]",
        "jls   [-0. -0.] skips 1",
        "jls   [-0.71 -0.71] skips 0",
    ]
    assert names["opt_state"].skips == 0


def test_loss_that_takes_the_parameters_trains_as_the_program_before_it():
    names = run("flax_linen", "A loss that takes the parameters")
    train_step, x, y = names["train_step"], names["x"], names["y"]
    tx, params = optax.adamw(1e-2), names["params"]
    state, opt_state = names["state"], tx.init(params)
    for _ in range(3):
        grads, _ = jax.grad(names["plain_loss"], has_aux=True)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    for _ in range(2):  # the page takes the first step
        state, _, _ = train_step(state, x, y)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5), state.params, params
    )
    after, loss, _ = train_step(state, x * jnp.nan, y)
    assert np.isnan(loss)
    assert_identical(after.params, state.params)
    assert after.opt_state.skips == 1


@flax.struct.dataclass
class State:
    """A state of one's own, as the page describes it."""

    optimizer: Any = flax.struct.field(pytree_node=False)
    opt_state: Any
    weights: Any
    global_step: jax.Array


def test_steps_of_other_states_and_by_hand_skip_too():
    names = run("flax_linen")
    good, bad = [(x, names["y"]) for x in (names["x"], names["x"] * jnp.nan)]
    params, plain_loss = names["params"], names["plain_loss"]
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    own = State(optimizer, optimizer.init(params), params, jnp.int32(0))
    step = jls.train_step(
        lambda state, batch: plain_loss(state.weights, *batch), has_aux=True
    )
    for batch in (good, bad):
        after, report = jax.jit(step)(own, batch)
        assert report.skipped == (batch is bad)
        assert after.global_step == own.global_step + 1
    assert_identical(after.weights, own.weights)
    state = names["state"]
    after, loss = names["train_step"](state, *bad)
    assert np.isnan(loss)
    assert_identical(after.params, state.params)
    assert_identical(after.batch_stats, state.batch_stats)
    assert after.step == state.step + 1


def two_losses(scale):
    """The page's names, and new states at a loss scale."""
    names = run("two_losses")
    optimizer, gen, disc = (names[name] for name in ("optimizer", "gen", "disc"))
    states = optimizer.init(gen), optimizer.init(disc)
    start = gen, disc, *(jls.set_loss_scale(x, scale) for x in states)
    return names, start


def test_each_of_two_networks_skips_for_itself():
    names, start = two_losses(2.0**15)
    real, z = names["real"], names["z"]
    after = names["train_step"](*start, real.at[0, 0].set(jnp.nan), z)
    assert_identical(after[1], start[1])
    assert after[4] == (False, True)
    assert not np.array_equal(after[0][0], start[0][0])
    after = names["train_step"](*start, real, z.at[0, 0].set(jnp.nan))
    assert after[4] == (True, True)
    assert_identical(after[:2], start[:2])


def test_both_networks_step_or_neither_and_the_scale_comes_down():
    names, _ = two_losses(1.0)
    params = {"gen": names["gen"], "disc": names["disc"]}
    opt_state = jls.set_loss_scale(names["both"].init(params), 2.0**24)
    skips = 0
    for _ in range(40):
        before = params
        params, opt_state, report = names["joint_step"](
            params, opt_state, names["real"], names["z"]
        )
        if report.skipped:
            skips += 1
            assert_identical(params, before)
        else:
            for part in ("gen", "disc"):
                assert not np.array_equal(params[part][0], before[part][0])
    assert 0 < skips < 20
    assert jls.loss_scale(opt_state) == 2.0 ** (24 - skips)


def test_second_network_follows_the_first_out_of_an_overflow():
    names, states = two_losses(2.0**15)
    states = [*states[:3], jls.set_loss_scale(states[3], 2.0**24)]
    skipped = []

    @jax.jit
    def train_in_turn(gen, disc, gen_state, disc_state, real, z):
        disc, disc_state, first = names["disc_step"](
            disc, disc_state, real, gen=gen, z=z
        )
        loss, grads = jls.value_and_grad(names["gen_loss"])(gen_state, gen, z, disc)
        gen, gen_state, second = jls.apply_gradients(
            names["optimizer"],
            grads,
            gen_state,
            gen,
            value=jnp.where(first.skipped, jnp.nan, loss),  # as on the page
        )
        return gen, disc, gen_state, disc_state, (second.skipped, first.skipped)

    for _ in range(30):
        *after, (second, first) = train_in_turn(*states, names["real"], names["z"])
        if first:
            assert second
            assert_identical(after[:2], states[:2])
            assert jls.loss_scale(after[3]) == 0.5 * jls.loss_scale(states[3])
            assert jls.loss_scale(after[2]) == jls.loss_scale(states[2])
        skipped.append(bool(first))
        states = after
    assert skipped[0]
    assert not skipped[-1]
    assert states[2].nonfinite_losses == sum(skipped)


def test_steps_are_of_the_rates_that_were_set(capsys):
    names = run("optimizer", "A learning rate set by hand")
    assert names["report"].learning_rate == pytest.approx(0.00125)
    params, inner = jnp.ones(4), names["inner"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), inner)
    opt_state = tx.init(params)
    for rate in (0.005, 0.00125):  # the second of three was skipped
        opt_state[1].hyperparams["learning_rate"] = jnp.float32(rate)
        grads = jax.grad(names["loss_fn"])(params, names["batch"])
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(names["params"], params, rtol=1e-4)


def test_line_search_and_sam_step_as_optax_alone(capsys):
    names = run("optimizer")
    loss_fn, tx, batch = names["fit_loss"], optax.lbfgs(), (names["x"], names["y"])
    params, optimizer = jnp.zeros(3), jls.skip_nonfinite(tx)
    step = jls.train_step(loss_fn, optimizer, extra=names["value_fn"])
    ours, state = params, optimizer.init(params)
    for _ in range(4):
        ours, state, _ = step(ours, state, batch)
    opt_state = tx.init(params)
    for _ in range(4):
        value, grad = jax.value_and_grad(loss_fn)(params, batch)
        extra = {"value": value, "grad": grad, **names["value_fn"](params, batch)}
        updates, opt_state = tx.update(grad, opt_state, params, **extra)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(ours, params, rtol=1e-3)

    # Of SAM the page has the lines alone.
    text = (RECIPES / "optimizer.md").read_text(encoding="utf-8")
    names["loss_fn"] = loss_fn
    scale, half_loss, function = (
        re.search(rf"`{name}([^`]*)`", text)[1]
        for name in ("scale = ", "half_loss = ", "extra=(?=lambda)")
    )
    names |= {"scale": eval(scale, names), "half_loss": eval(half_loss, names)}
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    kind = {"sync_period": 2, "opaque_mode": True}
    sam = optax.contrib.sam(optax.sgd(0.1), adversary, **kind)
    optimizer = jls.loss_scaled(sam, jls.dynamic(2.0**10))
    function = eval(function, names)
    step = jax.jit(jls.train_step(names["half_loss"], optimizer, extra=function))
    params, opt_state, x = jnp.zeros(3), optimizer.init(jnp.zeros(3)), names["x"]
    losses = []
    for inputs in (x, x * jnp.nan, x):
        params, opt_state, report = step(params, opt_state, (inputs, names["y"]))
        losses.append(report.loss)
    assert opt_state.skips == 1
    assert losses[2] < 0.6 * losses[0]

    optimizer = jls.skip_nonfinite(sam, check_updates=True)

    def bad_grad(params, batch):
        return {"grad_fn": lambda params, _: params * jnp.nan}

    step = jls.train_step(loss_fn, optimizer, extra=bad_grad)
    params, opt_state, report = step(params, optimizer.init(params), batch)
    assert report.skip_reason == jls.types.SkipReason.UPDATES


def test_what_is_beside_an_nnx_model_is_rolled_back(capsys):
    names = run("flax_nnx")
    step, (rngs, metrics) = names["noisy_step"], names["beside"].values()
    args, x, y = (names["noisy"], names["noisy_optimizer"]), names["x"], names["y"]

    def beside():
        counts = rngs.noise.count[...], rngs.dropout.count[...]
        return jax.device_get((counts, metrics.compute()))

    before = beside()
    assert step(*args, (x * jnp.nan, y), rngs=rngs, metrics=metrics).skipped
    assert_identical(beside(), before)
    assert not step(*args, (x, y), rngs=rngs, metrics=metrics).skipped
    assert beside()[0] == (3, 3)


def test_table_of_less_memory_is_what_the_arrays_take():
    text = (RECIPES / "less_memory.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(bfloat16_params\(.*?\))` \| (\d+) \|", text, re.M))
    assert len(rows) == 3
    names = {"jnp": jnp, "inner": optax.adam(1e-3)}
    for row, count in rows.items():
        optimizer = eval(f"jls.{row}", {"jls": jls} | names)
        params = jnp.ones(2**20, jnp.bfloat16)  # too many to be watched
        arrays = jax.tree.leaves((params, optimizer.init(params)))
        size = sum(x.nbytes for x in arrays if x.ndim)
        assert 0 <= size - int(count) * 2**20 <= 8
