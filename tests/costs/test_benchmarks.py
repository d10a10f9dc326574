"""The benchmarks run, and compare what is the same: one step, by all contestants."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import contestants, report
from benchmarks.__main__ import main
from benchmarks.contestants import FLOOR, Rules
from benchmarks.sizes import TINY
from benchmarks.workloads import workloads

pytestmark = pytest.mark.standard_promotion

NAMES = contestants.available()
# What a bad batch leaves of each: its parameters, and the optimizer's state.
KEEPS = {
    "optax": (False, False),
    "apply_if_finite": (True, True),
    "flax": (True, True),
    "jmp": (True, False),
    "mpx": (True, True),
    "jls": (True, True),
}


def workload(name):
    return next(one for one in workloads(TINY) if one.name == name)


def run(name, optimizer, problem, batches):
    """The parameters and the state after a step with each of the batches."""
    contestant = contestants.ALL[name](optimizer, problem.loss_fn, Rules())
    params, state = problem.params, contestant.init(problem.params)
    step = jax.jit(contestant.step)
    for batch in batches:
        params, state, loss = step(params, state, batch)
        assert np.isfinite(loss) or name == FLOOR
    return params, state


@pytest.fixture(scope="module")
def problem():
    return workload("step many leaves, adamw").problem()


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_contestants_compute_the_same_update(problem):
    optimizer = optax.sgd(0.5, momentum=0.9)
    start = flat(problem.params)
    moves = {
        name: flat(run(name, optimizer, problem, [problem.good] * 3)[0]) - start
        for name in NAMES
    }
    size = np.linalg.norm(moves[FLOOR])
    assert size > 1e-3
    for name, move in moves.items():
        assert np.linalg.norm(move - moves[FLOOR]) < 2e-3 * size, name


@pytest.mark.parametrize("name", NAMES)
def test_contestants_skip_an_overflow_as_documented(name, problem):
    optimizer = optax.sgd(0.5, momentum=0.9)
    before, _ = run(name, optimizer, problem, [problem.good])
    after, state = run(name, optimizer, problem, [problem.good, problem.bad])
    same = bool(np.all(flat(before) == flat(after)))
    finite = all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state))
    assert (same, finite) == KEEPS[name]


def test_given_gradients_are_the_gradients():
    problem = workload("update adamw").problem()
    grads = jax.grad(problem.loss_fn)(problem.params, problem.good)
    assert np.array_equal(flat(grads), flat(problem.good))
    assert not np.all(np.isfinite(flat(problem.bad)))


def test_named_dimensions_are_all_there():
    names = " ".join(one.name for one in workloads(TINY))
    for word in (
        *("update", "step", "transformer", "convnet", "many leaves", "clip", "adamw"),
        *("sgd", "adafactor", "muon", "accumulation over 8"),
    ):
        assert word in names


def test_command_writes_figures_and_picture(tmp_path, capsys):
    where = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    options = ["--quick", "--sizes", "tiny", "--rounds", "3", "--minutes", "9"]
    chosen = ["--contestants", "flax", "jls", "--workloads", "leaves"]
    main([*where, *options, *chosen])
    said = capsys.readouterr().out
    assert "Time of a step / plain optax" in said
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "b.json").read_text())
    assert set(results) == {"about", "workloads"}
    assert results["about"]["sizes"] == "tiny"
    assert list(results["workloads"]) == ["step many leaves, adamw"]
    for one in results["workloads"].values():
        assert list(one["results"]) == ["optax", "jls", "flax"]
        for figure in one["results"].values():
            assert figure["bytes_accessed"] > figure["temporary_bytes"] >= 0
            assert figure["peak_bytes"] > 0
            assert figure["kernels"] > 0
            assert figure["compile_seconds"] > 0
            assert figure["rounds"] == 3
            for name in ("ratio", "seconds_per_step"):
                spread = figure[name]
                assert spread["q1"] <= spread["median"] <= spread["q3"]
        assert one["results"]["optax"]["ratio"]["median"] == 1.0
    main(["--markdown", str(tmp_path / "b.json")])
    said = capsys.readouterr().out
    assert "| workload | jls | flax |\n|---|--:|--:|\n" in said


def test_where_jls_is_not_the_least_the_report_says_so():
    figures = {
        "optax": {"bytes_accessed": 700},
        "jls": {"bytes_accessed": 800, "temporary_bytes": 9000},
        "flax": {"bytes_accessed": 1400, "temporary_bytes": 10},
    }
    (said,) = report.not_least("update", {"results": figures}, report.MEASURED)
    assert said.endswith("more: bytes of temporary memory 9,000, flax 10")


def test_time_is_up_for_what_is_left(tmp_path):
    where = ["--json", str(tmp_path / "b.json")]
    results = main(
        [*where, "--sizes", "tiny", "--minutes", "1e-9", "--contestants", "jls"]
    )
    assert results["workloads"] == {}
