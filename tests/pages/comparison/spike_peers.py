"""What guards against finite, but bad, steps do, measured by running them.

Each class is a library. Its `run` takes losses and gradients of one parameter, and says
which steps were applied, and where the parameter ended. The other methods answer the
rows of the page, in its words.
"""

import ast
import functools
import importlib.metadata
import math
import runpy
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jls

NAN = float("nan")
RATE = 2.0**-10


def noise(n):
    """Losses and norms of a steady run: about 1, with a deviation of 0.05."""
    return 1 + 0.05 * np.random.default_rng(0).standard_normal(n)


class Guard:
    window = 128

    saved = ()  # the arrays that a checkpoint of the last run has

    def run(self, losses, gradients):
        """Flags of applied steps; the last parameter."""
        raise NotImplementedError

    def applied(self, values, steps):
        """Whether these steps are applied, if loss and gradient norm are `values`."""
        flags, _ = self.run(values, values)
        return [bool(flags[step - 1]) for step in steps]

    def a_second_spike_half_as_large_60_steps_later(self):
        values = noise(200)
        values[99], values[159] = 50.0, 25.0
        first, second = self.applied(values, [100, 160])
        assert not first
        return "applied" if second else "skipped"

    def steps_skipped_when_the_loss_doubles_for_good(self):
        values = noise(400)
        values[200:] *= 2
        flags, _ = self.run(values, values)
        return str(int(np.sum(~flags[200:])))

    def nan_gradient(self, step):
        losses, gradients = noise(step), noise(step)
        gradients[-1] = NAN
        _, params = self.run(losses, gradients)
        return "skipped" if math.isfinite(params) else "applied"

    def a_nan_gradient_on_step_100(self):
        return self.nan_gradient(100)

    def good_steps_skipped_after_it(self):
        values = noise(400)
        values[99] = NAN
        flags, _ = self.run(values, values)
        return str(int(np.sum(~flags[100:])))

    def its_statistics_are_in_the_checkpoint(self):
        self.run(noise(80), noise(80))
        return "yes" if any(np.size(x) >= self.window for x in self.saved) else "no"


class OptaxGuard(Guard):
    """A guard that is an optax transformation."""

    keywords = ()  # of its update

    def make(self):
        raise NotImplementedError

    def is_applied(self, state):
        raise NotImplementedError

    @functools.cached_property
    def steps(self):
        optimizer = self.make()

        def step(carry, inputs):
            params, state = carry
            loss, gradient = inputs
            extra = {"loss": loss, "value": loss, "grad_norm": jnp.abs(gradient)}
            extra = {name: extra[name] for name in self.keywords}
            updates, state = optimizer.update(gradient, state, params, **extra)
            params = optax.apply_updates(params, updates)
            return (params, state), self.is_applied(state)

        @jax.jit
        def steps(inputs):
            start = jnp.float32(0.0), optimizer.init(jnp.float32(0.0))
            return jax.lax.scan(step, start, inputs)

        return steps

    def run(self, losses, gradients):
        inputs = [jnp.asarray(x, jnp.float32) for x in (losses, gradients)]
        (params, state), flags = self.steps(inputs)
        self.saved = jax.tree.leaves(state)
        return np.asarray(flags), float(params)


class Jls(OptaxGuard):
    keywords = ("value",)

    def make(self):
        inner = optax.sgd(RATE, momentum=0.5)
        return jls.skip_nonfinite(inner, spikes=jls.spikes())

    def is_applied(self, state):
        return state.applied


def source_of(distribution, path):
    files = importlib.metadata.files(distribution)
    (found,) = [file for file in files if str(file) == path]
    return found.locate()


class MaxText(OptaxGuard):
    """Its two functions, as installed, without the package around them."""

    keywords = ("loss", "grad_norm")

    def make(self):
        path = source_of("maxtext", "maxtext/optimizers/optimizers.py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        wanted = "_compute_rolling_stats", "skip_step_on_spikes"
        tree.body = [x for x in tree.body if getattr(x, "name", None) in wanted]
        names = {"jax": jax, "jnp": jnp, "optax": optax}
        exec(compile(tree, str(path), "exec"), names)
        inner = optax.sgd(RATE, momentum=0.5)
        return names["skip_step_on_spikes"](inner, self.window, 6.0)

    def is_applied(self, state):
        return ~state["is_skipped"]


class Levanter(Guard):
    """Its module, as installed, with stand-ins for its logger and two functions."""

    def run(self, losses, gradients):
        def one_level(tree):
            return [(None, tree)], jax.tree.structure(tree)

        stand_ins = {
            "haliax": {},
            "haliax.jax_utils": {"is_jax_array_like": lambda x: hasattr(x, "shape")},
            "levanter": {},
            "levanter.tracker": {"jit_log": lambda metrics: None},
            "levanter.utils": {},
            "levanter.utils.tree_utils": {
                "tree_flatten_one_level_with_keys": one_level
            },
        }
        modules = {name: types.ModuleType(name) for name in stand_ins}
        for name, contents in stand_ins.items():
            vars(modules[name]).update(contents)
        modules["levanter"].tracker = modules["levanter.tracker"]
        path = source_of("levanter", "levanter/optim/skipstep.py")
        with mock.patch.dict(sys.modules, modules):
            config = runpy.run_path(str(path))["SkipStepConfig"]()
            optimizer = config.wrap(optax.sgd(RATE, momentum=0.5))
            params, flags = jnp.float32(0.0), []
            state = optimizer.init(params)
            for loss, gradient in zip(losses, gradients, strict=True):
                old, gradient = state.inner_opt_state[0].trace, jnp.float32(gradient)
                updates, state = optimizer.update(gradient, state, params, loss=loss)
                params = optax.apply_updates(params, updates)
                new = state.inner_opt_state[0].trace
                flags.append(not np.array_equal(old, new))
        self.saved = [state.losses, state.grad_norms]
        return np.asarray(flags), float(params)


class OlmoCore(Guard):
    def run(self, losses, gradients):
        import torch
        from olmo_core.optim import SkipStepAdamW

        params, flags = torch.nn.Parameter(torch.zeros(1)), []
        optimizer = SkipStepAdamW([params], lr=RATE)
        for loss, gradient in zip(losses, gradients, strict=True):
            params.grad = torch.full((1,), float(gradient))
            optimizer.latest_loss = torch.tensor(float(loss))
            optimizer.latest_grad_norm = torch.tensor(abs(float(gradient)))
            optimizer.step()
            flags.append(optimizer.step_skipped.item() == 0)
        self.saved = map(np.asarray, jax.tree.leaves(optimizer.state_dict()))
        return np.asarray(flags), params.item()
