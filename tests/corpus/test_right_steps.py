"""`jls.check_step` calls no right step broken."""

from pathlib import Path

import pytest
from code_blocks import blocks, execute
from right_programs import PROGRAMS
from right_steps import RIGHT

import jls

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
]

ROOT = Path(__file__).parents[2]


def test_names_of_right_steps_differ():
    assert not RIGHT.keys() & PROGRAMS.keys()


@pytest.mark.parametrize("name", RIGHT | PROGRAMS)
@pytest.mark.filterwarnings("error")
def test_right_step_is_not_called_broken(name):
    step, args, *kwargs = (RIGHT | PROGRAMS)[name]()
    result = jls.check_step(step, *args, **dict(*kwargs))
    assert result.ok, str(result)
    assert result.broken == ()
    assert bool(result.half) == (name == "float32_scaled"), result.half
    # Most codes are tried, without a program too: an audit that looks at nothing
    # calls nothing broken.
    assert len(result.not_tried) <= 5


# The recipes of the documentation with a step, and how each is called.
RECIPES = {
    "getting_started": "step, model, optimizer, (x, y)",
    "recipes/flax_linen": "train_step, state, (x, y)",
    "recipes/flax_nnx": "train_step, model, optimizer, (x, y)",
    "recipes/half_precision": "step, params, opt_state, batch",
    "recipes/plain_jax": "train_step, params, opt_state, (x, y)",
    "recipes/gradient_accumulation": "step, w, opt_state, jnp.ones((8, 3))",
    "recipes/devices": "train_step, params, opt_state, x",
}


@pytest.mark.parametrize("page", RECIPES)
def test_recipe_is_not_called_broken(page, capsys):
    found = blocks((ROOT / f"docs/{page}.md").read_text(encoding="utf-8"))
    block = next(x for x in found if x.language == "python")
    names = execute(block.code, page, {"__name__": "recipe"})
    result = eval(f"jls.check_step({RECIPES[page]})", names)
    assert result.ok, str(result)
