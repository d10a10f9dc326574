"""What a guarded step costs, in XLA's own deterministic figures, beside the peers.

All are computed here and now: a regression shows, and so does a peer that gets better.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import jls
from benchmarks import figures
from benchmarks.contestants import FLOOR, OURS, WHOLE, available
from benchmarks.sizes import CPU
from benchmarks.workloads import workloads

pytestmark = pytest.mark.standard_promotion

# As small as tells: all arrays together have a million numbers at most.
SIZE = CPU._replace(
    tree=(128, 2, 1000),
    muon_tree=(64, 1, 500),
    transformer=(64, 2, 500),
    tokens=(2, 16),
    convnet=(8, [1, 1], 10),
    images=(2, 16),
    many_leaves=(40, 16),
)
WORKLOADS = {one.name: one for one in workloads(SIZE)}
PEERS = [name for name in available() if name in WHOLE and name != OURS]
# The loss scale and the counters: scalars, and a number for each leaf.
SCALARS = 8192
# By how many more passes over all gradients an update alone needs more than the bare
# one. The check is one. With clipping two: XLA CPU computes a norm as the product of an
# array in memory with itself, and has to write what it sees there.
MORE_PASSES = {
    "update adamw": 1,
    "update adamw, accumulation over 8": 1,
    "update sgd momentum": 1,
    "update adafactor": 1,
    "update muon": 1,
    "update clip + adamw": 3,
}


@pytest.fixture(autouse=True, scope="module")
def _without_optimizing_machine_code():
    """Half of the time to compile, after all that the figures are of."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def figures_of(workload, name):
    problem = WORKLOADS[workload].problem()
    found = figures.Contest(WORKLOADS[workload], name, problem).figures()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.params))
    return found["bytes_accessed"], found["temporary_bytes"], size


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_peer_moves_fewer_bytes_or_needs_less_memory(workload):
    accessed, temporary, _ = figures_of(workload, OURS)
    assert {"apply_if_finite", "flax"} <= set(PEERS)
    for peer in PEERS:
        theirs = figures_of(workload, peer)
        assert accessed <= theirs[0] + SCALARS, peer
        assert temporary <= theirs[1] + SCALARS, peer


@pytest.mark.parametrize("workload", MORE_PASSES)
def test_an_update_alone_costs_one_more_pass(workload):
    accessed, temporary, size = figures_of(workload, OURS)
    bare_accessed, bare_temporary, _ = figures_of(workload, FLOOR)
    assert accessed <= bare_accessed + MORE_PASSES[workload] * size + SCALARS
    assert temporary <= bare_temporary + SCALARS


@pytest.mark.parametrize("workload", [name for name in WORKLOADS if "step" in name])
def test_a_whole_step_costs_few_percent(workload):
    accessed, temporary, _ = figures_of(workload, OURS)
    bare_accessed, bare_temporary, _ = figures_of(workload, FLOOR)
    assert accessed <= 1.06 * bare_accessed
    assert temporary <= 1.16 * bare_temporary


def compiled_figures(step, *args):
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    cost = compiled.cost_analysis()["bytes accessed"]
    return cost, compiled.memory_analysis().temp_size_in_bytes


def norm_that_does_not_overflow(grads):
    leaves = jax.tree.leaves(grads)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in leaves]))
    return largest * jnp.sqrt(sum(jnp.sum(jnp.square(x / largest)) for x in leaves))


LIBRARIES = ["plain", "Linen"]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "inner", [optax.adamw(1e-3), optax.sgd(0.1, momentum=0.9)], ids=["adamw", "sgd"]
)
def test_train_step_costs_the_step_by_hand_and_a_norm(inner, library):
    """XLA CPU brings a transposed gradient into order before it adds up its squares.

    That makes a read, a write and a read out of the one pass over the gradients.
    """
    problem = WORKLOADS["step transformer, adamw"].problem()
    tx = jls.loss_scaled(inner, jls.dynamic(1024.0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.params))

    def by_hand(params, opt_state, batch):
        loss, grads = jls.value_and_grad(problem.loss_fn)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    def linen(params, opt_state, batch):
        state = TrainState(jnp.int32(0), None, params, tx, opt_state)
        step = jls.train_step(lambda state, batch: problem.loss_fn(state.params, batch))
        return step(state, batch)

    step = linen if library == "Linen" else jls.train_step(problem.loss_fn, tx)
    args = problem.params, tx.init(problem.params), problem.good
    accessed, temporary = compiled_figures(step, *args)
    hand_accessed, hand_temporary = compiled_figures(by_hand, *args)
    assert accessed <= hand_accessed + 3.4 * size
    assert temporary <= hand_temporary + SCALARS


def test_step_with_clipping_and_report_costs_less_than_one_written_by_hand():
    problem = WORKLOADS["step transformer, adamw"].problem()
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def by_hand(state, dynamic_scale, batch):
        """The step of `jls.train_step` with clipping and report, by Flax's recipe."""
        grad_fn = dynamic_scale.value_and_grad(lambda p: problem.loss_fn(p, batch))
        dynamic_scale, is_finite, loss, grads = grad_fn(state.params)
        new_state = state.apply_gradients(grads=grads)
        select = functools.partial(
            jax.tree.map, functools.partial(jnp.where, is_finite)
        )
        new_state = new_state.replace(
            opt_state=select(new_state.opt_state, state.opt_state),
            params=select(new_state.params, state.params),
        )
        norm = norm_that_does_not_overflow(grads)
        return new_state, dynamic_scale, (loss, ~is_finite, dynamic_scale.scale, norm)

    train = jls.train_step(lambda state, batch: problem.loss_fn(state.params, batch))

    def ours(state, nothing, batch):
        return *train(state, batch), nothing

    scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(1024.0))
    found = []
    for step, tx, carried in (
        (ours, jls.loss_scaled(inner, jls.dynamic(1024.0)), ()),
        (by_hand, inner, scale),
    ):
        state = TrainState.create(apply_fn=None, params=problem.params, tx=tx)
        found.append(compiled_figures(step, state, carried, problem.good))
    (accessed, temporary), (theirs_accessed, theirs_temporary) = found
    assert accessed <= 0.95 * theirs_accessed, found
    assert temporary <= theirs_temporary + SCALARS


# XLA CPU before jax 0.10.2 also writes what a norm squares, and reads that.
IN_MEMORY = jax.__version_info__ < (0, 10, 2)
A_NORM = 3 if IN_MEMORY else 1
SPIKES_INNER = {
    "clip": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 0),
    "no clip": (optax.sgd(0.1, momentum=0.9), A_NORM),
}
# The window, and what is computed from it.
OF_WINDOW = 65536


@pytest.mark.parametrize("inner", SPIKES_INNER)
@pytest.mark.parametrize("form", ["update", "train_step"])
def test_spikes_cost_nothing_beside_a_clip_and_one_read_without(inner, form):
    problem = WORKLOADS["step transformer, adamw"].problem()
    transformation, reads = SPIKES_INNER[inner]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.params))
    found = []
    for policy in (None, jls.spikes()):
        tx = jls.loss_scaled(transformation, jls.dynamic(1024.0), spikes=policy)

        def by_hand(params, opt_state, grads, loss, tx=tx):
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
            return optax.apply_updates(params, updates), opt_state

        opt_state = tx.init(problem.params)
        if form == "update":
            args = problem.params, opt_state, problem.params, jnp.float32(1.0)
            found.append(compiled_figures(by_hand, *args))
        else:
            step = jls.train_step(problem.loss_fn, tx)
            args = problem.params, opt_state, problem.good
            found.append(compiled_figures(step, *args))
            reads = 0
    (plain, plain_memory), (ours, memory) = found
    assert ours <= plain + reads * size + OF_WINDOW
    # The decision needs the whole norm, until when gradients have to stay.
    stays = inner == "no clip" and (form == "train_step" or IN_MEMORY)
    assert memory <= plain_memory + stays * size + OF_WINDOW


def updated(optimizer, params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def updated_with_loss(optimizer, params, state, grads):
    updates, state = optimizer.update(grads, state, params, value=jnp.float32(1))
    return optax.apply_updates(params, updates), state


def applied_by_flax(optimizer, params, state, grads):
    train_state = TrainState(0, None, params, optimizer, state)
    train_state = train_state.apply_gradients(grads=grads)
    return train_state.params, train_state.opt_state


@pytest.mark.parametrize("form", [updated, updated_with_loss, applied_by_flax])
@pytest.mark.parametrize(
    "leaves", [50, *(pytest.param(n, marks=pytest.mark.more) for n in (200, 1000))]
)
def test_a_clip_over_many_leaves_costs_each_of_them_the_same(form, leaves):
    """The decision is computed once, not in each fusion that asks for it."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    params = {f"w{i}": jnp.ones((48, 48) if i % 2 else 48) for i in range(leaves)}

    def program_of(optimizer, form):
        step = jax.jit(functools.partial(form, optimizer), donate_argnums=(0, 1))
        compiled = step.lower(params, optimizer.init(params), params).compile()
        text, cost = compiled.as_text(), compiled.cost_analysis()
        return text.count("\n"), text.count(" fusion("), cost["bytes accessed"]

    lines, fusions, accessed = program_of(jls.loss_scaled(inner), form)
    bare_lines, bare_fusions, bare_accessed = program_of(inner, updated)
    assert lines < 2 * bare_lines
    assert fusions < bare_fusions + 50
    assert accessed < 1.01 * bare_accessed + SCALARS
