"""The README's code runs, and says what it should."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest
from code_blocks import blocks, execute
from flax import nnx
from flax.training.train_state import TrainState

import jls

pytestmark = pytest.mark.standard_promotion

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
# Title of the section -> its code.
BLOCKS = {
    block.title: block.code for block in blocks(TEXT) if block.language == "python"
}
# Title of the recipe -> what moves on a good step, and must not on a bad one.
RECIPES = {
    "Flax Linen": ["params", "batch_stats"],
    "Flax NNX": ["kernel", "mean", "var", "count"],
    "Equinox": ["weight"],
}


def run(title):
    return execute(BLOCKS[title], f"README.md, {title}", {"__name__": "readme"})


def test_every_block_is_tested():
    others = {
        "The main loop",
        "What a healthy run looks like",
        "A record of the run",
        "Detecting underflow",
        "Plain JAX, without optax",
        "bfloat16 and float32: skipping without scaling",
        "Gradient accumulation",
        "An average of the parameters",
        "Checkpoints",
        "Clipping, and two traps with norms",
        "Many devices and processes",
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


def test_diff_leads_from_plain_optax_to_a_right_step(capsys):
    diff = re.search(r"^```diff\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1]
    lines = diff.splitlines()
    plain = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    ours = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    names = run("The main loop")
    exec(ours, names)
    state = names["params"], names["optimizer"].init(names["params"])
    args = names["train_step"], *state, names["batch"]
    jls.check_step(*args).raise_if_broken()
    assert "loss not told" not in jls.check_step(*args).not_tried

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
    train_step, x, y = names["train_step"], names["x"], names["y"]

    def step(x):
        """Whether the step says that it was skipped."""
        if title == "Flax Linen":
            names["state"], report = train_step(names["state"], (x, y))
            return report.skipped
        if title == "Flax NNX":
            return train_step(names["model"], names["optimizer"], (x, y)).skipped
        args = train_step(names["model"], names["opt_state"], (x, y))
        names["model"], names["opt_state"], report = args
        return report.skipped

    def carried():
        if title == "Flax Linen":
            return names["state"]
        return names["optimizer" if title == "Flax NNX" else "opt_state"]

    def arrays():
        """Copies of all that a bad batch could touch, by path."""
        if title == "Flax Linen":
            state = names["state"]
            tree = {name: getattr(state, name) for name in RECIPES[title]}
            tree["opt_state"] = state.opt_state.inner_state
        elif title == "Flax NNX":
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
            assert all(any(part in p for p in moved) for part in RECIPES[title])
        else:
            assert moved == []
        assert skipped == (bad is not x)
        assert jls.metrics(carried())["skips"] == skips
    assert all(np.isfinite(leaf).all() for leaf in arrays().values())


def test_plain_jax_recipe_steps_and_skips():
    names = run("Plain JAX, without optax")
    assert np.array_equal(names["w"], np.full(4, 0.9, np.float32))
    w, state = names["train_step"](
        names["w"], names["state"], jnp.full((8, 4), jnp.inf)
    )
    assert np.array_equal(w, names["w"])
    assert jls.loss_scale(state) == 2.0**14


def test_guard_recipe_skips(capsys):
    names = run("bfloat16 and float32: skipping without scaling")
    assert names["params"]["w"].tolist() == [1.0] * 3
    assert names["opt_state"].skips == 1


def test_accumulation_recipe_leaves_out_the_bad_micro_batch(capsys):
    names = run("Gradient accumulation")
    assert capsys.readouterr().out == "False 1\n"
    assert np.all(names["w"] < 1)


def test_checkpoint_recipe_keeps_the_last_good_one(capsys):
    names = run("Checkpoints")
    promised = re.search(r"# (poisoned.*)", BLOCKS["Checkpoints"])[1]
    assert capsys.readouterr().out == f"{promised}\n"
    assert names["run"]["params"]["w"].tolist() == [1.0, 1.0]
    assert jls.loss_scale(names["run"]["opt_state"]) == 2.0**15


def test_average_recipe_averages_the_applied_steps(capsys):
    names = run("An average of the parameters")
    assert names["opt_state"].skips == 1
    newest, average = (
        x["w"] for x in (names["params"], jls.eval_params(names["opt_state"]))
    )
    assert np.all(newest < average)
    assert np.all(average < 1)


def test_devices_recipe_skips_what_overflows_on_one_device(capsys):
    """On one device here; on eight in tests/devices."""
    names = run("Many devices and processes")
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[1:] == ["True", "32768.0"]
    assert second.split()[1:] == ["False", "16384.0"]
    assert names["opt_state"].nonfinite_losses == 0


def test_clipping_recipe_shows_the_traps(capsys):
    run("Clipping, and two traps with norms")
    expected = re.findall(
        r"print\(.*\)  # (.*)", BLOCKS["Clipping, and two traps with norms"]
    )
    printed = ", then ".join(capsys.readouterr().out.splitlines())
    assert printed == ", then ".join(expected)


# The tables.


def table(title):
    """The rows of the table in a section, without the heading and titles of groups."""
    section = re.split(r"^##+ ", TEXT.split(f"\n## {title}\n")[1], flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 2 for row in rows)
    return [row for row in rows if row[1]]


def code_in(cell):
    return re.findall(r"`([^`]+)`", cell)


MIGRATION = table("Coming from another system")
NOT_NEEDED = {
    "MindSpore `drop_overflow_update=True`, `get_drop_overflow_update` [7]",
    "torch `is_enabled`; Paddle `is_enable`",
}


@pytest.fixture(scope="module")
def namespace():
    """The names that the cells of the migration table use."""
    names = run("The main loop")
    params, batch, loss_fn = names["params"], names["batch"], names["loss_fn"]
    inner, scaler = optax.adamw(1e-3), jls.dynamic()
    scaler_state = scaler.init()
    optimizer = jls.loss_scaled(inner, scaler)
    opt_state = optimizer.init(params)
    loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
    saved = flax.serialization.to_state_dict(opt_state)
    labels = {"w1": "a", "w2": "b"}  # of the parameters, for optax.partition
    losses, mask = jnp.ones(4), jnp.array([1.0, 1.0, 0.0, 0.0])

    def state_loss(state, batch):
        return loss_fn(state.params, batch)

    state = TrainState.create(apply_fn=None, params=params, tx=optimizer)
    step = jax.jit(jls.train_step(state_loss, local_norm=True))
    report = step(state, batch)[1]
    return names | locals() | {"flax": flax, "functools": functools}


def value_of(code, names):
    """Runs `code`; the value of an expression, or what a statement assigns."""
    (statement,) = ast.parse(code).body
    if isinstance(statement, ast.Expr):
        return eval(code, names)
    exec(code, names)
    target = statement.targets[0]
    assigned = target.elts if isinstance(target, ast.Tuple) else [target]
    return [names[name.id] for name in assigned]


def use(value, names):
    """A scaler adjusts, an optimizer steps, a train step runs."""
    if isinstance(value, list):
        for part in value:
            use(part, names)
    elif isinstance(value, jls.types.LossScaler):
        value.adjust(value.init(), False)
    elif isinstance(value, jls.types.MagnitudeScaler):
        value.adjust(value.init(), jnp.inf)
    elif isinstance(value, optax.GradientTransformation):
        opt_state = value.init(names["params"])
        _, opt_state = value.update(names["grads"], opt_state, names["params"])
        assert jls.metrics(opt_state)["applied"]
    elif getattr(value, "__qualname__", "").startswith("train_step."):
        _, report = value(names["state"], names["batch"])
        assert not report.skipped


@pytest.mark.parametrize(("there", "ours"), MIGRATION, ids=[r[0] for r in MIGRATION])
def test_what_the_migration_table_says_runs(there, ours, namespace):
    codes = code_in(ours)
    assert bool(codes) == (there not in NOT_NEEDED)
    names = dict(namespace)
    for code in codes:
        use(value_of(code, names), names)


@pytest.mark.parametrize("scaler", [row[0] for row in table("Choosing a scaler")])
def test_scalers_of_the_table_run(scaler):
    for code in code_in(scaler):
        use(value_of(code, {"jls": jls}), {})


def test_scaler_table_names_every_scaler():
    text = str(table("Choosing a scaler"))
    presets = [n for n in vars(jls.presets) if not n.startswith("_") and n.islower()]
    presets = [n for n in presets if callable(getattr(jls.presets, n))]
    scalers = ["static", "dynamic", "hysteresis", "adaptive"]
    for name in (*scalers, "cautious", "recent_max", *presets):
        assert name in text


# Every public method and argument of torch's and Paddle's GradScaler, of MindSpore's
# loss scalers, managers and cells, and of MindFormers' cells.
THEIRS = """
scale unscale_ unscale step update minimize is_enable is_enabled state_dict
load_state_dict get_scale get_growth_factor set_growth_factor get_backoff_factor
set_backoff_factor get_growth_interval set_growth_interval is_use_dynamic_loss_scaling
get_init_loss_scaling set_init_loss_scaling get_incr_ratio set_incr_ratio get_decr_ratio
set_decr_ratio get_incr_every_n_steps set_incr_every_n_steps get_decr_every_n_nan_or_inf
set_decr_every_n_nan_or_inf device init_scale growth_factor backoff_factor
growth_interval enabled enable init_loss_scaling incr_ratio decr_ratio
incr_every_n_steps decr_every_n_nan_or_inf use_dynamic_loss_scaling LossScaler
StaticLossScaler DynamicLossScaler scale_value scale_factor scale_window adjust
all_finite FixedLossScaleManager DynamicLossScaleManager get_loss_scale
update_loss_scale get_update_cell drop_overflow_update get_drop_overflow_update
DynamicLossScaleUpdateCell FixedLossScaleUpdateCell TrainOneStepWithLossScaleCell
network optimizer scale_sense overflow set_sense_scale start_overflow_check
get_overflow_status process_loss_scale MFTrainOneStepCell use_clip_grad max_grad_norm
local_norm size calculate_per_token_loss use_skip_data_by_global_norm
global_norm_spike_threshold AdaptiveLossScaleUpdateCell PmaAdamW
"""


def test_migration_table_has_every_name_of_the_other_systems():
    words = {word for row in MIGRATION for word in re.findall(r"\w+", row[0])}
    assert set(THEIRS.split()) - words == set()


def test_notes_of_the_migration_table_are_those_that_it_refers_to():
    section = TEXT.split("\n## Coming from another system\n")[1].split("\n## ")[0]
    notes = re.findall(r"^(\d+)\. ", section, re.M)
    assert notes == re.findall(r"\[(\d+)\] \|", section)


def test_health_says_what_the_readme_says(capsys):
    run("What a healthy run looks like")
    said = re.search(r"^```text\n(stalled.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1]
    assert capsys.readouterr().out.split() == said.split()


def test_underflow_block_prints_what_the_readme_says(capsys):
    run("Detecting underflow")
    printed = capsys.readouterr().out.splitlines()
    block = BLOCKS["Detecting underflow"]
    for line, promised in zip(printed, re.findall(r"# (.*)", block), strict=False):
        assert promised.endswith(line)
    table = re.search(r"^```text\n(1 of 2.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1]
    assert printed[2:] == table.splitlines()


def test_record_of_the_run_prints_what_the_readme_says(capsys):
    names = run("A record of the run")
    progress, *summary = capsys.readouterr().out.splitlines()
    assert progress == re.search(r"# (loss.*)", BLOCKS["A record of the run"])[1]
    assert summary == names["history"].summary().splitlines()
    assert names["history"]["loss_scale"].tolist() == [2.0**12, 2.0**13] + [2.0**12] * 2


def test_waste_table_is_the_one_that_the_notebook_has_measured():
    """The stored output, since another version of JAX may give other numbers."""
    notebook = nbformat.read(ROOT / "notebooks/04_scalers.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    (measured,) = (
        output.data["text/markdown"]
        for output in outputs
        if "text/markdown" in output.get("data", {})
    )
    section = TEXT.split("\n### What each scaler wastes\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines == measured.splitlines()
    for scaler in code_in("".join(row.split("|")[1] for row in lines)):
        use(value_of(scaler, {"jls": jls}), {})


def test_links_and_extras_exist():
    for target in re.findall(r"\]\(([^)#h][^)]*)\)", TEXT):
        assert (ROOT / target).exists(), target
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r'pip install -e "\.\[(\w+)\]"', TEXT):
        assert extra in extras["optional-dependencies"]
