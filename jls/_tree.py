# SPDX-License-Identifier: Apache-2.0
"""Pytree arithmetic that knows nothing of loss scaling.

Which leaves count, and which of two trees.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

Tree = TypeVar("Tree")
AxisName = str | tuple[str, ...] | None


def is_array(leaf: Any) -> bool:
    """Whether JAX computes with `leaf`; functions, strings, float0 are only carried."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, bool | int | float | complex)
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and (
        dtype != jax.dtypes.float0
    )


def is_concrete(leaf: Any) -> bool:
    """Whether `leaf` is a JAX array in memory, not one that is being traced."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def is_inexact(leaf: Any) -> bool:
    """Whether `leaf` is real or complex floating point, of any width."""
    if not is_array(leaf):
        return False
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, float | complex)
    return jnp.issubdtype(dtype, jnp.inexact)


def floats(tree: Any) -> list[Any]:
    """The inexact leaves of `tree`."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def wide_dtype(dtype: Any) -> Any:
    """`dtype`, or float32 if narrower; `promote_types` would refuse 8-bit floats."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def widen(leaf: Any) -> Any:
    """An inexact leaf in at least float32; any other untouched."""
    if not is_inexact(leaf):
        return leaf
    array = jnp.asarray(leaf)
    return array.astype(wide_dtype(array.dtype))


def as_flag(name: str, flag: Any) -> Array:
    """`flag` as `bool[]`, or an error that says what it should have been."""
    if isinstance(flag, bool):
        return jnp.asarray(flag)
    dtype, shape = getattr(flag, "dtype", None), getattr(flag, "shape", None)
    if dtype != jnp.bool_:
        got = f"{type(flag).__name__} {flag!r}" if dtype is None else f"dtype {dtype}"
        raise TypeError(
            f"{name} must be one boolean, got {got}. jls.all_finite(grads) makes one."
        )
    if shape != ():
        raise ValueError(
            f"{name} must be a boolean of shape (), got shape {shape}. "
            "Reduce it with jnp.all, or call the function under jax.vmap."
        )
    return jnp.asarray(flag)


def check_axis_name(axis_name: Any) -> tuple[str, ...]:
    """The names in `axis_name`, or an error that says what it should have been."""
    if axis_name is None:
        return ()
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"axis_name must be a str, a tuple of str or None, got {axis_name!r}."
        )
    return names


def bound_names(axis_name: AxisName) -> tuple[str, ...]:
    """The names in `axis_name`, or an error that says which is not bound."""
    names = check_axis_name(axis_name)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise NameError(
                f"axis_name {name!r} is not bound here. Call under jax.shard_map, "
                "jax.pmap or jax.vmap with that axis; under plain jit leave it out."
            ) from None
    return names


def varying_axes(array: Array) -> frozenset[str]:
    """The axes of `shard_map` over which `array` differs, where JAX keeps track."""
    kind: Any = jax.typeof(array)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # since jax 0.12


def agree(flags: Array, axis_name: AxisName) -> Array:
    """`flags` and-ed over the devices of `axis_name`; one small collective."""
    names = bound_names(axis_name)
    if not names:
        return flags
    return lax.pmin(flags.astype(jnp.int32), names).astype(jnp.bool_)


def select(pred: ArrayLike, on_true: Tree, on_false: Tree) -> Tree:
    """Returns `on_true` where `pred`, else `on_false`, bit for bit.

    The way to roll back whatever a skipped step has touched and the optimizer does not
    hold: batch statistics, averages, RNG counters. A NaN in the branch not taken has no
    effect, and subnormal numbers stay. (A NaN stays a NaN; which of the many it is, XLA
    may change on a CPU in 8 and 16 bits.)

    Args:
      pred: `bool[]`, a Python or a numpy bool.
      on_true: any pytree.
      on_false: a pytree of the same structure, shapes and dtypes.

    Returns:
      A pytree like `on_true`. Leaves that are no arrays are taken from `on_true`.

    Raises:
      TypeError: if `pred` is not boolean.
      ValueError: if `pred` is not a scalar, or the trees differ in structure, in the
        shape or dtype of a leaf, or in a leaf that is no array.

    Example:
      >>> old, new = {"mean": jnp.zeros(2)}, {"mean": jnp.array([1.0, jnp.inf])}
      >>> jls.select(jls.all_finite(new), new, old)
      {'mean': Array([0., 0.], dtype=float32)}
    """
    flag = as_flag("pred", pred)
    paths, structure = jax.tree_util.tree_flatten_with_path(on_true)
    others, other_structure = jax.tree.flatten(on_false)
    if structure != other_structure:
        raise ValueError(
            "on_true and on_false must have the same structure, got "
            f"{structure} and {other_structure}."
        )

    def choose(path, new, old):
        where = f"on_true and on_false at '{jax.tree_util.keystr(path)}'"
        if not (is_array(new) and is_array(old)):
            # float0 and other arrays that only carry a shape have no values to differ.
            if hasattr(new, "dtype") or new is old or new == old:
                return new
            raise ValueError(f"{where} are no arrays and differ: {new!r}, {old!r}.")
        if jnp.shape(new) != jnp.shape(old):
            raise ValueError(
                f"{where} must have the same shape, "
                f"got {jnp.shape(new)} and {jnp.shape(old)}."
            )
        dtype = common_dtype(new, old)
        if dtype is None:
            raise ValueError(
                f"{where} must have the same dtype, got {_dtype_name(new)} and "
                f"{_dtype_name(old)}. Cast one of them."
            )
        return jnp.where(flag, jnp.asarray(new, dtype), jnp.asarray(old, dtype))

    leaves = [choose(p, n, o) for (p, n), o in zip(paths, others, strict=True)]
    return structure.unflatten(leaves)


def common_dtype(new: Any, old: Any) -> Any:
    """The dtype of both, or None; a Python number may take that of an array.

    The `step` of a new Flax `TrainState` is a Python number, after a step an array.
    """
    arrays = [leaf for leaf in (new, old) if hasattr(leaf, "dtype")]
    numbers = [leaf for leaf in (new, old) if not hasattr(leaf, "dtype")]
    dtype, *others = {leaf.dtype for leaf in arrays or [jnp.asarray(new)]}
    fitting = {
        jnp.bool_: (bool,),
        jnp.integer: (int,),
        jnp.floating: (int, float),
        jnp.complexfloating: (int, float, complex),
    }
    types = [t for kind, t in fitting.items() if jnp.issubdtype(dtype, kind)]
    fits = all(type(number) in types[0] for number in numbers)
    return dtype if fits and not others else None


def _dtype_name(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", f"Python {type(leaf).__name__}"))
