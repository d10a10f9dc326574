"""An autocast changes products and nothing else: promise 18, against `truth`.

`python tests/autocast/test_truth.py --seeds 0:200` judges many random programs, and
prints those that fail, and why others were left out.
"""

import argparse
import collections
import functools
import hashlib
import os
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float32_programs import PROGRAMS
from right_programs import TABLE, random_program
from truth import HALVES, compare, error, rounded, rounding, truth_of, with_gradients

import jls
from jls import _autocast

# Seeds of random programs that an autocast has got wrong once.
FAILED = ()


@functools.lru_cache(maxsize=4)
def truth_by_name(kind, name):
    program = program_by_name(kind, name)
    return program, truth_of(*program)


def program_by_name(kind, name):
    if kind == "seed":
        return random_program(name)[0]
    return (TABLE if kind == "row" else PROGRAMS)[name]()


def judged(kind, name, half, jit_or_eager=jax.jit, cast=jls.autocast):
    """The lines of a comparison; or why there are none."""
    (loss, params, batch), truth = truth_by_name(kind, name)
    if truth.left_out[half]:
        return truth.left_out[half]
    run = jit_or_eager(with_gradients(cast(loss, half)))
    return compare(run(params, batch), truth, half)


def wrong(lines):
    return [line for line in lines if not line.is_right]
