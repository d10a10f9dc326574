"""NNX objects beside the model: random streams, metrics, a teacher."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import SCALER, cross_entropy, keyless, make_batch, spoiled

import jls

pytestmark = pytest.mark.standard_promotion


class Module(nnx.Module):
    """Its dropout takes the stream of the call, or one that it shares."""

    def __init__(self, rngs, shared=None):
        self.linear = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=jnp.float16, rngs=rngs)
        self.dropout = nnx.Dropout(0.25)
        self.out = nnx.Linear(8, 3, dtype=jnp.float16, rngs=rngs)
        self.shared = shared

    def __call__(self, x, rngs):
        return self.out(self.dropout(self.norm(self.linear(x)), rngs=rngs))


def loss_fn(model, batch, rngs):
    x, labels = batch
    return cross_entropy(model(x, rngs), labels)


def make(shared=None):
    model = Module(nnx.Rngs(0), shared)
    tx = jls.loss_scaled(optax.adamw(0.01), SCALER())
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def contents(*objects):
    states = nnx.to_pure_dict(nnx.state(objects))
    return jax.tree.map(np.array, keyless(states))


@pytest.fixture(
    params=[
        pytest.param(nnx.jit, id="jit"),
        pytest.param(lambda step: step, id="eager", marks=pytest.mark.more),
    ]
)
def jit(request):
    return request.param


@pytest.fixture(params=["train_step", "atomic"])
def step(request, jit):
    """The same step twice: as jls makes it, and by hand."""

    def by_hand(model, optimizer, batch, rngs):
        with jls.atomic(optimizer, model, rngs):
            grad_fn = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
            loss, grads = grad_fn(optimizer, model, batch, rngs)
            optimizer.update(model, grads, value=loss)
        return loss

    made = jls.train_step(loss_fn) if request.param == "train_step" else by_hand
    return jit(made)


def test_a_stream_beside_the_model_moves_on_or_is_rolled_back(step):
    model, optimizer = make()
    rngs = nnx.Rngs(dropout=1)
    for batch, count in (
        (make_batch(), 1),
        (spoiled(make_batch()), 1),
        (spoiled(make_batch(), jnp.inf), 1),
        (make_batch(), 2),
    ):
        before = contents(model, rngs)
        skips = jls.metrics(optimizer)["skips"]
        step(model, optimizer, batch, rngs=rngs)
        assert rngs.dropout.count.get_value() == count
        was_skipped = jls.metrics(optimizer)["skips"] > skips
        same = jax.tree.map(np.array_equal, before, contents(model, rngs))
        assert was_skipped == all(jax.tree.leaves(same))
        assert was_skipped == bool(~jls.all_finite(batch))


def test_train_step_takes_the_random_numbers_of_a_plain_step():
    (model, optimizer), rngs = make(), nnx.Rngs(dropout=1)
    (other, _), other_rngs = make(), nnx.Rngs(dropout=1)
    step, plain = nnx.jit(jls.train_step(loss_fn)), nnx.jit(loss_fn)
    for seed in range(3):
        report = step(model, optimizer, make_batch(seed=seed), rngs=rngs)
        loss = plain(other, make_batch(seed=seed), other_rngs)
        np.testing.assert_allclose(report.loss, loss, rtol=2e-3)
        nnx.update(other, nnx.state(model))


def test_a_stream_that_the_model_shares_stays_shared(jit):
    step, rngs = jit(jls.train_step(loss_fn)), nnx.Rngs(1)
    model, optimizer = make(shared=rngs)
    step(model, optimizer, make_batch(), rngs=rngs)
    assert model.shared is rngs
    assert rngs.default.count.get_value() == 1
    step(model, optimizer, spoiled(make_batch()), rngs=rngs)
    assert model.shared.default.count.get_value() == 1


def test_each_micro_batch_takes_the_next_random_numbers(jit):
    (model, optimizer), rngs = make(), nnx.Rngs(dropout=1)
    step = jit(jls.train_step(loss_fn, micro_batches=4))
    step(model, optimizer, make_batch(), rngs=rngs)
    assert rngs.dropout.count.get_value() == 4


def test_other_objects_are_not_trained_and_other_keywords_stay_as_they_are(jit):
    """A teacher has parameters too; `weight` is an array, `name` a string."""
    (model, optimizer), teacher = make(), Module(nnx.Rngs(5))
    metric, seen = nnx.metrics.Average(), []

    def loss_fn(model, batch, rngs, teacher, metrics, weight, name):
        seen.append((name, weight.shape))
        x, labels = batch
        soft = jax.nn.softmax(teacher(x, rngs).astype(jnp.float32))
        logits = model(x, rngs).astype(jnp.float32)
        loss = optax.softmax_cross_entropy(logits, soft).mean()
        metrics["loss"].update(values=loss)
        return loss + weight * cross_entropy(logits, labels)

    step = jit(
        lambda *args, **kwargs: jls.train_step(loss_fn)(*args, name="a", **kwargs)
    )
    before = contents(teacher)[0]
    kwargs = {"rngs": nnx.Rngs(1), "teacher": teacher, "weight": jnp.float32(0.5)}
    kwargs["metrics"] = {"loss": metric}
    for batch, count in ((make_batch(), 1), (spoiled(make_batch()), 1)):
        step(model, optimizer, batch, **kwargs)
        assert metric.count.get_value() == count
    assert seen
    assert set(seen) == {("a", ())}
    after = contents(teacher)[0]
    for part in ("linear", "out"):  # its batch statistics move, as in any forward pass
        same = jax.tree.map(np.array_equal, before[part], after[part])
        assert all(jax.tree.leaves(same))
    assert jls.health(optimizer, model).verdict == "non-finite loss"


def test_check_step_finds_no_mistake(step):
    (model, optimizer), rngs = make(), nnx.Rngs(1)
    check = jls.check_step(step, model, optimizer, make_batch(), rngs=rngs)
    assert check.ok, check


def test_objects_in_the_batch_are_refused_with_the_way_to_pass_them():
    (model, optimizer), rngs = make(), nnx.Rngs(1)
    step = jls.train_step(loss_fn)
    with pytest.raises(TypeError, match=r"by keyword, .*rngs=rngs"):
        step(model, optimizer, (*make_batch(), rngs))
    with pytest.raises(TypeError, match=r"rngs=rngs"):
        step(model, optimizer, make_batch(), rngs)


# By hand.


def test_what_the_block_adds_stays():
    class Sowing(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            return jnp.sum(self.w.get_value() * x)

    model = Sowing()
    optimizer = nnx.Optimizer(model, jls.loss_scaled(optax.sgd(0.5)), wrt=nnx.Param)
    with jls.atomic(optimizer, model):
        loss = model(jnp.full(2, jnp.nan))
        optimizer.update(model, nnx.state(model, nnx.Param), value=loss)
    assert jls.metrics(optimizer)["skips"] == 1
    assert hasattr(model, "seen")


def test_only_what_the_optimizer_does_not_update_is_rolled_back():
    """`wrt` may be any filter: here it leaves the last layer alone."""
    model = Module(nnx.Rngs(0))
    wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("out")))
    tx = jls.loss_scaled(optax.sgd(0.5), jls.static(1.0))
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    before = contents(model)[0]
    with jls.atomic(optimizer, model):
        model.out.bias.set_value(jnp.full(3, 7.0))
        grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), nnx.state(model, wrt))
        optimizer.update(model, grads)
    same = jax.tree.map(np.array_equal, before, contents(model)[0])
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("bad", ["optimizer", "model", "object", "bare"])
def test_wrong_arguments_of_atomic_are_named(bad):
    model, optimizer = make()
    objects = [nnx.Rngs(0)]
    if bad == "optimizer":
        model, optimizer = optimizer, model
    if bad == "model":
        model = {"w": jnp.ones(2)}
    if bad == "object":
        objects = [jnp.ones(2)]
    if bad == "bare":
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    message = {
        "optimizer": r"The order is jls\.atomic\(optimizer, model\)",
        "model": "model must be of Flax NNX, got dict",
        "object": "objects must be of Flax NNX",
        "bare": r"jls\.loss_scaled",
    }[bad]
    error = ValueError if bad == "bare" else TypeError
    with pytest.raises(error, match=message), jls.atomic(optimizer, model, *objects):
        raise AssertionError("the block must not run")


def test_a_block_without_an_update_is_an_error(jit):
    model, optimizer = make()

    def step(model, optimizer, batch, rngs):
        with jls.atomic(optimizer, model, rngs):
            grad_fn = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
            loss, grads = grad_fn(optimizer, model, batch, rngs)
        optimizer.update(model, grads, value=loss)

    with pytest.raises(ValueError, match=r"optimizer\.update must be called in the bl"):
        jit(step)(model, optimizer, make_batch(), nnx.Rngs(0))


def test_what_grows_in_the_block_stays():
    model, optimizer = make()
    model.seen = nnx.Intermediate((jnp.zeros(2),))
    with jls.atomic(optimizer, model):
        model.seen.set_value((*model.seen.get_value(), jnp.ones(2)))
        optimizer.update(model, nnx.state(model, nnx.Param), value=jnp.float32(jnp.nan))
    assert jls.metrics(optimizer)["skips"] == 1
    assert len(model.seen.get_value()) == 2


def test_variables_that_the_loss_adds_are_refused_with_the_way_out():
    model, optimizer = make()

    def adding(model, batch, rngs):
        model.seen = nnx.Intermediate(jnp.zeros(2))
        return loss_fn(model, batch, rngs)

    with pytest.raises(ValueError, match=r"'0/seen' .*nnx\.pop\(model, nnx\.Intermedi"):
        jls.train_step(adding)(model, optimizer, make_batch(), rngs=nnx.Rngs(0))

    def popping(model, batch, rngs):
        loss = adding(model, batch, rngs)
        return loss, nnx.pop(model, nnx.Intermediate)

    step = nnx.jit(jls.train_step(popping, has_aux=True))
    report = step(model, optimizer, make_batch(), rngs=nnx.Rngs(0))
    assert report.aux["seen"].shape == (2,)


def linear():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    tx = jls.skip_nonfinite(optax.sgd(0.1))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


STEP = jls.train_step(lambda model, x: jnp.mean(model(x) ** 2))
OF_JAX = {
    "jit": lambda step: jax.jit(step),
    "jit of a partial": lambda step: jax.jit(functools.partial(step)),
    "filter_jit": lambda step: eqx.filter_jit(step),
}


def without_jit(*args):
    with jax.disable_jit():
        return jax.jit(STEP)(*args)


def merged_inside(model, optimizer, x):
    structure, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state, x):
        objects = nnx.merge(structure, state)
        return STEP(*objects, x), nnx.state(objects)

    nnx.update((model, optimizer), step(state, x)[1])


TRANSFORMED = {
    "nnx.jit": nnx.jit(STEP),
    "nnx.jit of a function": nnx.jit(lambda *args: STEP(*args)),
    "not jitted": STEP,
    "jit is off": without_jit,
    "merged inside": merged_inside,
}


@pytest.mark.parametrize("name", OF_JAX)
def test_a_step_that_jax_jits_itself_would_lose_what_it_changes(name):
    with pytest.raises(TypeError, match=r"Write step = nnx\.jit\(jls\.train_step"):
        OF_JAX[name](STEP)(*linear(), jnp.ones((4, 3)))


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_step_that_keeps_what_it_changes_is_taken(name):
    model, optimizer = linear()
    before = np.array(model.kernel.get_value())
    TRANSFORMED[name](model, optimizer, jnp.ones((4, 3)))
    assert not np.array_equal(model.kernel.get_value(), before)


def test_a_step_of_nnx_may_be_looked_at():
    args = *linear(), jnp.ones((4, 3))
    assert jax.eval_shape(STEP, *args).loss.shape == ()
    assert jax.make_jaxpr(STEP)(*args)
