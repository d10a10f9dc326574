# SPDX-License-Identifier: Apache-2.0
"""The two linear maps of loss scaling and their dtype rule: at least float32."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jls._locate import locate
from jls._tree import Tree, is_inexact, widen


def scale(state: Any, tree: Tree) -> Tree:
    """Returns `tree` times the loss scale, in at least float32.

    Differentiable and linear. Scale a loss with it, or let `jls.value_and_grad` do so.

    Args:
      state: anything that carries exactly one loss scale.
      tree: a loss, or any pytree. Leaves that are not floating point pass untouched.

    Returns:
      A pytree like `tree`; floating-point leaves narrower than float32 become float32.

    Raises:
      ValueError: if `state` carries no loss scale, or several.

    Warns:
      UserWarning: at trace time, if `tree` is a float16 scalar. JAX casts its
        cotangent, which is the loss scale, back to float16: over 2**15 it overflows.

    Example:
      >>> state = jls.static(1024.0).init()
      >>> jls.scale(state, jnp.bfloat16(0.5))
      Array(512., dtype=float32)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740,
      section 3.2.
    """
    loss_scale = locate(state).loss_scale
    loss: Any = tree
    if getattr(loss, "dtype", None) == jnp.float16 and jnp.shape(loss) == ():
        warnings.warn(
            "the loss is float16, so its gradient starts from the loss scale cast to "
            "float16: every step at a scale over 2**15 overflows. Reduce the loss in "
            "float32, e.g. losses.astype(jnp.float32).mean().",
            stacklevel=2,
        )
    return jax.tree.map(lambda leaf: _times(leaf, loss_scale), tree)


def unscale(state: Any, tree: Tree) -> Tree:
    """Returns `tree` divided by the loss scale, in at least float32.

    Unscale with the state that scaled, before it is adjusted.

    Args:
      state: anything that carries exactly one loss scale.
      tree: gradients. Leaves that are not floating point pass untouched.

    Returns:
      A pytree like `tree`; floating-point leaves narrower than float32 become float32.
      With a scale that is a power of two this is exact; any other is rounded twice.

    Raises:
      ValueError: if `state` carries no loss scale, or several.

    Example:
      >>> state = jls.static(2.0**15).init()
      >>> jls.unscale(state, [jnp.float16(2**-14), 3])
      [Array(1.8626451e-09, dtype=float32), 3]
    """
    loss_scale = locate(state).loss_scale
    return jax.tree.map(lambda leaf: _times(leaf, loss_scale, inverse=True), tree)


def _times(leaf: Any, loss_scale: Array, inverse: bool = False) -> Any:
    if not is_inexact(leaf):
        return leaf
    array = widen(leaf)
    factor = jnp.asarray(loss_scale, array.real.dtype)
    if inverse:
        # With a division XLA CPU would write the unscaled gradients to memory. Products
        # it repeats wherever they are read.
        factor = lax.reciprocal(factor)
    if jnp.iscomplexobj(array):
        # Complex arithmetic would turn (inf + 1j) * (scale + 0j) into inf + NaN j.
        return lax.complex(array.real * factor, array.imag * factor)
    return array * factor
