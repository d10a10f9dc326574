# SPDX-License-Identifier: Apache-2.0
"""One step of a wrapped optimizer: observe, attempt, adjust, count.

    loss        gradients   updates  inner optimizer  scale    counted as
    finite      finite      good     steps            adjusts  applied
    finite      not finite  -        keeps its state  adjusts  skip
    not finite  either      -        keeps its state  is kept  skip, nonfinite loss
    finite      finite      bad      keeps its state  adjusts  skip, nonfinite update
    either is a spike       -        keeps its state  adjusts  skip, spike

Where updates are checked, they are bad if one is not finite, or makes a finite
parameter overflow in its own dtype, or if a scalar of the inner state is NaN. A spike
is a finite step whose loss or gradient norm the spike policy wants to skip. For the
scaler both are finite steps. A step whose gradients come without the parts that
overflowed, as the flag `partial_overflow` says, is applied, and counted as a partial
overflow too: for the scaler it is an overflow.

Gradients are finite if every element is. Where the inner optimizer sums the squares of
all gradients, as a clip by the global norm does, they are finite if that sum is: optax
would turn gradients of a norm over 1.8e19 into zeros.
"""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.core import Tracer

from jls import _scopes
from jls._applied import ALL_INSIDE, changed_in
from jls._devices import AxisName, agree, agree_on_max
from jls._mistakes import (
    called_by,
    check_no_state,
    check_shapes,
    check_value,
    foreign_state_named,
    is_of_optax,
    is_read,
    update_with_average,
    value_among,
    warn,
    warn_of_narrowed,
)
from jls._notes import note, noted
from jls._program.jaxprs import varying_axes
from jls._program.squares import SumOfSquares
from jls._reduce import all_finite, any_nan, finite_leaves, global_norm
from jls._rollback import Prepared, call, prepare, roll_back_unless, sum_of_squares_in
from jls._rollback_cpu import at_once_on_gpu, computed_once
from jls._scalers.rule import count_up
from jls._state import (
    how_to_nest,
    is_wrapper_state,
    rounds_bfloat16,
    wrapper_name,
    wrapper_state_in,
)
from jls._text import an, at, describe, nearest
from jls._tree import (
    Remainder,
    as_flag,
    cast_like,
    combine,
    difference,
    dtype_of,
    floats_of,
    inf_if_too_large,
    is_array,
    is_extended,
    is_flag,
    is_inexact,
    is_key,
    is_narrow,
    leaves_at_floats,
    map_remainder,
    named_floats,
    partition,
    roles_of,
    select,
    wide_dtype,
    widen,
    widen_as_stored,
)
from jls._types import (
    FIELDS,
    Event,
    JlsWarning,
    LossScaledState,
    LossScaler,
    SkipReason,
    SpikePolicy,
    has_policy,
)


@dataclasses.dataclass(frozen=True, eq=False)
class WrapperUpdate:
    """The update function of `jls.loss_scaled`, with the arguments of that call.

    A class, so that `wrapper_of` recognizes it: Flax may rebuild the transformation
    from its two functions.
    """

    inner: optax.GradientTransformationExtraArgs
    scaler: LossScaler
    axis_name: AxisName
    check_updates: bool | None
    spikes: SpikePolicy | None = None

    @functools.cached_property
    def scaler_structure(self) -> Any:
        """The structure of the scaler's states; cached for eager steps."""
        return jax.tree.structure(jax.eval_shape(self.scaler.init))

    @functools.cached_property
    def spike_shapes(self) -> Any:
        """The spike policy's state, without numbers; () without a policy."""
        return jax.eval_shape(self.spikes.init) if self.spikes else ()

    @functools.cached_property
    def names(self) -> set[str]:
        """The names of the extra arguments that have been looked at."""
        return set()

    @functools.cached_property
    def sums_of_squares(self) -> dict[Any, SumOfSquares | None]:
        """For eager steps the sum in the inner optimizer, by the types of its inputs.

        A step that is traced looks at its own program.
        """
        return {}

    def __call__(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *args: Any,
        **extra: Any,
    ) -> tuple[Any, LossScaledState]:
        """Returns the updates and the next state, as optax's `update` does."""
        if args:
            raise TypeError(
                "update takes grads, state and params by position, got "
                f"{len(args)} more: {', '.join(map(describe, args))}. All else goes by "
                "keyword: optimizer.update(grads, opt_state, params, value=loss)."
            )
        with jax.named_scope(_scopes.UPDATE):
            step = _take_apart(self, updates, state, params, extra)
            _warn_of_unread(step, is_inside=called_by("optax"))
            updates, state, _ = _attempt(step, lambda updates: updates, step.no_updates)
        note("update", Update(params, state))
        return updates, state

    def apply(
        self,
        grads: optax.Updates,
        state: LossScaledState,
        params: optax.Params,
        keeps_updates: bool = False,
        **extra: Any,
    ) -> "Applied":
        """Updates and applies; the updates are returned if `keeps_updates`."""

        def apply_fn(updates):
            return apply_updates(params, updates), updates if keeps_updates else None

        with jax.named_scope(_scopes.UPDATE):
            step = _take_apart(self, grads, state, params, extra)
            _warn_of_unread(step)
            skipped_result = params, step.no_updates if keeps_updates else None
            result, state, norm = _attempt(
                step, apply_fn, skipped_result, reports_norm=True
            )
            return Applied(result[0], state, norm, result[1])


class Applied(NamedTuple):
    """Results of a step that was applied, or skipped."""

    params: Any  # the old ones if it was skipped
    state: Any
    global_norm: Any  # f32[]  of the gradients
    updates: Any  # -0.0 if it was skipped; None unless they are kept


class Update(NamedTuple):
    """A call of a wrapper's update."""

    params: Any
    state: LossScaledState  # the new one


class FoundWrapper(NamedTuple):
    """A wrapper somewhere in an optimizer, and the parameters that it is for."""

    wrapper: WrapperUpdate
    names: list[str]  # of the floating-point leaves


def find_wrappers(optimizer: Any, params: Any) -> list[FoundWrapper]:
    """The wrappers in `optimizer`, however deep: in a chain, a partition, ...

    Its `init` is traced, and each wrapper in it notes itself. A wrapper that is
    outermost is found without that.
    """
    outermost = wrapper_of(optimizer)
    if outermost:
        return [FoundWrapper(outermost, named_floats(params)[0])]
    with noted("wrapper", apart=True) as wrappers, warnings.catch_warnings():
        warnings.simplefilter("ignore", JlsWarning)  # given at the real `init`
        # A new function each time: JAX would not trace a known one again.
        jax.eval_shape(lambda params: optimizer.init(params), params)
    return [FoundWrapper(one, named_floats(given)[0]) for one, given in wrappers]


def wrapper_of(optimizer: Any) -> WrapperUpdate | None:
    """The update function of `optimizer`, if `jls.loss_scaled` made it."""
    update = getattr(optimizer, "update", None)
    return update if isinstance(update, WrapperUpdate) else None


def update_and_apply(
    optimizer: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    keeps_updates: bool = False,
    wrappers: Callable[[], list[FoundWrapper]] | None = None,
    **extra: Any,
) -> Applied:
    """A step of an optimizer with one wrapper, which may be anywhere in it.

    `wrappers` finds it; None does so here.
    """
    wrappers = wrappers or functools.partial(find_wrappers, optimizer, params)
    wrapper = wrapper_of(optimizer)
    if wrapper:
        return wrapper.apply(grads, state, params, keeps_updates, **extra)
    optimizer = optax.with_extra_args_support(optimizer)

    def update(grads):
        return optimizer.update(grads, state, params, **extra)

    with noted("stored") as made, _bare_optimizer_named(wrappers):
        updates, new_state = update_with_average(update, grads)
    if made:
        _warn_of_changed(update, grads, updates, made)
    new_params = apply_updates(params, updates)
    norm = global_norm(floats_of(grads))
    applied = Applied(new_params, new_state, norm, updates if keeps_updates else None)
    for inside, _ in wrappers()[:1]:
        if _checks_updates(inside, grads, state, params):
            applied = _roll_back_if_stored_nonfinite(inside, (params, state), applied)
    return applied


def _warn_of_changed(
    update: Callable[[Any], Any], grads: Any, updates: Any, made: list[Any]
) -> None:
    """Warns if updates are not those that a `jls.bfloat16_params` made.

    Args:
      update: makes updates and more of gradients.
      grads: the gradients.
      updates: what came of them.
      made: what was noted of it: paths and updates of bfloat16 parameters.
    """
    name = changed_in(lambda grads: update(grads)[0], grads, updates, made)
    if name is not None:
        warn(
            "what jls.bfloat16_params made is changed before it is applied"
            f"{at(name)}: the new parameters are rounded once more, to nearest, and "
            f"most of them stand still. {ALL_INSIDE}: "
            "jls.bfloat16_params(optax.chain(...))."
        )


@contextlib.contextmanager
def _bare_optimizer_named(
    wrappers: Callable[[], list[FoundWrapper]],
) -> Iterator[None]:
    """Names an optimizer without a wrapper as the cause of what fails in the block."""
    try:
        yield
    except Exception as error:
        try:
            is_bare = not wrappers()
        except Exception:  # it cannot be asked
            is_bare = False
        if not is_bare:
            raise
        raise ValueError(
            "optimizer must be the one that made the state, which is jls's, got one "
            "without a wrapper. Pass what jls.loss_scaled or jls.skip_nonfinite "
            "returned."
        ) from error


def _roll_back_if_stored_nonfinite(
    wrapper: WrapperUpdate, old: tuple[Any, Any], applied: Applied
) -> Applied:
    """`applied`, rolled back if a part of the optimizer outside the wrapper spoils it.

    A wrapper inside an outer chain sees only its own updates. If a finite parameter
    would be stored as inf or NaN, the whole step counts as a nonfinite update.
    """
    params, state = old
    pairs = zip(floats_of(params), floats_of(applied.params), strict=True)
    stored = [
        jnp.where(jnp.isfinite(widen(x)), widen_as_stored(y), 0) for x, y in pairs
    ]
    with jax.named_scope(_scopes.NEW):
        are_finite = finite_leaves(stored)
    are_finite = agree(are_finite, wrapper.axis_name)
    is_finite = jnp.all(are_finite)

    def skip(old, new):
        if not is_wrapper_state(old):
            return old
        known = old.nonfinite_leaves
        bad = ~are_finite if known.size == are_finite.size else jnp.zeros_like(known)
        events: dict[Event, Any]
        events = dict.fromkeys(("step", "skip", "nonfinite update"), True)
        never, reason = jnp.zeros_like(new.applied), SkipReason.UPDATES.value
        counted = _counted(old, events, never, never, reason, bad)
        return counted._replace(applied=never, scaler_state=new.scaler_state)

    was_applied = wrapper_state_in(applied.state).applied
    rolled_back = applied._replace(
        params=params,
        state=jax.tree.map(skip, state, applied.state, is_leaf=is_wrapper_state),
        updates=jax.tree.map(lambda x: jnp.full_like(x, -0.0), applied.updates),
    )
    return select(is_finite | ~was_applied, applied, rolled_back)


def apply_updates(params: Any, updates: Any) -> Any:
    """`optax.apply_updates`, also where JAX promotes nothing, as with 8-bit floats."""
    wide_params, wide_updates = jax.tree.map(widen, (params, updates))
    applied = optax.apply_updates(wide_params, wide_updates)
    return jax.tree.map(
        lambda new, old: new.astype(jnp.result_type(old)) if is_inexact(old) else new,
        applied,
        params,
    )


class _Step(NamedTuple):
    """A step: its wrapper, and its inputs."""

    wrapper: WrapperUpdate
    state: LossScaledState  # before
    params: optax.Params | None
    grads: list[Array]  # the floating-point leaves, in at least float32
    remainder: Remainder  # the tree without those leaves
    checks_updates: bool
    extra: dict[str, Any]  # for the inner optimizer
    partial_overflow: Array  # bool[]  whether parts of the gradients were left out
    no_updates: Any  # the updates of a skipped step
    integers: list[Any]  # the paths of the leaves that are integers


class _Observed(NamedTuple):
    """Facts that all devices agree on before the inner optimizer runs."""

    loss_finite: Array  # bool[]
    leaves_finite: Array  # bool[n]  of the gradients
    is_finite: Array  # bool[]  whether both are finite
    is_partial: Array  # bool[]  whether parts of the gradients were left out
    for_scaler: Array  # bool[]  what the scaler's `adjust` takes


def _take_apart(
    wrapper: WrapperUpdate,
    updates: optax.Updates,
    state: LossScaledState,
    params: optax.Params | None,
    extra: dict[str, Any],
) -> _Step:
    _check_wrapper_state(state, params)
    check_no_state(params)
    partial_overflow = extra.pop("partial_overflow", False)
    partial_overflow = as_flag("partial_overflow", partial_overflow)
    extra |= value_among(extra)
    check_value(extra.get("value"))
    floats, remainder = partition(updates)
    _check_no_loss_in(updates, params)
    _check_count(len(floats), state)
    targets = _targets(params, remainder)
    check_shapes(floats, targets, updates)
    warn_of_narrowed(floats, targets)
    grads = list(map(widen, floats))
    return _Step(
        wrapper=wrapper,
        state=state,
        params=params,
        grads=grads,
        remainder=remainder,
        checks_updates=_checks_updates(wrapper, updates, state, params),
        extra=extra,
        partial_overflow=partial_overflow,
        no_updates=_no_updates(grads, remainder, params),
        integers=_integer_paths(updates, remainder),
    )


def _warn_of_unread(step: _Step, is_inside: bool = False) -> None:
    """Warns once of an extra argument that the inner optimizer does not compute with.

    Args:
      step: the step.
      is_inside: whether an optimizer around the wrapper may take it.
    """
    inner, known = step.wrapper.inner, step.wrapper.names
    if not is_of_optax(inner.update):
        return  # it may look at an argument without computing with it
    for name in step.extra.keys() - known - {"value", "loss", "grad"}:
        known.add(name)

        def update(given, name=name):
            grads = combine(step.grads, step.remainder)
            extra = {**step.extra, name: given}
            new = inner.update(grads, step.state.inner_state, step.params, **extra)
            return list(filter(is_array, jax.tree.leaves(new)))

        meant = nearest(name, ("value", "partial_overflow"))
        if is_inside and not meant:
            continue
        try:
            given = jnp.asarray(step.extra[name])
            is_taken = is_read(update, given)
        except Exception:  # no array, or the optimizer wants it as it is
            continue
        if not is_taken:
            warn(
                f"update got {name}=, which neither jls nor the inner optimizer takes: "
                f"it is left out. {meant or _EXTRA}"
            )


_EXTRA = "The loss goes in as value=; leave out what nothing takes."


def _attempt(
    step: _Step,
    apply_fn: Callable[[optax.Updates], Any],
    skipped_result: Any,
    reports_norm: bool = False,
) -> tuple[Any, LossScaledState, Array | None]:
    """Runs the inner optimizer, and rolls back if the step must not be applied.

    Args:
      step: the step.
      apply_fn: turns the updates into the result.
      skipped_result: the result of a step that is skipped.
      reports_norm: whether the norm is computed where no spike policy asks for it.

    Returns:
      The result, the next state, and the norm of the gradients, `f32[]`; None if nobody
      asked for it.
    """
    wrapper, state = step.wrapper, step.state
    run, inputs = _inner_step(step)

    def run_and_apply(inputs):
        updates, inner_state = run(inputs)
        return apply_fn(updates), inner_state

    fun = run if step.checks_updates else run_and_apply
    inner = _prepare(step, fun, inputs)
    roles: list[str] = []
    if inner.squares is None:
        roles = roles_of(combine(step.grads, step.remainder))
    observed = _observe(step, inner.squares, roles)
    norm = None
    if reports_norm or wrapper.spikes is not None:
        norm = _norm(step, inner.squares, roles, reports_norm)
    spike_state, is_spike = _query_spike_policy(step, observed, norm)
    should_apply = observed.is_finite
    if wrapper.spikes is not None:
        should_apply = observed.is_finite & ~is_spike
    old = skipped_result, _clone_keys(state.inner_state)
    if step.checks_updates:
        with jax.named_scope(_scopes.INNER):
            updates, inner_state = call(observed.is_finite, inner)
        flags = _updates_finite(step, updates, inner_state)
        applied = should_apply & jnp.all(flags)
        leaves = jnp.where(observed.is_finite, flags[1:], observed.leaves_finite)
        observed = observed._replace(leaves_finite=leaves)
        new = select(applied, (apply_fn(updates), _clone_keys(inner_state)), old)
    else:
        applied = should_apply
        with jax.named_scope(_scopes.INNER):
            new = roll_back_unless(applied, observed.is_finite, inner, old)
    result, inner_state = new
    new_state = _count(step, observed, spike_state, is_spike, inner_state, applied)
    return result, new_state, norm


def _inner_step(
    step: _Step,
) -> tuple[Callable[[Sequence[Array]], Any], list[Array]]:
    """The inner optimizer as a function of what may be bad, and these inputs."""
    arguments, other = partition(step.extra, _may_be_bad)
    inputs = [*step.grads, *map(jnp.asarray, arguments)]
    inner, inner_state, params = step.wrapper.inner, step.state.inner_state, step.params

    def run(inputs):
        grads = combine(inputs[: len(step.grads)], step.remainder)
        extra = combine(inputs[len(step.grads) :], other)
        extra = {"grad": grads, **extra}  # as a line search takes them

        def update(grads):
            return inner.update(grads, inner_state, params, **extra)

        named = foreign_state_named(inner.init, inner_state, params, grads)
        with noted("stored") as made, named:
            updates, new = update_with_average(update, grads)
        if made:
            _warn_of_changed(update, grads, updates, made)
        name, integers = "the inner optimizer's", step.integers
        updates = cast_like(f"{name} update", updates, step.no_updates, integers)
        new = cast_like(f"{name} state", new, inner_state, integers)
        return updates, new

    return run, inputs


def _prepare(
    step: _Step, fun: Callable[[Sequence[Array]], Any], inputs: list[Array]
) -> Prepared:
    """The inner optimizer, traced if the step is, and the squares that it sums."""
    of_policy = jax.tree.leaves(step.state.spike_state)
    deciding = *inputs, step.partial_overflow, *of_policy
    is_traced = any(isinstance(x, Tracer) for x in deciding)
    count, sum_of_squares = len(step.grads), None
    if is_traced or not count:
        return prepare(fun, inputs, is_traced, count)
    # The step must be skipped for the same gradients as if it were traced. On the loss
    # no program branches: it is another in each step. A step that may branch on a
    # number of Python is checked element by element, and so is one that has no key.
    extra = {name: x for name, x in step.extra.items() if name != "value"}
    grads = combine(step.grads, step.remainder)
    given = grads, step.state.inner_state, step.params, extra
    given, structure = jax.tree.flatten(given)
    if all(isinstance(x, jax.Array | np.ndarray) for x in given):
        known, key = step.wrapper.sums_of_squares, (structure, *map(jax.typeof, given))
        with contextlib.suppress(TypeError):  # a static field without a hash
            if key not in known:
                known[key] = sum_of_squares_in(fun, inputs, count)
            sum_of_squares = known[key]
    return prepare(fun, inputs, is_traced, count, sum_of_squares)


def sums_squares(wrapper: WrapperUpdate, params: Any, inner_state: Any) -> bool:
    """Whether a clip's sum of squares is the check; False if that cannot be found."""
    floats, remainder = partition(params)
    grads: list[Any]
    grads = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(widen, floats)]

    def update(grads):
        grads = combine(grads, remainder)
        return wrapper.inner.update(grads, inner_state, params, grad=grads)

    return sum_of_squares_in(update, grads, len(grads)) is not None


def _observe(step: _Step, squares: list[Array] | None, roles: list[str]) -> _Observed:
    """Looks at loss and gradients; the devices agree by one collective.

    Args:
      step: the step.
      squares: the sums of the squares of each gradient and of all; None if the inner
        optimizer does not sum them.
      roles: of the gradients, see `roles_of`; they count if `squares` is None.
    """
    with jax.named_scope(_scopes.LOSS):
        loss_finite = all_finite(step.extra.get("value"))
    parts = [jnp.stack([loss_finite, ~step.partial_overflow])]
    if squares is not None:
        with jax.named_scope(_scopes.NORM):
            norm_finite = jnp.isfinite(squares[-1])
        # Stack first: on a TPU a comparison of each scalar would be an instruction
        # more.
        dtype = np.result_type(*(x.dtype for x in squares))
        of_each = jnp.stack([x.astype(dtype) for x in squares[:-1]])
        parts += [jnp.isfinite(of_each), norm_finite[None]]
        flags = computed_once(jnp.concatenate(parts))
    else:
        with jax.named_scope(_scopes.GRADIENTS):
            parts += [finite_leaves(step.grads, roles)]
        flags = jnp.concatenate(parts)
    agreed = agree(flags, step.wrapper.axis_name)
    loss_finite, is_partial, of_grads = agreed[0], ~agreed[1], agreed[2:]
    leaves_finite = of_grads[: len(step.grads)]
    # The sum of all squares is finite only if that of each leaf is.
    decides = leaves_finite if squares is None else of_grads[len(step.grads)]
    with jax.named_scope(_scopes.DECISION):
        grads_finite = jnp.all(decides)
        is_finite = grads_finite & loss_finite
    for_scaler = grads_finite & ~is_partial
    _check_axes(is_finite, step.state.steps, step.wrapper.axis_name)
    return _Observed(loss_finite, leaves_finite, is_finite, is_partial, for_scaler)


def _norm(
    step: _Step, squares: list[Array] | None, roles: list[str], reports_norm: bool
) -> Array:
    """The global norm of the gradients: where a clip computes it, the clip's."""
    if squares is not None:
        return jnp.sqrt(jnp.real(squares[-1])).astype(jnp.float32)
    return global_norm(step.grads, roles, as_clip=not reports_norm)


def _query_spike_policy(
    step: _Step, observed: _Observed, norm: Array | None
) -> tuple[Any, Array]:
    """The policy's next state if a step counts, and whether it skips a finite step."""
    wrapper, old = step.wrapper, step.state.spike_state
    policy = wrapper.spikes
    _check_spike_state(wrapper, step.state)
    if policy is None:
        return old, jnp.zeros_like(observed.is_finite)
    # All devices judge the same numbers: the largest of any device.
    signals = [norm, *floats_of(step.extra.get("value"))]
    signals = jnp.stack([jnp.asarray(x).astype(jnp.float32) for x in signals])
    signals = agree_on_max(lax.stop_gradient(signals), wrapper.axis_name)
    loss = signals[1] if signals.size > 1 else None
    new, skip = _judgement(policy.judge(old, loss, signals[0]))
    name = "the spike policy's"
    skip = as_flag(f"{name} skip", skip)
    new = cast_like(f"{name} state", new, old)
    return new, observed.is_finite & skip


def _judgement(result: Any) -> tuple[Any, Any]:
    """What a spike policy returned: its next state, and whether to skip."""
    if isinstance(result, tuple | list) and len(result) == 2 and is_flag(result[1]):
        return result[0], result[1]
    got = describe(result)
    if isinstance(result, tuple):
        got = f"({', '.join(map(describe, result))})"
    raise TypeError(
        "the spike policy's judge must return its next state and whether to skip, one "
        f"boolean, got {got}. Write return state, skip."
    )


def _updates_finite(step: _Step, updates: optax.Updates, inner_state: Any) -> Array:
    """`bool[1 + n]`: whether the inner state, and each update, may be kept."""
    stored = _finite_if_storable(updates, step.params, step.remainder)
    # A NaN moment shows in its update. A NaN in a shared scalar may not (D-Adaptation's
    # first step). Inf is allowed: some optimizers keep one on purpose.
    scalars = [x for x in floats_of(inner_state) if jnp.ndim(x) == 0]
    with jax.named_scope(_scopes.NEW):
        flags = jnp.concatenate([~any_nan(scalars)[None], finite_leaves(stored)])
    return agree(flags, step.wrapper.axis_name)


class _Flags(NamedTuple):
    """Facts of a step that the scaler and the counters read, `bool[]` each."""

    is_applied: Array
    loss_finite: Array
    is_partial: Array  # whether parts of the gradients were left out
    for_scaler: Array  # what the scaler's `adjust` takes
    bad_updates: Array
    is_spike: Array
    is_step: Array  # true: the count of steps is in the kernel of the other counters


def _count(
    step: _Step,
    observed: _Observed,
    spike_state: Any,
    is_spike: Array,
    inner_state: Any,
    applied: Array,
) -> LossScaledState:
    """The next state: the scaler adjusts, the counters advance."""
    wrapper, state = step.wrapper, step.state
    _check_scaler_state(wrapper, state.scaler_state)
    leaves_finite, never = observed.leaves_finite, jnp.zeros_like(applied)
    flags = ~leaves_finite if leaves_finite.size else state.nonfinite_leaves
    bad_updates = observed.is_finite & ~applied if step.checks_updates else never
    seen = at_once_on_gpu(
        _Flags(
            is_applied=applied,
            loss_finite=observed.loss_finite,
            is_partial=observed.is_partial,
            for_scaler=observed.for_scaler,
            bad_updates=bad_updates,
            is_spike=is_spike,
            is_step=~never,
        )
    )
    adjusted = wrapper.scaler.adjust(state.scaler_state, seen.for_scaler)
    adjusted = cast_like("the scaler's state", adjusted, state.scaler_state)
    gradients, loss, updates = SkipReason.GRADIENTS, SkipReason.LOSS, SkipReason.UPDATES
    reason = jnp.where(seen.bad_updates, updates.value, gradients.value)
    reason = jnp.where(seen.loss_finite, reason, loss.value)
    was_finite, bad_updates = seen.is_applied, seen.bad_updates
    if wrapper.spikes is not None:
        # A step skipped for another reason leaves no trace in the policy's state.
        was_finite = seen.is_applied | seen.is_spike
        bad_updates = seen.bad_updates & ~seen.is_spike
        reason = jnp.where(seen.is_spike, SkipReason.SPIKE.value, reason)
        spike_state = select(was_finite, spike_state, state.spike_state)
    events: dict[Event, Any] = {
        "step": seen.is_step,
        "skip": ~seen.is_applied,
        "nonfinite loss": ~seen.loss_finite,
        "nonfinite update": bad_updates,
        "spike": seen.is_spike,
        "partial overflow": seen.is_partial & seen.is_applied,
    }
    with jax.named_scope(_scopes.SCALE):
        scaler_state = select(seen.loss_finite, adjusted, state.scaler_state)
    counted = _counted(state, events, seen.is_applied, was_finite, reason, flags)
    return counted._replace(
        inner_state=_clone_keys(inner_state),
        scaler_state=scaler_state,
        applied=applied,
        spike_state=spike_state,
    )


def _counted(
    state: LossScaledState,
    events: dict[Event, Any],
    is_applied: Array,
    was_finite: Array,
    reason: Any,
    flags: Array,
) -> LossScaledState:
    """`state` with the counts, the reason and the bad leaves of one step more.

    Args:
      state: the state before.
      events: what happened in the step, `bool[]` each; what is missing did not.
      is_applied: whether the step was applied.
      was_finite: whether it was, or was skipped as a spike.
      reason: why it was skipped, if it was.
      flags: the leaves that were bad, if one was.
    """
    counts = {}
    for name, field in FIELDS.items():
        if field.counts is None:
            continue
        happened, old = events.get(field.counts, False), getattr(state, name)
        if field.is_of_policy and not has_policy(state):
            new = old
        elif field.is_consecutive:
            new = jnp.where(happened, count_up(old), 0)
        else:
            new = count_up(old, happened)
        counts[name] = new
    return state._replace(
        last_skip_reason=jnp.where(is_applied, state.last_skip_reason, reason),
        nonfinite_leaves=jnp.where(was_finite, state.nonfinite_leaves, flags),
        **counts,
    )


def _clone_keys(tree: Any) -> Any:
    """`tree`, with keys that `jax.debug_key_reuse` takes for new.

    A skip returns the keys that its step has used, and uses them again.
    """

    def clone(leaf):
        return jax.random.clone(leaf) if is_key(leaf) else leaf

    return jax.tree.map(clone, tree)


def _checks_updates(
    wrapper: WrapperUpdate, updates: Any, state: Any, params: Any
) -> bool:
    if wrapper.check_updates is not None:
        return wrapper.check_updates
    tree = updates if params is None else params
    checks = is_narrow(tree)
    if checks and rounds_bfloat16(state):
        floats = floats_of(tree)
        checks = is_narrow([x for x in floats if dtype_of(x) != jnp.bfloat16])
    return checks


def _targets(params: optax.Params | None, remainder: Remainder) -> list[Any] | None:
    """The parameters of the gradients; None if `params` has another structure."""
    same_structure = jax.tree.structure(params) == remainder.structure
    return leaves_at_floats(params, remainder) if same_structure else None


def _finite_if_storable(
    updates: optax.Updates, params: optax.Params | None, remainder: Remainder
) -> list[Array]:
    """For each update an array that is finite where the update may be applied.

    Where the update and its parameter are finite, that is the new parameter, or inf if
    it overflows in its dtype. Elsewhere it is the update: a mask of -inf is legal.
    """
    leaves, targets = leaves_at_floats(updates, remainder), _targets(params, remainder)
    if targets is None:
        return leaves

    def storable(update, param):
        if not is_inexact(param):
            return update
        dtype = np.result_type(wide_dtype(dtype_of(param)), update.dtype)
        stored = widen(param).astype(dtype) + update.astype(dtype)
        stored = inf_if_too_large(stored, dtype_of(param))
        are_finite = jnp.isfinite(widen(param)) & jnp.isfinite(update)
        return jnp.where(are_finite, stored.astype(update.dtype), update)

    return list(map(storable, leaves, targets))


def _no_updates(grads: list[Array], remainder: Remainder, params: Any) -> Any:
    """Updates that leave `params` unchanged: -0.0, in the wider dtype of both trees."""
    targets = _targets(params, remainder)
    targets = grads if targets is None else targets

    def zero(grad, target):
        leaves = [leaf for leaf in (grad, target) if is_inexact(leaf)]
        # numpy's rule: JAX's rule raises under strict promotion.
        dtype = np.result_type(*(wide_dtype(dtype_of(leaf)) for leaf in leaves))
        # Like the parameter, since gradients may still differ between devices, or have
        # an axis of examples.
        like = target if is_array(target) else grad
        # Concrete arrays may lie on different devices.
        kind = jax.typeof(like) if isinstance(like, Tracer) else id(like)
        if (kind, dtype) not in made:
            is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
            value = complex(-0.0, -0.0) if is_complex else -0.0
            made[kind, dtype] = jnp.full_like(like, value, dtype=dtype)
        return made[kind, dtype]

    made: dict[Any, Array] = {}

    def zero_of_others(leaf):
        is_number = is_array(leaf) and not is_extended(leaf)
        return jnp.zeros_like(leaf) if is_number else leaf

    zeros = [zero(*pair) for pair in zip(grads, targets, strict=True)]
    return combine(zeros, map_remainder(zero_of_others, remainder))


def _integer_paths(updates: Any, remainder: Remainder) -> list[Any]:
    """The paths of the integers, which get no update: it would not be an integer."""
    if not any(map(_is_integer, remainder.leaves)):
        return []
    flat, _ = jax.tree_util.tree_flatten_with_path(updates)
    return [path for path, leaf in flat if _is_integer(leaf)]


def _is_integer(leaf: Any) -> bool:
    return is_array(leaf) and not (is_inexact(leaf) or is_extended(leaf))


def _may_be_bad(leaf: Any) -> bool:
    """Whether it is a float that may be inf or NaN.

    Not a finite Python number, which stays one: the inner optimizer may branch on it.
    """
    return is_inexact(leaf) and not (isinstance(leaf, float) and math.isfinite(leaf))


def _check_wrapper_state(state: Any, params: Any) -> None:
    if is_wrapper_state(state):
        _check_scale(getattr(state.scaler_state, "loss_scale", None))
        return
    write = how_to_nest(state) or (
        "Pass what optimizer.init or the last update returned; what a run without jls "
        "has saved becomes one by jls.wrap_state(optimizer, state, params)."
    )
    if is_wrapper_state(params):
        write = "The order is update(grads, state, params)."
    elif hasattr(state, "opt_state"):
        write = "Pass the field that holds it: state.opt_state."
    raise TypeError(
        "state must be a LossScaledState as the optimizer's init makes it, got "
        f"{type(state).__name__}. {write}"
    )


def _check_scale(loss_scale: Any) -> None:
    if is_narrow(loss_scale):
        raise TypeError(
            f"the loss scale must be float32, got {jnp.result_type(loss_scale)} at "
            "'scaler_state', in which it may be inf. Return the state that update "
            "returns without a cast: a cast of the whole tree takes the loss scale "
            "along. A state that was saved so: "
            "jls.upgrade_state(optimizer.init(params), saved)."
        )


def _check_no_loss_in(updates: Any, params: Any) -> None:
    """Raises for the pair of loss and gradients in the place of the gradients."""
    structure, is_pair = jax.tree.structure, type(updates) is tuple
    if not is_pair or len(updates) != 2 or params is None:
        return
    wanted = structure(params)
    if structure(updates) != wanted and structure(updates[1]) == wanted:
        raise ValueError(
            "updates must be the gradients alone, got a pair. Write loss, grads = "
            "jls.value_and_grad(loss_fn)(opt_state, params, batch), then "
            "optimizer.update(grads, opt_state, params, value=loss)."
        )


def _check_count(got: int, state: Any) -> None:
    known = state.nonfinite_leaves.size
    if max(got, 1) != known:  # without a floating-point leaf there is one all the same
        wrapper = wrapper_name(state.scaler_state)
        raise ValueError(
            "updates must have as many floating-point leaves as the params of init, "
            f"got {got} and {known}. Differentiate what optimizer.init(params) got. If "
            "the model has changed, its optimizer starts anew: opt_state = "
            "optimizer.init(params). To mask or freeze a part, write it inside: "
            f"{wrapper}(optax.masked(inner, mask))."
        )


def _check_axes(flag: Array, count: Array, axis_name: AxisName) -> None:
    undecided = varying_axes(flag) - varying_axes(count)
    if undecided:
        raise ValueError(
            "axis_name must name each axis of jax.shard_map over which gradients or "
            f"loss differ, so that all devices decide as one: got {axis_name!r}, but "
            f"they differ over {sorted(undecided)}. Pass axis_name= to jls.loss_scaled."
        )


def _check_spike_state(wrapper: WrapperUpdate, state: LossScaledState) -> None:
    def kind(state):
        return jax.tree.structure(state), list(map(jnp.shape, jax.tree.leaves(state)))

    wants, has = wrapper.spikes is not None, has_policy(state)
    if wants == has and kind(wrapper.spike_shapes) == kind(state.spike_state):
        return
    made = "without spikes=" if not has else "with another spike policy"
    made = made if wants else "with spikes=, but the optimizer has none"
    write = "opt_state._replace(spikes=(), spike_state=())" if has else "opt_state"
    if wants:
        write = f"jls.upgrade_state(optimizer.init(params), {write})"
    raise ValueError(
        "the state must carry what the optimizer's spike policy made, but it was made "
        f"{made}. To go on from it{', with a new warm-up' if wants else ''}: opt_state "
        f"= {write}."
    )


def _check_scaler_state(wrapper: WrapperUpdate, scaler_state: Any) -> None:
    if jax.tree.structure(scaler_state) == wrapper.scaler_structure:
        return
    made = jax.eval_shape(wrapper.scaler.init)
    if type(made) is type(scaler_state):
        of_both = ("scaler.init()", made), ("the optimizer's state", scaler_state)
        how = difference(*of_both)
    else:
        names = (an(type(state).__name__) for state in (made, scaler_state))
        how = "scaler.init makes {}, the optimizer's state carries {}".format(*names)
    raise ValueError(
        f"the scaler's state must be one that this scaler made, but {how}. To go on "
        "under another scaler, replace it with a fresh one: "
        "opt_state._replace(scaler_state=scaler.init())."
    )
