# SPDX-License-Identifier: Apache-2.0
"""Names that are gone, and what to write instead: kept for one version."""

import sys
from typing import Any, NoReturn

_SCALER = "use jls.dynamic, started where jls.calibrate says"
_LOST = (
    "jls.health(opt_state, grads=grads) says whether gradients are too small for the "
    "loss scale, jls.calibrate(step, ...) which scale they need"
)
_NONFINITE = (
    "jls.health(opt_state, params) names the leaves, jls.why(step, ...) the line that "
    "made them"
)
WRITE = {
    "jls.adaptive": "use jls.presets.mindformers_adaptive",
    "jls.cautious": _SCALER,
    "jls.recent_max": _SCALER,
    "jls.max_abs": "no scaler sees magnitudes any more. Take the largest of "
    "jnp.max(jnp.abs(leaf)), and jls.all_finite for what is inf or NaN",
    "jls.underflow": _LOST,
    "jls.nonfinite_report": _NONFINITE,
    "jls.types.RecentMaxState": _SCALER,
    "jls.types.Underflow": _LOST,
    "jls.types.UnderflowShares": _LOST,
    "jls.types.NonfiniteReport": _NONFINITE,
    "jls.types.LeafReport": _NONFINITE,
    "jls.History.to_csv": "write pandas.DataFrame(dict(history)).to_csv(file, "
    "index=False)",
    "jls.History.from_csv": "write table = pandas.read_csv(file), and history.append("
    "{name: table[name].to_numpy() for name in table})",
}


_AUTOCAST = (
    "jls.autocast(loss_fn, jnp.float16) makes a function that computes in half "
    "precision, and so does jls.train_step(..., compute_dtype=jnp.float16)"
)
# What others have, by the words in its name, and what does it here.
_ELSEWHERE = {
    "scaler": "jls.loss_scaled(optimizer) scales and skips, by a scaler such as "
    "jls.dynamic() or jls.presets.torch(): docs/coming_from.md has a table",
    "dynamicscale": "jls.loss_scaled(optimizer, jls.presets.flax())",
    "nooploss": "jls.skip_nonfinite(optimizer) skips, and does not scale",
    "staticloss": "jls.loss_scaled(optimizer, jls.static(scale))",
    "lossscal": "jls.loss_scaled(optimizer, jls.dynamic())",
    "select": "jls.select(finite, new, old)",
    "cast": _AUTOCAST,
    "half": _AUTOCAST,
    "float16": _AUTOCAST,
    "policy": _AUTOCAST,
}


def attribute_error(module: str, name: str) -> AttributeError:
    """The error for a name that `module` does not have."""
    if f"{module}.{name}" in WRITE:
        return _error(f"{module}.{name}")
    message = f"module {module!r} has no attribute {name!r}"
    write = [x for word, x in _ELSEWHERE.items() if word in name.lower()]
    if module == "jls" and write:
        return AttributeError(f"{message}: {write[0]}.")
    return AttributeError(message, name=name, obj=sys.modules[module])


def _error(name: str) -> AttributeError:
    return AttributeError(f"{name} is gone since 0.4.0: {WRITE[name]}.")


class Gone:
    """In the place of a method."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"jls.{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> NoReturn:
        raise _error(self._name)
