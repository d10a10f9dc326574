# SPDX-License-Identifier: Apache-2.0
"""Parameters and moments in bfloat16 that move: `bfloat16_params`.

A float32 number is a bfloat16 number, its upper 16 bits, and 16 bits more:

    stochastic   A random number of 16 bits is added. What is carried into the upper
                 half rounds it up, with the right probability.
    exact        The upper half is rounded to nearest, ties away from zero, and stored
                 as the parameter. The state keeps the lower half, whose highest bit
                 says that the upper half was rounded up.

All of it is done with the bits: XLA may take a cast and its way back for no cast.

Differs from torchao's `bf16_stochastic_round` in: the random numbers are a hash of
seed, step, leaf and index. A skipped step draws nothing, the layout of an array over
devices does not matter, and no array of random numbers is in memory.
"""

import zlib
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from jls import _validate
from jls._ema import ParamsEmaState
from jls._nnx import read_variables
from jls._program.jaxprs import varying_axes
from jls._state import find
from jls._text import describe
from jls._tree import is_array
from jls._types import exportable

Rounding = Literal["stochastic", "exact"]
BFLOAT16 = jnp.dtype(jnp.bfloat16)
FLOAT32 = jnp.dtype(jnp.float32)
UPPER = np.uint32(0xFFFF0000)
# Averages and accumulators: they gather what is small beside them, in float32.
_STAY: dict[Any, tuple[str, ...]] = {
    optax.ApplyEvery: ("grad_acc",),
    optax.EmaState: ("ema",),
    optax.MultiStepsState: ("acc_grads",),
    optax.contrib.ScheduleFreeState: ("z",),
    ParamsEmaState: ("ema",),
}


@exportable
class Bfloat16ParamsState(NamedTuple):
    """State of `jls.bfloat16_params`.

    Example:
      >>> optimizer = jls.bfloat16_params(optax.sgd(0.1, momentum=0.9))
      >>> state = optimizer.init(jnp.ones(2, jnp.bfloat16))
      >>> state.inner_state[0].trace.dtype
      dtype(bfloat16)
    """

    inner_state: Any  # of `inner`, its moments in bfloat16 unless `moments` is None
    rest: Any  # like the parameters: u16, what bfloat16 lacks; () if it is not exact
    # Steps applied, modulo 2^32: which numbers are drawn.
    count: Array  # u32[]  # pyright: ignore[reportIncompatibleMethodOverride]


def bfloat16_params(
    inner: optax.GradientTransformation,
    *,
    rounding: Rounding = "stochastic",
    moments: Any = jnp.bfloat16,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Lets parameters that are stored in bfloat16 move as float32 ones do.

    bfloat16 has 8 bits: an update of less than 1/512 of its parameter is lost, and with
    `b2=0.999` a second moment never falls. Here `inner` computes in float32, with
    parameters, gradients and moments widened inside the same kernels, and what is
    stored in bfloat16 is rounded so that nothing is lost.

    Args:
      inner: any optax transformation. Leaves of the parameters that are not bfloat16
        are as with `inner` alone.
      rounding: "stochastic" rounds to one of the two neighbours, with the probabilities
        that make it right on average. "exact" keeps in the state the 16 bits that
        bfloat16 lacks: with `moments=None` training is that in float32, bit for bit.
      moments: bfloat16 stores the float32 arrays of `inner`'s state that have a
        dimension in bfloat16, stochastically rounded, except averages and accumulators
        (`jls.params_ema`, `optax.ema`, `optax.MultiSteps`, `optax.apply_every`,
        schedule-free). None leaves the state of `inner` as it is.
      seed: of the random numbers, an integer.

    Returns:
      A transformation with state `jls.types.Bfloat16ParamsState`, whose `update` needs
      `params`. Its updates are float32: what `optax.apply_updates` makes of them is the
      rounded parameter. Bytes a parameter between two steps of Adam, parameters and
      moments together: float32 12, stochastic 6, exact 8, exact with `moments=None` 12.

    Raises:
      TypeError: if `inner` is no optax transformation, or `seed` no integer.
      ValueError: if `rounding` or `moments` is something else. At `update`, if `params`
        is missing.

    Example:
      >>> optimizer = jls.skip_nonfinite(jls.bfloat16_params(optax.sgd(1e-3)))
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.ones(10_000), state, params)
      >>> params = optax.apply_updates(params, updates)  # 0.999 is no bfloat16 number
      >>> bool(abs(params.astype(jnp.float32).mean() - 0.999) < 1e-4)
      True

    References:
      Zamirai et al., Revisiting BFloat16 Training, 2020, arXiv:2010.06192.
    """
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"inner must be an optax transformation, got {describe(inner)}. Write "
            "jls.bfloat16_params(optax.adamw(1e-5))."
        )
    rounding = _validate.choice("rounding", rounding, get_args(Rounding))
    if moments is not None and not _is_bfloat16(moments):
        raise ValueError(
            "moments must be jnp.bfloat16, or None for those of inner as they are, got "
            f"{moments!r}"
        )
    seed = _validate.host_interval("seed", seed, low=0)
    inner = optax.with_extra_args_support(inner)
    is_exact = rounding == "exact"

    def init(params: optax.Params) -> Bfloat16ParamsState:
        inner_state = inner.init(jax.tree.map(_widened, params))
        if moments is not None:
            inner_state = _narrowed(inner_state, inner.init, params)
        rest = jax.tree.map(_rest_of, params) if is_exact else ()
        return Bfloat16ParamsState(inner_state, rest, jnp.zeros((), jnp.uint32))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError(
                "jls.bfloat16_params rounds the new parameters: pass params as well, "
                "optimizer.update(grads, state, params)."
            )
        rest = state.rest if is_exact else params
        masters = jax.tree.map(_widened, params)
        if is_exact:
            masters = jax.tree.map(_master, params, rest)
        grads = jax.tree.map(_widened_beside, updates, params)
        before = jax.tree.map(_widened_moment, state.inner_state)
        steps, after = inner.update(grads, before, masters, **extra)
        count = state.count + jnp.uint32(1)
        noise = _Noise(seed, count, params)

        def move(path, param, master, step, rest):
            if not _is_bfloat16(param):
                return step, rest
            new = _bits(master + step.astype(jnp.float32))
            stored = _nearest(new) if is_exact else _drawn(new, noise.of(path, param))
            made = _difference(param, stored)
            # What `optax.apply_updates` makes of it is not `stored` if the parameter is
            # 2**16 times as large.
            kept = _bits(lax.reduce_precision(_widened(param) + made, 8, 7))
            lower = jnp.where(kept == stored, new & 0xFFFF, 0)
            return made, jnp.where(_is_nan(new), 0, lower).astype(jnp.uint16)

        moved = jax.tree_util.tree_map_with_path(move, params, masters, steps, rest)
        made = jax.tree.map(lambda _, pair: pair[0], params, moved)
        rest = jax.tree.map(lambda _, pair: pair[1], params, moved)
        inner_state = jax.tree_util.tree_map_with_path(
            lambda path, new, old: _rounded_moment(new, old, noise, path),
            after,
            state.inner_state,
        )
        return made, Bfloat16ParamsState(inner_state, rest if is_exact else (), count)

    return optax.GradientTransformationExtraArgs(init, update)


def master_params(params: Any, state: Any) -> Any:
    """Returns the float32 parameters of which `params` are the rounded ones.

    For evaluation and export.

    Args:
      params: the parameters, as the last step returned them.
      state: what carries the state of the optimizer: of `jls.bfloat16_params` with
        `rounding="exact"`, however nested, their 16 lower bits are put back; of any
        other optimizer the parameters are widened.

    Returns:
      A pytree like `params`, its bfloat16 leaves in float32.

    Example:
      >>> inner = jls.bfloat16_params(optax.sgd(1.0), rounding="exact")
      >>> optimizer = jls.skip_nonfinite(inner)
      >>> params = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.full(1, 1e-4), state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> params, jls.master_params(params, state)
      (Array([1], dtype=bfloat16), Array([0.9999], dtype=float32))
    """
    rests = {}
    for _, node in find(state, lambda node: isinstance(node, Bfloat16ParamsState)):
        rests |= dict(
            jax.tree_util.tree_flatten_with_path(read_variables(node.rest))[0]
        )

    def master(path, param):
        rest = rests.get(path)
        return _widened(param if rest is None else _master(param, rest))

    return jax.tree_util.tree_map_with_path(master, params)


class _Noise:
    """The 16 random bits of each element, as a hash of seed, step, array and index.

    The parameter and its first moment share the halves of one hash, its other moments
    the next ones: a kernel computes all of them, and half as many hashes.
    """

    def __init__(self, seed: int, count: Array, params: Any):
        self._step = _mixed(count * jnp.uint32(0x9E3779B1) ^ jnp.uint32(seed % 2**32))
        flat, _ = jax.tree_util.tree_flatten_with_path(params)
        self._params = {path: jnp.shape(leaf) for path, leaf in flat}
        self._taken: dict[Any, int] = dict.fromkeys(self._params, 1)

    def of(self, path: Any, param: Any) -> Array:
        """`u32` like a parameter, below 2**16."""
        return self._half(path, 0, param)

    def of_moment(self, path: Any, moment: Any) -> Array:
        """`u32` like an array of the state, below 2**16."""
        owner = next(
            (path[i:] for i in range(len(path) + 1) if self._owns(path[i:], moment)),
            None,
        )
        if owner is None:
            return self._half(path, 0, moment)
        number = self._taken[owner]
        self._taken[owner] += 1
        return self._half(owner, number, moment)

    def _owns(self, path: Any, moment: Any) -> bool:
        return self._params.get(path) == jnp.shape(moment)

    def _half(self, path: Any, number: int, like: Any) -> Array:
        name = f"{jax.tree_util.keystr(path)} {number // 2}"
        salt = self._step ^ jnp.uint32(zlib.crc32(name.encode()))
        for axis in sorted(varying_axes(like)):
            index = lax.axis_index(axis).astype(jnp.uint32)
            salt = _mixed(salt + index + jnp.uint32(zlib.crc32(axis.encode())))
        hashed = _mixed(_indices(like) * jnp.uint32(0x9E3779B1) ^ salt)
        return hashed & 0xFFFF if number % 2 else hashed >> 16


def _indices(like: Any) -> Array:
    """The index of each element in the whole array, modulo 2**32."""
    return lax.iota(jnp.uint32, int(np.prod(jnp.shape(like)))).reshape(jnp.shape(like))


def _mixed(x: Array) -> Array:
    """Each bit depends on all bits: a finalizer of C. Wellons' hash-prospector."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _is_bfloat16(leaf: Any) -> bool:
    """Whether it is an array of bfloat16, or that dtype."""
    try:
        return jnp.dtype(getattr(leaf, "dtype", leaf)) == BFLOAT16
    except TypeError:
        return False


def _is_float32(leaf: Any) -> bool:
    return is_array(leaf) and leaf.dtype == FLOAT32


def _is_moment(leaf: Any, dtype: Any) -> bool:
    return is_array(leaf) and leaf.dtype == dtype and jnp.ndim(leaf) > 0


def _widened_beside(grad: Any, param: Any) -> Any:
    return grad.astype(jnp.float32) if _is_bfloat16(param) else grad


# Bits of float32 numbers. One whose 16 lower bits are 0 is a bfloat16 number: no cast
# changes it.


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _number(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _widened(leaf: Any) -> Any:
    """A bfloat16 array in float32; anything else as it is."""
    is_one = is_array(leaf) and _is_bfloat16(leaf)
    return leaf.astype(jnp.float32) if is_one else leaf


def _is_nan(bits: Array) -> Array:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def _quiet(bits: Array) -> Array:
    """A NaN with a bit among its upper ones; any other number as it is."""
    return bits | _is_nan(bits).astype(jnp.uint32) << 22


def _nearest(bits: Array) -> Array:
    """A bfloat16 number, rounded to nearest, ties away from zero."""
    return jnp.where(_is_nan(bits), _quiet(bits), bits + 0x8000) & UPPER


def _drawn(bits: Array, noise: Array) -> Array:
    """A bfloat16 number, rounded up if `noise` says so; never from finite to inf."""
    is_largest = (bits & 0x7FFFFFFF) >= 0x7F7F0000
    return jnp.where(is_largest, _quiet(bits), bits + noise) & UPPER


def _master(param: Array, rest: Array) -> Array:
    """The float32 number that `_nearest` has split."""
    if not _is_bfloat16(param):
        return param
    lower = rest.astype(jnp.uint32)
    return _number((_bits(_widened(param)) - (lower >> 15 << 16)) | lower)


def _rest_of(param: Any) -> Any:
    """The lower bits of a float32 parameter that will be cast; 0 of a bfloat16 one.

    The cast rounds a tie to even, which may be down: then one bit of float32 is lost.
    """
    if not _is_float32(param):
        return jnp.zeros(jnp.shape(param), jnp.uint16)
    bits = _bits(param)
    is_tie_down = (bits & 0x1FFFF) == 0x8000
    lower = jnp.where(is_tie_down, 0x7FFF, bits & 0xFFFF)
    return jnp.where(_is_nan(bits), 0, lower).astype(jnp.uint16)


def _difference(param: Array, stored: Array) -> Array:
    """The update that makes `stored` of a parameter, -0.0 where it stays."""
    before = _widened(param)
    return jnp.where(_bits(before) == stored, -0.0, _number(stored) - before)


# Moments.


def _widened_moment(leaf: Any) -> Any:
    return _widened(leaf) if _is_moment(leaf, BFLOAT16) else leaf


def _rounded_moment(new: Any, old: Any, noise: _Noise, path: Any) -> Any:
    """The new moment, in bfloat16 if the old one is; `inner` may have rounded it."""
    if not (_is_moment(old, BFLOAT16) and _is_moment(new, FLOAT32)):
        return new
    rounded = _drawn(_bits(new), noise.of_moment(path, new))
    return _number(rounded).astype(jnp.bfloat16)


def _narrowed(inner_state: Any, init: Any, params: Any) -> Any:
    """The state of `inner` with moments in bfloat16, except those of float32 leaves.

    If no leaf is bfloat16 yet, all are going to be.
    """
    leaves = jax.tree.leaves(params)
    if any(map(_is_bfloat16, leaves)) and not all(map(_is_bfloat16, leaves)):
        half = jax.tree.map(
            lambda x: x.astype(BFLOAT16) if _is_float32(x) else x, params
        )
        as_given, as_half = jax.eval_shape(init, params), jax.eval_shape(init, half)
    else:
        as_given = as_half = inner_state

    def narrow(leaf, given, half):
        is_of_float32 = _is_bfloat16(half) and not _is_bfloat16(given)
        return (
            leaf.astype(BFLOAT16)
            if _is_moment(leaf, FLOAT32) and not is_of_float32
            else leaf
        )

    def walk(tree, *others):
        return jax.tree.map(node, tree, *others, is_leaf=lambda x: type(x) in _STAY)

    def node(tree, *others):
        if type(tree) not in _STAY:
            return narrow(tree, *others)
        fields = [name for name in tree._fields if name not in _STAY[type(tree)]]
        return tree._replace(
            **{x: walk(*(getattr(one, x) for one in (tree, *others))) for x in fields}
        )

    return walk(inner_state, as_given, as_half)
