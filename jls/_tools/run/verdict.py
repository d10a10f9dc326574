# SPDX-License-Identifier: Apache-2.0
"""The verdicts of `jls.health`: when each holds, and its sentence for a newcomer.

Each verdict is one function below: the decorator says when it holds, the body is its
sentence. They are tried from top to bottom, and the first that holds is returned.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from jls._text import format_scale, listed, scale_in_words
from jls._types import SIGNALS, SkipReason

# In the order in which they are tried.
Verdict = Literal[
    "poisoned",
    "bad scale",
    "stalled",
    "at floor",
    "skipping",
    "non-finite loss",
    "non-finite update",
    "calibrating",
    "spiking",
    "spike",
    "recovering",
    "dropping",
    "underflow",
    "no step",
    "at ceiling",
    "ok",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

# How many steps a loss scale takes to come down from 2^24, the largest of jls.dynamic,
# to 1; and one more.
COMING_DOWN = 25


class Small(NamedTuple):
    """The share of the gradients that are too small for a dtype."""

    small: float  # the share below the smallest normal number, once scaled
    all_zero: bool  # whether all gradients are 0
    dtype: str


class PolicyFacts(NamedTuple):
    """The facts of `jls.spikes` and the presets like it, beside the metrics."""

    tokens: float
    steady_share: float
    loss_never_given: bool
    loss_given: bool  # not the opposite: before the first step neither is known
    window: int


class ScalerFacts(NamedTuple):
    """The facts of a known optimizer's wrapper; None if they are not known."""

    init_scale: float | None = None
    backoff_factor: float | None = None
    backoff_interval: float | None = None
    growth_interval: float | None = None
    adjusts: bool | None = None  # False for jls.static; True also with equal bounds
    checks_updates: bool | None = None  # whether it skips non-finite updates
    sigmas: float | None = None  # of its spike policy


UNKNOWN = ScalerFacts()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a run; None if not looked at.

    Each metric of the run is an attribute too: `facts.skips`.
    """

    metrics: Mapping[str, Any]  # those of `jls.metrics(state, host=True)`
    is_static: bool
    min_scale: float | None
    max_scale: float | None
    all_leaves_nonfinite: bool = False  # of the gradients of the last skipped step
    all_leaves_finite: bool = False  # of the same
    nonfinite_leaves: list[str] | None = None  # of the last skipped step, by name
    # How many leaves were not finite, and of how many, where no names are known.
    unnamed_leaves: tuple[int, int] | None = None
    poisoned_leaves: dict[str, list[str]] | None = None  # names by the tree they are in
    is_doubted: bool = False  # the poisoned leaves hold -inf alone, and may be masks
    masks: dict[str, int] | None = None  # elements that are -inf, by the leaf
    # Whether the parameters were looked at, under whatever name.
    saw_params: bool = False
    is_train_state: bool = False  # the state is a Flax `TrainState`
    is_nnx: bool = False  # the state or the parameters are those of an NNX model
    is_narrow: bool | None = None  # a parameter or a moment has less than 32 bits
    # The check is the sum of squares of a clip: a leaf that is bad may be finite.
    sums_squares: bool = False
    small: Small | None = None
    policy: PolicyFacts | None = None
    scaler: ScalerFacts = UNKNOWN

    def __getattr__(self, name: str) -> Any:
        """The metric of that name."""
        if name not in self.metrics:
            raise AttributeError(f"no fact or metric is called {name}")
        return self.metrics[name]

    @property
    def poisoned(self) -> bool:
        """Whether an inf or a NaN is where no further step removes it."""
        return any((self.poisoned_leaves or {}).values())

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self.consecutive_skips > 0

    @property
    def skipped_for(self) -> SkipReason | None:
        """Why the last step was skipped, or None if it was applied.

        `SkipReason.NONE` if an old checkpoint does not say why.
        """
        return self.last_skip_reason if self.skipped else None

    @property
    def has_bad_norm(self) -> bool:
        """Whether the last step's gradients were finite, but not their global norm."""
        return self.skipped_for == SkipReason.GRADIENTS and self.all_leaves_finite

    @property
    def had_bad_gradients(self) -> bool:
        """Whether the last step was skipped for what a lower scale may cure."""
        return self.skipped_for in (SkipReason.GRADIENTS, SkipReason.NONE)

    @property
    def moves(self) -> bool:
        """Whether the loss scale can."""
        return not self.is_static

    @property
    def is_at_floor(self) -> bool:
        return self.min_scale is not None and self.loss_scale <= self.min_scale

    @property
    def is_at_ceiling(self) -> bool:
        return self.max_scale is not None and self.loss_scale >= self.max_scale

    @property
    def skips_by(self) -> dict[SkipReason, int]:
        """The number of steps skipped for each reason, as far as it was counted."""
        others = {
            SkipReason.LOSS: self.nonfinite_losses,
            SkipReason.UPDATES: self.nonfinite_updates,
            SkipReason.SPIKE: self.metrics.get("spikes", 0),
        }
        gradients = max(0, self.skips - sum(others.values()))
        counts = {SkipReason.GRADIENTS: gradients} | others
        return {reason: count for reason, count in counts.items() if count > 0}

    def is_often(self, count: int) -> bool:
        """Whether something happens too often to be the start of a run, or chance."""
        # A scale that is right skips one step in hundreds, never a quarter of them.
        patience = COMING_DOWN * max(1, self.scaler.backoff_interval or 1)
        return count > patience and 4 * count >= self.steps

    @property
    def is_spiking(self) -> bool:
        """Whether more steps are spikes than in a steady run, by more than chance.

        What was skipped proves nothing: the bound is for values that enter the window.
        Without a budget nothing is let through: then `steady_share` is 1 unless skipped
        values enter too.
        """
        if self.policy is None:
            return False
        count = self.spikes_found
        if self.policy.tokens < math.inf:
            count -= self.spikes
        count = max(0, count)
        # Less two deviations of a count: what chance may add.
        return count - 2 * math.sqrt(count) > self.policy.steady_share * self.steps

    @property
    def scale(self) -> str:
        """The loss scale, for a sentence."""
        return scale_in_words(self.loss_scale)

    @property
    def has_scale(self) -> bool:
        """Whether the loss is scaled: `jls.skip_nonfinite` leaves it as it is."""
        return not (self.is_static and self.loss_scale == 1)

    @property
    def at_scale(self) -> str:
        """The end of a sentence, "; the loss scale is 2^15"; "" if there is none."""
        return f"; the loss scale is {self.scale}" if self.has_scale else ""

    @property
    def not_for_the_scale(self) -> str:
        """The end of a sentence on what is not finite at any loss scale."""
        return ", which no loss scale can cure" if self.has_scale else ""


class Limits(NamedTuple):
    """The caller's limits."""

    consecutive_skips: int
    small: float


class VerdictRule(NamedTuple):
    """A verdict: when it holds, and its sentence."""

    verdict: Verdict
    holds: Callable[[Facts, Limits], bool]
    sentence: Callable[[Facts], str]


TABLE: list[VerdictRule] = []


def _verdict(
    name: Verdict, holds: Callable[[Facts, Limits], bool]
) -> Callable[[Callable[[Facts], str]], Callable[[Facts], str]]:
    """Appends a verdict to the table, with the decorated function as its sentence."""

    def append(sentence):
        TABLE.append(VerdictRule(name, holds, sentence))
        return sentence

    return append


def diagnose(facts: Facts, limits: Limits) -> tuple[Verdict, str]:
    """The first verdict of the table that holds, and its sentence."""
    row = next(row for row in TABLE if row.holds(facts, limits))
    sentences = [row.sentence(facts)]
    # A loss that is not finite spoils all gradients, and poison is in no gradient: the
    # names of gradients would say nothing.
    others = None, SkipReason.LOSS, SkipReason.SPIKE
    if facts.skipped_for not in others and row.verdict != "poisoned":
        sentences.append(_culprits(facts))
    if row.verdict != "poisoned":
        sentences.append(_masks(facts))
    if row.verdict not in ("bad scale", "at ceiling"):
        sentences.append(_above_ceiling(facts, "The"))
    sentences = [text.rstrip(" .") for text in sentences if text]
    ended = [text if text.endswith("?") else f"{text}." for text in sentences]
    return row.verdict, " ".join(ended)


def _culprits(facts: Facts) -> str:
    """Which parameters caused the last skip, as far as their names are known."""
    if facts.nonfinite_leaves:
        return f"Not finite: {listed(facts.nonfinite_leaves)}"
    if facts.has_bad_norm:
        return (
            "Every gradient is finite, but their global norm is over 1.8e19: a float32 "
            "cannot hold its square, and a clip by that norm would turn them all into "
            "zeros"
        )
    bad, known = facts.unnamed_leaves or (0, 0)
    if not bad:
        return ""
    return (
        f"Not finite: {bad} of the {known} parameters that the optimizer's state "
        "knows; optimizer= gives their names"
    )


def _masks(facts: Facts) -> str:
    """Leaves whose -inf is taken for a mask."""
    if not facts.masks:
        return ""
    count, is_one = sum(facts.masks.values()), len(facts.masks) == 1
    holds, a_mask = ("holds", "a mask") if is_one else ("hold", "masks")
    note = (
        f"{listed(list(facts.masks))} {holds} -inf in {count} "
        f"element{'' if count == 1 else 's'}, taken for {a_mask}"
    )
    if facts.skipped:
        note += ": if not on purpose, no step can cure that"
    return note


# By the tree that inf or NaN is in: its name in a sentence.
_TREES = {
    "params": "the parameters",
    "opt_state": "the optimizer's state",
    "carried": "the carried state",
}


@_verdict("poisoned", lambda f, _: f.poisoned)
def _poisoned(facts: Facts) -> str:
    found = {
        tree: names for tree, names in (facts.poisoned_leaves or {}).items() if names
    }
    places = [f"{_TREES[tree]} ({listed(names)})" for tree, names in found.items()]
    # Parameters spoil the moments, and moments the parameters: the first is advised on.
    trees = [t for t in found if t != "opt_state" or "params" not in found]
    rates = [name for name in found.get("opt_state", []) if "hyperparams/" in name]
    if rates == [name for names in found.values() for name in names]:
        rates = [name.split("hyperparams/")[1] for name in rates]
        are, them = ("is", "it") if len(rates) == 1 else ("are", "them")
        values = ", ".join(f"{rate}=value" for rate in rates)
        return (
            f"{' and '.join(rates)}, which {are} set by hand, {are} not finite. Set "
            f"{them} again: opt_state = optax.tree.set(opt_state, {values})"
        )
    causes = ". ".join(_CAUSES[tree](facts) for tree in trees)
    if facts.is_doubted:
        return (
            f"-inf is in {' and in '.join(places)}, and the last "
            f"{facts.consecutive_skips} steps were all skipped. Unless it is a mask, "
            f"no step can cure that: go back to an earlier checkpoint. {causes}"
        )
    return (
        f"inf or NaN is in {' and in '.join(places)}. No step can cure that: go back "
        f"to an earlier checkpoint, from which {_why(facts)}. {causes}"
    )


def _cause_in_params(facts: Facts) -> str:
    if facts.nonfinite_leaves is None:
        return (
            "The wrapper guards a part of the parameters alone: put optax.masked and "
            "optax.partition inside it, jls.loss_scaled(optax.masked(inner, mask))"
        )
    others = (
        "something else changed the parameters, such as a step written by hand that "
        "keeps what was skipped"
    )
    if facts.scaler.checks_updates:
        return f"The optimizer skips what it makes of finite gradients: {others}"
    return (
        "Either the optimizer made it out of finite gradients, a step that "
        f"jls.loss_scaled(..., check_updates=True) skips, or {others}"
    )


def _cause_in_moments(facts: Facts) -> str:
    return (
        "The optimizer made it out of finite gradients, or it was restored so. In "
        "float32 the square of a gradient over 1.8e19 is inf: clip gradients inside "
        "jls.loss_scaled, before the moments"
    )


def _cause_in_carried(facts: Facts) -> str:
    leave_out = "Leave out of carried= what is meant to be inf"
    if facts.is_train_state:
        leave_out = (
            "Leave out what is meant to be inf: jls.health(state.opt_state, "
            "state.params, carried=...)"
        )
    old = ", with an nnx.clone of the old one" if facts.is_nnx else ""
    return (
        "The forward pass makes it, or a skipped step that does not roll it back: use "
        f"jls.train_step, or jls.select(applied, new, old){old}. {leave_out}"
    )


_CAUSES = {
    "params": _cause_in_params,
    "opt_state": _cause_in_moments,
    "carried": _cause_in_carried,
}


@_verdict("bad scale", lambda f, _: not 0 < f.loss_scale < math.inf)
def _bad_scale(facts: Facts) -> str:
    return (
        f"the loss scale is {facts.scale}, but must be finite and above 0. Set it with "
        "opt_state = jls.set_loss_scale(opt_state, value), and find out where it came "
        "from: a checkpoint, or a jls.set_loss_scale inside jit, where values are not "
        "checked"
    )


@_verdict("stalled", lambda f, m: f.consecutive_skips > m.consecutive_skips)
def _stalled(facts: Facts) -> str:
    reason = facts.last_skip_reason
    over = _over(facts)
    if reason == SkipReason.GRADIENTS and _can_lower(facts):
        lower = _lower(facts)
        advice = (
            f"{lower[0].upper()}{lower[1:]}. If that does not help, {_why(facts)}"
            f"{_loss_not_passed(facts)}"
        )
    else:
        advice = {
            SkipReason.NONE: "",
            SkipReason.GRADIENTS: (
                f"{_at_any_scale(facts)}: {_why(facts)}"
                f"{'' if facts.saw_params else ', and for an inf in a parameter'}"
                f"{_keep(facts)}{_other_causes(facts)}"
            ),
            SkipReason.LOSS: (
                f"The loss itself is inf or NaN{facts.not_for_the_scale}: "
                f"{_why(facts)}{_keep(facts)}{_ran_away(facts)}"
            ),
            SkipReason.UPDATES: (
                "The optimizer turns finite gradients into inf or NaN updates. "
                f"{_mend_updates(facts)}"
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
        f"nothing is being learned{facts.at_scale}. {advice}"
    )


def _at_any_scale(facts: Facts) -> str:
    """Why a lower scale does not help."""
    if facts.has_bad_norm:
        return "True gradients this large are so at any scale"
    return "If the loss is finite, the backward pass makes inf or NaN at any scale"


def _bad_gradients_of_last(facts: Facts) -> str:
    if facts.has_bad_norm:
        return "the squares of the last step's gradients overflowed"
    return f"the gradients of the last step were {_bad(facts)}"


def _bad(facts: Facts) -> str:
    return "inf, NaN, or over 1.8e19 in norm" if facts.sums_squares else "inf or NaN"


def _why(facts: Facts) -> str:
    """The line to write that names the line of the source."""
    return f"print(jls.why({_arguments(facts)})) names the line"


def _keep(facts: Facts) -> str:
    """What to do if float16 overflows at that line."""
    if facts.has_bad_norm or not facts.has_scale:
        return ""
    return "; if it overflows, keep that module in float32 (keep=, or its dtype)"


def ask_for_half(facts: Facts) -> str:
    """The line to write that says how much of a step is half, which no state knows."""
    if not facts.moves:
        return ""
    return f"Half precision? print(jls.check_step({_arguments(facts)}))"


def _arguments(facts: Facts) -> str:
    """What a tool takes that reads the step."""
    if facts.is_nnx:
        return "step, model, optimizer, batch"
    if facts.is_train_state:
        return "step, state, batch"
    return "step, params, opt_state, batch"


def _ran_away(facts: Facts) -> str:
    """A cause that spoils every batch of a run that has made good steps."""
    if facts.skips >= facts.steps:
        return ""
    scaled = ", or gradients that are still scaled (jls.check_step tells)"
    return (
        ". If every batch is bad, the parameters may be too large: after too high a "
        f"learning rate{scaled if facts.loss_scale != 1 else ''}"
    )


def _can_lower(facts: Facts) -> bool:
    return facts.is_static and facts.loss_scale > 1


def _lower(facts: Facts) -> str:
    """How to lower a scale that never moves."""
    use = "use jls.dynamic"
    if facts.scaler.adjusts:
        use = "give it a lower min_scale"
    return f"lower it with jls.set_loss_scale, or {use}"


@_verdict("at floor", lambda f, _: f.had_bad_gradients and f.moves and f.is_at_floor)
def _at_floor(facts: Facts) -> str:
    return (
        f"{_bad_gradients_of_last(facts)}, and the loss scale of "
        f"{facts.scale} is at its floor ({facts.consecutive_skips} skipped in a row), "
        f"so no lower scale will help: {_why(facts)}{_keep(facts)}. Or lower min_scale"
        f"{_other_causes(facts)}"
    )


# Above what is said of the last step alone, so that the verdict does not depend on it.
@_verdict("skipping", lambda f, _: f.is_often(f.skips))
def _skipping(facts: Facts) -> str:
    counts = facts.skips_by
    names = {
        SkipReason.GRADIENTS: "for their gradients",
        SkipReason.LOSS: "for their loss",
        SkipReason.UPDATES: "for their updates",
        SkipReason.SPIKE: "as spikes",
    }
    causes = {
        SkipReason.GRADIENTS: _bad_gradients,
        SkipReason.LOSS: _bad_losses,
        SkipReason.UPDATES: _mend_updates,
        SkipReason.SPIKE: _many_spikes,
    }
    listed = ", ".join(f"{count} {names[reason]}" for reason, count in counts.items())
    # Advice on the reasons of a quarter of the skips or more: at most four.
    main = [reason for reason, count in counts.items() if 4 * count >= facts.skips]
    advice = ". ".join(causes[reason](facts) for reason in main)
    return (
        f"{_skips(facts)}, {listed}{facts.at_scale}. A healthy run skips few steps"
        f"{' once its scale is found' if facts.has_scale else ''}. {advice}"
    )


def _bad_gradients(facts: Facts) -> str:
    if _can_lower(facts):
        return (
            f"The scale is static and may be too large: {_lower(facts)}. Else "
            f"{_why(facts)}"
        )
    interval = facts.scaler.growth_interval
    # Each growth may cost a skip: then more than one step in 25 is skipped.
    if facts.moves and interval and interval < COMING_DOWN:
        return (
            f"The scale grows after {interval:g} good steps already, and what follows "
            "is skipped: raise growth_interval"
        )
    what = f"that are {_bad(facts)}"
    if facts.has_bad_norm:
        what = "whose squares overflow"
    return (
        f"Gradients {what} again and again have a cause that no scale cures: "
        f"{_why(facts)}{_other_causes(facts)}"
    )


def _bad_losses(facts: Facts) -> str:
    return (
        f"{'No loss scale' if facts.has_scale else 'Nothing in the step'} cures a loss "
        f"that is inf or NaN: with such a batch, {_why(facts)}"
    )


def _many_spikes(facts: Facts) -> str:
    policy = facts.policy
    if policy is None:
        return "See whether the limit of the spike policy is too low for this run"
    # The deviation of 16 values is known to a fifth of itself, of fewer to less.
    if 1 < policy.window < 16:
        return (
            f"A window of {policy.window} is too short to tell a spike from noise: "
            "jls.spikes() has one of 128"
        )
    # Of normal noise 1 value in 741 is over 3 deviations, 1 in 44 over 2.
    if facts.scaler.sigmas and facts.scaler.sigmas < 3:
        return "So few sigmas call noise a spike: jls.spikes() has 6"
    bound = (
        ", or bound what is skipped with a small budget"
        if policy.tokens == math.inf
        else ""
    )
    return (
        f"If these batches are good, raise sigmas or max_norm{bound}. Else the run is "
        "unstable: lower the learning rate"
    )


@_verdict("non-finite loss", lambda f, _: f.skipped_for == SkipReason.LOSS)
def _nonfinite_loss(facts: Facts) -> str:
    return (
        f"the forward loss of the last step was inf or NaN{facts.not_for_the_scale} "
        f"({facts.nonfinite_losses} of {_steps(facts)} so far): with its batch, "
        f"{_why(facts)}"
    )


@_verdict("non-finite update", lambda f, _: f.skipped_for == SkipReason.UPDATES)
def _nonfinite_update(facts: Facts) -> str:
    return (
        "the gradients of the last step were finite, but the optimizer turned them "
        "into inf or NaN, or into an update too large for its parameter's dtype "
        f"({facts.nonfinite_updates} of {_steps(facts)} so far). "
        f"{_mend_updates(facts)}"
    )


def _mend_updates(facts: Facts) -> str:
    if facts.masks:
        return (
            "The parameters hold -inf, and an optimizer that reads them, as weight "
            "decay does, makes NaN of it: leave these out, optax.adamw(mask=...), or "
            'freeze them, optax.partition({"train": inner, "freeze": '
            "optax.set_to_zero()}, labels)"
        )
    if facts.is_narrow is False:
        return f"Raise the optimizer's eps; {_why(facts)}"
    return (
        "Keep parameters and moments in float32, or raise the optimizer's eps; "
        f"{_why(facts)}"
    )


def _other_causes(facts: Facts) -> str:
    """Other possible causes of gradients that are inf or NaN again and again."""
    causes = ""
    if not facts.is_static:
        causes += (
            ". Or the gradients were scaled by another state: give jls.value_and_grad "
            "the newest one"
        )
    return causes + _loss_not_passed(facts)


def _loss_not_passed(facts: Facts) -> str:
    """The advice to pass the loss: a NaN loss makes all gradients bad."""
    looks_so = (
        facts.last_skip_reason == SkipReason.GRADIENTS
        and facts.nonfinite_losses == 0
        and facts.all_leaves_nonfinite
        and not (facts.policy and facts.policy.loss_given)
    )
    if not looks_so:
        return ""
    return (
        f". All gradients were {_bad(facts)}: if the loss was inf or NaN, pass "
        "value=loss to the optimizer's update, which then keeps the loss scale"
    )


@_verdict(
    "calibrating",
    lambda f, _: f.had_bad_gradients and f.moves and f.skips == f.steps,
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


@_verdict("spiking", lambda f, _: f.is_spiking)
def _spiking(facts: Facts) -> str:
    return (
        f"{facts.spikes_found} of {_steps(facts)} were spikes, more than noise alone "
        f"explains ({facts.spikes} skipped). If they are always the same batches, "
        "raise sigmas or max_norm. Else the run is unstable: lower the learning rate "
        "or beta2, or add QK-norm or z-loss. Skipping will not cure it"
        f"{_spent(facts)}"
    )


@_verdict("spike", lambda f, _: f.skipped_for == SkipReason.SPIKE)
def _spike(facts: Facts) -> str:
    return (
        f"the last step was skipped: {_over(facts)} ({facts.spikes} of "
        f"{_steps(facts)} so far){_spent(facts)}"
    )


def _spent(facts: Facts) -> str:
    """Whether spikes are let through; a budget of 0 lets all through."""
    if facts.policy is None or facts.policy.tokens >= 1 or not facts.spikes:
        return ""
    return (
        ". The budget is spent: spikes are let through for now, and the limit follows "
        "if this is a new level"
    )


def _rare(facts: Facts) -> str:
    """Data that is rare and large may be skipped each time."""
    # Bad batches are fewer: one in a hundred would be a part of the data.
    if facts.spikes < max(10, facts.steps / 100):
        return ""
    return (
        ". See whether these are always the same batches, from which nothing is then "
        "learned: raise sigmas, or count with budget=0. If they are not, the run may "
        "be unstable"
    )


def _over(facts: Facts) -> str:
    """Which signal was over its limit, as far as it is known."""
    texts = []
    for signal in SIGNALS if facts.policy else ():
        value, limit = (
            facts.metrics[f"judged_{signal}"],
            facts.metrics[f"limit_{signal}"],
        )
        if value > limit:
            name = "gradient norm" if signal == "norm" else signal
            texts.append(f"its {name} of {value:.4g} was over the limit of {limit:.4g}")
    return " and ".join(texts) or "the spike policy wanted it"


@_verdict("recovering", lambda f, _: f.skipped)
def _recovering(facts: Facts) -> str:
    what = f"{_bad_gradients_of_last(facts)}, and it was skipped"
    if facts.skipped_for == SkipReason.NONE:
        what = "the last step was skipped"
    if not facts.is_static:
        return (
            f"{what}, {facts.consecutive_skips} in a row; the loss scale is "
            f"{facts.scale}. {_skips(facts)}"
        )
    lower = f"{_lower(facts)}; else " if _can_lower(facts) else ""
    never_moves = ""
    if facts.has_scale:
        never_moves = f"The loss scale of {facts.scale} is static, and never moves. "
    return (
        f"{what}, {facts.consecutive_skips} in a row; {_skips(facts)}. {never_moves}"
        f"If this goes on, {lower}"
        f"{_why(facts)}{_loss_not_passed(facts)}"
    )


@_verdict("dropping", lambda f, _: f.is_often(f.partial_overflows))
def _dropping(facts: Facts) -> str:
    floor = ", its floor" if facts.moves and facts.is_at_floor else ""
    return (
        f"{facts.partial_overflows} of {_steps(facts)} were applied without a part of "
        "their gradients, which was inf or NaN: nothing is learned from it; the loss "
        f"scale is {facts.scale}{floor}. See whether these are always the same "
        f"examples; {_why(facts)}"
    )


@_verdict(
    "underflow",
    lambda f, m: bool(f.small) and (f.small.all_zero or f.small.small > m.small),
)
def _underflow(facts: Facts) -> str:
    assert facts.small is not None, "the verdict needs it"
    share, all_zero, dtype = facts.small
    if all_zero:
        return (
            f"all gradients are 0. Either all of them were too small for {dtype}, or "
            "the loss does not depend on the parameters: compute them once in float32 "
            "to see which"
        )
    fact = (
        f"{share:.0%} of the gradients are too small for {dtype} at the loss scale of "
        f"{facts.scale}, and lose precision or vanish. "
    )
    if dtype == "bfloat16":
        return f"{fact}Compute the part with the smallest ones in float32"
    grow = ", or let the scaler grow sooner or further (growth_interval, max_scale)"
    return (
        f"{fact}print(jls.calibrate(step, ...)) says which scale is the largest, and "
        "what vanishes at that one too. Set the scale with "
        f"jls.set_loss_scale{'' if facts.is_static else grow}; for the rest use "
        "bfloat16, or compute it in float32"
    )


@_verdict("no step", lambda f, _: f.steps == 0)
def _no_step(facts: Facts) -> str:
    if facts.is_nnx:
        lost = (
            "their updates were lost: compile the step with nnx.jit, or return model "
            "and optimizer from jax.jit"
        )
    else:
        lost = "this is not the state that the last one returned"
    return (
        f"no step was made yet, so there is nothing to judge{facts.at_scale}. If you "
        f"ran steps, {lost}"
    )


@_verdict("at ceiling", lambda f, _: f.moves and f.is_at_ceiling)
def _at_ceiling(facts: Facts) -> str:
    never = (
        ". No step was ever skipped: were these gradients made by jls.value_and_grad?"
        if facts.skips == 0
        else ""
    )
    return _above_ceiling(facts) or (
        f"the loss scale of {facts.scale} can grow no further. If gradients are still "
        f"too small for float16, raise max_scale{never}"
    )


def _above_ceiling(facts: Facts, the: str = "the") -> str:
    """That the scale is where the scaler never puts it."""
    most = facts.max_scale
    if most is None or not facts.moves or facts.loss_scale <= most:
        return ""
    return (
        f"{the} loss scale of {facts.scale} is above its maximum of "
        f"{scale_in_words(most)}: it was set by hand, or saved under another "
        "scaler. It comes down when it would grow next, or after an overflow"
    )


@_verdict("ok", lambda f, _: True)
def _ok(facts: Facts) -> str:
    low = facts.min_scale if facts.min_scale is not None else 1.0
    has_sunk = not facts.is_static and facts.loss_scale <= low
    hint = _loss_not_passed(facts) if has_sunk else ""
    if facts.policy and facts.spikes_found:
        counts = f"{facts.spikes_found} found, {facts.spikes} skipped"
        hint = f". Spikes: {counts}{_spent(facts)}{_rare(facts)}{hint}"
    if facts.partial_overflows:
        hint += (
            f". In {facts.partial_overflows} of them a part of the gradients was inf "
            "or NaN, and left out"
        )
    if facts.policy and facts.policy.loss_never_given:
        hint += (
            ". Spikes are judged by the gradient norm alone: pass value=loss to the "
            "optimizer's update to judge the loss too"
        )
    if not facts.saw_params:
        hint = f"; the parameters were not looked at{hint}"
    hint += "" if has_sunk else _started_high(facts)
    return f"{_skips(facts)}{facts.at_scale}{hint}"


# A run that is compared with another one is no longer than this.
_START = 100


def _started_high(facts: Facts) -> str:
    """Where the scale should have started, if that alone has cost several steps."""
    known, backoff = facts.scaler, facts.scaler.backoff_factor
    is_all = facts.skips_by == {SkipReason.GRADIENTS: facts.skips}
    if not (backoff and is_all and facts.skips >= 5 and facts.steps <= _START):
        return ""
    start = facts.loss_scale / backoff**facts.skips  # if it has not grown since
    # Set by hand: the scaler itself puts it nowhere above its maximum.
    is_too_high = (
        start > (facts.max_scale or math.inf)
        and known.backoff_interval == 1
        and facts.steps <= (known.growth_interval or 0)
    )
    if facts.partial_overflows or not (start == known.init_scale or is_too_high):
        return ""
    return (
        f". All {facts.skips} skips brought the scale from {format_scale(start)} to "
        f"{format_scale(facts.loss_scale)}: start there; print(jls.calibrate("
        f"{_arguments(facts)})) says where"
    )


def _steps(facts: Facts) -> str:
    return f"{facts.steps} step{'' if facts.steps == 1 else 's'}"


def _skips(facts: Facts) -> str:
    was = "was" if 1 in (facts.skips, facts.steps) else "were"
    return f"{facts.skips} of {_steps(facts)} {was} skipped so far"
