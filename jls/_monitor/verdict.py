# SPDX-License-Identifier: Apache-2.0
"""Which verdict the facts of a run lead to, and what it says to a newcomer.

`TABLE` has the verdicts in the order in which they are tried: the first that holds is
given.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from jls._text import format_scale
from jls._types import SkipReason

Verdict = Literal[
    "poisoned",
    "bad scale",
    "stalled",
    "non-finite loss",
    "non-finite update",
    "at floor",
    "calibrating",
    "spiking",
    "spike",
    "recovering",
    "underflow",
    "no step",
    "at ceiling",
    "ok",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run; None if not looked at."""

    loss_scale: float
    is_static: bool
    min_scale: float | None
    max_scale: float | None
    applied: bool
    steps: int
    skips: int
    consecutive_skips: int
    nonfinite_losses: int
    nonfinite_updates: int
    skip_reason: SkipReason
    all_leaves_nonfinite: bool = False  # of the gradients of the last skipped step
    nonfinite_leaves: list[str] | None = None  # of the last skipped step, by name
    poisoned_leaves: dict[str, list[str]] | None = None  # names by the tree they are in
    is_nnx: bool = False  # the state or the parameters are those of an NNX model
    small: float | None = None  # share of the gradients below the smallest normal
    all_zero: bool | None = None  # every gradient is
    suggested_scale: float | None = None
    dtype: str | None = None  # in which `small` was counted
    spikes: int | None = None  # steps skipped by a spike policy
    # Of the state of `jls.spikes` and presets:
    spikes_found: int | None = None  # skipped or let through
    judged_loss: float = 0.0
    limit_loss: float = math.inf
    judged_norm: float = 0.0
    limit_norm: float = math.inf
    tokens: float = math.inf
    steady_share: float = 1.0
    loss_never_given: bool = False

    @property
    def poisoned(self) -> bool:
        """Whether inf or NaN is where no step will take it away."""
        return any((self.poisoned_leaves or {}).values())

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self.consecutive_skips > 0

    @property
    def overflowed(self) -> bool:
        """Whether it was skipped for what a lower scale may cure."""
        others = SkipReason.LOSS, SkipReason.UPDATES, SkipReason.SPIKE
        return self.skipped and self.skip_reason not in others

    @property
    def scale(self) -> str:
        """The loss scale as a number if it is short, else as a power of two."""
        return _format(self.loss_scale)


class Limits(NamedTuple):
    """What the caller tolerates."""

    consecutive_skips: int
    small: float


def judge(facts: Facts, limits: Limits) -> tuple[Verdict, str]:
    """The first verdict of the table that holds, and its sentence."""
    row = next(row for row in TABLE if row.holds(facts, limits))
    sentence = row.sentence(facts).rstrip(" .")
    bad = facts.nonfinite_leaves
    # A loss that is not finite spoils all gradients, and what is poisoned is not a
    # gradient: their names would say nothing.
    others = SkipReason.LOSS, SkipReason.SPIKE
    are_to_blame = facts.skip_reason not in others and row.verdict != "poisoned"
    if bad and facts.skipped and are_to_blame:
        sentence += f". Not finite: {_some(bad)}"
    return row.verdict, sentence if sentence.endswith("?") else f"{sentence}."


# By the tree that inf or NaN is in: its name in a sentence, how it gets there, and what
# to do about it.
_POISON = {
    "params": (
        "the parameters",
        "Either the optimizer made it out of finite gradients, a step that "
        "jls.loss_scaled(..., check_updates=True) skips, or something else changed the "
        "parameters",
    ),
    "opt_state": (
        "the optimizer's state",
        "The optimizer made it out of finite gradients, or it was restored so. In "
        "float32 the square of a gradient over 1.8e19 is inf: clip gradients inside "
        "jls.loss_scaled, before the moments",
    ),
    "carried": (
        "the carried state",
        "The forward pass makes it, or a skipped step that does not roll it back: use "
        "jls.train_step, or jls.select(applied, new, old). What is inf on purpose, "
        "leave out of carried",
    ),
}


def _poisoned(facts: Facts) -> str:
    found = {
        tree: names for tree, names in (facts.poisoned_leaves or {}).items() if names
    }
    places = [f"{_POISON[tree][0]} ({_some(names)})" for tree, names in found.items()]
    # Parameters spoil the moments, and moments the parameters: the first is advised on.
    advice = [_POISON[tree][1] for tree in found]
    if "params" in found:
        advice = [_POISON[tree][1] for tree in found if tree != "opt_state"]
    return (
        f"inf or NaN is in {' and in '.join(places)}. No step can cure that: go back "
        f"to an earlier checkpoint. {'. '.join(advice)}"
    )


def _bad_scale(facts: Facts) -> str:
    return (
        f"the loss scale is {facts.scale}, but must be finite and above 0. Set it with "
        "opt_state = jls.set_loss_scale(opt_state, value), and find out where it came "
        "from: a checkpoint, or a jls.set_loss_scale inside jit, where values are not "
        "checked"
    )


def _stalled(facts: Facts) -> str:
    reason = facts.skip_reason
    lowers = facts.is_static and facts.loss_scale > 1
    over = _over(facts)
    if reason == SkipReason.GRADIENTS and lowers:
        advice = "Lower it with jls.set_loss_scale, or use jls.dynamic"
    else:
        advice = {
            SkipReason.NONE: "",
            SkipReason.GRADIENTS: (
                "If the loss is finite, the backward pass overflows at any scale: look "
                "for square roots and divisions at 0, and for an inf in a parameter"
                f"{_other_causes(facts)}"
            ),
            SkipReason.LOSS: (
                "The loss itself is inf or NaN, which no loss scale can cure: look at "
                "the batch, and at log, exp, division and sums in 16 bits in the "
                "forward pass"
            ),
            SkipReason.UPDATES: (
                "The optimizer turns finite gradients into inf or NaN updates"
            ),
            SkipReason.SPIKE: (
                f"{over[0].upper()}{over[1:]}. If no such step moves the limit, use "
                "jls.spikes() with a small budget, or raise the limit; "
                "jls.upgrade_state takes the state over"
            ),
        }[reason]
    because = f", the last one for its {reason.name.lower()}" if reason else ""
    if reason == SkipReason.SPIKE:
        because = ", the last one as a spike"
    return (
        f"the last {facts.consecutive_skips} steps were all skipped{because}, and "
        f"nothing is being learned; the loss scale is {facts.scale}. {advice}"
    )


def _nonfinite_loss(facts: Facts) -> str:
    return (
        "the forward loss of the last step was inf or NaN, which no loss scale can "
        f"cure ({facts.nonfinite_losses} of {_steps(facts)} so far). Look at its "
        "batch, and at log, exp, division and sums in 16 bits in the forward pass"
    )


def _nonfinite_update(facts: Facts) -> str:
    return (
        "the gradients of the last step were finite, but the optimizer turned them "
        "into inf or NaN, or into an update too large for its parameter's dtype "
        f"({facts.nonfinite_updates} of {_steps(facts)} so far). Keep parameters and "
        "moments in float32, or raise the optimizer's eps"
    )


def _at_floor(facts: Facts) -> str:
    return (
        "the last step's gradients were inf or NaN, and the loss scale of "
        f"{facts.scale} is at its floor ({facts.consecutive_skips} skipped in a row), "
        "so no lower scale will help. Look for what is too large, or for a square root "
        "or a division at 0, in the backward pass; or lower min_scale"
        f"{_other_causes(facts)}"
    )


def _other_causes(facts: Facts) -> str:
    """What else makes gradients inf or NaN again and again, as far as it may be."""
    causes = ""
    if not facts.is_static:
        causes += (
            ". Or the gradients were scaled by another state: give jls.value_and_grad "
            "the newest one"
        )
    return causes + _untold_loss(facts)


def _untold_loss(facts: Facts) -> str:
    """A NaN loss that was not told looks like gradients that are all bad."""
    looks_so = (
        facts.skip_reason == SkipReason.GRADIENTS
        and facts.nonfinite_losses == 0
        and facts.all_leaves_nonfinite
    )
    if not looks_so:
        return ""
    return (
        ". All gradients were inf or NaN: if the loss was too, pass value=loss to the "
        "optimizer's update, which then keeps the loss scale"
    )


def _calibrating(facts: Facts) -> str:
    skipped = f"all {facts.steps} steps so far were skipped"
    if facts.steps == 1:
        skipped = "the first step was skipped"
    if facts.min_scale is None:
        return (
            f"{skipped}; the loss scale is {facts.scale}. If it is still coming down, "
            "that is normal for the first ten or so"
        )
    return (
        f"{skipped} while the loss scale comes down, to {facts.scale} now. That is "
        "normal for the first ten or so"
    )


def _spiking(facts: Facts) -> str:
    return (
        f"{facts.spikes_found} of {_steps(facts)} were spikes, more than noise alone "
        f"explains ({facts.spikes} skipped). If they are always the same batches, "
        "raise sigmas or max_norm. Else the run is unstable: lower the learning rate "
        "or beta2, or add QK-norm or z-loss. Skipping will not cure it"
        f"{_spent(facts)}"
    )


def _spike(facts: Facts) -> str:
    return (
        f"the last step was skipped: {_over(facts)} ({facts.spikes} of "
        f"{_steps(facts)} so far){_spent(facts)}"
    )


def _spent(facts: Facts) -> str:
    """Whether spikes are let through; a budget of 0 lets all through."""
    if facts.tokens >= 1 or not facts.spikes:
        return ""
    return (
        ". The budget is spent: spikes are let through for now, and the limit follows "
        "if this is a new level"
    )


def _rare(facts: Facts) -> str:
    """Data that is rare and large may be skipped each time."""
    if (facts.spikes or 0) < max(10, facts.steps / 100):
        return ""
    return (
        ". See whether these are always the same batches, from which nothing is then "
        "learned: raise sigmas, or count with budget=0"
    )


def _over(facts: Facts) -> str:
    """Which signal was over its limit, as far as it is known."""
    signals = {
        "loss": (facts.judged_loss, facts.limit_loss),
        "gradient norm": (facts.judged_norm, facts.limit_norm),
    }
    texts = [
        f"its {name} of {value:.4g} was over the limit of {limit:.4g}"
        for name, (value, limit) in signals.items()
        if value > limit
    ]
    return " and ".join(texts) or "the spike policy wanted it"


def _recovering(facts: Facts) -> str:
    if not facts.is_static:
        return (
            "the last step overflowed and was skipped, "
            f"{facts.consecutive_skips} in a row; the loss scale is {facts.scale}. "
            f"{_skips(facts)}"
        )
    lower = "lower it with jls.set_loss_scale or use jls.dynamic; else "
    return (
        "the gradients of the last step were inf or NaN, and it was skipped, "
        f"{facts.consecutive_skips} in a row; {_skips(facts)}. The loss scale of "
        f"{facts.scale} is static, and never moves. If this goes on, "
        f"{lower if facts.loss_scale > 1 else ''}look for what is too large, or for a "
        f"square root or a division at 0, in the backward pass{_untold_loss(facts)}"
    )


def _underflow(facts: Facts) -> str:
    if facts.all_zero:
        return (
            "all gradients are 0. Either all of them were too small for "
            f"{facts.dtype}, or the loss does not depend on the parameters: compute "
            "them once in float32 to see which"
        )
    fact = (
        f"{facts.small:.0%} of the gradients are too small for {facts.dtype} at the "
        f"loss scale of {facts.scale}, and lose precision or vanish. "
    )
    suggested = facts.suggested_scale or 0.0
    if suggested > facts.loss_scale:
        grow = ", or let the scaler grow sooner or further (growth_interval, max_scale)"
        return (
            f"{fact}jls.suggest_scale proposes {_format(suggested)}: set it with "
            f"jls.set_loss_scale{'' if facts.is_static else grow}"
        )
    other = "use bfloat16, or " if facts.dtype != "bfloat16" else ""
    return (
        f"{fact}A larger scale leaves no room for the largest ones: {other}compute the "
        "part with the smallest ones in float32"
    )


def _no_step(facts: Facts) -> str:
    if facts.is_nnx:
        lost = (
            "their updates were lost: compile the step with nnx.jit, or return model "
            "and optimizer from jax.jit"
        )
    else:
        lost = "this is not the state that the last one returned"
    return (
        "no step was made yet, so there is nothing to judge; the loss scale is "
        f"{facts.scale}. If you ran steps, {lost}"
    )


def _at_ceiling(facts: Facts) -> str:
    never = (
        ". No step was ever skipped: were these gradients made by jls.value_and_grad?"
        if facts.skips == 0
        else ""
    )
    return (
        f"the loss scale of {facts.scale} can grow no further. If gradients are still "
        f"too small for float16, raise max_scale{never}"
    )


def _ok(facts: Facts) -> str:
    low = facts.min_scale if facts.min_scale is not None else 1.0
    has_sunk = not facts.is_static and facts.loss_scale <= low
    hint = _untold_loss(facts) if has_sunk else ""
    if facts.spikes_found:
        counts = f"{facts.spikes_found} found, {facts.spikes} skipped"
        hint = f". Spikes: {counts}{_spent(facts)}{_rare(facts)}{hint}"
    if facts.loss_never_given:
        hint += (
            ". Spikes are judged by the gradient norm alone: pass value=loss to the "
            "optimizer's update to judge the loss too"
        )
    return f"{_skips(facts)}; the loss scale is {facts.scale}{hint}"


def _is_at_floor(facts: Facts) -> bool:
    return facts.min_scale is not None and facts.loss_scale <= facts.min_scale


def _is_at_ceiling(facts: Facts) -> bool:
    return facts.max_scale is not None and facts.loss_scale >= facts.max_scale


def _is_spiking(facts: Facts) -> bool:
    """Whether more steps are spikes than in a steady run, by more than chance."""
    found = facts.spikes_found or 0
    return found - 2 * math.sqrt(found) > facts.steady_share * facts.steps


def _is_underflow(facts: Facts, limits: Limits) -> bool:
    return bool(facts.all_zero) or (facts.small or 0.0) > limits.small


class Row(NamedTuple):
    """A verdict: when it holds, and what it says."""

    verdict: Verdict
    holds: Callable[[Facts, Limits], bool]
    sentence: Callable[[Facts], str]


TABLE = (
    # A parameter, a moment or something carried is not finite.
    Row("poisoned", lambda f, _: f.poisoned, _poisoned),
    # No loss can be scaled by this.
    Row("bad scale", lambda f, _: not 0 < f.loss_scale < math.inf, _bad_scale),
    # Too many steps in a row were skipped.
    Row("stalled", lambda f, m: f.consecutive_skips > m.consecutive_skips, _stalled),
    # The last step was skipped for its forward loss, or for what the optimizer made.
    Row(
        "non-finite loss",
        lambda f, _: f.skipped and f.skip_reason == SkipReason.LOSS,
        _nonfinite_loss,
    ),
    Row(
        "non-finite update",
        lambda f, _: f.skipped and f.skip_reason == SkipReason.UPDATES,
        _nonfinite_update,
    ),
    # The last step overflowed, and the scale can go no lower.
    Row(
        "at floor",
        lambda f, _: f.overflowed and not f.is_static and _is_at_floor(f),
        _at_floor,
    ),
    # No step was applied yet: the scale is on its way down.
    Row(
        "calibrating",
        lambda f, _: f.overflowed and not f.is_static and f.skips == f.steps,
        _calibrating,
    ),
    # More steps are spikes than chance can explain.
    Row("spiking", lambda f, _: _is_spiking(f), _spiking),
    # The last step was skipped for its loss or norm, which were finite.
    Row(
        "spike",
        lambda f, _: f.skipped and f.skip_reason == SkipReason.SPIKE,
        _spike,
    ),
    # The last step overflowed and the scale backed off.
    Row("recovering", lambda f, _: f.skipped, _recovering),
    # Too many of the gradients are too small for the scale.
    Row("underflow", _is_underflow, _underflow),
    # There is nothing to judge.
    Row("no step", lambda f, _: f.steps == 0, _no_step),
    # The scale can go no higher.
    Row("at ceiling", lambda f, _: not f.is_static and _is_at_ceiling(f), _at_ceiling),
    Row("ok", lambda f, _: True, _ok),
)


def _steps(facts: Facts) -> str:
    return f"{facts.steps} step{'' if facts.steps == 1 else 's'}"


def _skips(facts: Facts) -> str:
    was = "was" if 1 in (facts.skips, facts.steps) else "were"
    return f"{facts.skips} of {_steps(facts)} {was} skipped so far"


def _some(names: list[str]) -> str:
    """The first three names; a tree that is one leaf has none."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name or "(tree)" for name in names[:3]) + more


def _format(scale: float) -> str:
    return format_scale(scale) if "e" in f"{scale:g}" else f"{scale:g}"
