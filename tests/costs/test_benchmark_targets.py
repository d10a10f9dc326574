"""What is compiled for other chips: the way there and back."""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import (
    ENVIRONMENT,
    compiled,
    on_target,
    placement,
    target_report,
    targets,
)
from benchmarks import target_workloads as listed
from benchmarks.__main__ import main
from benchmarks.contestants import Rules
from benchmarks.target_workloads import TINY, target_workloads
from benchmarks.workloads import many_leaves

pytestmark = pytest.mark.standard_promotion

QUICK = ["adamw", "clip + adamw"]
WORKLOADS = {one.name: one for one in target_workloads(TINY)}


def small():
    """A model that compiles in no time."""
    return many_leaves(*TINY.many_leaves)


def test_models_have_shapes_without_numbers():
    size = listed.SIZE
    problem = compiled.abstract(
        lambda: listed.transformer(size.transformer, size.tokens)
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    assert 218e6 < count < 220e6  # as the tables say
    assert all(
        isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(problem[2:])
    )


def test_named_dimensions_are_all_there():
    names = " ".join(WORKLOADS)
    for word in (
        *("adamw", "clip", "sgd", "adafactor", "muon", "lion", "check_updates"),
        *("bfloat16", "train_step", "ResNet", "1,000 leaves"),
    ):
        assert word in names


def test_train_steps_train_alike():
    workload = WORKLOADS["train_step, clip + adamw"]
    problem = small()
    losses = {}
    for contestant, make in workload.contestants.items():
        run = make(workload.optimizer, problem.loss_fn, Rules())
        params, state = problem.params, run.init(problem.params)
        step = jax.jit(run.step)
        for _ in range(2):
            params, state, report = step(params, state, problem.good)
        losses[contestant] = report[0]
        assert jax.tree.structure(params) == jax.tree.structure(problem.params)
        if contestant not in ("optax", "apply_if_finite"):
            kept, _, _ = step(params, state, problem.bad)
            assert all(
                map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(params))
            )
    assert len({round(float(loss), 4) for loss in losses.values()}) == 1


# The CPU in the place of a chip: what is under test is the way there and back.


@pytest.fixture
def here(monkeypatch):
    def devices(target, chips=1):
        return jax.devices("cpu")[:1]

    monkeypatch.setattr(targets.Target, "devices", devices)
    monkeypatch.setattr(targets.Target, "check", lambda target: None)
    monkeypatch.setattr(compiled.jax, "clear_caches", lambda: None)
    some = [WORKLOADS[name]._replace(problem=small) for name in QUICK]
    monkeypatch.setattr(on_target, "target_workloads", lambda size: some)


def command(tmp_path, *options):
    where = ["--json", str(tmp_path / "b.json")]
    return main([*where, "--sizes", "tiny", *options])


def test_command_compiles_and_says_so(here, tmp_path, capsys):
    command(tmp_path, "--target", "h100", "--quick", "--contestants", "jls", "flax")
    said = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3: compiled, not run" in said
    results = json.loads((tmp_path / "b.json").read_text())
    assert results["about"]["how"] == "compiled, not run"
    assert {"jax", "optax", "jls"} <= set(results["about"]["versions"])
    assert list(results["workloads"]) == QUICK
    for workload in results["workloads"].values():
        assert list(workload["results"]) == ["optax", "jls", "flax"]
        for figure in workload["results"].values():
            assert figure["bytes_accessed"] > 28 * workload["parameters"]
            assert figure["kernels"] > 0
            assert figure["collectives"] == {}
            assert figure["compile_seconds"] > 0
    main(["--markdown", str(tmp_path / "b.json")])
    assert "| workload | optax | jls | flax |" in capsys.readouterr().out


def test_all_targets_that_can_be_compiled_for(here, tmp_path, capsys, monkeypatch):
    def check(target):
        if target.kind == "tpu":
            raise targets.MissingCompilerError(f"{target.name}: no compiler")

    monkeypatch.setattr(targets.Target, "check", check)
    monkeypatch.setattr(
        on_target, "run_workload", lambda *_: {"parameters": 1, "results": {}}
    )
    results = command(tmp_path, "--target", "all", "--quick")
    assert set(results) == {"h100", "a100", "v100", "t4", "b200"}
    assert (tmp_path / "b_t4.json").exists()
    said = capsys.readouterr().out
    assert said.count("Skipped v") == 3


def test_what_does_not_compile_leaves_the_other_rows(
    here, tmp_path, capsys, monkeypatch
):
    compile_step = on_target.compile_step

    def failing(workload, name, *args):
        if name == "jls":
            raise ValueError("cannot\nwork")
        return compile_step(workload, name, *args)

    monkeypatch.setattr(on_target, "compile_step", failing)
    chosen = ["--workloads", "adamw", "--contestants", "jls", "flax"]
    command(tmp_path, "--target", "v5e", "--quick", *chosen)
    results = json.loads((tmp_path / "b.json").read_text())["workloads"]["adamw"][
        "results"
    ]
    assert results["jls"] == {"error": "ValueError: cannot"}
    assert results["flax"]["kernels"] > 0
    assert "adamw, jls: ValueError: cannot" in capsys.readouterr().out


def test_a_program_that_cannot_be_read_still_has_bytes(
    here, tmp_path, capsys, monkeypatch
):
    def unreadable(text):
        raise jax.errors.JaxRuntimeError("async-update has 4 operands")

    monkeypatch.setattr(compiled, "Program", unreadable)
    chosen = ["--workloads", "adamw", "--contestants", "jls", "flax"]
    command(tmp_path, "--target", "v6e", *chosen)
    results = json.loads((tmp_path / "b.json").read_text())["workloads"]["adamw"][
        "results"
    ]
    assert results["jls"]["bytes_accessed"] > 0
    assert results["jls"]["kernels"] is None
    assert "?: this libtpu is newer than jaxlib" in capsys.readouterr().out


def test_what_does_not_fit_says_by_how_much(here):
    tiny = targets.TARGETS["t4"]._replace(memory=1000)
    where = placement.whole(jax.devices("cpu")[:1])
    problem = compiled.abstract(small)
    one = compiled.compile_step(WORKLOADS["adamw"], "optax", problem, tiny, where)
    assert one["too_large_by"] == one["total_bytes"] - 1000
    workload = {"parameters": 1, "chips": 1, "results": {"optax": one}}
    about = {"memory": 1000, "device": "Tesla T4"}
    (said,) = target_report.lines({"about": about, "workloads": {"adamw": workload}})
    assert "adamw, optax: does not fit: needs 0.00 GB, 0.00 GB more than" in said


def test_where_jls_is_not_the_least_the_report_says_so():
    def one(size, kernels, temporary):
        figures = {"bytes_accessed": size, "kernels": kernels}
        return figures | {"temporary_bytes": temporary, "collectives": {}}

    workload = {
        "parameters": 1000,
        "chips": 1,
        "results": {
            "optax": one(1000, 1, 0),
            "jls": one(3005, 4, 10**6),
            "flax": one(3000, 3, 10**6),
            "jmp": one(2000, 2, 0),  # protects less
        },
    }
    said = ["adamw: jls needs more: kernels 4, flax 3"]
    assert target_report.where_not_least("adamw", workload) == said
    assert target_report.lines({"about": {}, "workloads": {"adamw": workload}}) == said


def test_collectives_beyond_plain_optax():
    def one(count, size):
        figures = {"bytes_accessed": 10**9, "kernels": 5, "temporary_bytes": 0}
        return figures | {
            "collectives": {"all-reduce": {"count": count, "bytes": size}}
        }

    results = {"optax": one(3, 10**6), "jls": one(4, 10**6 + 4), "flax": one(3, 10**6)}
    workload = {"parameters": 10, "chips": 4, "results": results}
    more = [target_report.more_collectives(workload, name) for name in results]
    assert more == ["none", "+1 all-reduce (+4 bytes)", "none"]
    table = target_report.tables(
        {"about": {"device": "TPU", "how": "compiled"}, "workloads": {"a": workload}}
    )[0]
    first, second, _ = map(tuple, table.rows)
    assert first == ("a", "optax", "1,000", "+0.00 %", "5", "0", "3 all-reduce (1 MB)")
    assert second == ("", "jls", "1,000", "+0.00 %", "5", "0", more[1])


def test_a_target_must_be_known_and_its_compiler_installed(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["--target", "tpu"])
    assert "'h100', 'a100', 'v100', 't4', 'b200', 'v5e'" in capsys.readouterr().err
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    for name, extra in (("v5e", "tpu-aot"), ("t4", "cuda-aot")):
        with pytest.raises(SystemExit):
            main(["--target", name])
        (said,) = capsys.readouterr().err.splitlines()
        assert said.endswith(f'pip install -e ".[{extra}]"')


def test_configurations_of_gpus_differ():
    configs = {one.config for one in targets.TARGETS.values() if one.kind == "cuda"}
    assert len(configs) == 5
    t4 = targets.TARGETS["t4"].config
    assert "major: 7 minor: 5" in t4
    assert "core_count: 40" in t4


@pytest.mark.parametrize(
    ("chips", "axes", "shape"),
    [(1, 2, (2, 2)), (8, 2, (4, 2)), (256, 2, (16, 16)), (4, 3, (2, 2, 1))],
)
def test_topologies(chips, axes, shape):
    assert targets.tpu_shape(chips, axes) == shape


def test_arrays_are_split_along_their_largest_axes():
    spec = placement.split
    assert spec((512, 1024), {"data": 4}) == jax.P(None, "data")
    assert spec((512, 1024), {"model": 4, "data": 2}) == jax.P("data", "model")
    assert spec((1024, 3), {"model": 4, "data": 2}) == jax.P(None, None)  # small
    assert spec((10**5, 3), {"model": 4, "data": 2}) == jax.P("model", None)


def test_many_chips_have_all_meshes(tmp_path, capsys):
    command(tmp_path, "--target", "v5e", "--chips", "4", "16", "--list")
    names = capsys.readouterr().out.splitlines()
    assert len(names) == 2 * 3 * 2
    assert "clip + adamw, fsdp x tensor, 16 chips" in names
    named = ["--workloads", "adamw", "--list"]
    command(tmp_path, "--target", "v5e", "--chips", "4", *named)
    names = capsys.readouterr().out.splitlines()
    assert names == [f"adamw, {mesh}, 4 chips" for mesh in placement.MESHES]


def test_figures_of_many_chips_leave_those_of_one_chip_alone():
    one = argparse.Namespace(target="v5e", chips=[1])
    many = argparse.Namespace(target="v5e", chips=[4])
    every = argparse.Namespace(target="all", chips=[1])

    def path(given, options):
        return str(on_target.path_for(given, "v5e", options))

    assert path(None, one) == path(None, every) == "benchmarks_v5e.json"
    assert path(None, many) == "benchmarks_v5e_chips.json"
    assert path(Path("my.json"), one) == "my.json"
    assert path(Path("my.json"), every) == "my_v5e.json"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "v5e", "--chips", "6"], "--chips must be powers of two, got 6"),
        (["--target", "v5e", "--chips", "512"], "at most 256 for v5e, got 512"),
        (["--target", "v5e", "--device", "cpu"], "does not go with --target"),
        (["--target", "v5e", "--workloads", "nothing"], "no workload has 'nothing'"),
        (["--target", "v5e", "--sizes", "gpu"], "--sizes must be tiny, got gpu"),
        (
            ["--target", "v5e", "--minutes", "-1"],
            "--minutes must be more than 0, got -1",
        ),
        (["--chips", "4"], "--chips needs --target"),
        (["--rounds", "2"], "--rounds must be at least 3, got 2"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json: there is no folder"),
        (["--plot", "x.xyz"], "--plot must end in .png or .svg or .pdf, got x.xyz"),
        (["--markdown", "nowhere.json"], "--markdown takes files that --json has"),
    ],
)
def test_bad_options_are_named_before_anything_runs(options, said, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert said in capsys.readouterr().err


def test_a_tpu_without_a_tpu(monkeypatch):
    pytest.importorskip("libtpu")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    target = targets.TARGETS["v5e"]
    where = placement.fsdp(target.devices(4))
    problem = compiled.abstract(lambda: listed.transformer(TINY.transformer, (4, 8)))
    workload = WORKLOADS["clip + adamw"]
    one = compiled.compile_step(workload, "jls", problem, target, where)
    assert one["bytes_accessed"] > 0
    assert "all-reduce" in one["collectives"]
