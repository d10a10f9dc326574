# SPDX-License-Identifier: Apache-2.0
"""Prints the demo: a bar for each run, a table, and the outcome in words."""

import math
import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from jls._text import format_scale, quantity
from jls._tools.cli import demo

CONFIGURATIONS = (
    ("float32", jnp.float32, False),
    ("float16, no scale", jnp.float16, False),
    ("float16 with jls", jnp.float16, True),
    ("bfloat16, no scale", jnp.bfloat16, False),
)
HEADINGS = ("accuracy", "loss", "skips", "scale", "zeros", "memory")
NOTE = (
    "accuracy: on 450 digits that the network has not seen. zeros: share of the first "
    "layer's gradients that are exactly zero, at its first step (pixels that are blank "
    "in every image have no others). memory: what the backward pass needs of the "
    "forward pass, by its shapes"
)
GUESSED = 0.09  # the loss of a network that says 0.1 for each of the ten digits
WIDE = 78  # columns of a terminal in which everything fits side by side
# Test accuracies nearer than this count as the same: of 450 images at 96 %, three
# standard deviations.
CLOSE = 0.03


class Runs(NamedTuple):
    """The finished runs, in the order of `CONFIGURATIONS`."""

    float32: demo.Progress
    unscaled: demo.Progress
    scaled: demo.Progress
    bfloat16: demo.Progress


def train_all(steps: int, seed: int) -> Runs:
    """Trains the runs under a progress bar each."""
    console = Console()
    device = demo.choose_device()
    console.print(f"Training {on_device(device)}.", highlight=False)
    is_wide = console.width >= WIDE
    bar_column = [BarColumn(bar_width=12)] if is_wide else []
    progress = Progress(
        TextColumn("{task.description:<18}"),
        *bar_column,
        TextColumn("{task.completed:>{task.fields[digits]}}/{task.total}"),
        TextColumn("{task.fields[status]}"),
        console=console,
    )
    finished = []
    with jax.default_device(device), progress:
        digits = demo.load(seed)
        for name, dtype, scaled in CONFIGURATIONS:
            bar = progress.add_task(
                name, total=steps, digits=len(str(steps)), status="compiling"
            )
            so_far = None
            for so_far in demo.train(dtype, scaled, digits, steps, seed):
                progress.update(
                    bar, completed=len(so_far.losses), status=_status(so_far, is_wide)
                )
            finished.append(so_far)
    return Runs(*finished)


def on_device(device: Any) -> str:
    """`on the CPU`, or `on the GPU, Tesla T4`."""
    is_gpu = device.platform == "gpu"
    return f"on the GPU, {device.device_kind}" if is_gpu else "on the CPU"


def show(runs: Runs) -> None:
    """Prints the table and what happened."""
    console = Console()
    width = min(console.width, 88)
    rows = [
        (name, *_values(run, scaled))
        for (name, _, scaled), run in zip(CONFIGURATIONS, runs, strict=True)
    ]
    table = [("run", *HEADINGS), *rows]
    if console.width < WIDE:  # a column for each run instead of a row
        table = [*zip(*table, strict=True)]
    console.print()
    console.print(_as_table(table))
    console.print(textwrap.fill(NOTE, width), style="dim", highlight=False)
    console.print()
    console.print(textwrap.fill(sentence(runs), width), highlight=False)


def _values(run: demo.Progress, scaled: bool) -> tuple[str, ...]:
    """The cells of a run in the table, in the order of `HEADINGS`."""
    return (
        percent(run.accuracy),
        f"{run.losses[-1]:.1e}",
        str(np.sum(~run.applied)) if scaled else "-",
        format_scale(run.scales[-1]) if scaled else "-",
        percent(first_zeros(run)),
        megabytes(run.memory),
    )


def _as_table(rows: list[tuple[str, ...]]) -> Table:
    """The first row is the head."""
    table = Table()
    table.add_column(rows[0][0], no_wrap=True)
    for heading in rows[0][1:]:
        table.add_column(heading, justify="right")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def sentence(runs: Runs) -> str:
    """The outcome in words, from the results alone."""
    reference, unscaled, scaled, bfloat16 = (run.accuracy or 0.0 for run in runs)
    steps = len(runs.float32.losses)
    if reference < 0.5:  # guessing gives 0.1, a trained network 0.96
        return (
            f"After {quantity(steps, 'step')} float32 itself reads "
            f"only {percent(reference)} of the test digits, so there is nothing to "
            "compare yet: try more --steps."
        )
    if unscaled < reference - CLOSE:
        first = (
            f"float16 without a loss scale learned nothing: it reads "
            f"{percent(unscaled)} of the test digits, float32 {percent(reference)} "
            f"(guessing gives 10%). Its loss of {runs.unscaled.losses[-1]:.1e} is "
            f"tiny, which says nothing: guessing has {GUESSED:.1e}. At its first step "
            f"{percent(first_zeros(runs.unscaled))} of the first layer's gradients "
            f"were exactly zero, in float32 {percent(first_zeros(runs.float32))}."
        )
    else:
        first = (
            "float16 without a loss scale kept up this time: it reads "
            f"{percent(unscaled)} of the test digits, float32 {percent(reference)}."
        )
    if abs(scaled - reference) <= CLOSE:
        verdict = f"matched float32 with {percent(scaled)}"
    elif scaled > reference:
        verdict = f"did better than float32 with {percent(scaled)}"
    else:
        verdict = f"did not match float32: it reads {percent(scaled)}"
    last = f"bfloat16 without a loss scale reads {percent(bfloat16)}"
    if abs(bfloat16 - reference) <= CLOSE:
        last += ", since it has the range of float32"
    scales = runs.scaled.scales
    skips = int(np.sum(~runs.scaled.applied))
    return (
        f"{first} float16 with jls.loss_scaled {verdict}; its loss scale moved between "
        f"{format_scale(scales.min())} and {format_scale(scales.max())} (max_scale="
        f"{format_scale(demo.MAX_SCALE)}), and {quantity(skips, 'step')} whose "
        f"gradients overflowed {'was' if skips == 1 else 'were'} skipped."
        f"{at_start(runs.scaled)} Its backward "
        f"pass needs {megabytes(runs.scaled.memory)} instead of "
        f"{megabytes(runs.float32.memory)}. {last}. The network is float32 in all four "
        "runs."
    )


def at_start(run: demo.Progress) -> str:
    """What finds the scale if the first steps, three or more, were all skipped."""
    skips = int(np.argmax(run.applied)) if run.applied.any() else len(run.applied)
    if skips < 3:
        return ""
    return (
        f" The first {skips} were among them: jls.calibrate finds the scale to start "
        "with, and then none is lost."
    )


def first_zeros(run: demo.Progress) -> float:
    """The share of zeros at the first applied step; a skipped one has NaN."""
    of_applied = run.zeros[run.applied]
    return float(of_applied[0]) if len(of_applied) else math.nan


def megabytes(size: int) -> str:
    """`2364508` as `2.4 MB`."""
    return f"{size / 1e6:.1f} MB"


def percent(share: float | None) -> str:
    """`0.9644` as `96.4%`."""
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f}%"


def _status(run: demo.Progress, is_wide: bool) -> str:
    text = f"loss {run.losses[-1]:.1e}"
    if len(run.scales):
        text += f"  scale {format_scale(run.scales[-1])}"
        text += f"  skips {np.sum(~run.applied)}" if is_wide else ""
    return text
