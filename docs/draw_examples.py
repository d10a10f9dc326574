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

DOCS = Path(__file__).parent
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"


def recorded(program: Path, *args) -> list[np.ndarray]:
    """Loss, loss scale and whether it was skipped, of each step that was made."""
    records, train_step = [], jls.train_step

    def recording(*args, **kwargs):
        step, rows = train_step(*args, **kwargs), []
        records.append(rows)

        @functools.wraps(step)
        def call(*args, **kwargs):
            out = step(*args, **kwargs)
            report = out if isinstance(out, jls.types.StepReport) else out[-1]
            jax.debug.callback(
                lambda *row: rows.append([float(x) for x in row]),
                report.loss,
                report.loss_scale,
                report.skipped,
                ordered=True,
            )
            return out

        return call

    jls.train_step = recording
    try:
        runpy.run_path(str(program))["main"](*args)
        jax.effects_barrier()
    finally:
        jls.train_step = train_step
    return [np.array(rows).T for rows in records]


def draw_run(loss, scale, skipped):
    """The loss above the loss scale."""
    steps = np.arange(1, len(loss) + 1)
    _, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 3.2))
    top.plot(steps, loss, color=BLUE, linewidth=1)
    top.set(ylabel="loss")
    if loss.max() > 3 * loss.min():
        top.set_yscale("log")
        top.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    bottom.step(steps, scale, color=BLUE, where="post")
    bottom.set_yscale("log", base=2)
    bottom.set(ylabel="loss scale", xlabel="step")
    where = steps[skipped == 1]
    label = f"skipped steps ({len(where)})"
    floor = bottom.get_xaxis_transform()
    bottom.vlines(where, 0, 0.12, ORANGE, transform=floor, label=label)
    bottom.legend(loc="upper left", frameon=False)


def draw_ppo(train, seeds=3, updates=150):
    """How long the pole stays up."""
    keys = jax.random.split(jax.random.key(0), seeds)
    run = jax.jit(jax.vmap(functools.partial(train, updates=updates)))
    _, (count, length) = run(keys)
    _, ax = plt.subplots(figsize=(7, 2.6))
    for seed, color in enumerate((BLUE, ORANGE, GREEN)):
        ended = np.asarray(count[seed]) > 0
        mean = np.asarray(length[seed])[ended] / np.asarray(count[seed])[ended]
        ax.plot(np.flatnonzero(ended) + 1, mean, color=color, label=f"seed {seed}")
    ax.set(xlabel="update", ylabel="steps upright")
    ax.legend(frameon=False)


def draw_actor_critic(main, records):
    """The reward of a step, and both loss scales."""
    *_, rewards = main()
    smooth = np.convolve(rewards, np.ones(20) / 20, "valid")
    _, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 3.2))
    top.plot(np.arange(20, len(rewards) + 1), smooth, color=BLUE, linewidth=1)
    top.set(ylabel="reward")
    for name, (_, scale, skipped), color in zip(
        ("critic", "actor"), records, (BLUE, GREEN), strict=True
    ):
        label = f"{name}, {skipped.sum():.0f} steps skipped"
        steps = np.arange(1, len(scale) + 1)
        bottom.step(steps, scale, color=color, where="post", linewidth=1, label=label)
    bottom.set_yscale("log", base=2)
    bottom.set(ylabel="loss scale", xlabel="step")
    bottom.legend(loc="upper left", frameon=False)


def main(names):
    """Draws the examples with these names, or all."""
    mpl.use("Agg")
    mpl.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    for program in sorted((DOCS.parent / "examples").glob("*.py")):
        if names and program.stem not in names:
            continue
        if program.stem == "ppo":
            draw_ppo(runpy.run_path(str(program))["train"])
        elif program.stem == "gpt_sharded":
            with tempfile.TemporaryDirectory() as folder:
                draw_run(*recorded(program, folder)[0])
        elif program.stem == "actor_critic":
            draw_actor_critic(runpy.run_path(str(program))["main"], recorded(program))
        else:
            draw_run(*recorded(program)[0])
        plt.savefig(
            DOCS / "examples" / f"{program.stem}.png", dpi=110, bbox_inches="tight"
        )
        plt.close()


if __name__ == "__main__":
    main(sys.argv[1:])
