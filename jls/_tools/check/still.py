# SPDX-License-Identifier: Apache-2.0
"""What stands still in a good step, since bfloat16 rounds it away."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jls._applied import OF_UPDATES, Way, ways_of
from jls._state import rounds_bfloat16
from jls._tools.check.leaves import as_numpy
from jls._tools.check.runs import Run, Runner
from jls._tools.check.subject import Subject
from jls._tools.reading.reading import is_a_result

_WRITE = "Write jls.bfloat16_params(inner) inside the wrapper"
# The fields of optax's states that hold second moments.
_SECOND = {"nu", "exp_avg_sq"}
# So large that no gradient counts beside it.
_LARGE = 2.0**60


def note_still(
    runner: Runner, subject: Subject, good_run: Run, notes: list[str]
) -> None:
    """Notes updates that are lost, and second moments that cannot fall."""
    inside = [i for i in subject.inside if _SECOND & set(subject.items[i].path)]
    params = _in_bfloat16(good_run.before, subject.all_params)
    moments = _in_bfloat16(good_run.before, inside)
    if not (params or moments):
        return
    call = runner.arguments.rebuild(runner.start)
    if rounds_bfloat16((call.args, call.kwargs)):
        if subject.reading is None:
            return
        ways = _ways(subject)
        params = [i for i in params if ways.get(i, Way.NONE) not in OF_UPDATES]
        moments = []
    lost = _share_lost(runner, good_run, params) if params else 0.0
    if lost >= 0.01:
        notes.append(
            f"{100 * lost:.0f} % of the updates are lost: in bfloat16 less than 1/512 "
            f"of a parameter changes nothing ({subject.names(params)}). {_WRITE}: then "
            "they move."
        )
    still = _that_cannot_fall(runner, good_run, moments) if moments else []
    if still:
        notes.append(
            f"The second moment cannot fall: {subject.names(still)}, in bfloat16, "
            "decays by less than half a unit in a step, as with b2=0.999. "
            f"{_WRITE}: then it falls."
        )


def changed_updates(subject: Subject) -> list[int]:
    """The parameters of a `jls.bfloat16_params` that take others than its updates."""
    if subject.reading is None:
        return []
    ways = _ways(subject)
    return [i for i in sorted(subject.trained) if ways.get(i) is Way.CHANGED]


def _ways(subject: Subject) -> dict[int, Way]:
    """What carried bfloat16 leaves have to do with updates of `bfloat16_params`."""
    assert subject.reading is not None
    traced = subject.reading.traced
    found = iter(ways_of(traced.program))
    by_path = [
        {x.path: next(found) for x in items if is_a_result(x)}
        for items in (traced.outputs, traced.objects)
    ]
    ways = subject.carried.pick(subject.items, *by_path)
    values = {i: subject.items[i].value for i in ways}
    return {i: x for i, x in ways.items() if values[i].dtype == jnp.bfloat16}


def _in_bfloat16(carried: Mapping[int, Any], leaves: Iterable[int]) -> list[int]:
    """Of some leaves those that are bfloat16 and come back."""
    known = (i for i in sorted(leaves) if i in carried)
    return [i for i in known if carried[i].dtype == jnp.bfloat16]


def _share_lost(runner: Runner, good_run: Run, params: list[int]) -> float:
    """Of the updates that a float32 parameter would take, the share that is lost."""
    leaves = list(good_run.given)
    for i in params:
        leaves[i] = as_numpy(leaves[i]).astype(np.float32)
    try:
        wide = runner.run(leaves, "a good step of float32 parameters")
    except Exception:  # it is for bfloat16 alone, or no run was left
        return 0.0
    moved = lost = 0
    for i in params:
        has_moved = wide.after[i] != wide.before[i]
        moved += np.sum(has_moved)
        lost += np.sum(has_moved & (good_run.after[i] == good_run.before[i]))
    return 0.0 if wide.any_skipped() or not moved else float(lost / moved)


def _that_cannot_fall(runner: Runner, good_run: Run, moments: list[int]) -> list[int]:
    """Those of the moments that stay what they are, far above any gradient."""
    changes = dict.fromkeys(moments, _LARGE)
    try:
        run = runner.run(good_run.given, "a good step with large moments", changes)
    except Exception:  # no run was left
        return []
    if run.any_skipped():
        return []
    return [i for i in moments if np.array_equal(run.after[i], run.before[i])]
