"""Draws the pictures of examples.md into docs/examples: two minutes on a CPU.

Run it after `pip install -e ".[test]"`, when an example has changed. Building the pages
does not.
"""

import functools
import runpy
import sys
import tempfile
from pathlib import Path

import jax
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import jls
from jls._tools.figure import GREEN, GREY, JLS, WIDTH

DOCS = Path(__file__).parent
SHOWN = "loss", "loss_scale", "skipped"
DARK, LIGHT = "#003b5c", "#7fb8db"  # shades of JLS


def recorded(program: Path, *args) -> list[jls.History]:
    """The steps of each train step that the program makes."""
    records, train_step = [], jls.train_step

    def recording(*args, **kwargs):
        step, history = train_step(*args, **kwargs), jls.History()
        records.append(history)

        @functools.wraps(step)
        def call(*args, **kwargs):
            out = step(*args, **kwargs)
            report = out if isinstance(out, jls.types.StepReport) else out[-1]
            row = {name: getattr(report, name) for name in SHOWN}
            jax.debug.callback(history.append, row, ordered=True)
            return out

        return call

    jls.train_step = recording
    try:
        runpy.run_path(str(program))["main"](*args)
        jax.effects_barrier()
    finally:
        jls.train_step = train_step
    return records


def draw_run(history):
    """The loss above the loss scale."""
    figure, axes = plt.subplots(2, sharex=True, figsize=(WIDTH, 4))
    history.plot(axes)
    figure.align_ylabels()


def draw_ppo(train, seeds=3, updates=150):
    """How long the pole stays up."""
    keys = jax.random.split(jax.random.key(0), seeds)
    run = jax.jit(jax.vmap(functools.partial(train, updates=updates)))
    _, (count, length) = run(keys)
    _, ax = plt.subplots(figsize=(WIDTH, 2.6))
    for seed, color in enumerate((DARK, JLS, LIGHT)):
        ended = np.asarray(count[seed]) > 0
        mean = np.asarray(length[seed])[ended] / np.asarray(count[seed])[ended]
        ax.plot(np.flatnonzero(ended) + 1, mean, color=color, label=f"seed {seed}")
    ax.set(xlabel="update", ylabel="steps upright")
    ax.legend(frameon=False)


def draw_actor_critic(main, records):
    """The reward of a step, and both loss scales."""
    *_, rewards = main()
    smooth = np.convolve(rewards, np.ones(20) / 20, "valid")
    _, (top, bottom) = plt.subplots(2, sharex=True, figsize=(WIDTH, 4))
    top.plot(np.arange(20, len(rewards) + 1), smooth, color=GREY, linewidth=1)
    top.set(ylabel="reward")
    for name, history, color in zip(
        ("critic", "actor"), records, (JLS, GREEN), strict=True
    ):
        label = f"{name}: {np.sum(history['skipped'])} skipped steps"
        x, scale = history["step"], history["loss_scale"]
        bottom.step(x, scale, color=color, where="post", linewidth=1.2, label=label)
    bottom.set_yscale("log", base=2)
    bottom.set(ylabel="loss scale", xlabel="step")
    bottom.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9
    )
    for ax in (top, bottom):
        ax.grid(alpha=0.25)


def main(names):
    """Draws the examples with these names, or all."""
    mpl.use("Agg")
    mpl.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    mpl.rcParams["figure.constrained_layout.use"] = True
    for program in sorted((DOCS.parent / "examples").glob("*.py")):
        if names and program.stem not in names:
            continue
        if program.stem == "ppo":
            draw_ppo(runpy.run_path(str(program))["train"])
        elif program.stem == "gpt_sharded":
            with tempfile.TemporaryDirectory() as folder:
                draw_run(recorded(program, folder)[0])
        elif program.stem == "actor_critic":
            draw_actor_critic(runpy.run_path(str(program))["main"], recorded(program))
        else:
            draw_run(recorded(program)[0])
        plt.savefig(DOCS / "examples" / f"{program.stem}.png", dpi=120)
        plt.close()


if __name__ == "__main__":
    main(sys.argv[1:])
