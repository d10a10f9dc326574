# SPDX-License-Identifier: Apache-2.0
"""What stands still in a good step, since float16 or bfloat16 rounds it away."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jls._state import rounds_bfloat16
from jls._tools.check.findings import Findings
from jls._tools.check.leaves import as_numpy
from jls._tools.check.runs import Run, Runner
from jls._tools.check.subject import Subject

_WRITE = "Write jls.bfloat16_params(inner) inside the wrapper"
# The fields of optax's states that hold second moments.
_SECOND = {"nu", "exp_avg_sq"}
# So large that no gradient counts beside it.
_LARGE = 2.0**60
# So many numbers are not all those of a narrower dtype by chance.
_MANY_NUMBERS = 8


def note_still(
    runner: Runner, subject: Subject, good_run: Run, findings: Findings
) -> None:
    """Notes updates that are lost, and second moments that cannot fall."""
    _note_rounded(subject, good_run, findings)
    notes = findings.notes
    inside = [i for i in subject.inside if _SECOND & set(subject.items[i].path)]
    params = _in_bfloat16(good_run.before, subject.all_params)
    moments = _in_bfloat16(good_run.before, inside)
    if not (params or moments):
        return
    call = runner.arguments.rebuild(runner.start)
    if rounds_bfloat16((call.args, call.kwargs)):
        return
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


def _note_rounded(subject: Subject, good_run: Run, findings: Findings) -> None:
    """Notes float32 parameters that come back as numbers of a narrower dtype."""
    for dtype in (jnp.bfloat16, jnp.float16):
        rounded = [i for i in subject.all_params if _is_rounded(good_run, i, dtype)]
        if rounded:
            name = jnp.dtype(dtype).name
            findings.doubts.append(f"the new parameters are rounded to {name}")
            findings.notes.append(
                f"The step rounds {subject.names(rounded)} to {name}, so small updates "
                "are lost. Keep parameters in float32: compute_dtype= casts them where "
                "products take them."
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
