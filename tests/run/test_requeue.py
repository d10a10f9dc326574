"""`jls.requeue`: each batch is used once, or is bad by the rule."""

import collections
import functools
import itertools
import math
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jls
from jls.types import BadBatch, SkipReason, StepReport

UNREAD = dict.fromkeys(StepReport._fields)


def report_of(reason="NONE", scale=1.0, moves=True):
    """The three fields that are read, on the host: fast."""
    read = np.int32(SkipReason[reason]), np.float32(scale), np.bool_(moves)
    names = "skip_reason", "loss_scale", "scale_moves"
    return StepReport(**UNREAD | dict(zip(names, read, strict=True)))


# Against the loop of tests/reference.py. The fate of a batch is the largest loss scale
# at which it does not overflow, or the name of what is wrong with it at any scale.

NAN_GRADIENTS = 0.0
BOUNDS = {"min_scale": 1.0, "max_scale": 2.0**24}
DYNAMIC = BOUNDS | {
    "init_scale": 2.0**15,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 5,
    "backoff_interval": 1,
}
dynamic = functools.partial(reference.dynamic, **DYNAMIC)
SCALES = {
    "dynamic": dynamic,
    "from low": functools.partial(dynamic, init_scale=4.0),
    "at the floor": functools.partial(dynamic, init_scale=8.0, min_scale=8.0),
    "growing quickly": functools.partial(dynamic, growth_interval=1),
    "backing off late": functools.partial(dynamic, backoff_interval=3),
    "hysteresis": functools.partial(
        reference.hysteresis,
        **{k: x for k, x in DYNAMIC.items() if k != "backoff_interval"},
        hysteresis=2,
        refill="growth",
    ),
    "static": lambda flags: ((2.0**8,) for _ in flags),
    "going up": functools.partial(dynamic, init_scale=2.0, backoff_factor=2.0),
    "not a number": lambda flags: ((math.nan,) for _ in flags),
}
FIRST = {"from low": 4.0, "at the floor": 8.0, "static": 2.0**8, "going up": 2.0}


def run_of(name):
    """A function that takes the steps of a run: from a fate to a reason and a scale."""
    flags, scale = [], FIRST.get(name, 2.0**15)
    scales = SCALES[name](iter(flags.pop, None))

    def step(fate):
        nonlocal scale
        if isinstance(fate, str):
            reason = fate
        else:
            reason = "NONE" if scale <= fate else "GRADIENTS"
        if reason != "LOSS":
            flags.append(reason != "GRADIENTS")
            scale, *_ = next(scales)
        return reason, scale

    return step


def random_fates(rng):
    """Any fates, or many that only the rule brings to an end; the last one is good."""
    count, ceilings = rng.integers(0, 40), (2.0 ** np.arange(18)).tolist()
    bad = [NAN_GRADIENTS, "LOSS", "UPDATES", "SPIKE"]
    shares = [0.1, 0.1, 0.05, 0.05] if rng.random() < 0.7 else [0.6, 0, 0, 0]
    kinds = rng.choice(5, size=count, p=[*shares, 1 - sum(shares)])
    drawn = [rng.choice(ceilings).item() if kind == 4 else bad[kind] for kind in kinds]
    return [*drawn, 1.0]


class Batch:
    """An object that weak references may be made to."""

    def __init__(self, index):
        self.index = index


def played(fates, step, **options):
    """The tries of a loop over `jls.requeue`, and the queue; it may not hold more."""
    alive = weakref.WeakSet()

    def data():
        for i in range(len(fates)):
            batch = Batch(i)
            alive.add(batch)
            yield batch
            del batch

    queue, tries = jls.requeue(data(), **options), []
    for batch in queue:
        tries.append((batch.index, *step(fates[batch.index])))
        assert len(tries) <= 99 * len(fates), "it does not end"
        assert len(alive) <= options["lag"] + options["keep"] + 1
        queue.observe(report_of(*tries[-1][1:]))
        assert len(alive) <= options["lag"] + options["keep"] + 1
    del batch
    assert len(alive) == len(queue.bad)
    return tries, queue


@pytest.mark.parametrize("name", SCALES)
def test_queue_is_the_loop_by_hand(name):
    rng = np.random.default_rng(0)
    for _ in range(120):
        fates = random_fates(rng)
        lag, retries, keep = (int(rng.integers(*x)) for x in ((0, 6), (1, 5), (0, 5)))
        tries, queue = played(fates, run_of(name), lag=lag, retries=retries, keep=keep)
        expected, bad = reference.requeue(fates, run_of(name), lag=lag, retries=retries)
        assert repr(tries) == repr(expected)  # NaN is not equal to itself
        assert queue.bad_count == len(bad)
        assert [x.index for x in queue.bad] == bad[len(bad) - min(keep, len(bad)) :]
        assert queue.requeued == len(tries) - len(fates)
        assert repr(queue) == (
            f"BatchQueue({len(tries)} handed out, {queue.requeued} requeued, "
            f"{len(bad)} bad, 0 waiting)"
        )


@pytest.mark.parametrize("name", SCALES)
def test_each_batch_is_used_once_or_is_bad_by_the_rule(name):
    """What the rule promises, said without the rule."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        fates = random_fates(rng)
        lag, retries = int(rng.integers(0, 6)), int(rng.integers(1, 5))
        tries, queue = played(fates, run_of(name), lag=lag, retries=retries, keep=99)
        last = {index: reason for index, reason, _ in tries}
        used = [index for index, reason, _ in tries if reason == "NONE"]
        assert len(used) == len(set(used))
        bad = {x.index: x.reason.name for x in queue.bad}
        assert len(bad) == len(queue.bad) == queue.bad_count
        assert bad == {i: reason for i, reason in last.items() if reason != "NONE"}
        # New ones come in their order, with no other change than what comes again.
        assert list(dict.fromkeys(i for i, *_ in tries)) == list(range(len(fates)))
        counts = collections.Counter(i for i, *_ in tries)
        end = next(at for at, (i, *_) in enumerate(tries) if i == len(fates) - 1)
        for i, fate in enumerate(fates):
            ours = [at for at, (index, *_) in enumerate(tries) if index == i]
            if isinstance(fate, str):
                assert counts[i] == 1
                continue
            uncounted = 0
            for before, after in itertools.pairwise(ours):
                between = {reason for _, reason, _ in tries[before:after]}
                fell = tries[after][2] < tries[before][2]
                uncounted += "NONE" not in between and fell
                assert after - before > lag or after > end
            assert counts[i] <= 1 + retries + uncounted
            if i in bad:
                assert counts[i] >= 1 + retries


def test_at_the_start_a_batch_comes_until_the_scale_is_low_enough():
    tries, queue = played([2.0**8] * 4, run_of("dynamic"), lag=0, retries=1, keep=0)
    assert [i for i, *_ in tries] == [0] * 8 + [1, 2, 3]
    assert (queue.requeued, queue.bad_count) == (7, 0)


def test_nan_gradient_costs_no_more_backoffs_than_retries():
    fates = [2.0**15] * 20
    fates[5] = NAN_GRADIENTS
    for retries in (1, 2, 3):
        tries, queue = played(fates, run_of("dynamic"), lag=2, retries=retries, keep=8)
        assert [i for i, *_ in tries].count(5) == 1 + retries
        assert [(x.index, x.reason) for x in queue.bad] == [(5, SkipReason.GRADIENTS)]


@pytest.mark.parametrize(
    ("lag", "at"), [(0, 1), (0, 5), (0, 19), (1, 18), (2, 0), (2, 5), (2, 18), (2, 19)]
)
def test_a_nan_gradient_costs_the_same_wherever_it_is(lag, at):
    """Also where nothing is applied between its tries: with lag 0, and at the end."""
    fates = [2.0**15] * 20
    fates[at] = NAN_GRADIENTS
    tries, queue = played(fates, run_of("dynamic"), lag=lag, retries=3, keep=8)
    assert [i for i, *_ in tries].count(at) == 4
    assert min(scale for *_, scale in tries) >= 2.0**11
    assert [(x.index, x.reason) for x in queue.bad] == [(at, SkipReason.GRADIENTS)]


def test_before_anything_has_passed_only_the_floor_ends_a_nan_gradient():
    fates = [NAN_GRADIENTS, 1.0]
    tries, queue = played(fates, run_of("dynamic"), lag=0, retries=3, keep=8)
    assert min(scale for *_, scale in tries) == DYNAMIC["min_scale"]
    assert [i for i, *_ in tries] == [0] * (15 + 3 + 0) + [1]
    assert queue.bad_count == 1


def test_defaults_are_those_of_the_docstring():
    fates = [1.0] * 10
    fates[2] = NAN_GRADIENTS
    step, at = run_of("static"), []
    queue = jls.requeue(range(10))
    for i in queue:
        at.append(i)
        fate = fates[i] if i == 2 else 2.0**8
        queue.observe(report_of(*step(fate)))
    assert at == [0, 1, 2, 3, 4, 2, 5, 6, 2, 7, 8, 2, 9]  # two steps late, three times
    queue = jls.requeue(range(10))
    for _ in queue:
        queue.observe(report_of("LOSS"))
    assert [x.index for x in queue.bad] == list(range(2, 10))
    assert queue.bad_count == 10


# A real step in float16.

X = np.float32([1, 2, 4, 2, 1, 4, 1, 2, 4, 1, 2, 2])
NAN, INF, SPIKE, NAN_GRADIENT, LARGE = 2, 4, 7, 9, 10


def loss_fn(params, batch):
    """Its gradients are `batch["x"]`, exactly, while the scale is low enough."""
    half = params.astype(jnp.float16)
    y = jnp.sum(half * batch["x"].astype(jnp.float16)).astype(jnp.float32)
    of_zero = jnp.where(batch["nan_gradient"], 0 * params, jnp.ones_like(params))
    return y + jnp.sum(jnp.sqrt(of_zero)) + batch["more"]


def real_batches():
    more = np.zeros(len(X), np.float32)
    more[[NAN, INF, SPIKE]] = np.nan, np.inf, 1e6
    x = X.copy()
    x[LARGE] = 64.0
    nan_gradient = np.arange(len(X)) == NAN_GRADIENT
    return [
        {"x": jnp.array([a, 2 * a]), "more": jnp.asarray(b), "nan_gradient": c}
        for a, b, c in zip(x, more, jnp.asarray(nan_gradient), strict=True)
    ]


@pytest.mark.cover(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "scaler",
    [
        jls.dynamic(2.0**17, growth_interval=3),
        jls.dynamic(2.0**17, growth_interval=3, backoff_interval=2),
        jls.static(2.0**12),
        jls.static(2.0**20),
        jls.presets.mindformers_adaptive(2.0**17, 2, 2, 3, 2),
        jls.hysteresis(2.0**17, growth_interval=3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("lag", [0, 2])
def test_run_ends_where_a_plain_run_over_the_used_batches_ends(scaler, lag):
    inner = optax.sgd(0.25, momentum=0.5)  # exact, for so few steps
    optimizer = jls.loss_scaled(inner, scaler, spikes=jls.spikes(window=8, warmup=2))
    step = jax.jit(jls.train_step(loss_fn, optimizer), donate_argnums=(0, 1))
    params, used = jnp.zeros(2), []
    opt_state = optimizer.init(params)
    queue = jls.requeue(real_batches(), lag=lag, keep=len(X))
    for batch in queue:
        params, opt_state, report = step(params, opt_state, batch)
        queue.observe(report)
        used += [] if report.skipped else [batch]
    plain, state = jnp.zeros(2), inner.init(params)
    for batch in used:
        updates, state = inner.update(batch["x"], state, plain)
        plain = optax.apply_updates(plain, updates)
    chex.assert_trees_all_equal(params, plain)
    reasons = {bad.index: bad.reason.name for bad in queue.bad}
    assert reasons.pop(NAN) == reasons.pop(INF) == "LOSS"
    if repr(scaler) == repr(jls.static(2.0**20)):
        assert set(reasons.values()) == {"GRADIENTS"}
        assert not used
    else:
        # A loss that was not finite is no gradient, and the scale was low enough.
        assert reasons.pop(NAN_GRADIENT) == "GRADIENTS"
        assert reasons.pop(SPIKE) == "SPIKE"
        assert set(reasons) <= {LARGE}
    assert len(used) + queue.bad_count == len(X)
    assert next(bad for bad in queue.bad if bad.index == INF).batch["more"] == np.inf


# What is read, and when.


class Logged:
    """A scalar on a device: it says when it is copied, and when it is read."""

    def __init__(self, value, name, log):
        self.value, self.name, self.log = value, name, log

    def copy_to_host_async(self):
        self.log.append(f"copy {self.name}")

    def __array__(self, dtype=None, copy=None):
        guard = jax.config.jax_transfer_guard_device_to_host
        assert guard == "allow"  # even if the user has set another
        self.log.append(f"read {self.name}")
        return np.asarray(self.value)


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_flag_is_read_lag_steps_late_and_nothing_else_is(lag):
    log, skipped = [], {3: "GRADIENTS", 8: "LOSS"}
    queue, steps = jls.requeue(range(12), lag=lag), 0
    with jax.transfer_guard_device_to_host("disallow"):
        for _ in queue:
            name, logged = (
                skipped.get(steps, "NONE"),
                functools.partial(Logged, log=log),
            )
            report = StepReport(*(logged(0, field) for field in StepReport._fields))
            del log[:]
            queue.observe(
                report._replace(
                    skip_reason=logged(SkipReason[name], f"flag {steps}"),
                    loss_scale=logged(1.0, f"scale {steps}"),
                    scale_moves=logged(True, f"moves {steps}"),
                )
            )
            judged = steps - lag
            expected = [f"copy {what} {steps}" for what in ("flag", "scale", "moves")]
            late = [f"read flag {judged}", f"read scale {judged}"]
            late += [f"read moves {judged}"] * (skipped.get(judged) == "GRADIENTS")
            assert log == expected + (late if judged >= 0 else [])
            steps += 1
            del log[:]
    assert steps == 13
    left = range(13 - lag, 13)
    assert log == [f"read {what} {i}" for i in left for what in ("flag", "scale")]


def test_only_the_flag_is_held_of_a_report():
    class Large:
        pass

    large = Large()
    alive, queue = weakref.ref(large), jls.requeue([1, 2])
    next(queue)
    queue.observe(report_of()._replace(aux=large, loss=large))
    del large
    assert alive() is None


# The data.


def drain(queue, reason=lambda batch: "NONE"):
    handed_out = []
    for batch in queue:
        handed_out.append(batch)
        queue.observe(report_of(reason(batch)))
    return handed_out


class OnlyIter:
    def __iter__(self):
        return iter("abc")


class Endless:
    """An iterator that says again and again that it has ended."""

    def __init__(self):
        self.asked = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += 1
        if self.asked > 3:
            raise StopIteration
        return "abc"[self.asked - 1]


class OnlyGetitem:
    def __getitem__(self, index):
        return "abc"[index]


@pytest.mark.parametrize(
    "data",
    [
        list("abc"),
        (x for x in "abc"),
        dict.fromkeys("abc").keys(),
        {1: "a", 2: "b", 3: "c"}.values(),
        OnlyIter(),
        Endless(),
        OnlyGetitem(),
    ],
    ids=lambda data: type(data).__name__,
)
def test_any_iterable_will_do(data):
    queue = jls.requeue(data)
    assert iter(queue) is queue
    assert drain(queue) == ["a", "b", "c"]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(queue)
    assert not isinstance(data, Endless) or data.asked == 4


def test_no_data_is_no_batch():
    assert drain(jls.requeue([])) == []


def test_a_loop_over_a_queue_at_its_end_is_told_to_make_one_for_each_epoch():
    queue = jls.requeue(range(2))
    assert list(drain(queue)) == [0, 1]
    with pytest.warns(
        jls.JlsWarning, match=r"each epoch: queue = jls\.requeue"
    ) as told:
        assert drain(queue) == []
    assert told[0].filename == __file__
    with pytest.raises(StopIteration):  # as of any iterator
        next(queue)


def test_iteration_ends_where_the_data_ends_early():
    def data():
        yield from range(3)
        return  # as a generator whose file has ended

    queue, failed = jls.requeue(data(), lag=5), []

    def once(batch):
        reason = "NONE" if batch in failed else "GRADIENTS"
        failed.append(batch)
        return reason

    assert drain(queue, once) == [0, 1, 2, 0, 1, 2]


class Flaky:
    """Raises once, at its fourth batch; a generator would be over then."""

    def __init__(self, goes_on):
        self.goes_on, self.batches, self.raised = goes_on, iter(range(6)), False

    def __iter__(self):
        return self

    def __next__(self):
        if self.raised and not self.goes_on:
            raise StopIteration
        batch = next(self.batches)
        if batch == 3 and not self.raised:
            self.batches = iter((3, 4, 5))
            self.raised = True
            raise OSError("no such file")
        return batch


@pytest.mark.parametrize("goes_on", [True, False])
def test_nothing_is_lost_if_the_data_raises(goes_on):
    queue, handed_out = jls.requeue(Flaky(goes_on)), []

    def reason(batch):
        is_first = batch not in handed_out
        handed_out.append(batch)
        return "GRADIENTS" if is_first and batch == 2 else "NONE"

    with pytest.raises(OSError, match="no such file"):
        drain(queue, reason)
    drain(queue, reason)
    assert handed_out == [0, 1, 2, *([3, 4, 2, 5] if goes_on else [2])]
    assert repr(queue).startswith(f"BatchQueue({len(handed_out)} handed out, 1 ")


def test_batch_that_was_not_observed_comes_once_more_in_a_new_loop():
    queue, handed_out = jls.requeue(range(4), lag=0), []
    reasons = iter(["GRADIENTS", *["NONE"] * 4])
    for _ in range(3):
        try:
            for batch in queue:
                handed_out.append(batch)
                if len(handed_out) in (2, 5):  # the first is a retry
                    raise KeyboardInterrupt
                queue.observe(report_of(next(reasons)))
        except KeyboardInterrupt:
            pass
    assert handed_out == [0, 0, 0, 1, 2, 2, 3]
    assert (queue.requeued, queue.bad_count) == (1, 0)


def test_batch_may_be_observed_after_an_interrupt():
    queue = jls.requeue(range(3))
    next(queue)
    assert iter(queue) is queue
    queue.observe(report_of())  # its step did run
    next(queue)
    with pytest.raises(ValueError, match="no report of the step on batch 1"):
        next(queue)
    assert next(iter(queue)) == 1
    with pytest.raises(ValueError, match="no report of the step on batch 1"):
        next(queue)
    queue.observe(report_of())
    assert drain(queue) == [2]


def test_interrupt_after_a_step_was_observed_changes_nothing():
    queue, handed_out = jls.requeue(range(4)), []
    for _ in range(5):
        for batch in queue:
            handed_out.append(batch)
            queue.observe(report_of())
            break
    assert handed_out == [0, 1, 2, 3]


class Interrupted(Logged):
    """Ctrl-C while the host waits for the device."""

    def __array__(self, dtype=None, copy=None):
        if "interrupted" not in self.log:
            self.log.append("interrupted")
            raise KeyboardInterrupt
        return super().__array__(dtype, copy)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_interrupt_while_a_flag_is_read_neither_loses_nor_repeats_a_step(lag):
    queue, handed_out = jls.requeue(range(5), lag=lag), []
    report = report_of("GRADIENTS")
    report = report._replace(skip_reason=Interrupted(report.skip_reason, "flag", []))
    for _ in range(2):
        try:
            for batch in queue:
                handed_out.append(batch)
                is_first = len(handed_out) == 1
                queue.observe(report if is_first else report_of())
        except KeyboardInterrupt:
            pass
    assert "interrupted" in report.skip_reason.log
    assert sorted(handed_out) == [0, 0, 1, 2, 3, 4]
    assert queue.requeued == 1


# A checkpoint.


def trained(queue, step, ceilings, stop=math.inf, observes=True):
    """The batches that were used in the steps up to `stop`."""
    used = []
    for count, batch in enumerate(queue, 1):
        if count == stop and not observes:
            break
        reason, scale = step(ceilings[batch])
        used += [batch] if reason == "NONE" else []
        queue.observe(report_of(reason, scale))
        if count == stop:
            break
    return used


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("observes", [True, False])
def test_interrupted_and_resumed_run_uses_every_batch_once(lag, observes):
    rng = np.random.default_rng(2)
    for stop in range(1, 30):
        ceilings = (2.0 ** rng.integers(4, 16, size=24)).tolist()
        step, rest = run_of("dynamic"), iter(range(24))
        queue = jls.requeue(rest, lag=lag, retries=99)
        used = trained(queue, step, ceilings, stop, observes)
        saved = queue.outstanding()
        assert saved == queue.outstanding()
        assert all(index == batch for index, batch in saved)
        resumed = itertools.chain((batch for _, batch in saved), rest)
        used += trained(jls.requeue(resumed, retries=99), step, ceilings)
        assert sorted(used) == list(range(24))


def test_a_second_checkpoint_has_what_the_first_saved_and_has_not_come_yet():
    for stop in range(6):
        queue, used = jls.requeue(list("cd"), first=list("ab"), lag=0), []
        for batch in itertools.islice(queue, stop):
            used.append(batch)
            queue.observe(report_of())
        saved = queue.outstanding()
        assert saved == tuple(enumerate("ab"[stop:], stop))
        rest = list("cd")[max(stop - 2, 0) :]
        resumed = jls.requeue(rest, first=[batch for _, batch in saved], lag=0)
        used += trained(resumed, run_of("static"), dict.fromkeys("abcd", 2.0**24))
        assert used == list("abcd")


def test_what_is_skipped_comes_before_the_rest_of_the_saved():
    queue = jls.requeue(list("cd"), first=["a", "b"], lag=0)
    assert next(queue) == "a"
    queue.observe(report_of("GRADIENTS"))
    assert queue.outstanding() == ((0, "a"), (1, "b"))
    assert next(queue) == "a"
    assert queue.outstanding() == ((0, "a"), (1, "b"))


@pytest.mark.parametrize(
    "optimizer",
    [jls.skip_nonfinite(optax.sgd(0.1)), jls.loss_scaled(optax.sgd(0.1), jls.static())],
)
def test_a_batch_is_bad_at_once_where_no_scale_can_mend_it(optimizer):
    def loss_fn(params, batch):  # its gradient overflows, its loss does not
        return jnp.sum(params * batch) * 1e-30

    step = jax.jit(jls.train_step(loss_fn, optimizer))
    params = jnp.zeros(1)
    opt_state, queue = optimizer.init(params), jls.requeue([1.0, jnp.inf, 2.0])
    handed_out = []
    for batch in queue:
        handed_out.append(batch)
        params, opt_state, report = step(params, opt_state, batch)
        assert not report.scale_moves
        queue.observe(report._replace(skip_reason=report.skip_reason // 2))
    assert handed_out == [1.0, jnp.inf, 2.0]
    assert [bad.index for bad in queue.bad] == [1]


def test_first_that_was_skipped_is_the_first_that_comes_again():
    queue, handed_out = jls.requeue(range(6), lag=3), []
    for batch in queue:
        is_skipped = len(handed_out) < 3
        handed_out.append(batch)
        queue.observe(report_of("GRADIENTS" if is_skipped else "NONE"))
        if batch == 2 and is_skipped:
            assert queue.outstanding() == ((0, 0), (1, 1), (2, 2))
    assert handed_out == [0, 1, 2, 0, 1, 2, 3, 4, 5]


def test_outstanding_does_not_change_what_is_decided():
    rng = np.random.default_rng(3)
    for _ in range(100):
        fates, step = random_fates(rng), run_of("static")
        queue, tries = jls.requeue(range(len(fates)), lag=3, keep=99), []
        for batch in queue:
            tries.append(batch)
            queue.observe(report_of(*step(fates[batch])))
            if rng.random() < 0.3:
                waiting = [index for index, _ in queue.outstanding()]
                assert f"{len(waiting)} waiting" in repr(queue)
                assert not set(waiting) & {bad.index for bad in queue.bad}
        _, bad = reference.requeue(fates, run_of("static"), lag=3, retries=3)
        assert sorted(x.index for x in queue.bad) == sorted(bad)


# Reports of several devices, and of several runs.


def test_report_of_pmap_has_a_value_for_each_device():
    queue = jls.requeue(list("ab"), lag=0)
    flags = np.int32([1, 1, 1, 1])
    next(queue)
    queue.observe(report_of()._replace(skip_reason=flags, loss_scale=flags / 2))
    assert next(queue) == "a"
    queue.observe(report_of()._replace(skip_reason=jnp.zeros(4, jnp.int32)))
    assert drain(queue) == ["b"]


@pytest.mark.parametrize("lag", [0, 2])
def test_reports_of_several_runs_are_refused(lag):
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(8.0))
    step = jax.vmap(
        functools.partial(jls.apply_gradients, optimizer), in_axes=(0, 0, 0)
    )
    params = jnp.ones((2, 3))
    opt_state = jax.vmap(optimizer.init)(params)
    *_, report = step(params.at[1, 1].set(jnp.inf), opt_state, params)
    queue = jls.requeue(range(5), lag=lag)
    for i in range(lag):
        assert next(queue) == i
        queue.observe(report if i == 0 else report_of())
    next(queue)
    before, last = repr(queue), report_of() if lag else report
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"report.skip_reason must be one value.*got \[0, 1\]"
        ):
            queue.observe(last)
    assert repr(queue) == before
    assert queue._current.index == lag  # it can still be observed
    assert next(iter(queue)) == lag
    if lag == 0:  # else the report is taken already
        queue.observe(report_of())
        assert drain(queue) == [1, 2, 3, 4]


# Wrong arguments.


def test_donated_batch_is_named():
    queue = jls.requeue([{"x": jnp.ones(2), "y": 1}, {"x": jnp.ones(2), "y": 2}])
    next(queue)
    queue.observe(report_of())
    batch = next(queue)
    jax.jit(lambda x: 2 * x, donate_argnums=0)(batch["x"])
    batch["x"].delete()
    with pytest.raises(ValueError, match=r"batch 1 must be in memory.*donate_argnums"):
        queue.observe(report_of())
    batch["x"] = jnp.ones(2)
    queue.observe(report_of())
    assert drain(queue) == []


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("lag", -1, ValueError),
        ("lag", 2.0, TypeError),
        ("lag", True, TypeError),
        ("lag", None, TypeError),
        ("keep", -1, ValueError),
        ("keep", "8", TypeError),
        ("retries", 0, ValueError),
        ("retries", 1.5, TypeError),
        ("retries", 2**31, ValueError),
    ],
)
def test_options_are_checked(name, value, error):
    with pytest.raises(error, match=f"^{name} must be .*got .*{value!r}"):
        jls.requeue([], **{name: value})


@pytest.mark.parametrize("data", [None, 3, Batch(0), lambda: iter(())])
def test_data_must_be_iterable(data):
    rule = rf"^batches must be an iterable of batches, got {type(data).__name__}"
    with pytest.raises(TypeError, match=rule):
        jls.requeue(data)


@pytest.mark.parametrize("name", ["batches", "first"])
@pytest.mark.parametrize("array", [np.zeros((4, 2)), jnp.zeros(3)])
def test_an_array_is_no_data_of_batches(name, array):
    """Its rows would come, one by one."""
    given = {"batches": [1.0], name: array}
    with pytest.raises(TypeError, match=f"^{name} must be an iterable of batches, got"):
        jls.requeue(**given)


def test_options_may_be_of_numpy():
    queue = jls.requeue(
        list("ab"), lag=np.int64(0), keep=jnp.asarray(0), retries=np.int32(1)
    )
    assert drain(queue, lambda _: "LOSS") == ["a", "b"]
    assert (queue.bad, queue.bad_count) == ((), 2)


def test_each_batch_is_observed_once():
    queue = jls.requeue(list("abc"))
    with pytest.raises(ValueError, match=r"no batch was handed out yet"):
        queue.observe(report_of())
    assert next(queue) == "a"
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^queue.observe\(report\) must be called.*on batch 0"
        ):
            next(queue)
    queue.observe(report_of())
    with pytest.raises(ValueError, match=r"no batch was handed out since the last"):
        queue.observe(report_of())
    assert drain(queue) == ["b", "c"]
    with pytest.raises(ValueError, match=r"no batch was handed out since the last"):
        queue.observe(report_of())


def test_prefetcher_after_the_queue_is_refused():
    def prefetched(batches):
        waiting = collections.deque(itertools.islice(batches, 2))
        while waiting:
            yield waiting.popleft()
            waiting.extend(itertools.islice(batches, 1))

    with pytest.raises(ValueError, match="A prefetcher has to stand before the queue"):
        next(prefetched(jls.requeue(list("abc"))))
    assert drain(jls.requeue(prefetched(iter("abc")))) == ["a", "b", "c"]


def test_what_is_no_report_is_named():
    opt_state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
    queue = jls.requeue(list("ab"))
    next(queue)
    for report, called in [
        (opt_state, "LossScaledState"),
        (jls.metrics(opt_state), "dict"),
        ((jnp.ones(2), opt_state, report_of()), "tuple"),
        (None, "NoneType None"),
        (jnp.int32(0), r"int32\[\]"),
    ]:
        with pytest.raises(
            TypeError, match=rf"^report must be a jls.types.StepReport.*, got {called}"
        ):
            queue.observe(report)
    queue.observe(report_of())
    assert drain(queue) == ["b"]


@pytest.mark.parametrize("field", ["skip_reason", "loss_scale"])
def test_traced_report_is_refused(field):
    queue = jls.requeue(list("ab"))
    next(queue)

    def observe(value):
        queue.observe(report_of()._replace(**{field: value}))

    with pytest.raises(ValueError, match=f"report must be concrete.*{field!r}"):
        jax.jit(observe)(jnp.int32(0))
    queue.observe(report_of())
    assert drain(queue) == ["b"]


@pytest.mark.parametrize("ago", [1, 2, 3])
@pytest.mark.parametrize("make", [jnp.asarray, np.array])
def test_report_of_an_earlier_step_is_refused(ago, make):
    queue, reports = jls.requeue(range(9), lag=2), []
    for batch in queue:
        report = report_of()
        report = report._replace(skip_reason=make(report.skip_reason))
        if batch >= ago:
            with pytest.raises(
                ValueError, match=f"the step on batch {batch}, got that of an earlier"
            ):
                queue.observe(reports[-ago])
        queue.observe(report)
        reports.append(report)
    assert len(reports) == 9


def test_numbers_of_python_are_no_arrays_of_an_earlier_step():
    queue = jls.requeue(list("abc"))
    for _ in queue:
        queue.observe(report_of()._replace(skip_reason=0))
    assert queue.bad == ()


def test_bad_batches_are_named_tuples():
    queue = jls.requeue(list("ab"))
    assert drain(queue, lambda batch: "LOSS" if batch == "b" else "NONE") == ["a", "b"]
    assert queue.bad == (BadBatch(1, "b", SkipReason.LOSS),)
    assert isinstance(queue, jls.types.BatchQueue)
