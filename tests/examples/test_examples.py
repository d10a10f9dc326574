"""The examples train, and jls adds few lines to the same program with optax alone."""

import difflib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
TINY = {
    "actor_critic": {"updates": 500, "envs": 4, "batch_size": 32},
    "equinox_vit": {"epochs": 3, "width": 16, "depth": 1},
    "gpt_sharded": {"steps": 20, "save_every": 5, "length": 8, "width": 16, "depth": 1},
    "haiku_state": {"steps": 80, "widths": (8, 8), "batch_size": 32},
    "linen_imagenet": {"epochs": 3, "widths": (8,), "size": 8},
    "nnx_convnet": {"epochs": 2, "width": 4},
    "nnx_vae": {"epochs": 3, "width": 16},
    "ppo": {"seeds": 2, "updates": 10, "steps": 32, "epochs": 2},
}
# Starts where float16 overflows.
TOO_HIGH = functools.partial(jls.dynamic, 2.0**24)
# How many bad batches these get: one in each epoch.
WITH_AN_INF = {"equinox_vit": 3, "linen_imagenet": 3, "nnx_convnet": 2, "nnx_vae": 3}
# What they print for each part of the run, and whose numbers are to rise.
RISING = {"actor_critic": "reward", "ppo": "upright"}


def load(name):
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _process():
    """Compiles fast rather than well; forgets the policies of Haiku's modules."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    hk.mixed_precision.clear_policy(hk.BatchNorm)


def run(program, name, folder):
    folder = [folder] if name == "gpt_sharded" else []
    return program.main(*folder, **TINY[name])


def spoiled(batches):
    """The batches with an inf in the second one, where the images come first."""
    for i, batch in enumerate(batches):
        images = batch["image"] if isinstance(batch, dict) else batch
        images = images[0] if isinstance(images, tuple) else images
        images[0, 0] = np.inf if i == 1 else images[0, 0]
        yield batch


def check_curve(name, out):
    if name in RISING:
        lines = [line for line in out.splitlines() if RISING[name] in line]
        numbers = np.array([line.split()[-1] for line in lines], float)
        assert numbers[-1] > numbers[0]
    else:
        numbers = np.array(re.findall(r"loss +([\d.naif]+) ?", out), float)
        assert numbers[-1] < 0.97 * numbers[0]
    assert len(numbers) >= 2
    assert np.isfinite(numbers).all()


def test_all_are_here():
    assert sorted(TINY) == NAMES
    assert sorted(path.stem for path in (EXAMPLES / "plain").glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_jls_adds_at_most_six_lines(name):
    ours = (EXAMPLES / f"{name}.py").read_text().splitlines()
    plain = (EXAMPLES / "plain" / f"{name}.py").read_text().splitlines()
    diff = list(difflib.unified_diff(plain, ours, lineterm="", n=0))[2:]
    added = [line for line in diff if line.startswith("+")]
    assert 4 <= len(added) <= 6, added
    assert added[0] == "+import jls"
    assert not re.search("jls|float16|_half", "\n".join(plain))


@pytest.mark.parametrize("name", NAMES)
def test_plain_program_learns(name, capsys, tmp_path):
    run(load(f"plain/{name}"), name, tmp_path)
    check_curve(name, capsys.readouterr().out)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"gpt_sharded"}))
def test_learns_from_a_scale_that_is_too_high(name, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(jls, "dynamic", TOO_HIGH)
    program = load(name)
    bad = WITH_AN_INF.get(name, 0)
    if bad:
        batches = program.batches
        monkeypatch.setattr(program, "batches", lambda *args: spoiled(batches(*args)))
    result = run(program, name, tmp_path)
    # Batch statistics and the metrics of NNX would keep an inf for ever.
    check_curve(name, capsys.readouterr().out)
    if name == "ppo":
        metrics = jax.vmap(jls.metrics)(result)
    elif name == "actor_critic":
        metrics = jax.tree.map(lambda *x: jnp.stack(x), *map(jls.metrics, result[:2]))
    else:
        metrics = jls.metrics(result)
    assert np.all(metrics["nonfinite_losses"] == bad)
    assert np.all(metrics["skips"] > bad)
    assert np.all(metrics["skips"] <= metrics["steps"] / 2)
    assert np.all(metrics["loss_scale"] < 2.0**24)


def test_gpt_resumes_as_if_it_had_not_been_interrupted(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(jls, "dynamic", TOO_HIGH)
    program = load("gpt_sharded")
    expected = run(program, "gpt_sharded", tmp_path / "whole")
    check_curve("gpt_sharded", capsys.readouterr().out)
    batches = program.make_batch

    def interrupted(text, step, *args):
        if step == 14:
            raise KeyboardInterrupt
        return batches(text, step, *args)

    monkeypatch.setattr(program, "make_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(program, "gpt_sharded", tmp_path / "parts")
    monkeypatch.setattr(program, "make_batch", batches)
    assert_identical(run(program, "gpt_sharded", tmp_path / "parts"), expected)
    logs = [(tmp_path / folder / "log").read_text() for folder in ("whole", "parts")]
    assert logs[0] == logs[1]
    log = [json.loads(line) for line in logs[0].splitlines()]
    for name in ("step", "steps"):
        assert [line[name] for line in log] == [5, 10, 15, 20]
    assert log[0]["skips"] >= 1
    assert log[-1]["skips"] < 10


@pytest.fixture
def checks(monkeypatch):
    """What `jls.check_step` says of each jitted train step when it is first called."""
    made, found = [], []
    make = jls.train_step

    def train_step(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    def checking(jit):
        def jit_and_check(fun=None, **options):
            jitted = jit(**options) if fun is None else jit(fun, **options)
            if fun not in made:
                return jitted

            def checked(*args, **kwargs):
                if not found:
                    found.append(jls.check_step(jitted, *args, **kwargs))
                return jitted(*args, **kwargs)

            return checked

        return jit_and_check

    monkeypatch.setattr(jls, "train_step", train_step)
    for library, name in ((jax, "jit"), (nnx, "jit"), (eqx, "filter_jit")):
        monkeypatch.setattr(library, name, checking(getattr(library, name)))
    return found


@pytest.mark.parametrize("name", sorted({*NAMES} - RISING.keys()))
def test_step_is_right(name, checks, tmp_path):
    run(load(name), name, tmp_path)
    (check,) = checks
    check.raise_if_broken()
    # Integer batches, as the GPT's, get no fault.
    assert len(check.not_tried) <= 4, check


def test_step_of_ppo_is_right(tmp_path):
    program = load("ppo")
    states = run(program, "ppo", tmp_path)
    state = jax.tree.map(lambda x: x[0], states)
    key = jax.random.key(0)
    numbers = jax.random.normal(key, (64,))
    action = jax.random.bernoulli(key, shape=(64,)).astype(jnp.int32)
    obs = jax.random.normal(key, (64, 4))
    minibatch = (
        program.Transition(obs, action, -(numbers**2), *[numbers] * 4),
        numbers,
        numbers,
    )
    step = jax.jit(jls.train_step(program.loss_fn))
    jls.check_step(step, state, minibatch).raise_if_broken()


def test_actor_and_critic_skip_each_for_itself():
    program = load("actor_critic")
    actor, critic, _ = program.main(updates=5, envs=2, batch_size=4)
    keys = jax.random.split(jax.random.key(0), 6)
    pendulum = jax.vmap(program.reset)(keys)
    action = program.policy(actor, actor.params, pendulum)
    later, reward = jax.vmap(program.act)(pendulum, action)
    batch = pendulum, action, reward, later
    learn_critic = jax.jit(jls.train_step(program.critic_loss))
    learn_actor = jax.jit(jls.train_step(program.actor_loss))
    others = {"actor": actor, "key": keys[0]}
    jls.check_step(learn_critic, critic, batch, **others).raise_if_broken()
    jls.check_step(learn_actor, actor, batch, critic=critic).raise_if_broken()

    no_reward = pendulum, action, reward.at[0].set(jnp.nan), later
    new_critic, of_critic = learn_critic(critic, no_reward, **others)
    new_actor, of_actor = learn_actor(actor, no_reward, critic=new_critic)
    assert of_critic.skipped
    assert_identical(new_critic.params, critic.params)
    assert not of_actor.skipped
    followed = optax.incremental_update(critic.params, critic.target, program.TAU)
    assert_identical(new_critic.follow().target, followed)
    assert jls.all_finite((followed, new_actor.follow().target))


def test_vae_takes_its_random_numbers_back():
    program = load("nnx_vae")
    model, optimizer = program.main(epochs=1, width=4)
    step, rngs = nnx.jit(jls.train_step(program.loss_fn)), nnx.Rngs(noise=1, dropout=2)
    model.train()
    images = program.load()[0][:8]
    for batch, counts in (
        (images, (1, 2)),
        (images * np.nan, (1, 2)),
        (images, (2, 4)),
    ):
        report = step(model, optimizer, batch, rngs=rngs)
        assert report.skipped == (not np.isfinite(batch).all())
        streams = rngs.noise, rngs.dropout
        assert tuple(int(stream.count[...]) for stream in streams) == counts


SPLIT = """
import gpt_sharded, json, sys
params, opt_state = gpt_sharded.main(sys.argv[1], **json.loads(sys.argv[2]))
for array in (params["bytes"], opt_state.inner_state[1][0].mu["bytes"]):
    print(array.shape, array.addressable_shards[0].data.shape)
"""


def test_gpt_splits_its_parameters_over_eight_devices(tmp_path):
    environment = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    options = json.dumps(TINY["gpt_sharded"])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SPLIT, str(tmp_path), options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == ["(256, 16) (256, 2)"] * 2
