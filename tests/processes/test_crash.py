"""A run that is killed again and again ends in the bits of one that never was.

Three kills by default; `JLS_KILLS=20 pytest tests/processes` for more.
"""

import os
import random
import subprocess
import sys

import crash_program
import jax
import pytest
from flax import serialization
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

KILLS = int(os.environ.get("JLS_KILLS", "3"))
SAVE_EVERY = crash_program.SAVE_EVERY


class Life:
    """One process: what it said until it ended or was killed."""

    def __init__(self, *args, kill_at=None, delay=0.0):
        """Kills at the n-th line that starts with a word, `delay` seconds later."""
        word, count = kill_at or (None, 0)
        program = crash_program.__file__
        self.process = subprocess.Popen(
            [sys.executable, program, *map(str, args)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        with self.process as process:
            for line in process.stdout:
                if not line.endswith("\n"):  # killed while it wrote
                    break
                self.lines.append(line.split())
                count -= line.split()[0] == word
                if count == 0 and word:
                    word = None
                    try:  # the time that it lives on is the length of a step or a save
                        process.wait(delay)
                    except subprocess.TimeoutExpired:
                        process.kill()

    def numbers(self, word):
        return [int(line[1]) for line in self.lines if line[0] == word]

    @property
    def was_killed(self):
        return self.process.returncode == -9


def uninterrupted(total):
    """The end of the run, and the sum of its state after each step."""
    carry, sums = crash_program.initial(), {}
    for i in range(total):
        carry = crash_program.step(carry, *crash_program.batch(i))
        sums[i + 1] = crash_program.digest(carry)
    return carry, sums


def has_unfinished_save(folder, life):
    """Whether the last checkpoint that was begun is not there."""
    begun = life.numbers("save")
    return bool(begun) and not (folder / str(begun[-1])).exists()


@pytest.mark.parametrize("store", ["orbax", "files"])
def test_killed_run_ends_as_one_that_never_was(store, tmp_path):
    kills = KILLS if store == "orbax" else -(-KILLS // 3)
    total = 4 * SAVE_EVERY * (kills + 4)
    end, sums = uninterrupted(total)
    folder, result = tmp_path / "run", tmp_path / "result"
    folder.mkdir()
    rng = random.Random(0)

    def live(**how):
        way = rng.choice(["sync", "async"]) if store == "orbax" else store
        return Life(folder, way, total, result, **how)

    lives, in_a_save = [], 0
    while len(lives) < kills or not in_a_save:
        if len(lives) % 2 == 0:  # as soon as a save begins, or a little later
            kill_at, delay = ("save", rng.randint(2, 3)), rng.choice([0, 0.01, 0.02])
        else:
            kill_at, delay = ("step", rng.randint(1, 12)), rng.uniform(0, 0.02)
        lives.append(live(kill_at=kill_at, delay=delay))
        assert lives[-1].was_killed
        # The file is written in no time; whether a kill hits that is up to chance.
        in_a_save += store == "files" or has_unfinished_save(folder, lives[-1])
    lives.append(live())
    assert lives[-1].lines[-1:] == [["done"]]

    complete = 0
    for life in lives:
        (start,) = life.numbers("restore")
        assert start >= complete
        steps = [line[1:] for line in life.lines if line[0] == "step"]
        assert [int(i) for i, _ in steps] == list(
            range(start + 1, start + 1 + len(steps))
        )
        for i, total_sum in steps:
            assert int(total_sum) == sums[int(i)], f"step {i} of a run from {start}"
        # An asynchronous save waits for the one before it.
        complete = max([start, *life.numbers("saved")[:-1]])
    assert complete > 0
    assert_identical(serialization.from_bytes(end, result.read_bytes()), end)
    metrics = jax.device_get(jls.metrics(end))
    assert metrics["steps"] == total
    assert metrics["skips"] > metrics["nonfinite_losses"] > 0
