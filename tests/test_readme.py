"""The README's code runs, and says what it should."""

import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jls

pytestmark = pytest.mark.standard_promotion

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
# Title of the section -> its code.
BLOCKS = {
    re.findall(r"^##+ (.*)$", TEXT[: match.start()], re.MULTILINE)[-1]: match[1]
    for match in re.finditer(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
}
RECIPES = ["Flax Linen", "Flax NNX", "Equinox"]


def run(title):
    names = {"__name__": "readme"}
    exec(compile(BLOCKS[title], f"README.md, {title}", "exec"), names)
    return names


def test_every_block_is_tested():
    others = {
        "The main loop",
        "Plain JAX, without optax",
        "bfloat16 and float32: only the guard",
    }
    assert set(BLOCKS) == {*RECIPES, *others}


def test_main_loop_trains(capsys):
    names = run("The main loop")
    metrics = jax.device_get(jls.metrics(names["opt_state"]))
    assert metrics["steps"] == 100
    assert metrics["applied"]
    first, last = (
        float(line.split()[0]) for line in capsys.readouterr().out.splitlines()
    )
    assert last < first


def test_diff_leads_from_plain_optax_to_the_main_loop():
    diff = re.search(r"^```diff\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1]
    lines = diff.splitlines()
    plain = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    ours = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    code = re.sub(r" *#.*", "", BLOCKS["The main loop"])
    squeezed = [line for line in code.splitlines() if line.strip()]
    for line in filter(str.strip, ours.splitlines()):
        assert line in squeezed, line

    names = {"jax": jax, "optax": optax, "loss_fn": lambda p, b: jnp.sum(p * b)}
    exec(plain, names)
    params = jnp.ones(2)
    state = names["optimizer"].init(params)
    new, _, loss = names["train_step"](params, state, jnp.ones(2))
    assert loss == 2.0
    assert np.all(new < params)


@pytest.mark.parametrize("title", RECIPES)
def test_recipe_steps_and_rolls_everything_back_on_a_bad_batch(title):
    names = run(title)
    if title == "Flax NNX":
        from flax import nnx

        args = [names["model"], names["optimizer"]]

        def state():
            return nnx.to_pure_dict(nnx.state(args[0])), args[1]

        def step(x):
            return names["train_step"](*args, x, names["y"])
    else:
        args = [names["state"]] if title == "Flax Linen" else None
        args = args or [names["model"], names["opt_state"]]

        def state():
            if title == "Flax Linen":
                return (args[0].params, args[0].batch_stats), args[0]
            return args[0], args[1]

        def step(x):
            *args[:], loss = names["train_step"](*args, x, names["y"])
            return loss

    def arrays():
        return [
            np.asarray(x) for x in jax.tree.leaves(state()[0]) if hasattr(x, "dtype")
        ]

    assert jls.metrics(state()[1])["steps"] == 1
    x = names["x"]
    for bad, skips in [(x, 0), (x.at[0, 0].set(jnp.inf), 1), (x, 1)]:
        before = arrays()
        step(bad)
        moved = not all(map(np.array_equal, before, arrays()))
        assert moved == (bad is x)
        assert jls.metrics(state()[1])["skips"] == skips
    assert all(np.isfinite(leaf).all() for leaf in arrays())


def test_plain_jax_recipe_steps_and_skips():
    names = run("Plain JAX, without optax")
    assert np.array_equal(names["w"], np.full(4, 0.9, np.float32))
    w, state = names["train_step"](
        names["w"], names["state"], jnp.full((8, 4), jnp.inf)
    )
    assert np.array_equal(w, names["w"])
    assert jls.loss_scale(state) == 2.0**14


def test_guard_recipe_skips(capsys):
    names = run("bfloat16 and float32: only the guard")
    assert names["params"]["w"].tolist() == [1.0] * 3
    assert names["opt_state"].skips == 1


def test_links_and_extras_exist():
    for target in re.findall(r"\]\(([^)#h][^)]*)\)", TEXT):
        assert (ROOT / target).exists(), target
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r'pip install -e "\.\[(\w+)\]"', TEXT):
        assert extra in extras["optional-dependencies"]
