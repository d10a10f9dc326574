"""Plain `jit` on a mesh of eight devices.

Layouts are trained in automatic and in explicit mode, and compared with the same run
without a mesh and with the optimizer without jls.
"""

import collections
import functools
import math
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from shared import bad_leaves, bits, is_placed_as

import jls

pytestmark = pytest.mark.standard_promotion

P = PartitionSpec


class Layout(NamedTuple):
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    params: dict  # how they are kept
    gathered: dict  # how the forward pass wants them
    batch: PartitionSpec
    hidden: PartitionSpec


TENSOR = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None)}
REPLICATED = dict.fromkeys(TENSOR, P())
LAYOUTS = {
    "data": Layout((8,), ("data",), REPLICATED, REPLICATED, P("data"), P("data")),
    "fsdp": Layout(
        (8,),
        ("data",),
        dict.fromkeys(TENSOR, P("data")),
        REPLICATED,
        P("data"),
        P("data"),
    ),
    "tensor": Layout(
        (2, 4), ("data", "model"), TENSOR, TENSOR, P("data"), P("data", "model")
    ),
    "data, fsdp and tensor": Layout(
        (2, 2, 2),
        ("data", "fsdp", "model"),
        {"w1": P("fsdp", "model"), "b1": P("model"), "w2": P("model", "fsdp")},
        TENSOR,
        P(("data", "fsdp")),
        P(("data", "fsdp"), "model"),
    ),
}
MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
RUNS = [
    ("data", "explicit"),
    ("fsdp", "explicit"),
    ("tensor", "auto"),
    ("data, fsdp and tensor", "auto"),
]
INNERS = {
    "adamw": optax.adamw(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
}
X = jax.random.normal(jax.random.key(1), (32, 16))
# Two rows of 32 overflow in float16: they are on one device of the batch's axis.
BATCHES = [X, X[::-1], X.at[4:6].multiply(1e3), -X, X]
APPLIED = [True, True, False, True, True]
SCALES = [2.0**12, 2.0**13, 2.0**12, 2.0**12, 2.0**13]


def initial_params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w1": jax.random.normal(keys[0], (16, 32)) / 4,
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(keys[1], (32, 16)) / 5,
    }


def guard(inner):
    return jls.loss_scaled(inner, jls.dynamic(2.0**12, growth_interval=2))


COMPILED = []  # one entry for each program that XLA has compiled


def _listen(event, duration, **details):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(details)


jax.monitoring.register_event_duration_secs_listener(_listen)


class Setup:
    """A layout on its mesh, in one of the two modes; `layout` None is one device."""

    def __init__(self, layout=None, mode="auto", inner="adamw", is_guarded=True):
        self.layout, self.mode, self.is_guarded = layout, mode, is_guarded
        inner = INNERS[inner]
        self.optimizer = guard(inner) if is_guarded else inner
        self.step = jax.jit(self._step)
        if layout:
            types = (MODES[mode],) * len(layout.mesh_names)
            self.mesh = jax.make_mesh(layout.mesh_shape, layout.mesh_names, types)

    def sharding(self, spec):
        return NamedSharding(self.mesh, spec)

    @property
    def params_shardings(self):
        return {name: self.sharding(spec) for name, spec in self.layout.params.items()}

    def params(self):
        params = initial_params()
        return jax.device_put(params, self.params_shardings) if self.layout else params

    def batch(self, x):
        return jax.device_put(x, self.sharding(self.layout.batch)) if self.layout else x

    def in_float16(self, params):
        """The parameters for the forward pass, and where its products are to be."""
        params = {name: param.astype(jnp.float16) for name, param in params.items()}
        if not self.layout or self.mode == "auto":
            return params, None, None
        gathered = self.layout.gathered  # explicit: it is the model's code that says so
        params = {k: jax.sharding.reshard(x, gathered[k]) for k, x in params.items()}
        return params, self.layout.hidden, self.layout.batch

    def loss_fn(self, params, x):
        params, hidden, output = self.in_float16(params)
        x = x.astype(jnp.float16)
        x = jnp.einsum("bi,ij->bj", x, params["w1"], out_sharding=hidden)
        # No squashing: a large input has to overflow on its way back.
        x = jax.nn.relu(x + params["b1"])
        x = jnp.einsum("bj,jk->bk", x, params["w2"], out_sharding=output)
        return jnp.mean(jnp.sqrt(1.0 + (x.astype(jnp.float32) - 1.0) ** 2))

    def _step(self, params, state, x):
        extra = {}
        if self.is_guarded:
            loss, grads = jls.value_and_grad(self.loss_fn)(state, params, x)
            extra["value"] = loss
        else:
            loss, grads = jax.value_and_grad(self.loss_fn)(params, x)
        updates, state = self.optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, loss

    def train(self, state=None, batches=BATCHES):
        """What each step leaves, parameters, state, loss; and how often it compiled."""
        params = self.params()
        state = self.optimizer.init(params) if state is None else state
        history, compiled = [(params, state, None)], 0
        for x in map(self.batch, batches):
            before = len(COMPILED)
            history.append(self.step(*history[-1][:2], x))
            compiled += len(COMPILED) - before
        return history, compiled

    def collectives(self):
        """The kind of each collective in the compiled step, and what it carries."""
        params = self.params()
        args = params, self.optimizer.init(params), self.batch(X)
        text = self.step.lower(*args).compile().as_text()
        return [
            (match["kind"], re.findall(r"(\w+\[[\d,]*\])", match["type"]))
            for match in COLLECTIVE.finditer(text)
        ]


COLLECTIVE = re.compile(
    r"= (?P<type>\(?[^=\n]*?\)?) (?P<kind>all-reduce|all-gather|reduce-scatter"
    r"|collective-permute|all-to-all|ragged-all-to-all|collective-broadcast)(-start)?\("
)


@functools.cache
def trained(name, mode):
    """The guarded setup of a layout, and what `train` says of it."""
    setup = Setup(LAYOUTS[name], mode)
    with jax.set_mesh(setup.mesh):
        return setup, *setup.train()


@functools.cache
def trained_bare(name, mode):
    setup = Setup(LAYOUTS[name], mode, is_guarded=False)
    with jax.set_mesh(setup.mesh):
        return setup, setup.train(batches=BATCHES[:1])[0]


@functools.cache
def trained_on_one_device():
    return Setup().train()[0]


@pytest.fixture(params=RUNS, ids=" ".join)
def run(request):
    setup, _, _ = trained(*request.param)
    with jax.set_mesh(setup.mesh):
        yield request.param


def test_an_overflow_on_one_shard_skips_the_step_on_all(run):
    _, history, compiled = trained(*run)
    states = [state for _, state, _ in history[1:]]
    assert [bool(state.applied) for state in states] == APPLIED
    assert [jls.loss_scale(state).item() for state in states] == SCALES
    assert [bool(jnp.isfinite(loss)) for _, _, loss in history[1:]] == [True] * 5
    before, after = history[2], history[3]
    assert bits(before[0]) == bits(after[0])
    assert bits(before[1].inner_state) == bits(after[1].inner_state)
    assert states[-1].skips == 1
    assert compiled == 1
    assert jls.health(states[-1], history[-1][0]).verdict == "ok"
    assert bad_leaves(states[-1], history[-1][0]) == ["w1"]


def test_what_jls_keeps_is_one_number_on_all_devices(run):
    _, history, _ = trained(*run)
    for _, state, _ in (history[0], history[-1]):
        for leaf in jax.tree.leaves(state._replace(inner_state=None)):
            copies = [np.asarray(copy.data) for copy in leaf.addressable_shards]
            assert len(copies) == 8
            assert len({copy.tobytes() for copy in copies}) == 1
            assert leaf.sharding.is_fully_replicated


def test_the_run_is_that_of_one_device_but_for_the_order_of_sums(run):
    """A mesh adds up the rows of a batch in another order, and in float16.

    That is not bitwise, with jls or without: the decisions are compared exactly, the
    loss to two roundings of float16, the parameters to what Adam makes of roundings.
    """
    _, history, _ = trained(*run)
    for ours, one in zip(history[1:], trained_on_one_device()[1:], strict=True):
        decisions = [state._replace(inner_state=None) for _, state, _ in (ours, one)]
        assert bits(decisions[0]) == bits(decisions[1])
        np.testing.assert_allclose(ours[2], one[2], rtol=2**-10)
        for name, param in ours[0].items():
            np.testing.assert_allclose(param, one[0][name], atol=2e-3)


class Exact(Setup):
    """Gradients that do not depend on the parameters: a mistake cannot fade out."""

    def loss_fn(self, params, x):
        params, hidden, _ = self.in_float16(params)
        x = x.astype(jnp.float16)
        parts = (
            jnp.einsum("bi,ij->bj", x, params["w1"], out_sharding=hidden),
            jnp.einsum("bi,ji->bj", x, params["w2"], out_sharding=hidden),
            params["b1"],
        )
        return sum(jnp.sum(part.astype(jnp.float32)) for part in parts)


def test_exact_sums_give_the_step_of_one_device(run):
    """Sums of four small integers are the same in any order.

    To the last bit or two: XLA rounds each program in its own way. On jax 0.12 the bare
    optimizer differs from one device by as much.
    """
    x = jnp.zeros_like(X).at[::9].set(jnp.sign(X[::9]))
    batches = [x, x[::-1], x.at[9].multiply(2.0**13), -x, x]
    setups = Exact(LAYOUTS[run[0]], run[1]), Exact()
    ours, one = (setup.train(batches=batches)[0] for setup in setups)
    assert [bool(state.applied) for _, state, _ in one[1:]] == APPLIED
    for (params, state, _), (params1, state1, _) in zip(ours, one, strict=True):
        close = {"rtol": 2.0**-22, "atol": 2.0**-24}
        chex.assert_trees_all_close(params, params1, **close)
        chex.assert_trees_all_close(state.inner_state, state1.inner_state, **close)
        assert bits(state._replace(inner_state=())) == bits(
            state1._replace(inner_state=())
        )


def test_inner_state_is_placed_as_the_bare_optimizer_would_be(run):
    bare_history = trained_bare(*run)[1]
    _, history, _ = trained(*run)
    for (params, state, _), (bare_params, bare_state, _) in zip(
        history[:2], bare_history, strict=True
    ):
        assert is_placed_as(params, bare_params)
        assert is_placed_as(state.inner_state, bare_state)
        # Not replicated by accident: the moments are where their parameters are.
        assert is_placed_as(state.inner_state[0].mu, params)
        assert is_placed_as(state.inner_state[0].nu, params)


def assert_small_collectives_more(layout, ours, bare):
    """Two numbers of each device for each leaf that is split; else nothing.

    XLA CPU gathers what is reduced together. On GPU and TPU the flags come from sums,
    and are in one all-reduce for each axis: see tests/costs/test_budget_tpu.py.
    """

    def payload(found):
        return collections.Counter((kind, x) for kind, items in found for x in items)

    assert bare  # the pattern sees them
    more = payload(ours) - payload(bare)
    assert payload(bare) - payload(ours) == collections.Counter()
    splits = sum(any(spec) for spec in layout.params.values())
    assert more.total() <= 4 * splits
    for kind, shape in more:
        assert kind in ("all-gather", "all-reduce")
        sizes = re.search(r"\[(.*)\]", shape)[1].split(",")
        assert math.prod(int(size or 1) for size in sizes) <= 8


def test_a_step_has_small_collectives_more(run):
    setup, bare = trained(*run)[0], trained_bare(*run)[0]
    assert_small_collectives_more(setup.layout, setup.collectives(), bare.collectives())


def test_a_step_that_clips_has_small_collectives_more():
    """With a norm in the optimizer, which is a reduction itself."""
    layout = LAYOUTS["fsdp"]
    ours, bare = (
        Setup(layout, inner="clip", is_guarded=is_guarded).collectives()
        for is_guarded in (True, False)
    )
    assert_small_collectives_more(layout, ours, bare)


def test_a_jitted_init_with_given_shardings_trains_the_same(run):
    """By hand: what is like a parameter goes where the parameter is."""
    setup, eager, _ = trained(*run)
    params = setup.params()
    shardings = optax.tree_utils.tree_map_params(
        setup.optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(setup.optimizer.init, params),
        setup.params_shardings,
        transform_non_params=lambda _: setup.sharding(P()),
    )
    state = jax.jit(setup.optimizer.init, out_shardings=shardings)(params)
    assert is_placed_as(state, eager[0][1])
    history, compiled = setup.train(state)
    assert compiled == 0  # the step is compiled already
    assert bits(history[-1]) == bits(eager[-1])
    assert is_placed_as(history[-1][1], eager[-1][1])


def test_setting_the_scale_does_not_compile_again(run):
    setup, history, _ = trained(*run)
    state = history[-1][1]
    _, compiled = setup.train(jls.set_loss_scale(state, 64.0), BATCHES[:1])
    assert compiled == 0


def test_axis_name_of_the_mesh_is_not_bound_under_plain_jit(run):
    params = trained(*run)[0].params()
    optimizer = jls.loss_scaled(optax.sgd(0.1), axis_name="data")
    with pytest.raises(NameError, match="axis_name 'data' is not bound"):
        jax.jit(optimizer.update)(params, optimizer.init(params), params)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "b"), P(("a", "b")), P()])
def test_gradients_on_a_mesh_are_measured_as_on_one_device(axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    values = np.random.RandomState(0).standard_cauchy((16, 8)).astype(np.float32)
    on_mesh = jax.device_put(values * 1e-7, NamedSharding(mesh, spec))

    state = jls.loss_scaled(optax.sgd(0.1), jls.static(64.0)).init(values)

    def measured(grads):
        return jls.health(state, grads=grads).numbers["small"]

    expected = measured(values * 1e-7)
    assert 0 < expected < 1
    assert measured(on_mesh) == expected
    with jax.set_mesh(mesh):
        assert measured(on_mesh) == expected
