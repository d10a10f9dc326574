# SPDX-License-Identifier: Apache-2.0
"""Parameters and moments in bfloat16 that move: `bfloat16_params`.

A float32 number is a bfloat16 number, its upper 16 bits, and 16 bits more:

    stochastic   A random number of 16 bits is added. A carry into the upper half rounds
                 it up, with the right probability.
    exact        The upper half is rounded to nearest, ties away from zero, and stored
                 as the parameter. The state keeps the lower half, whose highest bit
                 says that the upper half was rounded up.

All of it is done with bits: XLA may take a cast and its way back for no cast.

Differs from torchao's `bf16_stochastic_round` in: the random numbers are a hash of
seed, step, leaf and index. A skipped step draws nothing, the layout of an array over
devices does not matter, and no array of random numbers is in memory.
"""

import contextlib
import zlib
from collections.abc import Callable, Container, Iterator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from jls import _validate
from jls._mistakes import OtherStateError, update_with_average, warn
from jls._nnx import (
    is_object,
    is_variable,
    modules_in,
    read_variables,
    trained_variables,
    variables_in,
)
from jls._notes import note, noted
from jls._program.jaxprs import varying_axes
from jls._scopes import STORED
from jls._state import find, is_wrapper_state, rounds_bfloat16
from jls._text import at, describe, naming_arguments, path_name
from jls._tree import is_array, is_inexact
from jls._types import Bfloat16ParamsState

Rounding = Literal["stochastic", "exact"]
BFLOAT16 = jnp.dtype(jnp.bfloat16)
FLOAT32 = jnp.dtype(jnp.float32)
UPPER = np.uint32(0xFFFF0000)

# What stays float32, by the name of a state of optax or jls: averages and accumulators,
# which gather what is small beside them; copies of parameters and past gradients, of
# which differences are taken; and arrays that are like no parameter.
_STAY: dict[str, tuple[str, ...]] = {
    "ApplyEvery": ("grad_acc",),
    "COCOBState": ("init_particles", "cumulative_gradients", "subgradients", "reward"),
    "DAdaptAdamWState": ("grad_sum",),
    "DoGState": ("init_params",),
    "DoWGState": ("init_params",),
    "EmaState": ("ema",),
    "GaLoreState": ("projector",),
    "InjectHyperparamsState": ("hyperparams", "hyperparams_states"),
    "InjectStatefulHyperparamsState": ("hyperparams", "hyperparams_states"),
    "LossScaledState": ("scaler_state", "spike_state"),
    "MadgradState": ("grad_sum_sq", "s", "x0"),
    "MechanicState": ("r", "m", "v", "s", "x0"),
    "MonitorState": ("measurements", "measure_states"),
    "MultiStepsState": ("acc_grads",),
    "MuonState": ("ns_coeffs",),
    "ParamsEmaState": ("ema",),
    "ProdigyState": ("grad_sum", "params0"),
    "SAMState": ("cache",),
    "ScaleByBacktrackingLinesearchState": ("grad",),
    "ScaleByDistanceOverGradientsState": ("init_params",),
    "ScaleByLBFGSState": (
        *("params", "updates", "weights_memory"),
        *("diff_params_memory", "diff_updates_memory"),
    ),
    "ScaleByZoomLinesearchState": ("grad",),
    "ScheduleFreeState": ("z",),
    "SnapshotState": ("measurement",),
}


@naming_arguments()
def bfloat16_params(
    inner: optax.GradientTransformation,
    *,
    rounding: Rounding = "stochastic",
    moments: Any = jnp.bfloat16,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Lets parameters that are stored in bfloat16 move as float32 ones do.

    A bfloat16 number has 8 bits, so plain optax loses every update that is smaller than
    1/512 of its parameter, and with `b2=0.999` a second moment never falls. Here
    `inner` computes in float32: parameters, gradients and moments are widened inside
    its kernels, and what it makes is rounded so that nothing is lost, and stored in
    bfloat16. `jls.train_step`, `jls.value_and_grad` and `jls.grad` widen the parameters
    for the loss function, so their gradients are float32 too. Nothing that changes the
    updates may follow.

    Args:
      inner: any optax transformation. Parameters that are not bfloat16, and their
        moments, are as with `inner` alone.
      rounding: "stochastic" rounds to one of the two neighbors, with the probabilities
        that make it right on average. "exact" keeps in the state the 16 bits that
        bfloat16 lacks: with `moments=None` training is that in float32, bit for bit.
      moments: bfloat16 stores the float32 arrays in `inner`'s state in bfloat16, always
        stochastically rounded. Scalars stay, and so do averages and accumulators
        (`jls.params_ema`, `optax.ema`, `optax.MultiSteps`, `optax.apply_every`), copies
        of parameters (schedule-free, Prodigy, DoG, L-BFGS and the like), and what a
        state of jls, `inject_hyperparams` or `monitor` holds. None leaves the state of
        `inner` as it is.
      seed: of the random numbers, an integer from 0.

    Returns:
      A transformation with state `jls.types.Bfloat16ParamsState`, whose `update` needs
      `params`. Its updates are float32: what `optax.apply_updates` makes of them is the
      rounded parameter. `init` also takes the float32 parameters, if all of them are
      then cast: "exact" keeps what the cast drops. Bytes that a parameter and its two
      moments of Adam take between steps: float32 12, stochastic 6, exact 8, exact with
      `moments=None` 12.

    Raises:
      TypeError: if `inner` is no optax transformation, or `rounding` or `seed` of
        another type.
      ValueError: if `rounding`, `moments` or `seed` is something else; at `init`, if
        `inner` contains another one, or an `optax.lookahead`; at `update`, if
        `params` is missing, or `state` is of another optimizer, another rounding or
        other moments.

    Warns:
      JlsWarning: at `update`, if there are float32 parameters and none in bfloat16.

    Example:
      >>> optimizer = jls.skip_nonfinite(jls.bfloat16_params(optax.sgd(1e-3)))
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> state = optimizer.init(params)
      >>> grads = jnp.ones(10_000)
      >>> params, state, _ = jls.apply_gradients(optimizer, grads, state, params)
      >>> float(params[0]) in (0.99609375, 1.0)  # the neighbors of 0.999
      True
      >>> bool(abs(params.astype(jnp.float32).mean() - 0.999) < 1e-4)
      True

    References:
      Zamirai et al., Revisiting BFloat16 Training, 2020, arXiv:2010.06192.
    """
    inner = _validate.transformation(inner, "jls.bfloat16_params(optax.adamw(1e-5))")
    rounding = _validate.choice("rounding", rounding, get_args(Rounding))
    if moments is not None and not _is_bfloat16(moments):
        raise ValueError(
            "moments must be jnp.bfloat16, or None for those of inner as they are, got "
            f"{moments!r}."
        )
    seed = _validate.host_interval("seed", seed, low=0)
    is_exact = rounding == "exact"

    def init(params: optax.Params) -> Bfloat16ParamsState:
        note("bfloat16", params)
        inner_state = inner.init(jax.tree.map(_widened, params))
        _check_inner(inner_state)
        if moments is not None:
            inner_state = _narrowed(inner_state, params)
        rest = jax.tree.map(rest_of, params) if is_exact else ()
        count = jnp.zeros((), jnp.uint32)
        return Bfloat16ParamsState(inner_state, rest, count, *_unwatched(params))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError(
                "jls.bfloat16_params rounds the new parameters: pass params as well, "
                "optimizer.update(grads, state, params)."
            )
        _check_state(state, params, rounding, moments, init)
        _warn_of_float32(params)
        if is_exact:
            masters = jax.tree.map(_master, params, state.rest)
        else:
            masters = jax.tree.map(_widened, params)
        grads = jax.tree.map(_widened_beside, updates, params)
        before = jax.tree.map(_widened_moment, state.inner_state)

        def update_inner(grads):
            return inner.update(grads, before, masters, **extra)

        steps, after = update_with_average(update_inner, grads)
        count = state.count + jnp.uint32(1)
        noise = _Noise(seed, count, params)

        def move(path, param, master, step, rest=None):
            if not _is_bfloat16(param):
                return step, rest
            new = _bits(master + step.astype(jnp.float32))
            if not is_exact:
                return _difference(param, _drawn(new, noise.of(path, param))), rest
            made = _difference(param, _nearest(new))
            return made, _rest_beside(param, made, new)

        trees = [masters, steps, state.rest] if is_exact else [masters, steps]
        with jax.named_scope(STORED):
            moved = jax.tree_util.tree_map_with_path(move, params, *trees)
        made = jax.tree.map(lambda _, pair: pair[0], params, moved)
        rest = jax.tree.map(lambda _, pair: pair[1], params, moved) if is_exact else ()
        inner_state = jax.tree_util.tree_map_with_path(
            lambda path, new, old: _rounded_moment(new, old, noise, path),
            after,
            state.inner_state,
        )
        flat, _ = jax.tree_util.tree_flatten_with_path(params)
        pairs = zip(flat, jax.tree.leaves(made), strict=False)
        note("stored", [(path, x) for (path, p), x in pairs if _is_bfloat16(p)])
        seen = _watched(state, params, made)
        return made, Bfloat16ParamsState(inner_state, rest, count, *seen)

    return optax.GradientTransformationExtraArgs(init, update)


@naming_arguments()
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

    Raises:
      TypeError: if `state` is an optimizer.
      ValueError: if `state` has lower bits of a parameter that is not in `params`, or
        if the two are swapped.

    Example:
      >>> inner = jls.bfloat16_params(optax.sgd(1.0), rounding="exact")
      >>> optimizer = jls.skip_nonfinite(inner)
      >>> params = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(params)
      >>> grads = jnp.full(1, 1e-4)
      >>> params, state, _ = jls.apply_gradients(optimizer, grads, state, params)
      >>> params, jls.master_params(params, state)
      (Array([1], dtype=bfloat16), Array([0.9999], dtype=float32))
    """
    if rounds_bfloat16(params) or find(params, is_wrapper_state):
        raise ValueError(
            f"params must come first, got {describe(params)} with the state of an "
            "optimizer in it. The order is jls.master_params(params, opt_state)."
        )
    if _validate.is_transformation(state):
        raise TypeError(
            f"state must be what the optimizer keeps, got {describe(state)}. Write "
            "jls.master_params(params, opt_state)."
        )
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)
    rests: dict[Any, Any] = {}
    for _, node in find(state, lambda node: isinstance(node, Bfloat16ParamsState)):
        of_node, _ = jax.tree_util.tree_flatten_with_path(
            node.rest, is_leaf=is_variable
        )
        rests |= {path: read_variables(rest) for path, rest in of_node}
    others = rests.keys() - dict(flat).keys()
    if others:
        raise ValueError(
            "params must be those that the optimizer moves, but have no leaf"
            f"{at(path_name(min(others, key=str)))}. Pass what the last step returned: "
            "jls.master_params(params, opt_state)."
        )

    def master(path, param):  # of NNX a variable, which is a tree
        rest = rests.get(path)
        return jax.tree.map(lambda x: _widened(_master(x, rest)), param)

    return jax.tree_util.tree_map_with_path(master, params, is_leaf=is_variable)


def read_wide(state: Any, params: Any) -> Any:
    """`params` as a loss reads them: in float32 what a `bfloat16_params` stores.

    Their gradients are float32 then. In bfloat16 an embedding, a loop or a weight in
    two places would add up its gradient in 8 bits. Where a product takes them in
    bfloat16, XLA drops the cast and its way back.

    Args:
      state: what carries the state of the optimizer.
      params: a pytree without NNX models.
    """
    is_one = any(map(_is_bfloat16, jax.tree.leaves(params))) and rounds_bfloat16(state)
    return jax.tree.map(_widened, params) if is_one else params


@contextlib.contextmanager
def models_read_wide(state: Any, models: Any) -> Iterator[None]:
    """`read_wide` of the NNX models in a pytree, in place, in the block."""
    found = modules_in(models) if rounds_bfloat16(state) else []
    variables = [x for model in found for x in trained_variables(state, model)]
    values = [x.get_value() for x in variables]
    pairs = [x for x in zip(variables, values, strict=True) if _is_bfloat16(x[1])]
    for variable, value in pairs:
        variable.set_value(_widened(value))
    try:
        yield
    finally:
        for variable, value in pairs:
            variable.set_value(value)


def stored_narrow(*args: Any) -> list[Any]:
    """For each array in arguments its shape, if it is bfloat16, or None."""
    arrays = _arrays_in(args)
    return [jnp.shape(x) if is_array(x) and _is_bfloat16(x) else None for x in arrays]


@contextlib.contextmanager
def widened(shapes: list[Any], *args: Any) -> Iterator[None]:
    """Says in the block which arrays in arguments were widened from bfloat16.

    A product in bfloat16 takes what they were widened from.

    Args:
      shapes: what `stored_narrow` returned of these arguments, before.
      args: the arguments, whose arrays may have become tracers.
    """
    pairs = zip(_arrays_in(args), shapes, strict=False)
    with noted("widened") as found:
        found += [x for x, shape in pairs if _is_float32(x) and jnp.shape(x) == shape]
        yield


def _arrays_in(args: Any) -> list[Any]:
    """The leaves of arguments, and the arrays in the variables of NNX objects."""
    leaves = jax.tree.leaves(args, is_leaf=is_object)
    modules = [x for x in leaves if is_object(x) and not is_variable(x)]
    variables = variables_in(*modules) if modules else []
    return [x.get_value() if is_variable(x) else x for x in (*leaves, *variables)]


class _Noise:
    """The 16 random bits of each element: a hash of seed, step, array and index.

    A parameter and its first moment take the two halves of one hash, further moments
    those of the next: one kernel computes all of them, with half as many hashes.
    """

    def __init__(self, seed: int, count: Array, params: Any):
        self._step = _mixed(count * _ODD ^ jnp.uint32(seed))
        self._names: dict[int, str] = {}  # by factor
        # How many halves of the hash of each array are taken.
        self._taken: dict[Any, int] = dict.fromkeys(_paths_of(params), 1)

    def of(self, path: Any, param: Any) -> Array:
        """`u32` like a parameter, below 2**16."""
        return self._half(path, 0, param)

    def of_moment(self, path: Any, moment: Any) -> Array:
        """`u32` like an array of the state, below 2**16."""
        owner = _owner(path, self._taken)
        owner = path if owner is None else owner
        number = self._taken.get(owner, 0)
        self._taken[owner] = number + 1
        return self._half(owner, number, moment)

    def _half(self, path: Any, number: int, like: Any) -> Array:
        name = f"{jax.tree_util.keystr(path)} {number // 2}"
        factor = zlib.crc32(name.encode()) | 1
        while self._names.setdefault(factor, name) != name:  # no two draw alike
            factor = (factor + 2) % 2**32
        # Multiplied: two arrays must not meet in the same elements in each step.
        salt = self._step * jnp.uint32(factor)
        for axis in sorted(varying_axes(like)):
            index = lax.axis_index(axis).astype(jnp.uint32)
            salt = _mixed(salt + index + jnp.uint32(zlib.crc32(axis.encode())))
        hashed = _mixed(_indices(like) * _ODD ^ salt)
        return hashed & 0xFFFF if number % 2 else hashed >> 16


_ODD = np.uint32(0x9E3779B1)


def _paths_of(params: Any) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]


def _owner(path: Any, params: Container[Any]) -> Any:
    """The path of the parameter to which an array of the state belongs, or None.

    optax keeps moments in trees like the parameters: the paths end alike.
    """
    ends = (path[i:] for i in range(len(path) + 1))
    return next((end for end in ends if end in params), None)


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
    return is_array(leaf) and getattr(leaf, "dtype", None) == FLOAT32


def _widened(leaf: Any) -> Any:
    """A bfloat16 array in float32; anything else as it is."""
    is_one = is_array(leaf) and _is_bfloat16(leaf)
    return leaf.astype(jnp.float32) if is_one else leaf


def _widened_beside(grad: Any, param: Any) -> Any:
    return grad.astype(jnp.float32) if _is_bfloat16(param) else grad


# Bits of float32 numbers. One whose 16 lower bits are 0 is a bfloat16 number: no cast
# changes it.


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _number(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _is_nan(bits: Array) -> Array:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def _quiet(bits: Array) -> Array:
    """A NaN with a bit among its upper ones; any other number as it is."""
    return bits | _is_nan(bits).astype(jnp.uint32) << 22


def _drawn(bits: Array, noise: Array) -> Array:
    """A bfloat16 number, rounded up if `noise` says so; never from finite to inf."""
    is_largest = (bits & 0x7FFFFFFF) >= 0x7F7F0000  # or inf, or NaN
    return jnp.where(is_largest, _quiet(bits), bits + noise) & UPPER


def _nearest(bits: Array) -> Array:
    """A bfloat16 number, rounded to nearest, ties away from zero."""
    return jnp.where(_is_nan(bits), _quiet(bits), bits + 0x8000) & UPPER


def _difference(param: Array, stored: Array) -> Array:
    """The update that makes `stored` of a parameter, -0.0 where it stays."""
    before = _widened(param)
    return jnp.where(_bits(before) == stored, -0.0, _number(stored) - before)


def _rest_beside(param: Array, made: Array, new: Array) -> Array:
    """The lower bits of `new`; 0 where `param + made` is not its upper half.

    If a parameter falls by 2**16 or more in one step, float32 rounds `made`.
    """
    stored = _bits(lax.reduce_precision(_widened(param) + made, 8, 7))
    is_apart = _is_nan(new) | (stored != _nearest(new))
    lower = jnp.where(is_apart, 0, new & 0xFFFF)
    # XLA for a TPU fuses it with the parameter only as a float that is cast. As an
    # integer it was a kernel of its own, which read everything once more.
    return lax.platform_dependent(
        lower, tpu=_uint16_of_float, default=lambda x: x.astype(jnp.uint16)
    )


def _uint16_of_float(lower: Array) -> Array:
    """The cast of `u32` below 2**16, by way of 2**23 and as much, which is exact."""
    return (_number(lower | 0x4B000000) - 2.0**23).astype(jnp.uint16)


def _master(param: Any, rest: Array | None) -> Any:
    """The float32 number of which `_nearest` and `_rest_beside` made the two."""
    if rest is None or not (is_array(param) and _is_bfloat16(param)):
        return param
    lower = rest.astype(jnp.uint32)
    return _number((_bits(_widened(param)) - (lower >> 15 << 16)) | lower)


def rest_of(param: Any) -> Any:
    """The lower bits of a float32 parameter that will be cast; 0 of a bfloat16 one.

    The cast rounds a tie to even, which may be down: then one bit of float32 is lost.
    """
    if not _is_float32(param):
        # Of an array of JAX, where that is.
        like = param if is_inexact(param) else jnp.zeros(jnp.shape(param))
        return jnp.zeros_like(like, dtype=jnp.uint16)
    bits = _bits(param)
    lower = jnp.where((bits & 0x1FFFF) == 0x8000, 0x7FFF, bits & 0xFFFF)
    # Some platforms flush what is subnormal, in the cast too.
    is_subnormal = (bits & 0x7F800000) == 0
    return jnp.where(_is_nan(bits) | is_subnormal, 0, lower).astype(jnp.uint16)


# One parameter is watched, in the kernel that moves it: does it become what was made of
# it? Its copy is what that costs, so it is a small one.

_ENOUGH = 2**16  # numbers, of which some are so small that any update moves them
_SHARE = 64  # of the numbers of all parameters


def _watched_leaf(params: Any) -> int | None:
    """The index of the leaf that is watched: of bfloat16, or going to be; or None."""
    leaves = jax.tree.leaves(params)
    is_one = _is_bfloat16 if any(map(_is_bfloat16, leaves)) else _is_float32
    sizes = {
        i: np.size(x)
        for i, x in enumerate(leaves)
        # One that differs over the axes of a `shard_map` would make the state differ.
        if is_array(x) and is_one(x) and not varying_axes(x)
    }
    most = max(_ENOUGH // 4, sum(sizes.values()) // _SHARE)
    small = {i: size for i, size in sizes.items() if 0 < size <= most}
    enough = [i for i, size in small.items() if size >= _ENOUGH]
    if enough:
        return min(enough, key=small.__getitem__)
    return max(small, key=small.__getitem__, default=None)


def _unwatched(params: Any) -> tuple[Array, Array]:
    """`made` and `strayed` of a new state, placed as the parameter is."""
    index = _watched_leaf(params)
    # Orbax saves no array without elements.
    like = jnp.zeros(1) if index is None else jax.tree.leaves(params)[index]
    return jnp.zeros_like(like, jnp.uint32), jnp.zeros_like(like, jnp.int8)


def _watched(state: Bfloat16ParamsState, params: Any, made: Any) -> tuple[Array, Array]:
    """`made` and `strayed` of the next state."""
    index = _watched_leaf(params)
    leaves = [] if index is None else jax.tree.leaves(params)
    if index is None or jnp.shape(leaves[index]) != jnp.shape(state.made):
        return state.made, state.strayed
    param, update = _widened(leaves[index]), jax.tree.leaves(made)[index]
    given, before, after = _bits(param), state.made & UPPER, state.made << 16
    has_moved = before != after
    # What stands still may be frozen.
    is_elsewhere = has_moved & (given != before)
    longer = jnp.clip(state.strayed, 0, 100) + jnp.int8(1)
    strayed = jnp.where(is_elsewhere, longer, state.strayed)
    strayed = jnp.where(has_moved & (given == after), jnp.int8(-1), strayed)
    becomes = _bits(lax.reduce_precision(param + update, 8, 7))
    return given | becomes >> 16, strayed


# Moments.


def _is_moment(leaf: Any, dtype: Any) -> bool:
    return getattr(leaf, "dtype", None) == dtype and jnp.ndim(leaf) > 0


def _widened_moment(leaf: Any) -> Any:
    return _widened(leaf) if _is_moment(leaf, BFLOAT16) else leaf


def _rounded_moment(new: Any, old: Any, noise: _Noise, path: Any) -> Any:
    """The new moment, in bfloat16 if the old one is; `inner` may have rounded it."""
    if not (_is_moment(old, BFLOAT16) and _is_moment(new, FLOAT32)):
        return new
    rounded = _drawn(_bits(new), noise.of_moment(path, new))
    return _number(rounded).astype(jnp.bfloat16)


def _narrowed(inner_state: Any, params: Any) -> Any:
    """The state of `inner` with moments in bfloat16, except those of other leaves.

    If no leaf is bfloat16 yet, all that are float32 are going to be.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    is_cast = any(_is_bfloat16(leaf) for _, leaf in flat)
    narrow = {path: _is_bfloat16(leaf) or not is_cast for path, leaf in flat}

    def stays(node):
        return type(node).__name__ in _STAY

    def narrowed(path, node):
        if stays(node):
            fields = set(node._fields).difference(_STAY[type(node).__name__])
            return node._replace(**{x: walk(getattr(node, x)) for x in fields})
        is_narrow = narrow.get(_owner(path, narrow), True)
        return (
            node.astype(BFLOAT16) if is_narrow and _is_moment(node, FLOAT32) else node
        )

    def walk(tree):
        return jax.tree_util.tree_map_with_path(narrowed, tree, is_leaf=stays)

    return walk(inner_state)


# Mistakes.


def _check_state(
    state: Any, params: Any, rounding: str, moments: Any, init: Callable[[Any], Any]
) -> None:
    """Raises unless a state is of this rounding, and has these moments."""
    if not isinstance(state, Bfloat16ParamsState):
        raise OtherStateError(
            "state must be a Bfloat16ParamsState as the optimizer's init makes it, got "
            f"{type(state).__name__}. {_UPGRADE}"
        )

    def has_moments(state):
        return any(_is_moment(x, BFLOAT16) for x in jax.tree.leaves(state.inner_state))

    was = "exact" if jax.tree.leaves(state.rest) else "stochastic"
    if was != rounding and jax.tree.leaves(params):
        raise OtherStateError(
            f"state must be of rounding={rounding!r}, as the optimizer is, got one of "
            f"rounding={was!r}. {_UPGRADE}"
        )
    # Otherwise `inner` may have no moments, or bfloat16 ones of its own.
    has = has_moments(state)
    if has != (moments is not None) and has != has_moments(
        jax.eval_shape(init, params)
    ):
        of = ["None", "jnp.bfloat16"]
        raise OtherStateError(
            f"state must be of moments={of[moments is not None]}, as the optimizer is, "
            f"got one of moments={of[moments is None]}. {_UPGRADE}"
        )


_UPGRADE = (
    "A state of another rounding, of other moments or of a float32 run becomes one by "
    "jls.upgrade_state(optimizer.init(params), saved, params=float32_params)."
)


def _check_inner(inner_state: Any) -> None:
    """Raises if what is inside cannot be, by its state."""
    misplaced = find(
        inner_state,
        lambda node: isinstance(node, Bfloat16ParamsState | optax.LookaheadState),
    )
    if any(isinstance(node, Bfloat16ParamsState) for _, node in misplaced):
        raise ValueError(
            "inner must not contain jls.bfloat16_params, but its state has one: the "
            "parameters would be rounded twice. Keep the outermost."
        )
    if misplaced:
        raise ValueError(
            "inner must not contain optax.lookahead, which has two copies of the "
            "params. It goes outside, also of the guard: optax.lookahead("
            "jls.skip_nonfinite(jls.bfloat16_params(inner)), sync_period, "
            "slow_step_size)."
        )


def _warn_of_float32(params: Any) -> None:
    leaves = jax.tree.leaves(params)
    if any(map(_is_float32, leaves)) and not any(map(_is_bfloat16, leaves)):
        warn(
            "no parameter is bfloat16, so jls.bfloat16_params rounds none. Cast them "
            "once, after optimizer.init(params): params = jax.tree.map(lambda p: "
            "p.astype(jnp.bfloat16), params)."
        )
