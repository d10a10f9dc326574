"""The recipes of the documentation do what they promise, and skip what is bad.

That they print what they say is tested with the other pages, in test_docs.py.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from code_blocks import blocks, execute
from flax import nnx

import jls

pytestmark = pytest.mark.standard_promotion

RECIPES = Path(__file__).parents[2] / "docs/recipes"
# Recipe -> what moves on a good step, and must not on a bad one.
MODELS = {
    "flax_linen": ["params", "batch_stats"],
    "flax_nnx": ["kernel", "mean", "var", "count"],
    "equinox": ["weight"],
}


def run(recipe):
    """Runs the first block of a recipe; its names."""
    text = (RECIPES / f"{recipe}.md").read_text(encoding="utf-8")
    code = next(block.code for block in blocks(text) if block.language == "python")
    return execute(code, f"{recipe}.md", {"__name__": "recipe"})


def test_every_recipe_is_tested():
    others = {
        "plain_jax",
        "skip_without_scaling",
        "gradient_accumulation",
        "average",
        "checkpoints",
        "clipping",
        "underflow",
        "record",
        "devices",
        "by_hand",  # asks jls.check_step about each of its steps
    }
    recipes = {path.stem for path in RECIPES.glob("*.md")} - {"index"}
    assert recipes == {*MODELS, *others}


def test_index_names_every_recipe():
    text = (RECIPES / "index.md").read_text(encoding="utf-8")
    for path in RECIPES.glob("*.md"):
        assert path.stem == "index" or f"]({path.name})" in text, path.name


@pytest.mark.parametrize("recipe", MODELS)
def test_recipe_steps_and_rolls_everything_back_on_a_bad_batch(recipe):
    names = run(recipe)
    train_step, x, y = names["train_step"], names["x"], names["y"]

    def step(x):
        """Whether the step says that it was skipped."""
        if recipe == "flax_linen":
            names["state"], report = train_step(names["state"], (x, y))
            return report.skipped
        if recipe == "flax_nnx":
            return train_step(names["model"], names["optimizer"], (x, y)).skipped
        args = train_step(names["model"], names["opt_state"], (x, y))
        names["model"], names["opt_state"], report = args
        return report.skipped

    def carried():
        if recipe == "flax_linen":
            return names["state"]
        return names["optimizer" if recipe == "flax_nnx" else "opt_state"]

    def arrays():
        """Copies of all that a bad batch could touch, by path."""
        if recipe == "flax_linen":
            state = names["state"]
            tree = {name: getattr(state, name) for name in MODELS[recipe]}
            tree["opt_state"] = state.opt_state.inner_state
        elif recipe == "flax_nnx":
            opt_state = nnx.state(names["optimizer"].opt_state.inner_state)
            tree = nnx.to_pure_dict(nnx.state(names["model"])), opt_state
        else:
            tree = names["model"], names["opt_state"].inner_state
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


def test_plain_jax_recipe_steps_and_skips():
    names = run("plain_jax")
    assert np.array_equal(names["w"], np.full(4, 0.9, np.float32))
    w, state = names["train_step"](
        names["w"], names["state"], jnp.full((8, 4), jnp.inf)
    )
    assert np.array_equal(w, names["w"])
    assert jls.loss_scale(state) == 2.0**14


def test_guard_recipe_skips(capsys):
    names = run("skip_without_scaling")
    assert names["params"]["w"].tolist() == [1.0] * 3
    assert names["opt_state"].skips == 1


def test_accumulation_recipe_leaves_out_the_bad_micro_batch(capsys):
    names = run("gradient_accumulation")
    assert capsys.readouterr().out.splitlines() == [
        "skipped False, dropped 0",
        "skipped True, dropped 0",
        "skipped False, dropped 0",
        "skipped False, dropped 1",
    ]
    assert np.all(names["w"] < 1)
    assert names["opt_state"].skips == 1


def test_checkpoint_recipe_keeps_the_last_good_one(capsys):
    names = run("checkpoints")
    assert capsys.readouterr().out == "poisoned 1\n"
    assert names["run"]["params"]["w"].tolist() == [1.0, 1.0]
    assert jls.loss_scale(names["run"]["opt_state"]) == 2.0**15


def test_average_recipe_averages_the_applied_steps(capsys):
    names = run("average")
    assert names["opt_state"].skips == 1
    newest, average = (
        x["w"] for x in (names["params"], jls.eval_params(names["opt_state"]))
    )
    assert np.all(newest < average)
    assert np.all(average < 1)


def test_devices_recipe_skips_what_overflows_on_one_device(capsys):
    """On one device here; on eight in tests/devices."""
    names = run("devices")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["True 32768.0", "False 16384.0"]
    assert names["opt_state"].nonfinite_losses == 0


def test_clipping_recipe_shows_the_traps(capsys):
    names = run("clipping")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["[-0. -0.]", "[-0.71 -0.71]", "skips 1"]
    assert names["opt_state"].skips == 1


def test_underflow_recipe_counts_what_is_lost(capsys):
    names = run("underflow")
    assert capsys.readouterr().out.splitlines()[1] == "2048.0"
    assert names["lost"].vanished[0] == pytest.approx(1 / 6)


def test_record_of_a_run_says_what_happened_in_each_step(capsys):
    history = run("record")["history"]
    progress, *summary = capsys.readouterr().out.splitlines()
    assert progress == "loss 0.5899  scale 2^11  skips 1 (0 in a row)"
    assert summary[:4] == history.summary().splitlines()
    assert history["loss_scale"].tolist() == [2.0**10] * 2 + [2.0**11] * 2
    assert history["skip_reason"].tolist() == [0, 2, 0, 0]
    assert history["applied"].tolist() == [True, False, True, True]
    rates = [0.1, 0.09, 0.09, 0.08]  # the skipped step does not count
    assert history["learning_rate"].tolist() == pytest.approx(rates)
