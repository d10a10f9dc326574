"""What jls and its peers in JAX do, measured by running them.

Each class is a library, and each method of `Peer` answers one row of the page, in the
words of the page.
"""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jls

INF, NAN = float("inf"), float("nan")
MOMENTUM = optax.sgd(0.5, momentum=0.9)
ONE = jnp.float32(1.0)


class Run(NamedTuple):
    params: Any
    scaling: Any  # the state of the loss scale
    inner: Any  # the state of the optimizer
    loss: Any  # as the user gets it
    grads: Any  # as the user gets them


@jax.custom_vjp
def loss_of(params, gradient):
    """A loss of 4 with this gradient, or NaN if that is NaN."""
    loss = jnp.where(jnp.isnan(gradient), gradient, jnp.full_like(gradient, 4.0))
    return loss.astype(params.dtype)


loss_of.defvjp(
    lambda params, gradient: (loss_of(params, gradient), gradient),
    lambda gradient, seed: (seed * gradient, jnp.zeros_like(gradient)),
)


def yes(answer):
    return "yes" if answer else "no"


class Peer:
    """A library is its `init`, its `step`, and where in a Run its loss scale is.

    A step applies whatever it gets where the library leaves it to its user to select.
    """

    leaves_it_to_you = False

    def init(self, scale=8.0, interval=2000, inner=MOMENTUM):
        raise NotImplementedError

    def step(self, run, gradient):
        raise NotImplementedError

    def scale(self, run):
        raise NotImplementedError

    def after(self, gradients, **kwargs):
        run, step = self.init(**kwargs), jax.jit(self.step)
        for gradient in gradients:
            run = step(run, jnp.float32(gradient))
        return run

    def no(self):
        return "up to you" if self.leaves_it_to_you else "no"

    def never_applies_a_non_finite_step(self):
        runs = [self.after([1.0, *[bad] * 200, 1.0]) for bad in (INF, NAN)]
        return "yes" if all(np.isfinite(run.params) for run in runs) else self.no()

    def a_skip_keeps_the_optimizer_state(self):
        before, after = self.after([1.0]).inner, self.after([1.0, INF]).inner
        same = jax.tree.map(np.array_equal, before, after)
        return "yes" if jax.tree.all(same) else self.no()

    def the_gradients_you_see_are_true(self):
        # On the second step the scale grows.
        grads = [self.after([1.75] * n, interval=2).grads for n in (1, 2)]
        return yes(grads == [1.75, 1.75])

    def the_reported_loss_is_true_on_an_overflow(self):
        return yes(self.after([1.0], scale=2.0**126).loss == 4.0)

    def the_scale_stays_finite_and_above_0(self):
        runs = (
            self.after([1.0] * 12, scale=2.0**120, interval=1),
            self.after(300 * [INF]),
        )
        return yes(all(0 < self.scale(run) < INF for run in runs))

    def tells_a_bad_loss_from_an_overflow(self):
        loss, overflow = (counts(self.after([1.0, bad])) for bad in (NAN, INF))
        return yes(loss != overflow)

    def counts_its_skips(self):
        return yes(5 in counts(self.after([1.0, INF, INF, 1.0, INF, INF, INF, 1.0])))

    def adamw_takes_16_bit_gradients(self):
        answers = set()
        for dtype in (jnp.float16, jnp.bfloat16):
            try:
                params = self.adamw(jnp.ones((), dtype))
            except TypeError:
                answers.add("TypeError")
            else:
                answers.add(yes(params.dtype == jnp.float32 and 0.8 < params < 1.0))
        return " or ".join(answers)

    def adamw(self, gradient):
        """Float32 params of 1 after a step with this gradient and a rate of 0.1."""
        raise NotImplementedError

    def one_trace_for_a_whole_run(self):
        traces = 0

        def step(run, gradient):
            nonlocal traces
            traces += 1
            return self.step(run, gradient)

        run, step = self.init(), jax.jit(step)
        for _ in range(4):
            run = step(run, ONE)
        return "yes" if traces == 1 else f"no: {traces}"


def counts(run):
    """What a user could read from the states."""
    leaves = map(np.asarray, jax.tree.leaves((run.scaling, run.inner)))
    return [x.item() for x in leaves if x.ndim == 0 and x.dtype.kind in "iub"]


class Jls(Peer):
    axis_name = None

    def init(self, scale=8.0, interval=2000, inner=MOMENTUM):
        scaler = jls.dynamic(scale, growth_interval=interval, max_scale=2.0**126)
        self.optimizer = jls.loss_scaled(inner, scaler, axis_name=self.axis_name)
        state = self.optimizer.init(ONE)
        return Run(ONE, state._replace(inner_state=()), state.inner_state, ONE, ONE)

    def step(self, run, gradient):
        state = run.scaling._replace(inner_state=run.inner)
        loss, grads = jls.value_and_grad(loss_of)(state, run.params, gradient)
        updates, state = self.optimizer.update(grads, state, run.params, value=loss)
        params = optax.apply_updates(run.params, updates)
        scaling, inner = state._replace(inner_state=()), state.inner_state
        return Run(params, scaling, inner, loss, grads)

    def scale(self, run):
        return run.scaling.scaler_state.loss_scale

    def adamw(self, gradient):
        self.init(inner=optax.adamw(0.1))
        updates, _ = self.optimizer.update(gradient, self.optimizer.init(ONE), ONE)
        return optax.apply_updates(ONE, updates)


class Optax(Peer):
    """`apply_if_finite`, which has no loss scale."""

    def init(self, inner=MOMENTUM, **no_scale):
        self.optimizer = optax.apply_if_finite(inner, max_consecutive_errors=10)
        state = self.optimizer.init(ONE)
        return Run(ONE, state._replace(inner_state=()), state.inner_state, ONE, ONE)

    def step(self, run, gradient):
        state = run.scaling._replace(inner_state=run.inner)
        loss, grads = jax.value_and_grad(loss_of)(run.params, gradient)
        updates, state = self.optimizer.update(grads, state, run.params)
        params = optax.apply_updates(run.params, updates)
        scaling, inner = state._replace(inner_state=()), state.inner_state
        return Run(params, scaling, inner, loss, grads)

    def adamw(self, gradient):
        self.init(inner=optax.adamw(0.1))
        updates, _ = self.optimizer.update(gradient, self.optimizer.init(ONE), ONE)
        return optax.apply_updates(ONE, updates)


class Flax(Peer):
    leaves_it_to_you = True
    axis_name = None

    def init(self, scale=None, interval=2000, inner=MOMENTUM):
        from flax.training.dynamic_scale import DynamicScale

        self.inner = inner
        scaling = DynamicScale(growth_interval=interval)
        if scale is not None:
            scaling = scaling.replace(scale=jnp.float32(scale), fin_steps=jnp.int32(0))
        return Run(ONE, scaling, inner.init(ONE), ONE, ONE)

    def after(self, gradients, scale=8.0, **kwargs):
        return super().after(gradients, scale=scale, **kwargs)

    def step(self, run, gradient):
        transformed = run.scaling.value_and_grad(loss_of, axis_name=self.axis_name)
        scaling, _, loss, grads = transformed(run.params, gradient)
        updates, inner = self.inner.update(grads, run.inner, run.params)
        params = optax.apply_updates(run.params, updates)
        return Run(params, scaling, inner, loss, grads)

    def scale(self, run):
        return run.scaling.scale

    def adamw(self, gradient):
        run = self.init(8.0, inner=optax.adamw(0.1))
        half = jnp.ones_like(gradient)
        *_, grads = run.scaling.value_and_grad(loss_of)(half, gradient)
        updates, _ = self.inner.update(grads, run.inner, ONE)
        return optax.apply_updates(ONE, updates)


class Jmp(Peer):
    leaves_it_to_you = True

    def init(self, scale=8.0, interval=2000, inner=MOMENTUM):
        import jmp

        self.all_finite, self.inner = jmp.all_finite, inner
        scaling = jmp.DynamicLossScale(jnp.float32(scale), period=interval)
        return Run(ONE, scaling, inner.init(ONE), ONE, ONE)

    def step(self, run, gradient):
        def scaled_loss(params):
            return run.scaling.scale(loss_of(params, gradient))

        loss, grads = jax.value_and_grad(scaled_loss)(run.params)
        grads = run.scaling.unscale(grads)
        scaling = run.scaling.adjust(self.all_finite(grads))
        updates, inner = self.inner.update(grads, run.inner, run.params)
        params = optax.apply_updates(run.params, updates)
        return Run(params, scaling, inner, loss, grads)

    def scale(self, run):
        return run.scaling.loss_scale

    def the_reported_loss_is_true_on_an_overflow(self):
        # What there is to report is the scaled loss.
        return {32.0: "up to you", 4.0: "yes"}[float(self.after([1.0]).loss)]

    def adamw(self, gradient):
        run = self.init(inner=optax.adamw(0.1))
        grads = run.scaling.unscale(run.scaling.scale(gradient))
        updates, _ = self.inner.update(grads, run.inner, ONE)
        return optax.apply_updates(ONE, updates)


class Mpx(Peer):
    def init(self, scale=8.0, interval=2000, inner=MOMENTUM):
        import mpx

        self.mpx, self.inner = mpx, inner
        scaling = mpx.DynamicLossScaling(jnp.float32(scale), ONE, period=interval)
        return Run(ONE, scaling, inner.init(ONE), ONE, ONE)

    def step(self, run, gradient):
        transformed = self.mpx.filter_value_and_grad(loss_of, run.scaling)
        loss, scaling, finite, grads = transformed(run.params, gradient)
        params, inner = self.mpx.optimizer_update(
            run.params, self.inner, run.inner, grads, finite
        )
        return Run(params, scaling, inner, loss, grads)

    def scale(self, run):
        return run.scaling.loss_scaling

    def adamw(self, gradient):
        run = self.init(inner=optax.adamw(0.1))
        transformed = self.mpx.filter_value_and_grad(loss_of, run.scaling)
        _, _, finite, grads = transformed(jnp.ones_like(gradient), gradient)
        args = ONE, self.inner, run.inner, grads, finite
        return self.mpx.optimizer_update(*args)[0]


class Keras(Peer):
    """`LossScaleOptimizer` on the JAX backend, and what `fit` reports."""

    def init(self, scale=8.0, interval=2000, inner=None):
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        inner = inner or keras.optimizers.SGD(0.5, momentum=0.9)
        variable = keras.Variable(ONE)
        self.optimizer = keras.optimizers.LossScaleOptimizer(inner, scale, interval)
        self.optimizer.build([variable])
        values = [variable.value for variable in self.optimizer.variables]
        self.own = len(values) - len(inner.variables)
        return Run(ONE, values[: self.own], values[self.own :], ONE, ONE)

    def step(self, run, gradient):
        state = [*run.scaling, *run.inner]
        grads = self.scale(run) * jax.grad(loss_of)(run.params, gradient)
        params, state = self.optimizer.stateless_apply(state, [grads], [run.params])
        return Run(params[0], state[: self.own], state[self.own :], ONE, grads)

    def scale(self, run):
        names = [v.name for v in self.optimizer.variables]
        return run.scaling[names.index("dynamic_scale")]

    def the_gradients_you_see_are_true(self):
        return {1.75: "yes", 14.0: "no: scaled"}[float(self.after([1.75]).grads)]

    def the_reported_loss_is_true_on_an_overflow(self):
        self.init()
        import keras

        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "linear")])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        x, y = np.ones((1, 1), np.float32), np.full((1, 1), 9.0, np.float32)
        true_loss = model.evaluate(x, y, verbose=0)
        optimizer = keras.optimizers.LossScaleOptimizer(model.optimizer, 2.0**127)
        model.compile(optimizer, "mse")
        weights = model.get_weights()
        history = model.fit(x, y, verbose=0).history
        skipped = np.array_equal(weights[0], model.get_weights()[0])
        return yes(skipped and np.isclose(history["loss"][0], true_loss))

    def adamw(self, gradient):
        self.init()
        import keras

        run = self.init(inner=keras.optimizers.AdamW(0.1))
        state = [*run.scaling, *run.inner]
        params, _ = self.optimizer.stateless_apply(state, [8 * gradient], [ONE])
        return params[0]
