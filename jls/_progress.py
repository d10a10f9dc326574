# SPDX-License-Identifier: Apache-2.0
"""How a run is, in one short line for a progress bar."""

from typing import Any

from jls._logged import fetched, named
from jls._repr import scale_text


def progress(metrics: Any, /, **more: Any) -> str:
    """Returns loss, loss scale and skips in one line, for a progress bar.

    It waits for the step that made `metrics`, so call it every so many steps: with tqdm
    `bar.set_postfix_str(jls.progress(jls.metrics(state), loss=loss))`, with rich
    `bar.update(task, description=...)`.

    Args:
      metrics: a dict of scalars, such as `jls.metrics(state)`, or a `jls.StepReport`;
        on the device, which takes one transfer, or numbers.
      more: further scalars by name, such as `loss`; these go before those of `metrics`.

    Returns:
      A line of what is there of `loss`, `loss_scale`, `skips` and `consecutive_skips`;
      where there are no counts but an `overflow`, the word "skipped" if it is true.
      Powers of two are written 2^k, other numbers with four digits.

    Raises:
      TypeError: if `metrics` is neither, or if one of these is no real number.
      ValueError: if one is traced, or is not a scalar.

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> print(jls.progress(jls.metrics(state), loss=jnp.float32(0.231)))
      loss 0.231  scale 2^15  skips 0 (0 in a row)
    """
    given = named(metrics, more)
    names = "loss", "loss_scale", "skips", "consecutive_skips", "overflow"
    values = fetched({name: given[name] for name in names if name in given})
    for name, value in values.items():
        if value.shape != ():
            raise ValueError(
                f"{name} must be a scalar, got shape {value.shape}. Of what "
                "jax.lax.scan stacked, give the last step: "
                "jax.tree.map(lambda x: x[-1], metrics)."
            )
    now = {name: value.item() for name, value in values.items()}
    parts = []
    if "loss" in now:
        parts.append(f"loss {now['loss']:.4g}")
    if "loss_scale" in now:
        parts.append(f"scale {scale_text(now['loss_scale'])}")
    if "skips" in now:
        row = now.get("consecutive_skips")
        parts.append(
            f"skips {now['skips']}" + ("" if row is None else f" ({row} in a row)")
        )
    elif now.get("overflow"):
        parts.append("skipped")
    return "  ".join(parts)
