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
from benchmarks.contestants import INIT_SCALE, Make, Rules, Run


def guarded(optimizer: optax.GradientTransformation, rules: Rules) -> Any:
    """The optimizer, with the guard of jls."""
    scaler = jls.dynamic(INIT_SCALE, growth_interval=rules.growth_interval)
    return jls.loss_scaled(optimizer, scaler)


def plain_ours(
    optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules
) -> Run:
    """`jls.train_step` for plain pytrees, Haiku and Equinox."""
    wrapped = guarded(optimizer, rules)
    return Run(wrapped.init, jls.train_step(loss_fn, wrapped))


def plain_optax(
    optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules
) -> Run:
    """No guard."""
    del rules

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        report = loss, optax.tree.norm(grads)
        return optax.apply_updates(params, updates), state, report

    return Run(optimizer.init, step)


def plain_apply_if_finite(
    optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules
) -> Run:
    """The guard of optax."""
    return plain_optax(optax.apply_if_finite(optimizer, 2**30), loss_fn, rules)


def plain_flax(
    optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules
) -> Run:
    """Flax's recipe for a DynamicScale."""

    def init(params):
        return _dynamic_scale(rules), optimizer.init(params)

    def step(params, state, batch):
        scale, opt_state = state
        scale, is_finite, loss, grads = scale.value_and_grad(loss_fn)(params, batch)
        updates, new_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        select = partial(jax.tree.map, partial(jnp.where, is_finite))
        opt_state = select(new_state, opt_state)
        report = loss, optax.tree.norm(grads)
        return select(new_params, params), (scale, opt_state), report

    return Run(init, step)


def linen(make_step: Callable[[Any, Rules], Any], guard: Any = None) -> Make:
    """A contestant that steps a Flax `TrainState`, kept apart from its parameters."""

    def make(optimizer, loss_fn, rules):
        from flax.training.train_state import TrainState

        tx = optimizer if guard is None else guard(optimizer, rules)
        step_of_state = make_step(loss_fn, rules)

        def init(params):
            state = TrainState.create(apply_fn=loss_fn, params=params, tx=tx)
            # An array, as it is after the first step.
            state = state.replace(step=jnp.int32(0), params=None)
            return state, _dynamic_scale(rules)

        def step(params, state, batch):
            before, scale = state
            before = before.replace(params=params)
            after, scale, report = step_of_state(before, scale, batch)
            return after.params, (after.replace(params=None), scale), report

        return Run(init, step)

    return make


def _linen_ours(loss_fn, rules):
    del rules
    step = jls.train_step(lambda state, batch: loss_fn(state.params, batch))

    def run(state, scale, batch):
        state, report = step(state, batch)
        return state, scale, report

    return run


def _linen_optax(loss_fn, rules):
    del rules

    def run(state, scale, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        report = loss, optax.tree.norm(grads)
        return state.apply_gradients(grads=grads), scale, report

    return run


def _linen_flax(loss_fn, rules):
    """As in Flax's examples."""
    del rules

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


def nnx(make_step: Callable[[Any, Rules], Any], guard: Any = None) -> Make:
    """A contestant that steps an NNX model and its `nnx.Optimizer`, in place.

    They are put together and taken apart in the step, as `nnx.jit` does it.
    """

    def make(optimizer, loss_fn, rules):
        from flax import nnx

        tx = optimizer if guard is None else guard(optimizer, rules)
        step_of_model = make_step(
            lambda model, batch: loss_fn(_arrays(model), batch), rules
        )
        graphs = []

        def init(params):
            built = nnx.Optimizer(_model(params), tx, wrt=nnx.Param)
            graph, state = nnx.split(built)
            graphs[:] = [graph]
            return state, _dynamic_scale(rules)

        def step(params, state, batch):
            model, built = _model(params), nnx.merge(graphs[0], state[0])
            scale, report = step_of_model(model, built, state[1], batch)
            return _arrays(model), (nnx.split(built)[1], scale), report

        return Run(init, step)

    return make


def _nnx_ours(loss_fn, rules):
    del rules
    step = jls.train_step(loss_fn)

    def run(model, optimizer, scale, batch):
        return scale, step(model, optimizer, batch)

    return run


def _nnx_optax(loss_fn, rules):
    from flax import nnx

    del rules

    def run(model, optimizer, scale, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return scale, (loss, optax.tree.norm(grads))

    return run


def _nnx_flax(loss_fn, rules):
    """NNX has no recipe of its own: that of Flax, on what `nnx.split` gives."""
    from flax import nnx

    del rules

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


def _dynamic_scale(rules: Rules) -> Any:
    from flax.training.dynamic_scale import DynamicScale

    numbers: dict[str, Any] = {"scale": jnp.float32(INIT_SCALE)}
    numbers["fin_steps"] = jnp.int32(0)
    return DynamicScale(growth_interval=rules.growth_interval, **numbers)


PLAIN: dict[str, Make] = {
    "optax": plain_optax,
    "jls": plain_ours,
    "apply_if_finite": plain_apply_if_finite,
    "flax": plain_flax,
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
