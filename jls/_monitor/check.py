# SPDX-License-Identifier: Apache-2.0
"""`jls.check_step`: injects faults into a step and names the mistakes it finds."""

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jls import _validate
from jls._monitor.check_args import Arguments, Path, take_apart, tokens, unbind
from jls._monitor.check_carried import Scale, find_scales
from jls._monitor.check_faults import LOST, STUCK, try_all
from jls._monitor.check_good_steps import CODES, Code
from jls._monitor.check_runs import Runner
from jls._state import find, is_scaler_state, is_wrapper_state
from jls._tree import is_concrete

CarriedArgs = Mapping[int | str, Iterable[str]] | Iterable[int | str] | None

RUNS = 32


class StepCheck(NamedTuple):
    """What `jls.check_step` says: the mistakes that it found, and what it saw.

    `print` it: the table has a row for each check, and the line to write where one is
    broken.

    Example:
      >>> check = jls.types.StepCheck(broken=(), not_tried={}, seen={})
      >>> check.ok
      True
    """

    broken: tuple[Code, ...]  # the codes of the mistakes
    not_tried: dict[str, str]  # a code, or the path of an array, and the reason
    seen: dict[Code, str]  # what showed each mistake, or is to be noted, by code
    write: Mapping[Code, str] = {}  # where it is not the usual line

    @property
    def ok(self) -> bool:
        """Whether no mistake was found."""
        return not self.broken

    def raise_if_broken(self) -> None:
        """Raises an `AssertionError` with the table if a mistake was found.

        For a test of the step: `jls.check_step(step, *args).raise_if_broken()`.
        """
        if self.broken:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        rows: list[tuple[str, str, str]] = []
        for code in CODES:
            if code in self.broken:
                rows.append((code, "BROKEN", self.seen.get(code, "")))
                rows.append(("", "write", self.write.get(code, WRITE[code])))
            elif code in self.not_tried:
                rows.append((code, "not tried", self.not_tried[code]))
            elif code != "spike not skipped" or code in self.seen:
                rows.append((code, "ok", RIGHT[code] + self.seen.get(code, "")))
        for name, reason in self.not_tried.items():
            if name not in CODES:
                rows.append(("", "not tried", f"a fault in {name}: {reason}"))
        headline = _headline(self.broken, self.not_tried.get("frozen", ""))
        return "\n".join([headline, *_table(rows)])


RIGHT: dict[Code, str] = {
    "no step": "a good step changes what the step carries",
    "retraced": "the third good step was not compiled again",
    "host sync": "the step reads no value at the host",
    "not scaled": "the gradients follow the loss scale",
    "scale leaks": "the result does not depend on the loss scale",
    "nan committed": "no inf or NaN was kept, and no overflow hidden",
    "not atomic": "a skipped step changed nothing",
    "loss not told": "a loss that is inf or NaN left the scale alone",
    "frozen": "after a bad step, good ones train on",
    "out of sync": "all devices hold the same",
    "spike not skipped": "a step far out of line was skipped",
}

_LEAVE_OUT = (
    "If some state is meant to move in a bad step, name only the fields that must not: "
    'jls.check_step(..., carried_args={"state": ["params", "opt_state"]})'
)

WRITE: dict[Code, str] = {
    "no step": "return the new params and the new opt_state from the step",
    "retraced": (
        "step = jax.jit(train_step) once, outside the loop; numbers that change go in "
        "as arrays"
    ),
    "host sync": (
        "return the value from the step, and read it every so many steps: "
        "jls.metrics(opt_state), one jax.device_get"
    ),
    "not scaled": (
        "loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch), with the "
        "opt_state that the step was given"
    ),
    "scale leaks": (
        "jls.value_and_grad(loss_fn) alone: it scales and unscales; no jls.scale in "
        "the loss, no jls.unscale after it, clipping inside: "
        "jls.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), inner))"
    ),
    "nan committed": (
        "new = jls.select(opt_state.applied, new, old) for what the optimizer does not "
        f"hold. {_LEAVE_OUT}"
    ),
    "not atomic": (
        "new = jls.select(opt_state.applied, new, old) for what the optimizer does not "
        "hold; weight decay and averages inside: "
        f"jls.loss_scaled(optax.chain(inner, jls.params_ema(0.999))). {_LEAVE_OUT}"
    ),
    "loss not told": (
        "updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)"
    ),
    "frozen": (
        "new = jls.select(opt_state.applied, new, old) for what the optimizer does not "
        "hold"
    ),
    "out of sync": (
        'jls.loss_scaled(inner, axis_name="data"), and grads = jax.lax.pmean(grads, '
        '"data") before the update'
    ),
    "spike not skipped": (
        "updates, opt_state = optimizer.update(grads, opt_state, params, value=loss) "
        "with the true gradients, and keep all of the opt_state that it returns"
    ),
}


_NNX = (
    "step = nnx.jit(jls.train_step(loss_fn)); under jax.jit return model and optimizer "
    "from the step, and use what it returns"
)
_NNX_GRAD = (
    "loss, grads = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)("
    "optimizer, model, batch)"
)
_MULTI_STEPS = "jls.loss_scaled(optax.MultiSteps(inner, k)), accumulation inside"
_MASKED = (
    "jls.loss_scaled(optax.masked(inner, mask)), and optax.partition inside likewise: "
    "the wrapper sees no gradient of what a mask outside leaves out"
)


def check_step(
    step: Callable[..., Any],
    *args: Any,
    carried_args: CarriedArgs = None,
    **kwargs: Any,
) -> StepCheck:
    """Runs a train step with faults injected, and names the mistakes in it.

    For a step written by hand, before a long run or in a test. It runs the step some
    twenty times, on copies: your arguments stay as they are, also if the step donates
    them. An inf in the loss scale, other loss scales, and NaN in the batch show whether
    gradients are scaled by the right state and unscaled once, whether a bad step is
    skipped and leaves nothing behind, and whether training goes on after it. A right
    step is never called broken; some mistakes do not show, and what could not be tried
    is said.

    Args:
      step: the function that you call in the loop: jitted or not, of plain pytrees,
        Linen, NNX or Equinox. It takes its state as arguments, and returns the new
        state in any order or nesting; NNX objects it may change in place.
      *args: its arguments, with a batch that it can step on. In a run of several
        processes, process-local arrays.
      carried_args: which arguments come back, if that is not what their shapes say:
        positions and keyword names, or a dict of them with the fields that count, to
        leave out such as running metrics. None finds out.
      **kwargs: its keyword arguments.

    Returns:
      A `jls.types.StepCheck`. `broken` has the codes of the mistakes: "no step",
      "retraced", "host sync", "not scaled", "scale leaks", "nan committed", "not
      atomic", "loss not told", "frozen", "out of sync", and under `jls.spikes` "spike
      not skipped". `not_tried` says what could not be tried, and why; `ok` is whether
      none is broken; `str()` is a table for people, with the line to write;
      `raise_if_broken()` is for tests.

    Raises:
      TypeError: if `step` is not a function, or `carried_args` of another type.
      ValueError: if no argument carries a loss scale (a step that closes over its state
        cannot be checked), if the step does not return the state, if it is skipped at
        every loss scale, or if an array was donated to an earlier step, or is spread
        over several processes.
      Exception: what the step itself raises, with a note that says in which trial.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(1024.0))
      >>> @jax.jit
      ... def step(params, opt_state, x):
      ...     grads = jax.grad(lambda params: jnp.mean((x @ params) ** 2))(params)
      ...     updates, opt_state = optimizer.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> params = jnp.ones(3)
      >>> jls.check_step(step, params, optimizer.init(params), jnp.ones((4, 3))).broken
      ('not scaled',)
    """
    _validate.function("step", step)
    step, bound = unbind(step)
    args = (*bound, *args)
    arguments = take_apart(step, args, kwargs)
    for item in arguments.items:
        _check_usable("/".join(item.path), item.value)
    named = _named(carried_args, arguments, len(bound))
    scales = _find_scales(args, kwargs, arguments)
    runner = Runner(step, arguments, scales, named, RUNS)
    with jax.debug_nans(False):  # NaN is what the faults are made of
        findings = try_all(runner, arguments.leaves)
    broken = tuple(sorted(findings.broken, key=CODES.index))
    seen = findings.notes | findings.broken
    write = _mends((args, kwargs), bool(arguments.in_place)) | findings.mends
    return StepCheck(broken, findings.not_tried, seen, write)


def _mends(arguments: Any, is_nnx: bool) -> dict[Code, str]:
    """What to write where the arguments say more than the mistake does."""

    def has_around(kind: Any) -> bool:
        return any(
            find(node, is_wrapper_state)
            for _, node in find(arguments, lambda node: isinstance(node, kind))
        )

    mends: dict[Code, str] = (
        {"no step": _NNX, "not scaled": _NNX_GRAD} if is_nnx else {}
    )
    if has_around(optax.MultiStepsState):
        mends["frozen"] = f"{_MULTI_STEPS}; and {WRITE['frozen']}"
    if has_around(optax.MaskedState):
        codes: tuple[Code, ...] = ("nan committed", "not atomic", "frozen")
        mends |= {code: f"{_MASKED}; and {WRITE[code]}" for code in codes}
    return mends


def _check_usable(path: str, leaf: Any) -> None:
    """Raises if `leaf` cannot be copied."""
    if not is_concrete(leaf):
        return
    if leaf.is_deleted():
        raise ValueError(
            f"{path} was donated to an earlier step, and is no more. Pass what that "
            "step returned."
        )
    if not leaf.is_fully_addressable:
        raise ValueError(
            f"{path} must be held by this process, got a global array over several. "
            "Call jls.check_step with process-local arrays, such as the step of a "
            "small model on jax.local_devices()."
        )


def _find_scales(
    args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments
) -> list[Scale]:
    nodes: list[Path] = []
    flat, _ = jax.tree_util.tree_flatten_with_path(
        (args, kwargs), is_leaf=is_scaler_state
    )
    for path, node in flat:
        if is_scaler_state(node):
            kind, key, *inner = path
            name = arguments.names[key.idx] if kind.idx == 0 else str(key.key)
            nodes.append((name, *tokens(inner)))
    scales = find_scales(arguments.items, nodes)
    if not scales:
        types = ", ".join(type(x).__name__ for x in (*args, *kwargs.values()))
        raise ValueError(
            "one argument of the step must carry a loss scale, got "
            f"{types or 'no arguments'}. Pass the arguments of the step after it: "
            "jls.check_step(step, params, opt_state, batch). A step that closes over "
            "its state cannot be checked: make the state an argument."
        )
    return scales


def _named(
    carried_args: CarriedArgs, arguments: Arguments, bound: int
) -> dict[str, tuple[str, ...] | None] | None:
    """The names of the carried arguments, with the fields that count."""
    if carried_args is None:
        return None
    rule = (
        "carried_args must be positions and names of arguments, or a dict of them with "
        f"the fields that count, got {carried_args!r}."
    )
    is_text_or_array = isinstance(carried_args, str | jax.Array | np.ndarray)
    if is_text_or_array or not isinstance(carried_args, Iterable):
        raise TypeError(rule)
    named: dict[str, tuple[str, ...] | None] = {}
    for key in carried_args:
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise TypeError(rule)
        fields = carried_args[key] if isinstance(carried_args, Mapping) else None
        if isinstance(key, int):
            positions = arguments.names[bound:]
            if not 0 <= key < len(positions):
                raise ValueError(
                    f"carried_args must be positions below {len(positions)}, got {key}."
                )
            key = positions[key]
        if key not in {item.path[0] for item in arguments.items}:
            raise ValueError(f"carried_args must name arguments, got {key!r}.")
        named[key] = None if fields is None else tuple(fields)
    return named


def _headline(broken: tuple[Code, ...], not_going_on: str) -> str:
    if not broken and not_going_on.startswith((STUCK, LOST)):
        return f"jls.check_step found no mistake, but {not_going_on}."
    if not broken:
        return "jls.check_step found no mistake."
    count = "1 mistake" if len(broken) == 1 else f"{len(broken)} mistakes"
    return f"jls.check_step found {count}: {', '.join(broken)}."


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """The lines of a table; a text goes on below itself."""
    width = max(14, *(len(code) for code, _, _ in rows))
    lines = []
    for code, verdict, text in rows:
        head = f"{code:<{width}} {verdict:<10} "
        lines += textwrap.wrap(
            text,
            width=88,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
