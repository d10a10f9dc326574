# SPDX-License-Identifier: Apache-2.0
"""`jls.autocast`: traces a function in float32, and runs its program in half."""

import functools
import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from jls import _validate
from jls._autocast.float8 import E4M3, LEAST, warn_of_chip
from jls._autocast.keep import INSIDE, KEEP, OUTER, Choice, Keep
from jls._autocast.rewrite import ClosedOverError, Rewrite
from jls._mistakes import warn
from jls._nnx import is_object, nnx
from jls._program.frames import Frame
from jls._program.jaxprs import Program, parameter, trace_of, traced_wide
from jls._program.products import products_in
from jls._scopes import AUTOCAST, FLOAT32, UPDATE, is_in
from jls._text import describe, naming_arguments
from jls._tree import is_array

P = ParamSpec("P")
T = TypeVar("T")

_HALVES = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32)
_READS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@naming_arguments(compute_dtype="dtype", half="dtype")
def autocast(
    fun: Callable[P, T], dtype: Any = None, *, keep: Keep = None
) -> Callable[P, T]:
    """Returns `fun` with its float32 products computed in half precision.

    Products are computed in half; everything else is float32. Only what a product takes
    or gives, and what is kept for the backward pass, is stored in half: a guard guards,
    and a loop of small steps moves. The program of `fun` is rewritten before anything
    differentiates it, so the gradients are computed the same way. Parameters, arguments
    and results stay float32: optimizers and checkpoints notice nothing.

    `fun` is traced as float32. Inside it `x.dtype` is float32, so
    `x.astype(jnp.float32)` and the `dtype=` of a layer protect nothing; `keep` does.

    Args:
      fun: any function of pytrees: a loss, or a model's apply. Flax NNX modules among
        its arguments are changed in place as `fun` changes them.
      dtype: `jnp.float16` or `jnp.bfloat16`, whichever is fast on the chip at hand, or
        its name. `jnp.float32` casts nothing, and in another autocast keeps what `fun`
        computes as written. `jnp.float8_e4m3fn` is bfloat16,
        but for large products: a dot without batch dimensions whose rows, columns and
        terms of a sum are 2048 or more, in multiples of 16, takes operands in
        float8_e4m3fn, and cotangents in float8_e5m2. Each is multiplied by a power of
        two, from its largest magnitude at that moment. An inf or NaN in one makes all
        of the result NaN. Products in functions with a derivative of their own stay
        bfloat16. Outside of `fun` there is no forward mode, and no second derivative.
      keep: what stays as written. A regular expression, searched in the scope of each
        operation: the names of modules of Flax Linen and Haiku, and of
        `jax.named_scope`, joined by "/". Or a function of a `jls.types.Place` that
        returns whether to keep the operation there, for Flax NNX and Equinox, whose
        modules have no scope: `lambda place: "Router" in place.function` finds those of
        `Router.__call__`.

    Returns:
      A function with the arguments and results of `fun`. Put it under `jax.grad`,
      `jls.value_and_grad`, `jit` or `vmap` as `fun` itself.

    Raises:
      TypeError: at once, if `fun` is not a function, `dtype` not a dtype, or `keep`
        neither a string nor a function.
      ValueError: at once, for another dtype, or a regular expression that is malformed
        or empty; when it is traced, if `keep` finds no operation, if `fun` calls the
        `update` of an optimizer made by jls, or if it changes an NNX module that it
        closes over.

    Warns:
      JlsWarning: when it is traced, if there was no product to cast and none in that
        half already, or none that is large enough for float8, if a function `keep` kept
        nothing, or if arguments are in another half precision; once, if the chip at
        hand has no float8.

    Example:
      >>> def loss_fn(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w, x = jnp.full((4, 4), 0.1), jnp.ones((2, 4))
      >>> cast = jls.autocast(loss_fn, jnp.float16)
      >>> cast(w, x).dtype, jax.grad(cast)(w, x).dtype
      (dtype('float32'), dtype('float32'))
      >>> jnp.abs(cast(w, x) - loss_fn(w, x)) < 1e-3
      Array(True, dtype=bool)
    """
    given: Any = fun  # a dtype or a device, as torch's context takes it
    if isinstance(given, str) or any(given is x for x in _DTYPES):
        got = repr(given) if isinstance(given, str) else f"jnp.{jnp.dtype(given)}"
        raise TypeError(
            f"fun must be a function, got {got}. An autocast is a function, no "
            "context: call what jls.autocast(loss_fn, jnp.float16) returns."
        )
    _validate.function("fun", fun)
    if dtype is None:
        raise TypeError(
            "dtype must be given: jls.autocast(fun, jnp.bfloat16), or jnp.float16 "
            "where bfloat16 is slow, as on a T4."
        )
    half = check_dtype("dtype", dtype)
    check_keep(keep)
    called: Any = fun
    named: Any = fun  # with its signature
    owner = fun if is_object(fun) else getattr(fun, "__self__", None)
    if is_object(owner):  # a module, or a method of one: its variables are arguments
        called = fun.__func__ if inspect.ismethod(fun) else type(fun).__call__

    def cast(*args, **kwargs):
        args = (owner, *args) if called is not fun else args
        return _Call(called, args, kwargs).run(half, keep)

    def as_written(*args, **kwargs):
        with jax.named_scope(FLOAT32):  # another autocast around sees it
            return fun(*args, **kwargs)

    made = as_written if half == jnp.float32 else cast
    functools.update_wrapper(made, named, updated=())
    return made


def check_dtype(name: str, value: Any) -> np.dtype:
    """One of the four dtypes of a cast."""
    rule = (
        f"{name} must be jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn or jnp.float32, "
        'or a name that jnp.dtype takes, such as "float16" or "half",'
    )
    try:
        is_dtype = value is not None and not _validate.is_unchecked(value)
        dtype = jnp.dtype(value) if is_dtype else None
    except TypeError:
        dtype = None
    if dtype is None:
        raise TypeError(f"{rule} got {describe(value)}.")
    if dtype not in (*_HALVES, E4M3, jnp.float32):
        # "f16" is float128 to NumPy.
        got = describe(value) if isinstance(value, str) else dtype
        why = (
            " Write jnp.float8_e4m3fn: operands are rounded to it, and cotangents are "
            "rounded to float8_e5m2."
        )
        is_float8 = dtype.name.startswith("float8")
        raise ValueError(f"{rule} got {got}.{why if is_float8 else ''}")
    return dtype


def _keep_meant(keep: Any) -> str:
    """What to write in the place of a `keep` of another type; "" if unclear."""
    if isinstance(keep, type):
        return f" Write keep=lambda place: {keep.__name__!r} in place.function."
    if isinstance(keep, list | tuple | set) and all(isinstance(x, str) for x in keep):
        return f" Write keep={'|'.join(sorted(keep))!r}." if keep else ""
    if isinstance(keep, re.Pattern):
        return f" Write keep={keep.pattern!r}."
    return _validate.field_meant(keep, "keep")


def check_keep(keep: Any) -> None:
    """Raises unless `keep` can say what stays as written."""
    is_class = isinstance(keep, type)
    if keep is None or (callable(keep) and not is_class):
        return
    if not isinstance(keep, str):
        got = f"the class {keep.__name__}" if is_class else describe(keep)
        raise TypeError(
            "keep must be a regular expression, a function of a jls.types.Place, or "
            f"None, got {got}.{_keep_meant(keep)}"
        )
    if not keep:
        raise ValueError(
            'keep must be a regular expression of what stays as written, got "". It '
            "keeps everything: leave it out."
        )
    try:
        re.compile(keep)
    except re.error as error:
        raise ValueError(
            f"keep must be a regular expression, got {keep!r}: {error}."
            f"{_glob_meant(keep)}"
        ) from None


def _glob_meant(keep: str) -> str:
    """The sentence for a pattern of file names; "" for any other text."""
    inside = keep.strip("*")
    is_glob = inside.isidentifier() and inside != keep
    return f" It is searched for: write keep={inside!r}." if is_glob else ""


class _Call:
    """One call of a function, as a program with arrays for arguments and results."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._fun = fun
        leaves, self._structure = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        self._leaves = leaves
        self._indices = [i for i, leaf in enumerate(leaves) if _is_traced(leaf)]
        self._objects = [i for i, leaf in enumerate(leaves) if is_object(leaf)]
        self.arrays = [leaves[i] for i in self._indices]
        if self._objects:
            objects = [leaves[i] for i in self._objects]
            self._graph, state = nnx().split(objects)
            arrays, self._state = jax.tree.flatten(state)
            self.arrays += arrays
        self._own_trace: Any = None  # the last one
        self._out: Any = None  # the structure of what it returned

    def _flat(self, *arrays: Any) -> list[Any]:
        """`fun` as a function of arrays."""
        self._own_trace = trace_of(arrays[0]) if arrays else None
        leaves, count = list(self._leaves), len(self._indices)
        for i, array in zip(self._indices, arrays[:count], strict=True):
            leaves[i] = array
        objects: list[Any] = []
        if self._objects:
            state = self._state.unflatten(arrays[count:])
            objects = nnx().merge(self._graph, state)
            for i, made in zip(self._objects, objects, strict=True):
                leaves[i] = made
        args, kwargs = self._structure.unflatten(leaves)
        result = self._fun(*args, **kwargs)
        state = nnx().split(objects)[1] if objects else None
        out, structure = jax.tree.flatten((result, state))
        traced = [i for i, leaf in enumerate(out) if _is_traced(leaf)]
        arrays = tuple(out[i] for i in traced)
        for i in traced:
            out[i] = None
        self._out = structure, out, traced
        return list(arrays)

    def _result(self, arrays: Sequence[Any]) -> Any:
        """What `fun` returned, after its changes of NNX objects were written back."""
        structure, out, traced = self._out
        for i, array in zip(traced, arrays, strict=True):
            # A constant in the program is one of JAX's own numbers, which is no array.
            out[i] = jnp.asarray(array)
        result, state = structure.unflatten(out)
        if self._objects:
            objects = [self._leaves[i] for i in self._objects]
            nnx().update(objects, state)
        return result

    def run(self, half: Any, keep: Keep) -> Any:
        program = self._traced()
        _refuse_update(program)
        _warn_of_other_half(self.arrays, half)
        precision = _default_precision()
        choice = Choice(half, keep)
        rewrite = Rewrite(choice, precision, self._own_trace)
        choice.check(program)
        has_cast = _say(choice, program)
        if not has_cast and precision is None:  # the very program, to the bit
            jaxpr, consts = choice.marked(program)
            return self._result(eval_jaxpr(jaxpr, consts, *self.arrays))
        try:
            with jax.named_scope(AUTOCAST):
                results = rewrite(program, self.arrays)
        except (ClosedOverError, jax.errors.UnexpectedTracerError):
            warn(
                f"autocast to {half} left a function as written: the derivative rule "
                "of a jax.custom_vjp in it closes over an array that is computed in "
                "the function. Make that array an argument of the custom_vjp."
            )
            args, kwargs = self._structure.unflatten(self._leaves)
            return self._fun(*args, **kwargs)
        return self._result(results)

    def _traced(self) -> Any:
        try:
            return traced_wide(self._flat, self.arrays)
        except _READS_VALUES as error:
            error.add_note(
                "jls.autocast traces the whole function. If it reads values at the "
                "host, pass only the part that can be jitted."
            )
            raise
        except Exception as error:
            if type(error).__name__ == "TraceContextError":
                raise ValueError(
                    "fun must not change an NNX object that it closes over, which "
                    "counts as a constant. Pass it as an argument: "
                    f"jls.autocast(loss_fn, dtype)(model, batch). {error}"
                ) from error
            raise


def _is_traced(leaf: Any) -> bool:
    """Whether a leaf is an array; Python numbers are part of the program."""
    return hasattr(leaf, "dtype") and is_array(leaf)


def _warn_of_other_half(arrays: Sequence[Any], half: Any) -> None:
    own = jnp.bfloat16 if half == E4M3 else half
    dtypes = {jnp.result_type(x) for x in arrays} & {*_HALVES} - {jnp.dtype(own)}
    for other in dtypes:
        warn(
            f"autocast to {half} got arrays of {other}: what is computed from them "
            f"stays as written. Pass float32 arrays, or dtype=jnp.{other}."
        )


def _refuse_update(program: Program) -> None:
    if any(is_in(x, UPDATE) for _, _, x in Frame(program).equations()):
        raise ValueError(
            "fun must not call the update of an optimizer made by jls, which counts "
            "and scales in float32. Put it around the loss: "
            "jls.autocast(loss_fn, dtype)."
        )


def _default_precision() -> Any:
    """The default matmul precision in the caller's JAX configuration."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    (equation,) = jax.make_jaxpr(lax.dot)(one, one).eqns
    return parameter(equation, "precision")


def _say(choice: Choice, program: Program) -> bool:
    """Tells the log what share of the multiplications is in half; warns of none.

    Not where products are in that half as they are written, as with a layer's `dtype=`
    or another autocast inside: nothing is left to cast. Returns whether it casts any.
    """
    half, float8, whole = list[int](), list[int](), 0
    reasons = Counter[str]()
    for product in products_in(Frame(program)):
        reason = choice.why_wide(product.site)
        whole += product.multiplications
        if choice.takes_float8(product.site):
            float8.append(product.multiplications)
        if reason is None:
            half.append(product.multiplications)
        else:
            reasons[_REASONS.get(reason) or f"of {product.dtype}"] += 1
    dtype = choice.name
    kept = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
    if not half:
        is_half = f"of {choice.dtype}" in reasons or f"of {E4M3}" in reasons
        if is_half and _REASONS[KEEP] not in reasons:
            return False
        advice = _advice(reasons)
        warn(
            f"autocast to {dtype} found no product to cast"
            f"{f': {kept}' if kept else ''}. {advice}"
        )
        return False
    if float8:
        warn_of_chip()
    elif choice.is_float8:
        warn(
            f"autocast to {dtype} found no product for float8: a dot with {LEAST} or "
            "more rows, columns and terms of a sum, in multiples of 16, without batch "
            "dimensions, and outside of custom derivatives. What it casts is in "
            "bfloat16: write jnp.bfloat16."
        )
    logging.getLogger("jls").info(
        "%s: %.3g %% of the multiplications; kept: %s",
        dtype,
        100 * sum(float8 if choice.is_float8 else half) / max(1, whole),
        kept or "none",
    )
    return True


def _advice(reasons: Counter[str]) -> str:
    """What to write where all products stay as they are, for these reasons."""
    if _REASONS[KEEP] in reasons:
        return "Write a narrower keep."
    if _REASONS[INSIDE] in reasons:
        return "Leave one of the two out."
    for half in _HALVES:
        if f"of {half}" in reasons:
            return (
                f"They are {half} as they are written: write jnp.{half} here, or make "
                "them float32, without a layer's dtype= or another autocast inside."
            )
    if _REASONS["precision="] in reasons:
        return "A product that asks for a precision keeps it: leave precision= out."
    if "of float64" in reasons:
        return "It casts those of float32 arrays: pass it float32 arrays."
    return (
        "It casts dots and convolutions of float32 arrays: put it around the function "
        "that computes them."
    )


# Of another dtype a product says which.
_REASONS = {
    "precision=": "with precision=",
    "inner product": "inner",
    OUTER: "outer",
    KEEP: "by keep",
    INSIDE: "by an autocast inside",
}
