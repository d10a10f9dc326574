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
    """As in its documentation: gradients of a part, moments of the whole."""
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
    return step, args, {"carried_args": (0, 1)}


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
