# SPDX-License-Identifier: Apache-2.0
"""The verdicts of `jls.health`: when each holds, and its sentence for a newcomer.

Each verdict is a row of `TABLE`: its name, when it holds, the fact in a sentence, and
the section of a page that says what to do. The first row that holds is returned.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Literal, NamedTuple, get_args

from jls._applied import ALL_INSIDE
from jls._text import format_scale, listed, quantity, scale_in_words
from jls._types import COUNTED_IN, SIGNALS, SkipReason

# In the order in which they are tried.
Verdict = Literal[
    "poisoned",
    "bad scale",
    "stalled",
    "at floor",
    "skipping",
    "rounded away",
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


class Facts(SimpleNamespace):
    """The facts of a run, by name: what `jls.health` returns as numbers, and more.

        nonfinite_leaves    of the last skipped step, by name; None if not looked at
        all_leaves_finite   of the gradients of the last skipped step
        unnamed_leaves      how many leaves were not finite, and of how many, where no
                            names are known
        strays              what `jls.bfloat16_params` makes never arrives
        is_doubted          the poisoned leaves hold only -inf, and may be masks
        saw_params          the parameters were looked at, under whatever name
        is_train_state      the state is a Flax `TrainState`
        is_nnx              the state or the parameters are those of an NNX model
        sums_squares        the check is the sum of squares of a clip: what is bad may
                            have no bad leaf
        scaler              hyperparameters of the scaler, if the optimizer is known
        max_consecutive_skips, max_small   the caller's limits

    `small` and `dtype` are only there with gradients, `tokens`, `steady_share` and
    `loss_never_given` only under `jls.spikes` or a preset like it.
    """

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
        others = {x: getattr(self, name, 0) for x, name in COUNTED_IN.items()}
        gradients = max(0, self.skips - sum(others.values()))
        counts = {SkipReason.GRADIENTS: gradients} | others
        return {reason: count for reason, count in counts.items() if count > 0}

    def is_often(self, count: int) -> bool:
        """Whether something happens too often to be the start of a run, or chance."""
        # A scale that is right skips one step in hundreds, never a quarter of them.
        patience = COMING_DOWN * max(1, self.scaler.get("backoff_interval") or 1)
        return count > patience and 4 * count >= self.steps

    @property
    def has_policy(self) -> bool:
        """Whether the run has a spike policy of jls."""
        return hasattr(self, "tokens")

    @property
    def is_spiking(self) -> bool:
        """Whether more steps are spikes than in a steady run, by more than chance.

        What was skipped proves nothing: the bound is for values that enter the window.
        Without a budget nothing is let through: then `steady_share` is 1 unless skipped
        values enter too.
        """
        if not self.has_policy:
            return False
        count = self.spikes_found
        if self.tokens < math.inf:
            count -= self.spikes
        count = max(0, count)
        # Less two deviations of a count: what chance may add.
        return count - 2 * math.sqrt(count) > self.steady_share * self.steps

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


class VerdictRow(NamedTuple):
    """A verdict: when it holds, and the fact of it in a sentence."""

    verdict: Verdict
    holds: Callable[[Facts], bool]
    fact: Callable[[Facts], str]

    @property
    def anchor(self) -> str:
        """The section on `_PAGE` that says what to do."""
        return {"spike": "spiking"}.get(self.verdict, self.verdict.replace(" ", "-"))


_PAGE = "docs/questions/healthy_run.md"


def diagnose(facts: Facts) -> tuple[Verdict, str]:
    """The first verdict of the table that holds, and its sentence."""
    row = next(row for row in TABLE if row.holds(facts))
    sentences = [row.fact(facts)]
    # A loss that is not finite spoils all gradients, and poison is in no gradient: the
    # names of gradients would say nothing.
    others = None, SkipReason.LOSS, SkipReason.SPIKE, SkipReason.ATOMIC
    if facts.skipped_for not in others and row.verdict != "poisoned":
        sentences.append(_culprits(facts))
    if row.verdict != "poisoned":
        sentences.append(_masks(facts))
    if row.verdict not in ("bad scale", "at ceiling"):
        sentences.append(_above_ceiling(facts, "The"))
    if row.verdict != "ok":
        sentences.append(f"What to do: {_PAGE}#{row.anchor}")
    return row.verdict, " ".join(f"{text}." for text in sentences if text)


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
    holds, a_mask = ("holds", "a mask") if len(facts.masks) == 1 else ("hold", "masks")
    elements = quantity(sum(facts.masks.values()), "element")
    note = f"{listed(list(facts.masks))} {holds} -inf in {elements}, taken for {a_mask}"
    if facts.skipped:
        note += ": if not on purpose, no step can cure that"
    return note


# By the tree that inf or NaN is in: its name in a sentence.
_TREES = {
    "params": "the parameters",
    "opt_state": "the optimizer's state",
    "carried": "the carried state",
}


def _poisoned(facts: Facts) -> str:
    found = [
        f"{_TREES[tree]} ({listed(names)})"
        for tree, names in (facts.poisoned_leaves or {}).items()
        if names
    ]
    where = " and in ".join(found)
    if facts.is_doubted:
        return (
            f"-inf is in {where}, and the last {facts.consecutive_skips} steps were "
            "all skipped. Unless it is a mask, no step can cure that"
        )
    return f"inf or NaN is in {where}. No step can cure that"


def _stalled(facts: Facts) -> str:
    reason = facts.last_skip_reason
    because = f", the last one for its {reason.name.lower()}" if reason else ""
    if reason == SkipReason.SPIKE:
        because = f", the last one as a spike ({_over(facts)})"
    if reason == SkipReason.ATOMIC:
        because = ", the last one with another optimizer's, in a block of jls.atomic"
    return (
        f"the last {facts.consecutive_skips} steps were all skipped{because}, and "
        f"nothing is being learned{facts.at_scale}"
    )


def _bad_gradients_of_last(facts: Facts) -> str:
    if facts.has_bad_norm:
        return "the squares of the last step's gradients overflowed"
    bad = "inf, NaN, or over 1.8e19 in norm" if facts.sums_squares else "inf or NaN"
    return f"the gradients of the last step were {bad}"


def ask_for_half(facts: Facts, verdict: Verdict) -> str:
    """The line to write that says how much of a step is half, which no state knows.

    A run that is well for long needs it no more.
    """
    if not facts.moves or (verdict == "ok" and facts.steps > _EARLY):
        return ""
    return f"Half precision? print(jls.check_step({_arguments(facts)}))"


def _arguments(facts: Facts) -> str:
    """What a tool takes that reads the step."""
    if facts.is_nnx:
        return "step, model, optimizer, batch"
    if facts.is_train_state:
        return "step, state, batch"
    return "step, params, opt_state, batch"


def _at_floor(facts: Facts) -> str:
    return (
        f"{_bad_gradients_of_last(facts)}, and the loss scale of {facts.scale} is at "
        f"its floor ({facts.consecutive_skips} skipped in a row), so no lower scale "
        "will help"
    )


_REASONS = {
    SkipReason.GRADIENTS: "for their gradients",
    SkipReason.LOSS: "for their loss",
    SkipReason.UPDATES: "for their updates",
    SkipReason.SPIKE: "as spikes",
}


def _skipping(facts: Facts) -> str:
    counts = ", ".join(
        f"{n} {_REASONS[reason]}" for reason, n in facts.skips_by.items()
    )
    return (
        f"{_skips(facts)}, {counts}{facts.at_scale}. A healthy run skips few steps"
        f"{' once its scale is found' if facts.has_scale else ''}"
    )


def _nonfinite_loss(facts: Facts) -> str:
    cure = ", which no loss scale can cure" if facts.has_scale else ""
    return (
        f"the forward loss of the last step was inf or NaN{cure} "
        f"({facts.nonfinite_losses} of {_steps(facts)} so far)"
    )


def _nonfinite_update(facts: Facts) -> str:
    return (
        "the gradients of the last step were finite, but the optimizer turned them "
        "into inf or NaN, or into an update too large for its parameter's dtype "
        f"({facts.nonfinite_updates} of {_steps(facts)} so far)"
    )


def _calibrating(facts: Facts) -> str:
    skipped = f"all {facts.steps} steps so far were skipped"
    if facts.steps == 1:
        skipped = "the first step was skipped"
    it = f" while the loss scale comes down, to {facts.scale} now. That"
    if facts.min_scale is None:
        it = f"; the loss scale is {facts.scale}. If it is still coming down, that"
    return f"{skipped}{it} is normal for the first ten or so{_where_to_start(facts)}"


def _where_to_start(facts: Facts) -> str:
    """How to lose none of the first steps, from the third on."""
    if facts.steps < 3:
        return ""
    return (
        f". print(jls.calibrate({_arguments(facts)})) says where to start: then no "
        "batch is lost"
    )


def _spiking(facts: Facts) -> str:
    return (
        f"{facts.spikes_found} of {_steps(facts)} were spikes, more than noise alone "
        f"explains ({facts.spikes} skipped){_spent(facts)}"
    )


def _spike(facts: Facts) -> str:
    return (
        f"the last step was skipped: {_over(facts)} ({facts.spikes} of "
        f"{_steps(facts)} so far){_spent(facts)}"
    )


def _spent(facts: Facts) -> str:
    """Whether spikes are let through; a budget of 0 lets all through."""
    if not facts.has_policy or facts.tokens >= 1 or not facts.spikes:
        return ""
    return ". The budget is spent: spikes are let through for now"


def _over(facts: Facts) -> str:
    """Which signal was over its limit, as far as it is known."""
    texts = []
    for signal in SIGNALS if facts.has_policy else ():
        names = f"judged_{signal}", f"limit_{signal}"
        value, limit = (getattr(facts, name) for name in names)
        if value > limit:
            name = "gradient norm" if signal == "norm" else signal
            texts.append(f"its {name} of {value:.4g} was over the limit of {limit:.4g}")
    return " and ".join(texts) or "the spike policy wanted it"


def _recovering(facts: Facts) -> str:
    what = f"{_bad_gradients_of_last(facts)}, and it was skipped"
    if facts.skipped_for == SkipReason.NONE:
        what = "the last step was skipped"
    if facts.skipped_for == SkipReason.ATOMIC:
        what = (
            "another optimizer in the block of jls.atomic skipped its last step, and "
            "this one's was skipped with it"
        )
    never_moves = ", and never moves" if facts.is_static and facts.has_scale else ""
    return (
        f"{what}, {facts.consecutive_skips} in a row{facts.at_scale}{never_moves}. "
        f"{_skips(facts)}"
    )


def _dropping(facts: Facts) -> str:
    floor = ", its floor" if facts.moves and facts.is_at_floor else ""
    return (
        f"{facts.partial_overflows} of {_steps(facts)} were applied without a part of "
        "their gradients, which was inf or NaN: nothing is learned from it; the loss "
        f"scale is {facts.scale}{floor}"
    )


def _underflow(facts: Facts) -> str:
    if facts.all_zero:
        return f"all gradients are 0, or too small for {facts.dtype}"
    return (
        f"{facts.small:.0%} of the gradients are too small for {facts.dtype} at the "
        f"loss scale of {facts.scale}, and lose precision or vanish"
    )


def _at_ceiling(facts: Facts) -> str:
    never = "" if facts.skips else ". No step was ever skipped"
    return _above_ceiling(facts) or (
        f"the loss scale of {facts.scale} can grow no further{never}"
    )


def _above_ceiling(facts: Facts, the: str = "the") -> str:
    """That the scale is where the scaler never puts it."""
    most = facts.max_scale
    if most is None or not facts.moves or facts.loss_scale <= most:
        return ""
    return (
        f"{the} loss scale of {facts.scale} is above its maximum of "
        f"{scale_in_words(most)}: it was set by hand, or saved under another "
        "scaler. There it stays until it backs off, or would grow"
    )


def _ok(facts: Facts) -> str:
    hint = "" if facts.saw_params else "; the parameters were not looked at"
    if facts.has_policy and facts.spikes_found:
        counts = f"{facts.spikes_found} found, {facts.spikes} skipped"
        hint += f". Spikes: {counts}{_spent(facts)}"
    if facts.partial_overflows:
        hint += (
            f". In {facts.partial_overflows} of them a part of the gradients was inf "
            "or NaN, and left out"
        )
    if facts.has_policy and facts.loss_never_given:
        hint += (
            ". Spikes are judged by the gradient norm alone: pass value=loss to the "
            "optimizer's update to judge the loss too"
        )
    return f"{_skips(facts)}{facts.at_scale}{hint}{_started_high(facts)}"


# A run that is compared with another one is no longer than this; and how long it is
# asked whether anything is half.
_START, _EARLY = 100, 1000


def _started_high(facts: Facts) -> str:
    """Where the scale should have started, if that alone has cost several steps."""
    known, backoff = facts.scaler, facts.scaler.get("backoff_factor")
    is_all = facts.skips_by == {SkipReason.GRADIENTS: facts.skips}
    low = 1.0 if facts.min_scale is None else facts.min_scale
    if not (backoff and is_all and facts.skips >= 5 and facts.steps <= _START):
        return ""
    if facts.loss_scale <= low:  # the last resort, not where to start
        return ""
    start = facts.loss_scale / backoff**facts.skips  # if it has not grown since
    # Set by hand: the scaler itself puts it nowhere above its maximum.
    is_too_high = (
        start > (facts.max_scale or math.inf)
        and known["backoff_interval"] == 1
        and facts.steps <= (known["growth_interval"] or 0)
    )
    if facts.partial_overflows or not (start == known["init_scale"] or is_too_high):
        return ""
    return (
        f". All {facts.skips} skips brought the scale from {format_scale(start)} to "
        f"{format_scale(facts.loss_scale)}: start there, or where print(jls.calibrate("
        f"{_arguments(facts)})) says"
    )


def _steps(facts: Facts) -> str:
    return quantity(facts.steps, "step")


def _skips(facts: Facts) -> str:
    was = "was" if 1 in (facts.skips, facts.steps) else "were"
    return f"{facts.skips} of {_steps(facts)} {was} skipped so far"


TABLE: tuple[VerdictRow, ...] = (
    VerdictRow("poisoned", lambda f: f.poisoned, _poisoned),
    VerdictRow(
        "bad scale",
        lambda f: not 0 < f.loss_scale < math.inf,
        lambda f: f"the loss scale is {f.scale}, but must be finite and above 0",
    ),
    VerdictRow(
        "stalled", lambda f: f.consecutive_skips > f.max_consecutive_skips, _stalled
    ),
    VerdictRow(
        "at floor",
        lambda f: f.had_bad_gradients and f.moves and f.is_at_floor,
        _at_floor,
    ),
    # Above what is said of the last step alone, so that the verdict does not depend on
    # it.
    VerdictRow("skipping", lambda f: f.is_often(f.skips), _skipping),
    VerdictRow(
        "rounded away",
        lambda f: f.strays,
        lambda f: (
            "what jls.bfloat16_params makes never reaches the parameters: it is "
            "changed before it is applied, and rounded once more. Most of them stand "
            f"still. {ALL_INSIDE}: jls.bfloat16_params(optax.chain(...))"
        ),
    ),
    VerdictRow(
        "non-finite loss",
        lambda f: f.skipped_for == SkipReason.LOSS,
        _nonfinite_loss,
    ),
    VerdictRow(
        "non-finite update",
        lambda f: f.skipped_for == SkipReason.UPDATES,
        _nonfinite_update,
    ),
    VerdictRow(
        "calibrating",
        lambda f: f.had_bad_gradients and f.moves and f.skips == f.steps,
        _calibrating,
    ),
    VerdictRow("spiking", lambda f: f.is_spiking, _spiking),
    VerdictRow("spike", lambda f: f.skipped_for == SkipReason.SPIKE, _spike),
    VerdictRow("recovering", lambda f: f.skipped, _recovering),
    VerdictRow("dropping", lambda f: f.is_often(f.partial_overflows), _dropping),
    VerdictRow(
        "underflow",
        lambda f: hasattr(f, "small") and (f.all_zero or f.small > f.max_small),
        _underflow,
    ),
    VerdictRow(
        "no step",
        lambda f: f.steps == 0,
        lambda f: f"no step was made yet, so there is nothing to judge{f.at_scale}",
    ),
    VerdictRow("at ceiling", lambda f: f.moves and f.is_at_ceiling, _at_ceiling),
    VerdictRow("ok", lambda f: True, _ok),
)
