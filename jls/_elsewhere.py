# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries, asked of jls: what does the same here.

Those of `torch.amp.GradScaler`, of `flax.training.dynamic_scale.DynamicScale`, of jmp's
loss scales, policies and casts, and of what is called like them elsewhere.
"""

import sys

from jls._text import nearest

_AUTOCAST = (
    "jls.autocast(loss_fn, jnp.float16) makes a function that computes in half "
    "precision, and so does jls.train_step(..., compute_dtype=jnp.float16)"
)
# By a part of the name.
_HERE = {
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


# In jls.presets, what has another name there.
_MEANT = {
    "pytorch": "Did you mean torch?",
    "gradscaler": "Did you mean torch?",
    "dynamicscale": "Did you mean flax?",
}


def attribute_error(module: str, name: str) -> AttributeError:
    """The error for a name that `module` does not have."""
    message = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # asked by `inspect` and its kind, of each module
        return AttributeError(message)
    write = [x for word, x in _HERE.items() if word in name.lower()]
    if module == "jls" and write:
        return AttributeError(f"{message}: {write[0]}.")
    if module == "jls" and name in dir(sys.modules["jls.types"]):
        return AttributeError(f"{message}. Write jls.types.{name}.")
    names = dir(sys.modules[module])
    meant = _MEANT.get(name.lower()) or nearest(name, names)
    if module == "jls.presets" and not meant:
        meant = f"There are {', '.join(names)}."
    return AttributeError(f"{message}. {meant}" if meant else message)
