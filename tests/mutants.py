"""Faults of the core that a test must catch: `python tests/mutants.py [names...]`.

Each is planted alone, in a copy of the tree, and the tests that must catch it run until
the first one fails. A fault that SURVIVES is a promise without a test. At the end the
tests that failed run once more in a copy without a fault, where they must pass.

`tests/test_mutants.py` checks that the list fits the code. The code has moved on if it
fails: plant the fault anew where the code is now.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".*_cache", ".venv*", "__pycache__")
SECONDS = 600  # for the tests of one fault; to need more is to be caught
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
HEAD = "| fault | outcome | first test that fails | seconds |\n|---|---|---|---|"


class Fault(NamedTuple):
    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # the files that must catch it, the fastest first


LAWS = "tests/promises/test_scaler_laws.py"
STEP = "tests/promises/test_step.py"
PROMISES = "tests/promises/test_promises.py"
RUNS = "tests/promises/test_faults.py"
CALIBRATED = "tests/origin/test_calibrate.py"
REQUEUED = "tests/report/test_requeue.py"
ROLLBACK = "tests/promises/test_rollback.py"


REDUCE = [
    Fault(
        "max_abs drops the absolute value",
        "jls/_reduce.py",
        "(lax.abs(part), lax.ne(part, part))",
        "(part, lax.ne(part, part))",
        (PROMISES,),
    ),
    Fault(
        "all_finite looks at a sum, which may overflow",
        "jls/_reduce.py",
        '    return _by_platform(lax.stop_gradient(list(floats)), "finite")\n',
        "    return jnp.stack([jnp.isfinite(jnp.sum(widen(x))) for x in floats])\n",
        ("tests/test_reduce.py",),
    ),
    Fault(
        "a NaN is lost in the maximum",
        "jls/_reduce.py",
        "    largest, has_nan = _each(_max_and_nan, floats)\n"
        "    return jnp.where(has_nan, jnp.inf, largest)",
        "    largest, has_nan = _each(_max_and_nan, floats)\n    return largest",
        (STEP,),
    ),
    Fault(
        "the imaginary part is not looked at",
        "jls/_reduce.py",
        "parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]",
        "parts = [array.real]",
        ("tests/test_reduce.py",),
    ),
]

SCALERS = [
    Fault(
        "the scale grows a step late",
        "jls/_scalers/rule.py",
        "counts_towards_growth & is_due(state.finite_count, growth_interval)",
        "counts_towards_growth & (state.finite_count >= growth_interval)",
        (PROMISES, "tests/scalers/test_dynamic.py"),
    ),
    Fault(
        "the scale backs off a step late",
        "jls/_scalers/rule.py",
        "~finite & is_due(state.nonfinite_count, backoff_interval)",
        "~finite & (state.nonfinite_count >= backoff_interval)",
        (PROMISES, "tests/scalers/test_dynamic.py"),
    ),
    Fault(
        "a growth goes over the cap",
        "jls/_scalers/rule.py",
        "return jnp.minimum(loss_scale * f32(growth_factor), f32(max_scale))",
        "return loss_scale * f32(growth_factor)",
        (PROMISES,),
    ),
    Fault(
        "an overflow raises a scale that is below the floor",
        "jls/_scalers/rule.py",
        "backed_off = jnp.minimum(loss_scale, floored)",
        "backed_off = floored",
        ("tests/scalers/test_dynamic.py",),
    ),
    Fault(
        "a finite step does not restart nonfinite_count",
        "jls/_scalers/rule.py",
        "kept = 0 if consecutive else state.nonfinite_count",
        "kept = state.nonfinite_count",
        ("tests/scalers/test_dynamic.py",),
    ),
    Fault(
        "any finite step refills the budget of hysteresis",
        "jls/_scalers/hysteresis.py",
        'refilled = finite if refill == "finite" else up',
        "refilled = finite",
        ("tests/scalers/test_hysteresis.py",),
    ),
    Fault(
        "adaptive falls from the shortest interval too",
        "jls/_scalers/adaptive.py",
        "(bad == 3) & (rung > 1)",
        "(bad == 3) & (rung > 0)",
        ("tests/scalers/test_adaptive.py",),
    ),
    Fault(
        "cautious asks for room at this scale, not at the next",
        "jls/_scalers/cautious.py",
        "largest * grow(state.loss_scale, factor, cap) <= f32(limit)",
        "largest * state.loss_scale <= f32(limit)",
        ("tests/scalers/test_cautious.py",),
    ),
    Fault(
        "recent_max forgets the window before",
        "jls/_scalers/recent_max.py",
        "known = jnp.minimum(ceiling, state.previous_ceiling)",
        "known = ceiling",
        ("tests/scalers/test_recent_max.py",),
    ),
]

STEPS = [
    Fault(
        "a non-finite loss moves the scale",
        "jls/_step.py",
        "scaler_state = select(loss_finite, adjusted, state.scaler_state)",
        "scaler_state = adjusted",
        (STEP,),
    ),
    Fault(
        "nonfinite_losses counts every skip",
        "jls/_step.py",
        '"nonfinite loss": ~loss_finite',
        '"nonfinite loss": ~applied',
        (RUNS,),
    ),
    Fault(
        "a skipped step counts as one that was applied in part",
        "jls/_step.py",
        '"partial overflow": observed.is_partial & applied',
        '"partial overflow": observed.is_partial',
        ("tests/test_fields.py",),
    ),
    Fault(
        "consecutive_skips never restarts",
        "jls/_step.py",
        "new = jnp.where(happened, count_up(old), 0)",
        "new = count_up(old, happened)",
        (STEP,),
    ),
    Fault(
        "where updates are checked, bad gradients are called bad updates",
        "jls/_step.py",
        "reason = jnp.where(bad_updates, updates.value, gradients.value)",
        "reason = updates.value if step.checks_updates else gradients.value",
        (RUNS,),
    ),
    Fault(
        "a step with bad updates enters the window of the spike policy",
        "jls/_step.py",
        "spike_state = select(was_finite, spike_state, state.spike_state)",
        "spike_state = select(observed.is_finite, spike_state, state.spike_state)",
        ("tests/test_spikes.py",),
    ),
    Fault(
        "the updates of a skipped step are +0.0",
        "jls/_step.py",
        "value = complex(-0.0, -0.0) if is_complex else -0.0",
        "value = complex(0.0, 0.0) if is_complex else 0.0",
        (PROMISES,),
    ),
    Fault(
        "devices do not agree on whether the updates are good",
        "jls/_step.py",
        "    return agree(flags, wrapper.axis_name)\n",
        "    return flags\n",
        ("tests/devices/test_shard_map.py",),
    ),
    Fault(
        "a NaN in a scalar of the inner state is not looked for",
        "jls/_step.py",
        "scalars = [x for x in floats_of(inner_state) if jnp.ndim(x) == 0]",
        "scalars = [x for x in floats_of(updates) if jnp.ndim(x) == 0]",
        (STEP,),
    ),
    Fault(
        "a parameter that overflows in its own dtype is stored",
        "jls/_step.py",
        "stored = widen(apply_updates(param, update)).astype(update.dtype)",
        "stored = (widen(param) + widen(update)).astype(update.dtype)",
        (STEP,),
    ),
]

ROLLBACKS = [
    Fault(
        "two leaves that one value is stored in are rolled back to one of them",
        "jls/_rollback_cpu.py",
        "if olds.get(output) is x:",
        "if output in selected:",
        (ROLLBACK,),
    ),
    Fault(
        "a roll-back multiplies by the flag",
        "jls/_rollback_cpu.py",
        "    return lax.select_n(flag, _to_array(old, new.dtype), new)",
        "    if not jnp.issubdtype(new.dtype, jnp.floating):\n"
        "        return lax.select_n(flag, _to_array(old, new.dtype), new)\n"
        "    is_new = lax.convert_element_type(flag, new.dtype)\n"
        "    return is_new * new + (1 - is_new) * _to_array(old, new.dtype)",
        (PROMISES,),
    ),
    Fault(
        "the derivative goes through the branch that may see NaN",
        "jls/_rollback.py",
        "return _with_derivative(on_raw_inputs, like=on_sanitized_inputs)",
        "return on_raw_inputs",
        (ROLLBACK,),
    ),
]

CLIP = "tests/test_clipping.py"
SQUARES = [
    Fault(
        "a norm that overflows is not looked at, only the leaves",
        "jls/_step.py",
        "norm_finite = jnp.isfinite(squares[-1])",
        "norm_finite = jnp.asarray(True)",
        (CLIP,),
    ),
    Fault(
        "an eager step looks at every element where a traced one looks at the sum",
        "jls/_step.py",
        "    return known[key]\n",
        "    return None\n",
        (CLIP,),
    ),
    Fault(
        "the sum over some leaves is taken for that over all",
        "jls/_program/squares.py",
        "if len(result.numbers) == len(inputs):",
        "if len(result.numbers) == min(2, len(inputs)):",
        ("tests/program/test_squares.py",),
    ),
    Fault(
        "the sum over one axis is taken for that over all",
        "jls/_program/squares.py",
        "if first.power == 2 and is_whole and len(axes) == len(shape):",
        "if first.power == 2 and is_whole:",
        ("tests/program/test_squares.py",),
    ),
    Fault(
        "a part of complex numbers is taken for the whole",
        "jls/_program/squares.py",
        "is_whole = first.parts == _parts_of(inputs[first.number])",
        "is_whole = True",
        ("tests/program/test_squares.py",),
    ),
]

SCALE = [
    Fault(
        "the loss is returned scaled",
        "jls/_scale.py",
        "_, (loss, aux) = value",
        "loss, (_, aux) = value",
        (PROMISES,),
    ),
    Fault(
        "gradients stay in float16",
        "jls/_scale.py",
        "    array = widen(leaf)\n",
        "    array = jnp.asarray(leaf)\n",
        (PROMISES,),
    ),
    Fault(
        "a moment of a parameter called loss_scale is taken for a scale",
        "jls/_state.py",
        "inner = find(node.scaler_state, is_scaler_state)",
        "inner = find(node, is_scaler_state)",
        ("tests/test_state.py",),
    ),
    Fault(
        "set_loss_scale keeps a count",
        "jls/_state.py",
        'for count in ("finite_count", "nonfinite_count"):',
        'for count in ("finite_count",):',
        ("tests/test_state.py",),
    ),
]

CHECKPOINTS = [
    Fault(
        "the rung of an older checkpoint is one too low",
        "jls/_checkpoint.py",
        '(("interval_index",), lambda index: index + 1)',
        '(("interval_index",), lambda index: index)',
        ("tests/test_checkpoint.py",),
    ),
    Fault(
        "a static scale takes over one that moved",
        "jls/_checkpoint.py",
        "if _was_static(saved, parts) != is_static:",
        "if _was_static(saved, parts) and not is_static:",
        ("tests/test_checkpoint.py",),
    ),
]

SPIKES = [
    Fault(
        "a full window counts as an empty one",
        "jls/_spikes.py",
        "jnp.where(state.kept == 2 * size - 1, size, state.kept + 1)",
        "jnp.where(state.kept == 2 * size - 1, 0, state.kept + 1)",
        ("tests/test_spikes.py",),
    ),
    Fault(
        "each step gives a whole token back",
        "jls/_spikes.py",
        "jnp.minimum(parts + f32(budget), f32(budget) * size)",
        "jnp.minimum(parts + size, f32(budget) * size)",
        ("tests/test_spikes.py",),
    ),
    Fault(
        "max_norm bounds the loss",
        "jls/_spikes.py",
        "limits(norm=max_norm)",
        "limits(loss=max_norm)",
        ("tests/test_spikes.py",),
    ),
]

TRAIN = [
    Fault(
        "a skipped step keeps what it carried on",
        "jls/_train/step.py",
        "after = select(~report.skipped, accumulated.carried, before)",
        "after = accumulated.carried",
        ("tests/train/test_plain.py",),
    ),
    Fault(
        "the mean is over the micro-batches that were dropped too",
        "jls/_train/accumulate.py",
        "total = total / jnp.sum(counted).astype(total.real.dtype)",
        "total = total / jnp.asarray(counted.size, total.real.dtype)",
        ("tests/train/test_accumulate.py",),
    ),
    Fault(
        "a micro-batch with a NaN loss and finite gradients counts",
        "jls/_train/accumulate.py",
        "finite, counts = flags[0], jnp.all(flags)",
        "finite, counts = flags[0], flags[1]",
        ("tests/train/test_accumulate.py",),
    ),
]

OTHERS = [
    Fault(
        "select takes integers from the new tree",
        "jls/_tree.py",
        "if not (is_array(new) and is_array(old)):",
        "if not (is_inexact(new) and is_inexact(old)):",
        ("tests/test_tree.py",),
    ),
    Fault(
        "init shares buffers with the parameters",
        "jls/_wrapper.py",
        "inner_state=own_buffers(inner_state, params),",
        "inner_state=inner_state,",
        (PROMISES,),
    ),
    Fault(
        "an element that is not finite enters the average",
        "jls/_ema.py",
        "return jnp.where(jnp.isfinite(new), moved, old)",
        "return moved",
        ("tests/test_ema.py",),
    ),
]

WHY = [
    Fault(
        "why does not know which branch was taken",
        "jls/_program/replay.py",
        "        taken = [self._see_taken(site, number) for number in numbers]",
        "        taken = [None for number in numbers]",
        ("tests/test_why.py",),
    ),
    Fault(
        "of a while loop the last bad round is kept",
        "jls/_program/replay.py",
        "    bad = _select_records(never_bad & is_bad, new, old.bad)",
        "    bad = _select_records(is_bad, new, old.bad)",
        ("tests/test_why.py",),
    ),
    Fault(
        "the lanes of a loop that have ended go on",
        "jls/_program/replay.py",
        "                results = _select_lanes(is_on(carry), results, carry)",
        "                results = list(results)",
        ("tests/test_why.py",),
    ),
    Fault(
        "what a where does not take is blamed",
        "jls/_origin/trail.py",
        '        if name == "select_n":  # what is not taken does no harm',
        '        if name == "select":',
        ("tests/test_why.py",),
    ),
    Fault(
        "the exp of a mask is blamed for what overflows",
        "jls/_origin/trail.py",
        '        return found[0] & {"inf"}',
        "        return None",
        ("tests/test_why.py",),
    ),
    Fault(
        "a mask comes before what it spoils",
        "jls/_origin/trail.py",
        "            return (1 if self.is_mask(birth) else -1,)",
        "            return (-1,)",
        ("tests/test_why.py",),
    ),
    Fault(
        "why does not try the scale of the skipped step",
        "jls/_origin/why.py",
        "            for doublings in range(1, self._backoffs(scale) + 1):",
        "            for doublings in range(1, 1):",
        ("tests/test_why.py",),
    ),
    Fault(
        "why takes a spike for a fault",
        "jls/_origin/why.py",
        "        return any(x not in (None, SkipReason.SPIKE) for x in reasons)",
        "        return any(x is not None for x in reasons)",
        ("tests/test_why.py",),
    ),
]

REQUEUE = [
    Fault(
        "a retry counts only if others pass",
        "jls/_report/requeue.py",
        "held.counted += others_pass or not scale < held.scale",
        "held.counted += others_pass",
        (REQUEUED,),
    ),
    Fault(
        "a retry counts only if the scale stays",
        "jls/_report/requeue.py",
        "held.counted += others_pass or not scale < held.scale",
        "held.counted += not scale < held.scale",
        (REQUEUED,),
    ),
    Fault(
        "a retry counts only if a batch was applied in between",
        "jls/_report/requeue.py",
        "            self._passed = scale  # the gradients were finite\n",
        "            self._passed = scale\n"
        "        if reason == SkipReason.GRADIENTS:\n"
        "            self._passed = 0.0\n",
        (REQUEUED,),
    ),
    Fault(
        "a scale of NaN is lower than another",
        "jls/_report/requeue.py",
        "not scale < held.scale",
        "scale >= held.scale",
        (REQUEUED,),
    ),
    Fault(
        "the first try of a batch counts",
        "jls/_report/requeue.py",
        "        if held.scale is not None:\n",
        "        held.counted += held.scale is None\n"
        "        if held.scale is not None:\n",
        (REQUEUED,),
    ),
    Fault(
        "a batch is tried once more than it may be",
        "jls/_report/requeue.py",
        "return held.counted < self._retries",
        "return held.counted <= self._retries",
        (REQUEUED,),
    ),
    Fault(
        "a batch with a bad loss comes again",
        "jls/_report/requeue.py",
        "if reason == SkipReason.GRADIENTS and",
        "if reason <= SkipReason.LOSS and",
        (REQUEUED,),
    ),
    Fault(
        "new batches come before those that come again",
        "jls/_report/requeue.py",
        "        if not self._waiting:\n            try:",
        "        if True:\n            try:",
        (REQUEUED,),
    ),
    Fault(
        "a flag is read a step early",
        "jls/_report/requeue.py",
        "while len(self._unread) > self._lag:",
        "while len(self._unread) >= max(self._lag, 1):",
        (REQUEUED,),
    ),
    Fault(
        "an interrupt of the wait lets the batch of a step that ran come again",
        "jls/_report/requeue.py",
        "        except Exception:\n            self._unread.pop()",
        "        except BaseException:\n            self._unread.pop()",
        (REQUEUED,),
    ),
    Fault(
        "of several processes, one reads the flags of all",
        "jls/_report/requeue.py",
        "return array.addressable_data(0) if is_global else array",
        "return array",
        ("tests/processes/test_processes.py",),
    ),
]

CALIBRATE = [
    Fault(
        "the ceiling is the first scale that overflows",
        "jls/_origin/calibrate.py",
        "        return 2.0**low\n",
        "        return 2.0**high\n",
        (CALIBRATED,),
    ),
    Fault(
        "what overflows at every scale limits the scale",
        "jls/_origin/calibrate.py",
        "                if not below.is_bad(value):",
        "                if value:",
        (CALIBRATED,),
    ),
    Fault(
        "a result that float16 rounds to 0 in any case is called wrong",
        "jls/_origin/twin.py",
        "max(_NEGLIGIBLE * largest, 2.0**-24)",
        "_NEGLIGIBLE * largest",
        (CALIBRATED,),
    ),
    Fault(
        "what has no part in the loss is called wrong",
        "jls/_origin/calibrate.py",
        "            if (frame, result) in self.on_the_way:",
        "            if is_narrow(result):",
        (CALIBRATED,),
    ),
    Fault(
        "the least scale of the scaler is not known",
        "jls/_origin/calibrate.py",
        '        return max(half, low), ""',
        '        return half, ""',
        (CALIBRATED,),
    ),
    Fault(
        "half of the least number is not rounded to 0",
        "jls/_origin/twin.py",
        "jnp.where(sample <= 2.0**LOWEST, 1, inside)",
        "jnp.where(sample < 2.0**LOWEST, 1, inside)",
        (CALIBRATED,),
    ),
    Fault(
        "of the rounds of a loop one is counted",
        "jls/_origin/twin.py",
        ".astype(np.float64).sum(0)",
        ".astype(np.float64)[0]",
        (CALIBRATED,),
    ),
    Fault(
        "the twin adds rows of an embedding in float16",
        "jls/_program/alone.py",
        '        if not equation.primitive.name.startswith("scatter"):\n',
        "        if equation:\n",
        (CALIBRATED,),
    ),
    Fault(
        "the twin keeps the dtypes of operations",
        "jls/_program/alone.py",
        "        return np.dtype(np.float32)\n",
        "        return value\n",
        (CALIBRATED,),
    ),
    Fault(
        "what does not follow the loss scale is taken for a gradient",
        "jls/_origin/calibrate.py",
        "            if other > 1.5 * one\n",
        "            if other\n",
        (CALIBRATED,),
    ),
    Fault(
        "a number like -1e9 in a mask is called an overflow",
        "jls/_origin/calibrate.py",
        "        return not all(isinstance(x, Constant) for x in origins)",
        "        return bool(origins)",
        (CALIBRATED,),
    ),
]

FAULTS = [
    *REDUCE,
    *SCALERS,
    *STEPS,
    *ROLLBACKS,
    *SQUARES,
    *SCALE,
    *CHECKPOINTS,
    *SPIKES,
    *TRAIN,
    *WHY,
    *CALIBRATE,
    *REQUEUE,
    *OTHERS,
]


class Outcome(NamedTuple):
    is_caught: bool
    first: str  # the first test that failed, or what else happened
    seconds: float


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Runs `tests` in `tree` until one fails."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=no", "--no-header", "-rfE"]
    # A file that is changed within a second looks unchanged to a cache of bytecode.
    settings = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Outcome(True, "the time ran out", time.monotonic() - start)
    seconds = time.monotonic() - start
    if done.returncode > 1:  # pytest itself, or the import of a test, has failed
        sys.exit(done.stdout + done.stderr)
    failed = FAILED.search(done.stdout)
    return Outcome(done.returncode == 1, failed[1] if failed else "", seconds)


def plant(fault: Fault, tree: Path) -> str:
    """Plants a fault, and returns the text without it."""
    path = tree / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        sys.exit(f"{fault.file} must have this text once: {fault.old!r}")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return text


def try_all(faults: Sequence[Fault], root: Path) -> bool:
    """Prints what catches each fault; whether nothing survived."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(root, tree, ignore=NOT_COPIED)
        print(HEAD, flush=True)
        outcomes = []
        for fault in faults:
            text = plant(fault, tree)
            outcome = run_tests(tree, fault.tests)
            (tree / fault.file).write_text(text, encoding="utf-8")
            outcomes.append(outcome)
            word = "caught" if outcome.is_caught else "SURVIVED"
            first, seconds = outcome.first, f"{outcome.seconds:.0f}"
            print(f"| {fault.name} | {word} | {first} | {seconds} |", flush=True)
        is_clean = _pass_without(tree, outcomes)
    caught = sum(outcome.is_caught for outcome in outcomes)
    total = sum(outcome.seconds for outcome in outcomes)
    print(f"\n{caught} of {len(faults)} caught, in {total:.0f} seconds.")
    return is_clean and caught == len(faults)


def _pass_without(tree: Path, outcomes: Sequence[Outcome]) -> bool:
    """Whether the tests that failed pass without a fault."""
    failed = sorted({outcome.first for outcome in outcomes if "::" in outcome.first})
    on_devices = [test for test in failed if test.startswith("tests/devices/")]
    others = [test for test in failed if test not in on_devices]
    again = [run_tests(tree, tests) for tests in (others, on_devices) if tests]
    for outcome in again:
        if outcome.is_caught:
            print(f"\nwithout a fault this fails too: {outcome.first}")
    return not any(outcome.is_caught for outcome in again)


def main(names: Sequence[str]) -> int:
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        known = "\n".join(fault.name for fault in FAULTS)
        sys.exit(f"no fault is called {sorted(unknown)}. There are:\n{known}")
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    return 0 if try_all(chosen, ROOT) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
