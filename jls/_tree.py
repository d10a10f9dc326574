# SPDX-License-Identifier: Apache-2.0
"""Leaves of pytrees: which ones count, in which dtype, by which name."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray, Tracer
from jax.typing import ArrayLike

from jls._nnx import is_variable, read_variables
from jls._text import an, at, describe, join, naming_arguments, path_name, path_names

Tree = TypeVar("Tree")


def is_array(leaf: Any) -> bool:
    """Whether JAX computes with `leaf`; functions, strings, float0 are only carried."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, bool | int | float | complex)
    if isinstance(leaf, Tracer):  # quicker than to ask whether it is a jax.Array
        return isinstance(leaf.aval, ShapedArray) and dtype != jax.dtypes.float0
    is_of_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return is_of_array and dtype != jax.dtypes.float0


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
    return _is_of_kind(dtype, jnp.inexact)


def is_extended(leaf: Any) -> bool:
    """Whether `leaf` is of an extended dtype, such as a PRNG key: not a number."""
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is a typed PRNG key, or an array of them."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and _is_of_kind(dtype, jax.dtypes.prng_key)


_is_of_kind = functools.cache(jnp.issubdtype)


# Dtypes.


@functools.cache
def wide_dtype(dtype: Any) -> Any:
    """`dtype`, or float32 if narrower; `promote_types` would refuse 8-bit floats."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def widen(leaf: Any) -> Any:
    """An inexact leaf in at least float32; any other leaf unchanged."""
    if not is_inexact(leaf):
        return leaf
    if _is_plain(leaf) and wide_dtype(leaf.dtype) == leaf.dtype:
        return leaf
    array = jnp.asarray(leaf)
    return array.astype(wide_dtype(array.dtype))


# XLA on a GPU takes a cast to a narrower float and its way back for no cast at all:
# what is rounded between them, or overflows, is then not seen.


def inf_if_too_large(array: Array, dtype: Any) -> Array:
    """`array`, a wide one, with inf for what is too large to be finite in `dtype`."""
    if array.dtype == dtype:
        return array
    is_too_large = jnp.abs(array) > _largest_stored(dtype, array.dtype)
    return jnp.where(is_too_large, jnp.inf, array)


@functools.cache
def _largest_stored(dtype: Any, wide: Any) -> float:
    """The largest number of the dtype `wide` that is finite when cast to `dtype`."""
    info, largest = jnp.finfo(dtype), jnp.finfo(wide).max

    def is_stored(number):
        with np.errstate(over="ignore"):
            return np.isfinite(np.asarray(number).astype(dtype))

    if is_stored(largest):
        return float(largest)
    # Up to half the way to where the next number would be.
    top = float(info.max)
    half_way = top + 2.0 ** (math.floor(math.log2(top)) - info.nmant - 1)
    last = largest.dtype.type(half_way)
    return float(last if is_stored(last) else np.nextafter(last, 0 * last))


def widen_as_stored(leaf: Any) -> Array:
    """`widen` of an inexact leaf that may just have been cast to its dtype.

    Rounded to that if it is a half precision; inf if too large for a narrower one.
    """
    wide, dtype = jnp.asarray(widen(leaf)), dtype_of(leaf)
    if dtype in (jnp.float16, jnp.bfloat16):
        info = jnp.finfo(dtype)
        return lax.reduce_precision(wide, info.nexp, info.nmant)
    return inf_if_too_large(wide, dtype)


def _is_plain(leaf: Any) -> bool:
    """Whether `leaf` is an array of JAX with a dtype of its own choice."""
    # Keys have no such attribute.
    return isinstance(leaf, (Tracer, Array)) and not getattr(leaf, "weak_type", False)


def _are_weak(leaves: Sequence[Any], dtype: Any) -> bool:
    """Whether all are of this dtype and weakly typed, as Python numbers are."""
    return all(
        getattr(leaf, "weak_type", not hasattr(leaf, "dtype"))
        and jnp.result_type(leaf) == dtype
        for leaf in leaves
    )


def is_narrow(tree: Any) -> bool:
    """Whether any inexact leaf is narrower than float32."""
    dtypes = {dtype_of(leaf) for leaf in floats_of(tree)}
    return any(wide_dtype(dtype) != dtype for dtype in dtypes)


def dtype_of(leaf: Any) -> Any:
    """The dtype of an array or a number, as JAX computes with it."""
    return leaf.dtype if isinstance(leaf, (Tracer, Array)) else jnp.result_type(leaf)


def common_dtype(new: Any, old: Any) -> Any:
    """The dtype of both, or None; a Python number may take the dtype of an array.

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


def cast_like(
    name: str, new: Any, old: Any, integers: Sequence[tuple[Any, ...]] = ()
) -> Any:
    """`new` in the dtypes of `old`, which bfloat16 moments leave on the first step.

    What is weakly typed in both stays so, or the next step would be compiled again.

    Args:
      name: of both, for messages.
      new: a tree.
      old: a tree of the same structure, shapes and kinds of numbers.
      integers: the paths of integer parameters. In a leaf whose path ends with one, an
        integer that became a float stays the old one.
    """
    leaves, structure = jax.tree.flatten(new)
    paths, old_structure = jax.tree_util.tree_flatten_with_path(old)
    if structure != old_structure:
        raise ValueError(
            f"{name} must keep its structure, but "
            f"{difference(('the new one', new), ('the old one', old))}."
        )

    def cast(path, leaf, reference):
        if not is_array(reference):
            return reference
        if _is_plain(leaf) and _is_like(leaf, reference):
            return leaf
        shape, dtype = jnp.shape(reference), jnp.result_type(reference)
        new_shape, new_dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if shape == new_shape and _are_weak([leaf, reference], dtype):
            return jnp.asarray(leaf)
        if shape == new_shape and _can_become(new_dtype, dtype):
            is_key = is_extended(reference)
            return leaf if is_key else jnp.asarray(leaf).astype(dtype)
        ends = (path[len(path) - len(end) :] == end for end in integers)
        if not is_inexact(reference) and is_inexact(leaf) and any(ends):
            return reference
        raise ValueError(
            f"{name} must keep its shapes and kinds of numbers, but turned "
            f"{dtype}{list(shape)} into {new_dtype}{list(new_shape)}"
            f"{at(path_name(path))}."
        )

    cast_leaves = [cast(p, x, r) for x, (p, r) in zip(leaves, paths, strict=True)]
    return structure.unflatten(cast_leaves)


def _is_like(array: Array, other: Any) -> bool:
    """Whether nothing is left to cast."""
    is_alike = isinstance(other, (Tracer, Array)) and array.dtype == other.dtype
    return is_alike and array.shape == other.shape


def _can_become(dtype: Any, wanted: Any) -> bool:
    """Whether numbers of `dtype` are numbers of the kind of `wanted`, as reals are."""
    kinds = [jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating]
    (kind, wanted_kind) = (
        next((kind for kind in kinds if jnp.issubdtype(x, kind)), x)
        for x in (dtype, wanted)
    )
    is_real = kind == jnp.floating
    return kind == wanted_kind or (is_real and wanted_kind == jnp.complexfloating)


# Partition.

_TAKEN = object()  # marks the place of a leaf that `partition` took out


class Remainder(NamedTuple):
    """A tree without the leaves taken out: flat, since no node could hold the marks."""

    leaves: list[Any]
    structure: Any


def floats_of(tree: Any) -> list[Any]:
    """The inexact leaves of `tree`, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def partition(
    tree: Any, is_taken: Callable[[Any], bool] = is_inexact
) -> tuple[list[Any], Remainder]:
    """The inexact leaves of `tree`, or those that `is_taken`, and its remainder.

    Done once on entry, so that whatever is computed with the numbers works on a list
    and need not ask again which leaves count. `combine` puts the tree together.
    """
    leaves, structure = jax.tree.flatten(tree)
    others = [_TAKEN if is_taken(leaf) else leaf for leaf in leaves]
    pairs = zip(leaves, others, strict=True)
    taken = [leaf for leaf, other in pairs if other is _TAKEN]
    return taken, Remainder(others, structure)


def combine(floats: list[Any], remainder: Remainder) -> Any:
    """The tree of `partition`, with `floats` in their places."""
    values = iter(floats)
    return remainder.structure.unflatten(
        [next(values) if leaf is _TAKEN else leaf for leaf in remainder.leaves]
    )


def leaves_at_floats(tree: Any, remainder: Remainder) -> list[Any]:
    """The leaves of `tree`, which has the structure of `remainder`, at the floats."""
    pairs = zip(jax.tree.leaves(tree), remainder.leaves, strict=True)
    return [leaf for leaf, other in pairs if other is _TAKEN]


def map_remainder(function: Callable[[Any], Any], remainder: Remainder) -> Remainder:
    """`remainder` with `function` of each of its leaves."""
    leaves = [leaf if leaf is _TAKEN else function(leaf) for leaf in remainder.leaves]
    return remainder._replace(leaves=leaves)


# Leaves that an optimizer trains.


def trainable(params: Any) -> Any:
    """`params` with None for what cannot be trained; itself if there is nothing."""
    if all(map(_is_trainable, jax.tree.leaves(params))):
        return params
    return jax.tree.map(lambda leaf: leaf if _is_trainable(leaf) else None, params)


def restore(trained: Any, params: Any) -> Any:
    """`params` with the leaves of `trained`, where that is not None."""
    if jax.tree.structure(trained) == jax.tree.structure(params):
        return trained
    new = iter(jax.tree.leaves(trained))
    return jax.tree.map(lambda x: next(new) if _is_trainable(x) else x, params)


def _is_trainable(leaf: Any) -> bool:
    return is_array(leaf) and hasattr(leaf, "dtype") and is_inexact(leaf)


# Names.


def named_floats(tree: Any) -> tuple[list[str], list[Any]]:
    """The paths and the values of the floating-point leaves of `tree`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    found = [(path, read_variables(leaf)) for path, leaf in flat]
    found = [(path, leaf) for path, leaf in found if is_inexact(leaf)]
    return path_names([path for path, _ in found]), [leaf for _, leaf in found]


def roles_of(tree: Any) -> list[str]:
    """For each float its path without the number of its layer: `layers/mlp/w`.

    Leaves of one role are sharded alike. A number at the end of a path stays: it may be
    that of a matrix in a layer, whose neighbors may be sharded in another way.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) for path, leaf in flat if is_inexact(leaf)]
    return [_NUMBER.sub("", name, count=1) for name in names]


# In "['layers'][0]['w']", ".block1.w": one that does not end a path.
_NUMBER = re.compile(r"\d+(?=(['\"]?\])?[\[.])")


def check_holds(
    name: str, tree: Any, is_held: Callable[[Any], bool], what: str, write: str = ""
) -> None:
    """Raises if `tree` is None, or has leaves and none that it must hold.

    Args:
      name: of the argument.
      tree: a pytree.
      is_held: whether a leaf is what the tree must hold.
      what: the same in words.
      write: the sentence that says what to write.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_variable)
    if tree is None or (leaves and not any(map(is_held, read_variables(leaves)))):
        got = describe(tree)
        raise TypeError(f"{name} must hold {what}, got {got}. {write}".rstrip())


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf is floating point, or the float0 gradient of one that is not."""
    return is_inexact(leaf) or getattr(leaf, "dtype", None) == jax.dtypes.float0


# Structures.


def difference(
    one: tuple[str, Any],
    other: tuple[str, Any],
    of_leaf: Callable[[Any], Any] = lambda leaf: None,
) -> str:
    """Where two trees differ first, as a clause; "" if they do not.

    Args:
      one: what it is called, and the tree.
      other: the same of the other.
      of_leaf: what has to be the same in two leaves. By default they may differ.
    """
    (name, tree), (other_name, other_tree) = one, other
    found = _first_difference(tree, other_tree, of_leaf)
    if found is None:
        return ""
    path, kind, other_kind = found
    place = join(*path)
    if not kind or not other_kind:
        return f"'{place}' is only in {name if kind else other_name}"
    if kind == other_kind:
        return f"{name} and {other_name} differ in static fields of {kind}{at(place)}"
    if not place:
        return f"{name} is {kind}, {other_name} {other_kind}"
    return f"'{place}' is {kind} in {name}, {other_kind} in {other_name}"


def _first_difference(
    tree: Any, other: Any, of_leaf: Callable[[Any], Any]
) -> tuple[tuple[str, ...], str, str] | None:
    """The path, and what each tree has there: "" for nothing."""
    (children, node), (other_children, other_node) = map(one_level, (tree, other))
    kinds = kind_of(tree), kind_of(other)
    if is_leaf(node) and is_leaf(other_node):
        return None if of_leaf(tree) == of_leaf(other) else ((), *kinds)
    if type(tree) is not type(other):
        return (), *kinds
    for name, child in children.items():
        if name not in other_children:
            return (name,), kind_of(child), ""
        found = _first_difference(child, other_children[name], of_leaf)
        if found:
            return (name, *found[0]), *found[1:]
    for name, child in other_children.items():
        if name not in children:
            return (name,), "", kind_of(child)
    return None if node == other_node else ((), *kinds)


def kind_of(tree: Any) -> str:
    """A node in a message: a leaf with its dtype and shape, or the type of a node."""
    if tree is None:
        return "None"
    is_end = is_leaf(jax.tree.structure(tree))
    return describe(tree) if is_end else an(type(tree).__name__)


# Select.


def is_flag(value: Any) -> bool:
    """Whether it is a boolean, or an array of them."""
    return isinstance(value, bool) or getattr(value, "dtype", None) == jnp.bool_


def as_flag(name: str, flag: Any, write: str = "") -> Array:
    """`flag` as `bool[]`, or an error that says what it should have been."""
    if isinstance(flag, bool):
        return jnp.asarray(flag)
    shape = getattr(flag, "shape", None)
    if not is_flag(flag):
        raise TypeError(
            f"{name} must be one boolean, got {describe(flag)}. jls.all_finite(grads) "
            f"makes one.{write}"
        )
    if shape != ():
        raise ValueError(
            f"{name} must be a boolean of shape (), got shape {shape}. "
            "Reduce it with jnp.all, or call the function under jax.vmap."
        )
    return jnp.asarray(flag)


@naming_arguments()
def select(pred: ArrayLike, on_true: Tree, on_false: Tree) -> Tree:
    """Returns `on_true` where `pred`, else `on_false`, bit for bit.

    Use it to roll back whatever a skipped step has touched and the optimizer does not
    hold: batch statistics, averages, RNG counters. A NaN in the branch not taken has no
    effect, and subnormal numbers are kept. (A NaN stays a NaN, but on a CPU XLA may
    change its payload in 8 and 16 bits.)

    Args:
      pred: `bool[]`, a Python or a numpy bool.
      on_true: any pytree.
      on_false: a pytree of the same structure, shapes and dtypes.

    Returns:
      A pytree like `on_true`. Leaves that are not arrays come from `on_true`. What is
      weakly typed in both trees, as Python numbers are, stays so.

    Raises:
      TypeError: if `pred` is not boolean.
      ValueError: if `pred` is not a scalar, or the trees differ in structure, in the
        shape or dtype of a leaf, or in a leaf that is not an array.

    Example:
      >>> old, new = {"mean": jnp.zeros(2)}, {"mean": jnp.array([1.0, jnp.inf])}
      >>> jls.select(jls.all_finite(new), new, old)
      {'mean': Array([0., 0.], dtype=float32)}
    """
    flag = as_flag("pred", pred, " The order is jls.select(pred, on_true, on_false).")
    paths, structure = jax.tree_util.tree_flatten_with_path(on_true)
    others, other_structure = jax.tree.flatten(on_false)
    if structure != other_structure:
        raise ValueError(
            "on_true and on_false must have the same structure, but "
            f"{difference(('on_true', on_true), ('on_false', on_false))}."
        )

    def choose(path, new, old):
        where = f"on_true and on_false{at(path_name(path))}"
        if not (is_array(new) and is_array(old)):
            # float0 and other arrays that only carry a shape have no values to differ.
            if hasattr(new, "dtype") or new is old or new == old:
                return new
            raise ValueError(f"{where} are not arrays and differ: {new!r}, {old!r}.")
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
        stays_weak = _are_weak([new, old], dtype)
        pair = [jnp.asarray(x, None if stays_weak else dtype) for x in (new, old)]
        return jnp.where(flag, *pair)

    leaves = [choose(p, n, o) for (p, n), o in zip(paths, others, strict=True)]
    return structure.unflatten(leaves)


def _dtype_name(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", f"Python {type(leaf).__name__}"))


def one_level(node: Any) -> tuple[dict[str, Any], Any]:
    """The children of `node` by name, none of a leaf, and the structure of them."""
    flat, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    return {path_name(path): child for path, child in flat if path}, structure


def is_leaf(structure: Any) -> bool:
    return structure == jax.tree.structure(0)
