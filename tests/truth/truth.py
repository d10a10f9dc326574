"""How far an autocast may be from its reference, and which programs are not judged.

Promise 18, of any program: the root mean square of (autocast - reference) is at most a
tenth of that of (reference - float32), and `UNITS` of float32 of the largest value. In
a small array one result that falls to the other neighbour, since float32 summed in
another order, is more than that. So an array of a thousand elements and more is judged
alone, and of the others the median, over results and gradients.

Where last bits of float32 grow (1 - q, q nearly 1), the reference computed by another
float32, or float32 as XLA compiles it, is as far from itself: such a program may be
`TIMES` as far.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from reference_autocast import Interpreter, as_written, is_float

HALVES = ("float16", "bfloat16")
# Of the loss: the first with which the gradients are in the range of float16.
LOSS_SCALES = (1024.0, 16.0, 0.25)

# What is promised.
SHARE, UNITS, LARGE, TIMES = 0.1, 8, 1000, 2.0

# What is not judged.
MOST = 6e4  # into or out of a product, near the end of float16
NEAR = 4.0  # how many times what last bits move a choice it has to be away
NOISES = range(12)  # seeds of other float32s


def with_gradients(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The results of `fun(params, batch)`, and the gradients of its scaled loss."""

    def scaled(params, batch, scale):
        results = fun(params, batch)
        results = results if isinstance(results, dict) else {"loss": results}
        return scale * jnp.mean(results["loss"]), results

    def both(params, batch, scale):
        grads, results = jax.grad(scaled, has_aux=True)(params, batch, scale)
        return {"result": results, "gradient": grads}

    return both


class Line(NamedTuple):
    """How one result of an autocast compares."""

    name: str
    size: int
    ours: float  # root mean squares: from the reference
    reference: float  # of the reference, from float32
    units: float  # of float32, of the largest value

    @property
    def share(self) -> float:
        """Of what rounding products changed; what is promised is at most `SHARE`."""
        more = self.ours - UNITS * self.units
        if not more > 0 and not math.isnan(more):
            return 0.0
        return more / self.reference if self.reference else math.inf

    def __str__(self):
        numbers = f"{self.ours:.3g} from the reference, {self.reference:.3g} it from"
        return f"{self.name} ({self.size}): {numbers} float32: {self.share:.3g}"


def share(lines: list[Line]) -> float:
    """The largest share of a large array, or the median of the others."""
    large = [line.share for line in lines if line.size >= LARGE]
    small = [line.share for line in lines if line.size < LARGE]
    return max([*large, *([float(np.median(small))] if small else [])])


class Truth:
    """What a program gives in float32, and by its reference."""

    def __init__(self, fun: Callable[..., Any], params: Any, batch: Any) -> None:
        self._params, self._batch, self._fun = params, batch, fun
        both = with_gradients(as_written(fun))
        self._program, shape = jax.make_jaxpr(both, return_shape=True)(
            params, batch, jnp.float32(1)
        )
        self._structure = jax.tree.structure(shape)
        for scale in LOSS_SCALES:
            self.scale, self._known = jnp.float32(scale), dict[Any, Any]()
            if max([0, *self.seen("float32").sizes]) <= MOST:
                break

    def _run(self, dtype: str, noise: int | None = None) -> Any:
        if (dtype, noise) not in self._known:
            self._known[dtype, noise] = self._run_anew(dtype, noise)
        return self._known[dtype, noise]

    def _run_anew(self, dtype: str, noise: int | None) -> Any:
        """A run; with `noise`, by another float32: off by last bits here and there."""
        interpreter = Interpreter(dtype, noise)
        leaves = [*jax.tree.leaves((self._params, self._batch)), self.scale]
        return interpreter, interpreter.run(self._program, leaves)

    def seen(self, dtype: str, noise: int | None = None) -> Interpreter:
        return self._run(dtype, noise)[0]

    def named(self, results: Any) -> dict[str, np.ndarray]:
        """The floats in a tree of results by name, gradients without their scale."""
        found = {}
        for path, leaf in jax.tree.leaves_with_path(results):
            if is_float(leaf):
                scale = float(self.scale) if path[0].key == "gradient" else 1.0
                found[jax.tree_util.keystr(path)] = np.asarray(leaf, float) / scale
        return found

    def given(self, dtype: str, noise: int | None = None) -> dict[str, np.ndarray]:
        results = self._run(dtype, noise)[1]
        return self.named(jax.tree.unflatten(self._structure, results))

    def compare(self, found: dict[str, np.ndarray], half: str) -> list[Line]:
        wide, right = self.given("float32"), self.given(half)
        assert found.keys() == right.keys()
        return [
            Line(
                name,
                x.size,
                _distance(found[name], x),
                _distance(x, wide[name]),
                float(np.finfo(np.float32).eps * np.max(np.abs(x), initial=0)),
            )
            for name, x in right.items()
        ]

    def is_off_by_last_bits(self, lines: list[Line], half: str) -> bool:
        """Whether by another float32 the reference is as far from itself.

        Or the program in float32 throughout, by the float32 of XLA.
        """
        others = (self.compare(self.given(half, noise), half) for noise in NOISES)
        every = itertools.chain([self._by_xla(lines)], others)
        return any(share(lines) <= TIMES * share(other) for other in every)

    def _by_xla(self, lines: list[Line]) -> list[Line]:
        """The lines of the program in float32, compiled."""
        run = jax.jit(with_gradients(self._fun))
        found = self.named(run(self._params, self._batch, self.scale))
        wide = self.given("float32")
        return [
            line._replace(ours=_distance(found[line.name], wide[line.name]))
            for line in lines
        ]

    def why_left_out(self, half: str) -> str:
        """Why a program is not judged; "" if it is."""
        if not all(np.all(np.isfinite(x)) for x in self.given("float32").values()):
            return "float32 is not finite"
        if half == "float16" and not all(x <= MOST for x in self.seen(half).sizes):
            return "a product takes or gives over 6e4"
        is_finite = all(np.all(np.isfinite(x)) for x in self.given(half).values())
        return "" if is_finite else "the reference is not finite"

    def why_unsure(self, half: str) -> str:
        """Why a program that is off is not judged; "" if it is."""
        right, others = (
            self.seen(half),
            [self.seen(half, noise) for noise in NOISES[:3]],
        )
        for other in others:
            if len(right.choices) != len(other.choices):
                return "a choice differs"
            pairs = zip(right.choices, other.choices, strict=True)
            if any(np.any(x != y) for x, y in pairs):
                return "a choice differs"
        margins = [x.margins for x in (right, *others)]
        if any(_is_near(*x) for x in zip(*margins, strict=True)):
            return "a choice is near"
        return ""


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    """The root mean square of the difference; inf where one alone is not finite."""
    if x.shape != y.shape or not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return math.inf
    return float(np.sqrt(np.mean((x - y) ** 2))) if x.size else 0.0


def _is_near(margin: Any, *others: Any) -> bool:
    """Whether a comparison might come out otherwise by another float32."""
    with np.errstate(invalid="ignore"):
        moved = np.max([np.abs(other - margin) for other in others], axis=0)
    moved = np.where(np.isnan(moved), 0.0, moved)
    return bool(np.any((np.abs(margin) <= NEAR * moved) & (moved > 0)))
