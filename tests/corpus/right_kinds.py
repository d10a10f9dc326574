"""Right steps of kinds that papers and examples have, in their style.

Beside what is trained there are targets, averages, frozen trees, queues, codebooks and
keys; in place of one optimizer there are two or three. As in `right_steps` and
`right_programs`, `jls.check_step` may call none of them broken.

`KINDS[name]()` is (step, args) or (step, args, keywords of `check_step`). Nearly all
run forward in float16. What must not move in a step that is skipped is held by
`jls.select`; a target or an average of the parameters, which follows what it finds, and
a key or a count may move.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import steps
from flax import linen as nn
from flax import nnx, struct
from flax.training import train_state
from right_programs import layers, run_layers, train
from steps import BATCH, SCALER, X, Y, half, mse, plain_loss, plain_params, wrap

import jls

KINDS = {}


def kind(make):
    KINDS[make.__name__] = make
    return make


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


# Frozen parameters.


def adapted(base, lora, x):
    """Two layers, each with a low-rank addition: https://arxiv.org/abs/2106.09685."""
    x = x.astype(jnp.float16)
    for name in ("first", "last"):
        w, low = half(base[name]), half(lora[name])
        x = x @ w + (x @ low["a"]) @ low["b"]
        x = jnp.tanh(x) if name == "first" else x
    return x.astype(jnp.float32)


def new_adapter():
    base = {"first": normal(0, 4, 8) / 2, "last": normal(1, 8, 2) / 3}
    lora = {
        name: {"a": normal(2, len(w), 2) / 2, "b": jnp.zeros((2, w.shape[1]))}
        for name, w in base.items()
    }
    return base, lora


@kind
def lora_with_its_base_as_an_argument():
    optimizer = wrap(optax.adamw(1e-2))

    @jax.jit
    def step(lora, opt_state, base, batch):
        def loss_fn(lora):
            return mse(adapted(base, lora, batch["x"]), batch)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, lora)
        updates, opt_state = optimizer.update(grads, opt_state, lora, value=loss)
        return optax.apply_updates(lora, updates), opt_state, loss

    base, lora = new_adapter()
    return step, (lora, optimizer.init(lora), base, BATCH)


@kind
def lora_in_one_tree_with_its_base():
    """`optax.partition` inside the wrapper keeps the base, whose gradients are made."""
    labels = {"base": "frozen", "lora": "trained"}
    inner = optax.partition(
        {"trained": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels
    )
    optimizer = wrap(inner)

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            return mse(adapted(params["base"], params["lora"], batch["x"]), batch)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    base, lora = new_adapter()
    params = {"base": base, "lora": lora}
    return step, (params, optimizer.init(params), BATCH)


@kind
def lora_with_its_base_returned():
    optimizer = wrap(optax.sgd(0.1, momentum=0.9))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        def loss_fn(lora, base):
            return mse(adapted(base, lora, batch["x"]), batch)

        loss, grads = jls.value_and_grad(loss_fn)(
            state["opt_state"], state["lora"], state["base"]
        )
        updates, opt_state = optimizer.update(
            grads, state["opt_state"], state["lora"], value=loss
        )
        lora = optax.apply_updates(state["lora"], updates)
        return {**state, "lora": lora, "opt_state": opt_state}, loss

    base, lora = new_adapter()
    state = {"base": base, "lora": lora, "opt_state": optimizer.init(lora)}
    return step, (state, BATCH)


@kind
def nnx_lora():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.LoRALinear(4, 8, lora_rank=2, dtype=jnp.float16, rngs=rngs)
            self.last = nnx.LoRALinear(8, 2, lora_rank=2, dtype=jnp.float16, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.tanh(self.first(x)))

    trained = nnx.DiffState(0, nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = jls.value_and_grad(
            steps.nnx_loss,
            transform=functools.partial(nnx.value_and_grad, argnums=trained),
        )(optimizer, model, batch)
        optimizer.update(model, grads, value=loss)
        return loss

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, wrap(optax.adam(1e-2)), wrt=nnx.LoRAParam)
    return step, (model, optimizer, BATCH)


def narrow(model):
    """An Equinox model in float16."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float16) if eqx.is_inexact_array(x) else x, model
    )


@kind
def equinox_frozen_layer():
    """As in its documentation, but the moments too are of the last layer alone."""
    optimizer = wrap(optax.adam(1e-2))
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    is_trained = eqx.tree_at(
        lambda tree: (tree.layers[-1].weight, tree.layers[-1].bias),
        jax.tree.map(lambda _: False, model),
        replace=(True, True),
    )

    @eqx.filter_jit
    def step(model, x, y, opt_state):
        def loss_fn(trained, static):
            model = narrow(eqx.combine(trained, static))
            return mse(jax.vmap(model)(half(x)), {"y": y})

        trained, static = eqx.partition(model, is_trained)
        loss, grads = jls.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)(
            opt_state, trained, static
        )
        updates, opt_state = optimizer.update(grads, opt_state, trained, value=loss)
        return loss, eqx.apply_updates(model, updates), opt_state

    opt_state = optimizer.init(eqx.filter(model, is_trained))
    return step, (model, X, Y, opt_state)


@kind
def linen_pretrained_backbone():
    """As in Flax's guide to transfer learning: a partition by path."""

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, dtype=jnp.float16, name="backbone")(x)
            return nn.Dense(2, dtype=jnp.float16, name="head")(nn.relu(x))

    def label(path, _):
        return "frozen" if path[0].key == "backbone" else "trainable"

    @jax.jit
    def step(state, batch):
        def loss_fn(params):
            return steps.linen_loss(state, params, batch)

        loss, grads = jls.value_and_grad(loss_fn)(state.opt_state, state.params)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, {"loss": loss}

    model = Classifier()
    params = model.init(jax.random.key(0), X)["params"]
    tx = wrap(
        optax.partition(
            {"trainable": optax.adam(1e-2), "frozen": optax.set_to_zero()},
            jax.tree_util.tree_map_with_path(label, params),
        )
    )
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return step, (state, BATCH)


@kind
def frozen_by_set_to_zero_after_adam():
    """Adam has moments of the frozen part too."""
    inner = optax.chain(
        optax.adam(1e-2),
        optax.masked(optax.set_to_zero(), {"backbone": True, "head": False}),
    )
    return split_by_hand(inner, jnp.asarray)


@kind
def frozen_by_stop_gradient():
    """And by a mask, since weight decay would move it."""
    inner = optax.masked(optax.adamw(1e-2), {"backbone": False, "head": True})
    return split_by_hand(inner, jax.lax.stop_gradient)


def split_by_hand(inner, through):
    optimizer = wrap(inner)

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            features = run_layers(params["backbone"], batch["x"])
            return mse(run_layers(params["head"], through(features)), batch)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"backbone": layers(0, 4, 8, 6), "head": layers(1, 6, 2)}
    return step, (params, optimizer.init(params), BATCH)


@kind
def haiku_partitioned_by_module():
    def forward(x):
        x = jnp.tanh(hk.Linear(8, name="encoder")(x))
        return hk.Linear(2, name="decoder")(x)

    model = hk.without_apply_rng(hk.transform(forward))
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(trainable, frozen, opt_state, batch):
        def loss_fn(trainable):
            params = hk.data_structures.merge(trainable, frozen)
            return mse(model.apply(half(params), half(batch["x"])), batch)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, trainable)
        updates, opt_state = optimizer.update(grads, opt_state, trainable, value=loss)
        return optax.apply_updates(trainable, updates), opt_state, loss

    trainable, frozen = hk.data_structures.partition(
        lambda module, name, value: module == "decoder",
        model.init(jax.random.key(0), X),
    )
    return step, (trainable, frozen, optimizer.init(trainable), BATCH)


@kind
def distillation_with_a_frozen_teacher():
    """The teacher, a tree like the student, comes back as it was."""
    optimizer = wrap(optax.adamw(1e-2))

    @jax.jit
    def step(teacher, student, opt_state, batch):
        def loss_fn(student):
            soft = jax.nn.log_softmax(run_layers(teacher, batch["x"]) / 2.0)
            made = run_layers(student, batch["x"])
            kl = jnp.exp(soft) * (soft - jax.nn.log_softmax(made / 2.0))
            return mse(made, batch) + kl.sum(1).mean()

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, student)
        updates, opt_state = optimizer.update(grads, opt_state, student, value=loss)
        return teacher, optax.apply_updates(student, updates), opt_state, loss

    student = layers(1, 4, 8, 2)
    return step, (layers(0, 4, 8, 2), student, optimizer.init(student), BATCH)


# Actors and critics.


class Transitions(NamedTuple):
    observation: Any
    action: Any
    reward: Any
    following: Any
    done: Any


TRANSITIONS = Transitions(
    X, jnp.tanh(Y), X.sum(1) / 3, X + 0.1 * Y.sum(1, keepdims=True), X[:, 0] > 1.5
)


def value_of(critic, observation, action):
    return run_layers(critic, jnp.concatenate([observation, action], axis=-1))[:, 0]


class TargetState(train_state.TrainState):
    """As cleanrl has it, with `value=` for the wrapper."""

    target_params: Any

    def apply_gradients(self, *, grads, value):
        updates, opt_state = self.tx.update(
            grads, self.opt_state, self.params, value=value
        )
        return self.replace(
            step=self.step + 1,
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
        )

    def follow(self, tau):
        target = optax.incremental_update(self.params, self.target_params, tau)
        return self.replace(target_params=target)


def target_state(module, seed, *inputs):
    params = module.init(jax.random.key(seed), *inputs)
    return TargetState.create(
        apply_fn=module.apply,
        params=params,
        target_params=params,
        tx=wrap(optax.adam(1e-2)),
    )


class QNetwork(nn.Module):
    @nn.compact
    def __call__(self, x, a):
        x = jnp.concatenate([x, a], -1)
        x = nn.relu(nn.Dense(8, dtype=jnp.float16)(x))
        return nn.Dense(1, dtype=jnp.float16)(x).astype(jnp.float32).squeeze(-1)


class Actor(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, dtype=jnp.float16)(x))
        return nn.tanh(nn.Dense(2, dtype=jnp.float16)(x)).astype(jnp.float32)


@kind
def ddpg():
    """cleanrl's, with tau as a Python number among the arguments."""

    @jax.jit
    def step(actor, critic, batch, tau):
        following = critic.apply_fn(
            critic.target_params,
            batch.following,
            actor.apply_fn(actor.target_params, batch.following),
        )
        goal = batch.reward + 0.99 * (1 - batch.done) * following

        def critic_loss(params):
            made = critic.apply_fn(params, batch.observation, batch.action)
            return jnp.mean((made - goal) ** 2)

        loss, grads = jls.value_and_grad(critic_loss)(critic.opt_state, critic.params)
        critic = critic.apply_gradients(grads=grads, value=loss)

        def actor_loss(params):
            action = actor.apply_fn(params, batch.observation)
            return -critic.apply_fn(critic.params, batch.observation, action).mean()

        made, grads = jls.value_and_grad(actor_loss)(actor.opt_state, actor.params)
        actor = actor.apply_gradients(grads=grads, value=made)
        return actor.follow(tau), critic.follow(tau), loss, made

    actor, critic = target_state(Actor(), 0, X), target_state(QNetwork(), 1, X, Y)
    return step, (actor, critic, TRANSITIONS, 0.05)


@kind
def td3_with_three_wrappers():
    """cleanrl's TD3: the policy and the targets wait for every other step."""

    @jax.jit
    def step(actor, qf1, qf2, batch, key):
        key, now = jax.random.split(key)
        noise = jnp.clip(0.2 * jax.random.normal(now, batch.action.shape), -0.5, 0.5)
        following = actor.apply_fn(actor.target_params, batch.following)
        following = jnp.clip(following + noise, -1, 1)
        values = [
            qf.apply_fn(qf.target_params, batch.following, following)
            for qf in (qf1, qf2)
        ]
        goal = batch.reward + 0.99 * (1 - batch.done) * jnp.minimum(*values)

        def critic_loss(params, qf):
            made = qf.apply_fn(params, batch.observation, batch.action)
            return jnp.mean((made - goal) ** 2)

        gradients = jls.value_and_grad(critic_loss)
        loss1, grads1 = gradients(qf1.opt_state, qf1.params, qf1)
        loss2, grads2 = gradients(qf2.opt_state, qf2.params, qf2)
        qf1 = qf1.apply_gradients(grads=grads1, value=loss1)
        qf2 = qf2.apply_gradients(grads=grads2, value=loss2)

        def learn_to_act(actor, qf1, qf2):
            def actor_loss(params):
                action = actor.apply_fn(params, batch.observation)
                return -qf1.apply_fn(qf1.params, batch.observation, action).mean()

            loss, grads = jls.value_and_grad(actor_loss)(actor.opt_state, actor.params)
            actor = actor.apply_gradients(grads=grads, value=loss)
            return actor.follow(0.005), qf1.follow(0.005), qf2.follow(0.005)

        actor, qf1, qf2 = jax.lax.cond(
            qf1.step % 2 == 0, learn_to_act, lambda *states: states, actor, qf1, qf2
        )
        return (actor, qf1, qf2), (loss1, loss2), key

    states = (
        target_state(Actor(), 0, X),
        target_state(QNetwork(), 1, X, Y),
        target_state(QNetwork(), 2, X, Y),
    )
    states = [state.replace(step=jnp.int32(0)) for state in states]
    return step, (*states, TRANSITIONS, jax.random.key(0))


@kind
def td3_with_two_wrappers_and_targets_apart():
    actor_optimizer, critic_optimizer = wrap(optax.adam(1e-2)), wrap(optax.adam(1e-2))

    @functools.partial(jax.jit, static_argnames="tau")
    def step(params, targets, opt_states, count, batch, *, tau=0.05):
        following = jnp.tanh(run_layers(targets["actor"], batch.following))
        values = [
            value_of(targets[name], batch.following, following)
            for name in ("critic1", "critic2")
        ]
        goal = batch.reward + 0.9 * (1 - batch.done) * jnp.minimum(*values)

        def critic_loss(critics):
            made = [value_of(c, batch.observation, batch.action) for c in critics]
            return sum(jnp.mean((value - goal) ** 2) for value in made)

        def actor_loss(actor, critic):
            action = jnp.tanh(run_layers(actor, batch.observation))
            return -value_of(critic, batch.observation, action).mean()

        critics = params["critic1"], params["critic2"]
        critics, critic_state, loss = train(
            critic_optimizer, opt_states["critic"], critics, critic_loss
        )
        actor, actor_state = jax.lax.cond(
            count % 2 == 0,
            lambda actor, state: train(
                actor_optimizer, state, actor, actor_loss, critics[0]
            )[:2],
            lambda actor, state: (actor, state),
            params["actor"],
            opt_states["actor"],
        )
        params = {"actor": actor, "critic1": critics[0], "critic2": critics[1]}
        targets = optax.incremental_update(params, targets, tau)
        opt_states = {"actor": actor_state, "critic": critic_state}
        return params, targets, opt_states, count + 1, loss

    params = {
        "actor": layers(0, 4, 8, 2),
        "critic1": layers(1, 6, 8, 1),
        "critic2": layers(2, 6, 8, 1),
    }
    opt_states = {
        "actor": actor_optimizer.init(params["actor"]),
        "critic": critic_optimizer.init((params["critic1"], params["critic2"])),
    }
    return step, (params, params, opt_states, jnp.int32(0), TRANSITIONS)


class Model(struct.PyTreeNode):
    """As jaxrl has it: parameters and their optimizer."""

    apply: Any = struct.field(pytree_node=False)
    tx: Any = struct.field(pytree_node=False)
    params: Any
    opt_state: Any = None

    @classmethod
    def create(cls, apply, params, tx=None):
        return cls(apply, tx, params, tx and tx.init(params))

    def __call__(self, *args):
        return self.apply(self.params, *args)

    def apply_gradient(self, loss_fn):
        (loss, info), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            self.opt_state, self.params
        )
        updates, opt_state = self.tx.update(
            grads, self.opt_state, self.params, value=loss
        )
        params = optax.apply_updates(self.params, updates)
        return self.replace(params=params, opt_state=opt_state), info


def new_critic(seed, tx=None):
    params = [layers(seed, 6, 8, 1), layers(seed + 1, 6, 8, 1)]
    return Model.create(lambda p, *args: [value_of(q, *args) for q in p], params, tx)


def sample(params, observation, key):
    """A squashed Gaussian action and its log-probability."""
    mean, log_std = jnp.split(run_layers(params, observation), 2, axis=-1)
    log_std = jnp.clip(log_std, -5, 2)
    noise = jax.random.normal(key, mean.shape)
    action = jnp.tanh(mean + jnp.exp(log_std) * noise)
    log_prob = -(noise**2) / 2 - log_std - jnp.log(1 - action**2 + 1e-6)
    return action, log_prob.sum(-1)


@kind
def sac_of_jaxrl():
    """Three wrappers, one for a single number; a target that has no optimizer."""

    @jax.jit
    def step(key, actor, critic, target, temperature, batch):
        key, now, later = jax.random.split(key, 3)
        alpha = temperature()
        action, log_prob = sample(actor.params, batch.following, now)
        goal = jnp.minimum(*target(batch.following, action)) - alpha * log_prob
        goal = batch.reward + 0.99 * (1 - batch.done) * goal

        def critic_loss(params):
            made = critic.apply(params, batch.observation, batch.action)
            loss = sum(jnp.mean((q - goal) ** 2) for q in made)
            return loss, {"critic_loss": loss, "q1": made[0].mean()}

        critic, critic_info = critic.apply_gradient(critic_loss)
        moved = optax.incremental_update(critic.params, target.params, 0.005)
        target = target.replace(params=moved)

        def actor_loss(params):
            action, log_prob = sample(params, batch.observation, later)
            q = jnp.minimum(*critic(batch.observation, action))
            loss = jnp.mean(alpha * log_prob - q)
            return loss, {"actor_loss": loss, "entropy": -log_prob.mean()}

        actor, actor_info = actor.apply_gradient(actor_loss)

        def temperature_loss(params):
            alpha = temperature.apply(params)
            return alpha * (actor_info["entropy"] + 2), {"temperature": alpha}

        temperature, info = temperature.apply_gradient(temperature_loss)
        info = {**critic_info, **actor_info, **info}
        return key, actor, critic, target, temperature, info

    adam = functools.partial(optax.adam, 1e-2)
    critic = new_critic(1, wrap(adam()))
    target = new_critic(1)
    actor = Model.create(run_layers, layers(0, 4, 8, 4), wrap(adam()))
    temperature = Model.create(
        lambda p: jnp.exp(p["log_alpha"]), {"log_alpha": jnp.float32(0)}, wrap(adam())
    )
    args = jax.random.key(0), actor, critic, target, temperature, TRANSITIONS
    return step, args


@kind
def iql():
    """Implicit Q-learning: expectile of a target's value, weights by advantage."""

    @jax.jit
    def step(models, batch):
        actor, critic, value, target = models
        q = jnp.minimum(*target(batch.observation, batch.action))

        def value_loss(params):
            gap = q - value.apply(params, batch.observation)
            weight = jnp.where(gap > 0, 0.7, 0.3)
            return jnp.mean(weight * gap**2), {"advantage": gap}

        value, info = value.apply_gradient(value_loss)
        weight = jnp.minimum(jnp.exp(3 * info["advantage"]), 100)

        def actor_loss(params):
            made = run_layers(params, batch.observation)
            return jnp.mean(weight * ((made - batch.action) ** 2).sum(1)), {}

        actor, _ = actor.apply_gradient(actor_loss)
        goal = batch.reward + 0.99 * (1 - batch.done) * value(batch.following)

        def critic_loss(params):
            made = critic.apply(params, batch.observation, batch.action)
            return sum(jnp.mean((q - goal) ** 2) for q in made), {}

        critic, _ = critic.apply_gradient(critic_loss)
        moved = optax.incremental_update(critic.params, target.params, 0.01)
        return (actor, critic, value, target.replace(params=moved)), info

    adam = functools.partial(optax.adam, 1e-2)
    actor = Model.create(run_layers, layers(0, 4, 8, 2), wrap(adam()))
    value = Model.create(
        lambda p, x: run_layers(p, x)[:, 0], layers(3, 4, 8, 1), wrap(adam())
    )
    models = actor, new_critic(1, wrap(adam())), value, new_critic(1)
    return step, (models, TRANSITIONS)


@kind
def sac_in_one_dict():
    optimizers = {name: wrap(optax.adam(1e-2)) for name in ("actor", "critic", "alpha")}

    def critic_loss(critic, run, batch, key):
        action, log_prob = sample(run["actor"], batch.following, key)
        following = value_of(run["target"], batch.following, action)
        following -= jnp.exp(run["alpha"]) * log_prob
        goal = batch.reward + 0.99 * (1 - batch.done) * following
        made = value_of(critic, batch.observation, batch.action)
        return jnp.mean((made - jax.lax.stop_gradient(goal)) ** 2)

    def actor_loss(actor, run, batch, key):
        action, log_prob = sample(actor, batch.observation, key)
        value = value_of(run["critic"], batch.observation, action)
        return jnp.mean(jnp.exp(run["alpha"]) * log_prob - value)

    def alpha_loss(alpha, run, batch, key):
        _, log_prob = sample(run["actor"], batch.observation, key)
        return -jnp.mean(alpha * (log_prob - 2))

    losses = {"critic": critic_loss, "actor": actor_loss, "alpha": alpha_loss}

    @jax.jit
    def step(run, batch):
        key, *keys = jax.random.split(run["key"], 4)
        run, logs = {**run, "key": key}, {}
        for (name, loss_fn), key in zip(losses.items(), keys, strict=True):
            run[name], run["opt"][name], logs[name] = train(
                optimizers[name], run["opt"][name], run[name], loss_fn, run, batch, key
            )
        run["target"] = optax.incremental_update(run["critic"], run["target"], 0.005)
        return run, logs

    critic = layers(1, 6, 8, 1)
    run = {"actor": layers(0, 4, 8, 4), "critic": critic, "alpha": jnp.float32(0)}
    opt = {name: optimizers[name].init(run[name]) for name in optimizers}
    run |= {"target": critic, "opt": opt, "key": jax.random.key(0)}
    return step, (run, TRANSITIONS)


@kind
def haiku_dqn_with_a_periodic_copy():
    def network(x):
        return hk.nets.MLP([8, 3])(x)

    model = hk.without_apply_rng(hk.transform(network))
    optimizer = wrap(optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-2)))

    class Learner(NamedTuple):
        params: Any
        target_params: Any
        opt_state: Any
        count: Any

    @jax.jit
    def step(learner, batch):
        params, target, opt_state, count = learner
        following = model.apply(half(target), half(batch.following)).max(1)
        goal = batch.reward + 0.99 * (1 - batch.done) * following.astype(jnp.float32)
        chosen = (batch.action[:, 0] > 0).astype(jnp.int32)

        def loss_fn(params):
            values = model.apply(half(params), half(batch.observation))
            made = jnp.take_along_axis(values, chosen[:, None], 1)[:, 0]
            return optax.huber_loss(made.astype(jnp.float32), goal).mean()

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        target = optax.periodic_update(params, target, count, 3)
        return Learner(params, target, opt_state, count + 1), loss

    params = model.init(jax.random.key(0), X)
    learner = Learner(params, params, optimizer.init(params), jnp.int32(0))
    return step, (learner, TRANSITIONS)


def advantages(values, rewards, dones, last):
    def backward(carry, part):
        gae, following = carry
        value, reward, done = part
        delta = reward + 0.99 * following * (1 - done) - value
        gae = delta + 0.99 * 0.95 * (1 - done) * gae
        return (gae, value), gae

    carry = jnp.zeros_like(last), last
    _, gae = jax.lax.scan(backward, carry, (values, rewards, dones), reverse=True)
    return gae, gae + values


@kind
def ppo_with_shuffled_minibatches():
    """As in purejaxrl: epochs and minibatches in two scans of one jit."""

    class ActorCritic(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.tanh(nn.Dense(8, dtype=jnp.float16)(x))
            logits = nn.Dense(3, dtype=jnp.float16)(h).astype(jnp.float32)
            value = nn.Dense(1, dtype=jnp.float16)(h).astype(jnp.float32)
            return jax.nn.log_softmax(logits), value.squeeze(-1)

    network = ActorCritic()
    tx = wrap(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5)))

    def loss_fn(params, part):
        observation, action, old_log_prob, old_value, gae, goal = part
        log_probs, value = network.apply(params, observation)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
        ratio = jnp.exp(log_prob - old_log_prob)
        gae = (gae - gae.mean()) / (gae.std() + 1e-8)
        actor = -jnp.minimum(ratio * gae, jnp.clip(ratio, 0.8, 1.2) * gae).mean()
        clipped = old_value + jnp.clip(value - old_value, -0.2, 0.2)
        critic = jnp.maximum((value - goal) ** 2, (clipped - goal) ** 2).mean() / 2
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return actor + 0.5 * critic - 0.01 * entropy, (actor, critic, entropy)

    @jax.jit
    def update(state, rollout, key):
        observation, action, reward, done = rollout
        log_probs, values = network.apply(state.params, observation)
        log_prob = jnp.take_along_axis(log_probs, action[..., None], -1)[..., 0]
        gae, goals = advantages(values, reward, done, values[-1])
        data = observation, action, log_prob, values, gae, goals
        data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)

        def minibatch(state, part):
            (loss, parts), grads = jls.value_and_grad(loss_fn, has_aux=True)(
                state.opt_state, state.params, part
            )
            updates, opt_state = tx.update(
                grads, state.opt_state, state.params, value=loss
            )
            params = optax.apply_updates(state.params, updates)
            step = state.step + 1
            return state.replace(step=step, params=params, opt_state=opt_state), parts

        def epoch(carry, _):
            state, key = carry
            key, now = jax.random.split(key)
            order = jax.random.permutation(now, len(data[0]))
            parts = jax.tree.map(lambda x: x[order].reshape(2, -1, *x.shape[1:]), data)
            state, losses = jax.lax.scan(minibatch, state, parts)
            return (state, key), losses

        (state, key), losses = jax.lax.scan(epoch, (state, key), None, 2)
        return state, key, jax.tree.map(jnp.mean, losses)

    observation = normal(0, 4, 2, 4)
    rollout = (
        observation,
        jnp.arange(8).reshape(4, 2) % 3,
        observation.sum(-1),
        (observation[..., 0] > 1).astype(jnp.float32),
    )
    state = train_state.TrainState.create(
        apply_fn=network.apply, params=network.init(jax.random.key(0), X), tx=tx
    ).replace(step=jnp.int32(0))
    return update, (state, rollout, jax.random.key(1))


@kind
def reinforce_with_a_running_baseline():
    """The baseline moves with the rewards, and is held by a skipped step."""
    optimizer = wrap(optax.rmsprop(1e-2))

    @jax.jit
    def step(params, opt_state, baseline, observations, actions, returns):
        def loss_fn(params):
            log_probs = jax.nn.log_softmax(run_layers(params, observations))
            chosen = jnp.take_along_axis(log_probs, actions[:, None], 1)[:, 0]
            return -jnp.mean(chosen * (returns - baseline))

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        moved = 0.9 * baseline + 0.1 * returns.mean()
        baseline = jls.select(opt_state.applied, moved, baseline)
        return optax.apply_updates(params, updates), opt_state, baseline, loss

    params = layers(0, 4, 8, 3)
    carried = params, optimizer.init(params), jnp.float32(0)
    return step, (*carried, X, jnp.arange(8) % 3, X.sum(1))


@kind
def dqn_with_a_replay_buffer_in_its_state():
    """Writes a transition, samples eight, learns; bad transitions are not kept."""
    optimizer = wrap(optax.adam(1e-2))

    @struct.dataclass
    class Agent:
        params: Any
        target: Any
        opt_state: Any
        buffer: Transitions
        head: Any
        is_full: Any
        key: Any

    @jax.jit
    def step(agent, transition):
        is_good = jls.all_finite(transition)
        written = jax.tree.map(
            lambda b, x: b.at[agent.head].set(x), agent.buffer, transition
        )
        buffer = jls.select(is_good, written, agent.buffer)
        head = jnp.where(is_good, (agent.head + 1) % 16, agent.head)
        is_full = agent.is_full | (head == 0)
        key, now = jax.random.split(agent.key)
        rows = jax.random.randint(now, (8,), 0, jnp.where(is_full, 16, head))
        batch = jax.tree.map(lambda b: b[rows], buffer)
        following = run_layers(agent.target, batch.following).max(1)
        goal = batch.reward + 0.99 * (1 - batch.done) * following

        def loss_fn(params):
            values = run_layers(params, batch.observation)
            made = jnp.take_along_axis(values, batch.action[:, None], 1)[:, 0]
            return jnp.mean((made - goal) ** 2)

        params, opt_state, loss = train(
            optimizer, agent.opt_state, agent.params, loss_fn
        )
        target = optax.incremental_update(params, agent.target, 0.01)
        return Agent(params, target, opt_state, buffer, head, is_full, key), loss

    params = layers(0, 4, 8, 3)
    whole = TRANSITIONS._replace(action=jnp.arange(8) % 3)
    buffer = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)]), whole)
    agent = Agent(
        params=params,
        target=params,
        opt_state=optimizer.init(params),
        buffer=buffer,
        head=jnp.int32(8),
        is_full=jnp.bool_(False),
        key=jax.random.key(0),
    )
    return step, (agent, jax.tree.map(lambda x: x[3], whole))


def token_log_probs(params, tokens):
    """Of a model of bigrams: each token by the one before."""
    logits = run_layers(params["out"], params["embed"][tokens[:, :-1]])
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]


def language_params(seed):
    return {"embed": normal(seed, 9, 6), "out": layers(seed + 1, 6, 8, 9)}


TOKENS = jax.random.randint(jax.random.key(5), (8, 6), 0, 9)


@kind
def grpo():
    """Advantages within groups, and a penalty for leaving a frozen reference."""
    optimizer = wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))

    @functools.partial(jax.jit, donate_argnames="state")
    def step(state, reference, tokens, old_log_probs, rewards, mask):
        groups = rewards.reshape(2, 4)
        centered = groups - groups.mean(1, keepdims=True)
        advantages = (centered / (groups.std(1, keepdims=True) + 1e-4)).reshape(8, 1)

        def loss_fn(params):
            log_probs = token_log_probs(params, tokens)
            ratio = jnp.exp(log_probs - old_log_probs)
            gain = jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2)) * advantages
            gap = token_log_probs(reference, tokens) - log_probs
            kl = jnp.exp(gap) - gap - 1
            losses = (0.04 * kl - gain) * mask
            return losses.sum() / mask.sum(), (kl * mask).sum() / mask.sum()

        (loss, kl), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            state["opt_state"], state["params"]
        )
        updates, opt_state = optimizer.update(
            grads, state["opt_state"], state["params"], value=loss
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss, "kl": kl}

    params, reference = language_params(0), language_params(0)
    state = {"params": params, "opt_state": optimizer.init(params)}
    old = token_log_probs(reference, TOKENS)
    mask = (jnp.arange(5) < 4) * jnp.ones((8, 1))
    return step, (state, reference, TOKENS, old, normal(6, 8), mask)


@kind
def dpo():
    """Preferences between two answers, against a frozen reference that comes first."""
    optimizer = wrap(optax.rmsprop(1e-3))

    @jax.jit
    def step(reference, policy, opt_state, chosen, rejected):
        def margin(params):
            better = token_log_probs(params, chosen).sum(1)
            return better - token_log_probs(params, rejected).sum(1)

        def loss_fn(policy):
            rewards = 0.1 * (margin(policy) - margin(reference))
            return -jax.nn.log_sigmoid(rewards).mean(), (rewards > 0).mean()

        (loss, accuracy), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, policy
        )
        updates, opt_state = optimizer.update(grads, opt_state, policy, value=loss)
        policy = optax.apply_updates(policy, updates)
        return policy, opt_state, {"loss": loss, "accuracy": accuracy}

    reference, policy = language_params(0), language_params(0)
    args = reference, policy, optimizer.init(policy), TOKENS, TOKENS[:, ::-1]
    return step, args


@kind
def equinox_q_learning_with_a_target_model():
    """The target's arrays follow; what is not an array stays."""
    optimizer = wrap(optax.adam(1e-2))

    @eqx.filter_jit
    def step(model, target, opt_state, batch):
        def q_values(model, x):
            return jax.vmap(narrow(model))(half(x)).astype(jnp.float32)

        following = q_values(target, batch.following).max(1)
        goal = batch.reward + 0.9 * (1 - batch.done) * following
        chosen = (batch.action[:, 0] > 0).astype(jnp.int32)

        def loss_fn(model):
            values = q_values(model, batch.observation)
            made = jnp.take_along_axis(values, chosen[:, None], 1)[:, 0]
            return jnp.mean((made - goal) ** 2)

        loss, grads = jls.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)(
            opt_state, model
        )
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        model = eqx.apply_updates(model, updates)
        new, _ = eqx.partition(model, eqx.is_inexact_array)
        old, static = eqx.partition(target, eqx.is_inexact_array)
        target = eqx.combine(optax.incremental_update(new, old, 0.05), static)
        return model, target, opt_state, loss

    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, model, opt_state, TRANSITIONS)


# Two players.


@kind
def gan_of_two_train_states():
    class Generator(nn.Module):
        @nn.compact
        def __call__(self, z):
            z = nn.relu(nn.Dense(8, dtype=jnp.float16)(z))
            return nn.Dense(4, dtype=jnp.float16)(z)

    class Discriminator(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.leaky_relu(nn.Dense(8, dtype=jnp.float16)(x), 0.2)
            return nn.Dense(1, dtype=jnp.float16)(x).astype(jnp.float32)

    def bce(logits, is_real):
        goals = jnp.full_like(logits, is_real)
        return optax.sigmoid_binary_cross_entropy(logits, goals).mean()

    def apply_gradients(state, loss_fn):
        loss, grads = jls.value_and_grad(loss_fn)(state.opt_state, state.params)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        step = state.step + 1
        return state.replace(step=step, params=params, opt_state=opt_state), loss

    @jax.jit
    def step(generator, discriminator, key, real):
        key, one, two = jax.random.split(key, 3)

        def generator_loss(params):
            fake = generator.apply_fn(params, jax.random.normal(one, (8, 3)))
            return bce(discriminator.apply_fn(discriminator.params, fake), 1.0)

        def discriminator_loss(params):
            z = jax.random.normal(two, (8, 3))
            fake = generator.apply_fn(generator.params, z)
            made = [discriminator.apply_fn(params, x) for x in (real, fake)]
            return bce(made[0], 0.9) + bce(made[1], 0.0)

        new_generator, g_loss = apply_gradients(generator, generator_loss)
        discriminator, d_loss = apply_gradients(discriminator, discriminator_loss)
        return new_generator, discriminator, key, {"g": g_loss, "d": d_loss}

    def new_state(module, seed, x):
        return train_state.TrainState.create(
            apply_fn=module.apply,
            params=module.init(jax.random.key(seed), x),
            tx=wrap(optax.adam(1e-2, b1=0.5)),
        )

    generator = new_state(Generator(), 0, jnp.ones((8, 3)))
    discriminator = new_state(Discriminator(), 1, X)
    return step, (generator, discriminator, jax.random.key(2), X)


@kind
def wgan_gp():
    """Three updates of the critic in a scan, then one of the generator."""
    g_optimizer, c_optimizer = wrap(optax.adam(1e-3)), wrap(optax.adam(1e-3))

    def critic_loss(critic, generator, real, key):
        z_key, mix_key = jax.random.split(key)
        fake = run_layers(generator, jax.random.normal(z_key, (8, 3)))
        mix = jax.random.uniform(mix_key, (8, 1))
        between = mix * real + (1 - mix) * fake
        slopes = jax.grad(lambda x: run_layers(critic, x).sum())(between)
        norms = jnp.sqrt(jnp.sum(slopes**2, axis=1) + 1e-12)
        distance = run_layers(critic, fake).mean() - run_layers(critic, real).mean()
        return distance + 10.0 * jnp.mean((norms - 1) ** 2)

    def generator_loss(generator, critic, key):
        fake = run_layers(generator, jax.random.normal(key, (8, 3)))
        return -run_layers(critic, fake).mean()

    @jax.jit
    def step(params, opt_state, key, real):
        key, last, *keys = jax.random.split(key, 5)

        def body(carry, key):
            critic, state = carry
            loss, grads = jls.value_and_grad(critic_loss)(
                state, critic, params["generator"], real, key
            )
            updates, state = c_optimizer.update(grads, state, critic, value=loss)
            return (optax.apply_updates(critic, updates), state), loss

        carry = params["critic"], opt_state["critic"]
        (critic, c_state), losses = jax.lax.scan(body, carry, jnp.stack(keys))
        generator, g_state, loss = train(
            g_optimizer,
            opt_state["generator"],
            params["generator"],
            generator_loss,
            critic,
            last,
        )
        params = {"generator": generator, "critic": critic}
        opt_state = {"generator": g_state, "critic": c_state}
        return params, opt_state, key, (losses.mean(), loss)

    params = {"generator": layers(0, 3, 8, 4), "critic": layers(1, 4, 8, 1)}
    opt_state = {
        "generator": g_optimizer.init(params["generator"]),
        "critic": c_optimizer.init(params["critic"]),
    }
    return step, (params, opt_state, jax.random.key(2), X)


@jax.custom_vjp
def reverse_gradient(x):
    return x


reverse_gradient.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@kind
def domain_adversarial_with_reversed_gradients():
    optimizer = wrap(optax.sgd(0.05, momentum=0.9))

    @jax.jit
    def step(params, opt_state, source, labels, target):
        def loss_fn(params):
            features = run_layers(params["features"], jnp.concatenate([source, target]))
            made = run_layers(params["classes"], features[: len(source)])
            domain = run_layers(params["domain"], reverse_gradient(features))[:, 0]
            is_target = jnp.arange(len(domain)) >= len(source)
            adversary = optax.sigmoid_binary_cross_entropy(domain, 1.0 * is_target)
            classes = optax.softmax_cross_entropy_with_integer_labels(made, labels)
            return classes.mean() + 0.1 * adversary.mean()

        return train(optimizer, opt_state, params, loss_fn)

    params = {
        "features": layers(0, 4, 8, 6),
        "classes": layers(1, 6, 3),
        "domain": layers(2, 6, 4, 1),
    }
    return step, (params, optimizer.init(params), X, jnp.arange(8) % 3, X + 1)


# What is done to true gradients, outside of the wrapper.


def changed_outside(change, inner=None):
    """`change` gets true gradients, the parameters, and the loss with its scale."""
    optimizer = wrap(inner or optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        grads = change(grads, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


def by_transformation(transformation):
    """A transformation without a state that matters, used as a function."""

    def change(grads, params):
        return transformation.update(grads, transformation.init(params), params)[0]

    return change


@kind
def gradients_centralized():
    return changed_outside(by_transformation(optax.centralize()))


@kind
def gradients_centralized_by_hand():
    return changed_outside(
        lambda grads, _: jax.tree.map(lambda g: g - g.mean(0, keepdims=True), grads),
        optax.adam(1e-2),
    )


@kind
def gradients_normalized():
    def change(grads, _):
        norm = optax.tree.norm(grads)
        return jax.tree.map(lambda g: g / (norm + 1e-6), grads)

    return changed_outside(change)


@kind
def gradients_normalized_leaf_by_leaf():
    def change(grads, _):
        return jax.tree.map(lambda g: g / (jnp.linalg.norm(g) + 1e-6), grads)

    return changed_outside(change, optax.adam(1e-2))


@kind
def clipped_by_global_norm_outside():
    return changed_outside(by_transformation(optax.clip_by_global_norm(0.01)))


@kind
def clipped_by_global_norm_by_hand():
    def change(grads, _):
        factor = jnp.minimum(1.0, 0.01 / (optax.tree.norm(grads) + 1e-6))
        return jax.tree.map(lambda g: g * factor, grads)

    return changed_outside(change, optax.adam(1e-2))


@kind
def adaptive_clipping_outside():
    return changed_outside(by_transformation(optax.adaptive_grad_clip(0.01)))


@kind
def masks_multiplied_on_gradients():
    """A pruned network, whose pruned weights stay 0."""
    masks = {"w1": 1.0 * (normal(8, 4, 8) > 0), "w2": 1.0 * (normal(9, 8, 2) > 0)}
    step, (params, _, batch) = changed_outside(
        lambda grads, _: jax.tree.map(jnp.multiply, grads, masks)
    )
    params = jax.tree.map(jnp.multiply, params, masks)
    return step, (params, wrap(optax.sgd(0.1, momentum=0.9)).init(params), batch)


@kind
def l2_penalty_added_to_gradients():
    return changed_outside(
        lambda grads, params: optax.tree.add_scale(grads, 1e-2, params)
    )


@kind
def learning_rates_by_layer_on_gradients():
    rates = {"w1": 0.1, "w2": 1.0}
    return changed_outside(
        lambda grads, _: {name: rates[name] * g for name, g in grads.items()}
    )


@kind
def noise_on_gradients():
    """Its key comes from the count of the wrapper's steps."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        key = jax.random.fold_in(jax.random.key(0), opt_state.steps)
        noise = optax.tree.random_like(key, grads)
        grads = optax.tree.add_scale(grads, 1e-3, noise)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@kind
def sam():
    """Sharpness-aware minimization: both gradients are true ones."""
    optimizer = wrap(optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def step(params, opt_state, batch):
        gradients = jls.value_and_grad(plain_loss)
        loss, grads = gradients(opt_state, params, batch)
        factor = 0.05 / (optax.tree.norm(grads) + 1e-12)
        around = jax.tree.map(lambda p, g: p + factor * g, params, grads)
        _, grads = gradients(opt_state, around, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@kind
def conflicting_gradients_projected():
    """PCGrad of two tasks: https://arxiv.org/abs/2001.06782."""
    optimizer = wrap(optax.adam(1e-2))

    def project(one, two):
        dot, square = optax.tree.vdot(one, two), optax.tree.vdot(two, two)
        return optax.tree.add_scale(one, -jnp.minimum(dot, 0) / (square + 1e-12), two)

    @jax.jit
    def step(params, opt_state, batch):
        def task(params, i):
            made = steps.predict(params, batch["x"])[:, i].astype(jnp.float32)
            return jnp.mean((made - batch["y"][:, i]) ** 2)

        gradients = jls.value_and_grad(task)
        loss1, grads1 = gradients(opt_state, params, 0)
        loss2, grads2 = gradients(opt_state, params, 1)
        grads = optax.tree.add(project(grads1, grads2), project(grads2, grads1))
        loss = loss1 + loss2
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, (loss1, loss2)

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@kind
def dp_sgd():
    """Gradients of each example, clipped, summed, with noise."""
    optimizer = wrap(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state, key, batch):
        key, now = jax.random.split(key)
        losses, grads = jax.vmap(
            jls.value_and_grad(plain_loss), in_axes=(None, None, 0)
        )(opt_state, params, jax.tree.map(lambda x: x[:, None], batch))
        norms = jax.vmap(optax.tree.norm)(grads)
        factors = jnp.minimum(1.0, 0.5 / (norms + 1e-12))
        grads = jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads)
        noise = optax.tree.random_like(now, grads)
        grads = jax.tree.map(lambda g, n: (g + 0.1 * 0.5 * n) / 8, grads, noise)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, value=losses.mean()
        )
        return optax.apply_updates(params, updates), opt_state, key, losses.mean()

    params = plain_params()
    return step, (params, optimizer.init(params), jax.random.key(0), BATCH)


# Several steps in one call, or a step in several parts.


@kind
def train_state_through_a_scan():
    @jax.jit
    def epoch(state, batches):
        def body(state, batch):
            def loss_fn(params):
                return steps.linen_loss(state, params, batch)

            loss, grads = jls.value_and_grad(loss_fn)(state.opt_state, state.params)
            updates, opt_state = state.tx.update(
                grads, state.opt_state, state.params, value=loss
            )
            params = optax.apply_updates(state.params, updates)
            step = state.step + 1
            return state.replace(step=step, params=params, opt_state=opt_state), loss

        return jax.lax.scan(body, state, batches)

    state = steps.linen_state(wrap(optax.adamw(1e-2))).replace(step=jnp.int32(0))
    return epoch, (state, jax.tree.map(lambda x: jnp.stack([x, -x, 2 * x]), BATCH))


@kind
def two_updates_unrolled():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        losses = []
        for rows in (slice(0, 4), slice(4, 8)):
            part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
            loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, part)
            updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
            params = optax.apply_updates(params, updates)
            losses.append(loss)
        return params, opt_state, jnp.stack(losses)

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@kind
def fori_loop_of_updates():
    optimizer = wrap(optax.sgd(0.1, momentum=0.9))

    @functools.partial(jax.jit, static_argnames="count")
    def step(params, opt_state, batch, count):
        def body(i, carry):
            params, opt_state, total = carry
            part = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, 2 * i, 2), batch
            )
            params, opt_state, loss = train(
                optimizer, opt_state, params, plain_loss, part
            )
            return params, opt_state, total + loss

        carry = params, opt_state, jnp.float32(0)
        params, opt_state, total = jax.lax.fori_loop(0, count, body, carry)
        return params, opt_state, total / count

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH), {"count": 4}


@kind
def equinox_micro_batches_averaged():
    optimizer = wrap(optax.adamw(1e-2))

    @eqx.filter_jit
    def step(model, opt_state, batch):
        gradients = jls.value_and_grad(
            steps.equinox_loss, transform=eqx.filter_value_and_grad
        )
        params = eqx.filter(model, eqx.is_inexact_array)

        def body(average, part):
            count, loss, grads = average
            made = gradients(opt_state, model, part)
            loss, grads = jax.tree.map(
                lambda mean, new: mean + (new - mean) / (count + 1), (loss, grads), made
            )
            return (count + 1, loss, grads), None

        start = jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        parts = jax.tree.map(lambda x: x.reshape(4, 2, -1), batch)
        (_, loss, grads), _ = jax.lax.scan(body, start, parts)
        updates, new_state = optimizer.update(grads, opt_state, params, value=loss)
        return eqx.apply_updates(model, updates), new_state, loss

    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, opt_state, BATCH)


@kind
def lookahead_by_hand():
    """Slow weights, to which the fast ones come back every third step applied."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(state, batch):
        fast, opt_state, loss = train(
            optimizer, state["opt_state"], state["fast"], plain_loss, batch
        )
        applied = opt_state.applied
        step = state["step"] + applied

        def synchronize(fast, slow):
            slow = optax.incremental_update(fast, slow, 0.5)
            return slow, slow

        fast, slow = jax.lax.cond(
            applied & (step % 3 == 0),
            synchronize,
            lambda *both: both,
            fast,
            state["slow"],
        )
        state = {"fast": fast, "slow": slow, "opt_state": opt_state, "step": step}
        return state, loss

    params = plain_params()
    state = {"fast": params, "slow": params, "opt_state": optimizer.init(params)}
    return step, ({**state, "step": jnp.int32(0)}, BATCH)


@kind
def maml():
    """A step of gradient descent inside the loss, its gradient a true one."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, tasks):
        def task_loss(params, task):
            support, query = task
            grads = jls.grad(plain_loss)(opt_state, params, support)
            adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return plain_loss(adapted, query)

        def loss_fn(params):
            return jax.vmap(task_loss, in_axes=(None, 0))(params, tasks).mean()

        return train(optimizer, opt_state, params, loss_fn)

    params = plain_params()
    tasks = jax.tree.map(lambda x: x.reshape(2, 4, -1), BATCH)
    tasks = tasks, jax.tree.map(lambda x: x[:, ::-1], tasks)
    return step, (params, optimizer.init(params), tasks)


# How a step is called, and what it takes and returns.


@kind
def nested_dicts_with_an_average():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(state, batch):
        model = state["model"]
        params, opt_state, loss = train(
            optimizer, state["opt"], model["params"], plain_loss, batch
        )
        ema = optax.incremental_update(params, model["ema"], 0.01)
        return {"model": {"params": params, "ema": ema}, "opt": opt_state}, {"l": loss}

    params = plain_params()
    model = {"params": params, "ema": params}
    return step, ({"model": model, "opt": optimizer.init(params)}, BATCH)


@kind
def batch_by_keyword_only():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(state, /, *, x, y, weight=1.0):
        def loss_fn(params):
            return weight * plain_loss(params, {"x": x, "y": y})

        params, opt_state, loss = train(
            optimizer, state["opt_state"], state["params"], loss_fn
        )
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    params = plain_params()
    state = {"params": params, "opt_state": optimizer.init(params)}
    return step, (state,), {"x": X, "y": Y, "weight": 0.5}


@kind
def scale_and_scaled_loss_in_the_metrics():
    """And by hand: the loss is scaled, differentiated, and unscaled."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            loss = plain_loss(params, batch)
            return jls.scale(opt_state, loss), loss

        (scaled, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        grads = jls.unscale(opt_state, grads)
        scale = jls.loss_scale(opt_state)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": loss, "loss_scale": scale, "scaled_loss": scaled}
        return params, opt_state, metrics

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@kind
def scaled_gradients_in_the_metrics():
    """The norm of the scaled gradients is logged, next to that of the true ones."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            loss = plain_loss(params, batch)
            return jls.scale(opt_state, loss), loss

        (_, loss), scaled = jax.value_and_grad(loss_fn, has_aux=True)(params)
        grads = jls.unscale(opt_state, scaled)
        norms = {"scaled": optax.tree.norm(scaled), "true": optax.tree.norm(grads)}
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, **norms}

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@kind
def linen_by_hand_that_returns_no_loss():
    @jax.jit
    def step(state, batch):
        def loss_fn(params):
            return steps.linen_loss(state, params, batch)

        loss, grads = jls.value_and_grad(loss_fn)(state.opt_state, state.params)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    return step, (steps.linen_state(wrap(optax.lion(1e-3))), BATCH)


@kind
def old_parameters_come_back_too():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        new, opt_state, loss = train(optimizer, opt_state, params, plain_loss, batch)
        moved = optax.tree.norm(optax.tree.sub(new, params))
        return new, opt_state, {"before": params, "moved": moved, "loss": loss}

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


@kind
def gradients_and_updates_in_the_metrics():
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(state, batch):
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        state = {"params": params, "opt_state": opt_state}
        return state, {"grads": grads, "updates": updates, "loss": loss}

    params = plain_params()
    return step, ({"params": params, "opt_state": optimizer.init(params)}, BATCH)


@kind
def predictions_like_the_inputs():
    """A denoising autoencoder that returns what it made of a bare array."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, x, key):
        noisy = x + 0.1 * jax.random.normal(key, x.shape)

        def loss_fn(params):
            made = run_layers(params, noisy)
            return jnp.mean((made - x) ** 2), made

        (loss, made), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss, made

    params = layers(0, 4, 8, 4)
    return step, (params, optimizer.init(params), X, jax.random.key(0))


@kind
def adversarial_examples():
    """Inputs are moved by the sign of their gradients, and come back too."""
    optimizer = wrap(optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def step(params, opt_state, x, y):
        def loss_fn(params, x):
            return mse(run_layers(params, x), {"y": y})

        slopes = jls.grad(loss_fn, argnums=1)(opt_state, params, x)
        worse = jax.lax.stop_gradient(x + 0.1 * jnp.sign(slopes))
        params, opt_state, loss = train(optimizer, opt_state, params, loss_fn, worse)
        return params, opt_state, worse, loss

    params = layers(0, 4, 8, 2)
    args = params, optimizer.init(params), X, Y
    return step, args, {"carried": (0, 1)}


class Trainer:
    """Holds what does not change; its state goes in and out."""

    def __init__(self, learning_rate):
        self.optimizer = wrap(optax.adam(learning_rate))

    def init(self):
        params = plain_params()
        return params, self.optimizer.init(params)

    @functools.partial(jax.jit, static_argnums=0, donate_argnames="opt_state")
    def step(self, params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = self.optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss


@kind
def bound_method():
    trainer = Trainer(1e-2)
    return trainer.step, (*trainer.init(), BATCH)


@kind
def partial_of_a_step():
    """As Flax's examples bind the model, the optimizer and the rate's schedule."""

    def train_step(state, batch, *, apply_fn, tx, schedule, l2):
        def loss_fn(params):
            norms = [jnp.sum(w**2) for w in jax.tree.leaves(params) if w.ndim > 1]
            made = apply_fn({"params": params}, batch["x"])
            return mse(made, batch) + l2 * 0.5 * sum(norms), made

        (loss, made), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            state["opt_state"], state["params"]
        )
        updates, opt_state = tx.update(
            grads, state["opt_state"], state["params"], value=loss
        )
        params = optax.apply_updates(state["params"], updates)
        rate = schedule(state["step"])
        metrics = {"loss": loss, "learning_rate": rate, "mean": made.mean()}
        step = state["step"] + 1
        return {"params": params, "opt_state": opt_state, "step": step}, metrics

    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 3, 50)
    tx, model = wrap(optax.sgd(schedule, momentum=0.9)), steps.Dense()
    params = model.init(jax.random.key(0), X)["params"]
    step = jax.jit(
        functools.partial(
            train_step, apply_fn=model.apply, tx=tx, schedule=schedule, l2=1e-4
        ),
        donate_argnums=0,
    )
    state = {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}
    return step, (state, BATCH)


@kind
def static_switches():
    optimizer = wrap(optax.adam(1e-2))

    @functools.partial(jax.jit, static_argnames=("is_training", "activation"))
    def step(params, opt_state, batch, is_training, activation="tanh"):
        def loss_fn(params):
            p = half(params)
            hidden = getattr(jnp, activation)(half(batch["x"]) @ p["w1"])
            return mse(hidden @ p["w2"], batch)

        if not is_training:
            return params, opt_state, loss_fn(params)
        return train(optimizer, opt_state, params, loss_fn)

    params = plain_params()
    keywords = {"is_training": True, "activation": "tanh"}
    return step, (params, optimizer.init(params), BATCH), keywords


@kind
def counters_flags_and_a_mask():
    """Integers, booleans and a table of counts beside the parameters."""
    optimizer = wrap(optax.adam(1e-2))

    @struct.dataclass
    class Run:
        params: Any
        opt_state: Any
        step: Any
        examples: Any
        has_started: Any
        seen: Any

    @jax.jit
    def step(run, x, labels):
        def loss_fn(params):
            logits = run_layers(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, labels
            ).mean()

        params, opt_state, loss = train(optimizer, run.opt_state, run.params, loss_fn)
        run = run.replace(
            params=params,
            opt_state=opt_state,
            step=run.step + 1,
            examples=run.examples + len(x),
            has_started=jnp.bool_(True),
            seen=run.seen.at[labels].add(1),
        )
        return run, {"loss": loss, "step": run.step}

    params = layers(0, 4, 8, 3)
    run = Run(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.int32(0),
        examples=jnp.uint32(0),
        has_started=jnp.bool_(False),
        seen=jnp.zeros(3, jnp.int32),
    )
    return step, (run, X, jnp.arange(8) % 3)


# Not compiled as they are passed.


@kind
def equinox_eager():
    step, args = steps.equinox()
    return step.__wrapped__, args


@kind
def linen_eager():
    step, args = steps.linen()
    return step.__wrapped__, args


@kind
def eager_loop_over_layers():
    """Written as for NumPy: a list of arrays, copied and then written to."""
    optimizer = wrap(optax.sgd(0.1))

    def step(weights, opt_state, x, y):
        weights = list(weights)
        loss, grads = jls.value_and_grad(run)(opt_state, weights, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, weights, value=loss)
        for i, update in enumerate(updates):
            weights[i] = weights[i] + update
        return weights, opt_state, loss

    def run(weights, x, y):
        for w in weights[:-1]:
            x = jnp.tanh(half(x) @ half(w))
        return mse(x @ half(weights[-1]), {"y": y})

    weights = [normal(0, 4, 8) / 2, normal(1, 8, 8) / 3, normal(2, 8, 2) / 3]
    return step, (weights, optimizer.init(weights), X, Y)


# Scalers and optimizers.


@kind
def equinox_with_a_static_scale():
    return steps.equinox(wrap=lambda inner: jls.loss_scaled(inner, jls.static(512.0)))


@kind
def nnx_in_bfloat16():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, dtype=jnp.bfloat16, rngs=rngs)
            self.last = nnx.Linear(8, 2, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.gelu(self.first(x)))

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(steps.nnx_loss)(model, batch)
        optimizer.update(model, grads, value=loss)
        return loss

    model, tx = Model(nnx.Rngs(0)), jls.skip_nonfinite(optax.adamw(1e-2))
    return step, (model, nnx.Optimizer(model, tx, wrt=nnx.Param), BATCH)


@kind
def bare_scaler_with_momentum_by_hand():
    """No optax: pure functions and `jls.select`."""

    class Run(NamedTuple):
        params: Any
        velocity: Any
        scaler: Any
        step: Any

    @jax.jit
    def step(run, batch):
        loss, grads = jls.value_and_grad(plain_loss)(run.scaler, run.params, batch)
        finite = jls.all_finite(grads)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, run.velocity, grads)
        params = jax.tree.map(lambda p, v: p - 0.05 * v, run.params, velocity)
        params, velocity, count = jls.select(
            finite,
            (params, velocity, run.step + 1),
            (run.params, run.velocity, run.step),
        )
        return Run(params, velocity, SCALER.adjust(run.scaler, finite), count), loss

    params = plain_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    return step, (Run(params, zeros, SCALER.init(), jnp.int32(0)), BATCH)


@kind
def bare_scaler_around_optax_in_equinox():
    inner = optax.adamw(1e-2)

    @eqx.filter_jit
    def step(model, opt_state, scaler_state, batch):
        loss, grads = jls.value_and_grad(
            steps.equinox_loss, transform=eqx.filter_value_and_grad
        )(scaler_state, model, batch)
        finite = jls.all_finite((loss, grads))
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, new_state = inner.update(grads, opt_state, params)
        new = eqx.apply_updates(params, updates), new_state
        params, opt_state = jls.select(finite, new, (params, opt_state))
        scaler_state = SCALER.adjust(scaler_state, finite)
        return eqx.combine(params, static), opt_state, scaler_state, loss

    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    opt_state = inner.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, opt_state, SCALER.init(), BATCH)


@kind
def learning_rate_set_by_the_step():
    """A rate that the step computes goes into the state of `inject_hyperparams`."""
    optimizer = wrap(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))

    @jax.jit
    def step(state, batch):
        params, opt_state = state["params"], state["opt_state"]
        rate = 1e-2 * jnp.minimum(1.0, (state["step"] + 1.0) / 4.0)
        inner = opt_state.inner_state
        hyperparams = {**inner.hyperparams, "learning_rate": rate}
        opt_state = opt_state._replace(
            inner_state=inner._replace(hyperparams=hyperparams)
        )
        params, opt_state, loss = train(optimizer, opt_state, params, plain_loss, batch)
        step = state["step"] + 1
        return {"params": params, "opt_state": opt_state, "step": step}, loss

    params = plain_params()
    state = {"params": params, "opt_state": optimizer.init(params)}
    return step, ({**state, "step": jnp.int32(0)}, BATCH)


@kind
def reduce_on_plateau():
    inner = optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=2, rtol=1e-2)
    )
    return steps.linen(inner=inner)


@kind
def equinox_schedule_free():
    """The loss of the averaged parameters is returned too."""
    optimizer = wrap(optax.contrib.schedule_free_sgd(0.1))

    @eqx.filter_jit
    def step(model, opt_state, batch):
        params, static = eqx.partition(model, eqx.is_inexact_array)
        loss, grads = jls.value_and_grad(
            steps.equinox_loss, transform=eqx.filter_value_and_grad
        )(opt_state, model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = eqx.apply_updates(params, updates)
        averaged = optax.contrib.schedule_free_eval_params(
            opt_state.inner_state, params
        )
        after = steps.equinox_loss(eqx.combine(averaged, static), batch)
        return eqx.combine(params, static), opt_state, {"loss": loss, "after": after}

    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, opt_state, BATCH)


@kind
def multi_steps_inside_of_nnx():
    return steps.nnx_step(inner=optax.MultiSteps(optax.adam(1e-2), 2))


# Representations, with averages, queues and codebooks.


def unit(x):
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)


@kind
def moco():
    """An encoder that follows, and a queue of its keys, held by a skipped step."""
    optimizer = wrap(optax.sgd(0.05, momentum=0.9))

    @struct.dataclass
    class Moco:
        params: Any
        momentum_params: Any
        opt_state: Any
        queue: Any
        at: Any

    @jax.jit
    def step(state, queries, keys):
        momentum_params = optax.incremental_update(
            state.params, state.momentum_params, 0.01
        )
        k = unit(run_layers(momentum_params, keys))

        def loss_fn(params):
            q = unit(run_layers(params, queries))
            positive = jnp.sum(q * k, axis=1, keepdims=True)
            logits = jnp.concatenate([positive, q @ state.queue.T], axis=1) / 0.1
            return -jax.nn.log_softmax(logits)[:, 0].mean()

        params, opt_state, loss = train(
            optimizer, state.opt_state, state.params, loss_fn
        )
        queue = jax.lax.dynamic_update_slice(state.queue, k, (state.at, 0))
        queue, at = jls.select(
            opt_state.applied, (queue, (state.at + 8) % 16), (state.queue, state.at)
        )
        return Moco(params, momentum_params, opt_state, queue, at), loss

    params = layers(0, 4, 8, 5)
    queue = unit(normal(7, 16, 5))
    state = Moco(params, params, optimizer.init(params), queue, jnp.int32(0))
    return step, (state, X, X + 0.1 * X[::-1])


@kind
def byol_in_haiku():
    """Online and target networks, of which the target has no predictor."""

    def network(x, with_predictor):
        x = hk.nets.MLP([8, 6], name="encoder")(x)
        return hk.nets.MLP([8, 6], name="predictor")(x) if with_predictor else x

    model = hk.without_apply_rng(hk.transform(network))
    optimizer = wrap(optax.lars(0.1, 1e-6))

    def is_shared(module, name, value):
        return module.startswith("encoder")

    @jax.jit
    def step(state, one, two):
        def embed(params, x, with_predictor):
            made = model.apply(half(params), half(x), with_predictor)
            return unit(made.astype(jnp.float32))

        def loss_fn(online):
            gaps = [
                embed(online, a, True) - embed(state["target"], b, False)
                for a, b in ((one, two), (two, one))
            ]
            return sum(jnp.mean(jnp.sum(gap**2, -1)) for gap in gaps)

        loss, grads = jls.value_and_grad(loss_fn)(state["opt_state"], state["online"])
        updates, opt_state = optimizer.update(
            grads, state["opt_state"], state["online"], value=loss
        )
        online = optax.apply_updates(state["online"], updates)
        tau = 1 - 0.01 * (jnp.cos(jnp.pi * state["step"] / 100) + 1) / 2
        shared = hk.data_structures.filter(is_shared, online)
        target = jax.tree.map(
            lambda old, new: tau * old + (1 - tau) * new, state["target"], shared
        )
        return {
            "online": online,
            "target": target,
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }, {"loss": loss, "tau": tau}

    online = model.init(jax.random.key(0), X, True)
    state = {"online": online, "opt_state": optimizer.init(online)}
    state["target"] = hk.data_structures.filter(is_shared, online)
    return step, ({**state, "step": jnp.int32(0)}, X, 0.9 * X)


@kind
def simclr():
    """Two views made by noise from a key; the loss in one matrix of similarities."""
    optimizer = wrap(optax.lamb(1e-2))

    @functools.partial(jax.jit, donate_argnames=("params", "opt_state"))
    def step(params, opt_state, key, x):
        key, *keys = jax.random.split(key, 3)

        def loss_fn(params):
            views = [x + 0.1 * jax.random.normal(k, x.shape) for k in keys]
            z = unit(run_layers(params, jnp.concatenate(views)))
            logits = z @ z.T / 0.2 - 1e9 * jnp.eye(16)
            pairs = (jnp.arange(16) + 8) % 16
            return optax.softmax_cross_entropy_with_integer_labels(logits, pairs).mean()

        params, opt_state, loss = train(optimizer, opt_state, params, loss_fn)
        return params, opt_state, key, loss

    params = layers(0, 4, 8, 5)
    return step, (params, optimizer.init(params), jax.random.key(0), X)


@kind
def mean_teacher():
    """A teacher that follows its student, whose consistency gains weight by steps."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(student, teacher, opt_state, count, x, y, unlabeled, key):
        weight = jnp.minimum(count / 10.0, 1.0)

        def loss_fn(student):
            noisy = unlabeled + 0.1 * jax.random.normal(key, unlabeled.shape)
            gap = run_layers(student, noisy) - run_layers(teacher, unlabeled)
            supervised = mse(run_layers(student, x), {"y": y})
            return supervised + weight * jnp.mean(gap**2)

        student, opt_state, loss = train(optimizer, opt_state, student, loss_fn)
        teacher = optax.incremental_update(student, teacher, 0.01)
        return student, teacher, opt_state, count + 1, loss

    params = layers(0, 4, 8, 2)
    carried = params, params, optimizer.init(params), jnp.int32(0)
    return step, (*carried, X, Y, -X, jax.random.key(0))


@kind
def equinox_vae():
    class Vae(eqx.Module):
        encoder: eqx.nn.MLP
        decoder: eqx.nn.MLP

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.encoder = eqx.nn.MLP(4, 4, 8, 1, key=one)
            self.decoder = eqx.nn.MLP(2, 4, 8, 1, key=two)

        def __call__(self, x, key):
            mean, log_var = jnp.split(self.encoder(x).astype(jnp.float32), 2)
            z = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
            kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var))
            return self.decoder(z.astype(x.dtype)), kl

    optimizer = wrap(optax.adam(1e-2))

    @eqx.filter_jit(donate="all")
    def step(model, opt_state, x, key):
        def loss_fn(model):
            keys = jax.random.split(key, len(x))
            made, kl = jax.vmap(narrow(model))(half(x), keys)
            error = jnp.sum((made.astype(jnp.float32) - x) ** 2, axis=1)
            return error.mean() + kl.mean(), (error.mean(), kl.mean())

        (loss, parts), grads = jls.value_and_grad(
            loss_fn, has_aux=True, transform=eqx.filter_value_and_grad
        )(opt_state, model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return eqx.apply_updates(model, updates), opt_state, loss, parts

    model = Vae(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, opt_state, X, jax.random.key(1))


@kind
def vq_vae_with_a_moving_codebook():
    """Straight through to the nearest code; codes and counts held by a skipped step."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, book, opt_state, x):
        def loss_fn(params):
            z = run_layers(params["encoder"], x)
            distances = jnp.sum((z[:, None] - book["codes"][None]) ** 2, axis=-1)
            chosen = jax.nn.one_hot(distances.argmin(1), len(book["codes"]))
            code = chosen @ book["codes"]
            made = run_layers(params["decoder"], z + jax.lax.stop_gradient(code - z))
            loss = jnp.mean((made - x) ** 2) + 0.25 * jnp.mean((z - code) ** 2)
            return loss, (z, chosen)

        (loss, (z, chosen)), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        counts = 0.9 * book["counts"] + 0.1 * chosen.sum(0)
        sums = 0.9 * book["sums"] + 0.1 * chosen.T @ z
        codes = sums / (counts[:, None] + 1e-5)
        moved = {"counts": counts, "sums": sums, "codes": codes}
        book = jls.select(opt_state.applied, moved, book)
        usage = (counts > 0.1).sum()
        params = optax.apply_updates(params, updates)
        return params, book, opt_state, {"loss": loss, "usage": usage}

    params = {"encoder": layers(0, 4, 8, 3), "decoder": layers(1, 3, 8, 4)}
    codes = normal(2, 6, 3) / 2
    book = {"counts": jnp.ones(6), "sums": codes, "codes": codes}
    return step, (params, book, optimizer.init(params), X)


@kind
def diffusion_with_an_average():
    """Noise from a carried key; the average is copied until step 3, then follows."""
    optimizer = wrap(optax.adam(1e-2))
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.2, 20))

    class Diffusion(train_state.TrainState):
        params_ema: Any
        key: Any

    class Denoiser(nn.Module):
        @nn.compact
        def __call__(self, x, t):
            angles = t[:, None] * jnp.array([[0.1, 0.5]])
            x = jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], axis=1)
            x = nn.silu(nn.Dense(12, dtype=jnp.float16)(x))
            return nn.Dense(4, dtype=jnp.float16)(x).astype(jnp.float32)

    @jax.jit
    def step(state, x):
        key, t_key, noise_key = jax.random.split(state.key, 3)
        t = jax.random.randint(t_key, (len(x),), 0, 20)
        noise = jax.random.normal(noise_key, x.shape)
        share = kept[t][:, None]
        noisy = jnp.sqrt(share) * x + jnp.sqrt(1 - share) * noise

        def loss_fn(params):
            made = state.apply_fn({"params": params}, noisy, t.astype(jnp.float32))
            return jnp.mean((made - noise) ** 2)

        loss, grads = jls.value_and_grad(loss_fn)(state.opt_state, state.params)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        params_ema = jax.lax.cond(
            state.step < 3,
            lambda new, old: new,
            lambda new, old: optax.incremental_update(new, old, 0.01),
            params,
            state.params_ema,
        )
        return state.replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            params_ema=params_ema,
            key=key,
        ), {"loss": loss}

    model = Denoiser()
    params = model.init(jax.random.key(0), X, jnp.ones(8))["params"]
    state = Diffusion.create(
        apply_fn=model.apply,
        params=params,
        tx=optimizer,
        params_ema=params,
        key=jax.random.key(1),
    )
    return step, (state, X)


@kind
def equinox_flow_matching():
    """Scaled and unscaled by hand; one key comes in, the next goes out."""
    optimizer = wrap(optax.adabelief(1e-2))

    @eqx.filter_value_and_grad(has_aux=True)
    def scaled_loss(model, opt_state, data, key):
        t_key, noise_key = jax.random.split(key)
        t = jax.random.uniform(t_key, (len(data), 1))
        noise = jax.random.normal(noise_key, data.shape)
        x = jnp.concatenate([(1 - t) * noise + t * data, t], axis=1)
        made = jax.vmap(narrow(model))(half(x)).astype(jnp.float32)
        loss = jnp.mean((made - (data - noise)) ** 2)
        return jls.scale(opt_state, loss), loss

    @eqx.filter_jit
    def step(model, data, key, opt_state):
        (_, loss), grads = scaled_loss(model, opt_state, data, key)
        grads = jls.unscale(opt_state, grads)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        model = eqx.apply_updates(model, updates)
        return loss, model, jax.random.split(key, 1)[0], opt_state

    model = eqx.nn.MLP(5, 4, 8, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, X, jax.random.key(1), opt_state)


# Statistics, keys and hidden states.


@kind
def linen_batch_norm_in_a_dict_of_variables():
    """`params` and `batch_stats` of one dict; one is trained, one is selected."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(8, dtype=jnp.float16)(x)
            x = nn.BatchNorm(not train, momentum=0.9, dtype=jnp.float16)(x)
            return nn.Dense(2, dtype=jnp.float16)(nn.relu(x))

    model, optimizer = Model(), wrap(optax.sgd(0.1, momentum=0.9, nesterov=True))

    @functools.partial(jax.jit, static_argnames="train")
    def step(variables, opt_state, batch, train):
        stats, params = variables["batch_stats"], variables["params"]

        def loss_fn(params):
            made, new = model.apply(
                {"params": params, "batch_stats": stats},
                batch["x"],
                train=train,
                mutable=["batch_stats"],
            )
            return mse(made, batch), new

        (loss, new), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        stats = jls.select(opt_state.applied, new["batch_stats"], stats)
        return {"params": params, "batch_stats": stats}, opt_state, loss

    variables = model.init(jax.random.key(0), X, train=True)
    args = variables, optimizer.init(variables["params"]), BATCH
    return step, args, {"train": True}


@kind
def haiku_batch_norm():
    def network(x, is_training):
        x = hk.Linear(8)(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training)
        return hk.Linear(2)(jax.nn.relu(x))

    model = hk.without_apply_rng(hk.transform_with_state(network))
    optimizer = wrap(optax.adam(1e-2))

    class Training(NamedTuple):
        params: Any
        state: Any
        opt_state: Any

    @jax.jit
    def step(training, batch):
        params, state, opt_state = training

        def loss_fn(params):
            made, new = model.apply(half(params), state, half(batch["x"]), True)
            new = jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)
            return mse(made, batch), new

        (loss, new), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        state = jls.select(opt_state.applied, new, state)
        return Training(params, state, opt_state), {"loss": loss}

    params, state = model.init(jax.random.key(0), X, True)
    return step, (Training(params, state, optimizer.init(params)), BATCH)


@kind
def nnx_batch_norm_split_by_hand():
    """Parameters and statistics as two dicts, and their graph outside of the step."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
            self.norm = nnx.BatchNorm(8, dtype=jnp.float16, rngs=rngs)
            self.last = nnx.Linear(8, 2, dtype=jnp.float16, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.norm(self.first(x))))

    graph, params, stats = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    params, stats = nnx.to_pure_dict(params), nnx.to_pure_dict(stats)
    optimizer = wrap(optax.adamw(1e-2))

    @jax.jit
    def step(params, stats, opt_state, batch):
        def loss_fn(params):
            model = nnx.merge(graph, params, stats)
            loss = steps.nnx_loss(model, batch)
            return loss, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

        (loss, new), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        stats = jls.select(opt_state.applied, new, stats)
        return optax.apply_updates(params, updates), stats, opt_state, loss

    return step, (params, stats, optimizer.init(params), BATCH)


@kind
def equinox_batch_norm():
    """Its `State` goes in and out, and is held by a skipped step."""

    class Model(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.first = eqx.nn.Linear(4, 8, key=one)
            self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
            self.last = eqx.nn.Linear(8, 2, key=two)

        def __call__(self, x, state):
            x = self.first(x).astype(jnp.float32)
            x, state = self.norm(x, state)
            return self.last(jax.nn.relu(x).astype(jnp.float16)), state

    def narrow_but_norm(model):
        return eqx.tree_at(lambda m: m.norm, narrow(model), model.norm)

    optimizer = wrap(optax.adam(1e-2))

    @eqx.filter_jit
    def step(model, state, opt_state, batch):
        def loss_fn(model):
            made, new = jax.vmap(
                narrow_but_norm(model),
                in_axes=(0, None),
                out_axes=(0, None),
                axis_name="batch",
            )(half(batch["x"]), state)
            return mse(made, batch), new

        (loss, new), grads = jls.value_and_grad(
            loss_fn, has_aux=True, transform=eqx.filter_value_and_grad
        )(opt_state, model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        state = jls.select(opt_state.applied, new, state)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, state, opt_state, BATCH)


@kind
def linen_dropout_by_the_step():
    """One key for the whole run, folded with the step, as Flax's guide does."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, training):
            x = nn.relu(nn.Dense(16, dtype=jnp.float16)(x))
            x = nn.Dropout(0.5, deterministic=not training)(x)
            return nn.Dense(2, dtype=jnp.float16)(x)

    @jax.jit
    def step(state, batch, dropout_key):
        now = jax.random.fold_in(dropout_key, state.step)

        def loss_fn(params):
            made = state.apply_fn(
                {"params": params}, batch["x"], training=True, rngs={"dropout": now}
            )
            return mse(made, batch)

        loss, grads = jls.value_and_grad(loss_fn)(state.opt_state, state.params)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    model = Model()
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), X, training=False)["params"],
        tx=wrap(optax.adam(1e-2)),
    )
    return step, (state, BATCH, jax.random.key(2))


@kind
def haiku_lstm_with_its_state_carried():
    """Truncated backpropagation through time; the hidden state is selected."""

    def unroll(x, state):
        core = hk.LSTM(6)
        made, state = hk.dynamic_unroll(core, x, state)
        return hk.BatchApply(hk.Linear(2))(made), state

    model = hk.without_apply_rng(hk.transform(unroll))
    optimizer = wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))

    @jax.jit
    def step(params, opt_state, hidden, batch):
        def loss_fn(params):
            made, new = model.apply(half(params), half(batch["x"]), half(hidden))
            return mse(made, batch), jax.tree.map(lambda h: h.astype(jnp.float32), new)

        (loss, new), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        hidden = jls.select(opt_state.applied, new, hidden)
        return optax.apply_updates(params, updates), opt_state, hidden, loss

    batch = {"x": normal(0, 5, 2, 4), "y": normal(1, 5, 2, 2)}
    hidden = hk.LSTMState(jnp.zeros((2, 6)), jnp.zeros((2, 6)))
    params = model.init(jax.random.key(0), batch["x"], hidden)
    return step, (params, optimizer.init(params), hidden, batch)


@kind
def nnx_dropout_and_loss_by_parts():
    """Streams in the model; a metric in the loop; auxiliary values of the loss."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner = steps.Model(rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x):
            return self.inner(self.dropout(x))

    def loss_fn(model, batch):
        made = model(batch["x"])
        l1 = sum(jnp.abs(w).sum() for w in jax.tree.leaves(nnx.state(model, nnx.Param)))
        return mse(made, batch) + 1e-4 * l1, {"l1": l1, "made": made}

    @nnx.jit
    def step(model, optimizer, batch):
        (loss, aux), grads = jls.value_and_grad(
            loss_fn, has_aux=True, transform=nnx.value_and_grad
        )(optimizer, model, batch)
        optimizer.update(model, grads, value=loss)
        return {"loss": loss, "l1": aux["l1"], "norm": optax.tree.norm(grads)}

    model = Model(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, wrap(optax.sgd(0.1)), wrt=nnx.Param)
    return step, (model, optimizer, BATCH)


# Several losses.


@kind
def two_losses_summed_under_one_wrapper():
    """A classifier that also reconstructs; both parts are returned."""
    optimizer = wrap(optax.nadamw(1e-2))

    @jax.jit
    def step(params, opt_state, x, labels):
        def loss_fn(params):
            features = run_layers(params["encoder"], x)
            logits = run_layers(params["classes"], features)
            classes = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            made = run_layers(params["decoder"], features)
            parts = {"classes": classes.mean(), "made": jnp.mean((made - x) ** 2)}
            return parts["classes"] + 0.5 * parts["made"], parts

        (loss, parts), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, parts

    params = {
        "encoder": layers(0, 4, 8, 5),
        "classes": layers(1, 5, 3),
        "decoder": layers(2, 5, 4),
    }
    return step, (params, optimizer.init(params), X, jnp.arange(8) % 3)


@kind
def gradients_of_two_losses_added():
    """Two backward passes, one update with the sum of the true gradients."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch, other):
        gradients = jls.value_and_grad(plain_loss)
        loss1, grads1 = gradients(opt_state, params, batch)
        loss2, grads2 = gradients(opt_state, params, other)
        grads = jax.tree.map(lambda a, b: a + 0.1 * b, grads1, grads2)
        loss = loss1 + 0.1 * loss2
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, (loss1, loss2)

    params = plain_params()
    other = {"x": -X, "y": Y[::-1]}
    return step, (params, optimizer.init(params), BATCH, other)


@kind
def two_wrappers_over_body_and_head():
    """One loss, differentiated for each of the two with its own loss scale."""
    body_tx, head_tx = wrap(optax.adamw(1e-3)), wrap(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_states, batch):
        def loss_fn(body, head):
            features = run_layers(body, batch["x"])
            return mse(run_layers(head, features), batch)

        body, head = params
        body_loss, body_grads = jls.value_and_grad(loss_fn)(opt_states[0], body, head)
        head_loss, head_grads = jls.value_and_grad(loss_fn, argnums=1)(
            opt_states[1], body, head
        )
        body_updates, body_state = body_tx.update(
            body_grads, opt_states[0], body, value=body_loss
        )
        head_updates, head_state = head_tx.update(
            head_grads, opt_states[1], head, value=head_loss
        )
        params = (
            optax.apply_updates(body, body_updates),
            optax.apply_updates(head, head_updates),
        )
        return params, (body_state, head_state), body_loss

    params = layers(0, 4, 8, 6), layers(1, 6, 2)
    opt_states = body_tx.init(params[0]), head_tx.init(params[1])
    return step, (params, opt_states, BATCH)


@kind
def one_backward_pass_for_two_wrappers():
    """One loss scale serves both: the second wrapper has none, and only skips."""
    body_tx, head_tx = wrap(optax.adam(1e-3)), jls.skip_nonfinite(optax.sgd(0.1))

    @jax.jit
    def step(state, batch):
        def loss_fn(body, head):
            return mse(run_layers(head, run_layers(body, batch["x"])), batch)

        body, head = state["body"], state["head"]
        loss, (body_grads, head_grads) = jls.value_and_grad(loss_fn, argnums=(0, 1))(
            state["body_tx"], body, head
        )
        body_updates, body_state = body_tx.update(
            body_grads, state["body_tx"], body, value=loss
        )
        head_updates, head_state = head_tx.update(
            head_grads, state["head_tx"], head, value=loss
        )
        return {
            "body": optax.apply_updates(body, body_updates),
            "head": optax.apply_updates(head, head_updates),
            "body_tx": body_state,
            "head_tx": head_state,
        }, loss

    body, head = layers(0, 4, 8, 6), layers(1, 6, 2)
    state = {"body": body, "head": head}
    state |= {"body_tx": body_tx.init(body), "head_tx": head_tx.init(head)}
    return step, (state, BATCH)


@kind
def two_tasks_of_disjoint_parameters():
    optimizers = {"mean": wrap(optax.adam(1e-2)), "rank": wrap(optax.lion(1e-3))}

    def rank_loss(params, batch):
        scores = run_layers(params, batch["x"])[:, 0]
        order = jnp.sign(batch["y"][:, None, 0] - batch["y"][None, :, 0])
        return jax.nn.softplus(-order * (scores[:, None] - scores[None])).mean()

    def mean_loss(params, batch):
        return mse(run_layers(params, batch["x"]), batch)

    losses = {"mean": mean_loss, "rank": rank_loss}

    @jax.jit
    def step(state, batch):
        new, logs = {}, {}
        for name, loss_fn in losses.items():
            params, opt_state = state[name]["params"], state[name]["opt_state"]
            loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
            updates, opt_state = optimizers[name].update(
                grads, opt_state, params, value=loss
            )
            params = optax.apply_updates(params, updates)
            new[name] = {"params": params, "opt_state": opt_state}
            logs[name] = {"loss": loss, **jls.metrics(opt_state)}
        return new, logs

    params = {"mean": layers(0, 4, 8, 2), "rank": layers(1, 4, 8, 1)}
    state = {
        name: {"params": params[name], "opt_state": optimizers[name].init(params[name])}
        for name in losses
    }
    return step, (state, BATCH)


@kind
def losses_weighted_by_learned_uncertainty():
    """https://arxiv.org/abs/1705.07115: the weights are trained with the rest."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            made = run_layers(params["model"], batch["x"])
            losses = jnp.mean((made - batch["y"]) ** 2, axis=0)
            log_vars = params["log_vars"]
            return jnp.sum(jnp.exp(-log_vars) * losses + log_vars)

        params, opt_state, loss = train(optimizer, opt_state, params, loss_fn)
        weights = jnp.exp(-params["log_vars"])
        return params, opt_state, {"loss": loss, "weights": weights}

    params = {"model": layers(0, 4, 8, 2), "log_vars": jnp.zeros(2)}
    return step, (params, optimizer.init(params), BATCH)


# Models.


@jax.custom_vjp
def binarize(x):
    return jnp.where(x >= 0, 1, -1).astype(x.dtype)


binarize.defvjp(
    lambda x: (binarize(x), x), lambda x, g: (jnp.where(jnp.abs(x) <= 1, g, 0),)
)


@kind
def binary_weights_with_a_straight_through_gradient():
    """Its backward pass drops the gradient where a weight is out of [-1, 1]."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            p = half(params)
            hidden = jnp.tanh(half(batch["x"]) @ binarize(p["w1"]) * p["size"])
            return mse(hidden @ p["w2"], batch)

        params, opt_state, loss = train(optimizer, opt_state, params, loss_fn)
        params["w1"] = jnp.clip(params["w1"], -1, 1)
        return params, opt_state, loss

    params = plain_params()
    params |= {"w1": jnp.clip(params["w1"], -1, 1), "size": jnp.full(8, 0.5)}
    return step, (params, optimizer.init(params), BATCH)


@kind
def quantized_aware_training():
    """Rounding with `stop_gradient`, and the range of activations followed."""
    optimizer = wrap(optax.sgd(0.1))

    def fake_quantize(x, limit):
        size = limit / 127
        rounded = jnp.round(jnp.clip(x, -limit, limit) / size) * size
        return x + jax.lax.stop_gradient(rounded - x)

    @jax.jit
    def step(params, ranges, opt_state, batch):
        def loss_fn(params):
            p = half(params)
            hidden = jnp.tanh(half(batch["x"]) @ p["w1"]).astype(jnp.float32)
            hidden = fake_quantize(hidden, ranges["hidden"])
            made = half(hidden) @ half(fake_quantize(params["w2"], ranges["w2"]))
            return mse(made, batch), jnp.abs(hidden).max()

        (loss, limit), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        moved = {
            "hidden": 0.9 * ranges["hidden"] + 0.1 * limit,
            "w2": jnp.abs(params["w2"]).max(),
        }
        ranges = jls.select(opt_state.applied, moved, ranges)
        return params, ranges, opt_state, loss

    params = plain_params()
    ranges = {"hidden": jnp.float32(1), "w2": jnp.float32(1)}
    return step, (params, ranges, optimizer.init(params), BATCH)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm(dtype=jnp.float32)(x)
        h = nn.MultiHeadDotProductAttention(2, dtype=jnp.float16)(
            h.astype(jnp.float16), mask=nn.make_causal_mask(x[..., 0])
        )
        x = x + h
        h = nn.LayerNorm(dtype=jnp.float32)(x).astype(jnp.float16)
        h = nn.Dense(8, dtype=jnp.float16)(nn.gelu(nn.Dense(16, dtype=jnp.float16)(h)))
        return x + h, None


@kind
def language_model_of_rematerialized_layers_in_a_scan():
    """Integers alone come in; the embedding is tied; pads are masked out."""

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(11, 8, dtype=jnp.float16)
            x = embed(tokens)
            layer = nn.remat(Block, prevent_cse=False)
            layer = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = layer()(x, None)
            return embed.attend(x).astype(jnp.float32)

    @functools.partial(jax.jit, donate_argnames="state")
    def step(state, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        weights = (targets > 0).astype(jnp.float32)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, inputs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return (losses * weights).sum() / weights.sum()

        loss, grads = jls.value_and_grad(loss_fn)(state.opt_state, state.params)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "perplexity": jnp.exp(loss)}
        step = state.step + 1
        return state.replace(step=step, params=params, opt_state=opt_state), metrics

    def is_matrix(params):
        return jax.tree.map(lambda x: x.ndim > 1, params)

    model = Transformer()
    tokens = jax.random.randint(jax.random.key(1), (4, 7), 0, 11)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 9)
    tx = wrap(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(schedule, mask=is_matrix),
        )
    )
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=jax.jit(model.init)(jax.random.key(0), tokens)["params"],
        tx=tx,
    ).replace(step=jnp.int32(0))
    return step, (state, tokens)


@kind
def layers_stacked_and_scanned():
    """With `jax.checkpoint` around each layer, in plain JAX."""
    optimizer = wrap(optax.adafactor(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        @jax.checkpoint
        def layer(x, p):
            return x + jnp.tanh(x @ p["w"] + p["b"]), None

        def loss_fn(params):
            p = half(params)
            x, _ = jax.lax.scan(layer, half(batch["x"]) @ p["first"], p["layers"])
            return mse(x @ p["last"], batch)

        return train(optimizer, opt_state, params, loss_fn)

    params = {
        "first": normal(0, 4, 8) / 2,
        "layers": {"w": normal(1, 3, 8, 8) / 4, "b": jnp.zeros((3, 8))},
        "last": normal(2, 8, 2) / 3,
    }
    return step, (params, optimizer.init(params), BATCH)


@kind
def directions_of_norm_1_projected_in_each_step():
    """Weights as length times direction; a direction of norm 1 is left as it is."""
    optimizer = wrap(optax.adam(1e-2))

    def project(v):
        norm = jnp.linalg.norm(v, axis=0, keepdims=True)
        return jnp.where(jnp.abs(norm - 1) < 1e-6, v, v / norm)

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            weights = {
                name: params[name]["g"] * params[name]["v"] for name in ("w1", "w2")
            }
            return plain_loss(weights, batch)

        params, opt_state, loss = train(optimizer, opt_state, params, loss_fn)
        new = {name: {"g": w["g"], "v": project(w["v"])} for name, w in params.items()}
        return jls.select(opt_state.applied, new, params), opt_state, loss

    params = {
        name: {"g": jnp.linalg.norm(w, axis=0), "v": project(w)}
        for name, w in plain_params().items()
    }
    return step, (params, optimizer.init(params), BATCH)


@kind
def complex_weights_in_the_spectrum():
    """A layer of a Fourier neural operator, between layers in float16."""
    optimizer = wrap(optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            lifted = jnp.tanh(half(batch["x"]) @ half(params["lift"]))
            spectrum = jnp.fft.rfft(lifted.astype(jnp.float32), axis=1)
            mixed = jnp.fft.irfft(spectrum @ params["modes"], 8, axis=1)
            return mse(half(mixed) @ half(params["out"]), batch)

        params, opt_state, loss = train(optimizer, opt_state, params, loss_fn)
        return params, opt_state, loss

    real, imaginary = normal(1, 5, 5) / 3, normal(2, 5, 5) / 3
    params = {
        "lift": normal(0, 4, 8) / 2,
        "modes": jax.lax.complex(real, imaginary),
        "out": normal(3, 8, 2) / 3,
    }
    return step, (params, optimizer.init(params), BATCH)


@kind
def equation_in_the_loss():
    """A physics-informed network: derivatives by the inputs, in float32."""
    optimizer = wrap(optax.adam(1e-2))

    @eqx.filter_jit
    def step(model, opt_state, inside, edge):
        def residual(model, x):
            slope = jax.jvp(jax.grad(model), (x,), (jnp.ones_like(x),))[1]
            return slope + jnp.sin(x)

        def loss_fn(model):
            equation = jax.vmap(residual, in_axes=(None, 0))(model, inside)
            return jnp.mean(equation**2) + jnp.mean(jax.vmap(model)(edge) ** 2)

        loss, grads = jls.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)(
            opt_state, model
        )
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return eqx.apply_updates(model, updates), opt_state, loss

    model = eqx.nn.MLP(
        "scalar", "scalar", 8, 2, activation=jnp.tanh, key=jax.random.key(0)
    )
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, opt_state, jnp.linspace(0.1, 3.0, 8), jnp.array([0, jnp.pi]))


@kind
def mixture_of_experts():
    """The best of three experts for each row, with a loss that balances them."""
    optimizer = wrap(optax.adamw(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            p = half(params)
            x = half(batch["x"])
            gates = jax.nn.softmax((x @ p["gate"]).astype(jnp.float32))
            weight, chosen = jax.lax.top_k(gates, 1)
            load = jax.nn.one_hot(chosen[:, 0], 3)
            every = jnp.einsum("bi,eio->beo", x, p["experts"]).astype(jnp.float32)
            made = jnp.einsum("beo,be->bo", every, load * weight)
            balance = 3 * jnp.sum(load.mean(0) * gates.mean(0))
            return mse(made, batch) + 0.01 * balance, load.sum(0)

        (loss, load), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return params, opt_state, {"loss": loss, "load": load}

    params = {"gate": normal(0, 4, 3) / 2, "experts": normal(1, 3, 4, 2) / 2}
    return step, (params, optimizer.init(params), BATCH)


@kind
def embeddings_with_negatives_from_a_key():
    """word2vec: rows that are not drawn have gradients of 0."""
    optimizer = wrap(optax.adagrad(0.1))

    @jax.jit
    def step(state, pairs):
        key, now = jax.random.split(state["key"])
        negatives = jax.random.randint(now, (len(pairs), 3), 0, 12)

        def loss_fn(params):
            p = half(params)
            word, context = p["in"][pairs[:, 0]], p["out"][pairs[:, 1]]
            positive = jnp.einsum("bd,bd->b", word, context).astype(jnp.float32)
            negative = jnp.einsum("bd,bkd->bk", word, p["out"][negatives])
            negative = jax.nn.softplus(negative.astype(jnp.float32)).sum(1)
            return jnp.mean(jax.nn.softplus(-positive) + negative)

        params, opt_state, loss = train(
            optimizer, state["opt_state"], state["params"], loss_fn
        )
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": loss}

    params = {"in": normal(0, 12, 4), "out": normal(1, 12, 4)}
    state = {"params": params, "opt_state": optimizer.init(params)}
    pairs = jax.random.randint(jax.random.key(3), (8, 2), 0, 12)
    return step, ({**state, "key": jax.random.key(2)}, pairs)


@kind
def ensemble_under_one_wrapper():
    """Stacked members and one optimizer: one decision for all of them."""
    optimizer = wrap(optax.adam(1e-2))

    @eqx.filter_jit
    def step(models, opt_state, x, y):
        def loss_fn(models):
            def member(model):
                return mse(jax.vmap(narrow(model))(half(x)), {"y": y})

            losses = eqx.filter_vmap(member)(models)
            return losses.sum(), losses

        (loss, losses), grads = jls.value_and_grad(
            loss_fn, has_aux=True, transform=eqx.filter_value_and_grad
        )(opt_state, models)
        params = eqx.filter(models, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return eqx.apply_updates(models, updates), opt_state, losses

    keys = jax.random.split(jax.random.key(0), 3)
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 2, 8, 1, key=key))(keys)
    opt_state = optimizer.init(eqx.filter(models, eqx.is_inexact_array))
    return step, (models, opt_state, X, Y)


# Several modules and optimizers of NNX in one step.


def nnx_descend(model, optimizer, loss_fn):
    loss, grads = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)(
        optimizer, model
    )
    optimizer.update(model, grads, value=loss)
    return loss


class NnxMlp(nnx.Module):
    def __init__(self, rows, hidden, columns, rngs):
        self.first = nnx.Linear(rows, hidden, dtype=jnp.float16, rngs=rngs)
        self.last = nnx.Linear(hidden, columns, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x))).astype(jnp.float32)


def nnx_adam(model, wrt=nnx.Param):
    return nnx.Optimizer(model, wrap(optax.adam(1e-2)), wrt=wrt)


@kind
def nnx_gan():
    @nnx.jit
    def step(generator, discriminator, g_optimizer, d_optimizer, real, z):
        def discriminator_loss(discriminator):
            fake = jax.nn.softplus(discriminator(generator(z))).mean()
            return fake + jax.nn.softplus(-discriminator(real)).mean()

        def generator_loss(generator):
            return jax.nn.softplus(-discriminator(generator(z))).mean()

        d_loss = nnx_descend(discriminator, d_optimizer, discriminator_loss)
        g_loss = nnx_descend(generator, g_optimizer, generator_loss)
        return {"d_loss": d_loss, "g_loss": g_loss}

    rngs = nnx.Rngs(0)
    generator, discriminator = NnxMlp(3, 8, 4, rngs), NnxMlp(4, 8, 1, rngs)
    optimizers = nnx_adam(generator), nnx_adam(discriminator)
    return step, (generator, discriminator, *optimizers, X, normal(1, 8, 3))


@kind
def nnx_actor_and_critic_with_a_target_module():
    @nnx.jit
    def step(actor, critic, target, optimizers, batch):
        def value(critic, observation, action):
            return critic(jnp.concatenate([observation, action], axis=1))[:, 0]

        following = jnp.tanh(actor(batch.following))
        goal = value(target, batch.following, following)
        goal = batch.reward + 0.99 * (1 - batch.done) * goal

        def critic_loss(critic):
            made = value(critic, batch.observation, batch.action)
            return jnp.mean((made - goal) ** 2)

        def actor_loss(actor):
            action = jnp.tanh(actor(batch.observation))
            return -value(critic, batch.observation, action).mean()

        critic_value = nnx_descend(critic, optimizers["critic"], critic_loss)
        actor_value = nnx_descend(actor, optimizers["actor"], actor_loss)
        moved = jax.tree.map(
            lambda new, old: 0.01 * new + 0.99 * old,
            nnx.state(critic, nnx.Param),
            nnx.state(target, nnx.Param),
        )
        nnx.update(target, moved)
        return critic_value, actor_value

    rngs = nnx.Rngs(0)
    actor, critic = NnxMlp(4, 8, 2, rngs), NnxMlp(6, 8, 1, rngs)
    optimizers = nnx.Dict(actor=nnx_adam(actor), critic=nnx_adam(critic))
    return step, (actor, critic, nnx.clone(critic), optimizers, TRANSITIONS)


@kind
def nnx_head_on_a_frozen_backbone():
    """The filter of the optimizer and that of the gradients leave the backbone out."""

    class Classifier(nnx.Module):
        def __init__(self, rngs):
            self.backbone = NnxMlp(4, 8, 6, rngs)
            self.head = nnx.Linear(6, 2, dtype=jnp.float16, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.backbone(x)))

    in_head = nnx.All(nnx.Param, nnx.PathContains("head"))
    of_head = functools.partial(nnx.value_and_grad, argnums=nnx.DiffState(0, in_head))

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = jls.value_and_grad(steps.nnx_loss, transform=of_head)(
            optimizer, model, batch
        )
        optimizer.update(model, grads, value=loss)
        return {"loss": loss}

    model = Classifier(nnx.Rngs(0))
    return step, (model, nnx_adam(model, in_head), BATCH)


@kind
def nnx_average_of_the_model():
    @nnx.jit
    def step(model, average, optimizer, batch):
        loss = nnx_descend(model, optimizer, lambda m: steps.nnx_loss(m, batch))
        new, old = nnx.state(model, nnx.Param), nnx.state(average, nnx.Param)
        nnx.update(average, optax.incremental_update(new, old, 0.1))
        return loss

    model = NnxMlp(4, 8, 2, nnx.Rngs(0))
    return step, (model, nnx.clone(model), nnx_adam(model), BATCH)


@kind
def nnx_scan_of_steps():
    @nnx.jit
    def epoch(model, optimizer, batches):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def body(carry, batch):
            model, optimizer = carry
            loss = nnx_descend(model, optimizer, lambda m: steps.nnx_loss(m, batch))
            return (model, optimizer), loss

        _, losses = body((model, optimizer), batches)
        return losses.mean()

    model = NnxMlp(4, 8, 2, nnx.Rngs(0))
    batches = jax.tree.map(lambda x: jnp.stack([x, -x]), BATCH)
    return epoch, (model, nnx_adam(model), batches)
