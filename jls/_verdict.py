# SPDX-License-Identifier: Apache-2.0
"""Which verdict the numbers of a run lead to, and what it says to a newcomer.

The verdicts, of which the first that holds is given:

    poisoned           a parameter or the optimizer's state is not finite
    stalled            more than max_consecutive_skips steps skipped in a row
    non-finite loss    the last step was skipped for its forward loss
    non-finite update  the last step was skipped for what the optimizer made of it
    at floor           the last step overflowed, and the scale can go no lower
    calibrating        no step applied yet: the scale is on its way down
    recovering         the last step overflowed and the scale backed off
    underflow          too many of the gradients are too small for the scale
    at ceiling         the scale can go no higher
    ok                 none of these
"""

from typing import Any

from jls._repr import scale_text

VERDICTS = (
    "poisoned",
    "stalled",
    "non-finite loss",
    "non-finite update",
    "calibrating",
    "at floor",
    "recovering",
    "underflow",
    "at ceiling",
    "ok",
)


def verdict_of(numbers: dict[str, Any], limit: int, max_small: float) -> str:
    skipped = numbers["consecutive_skips"] > 0
    scale, reason = numbers["loss_scale"], numbers["skip_reason"]
    is_fixed = numbers["min_scale"] == numbers["max_scale"]
    none_applied = numbers["skips"] == numbers["steps"]
    verdicts = {
        "poisoned": numbers.get("poisoned", False),
        "stalled": numbers["consecutive_skips"] > limit,
        "non-finite loss": skipped and reason == "loss",
        "non-finite update": skipped and reason == "updates",
        "at floor": skipped and not is_fixed and scale <= numbers["min_scale"],
        "calibrating": skipped and not is_fixed and none_applied,
        "recovering": skipped,
        "underflow": numbers.get("all_zero") or numbers.get("small", 0.0) > max_small,
        "at ceiling": not is_fixed and scale >= numbers["max_scale"],
    }
    return next((verdict for verdict, holds in verdicts.items() if holds), "ok")


_SENTENCES = {
    "poisoned": (
        "a parameter or the optimizer's state is inf or NaN. No step can mend that: go "
        "back to a checkpoint from before, and find out what changed it besides the "
        "guarded update"
    ),
    "stalled": (
        "the last {consecutive_skips} steps were all skipped{because}, and nothing is "
        "being learnt; the loss scale is {loss_scale}. {advice}"
    ),
    "non-finite loss": (
        "the forward loss of the last step was inf or NaN, which no loss scale can "
        "mend ({nonfinite_losses} of {steps} steps so far). Look at its batch, and at "
        "log, exp, division and sums in 16 bits in the forward pass"
    ),
    "non-finite update": (
        "the gradients of the last step were finite, but the optimizer made inf or NaN "
        "of them ({nonfinite_updates} of {steps} steps so far). Keep parameters and "
        "moments in float32, or raise the optimizer's eps"
    ),
    "calibrating": (
        "all {steps} steps so far were skipped while the loss scale comes down, to "
        "{loss_scale} now. That is normal for the first ten or so"
    ),
    "at floor": (
        "the last step's gradients were inf or NaN, and the loss scale of "
        "{loss_scale} is at its floor ({consecutive_skips} skipped in a row), so "
        "that no lower scale will mend it. Look for what is too large, or for a square "
        "root or a division at 0, in the backward pass; or lower min_scale"
    ),
    "recovering": (
        "the last step overflowed and was skipped, {consecutive_skips} in a row; the "
        "loss scale is {loss_scale}. {skips} of {steps} steps were skipped so far"
    ),
    "underflow": "{advice}",
    "at ceiling": (
        "the loss scale of {loss_scale} can grow no further. If gradients are still "
        "too small for float16, raise max_scale"
    ),
    "ok": (
        "{skips} of {steps} steps were skipped so far; the loss scale is {loss_scale}"
    ),
}

_FIXED = (
    "the gradients of the last step were inf or NaN, and it was skipped, "
    "{consecutive_skips} in a row; {skips} of {steps} steps were skipped so far. The "
    "loss scale of {loss_scale} is a fixed one. If this goes on, {lower}look for what "
    "is too large, or for a square root or a division at 0, in the backward pass"
)
_LOWER = "lower it with jls.set_loss_scale or take jls.dynamic; else "

_ADVICE = {
    "none": "",
    "gradients": (
        "If the loss is finite, the backward pass overflows at any scale: look for "
        "square roots and divisions at 0, and for an inf in a parameter"
    ),
    "loss": "Look at the batch and at the forward pass: the loss itself is inf or NaN",
    "updates": "The optimizer makes inf or NaN of finite gradients",
}


def sentence_of(verdict: str, numbers: dict[str, Any]) -> str:
    scale, reason = numbers["loss_scale"], numbers["skip_reason"]
    is_fixed = numbers["min_scale"] == numbers["max_scale"]
    template = _FIXED if verdict == "recovering" and is_fixed else _SENTENCES[verdict]
    words = {
        **numbers,
        "loss_scale": _plain(scale),
        "because": "" if reason == "none" else f", the last one for its {reason}",
        "lower": _LOWER if scale > 1 else "",
        "advice": _ADVICE[reason],
    }
    if verdict == "stalled" and reason == "gradients" and is_fixed and scale > 1:
        words["advice"] = "Lower it with jls.set_loss_scale, or take jls.dynamic"
    if verdict == "underflow":
        words["advice"] = _underflow(numbers, is_fixed)
    sentence = template.format(**words).rstrip(" .")
    bad = numbers.get("nonfinite_leaves")
    # A loss that is not finite spoils all gradients, and what is poisoned is no
    # gradient: their names would say nothing.
    are_to_blame = reason != "loss" and verdict != "poisoned"
    if bad and numbers["consecutive_skips"] and are_to_blame:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        sentence += f". Not finite: {', '.join(bad[:3])}{more}"
    return sentence + "."


def _underflow(numbers: dict[str, Any], is_fixed: bool) -> str:
    if numbers["all_zero"]:
        return (
            "all gradients are 0. Either all of them were too small for "
            f"{numbers['dtype']}, or the loss does not depend on the parameters: "
            "compute them once in float32 to see which"
        )
    suggested, dtype = numbers["suggested_scale"], numbers["dtype"]
    fact = (
        f"{numbers['small']:.0%} of the gradients are too small for {dtype} at the "
        f"loss scale of {_plain(numbers['loss_scale'])}, and lose precision or vanish. "
    )
    if suggested > numbers["loss_scale"]:
        policy = ", or let the policy grow sooner or further "
        policy += "(growth_interval, max_scale)"
        return (
            f"{fact}jls.suggest_scale proposes {_plain(suggested)}: set it by "
            f"jls.set_loss_scale{'' if is_fixed else policy}"
        )
    other = "use bfloat16, or " if dtype != "bfloat16" else ""
    return (
        f"{fact}A larger scale leaves no room for the largest ones: {other}compute in "
        "float32 what makes the smallest"
    )


def _plain(scale: float) -> str:
    """A loss scale as a number if it is short, else as a power of two."""
    return scale_text(scale) if "e" in f"{scale:g}" else f"{scale:g}"
