# SPDX-License-Identifier: Apache-2.0
"""`jls.autocast`."""

import functools
import logging
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jls import _validate
from jls._autocast.held import Stored
from jls._autocast.keep import Choice, Keep, multiplications
from jls._autocast.kinds import Fact, Kind
from jls._autocast.rewrite import Rewrite
from jls._program.jaxprs import opened
from jls._scopes import AUTOCAST
from jls._tree import is_array

P = ParamSpec("P")
T = TypeVar("T")


def autocast(fun: Callable[P, T], dtype: Any, *, keep: Keep = None) -> Callable[P, T]:
    """TODO."""
    _validate.function("fun", fun)
    half = jnp.dtype(dtype)
    if half == jnp.float32:
        return fun

    @functools.wraps(fun)
    def cast(*args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        numbers = [i for i, x in enumerate(leaves) if hasattr(x, "dtype")]
        shape: Any = None

        def flat(*arrays):
            nonlocal shape
            whole = list(leaves)
            for i, array in zip(numbers, arrays, strict=True):
                whole[i] = array
            args, kwargs = structure.unflatten(whole)
            out, shape = jax.tree.flatten(fun(*args, **kwargs))
            return out

        arrays = [leaves[i] for i in numbers]
        with jax.default_matmul_precision(None), jax.disable_jit(False):
            program = jax.make_jaxpr(flat)(*arrays)
        rewrite = Rewrite(Choice(half, keep), None)
        facts = [Fact(Kind.GIVEN, name=object()) for _ in arrays]
        rewrite.read(program, facts)
        with jax.named_scope(AUTOCAST):
            held = rewrite.run(program, [Stored(x, False) for x in arrays])
            out = [x.wide() for x in held]
        return jax.tree.unflatten(shape, out)

    return cast
