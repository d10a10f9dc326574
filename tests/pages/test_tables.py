"""The tables of the documentation: each cell runs, and nothing is missing."""

import ast
import functools
import re
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import nbformat
import optax
import pytest
from code_blocks import blocks, execute
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import jls

pytestmark = pytest.mark.standard_promotion

ROOT = Path(__file__).parents[2]


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def table(text):
    """The rows of the first table of two columns, without titles of groups."""
    section = text.split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 2 for row in rows)
    return [row for row in rows if row[1]]


def code_in(cell):
    return re.findall(r"`([^`]+)`", cell)


SYSTEMS = page("coming_from").split("\n## ")[1:]
MIGRATION = [row for section in SYSTEMS for row in table(section)]
SCALERS = table(page("scalers"))
NOT_NEEDED = {
    "Paddle `decorate` at `O2`: weights in half, a float32 copy of them in the "
    "optimizer",
    "`auto_mixed_precision` at `O2`: weights in half",
    "`drop_overflow_update=True`, `get_drop_overflow_update` [3]",
    "torch `is_enabled`; Paddle `is_enable`",
}


@pytest.fixture(scope="module")
def namespace():
    """The names that the cells of the migration table use."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = next(x.code for x in blocks(readme) if x.language == "python")
    names = execute(code, "README.md", {"__name__": "page"})
    params, batch, loss_fn = names["params"], names["batch"], names["loss_fn"]
    params = params | {"bias": jnp.zeros(1)}
    inner, scaler = optax.adamw(1e-3), jls.dynamic()
    scaler_state, overflow = scaler.init(), jnp.bool_(False)
    optimizer = jls.loss_scaled(inner, scaler)
    opt_state = optimizer.init(params)
    loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
    saved = flax.serialization.to_state_dict(opt_state)
    labels = {
        "up": "a",
        "down": "a",
        "bias": "b",
    }  # of the parameters, for optax.partition
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
    if "bfloat16_params" in ours:
        cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16), names["params"])
        names["params"] = cast
    for code in codes:
        use(value_of(code, names), names)


@pytest.mark.parametrize("scaler", [row[0] for row in SCALERS])
def test_scalers_of_the_table_run(scaler):
    for code in code_in(scaler):
        use(value_of(code, {"jls": jls}), {})


def test_scaler_table_names_every_scaler():
    text = str(SCALERS)
    presets = [n for n in jls.presets.__all__ if "spike" not in n]  # on their own page
    folder = Path(jls.__file__).parent / "_scalers"
    scalers = {path.stem for path in folder.glob("[a-z]*.py")} - {"rule"}
    for name in (*scalers, *presets):
        assert name in text


# Every public method and argument of torch's and Paddle's GradScaler, of MindSpore's
# loss scalers, managers and cells, of MindFormers' cells, and of jmp.
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
global_norm_spike_threshold AdaptiveLossScaleUpdateCell PmaAdamW get_policy
cast_to_compute DynamicLossScale StaticLossScale NoOpLossScale period factor select_tree
"""


def test_migration_table_has_every_name_of_the_other_systems():
    words = {word for row in MIGRATION for word in re.findall(r"\w+", row[0])}
    assert set(THEIRS.split()) - words == set()


def test_notes_of_a_migration_table_are_those_that_it_refers_to():
    counts = []
    for section in SYSTEMS:
        notes = re.findall(r"^(\d+)\. ", section, re.M)
        assert notes == re.findall(r"\[(\d+)\] \|", section)
        counts.append(len(notes))
    assert counts[:2] == [7, 11]


def test_flax_step_before_and_after_takes_the_same_steps(namespace):
    """With `DynamicScale` and without it: on a good batch and on a bad one."""
    (diff,) = (x.code for x in blocks(page("coming_from")) if x.language == "diff")
    before, after = (
        "".join(line[1:] for line in diff.splitlines(True) if line[0] in " " + sign)
        for sign in "-+"
    )
    old, new = (execute(x, "step.py", dict(namespace)) for x in (before, after))
    inner, params, (x, *others) = (namespace[k] for k in ("inner", "params", "batch"))
    tx = jls.loss_scaled(inner, jls.presets.flax())
    kind = {"apply_fn": None, "params": params}
    plain, state = TrainState.create(tx=inner, **kind), TrainState.create(tx=tx, **kind)
    scale = DynamicScale()
    for inputs in (x, x.at[0, 0].set(jnp.nan), x):
        batch = (inputs, *others)
        plain, scale, loss = old["train_step"](plain, scale, batch)
        state, report = new["train_step"](state, batch)
        assert report.skipped == (not jnp.isfinite(loss))
        for name, weights in plain.params.items():
            assert jnp.allclose(weights, state.params[name], rtol=1e-5, atol=1e-6)
    jls.check_step(new["train_step"], state, batch).raise_if_broken()


# The rows of docs/costs.md, by their names in benchmarks/results.
COSTS = [
    "transformer, adamw",
    "transformer, clip + adamw",
    "1,000 leaves, adamw",
    "update, adamw",
    "update, clip + adamw",
]


def test_costs_are_the_medians_of_the_benchmarks():
    medians = {}
    results = (ROOT / "benchmarks/results/README.md").read_text(encoding="utf-8")
    for line in results.split("\n## Numbers\n")[1].splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name and len(cells) == 6 and name not in medians:
            medians[name] = [re.sub(r" \(.*\)", "", cell) for cell in cells[1:5]]
    guarded = page("costs").split("\n## A guarded step\n")[1].split("\n## ")[0]
    rows = [line for line in guarded.splitlines() if line.startswith("| ")][1:]
    costs = [[cell.strip() for cell in row.strip("|").split("|")[1:]] for row in rows]
    assert costs == [medians[name] for name in COSTS]


def test_tables_of_scalers_are_those_that_the_notebook_has_measured():
    """The stored output, since another version of JAX may give other numbers."""
    notebook = nbformat.read(ROOT / "notebooks/04_scalers.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    _, queues, waste = (
        output.data["text/markdown"]
        for output in outputs
        if "text/markdown" in output.get("data", {})
    )
    text = page("scalers")
    (title, line, *rows) = (
        text.split("\n## Lose no batch")[1].split("\n\n")[2].split("\n")
    )
    assert len(rows) == 3
    assert {title, line, *rows} <= set(queues.splitlines())

    # For each task: the steps skipped, the steps that underflow, the final loss.
    rows = [line.strip("|").split("|") for line in waste.splitlines()[2:]]
    skipped = {}
    for scaler, *numbers in ([cell.strip() for cell in row] for row in rows):
        skipped[scaler] = [int(number) for number in numbers[::3]]
        for code in code_in(scaler):
            use(value_of(code, {"jls": jls}), {})
    most = max(skipped["`jls.dynamic()`"])
    assert max(skipped["`jls.dynamic()`, calibrated"]) == 0
    said = f"`jls.dynamic()` up to {most} of the first, and none once it is calibrated."
    assert said in " ".join(text.split())
