"""The private parts of JAX: where one is missing, an answer is poorer, and no error."""

import ast
import re
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import jls
from jls._program import jaxprs
from jls._program.frames import Frame
from jls._program.places import place_of
from jls._tools.check.check import read_step

SOURCE = Path(jls.__file__).parent
# Names that only `jaxprs` may read.
PRIVATE = re.compile(
    r"\b(jax\._src|source_info|name_stack\b(?!\()|traceback\.frames|debug_info|"
    r"func_src_info|traced_for|inner_aval|ctx|get_bind_params|_prim)\b|"
    r"\.effects\b|"
    r"\b(equation|eqn|caller)\.params\b|\w\._trace\b"
)


def test_private_parts_are_read_in_one_place():
    for path in SOURCE.rglob("*.py"):
        if path.name == "jaxprs.py":
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            if "import" not in line:
                assert not PRIVATE.search(line), f"{path}: {line}"


def mesh():
    return jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def loss_fn(params, batch):
    """Of all kinds of control flow, in float16, with an inf in a loop."""

    @jax.custom_jvp
    def rule(x):
        return x * 2

    rule.defjvp(lambda x, t: (rule(x[0]), 2 * t[0]))

    def body(carry, x):
        hidden = jax.checkpoint(rule)(x * params["w"].astype(jnp.float16))
        return carry + jnp.exp(batch["big"].astype(jnp.float16) * hidden), hidden

    carry, hidden = lax.scan(body, jnp.zeros(3, jnp.float16), batch["x"])
    spec = PartitionSpec()
    on_devices = jax.shard_map(
        lambda x: lax.psum(x**2, "d"), mesh=mesh(), in_specs=spec, out_specs=spec
    )
    total = on_devices(hidden.astype(jnp.float32)).sum()
    total += lax.cond(total > 0, lambda x: x**3, lambda x: x, total)
    looped = lax.while_loop(
        lambda x: x[0] < 2, lambda x: (x[0] + 1, x[1] * 0.5), (0, total)
    )[1]
    return total + lax.stop_gradient(looped) + carry.astype(jnp.float32).sum()


OPTIMIZER = jls.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))


def step(params, opt_state, batch):
    loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss


def arguments(big):
    params = {"w": jnp.full(3, 0.5)}
    batch = {"x": jnp.full((2, 3), 0.5, jnp.float16), "big": jnp.float32(big)}
    return params, OPTIMIZER.init(params), batch


def read():
    """Reads the step, and its places; and a tracer, for a warning."""
    runner, findings = read_step(step, arguments(0.1), {})
    params, state, batch = arguments(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.make_jaxpr(lambda *args: jls.value_and_grad(loss_fn)(state, *args))(
            params, batch
        )
    root = Frame(runner.subject.reading.traced.program)
    places = [
        place_of(frame.site_of(number))
        for frame in root.all()
        for number in range(len(frame.jaxpr.eqns))
    ]
    return findings, places


def names_asked(patch, missing=(), blind=()):
    """The private names that are asked for; the missing ones are not found.

    Nor is any that the functions in `blind` ask for.
    """
    asked = set()
    part, parameters = jaxprs._part, jaxprs.parameters

    def is_missing(name, frame):
        asked.add(name)
        if frame.f_code.co_name == "parameter":
            frame = frame.f_back
        outer = frame.f_code.co_qualname.replace(".<locals>", "").split(".<")[0]
        return name in missing or outer.rpartition(".")[2] in blind

    class Parameters(dict):
        def get(self, name, default=None):
            if is_missing(name, sys._getframe(1)):
                return default
            return super().get(name, default)

    def watched_part(node, name, default=None):
        if is_missing(name, sys._getframe(1)):
            return default
        return part(node, name, default)

    patch.setattr(jaxprs, "_part", watched_part)
    # Without what it remembers of before.
    patch.setattr(jaxprs, "_names_in", jaxprs._names_in.__wrapped__)
    patch.setattr(jaxprs, "parameters", lambda x: Parameters(parameters(x)))
    return asked


def readers():
    """The functions of jls that read a private part of JAX: they call the door."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "_part(" not in text and "parameter(" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                calls = [x for x in ast.walk(function) if isinstance(x, ast.Call)]
                names = {getattr(x.func, "id", "") for x in calls}
                found |= {function.name} if names & {"_part", "parameter"} else set()
    return sorted(found - {"parameter"})


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
)


def half_loss(params, batch):
    """Of all kinds of calls, with products."""

    @jax.checkpoint
    def block(x):
        with jax.named_scope("block"):
            return jax.nn.silu(product(x, params["w"]))

    x = jax.nn.relu(block(checkpoint_name(batch, "kept") @ params["w"]))
    x = lax.conv_general_dilated(x[:, None], params["w"][:2, None], (1,), "SAME")[:, 0]
    x, _ = lax.scan(lambda x, _: (jax.nn.gelu(x @ params["w"]), ()), x, length=2)
    return jnp.mean(jax.jit(lambda x: x @ params["w"] - batch)(x) ** 2)


HALF = {"w": jnp.eye(4) / 2 + 0.1}, jnp.linspace(0.1, 1, 12).reshape(3, 4)


def half(*args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jls.autocast(half_loss, jnp.float16)(*args)


# What belongs together, in any version of JAX.
PARTS = {
    "lines": ("traceback", "frames", "file_name", "line_num", "function_name"),
    "names": ("name_stack",),
    "scopes": ("stack", "name"),
    "lines and names": ("source_info",),
    "functions of jax": ("debug_info", "func_src_info"),
    "tracers": ("_trace", "frame", "traced_for"),
    "references": ("inner_aval",),
    "calls": ("jaxpr", "call_jaxpr"),
    "remat": ("prevent_cse",),
    "scan": ("num_consts", "num_carry", "ft_in", "unpack", "length", "reverse"),
    "while": ("body_jaxpr", "body_nconsts", "cond_jaxpr", "cond_nconsts"),
    "cond": ("branches",),
    "devices": ("mesh", "in_specs", "out_specs", "check_vma", "manual_axes",
                "newly_manual_axes"),
    "axes that vary": ("mat", "varying", "vma"),
    "powers and sums": ("y", "axes", "axis_index_groups"),
    "scatter": ("update_jaxpr",),
    "options": ("_jit_info", "compiler_options_kvs"),
}  # fmt: skip


def names_read(patch, run):
    with patch.context() as local:
        asked = names_asked(local)
        run()
    return asked


def traced():
    jax.make_jaxpr(half)(*HALF)


@pytest.mark.more  # each goes with those of its reader, below
def test_reading_goes_on_without_any_one_name(monkeypatch):
    whole, places = read()
    assert not set(whole.of("broken")) | set(whole.of("not tried"))
    names, of_half = names_read(monkeypatch, read), names_read(monkeypatch, traced)
    assert names > {"func_src_info", "num_carry", "traced_for", "body_nconsts"}
    assert of_half > {"get_bind_params", "ctx", "user_context"}
    for name in sorted(names):
        with monkeypatch.context() as patch:
            names_asked(patch, {name})
            findings, _ = read()
        assert not findings.of("broken"), name
    for name in sorted(of_half - names):
        with monkeypatch.context() as patch:
            names_asked(patch, {name})
            traced()
    with monkeypatch.context() as patch:
        names_asked(patch, {"line_num"})
        assert {x.line for x in read()[1]} == {0} != {x.line for x in places}


@pytest.mark.more  # each goes with some others, below
@pytest.mark.parametrize("reader", readers())
def test_autocast_check_step_and_why_go_on_without_what(reader, monkeypatch):
    goes_on_without([reader], monkeypatch)


@pytest.mark.parametrize("number", range(3))
def test_autocast_check_step_and_why_go_on_without_a_third(number, monkeypatch):
    goes_on_without(readers()[number::3], monkeypatch)


def goes_on_without(blind, monkeypatch):
    expected = jax.grad(half)(*HALF)["w"]
    names_asked(monkeypatch, blind=blind)
    assert jnp.allclose(jax.grad(half)(*HALF)["w"], expected, rtol=1e-2, atol=1e-3)
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    train = jls.train_step(half_loss, optimizer, compute_dtype=jnp.float16)
    args = HALF[0], optimizer.init(HALF[0]), HALF[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not jls.check_step(jax.jit(train), *args).broken
        assert jls.why(half_loss, HALF[0], HALF[1] * jnp.inf).results


# The wrapper is known by these.
SCOPES = ("names", "scopes", "lines and names")
OTHERS = [group for group in PARTS if group not in SCOPES]


@pytest.mark.parametrize("group", SCOPES)
def test_why_and_calibrate_go_on_without_scopes(group, monkeypatch):
    names_asked(monkeypatch, PARTS[group])
    assert jls.why(step, *arguments(60.0)).births
    made = jls.calibrate(step, *arguments(0.1))
    assert made.ceiling is None
    assert "No update of the optimizer was found" in made.notes[0]


@pytest.mark.more  # each goes with some others, below
@pytest.mark.parametrize("group", OTHERS)
def test_why_and_calibrate_go_on_without(group, monkeypatch):
    finds_the_ceiling_without(PARTS[group], monkeypatch)


@pytest.mark.parametrize("number", range(3))
def test_why_and_calibrate_go_on_without_a_third(number, monkeypatch):
    names = [name for group in OTHERS[number::3] for name in PARTS[group]]
    finds_the_ceiling_without(names, monkeypatch)


def finds_the_ceiling_without(names, monkeypatch):
    names_asked(monkeypatch, names)
    assert jls.why(step, *arguments(60.0)).births
    assert jls.calibrate(step, *arguments(0.1)).ceiling == 2.0**12


def test_reading_goes_on_without_all_of_them(monkeypatch):
    names = names_read(monkeypatch, read) | names_read(monkeypatch, traced)
    names_asked(monkeypatch, names)
    findings, _ = read()
    traced()
    assert not findings.of("broken")
    assert jls.why(step, *arguments(60.0)).results
