"""Counting in the text of compiled programs, and what is compiled for other chips."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compiled, hlo, on_target, placement, target_report, targets
from benchmarks import target_workloads as listed
from benchmarks.__main__ import main
from benchmarks.hlo import Program
from benchmarks.target_workloads import TINY, target_workloads
from benchmarks.workloads import many_leaves

pytestmark = pytest.mark.standard_promotion

QUICK = ["adamw", "clip + adamw"]
WORKLOADS = {one.name: one for one in target_workloads(TINY)}


def small():
    """A model that compiles in no time."""
    return many_leaves(*TINY.many_leaves)


def program(*lines, other=""):
    body = "\n".join(f"  {line}" for line in lines)
    return Program(
        f"HloModule m\n{other}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def compiled_here(fun, *args):
    return Program(jax.jit(fun).lower(*args).compile().as_text())


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[2,3]{1,0:T(8,128)(2,1)S(1)}", 24),
        ("(f16[8]{0}, (pred[3]{0}, s32[]), /*index=2*/bf16[2]{0})", 16 + 3 + 4 + 4),
        ("s4[3]", 2),
        ("f8e4m3fn[5]", 5),
        ("c64[2]", 16),
        ("f32[0]", 0),
        ("token[]", 0),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert hlo.array_bytes(shape) == size


def test_what_moves_no_data_is_free():
    found = program(
        "%p = f32[8]{0:T(8)} parameter(0)",
        "%b = f32[2,4]{1,0} bitcast(%p)",
        "%t = (f32[2,4]{1,0}, f32[8]{0}) tuple(%b, %p)",
        '%a = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"',
        "%g = f32[8]{0} get-tuple-element(%t), index=1",
        '%n = f32[8]{0} negate(%g), metadata={op_name="jit(f)/neg"}',
        "ROOT %s = f32[8]{0:T(8)(2,1)} add(%n, %p)",
    )
    assert (found.kernels, found.bytes) == (2, 64 + 96)
    assert found.launched[0].operation == "neg"
    assert found.signatures() == {
        ("negate", "f32[8] -> f32[8]"): 1,
        ("add", "2 f32[8] -> f32[8]"): 1,
    }


LOOP = """
%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %j = s32[] add(%i, %i)
  %y = f32[8]{0} sine(%x)
  ROOT %r = (s32[], f32[8]{0}) tuple(%j, %y)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %c = pred[] compare(%i, %i), direction=LT
}
"""


@pytest.mark.parametrize(
    ("config", "kernels", "size"),
    [
        (', backend_config={"known_trip_count":{"n":"5"}}', 10, 5 * (8 + 64)),
        ("", 3, 8 + 64 + 5),  # once, and the condition
    ],
)
def test_a_loop_counts_as_often_as_it_is_known_to_run(config, kernels, size):
    found = program(
        "%p = (s32[], f32[8]{0}) parameter(0)",
        "ROOT %w = (s32[], f32[8]{0}) while(%p), condition=%condition, body=%body"
        + config,
        other=LOOP,
    )
    assert (found.kernels, found.bytes) == (kernels, size)


BRANCHES = """
%small (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%x)
}

%large (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  %s = f32[8]{0} sine(%y)
  ROOT %c = f32[8]{0} cosine(%s)
}
"""


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%small, %large}",
        "true_computation=%large, false_computation=%small",
    ],
)
def test_the_larger_branch_counts(branches):
    found = program(
        "%p = f32[8]{0} parameter(0)",
        "%i = s32[] constant(0)",
        f"ROOT %c = f32[8]{{0}} conditional(%i, %p, %p), {branches}",
        other=BRANCHES,
    )
    assert (found.kernels, found.bytes) == (2, 128)


def test_called_computations_and_asynchronous_instructions_count_once():
    found = program(
        "%p = f32[8]{0} parameter(0)",
        "%c = f32[8]{0} call(%p), to_apply=%small",
        "%s = (f32[8]{0}, f32[16]{0}) all-gather-start(%c), dimensions={0}",
        "%d = f32[16]{0} all-gather-done(%s)",
        "%k = (f32[16]{0}, f32[16]{0:S(1)}, u32[]{:S(2)}) copy-start(%d)",
        "ROOT %e = f32[16]{0:S(1)} copy-done(%k)",
        other=BRANCHES,
    )
    assert found.kernels == 2  # the copy runs in the background
    assert found.bytes == 64 + (32 + 64) + 128
    assert found.collectives == {"all-gather": {"count": 1, "bytes": 64}}


FUSED = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%reduced (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %r = f32[64]{0} all-reduce(%x), replica_groups={}, to_apply=%add
}

%sliced (x: f32[64], y: f32[8], i: s32[]) -> f32[8] {
  %i = s32[] parameter(2)
  %x = f32[64]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %d = f32[8]{0} dynamic-slice(%x, %i), dynamic_slice_sizes={8}
  ROOT %s = f32[8]{0} add(%d, %y)
}

%updated (x: f32[64], y: f32[8], i: s32[]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = f32[64]{0} dynamic-update-slice(%x, %y, %i)
}
"""


def test_fusions_read_what_they_slice_and_write_what_they_update():
    found = program(
        "%x = f32[64]{0} parameter(0)",
        "%y = f32[8]{0} parameter(1)",
        "%i = s32[] parameter(2)",
        "%s = f32[8]{0} fusion(%x, %y, %i), kind=kLoop, calls=%sliced",
        "%r = f32[64]{0} fusion(%x), kind=kCustom, calls=%reduced",
        "ROOT %u = f32[64]{0} fusion(%r, %s, %i), kind=kLoop, calls=%updated",
        other=FUSED,
    )
    sizes = [one.bytes for one in found.launched]
    assert sizes == [32 + 32 + 4 + 32, 256 + 256, 32 + 4 + 32]
    assert found.collectives == {"all-reduce": {"count": 1, "bytes": 256}}


def test_programs_of_this_machine():
    x = jnp.ones((4, 4))
    one = compiled_here(lambda x: jnp.tanh(x) + 1, x)
    assert (one.kernels, one.bytes) == (1, 128)
    assert compiled_here(lambda x: x @ x @ x, x).kernels == 2

    def loop(x):
        return jax.lax.fori_loop(0, 7, lambda i, x: x @ x, x)

    assert compiled_here(loop, x).kernels >= 7
    branch = compiled_here(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), x)
    assert branch.kernels >= 2  # the comparison and a branch


def test_kernels_of_one_program_that_another_lacks():
    one = program(
        "%p = f32[8]{0} parameter(0)",
        '%n = f32[8]{0} negate(%p), metadata={op_name="jit(f)/neg"}',
        "%a = f32[8]{0} add(%n, %p)",
        "ROOT %b = f32[8]{0} add(%a, %p)",
    )
    other = program("%p = f32[8]{0} parameter(0)", "ROOT %a = f32[8]{0} add(%p, %p)")
    first, second = compiled.what_only_one_launches(one, other)
    assert first == "1 x add () 2 f32[8] -> f32[8]: 96 bytes"
    assert second == "1 x negate (neg) f32[8] -> f32[8]: 64 bytes"


def test_models_have_shapes_without_numbers():
    size = listed.SIZE
    problem = compiled.abstract(
        lambda: listed.transformer(size.large, size.large_tokens)
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    assert 0.9e9 < count < 1.1e9
    assert all(
        isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(problem[2:])
    )


def test_named_dimensions_are_all_there():
    names = " ".join(WORKLOADS)
    for word in (
        *("adamw", "clip", "sgd", "adafactor", "muon", "lion", "accumulation over 8"),
        *("check_updates", "bfloat16", "Linen", "NNX", "ResNet", "1 B", "1,000 leaves"),
    ):
        assert word in names


@pytest.mark.parametrize("name", [n for n in WORKLOADS if "train_step" in n])
def test_train_steps_of_all_libraries_train_alike(name):
    workload = WORKLOADS[name]
    problem = small()
    losses = {}
    for contestant, make in workload.contestants.items():
        run = make(workload.optimizer, problem.loss_fn, workload.rules)
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
    where = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    return main([*where, "--sizes", "tiny", *options])


def test_command_compiles_and_says_so(here, tmp_path, capsys):
    command(tmp_path, "--target", "h100", "--quick", "--contestants", "jls", "flax")
    said = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3: compiled, not run" in said
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
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
    results = command(tmp_path, "--target", "all", "--quick", "--no-plot")
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
    command(tmp_path, "--target", "v5e", "--no-plot", "--quick", *chosen)
    results = json.loads((tmp_path / "b.json").read_text())["workloads"]["adamw"][
        "results"
    ]
    assert results["jls"] == {"error": "ValueError: cannot"}
    assert results["flax"]["kernels"] > 0
    assert "adamw, jls: ValueError: cannot" in capsys.readouterr().out


def test_what_does_not_fit_says_by_how_much(here):
    tiny = targets.TARGETS["t4"]._replace(memory=1000)
    where = placement.whole(jax.devices("cpu")[:1])
    problem = compiled.abstract(small)
    one = compiled.compile_step(WORKLOADS["adamw"], "optax", problem, tiny, where)
    assert one.figures["too_large_by"] == one.figures["total_bytes"] - 1000
    workload = {"parameters": 1, "chips": 1, "results": {"optax": one.figures}}
    about = {"memory": 1000, "device": "Tesla T4"}
    (said,) = target_report.lines({"about": about, "workloads": {"adamw": workload}})
    assert "adamw, optax: does not fit: needs 0.00 GB, 0.00 GB more than" in said
    said = on_target.shortened(
        RuntimeError(
            "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
            "Used 17.5G of 15.75G hbm. Exceeded hbm capacity by 1.75G.\n\nTotal"
        )
    )
    assert said == "does not fit: needs 17.5G of 15.75G, 1.75G too much"


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
        "only_jls": {"beside": "flax", "kernels": ["a", "b", "c", "d"]},
    }
    (worse,) = target_report.not_least("adamw", workload)
    assert worse == ("adamw: jls needs more: kernels 4, flax 3", "flax")
    assert target_report.extra_bytes(workload, "jls") == pytest.approx(2.005)
    results = {"about": {}, "workloads": {"adamw": workload}}
    assert target_report.lines(results)[1:] == [
        "    Only jls launches, beside flax:",
        *["    a", "    b", "    c"],
        "    and 1 more kinds: --explain",
    ]
    assert target_report.lines(results, explain=True)[-1] == "    d"


def test_collectives_beyond_plain_optax():
    def one(count, size):
        figures = {"bytes_accessed": 10**9, "kernels": 5, "temporary_bytes": 0}
        return figures | {
            "collectives": {"all-reduce": {"count": count, "bytes": size}}
        }

    results = {"optax": one(3, 10**6), "jls": one(4, 10**6 + 4), "flax": one(3, 10**6)}
    workload = {"parameters": 10, "chips": 4, "results": results}
    more = [target_report.more_collectives(workload, name) for name in results]
    assert more == ["", "+1 all-reduce (+4 bytes)", "none"]
    table = target_report.tables(
        {"about": {"device": "TPU", "how": "compiled"}, "workloads": {"a": workload}}
    )[0]
    row = [list(column.cells)[1] for column in table.columns]
    assert row == ["", "jls", "1,000", "+0.00 %", "5", "0", "4 (1 MB)", more[1]]


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


def test_a_tpu_without_a_tpu(monkeypatch):
    pytest.importorskip("libtpu")
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        monkeypatch.setenv(name, "1")
    target = targets.TARGETS["v5e"]
    where = placement.fsdp(target.devices(4))
    problem = compiled.abstract(WORKLOADS["clip + adamw"].problem)
    one = compiled.compile_step(
        WORKLOADS["clip + adamw"], "jls", problem, target, where
    )
    assert one.figures["bytes_accessed"] > 0
    assert "all-reduce" in one.figures["collectives"]
