# SPDX-License-Identifier: Apache-2.0
"""The scalars of metrics and reports, by name."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls._text import path_name
from jls._types import StepReport

Scalar = bool | int | float


def flatten_metrics(
    metrics: Mapping[str, Any] | StepReport, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The given values by name, "a/b" for those in nested dicts; None is left out."""
    if isinstance(metrics, StepReport):
        no_metrics = {"aux": None, "scale_moves": None}
        metrics = {**metrics._asdict(), **no_metrics, **_numbers_in_aux(metrics)}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "metrics must be a dict of scalars, such as jls.metrics(state), or a "
            f"jls.types.StepReport, got {type(metrics).__name__}."
        )
    flat: dict[str, Any] = {}
    _flatten_into((), {**metrics, **more}, flat)
    return flat


def _numbers_in_aux(report: StepReport) -> dict[str, Any]:
    """The values in aux that are one number for each step, by name; no logits."""
    flat, _ = jax.tree_util.tree_flatten_with_path({"aux": report.aux})
    return {
        path_name(path): leaf
        for path, leaf in flat
        if is_number(leaf) and np.shape(leaf) == np.shape(report.skipped)
    }


def _flatten_into(path: tuple[str, ...], value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _flatten_into((*path, str(name)), inner, flat)
    elif value is not None:
        name = "/".join(path)
        if name in flat:
            raise ValueError(f"{name} must be given once, got it as a dict too.")
        flat[name] = value


def is_number(value: Any) -> bool:
    """Whether `value` is a real number of at most 64 bits, or an array of them."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not (is_array or isinstance(value, Scalar)):
        return False
    dtype = value.dtype if is_array else np.asarray(value).dtype
    kinds = jnp.floating, jnp.integer, jnp.bool_
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)
