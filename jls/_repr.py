# SPDX-License-Identifier: Apache-2.0
"""How states and policies print: what a person wants to know, on one line."""

import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def shown(name: str, **fields: Any) -> str:
    """`name(field=value, ...)`."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in fields.items())})"


def number(value: Any) -> str:
    """A scalar in memory as a person writes it; anything else as it prints itself."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array or isinstance(value, Tracer) or value.shape != ():
        return repr(value)
    if isinstance(value, jax.Array) and value.is_deleted():
        return "<donated>"
    plain = value.item()
    return _float(plain) if isinstance(plain, float) else repr(plain)


def numbers(state: Any, names: tuple[str, ...]) -> dict[str, str]:
    """The fields of that name as a person writes them."""
    return {name: number(getattr(state, name)) for name in names}


def policy(init: Any, adjust: Any) -> str | None:
    """A policy by its factory and its hyperparameters, if it is one of jls."""
    module = getattr(getattr(adjust, "func", None), "__module__", "")
    if not module.startswith("jls._") or not hasattr(init, "keywords"):
        return None
    name, keywords = module.removeprefix("jls._"), init.keywords | adjust.keywords
    if "adjust" in keywords:  # a policy around another one
        return f"{name}({policy(keywords['init'], keywords['adjust'])})"
    return shown(name, **{key: _keyword(value) for key, value in keywords.items()})


def policy_shown(name: str, init: Any, adjust: Any) -> str:
    """A policy likewise, or one of the user's own by its two functions."""
    known = policy(init, adjust)
    return known or shown(name, init=repr(init), adjust=repr(adjust))


def _keyword(value: Any) -> str:
    return _float(value) if isinstance(value, float) else number(value)


def _float(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    is_long = not 2.0**-3 <= value <= 2.0**10
    return f"2**{exponent - 1}" if mantissa == 0.5 and is_long else f"{value:g}"


def scale_text(scale: float) -> str:
    """`32768.0` as `2^15`; what is no power of two with four digits."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.4g}"
