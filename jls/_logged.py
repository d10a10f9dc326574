# SPDX-License-Identifier: Apache-2.0
"""The scalars that a step logs: by name, checked, and fetched with one transfer."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jls._report import StepReport

Scalar = bool | int | float


def named(metrics: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, by name; in dicts inside "a/b". None counts as not given."""
    if isinstance(metrics, StepReport):
        metrics = metrics._asdict()
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "metrics must be a dict of scalars, such as jls.metrics(state), or a "
            f"jls.StepReport, got {type(metrics).__name__}."
        )
    flat: dict[str, Any] = {}
    _flatten((), {**metrics, **more}, flat)
    return flat


def _flatten(path: tuple[str, ...], value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _flatten((*path, str(name)), inner, flat)
    elif value is not None:
        name = "/".join(path)
        if name in flat:
            raise ValueError(f"{name} must be given once, got it as a dict too.")
        flat[name] = value


def fetched(flat: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Each value on the host, after one transfer for all of them."""
    for name, value in flat.items():
        _check(name, value)
    on_host = jax.device_get(dict(flat))
    # In the order given: a transfer of a dict sorts its keys.
    return {name: _widest(np.asarray(on_host[name])) for name in flat}


def _check(name: str, value: Any) -> None:
    if isinstance(value, Tracer):
        raise ValueError(
            f"{name} must be concrete, got a traced value: call this outside of jit, "
            "on what the step returned."
        )
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if is_array or isinstance(value, Scalar):
        dtype = value.dtype if is_array else np.asarray(value).dtype
        if any(
            jnp.issubdtype(dtype, kind)
            for kind in (jnp.floating, jnp.integer, jnp.bool_)
        ):
            return
    got = getattr(value, "dtype", None) or f"{type(value).__name__} {value!r}"
    raise TypeError(
        f"{name} must be a real number of at most 64 bits, or an array, got {got}."
    )


def _widest(value: np.ndarray) -> np.ndarray:
    """`value` in a type that turns into Python's own numbers, exactly."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(np.float64)
    return value if value.dtype.kind in "biu" else value.astype(np.int64)
