# SPDX-License-Identifier: Apache-2.0
"""A step that does not train, is compiled again and again, or waits for the device."""

import functools
import operator
from collections import Counter

import numpy as np

from jls._applied import ALL_INSIDE
from jls._mistakes import is_jit_disabled
from jls._program.control import Site
from jls._program.facts import ANY, Number
from jls._program.places import place_of
from jls._scopes import GRADIENTS
from jls._text import join
from jls._tools.check.faults import Faults
from jls._tools.check.findings import Found, Note, broken, right, untried
from jls._tools.check.good_steps import Good
from jls._tools.check.mistakes.mistake import Mistake, place_of_update
from jls._tools.check.mistakes.storage import changed_updates
from jls._tools.check.subject import Subject
from jls._tools.reading.reading import Reading
from jls._tools.reading.trace import Traced

_no_step = functools.partial(
    broken, ends="a good step does not change all that it should"
)


def _read_no_step(subject: Subject) -> Found:
    reading = subject.reading
    if reading is None:
        return
    for k in subject.returned:
        yield from _read_forgotten(subject, reading, k)
        yield from _read_dropped(subject, reading, k)
    yield from _note_idle(subject, reading)
    yield from _note_subtracted(reading)
    yield from _note_added_twice(reading)


def _read_forgotten(subject: Subject, reading: Reading, k: int) -> Found:
    """Whether updates reach nothing, and the parameters come back as they were."""
    items, carried, inside = subject.items, subject.carried, subject.inside
    states = {carried.sources.get(i, items[i].path) for i in inside}
    results = (reading.outputs | reading.objects).items()
    returned = [x.now for path, x in results if path not in states]
    trained, bits = reading.given(k, GRADIENTS), reading.bits_of_calls(k)
    needs = functools.reduce(operator.or_, (x.value.depends for x in trained), 0)
    leaves = [reading.leaf_of(x) for x in returned]
    stays = {i for i in leaves if i is not None} - inside
    others = [x for x, i in zip(returned, leaves, strict=True) if i is None]
    if any(x.follows & bits for x in returned) or any(
        # By way of integers, which follow nothing.
        not x.follows & reading.bits_of_updates and not needs & ~x.depends
        for x in others
    ):
        return
    shapes = Counter(x.atom.aval.shape for x in trained)
    if shapes and shapes <= Counter(np.shape(items[i].value) for i in stays):
        yield _no_step(
            "the updates reach nothing that comes back, and the parameters come back "
            "as they were",
            place_of_update(reading.calls[k][0].site),
        )


def _read_dropped(subject: Subject, reading: Reading, k: int) -> Found:
    """Whether the inner optimizer's state is not carried on from step to step."""
    scale, results = subject.scales[k], subject.results
    if subject.all_in(scale.own, subject.frozen):
        return  # all of the state is the old one
    inner = (*scale.path, "inner_state")
    replaced = [reading.traced.inputs[n] for n in sorted(reading.flow.replaced)]
    state = [
        i
        for i in replaced
        if i in results and subject.items[i].path[: len(inner)] == inner
    ]
    ndim = np.ndim(subject.items[scale.at].value)
    # A learning rate or a count may be set in each step.
    state = [i for i in state if np.ndim(subject.items[i].value) > ndim] or state
    is_old = [reading.leaf_of(results[i].now) == i for i in state]
    is_number = [isinstance(results[i].now.known, Number) for i in state]
    if state and all(map(operator.or_, is_old, is_number)):
        how = "comes back as it was" if all(is_old) else "is set back"
        yield _no_step(
            f"the state of the inner optimizer {how} in each step: "
            f"{subject.names(state)}",
            write="return the opt_state that optimizer.update returns, all of it",
        )


def why_idle(subject: Subject) -> dict[int, tuple[str, str]]:
    """Why gradients or updates are 0, whatever the parameters are, and what to write.

    By wrapper. Under one of several that may be meant: its parameters are frozen.
    """
    reading, found = subject.reading, dict[int, tuple[str, str]]()
    if reading is None:
        return found
    for k in subject.returned:
        idle, bits = _idle_gradients(reading, k), reading.bits_of_calls(k)
        updates = [x for _, _, x in reading.flow.added.values() if x.follows & bits]
        if idle and all(idle):
            found[k] = (
                "the gradients are 0, whatever the parameters are: the loss does not "
                "depend on them, or only behind jax.lax.stop_gradient",
                "a loss_fn that returns the loss of the params that it is given, with "
                "no stop_gradient around all of them",
            )
        elif updates and all(x.degree == ANY for x in updates):
            found[k] = (
                "the updates are 0, whatever the gradients are: the learning rate is 0",
                "a learning rate over 0, or a schedule that gives one",
            )
    return found


def is_idle(subject: Subject) -> bool:
    """Whether no wrapper trains anything.

    A factor of 0 is read, which may also be inf or NaN: then a good step shows that.
    """
    found = why_idle(subject)
    return bool(found) and len(found) == len(subject.returned)


def _idle_gradients(reading: Reading, k: int) -> list[bool]:
    return [x.value.degree == ANY for x in reading.given(k, GRADIENTS)]


def _note_idle(subject: Subject, reading: Reading) -> Found:
    found = why_idle(subject)
    for k in subject.returned:
        idle = _idle_gradients(reading, k)
        if k not in found and any(idle):
            yield Note(
                f"The gradients of {sum(idle)} of {len(idle)} arrays are 0, whatever "
                "the parameters are: the loss does not depend on them, or only behind "
                "jax.lax.stop_gradient."
            )
    if not is_idle(subject):
        for k, (evidence, _) in found.items():
            yield Note(doubt=f"with {reading.scales[k].name} {evidence}")


def _where(site: Site) -> str:
    """The place of an operation, without its name."""
    return str(place_of(site)._replace(operation=""))


def _note_added_twice(reading: Reading) -> Found:
    """Notes that an update is added to what it was added to before."""
    added = reading.flow.added
    for site, other, update in added.values():
        before = added.get(other.site.indices) if other.site else None
        if before is None or before[0].indices == site.indices:
            continue
        _, _, first = before
        if first.site and update.site and first.site.indices == update.site.indices:
            yield Note(
                "The updates are added to the parameters twice, the second time"
                f"{_where(site)}: the learning rate is twice what it says.",
                doubt="the updates are added twice",
            )
            return


def _note_subtracted(reading: Reading) -> Found:
    """Notes that updates are subtracted: optax has made them negative, to be added.

    Right where the user has changed the sign of the gradients too.
    """
    gradients = [x for call in reading.checked for x in call.values(GRADIENTS)]
    if any(x.site and x.site.equation.primitive.name == "neg" for x in gradients):
        return
    results = (x.now.site for x in (reading.outputs | reading.objects).values())
    returned = {site.indices for site in results if site}
    for site, updates in reading.flow.subtracted:
        if updates.follows & reading.bits_of_updates and site.indices in returned:
            yield Note(
                "The updates of optax are negative already, but subtracted"
                f"{_where(site)}. Write optax.apply_updates(params, updates).",
                doubt="the updates are subtracted",
            )
            return


def _judge_no_step(good: Good) -> Found:
    subject = good.subject
    if not good.trains:
        evidence, write = "a good step changed nothing that the step carries", ""
        if not good.run.keeps(subject.carried.compared):
            evidence, write = next(iter(why_idle(subject).values()))
        yield _no_step(evidence, write=write)
        return
    is_broken = not good.why_unmoved and _returns_old_state(good)
    if is_broken:
        yield _no_step(
            "the parameters moved, but nothing in the optimizer state did: the step "
            "seems to return the old state"
        )
    changed = changed_updates(subject)
    if changed:
        yield _no_step(
            "the updates of bfloat16 parameters are rounded away: what "
            "jls.bfloat16_params made is changed before it is applied "
            f"({subject.names(changed)}). {ALL_INSIDE}"
        )
    if good.why_unmoved and not (is_broken or changed):
        yield untried(good.why_unmoved)
        yield Note(doubt=good.doubt)
    yield right()


def _returns_old_state(good: Good) -> bool:
    """Whether no good step changed an optimizer state that counts its calls."""
    subject = good.subject
    scales, reading = subject.scales, subject.reading
    if not all(x.counters for x in scales) or not subject.own <= subject.carried.leaves:
        return False
    if reading is None:
        return all(run.keeps(subject.own) for run in good.steps)
    return any(scales[k].counters["steps"] in subject.frozen for k in reading.calls)


_NNX_STEP = (
    "step = nnx.jit(jls.train_step(loss_fn)); under jax.jit return model and optimizer "
    "from the step, and use what it returns"
)
NO_STEP = Mistake(
    "no step",
    right="a good step changes what the step carries",
    write="return optax.apply_updates(params, updates) and the new opt_state from the "
    "step",
    write_with={"nnx": _NNX_STEP, "nnx without a wrapper": _NNX_STEP},
    read=_read_no_step,
    of_good_steps=_judge_no_step,
)


def _judge_retraced(good: Good) -> Found:
    if not good.trains:
        return
    later = [n for n, run in enumerate(good.steps, 1) if run.compiled and n > 2]
    if later:
        ends = "every call compiles" if good.always_compile else ""
        evidence = f"good step {later[0]} compiled the step once more"
        yield broken(evidence, ends=ends)
    yield from _look_for_counting_numbers(good)


def _look_for_counting_numbers(good: Good) -> Found:
    """Breaks "retraced" if a static number counts: each call is compiled for it."""
    if good.in_a_row is None:
        return
    series, compiled = good.in_a_row
    for path in series[0]:
        values = [numbers.get(path) for numbers in series]
        if len(set(values)) == len(values) and compiled[-1]:
            yield broken(
                f"{join(*path)} is a static number that counts, {values[0]}, "
                f"{values[1]}, {values[2]}: each call is compiled anew for it"
            )
        elif values[0] != values[1] and compiled[1] and not compiled[-1]:
            yield Note(
                f"The second call compiles the step once more: {join(*path)} is a "
                f"static number, {values[0]}, that comes back as {values[1]}."
            )


def _is_not_retraced(faults: Faults) -> Found:
    del faults
    if is_jit_disabled():
        yield untried("jax.disable_jit is on: nothing is compiled")
    yield right()


RETRACED = Mistake(
    "retraced",
    right="the third good step was not compiled again",
    write="step = jax.jit(train_step) once, outside the loop; numbers that change go "
    "in as arrays",
    of_good_steps=_judge_retraced,
    of_faults=_is_not_retraced,
)


def _read_sync(subject: Subject) -> Found:
    last = subject.program.last
    if last.reads:
        yield broken(f"the step reads a value of the device ({last.reads})")
    elif isinstance(last, Traced) or subject.program.is_compiled:
        yield right()
    else:
        yield untried(last.reason)


HOST_SYNC = Mistake(
    "host sync",
    right="the step reads no value at the host",
    write="return the value from the step, and read it every so many steps: "
    "jls.metrics(opt_state), one jax.device_get",
    read=_read_sync,
)
