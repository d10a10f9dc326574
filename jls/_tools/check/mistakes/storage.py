# SPDX-License-Identifier: Apache-2.0
"""What stands still in a good step, since float16 or bfloat16 rounds it away."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jls._applied import OF_UPDATES, Way, ways_of
from jls._program.places import place_of
from jls._program.products import products_in
from jls._tools.check.faults import Trying
from jls._tools.check.findings import Finding, Found, Note
from jls._tools.check.good_steps import Good
from jls._tools.check.leaves import as_numpy
from jls._tools.check.runs import Run, Trial
from jls._tools.check.subject import Subject
from jls._tools.reading.reading import Reading

_WRITE = "Write jls.bfloat16_params(inner) inside the wrapper"
# The fields of optax's states that hold second moments.
_SECOND = {"nu", "exp_avg_sq"}
# So large that no gradient counts beside it.
_LARGE = 2.0**60
# So many numbers are not all those of a narrower dtype by chance.
_MANY_NUMBERS = 8


def note_still(good: Good) -> Trying[None]:
    """Notes updates that are lost, and second moments that cannot fall."""
    subject, good_run = good.subject, good.run
    yield from _note_rounded(subject, good_run)
    inside = [i for i in subject.inside if _SECOND & set(subject.items[i].path)]
    params = _in_bfloat16(good_run.before, subject.all_params)
    moments = _in_bfloat16(good_run.before, inside)
    others = subject.carried.compared - subject.all_params - subject.inside
    averages = _in_bfloat16(good_run.before, others - subject.frozen)
    if subject.program.has_bfloat16_params:
        if subject.reading is None:
            return
        ways = _ways(subject, subject.reading)
        averages += [i for i in params if ways.get(i) is Way.FOLLOWS]
        known = {*averages, *(i for i, way in ways.items() if way in OF_UPDATES)}
        params = [i for i in params if i not in known]
        moments = []
        yield from _note_wide_products(subject.reading)
    yield from _note_narrow_sums(subject)
    lost = yield from _share_lost(good_run, params)
    if lost >= 0.01:
        share = f"{100 * lost:.0f} % of the updates are lost"
        yield Note(
            f"{share}: in bfloat16 less than 1/512 of a parameter changes nothing "
            f"({subject.names(params)}). {_WRITE}: then they move.",
            doubt=share if lost >= 0.5 else "",
        )
    lost = yield from _share_lost(good_run, averages)
    if lost >= 0.5:
        yield Note(
            f"{100 * lost:.0f} % of the changes of {subject.names(averages)} are lost: "
            "in bfloat16 an average, or a network that follows another, stands still. "
            "Keep it in float32, as target = jls.master_params(params, opt_state) "
            "makes it, or as jls.params_ema in the optimizer."
        )
    still = (yield from _that_cannot_fall(good_run, moments)) if moments else []
    if still:
        yield Note(
            f"The second moment cannot fall: {subject.names(still)}, in bfloat16, "
            "decays by less than half a unit in a step, as with b2=0.999. "
            f"{_WRITE}: then it falls."
        )


def _note_rounded(subject: Subject, good_run: Run) -> Found:
    """Notes float32 parameters that come back as numbers of a narrower dtype."""
    for dtype in (jnp.bfloat16, jnp.float16):
        rounded = [i for i in subject.all_params if _is_rounded(good_run, i, dtype)]
        if rounded:
            name = jnp.dtype(dtype).name
            yield Note(
                f"The step rounds {subject.names(rounded)} to {name}, so small updates "
                "are lost. Keep parameters in float32: compute_dtype= casts them where "
                "products take them.",
                doubt=f"the new parameters are rounded to {name}",
            )
            return


def _is_rounded(run: Run, leaf: int, dtype: Any) -> bool:
    before, after = run.before[leaf], run.after[leaf]
    if after.dtype != np.float32:
        return False
    moved = np.unique(after[after != before])
    with np.errstate(over="ignore", invalid="ignore"):
        is_same = moved.astype(dtype).astype(np.float32) == moved
    return moved.size >= _MANY_NUMBERS and bool(np.all(is_same))


def _note_wide_products(reading: Reading) -> Found:
    """Notes that none is half, though the parameters are stored in bfloat16."""
    dtypes = {x.dtype for x in products_in(reading.main)}
    floats = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    if dtypes and all(jnp.finfo(x).bits >= 32 for x in floats):
        yield Note(
            "The parameters are bfloat16, and all products are float32. If they are to "
            "be half too: compute_dtype=jnp.bfloat16."
        )


def _note_narrow_sums(subject: Subject) -> Found:
    """Notes gradients of bfloat16 parameters that add up in bfloat16.

    Those of a lookup, by a scatter; those of what a loop shares, in its carry.
    """
    values = [subject.items[i].value for i in subject.all_params]
    narrow = [x for x in values if getattr(x, "dtype", None) == jnp.bfloat16]
    shapes = {x.shape for x in narrow}
    if subject.reading is None or not shapes:
        return

    def is_narrow(atom):
        aval = atom.aval
        is_one = getattr(aval, "dtype", None) == jnp.bfloat16
        return is_one and aval.shape in shapes

    for frame, index, equation in subject.reading.main.equations():
        name = equation.primitive.name
        carried = frame.jaxpr.invars if frame.kind == "scan" else ()
        is_sum = name == "scatter-add" or (
            name == "add_any" and any(x is y for x in equation.invars for y in carried)
        )
        if is_sum and is_narrow(equation.outvars[0]):
            place = place_of(frame.site_of(index))
            where = f" ({place})" if place.file else ""
            yield Note(
                f"Gradients of bfloat16 parameters add up in bfloat16{where}: small "
                "ones are lost beside their sum. Let jls.value_and_grad differentiate "
                "with the state of a jls.bfloat16_params, or widen the parameters: "
                "jax.grad(loss_fn)(jls.master_params(params, opt_state), batch)."
            )
            return


def changed_updates(subject: Subject) -> list[int]:
    """The parameters of a `jls.bfloat16_params` that take others than its updates."""
    if subject.reading is None or not subject.program.has_bfloat16_params:
        return []
    ways = _ways(subject, subject.reading)
    return [i for i in sorted(subject.trained) if ways.get(i) is Way.CHANGED]


def _ways(subject: Subject, reading: Reading) -> dict[int, Way]:
    """What carried bfloat16 leaves have to do with updates of `bfloat16_params`."""
    ways = ways_of(reading.traced.program)
    dtypes = {i: getattr(x.value, "dtype", None) for i, x in enumerate(subject.items)}
    places = subject.places.items()
    return {i: ways[n] for i, n in places if dtypes[i] == jnp.bfloat16}


def _in_bfloat16(carried: Mapping[int, Any], leaves: Iterable[int]) -> list[int]:
    """Of some leaves those that are bfloat16 and come back."""
    known = (i for i in sorted(leaves) if i in carried)
    return [i for i in known if carried[i].dtype == jnp.bfloat16]


def _share_lost(good_run: Run, params: list[int]) -> Trying[float]:
    """Of the changes that float32 leaves would take, the share that is lost."""
    if not params:
        return 0.0
    leaves = list(good_run.given)
    for i in params:
        leaves[i] = as_numpy(leaves[i]).astype(np.float32)
    wide = yield Trial(leaves, "a good step of float32 parameters")
    if isinstance(wide, Finding):  # it is for bfloat16 alone, or no run was left
        return 0.0
    moved = lost = 0
    for i in params:
        has_moved = wide.after[i] != wide.before[i]
        moved += np.sum(has_moved)
        lost += np.sum(has_moved & (good_run.after[i] == good_run.before[i]))
    return 0.0 if wide.skipped_once or not moved else float(lost / moved)


def _that_cannot_fall(good_run: Run, moments: list[int]) -> Trying[list[int]]:
    """Those of the moments that stay what they are, far above any gradient."""
    changes = dict.fromkeys(moments, _LARGE)
    run = yield Trial(good_run.given, "a good step with large moments", changes)
    if isinstance(run, Finding) or run.skipped_once:
        return []
    return [i for i in moments if np.array_equal(run.after[i], run.before[i])]
