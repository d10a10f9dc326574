"""Whole train steps: `jls.train_step` beside what one writes by hand.

All report the norm of the gradients, as `jls.train_step` does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jls
from benchmarks.contestants import (
    Make,
    Rules,
    Run,
    apply_if_finite,
    dynamic_scale,
    flax,
    guarded,
    plain,
)


def plain_ours(
    optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules
) -> Run:
    """`jls.train_step` for plain pytrees, Haiku and Equinox."""
    wrapped = guarded(optimizer, rules)
    return Run(wrapped.init, jls.train_step(loss_fn, wrapped))


def reporting(make: Make) -> Make:
    """A contestant that also reports the norm of the gradients."""

    def report(loss, grads):
        return loss, optax.tree.norm(grads)

    return lambda optimizer, loss_fn, rules: make(
        optimizer, loss_fn, rules._replace(report=report)
    )


def linen(make_step: Callable[[Any], Any], guard: Any = None) -> Make:
    """A contestant that steps a Flax `TrainState`, kept apart from its parameters."""

    def make(optimizer, loss_fn, rules):
        from flax.training.train_state import TrainState

        tx = optimizer if guard is None else guard(optimizer, rules)
        step_of_state = make_step(loss_fn)

        def init(params):
            state = TrainState.create(apply_fn=loss_fn, params=params, tx=tx)
            # An array, as it is after the first step.
            state = state.replace(step=jnp.int32(0), params=None)
            return state, dynamic_scale(rules)

        def step(params, state, batch):
            before, scale = state
            before = before.replace(params=params)
            after, scale, report = step_of_state(before, scale, batch)
            return after.params, (after.replace(params=None), scale), report

        return Run(init, step)

    return make


def _linen_ours(loss_fn):
    step = jls.train_step(lambda state, batch: loss_fn(state.params, batch))

    def run(state, scale, batch):
        state, report = step(state, batch)
        return state, scale, report

    return run


def _linen_optax(loss_fn):

    def run(state, scale, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        report = loss, optax.tree.norm(grads)
        return state.apply_gradients(grads=grads), scale, report

    return run


def _linen_flax(loss_fn):
    """As in Flax's examples."""

    def run(state, scale, batch):
        differentiated = scale.value_and_grad(loss_fn)
        scale, is_finite, loss, grads = differentiated(state.params, batch)
        new = state.apply_gradients(grads=grads)
        select = partial(jax.tree.map, partial(jnp.where, is_finite))
        new = new.replace(
            opt_state=select(new.opt_state, state.opt_state),
            params=select(new.params, state.params),
        )
        return new, scale, (loss, optax.tree.norm(grads))

    return run


def nnx(make_step: Callable[[Any], Any], guard: Any = None) -> Make:
    """A contestant that steps an NNX model and its `nnx.Optimizer`, in place.

    They are put together and taken apart in the step, as `nnx.jit` does it.
    """

    def make(optimizer, loss_fn, rules):
        from flax import nnx

        tx = optimizer if guard is None else guard(optimizer, rules)
        step_of_model = make_step(lambda model, batch: loss_fn(_arrays(model), batch))
        graphs = []

        def init(params):
            built = nnx.Optimizer(_model(params), tx, wrt=nnx.Param)
            graph, state = nnx.split(built)
            graphs[:] = [graph]
            return state, dynamic_scale(rules)

        def step(params, state, batch):
            model, built = _model(params), nnx.merge(graphs[0], state[0])
            scale, report = step_of_model(model, built, state[1], batch)
            return _arrays(model), (nnx.split(built)[1], scale), report

        return Run(init, step)

    return make


def _nnx_ours(loss_fn):
    step = jls.train_step(loss_fn)

    def run(model, optimizer, scale, batch):
        return scale, step(model, optimizer, batch)

    return run


def _nnx_optax(loss_fn):
    from flax import nnx

    def run(model, optimizer, scale, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return scale, (loss, optax.tree.norm(grads))

    return run


def _nnx_flax(loss_fn):
    """NNX has no recipe of its own: that of Flax, on what `nnx.split` gives."""
    from flax import nnx

    def run(model, optimizer, scale, batch):
        graph, params = nnx.split(model)

        def loss_of(params):
            return loss_fn(nnx.merge(graph, params), batch)

        scale, is_finite, loss, grads = scale.value_and_grad(loss_of)(params)
        before = nnx.state((model, optimizer))
        before = jax.tree.map(lambda leaf: leaf, before)
        optimizer.update(model, grads)
        after = nnx.state((model, optimizer))
        kept = jax.tree.map(partial(jnp.where, is_finite), after, before)
        nnx.update((model, optimizer), kept)
        return scale, (loss, optax.tree.norm(grads))

    return run


def _model(params: Any) -> Any:
    """An NNX model of these parameters."""
    from flax import nnx

    return nnx.Dict(tree=nnx.data(jax.tree.map(nnx.Param, params)))


def _arrays(model: Any) -> Any:
    """Its parameters, in their tree."""
    from flax import nnx

    def is_variable(leaf):
        return isinstance(leaf, nnx.Variable)

    def value(leaf):
        return leaf.get_value()

    return jax.tree.map(value, model.tree, is_leaf=is_variable)


PLAIN: dict[str, Make] = {
    "optax": reporting(plain),
    "jls": plain_ours,
    "apply_if_finite": reporting(apply_if_finite),
    "flax": reporting(flax),
}
LINEN: dict[str, Make] = {
    "optax": linen(_linen_optax),
    "jls": linen(_linen_ours, guarded),
    "flax": linen(_linen_flax),
}
NNX: dict[str, Make] = {
    "optax": nnx(_nnx_optax),
    "jls": nnx(_nnx_ours, guarded),
    "flax": nnx(_nnx_flax),
}
