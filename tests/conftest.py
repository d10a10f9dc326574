"""What all tests share: jitted and eager; which of the folders are collected, and how."""

from pathlib import Path

import chex
import jax
import pytest
from apart import APART, EIGHT_DEVICES, command
from jax.experimental.compilation_cache import compilation_cache

HERE = Path(__file__).parent

# One folder is for the type checkers, the programs are for processes of their own.
collect_ignore = ["typing"]
collect_ignore_glob = ["processes/*_program.py"]


def _left_out(config):
    """The folders apart in which no argument of the command line is."""
    paths = [Path(config.invocation_params.dir, a.split("::")[0]) for a in config.args]
    return [
        folder
        for folder in APART
        if not any(path.is_relative_to(HERE / folder) for path in paths)
    ]


def pytest_configure(config):
    if not EIGHT_DEVICES.issubset(_left_out(config)):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)


def pytest_ignore_collect(collection_path, config):
    if collection_path.parent == HERE and collection_path.name in _left_out(config):
        return True
    return None


def pytest_report_header(config):
    return [
        f"not collected: {APART[folder]}: {command(folder)}"
        for folder in _left_out(config)
    ]


@pytest.fixture(params=[jax.jit, lambda fun: fun], ids=["jit", "eager"])
def jit_or_eager(request):
    return request.param


@pytest.fixture(autouse=True, scope="module")
def _compiled_anew(request):
    """What a program costs is read from what the compiler gives, not from a file."""
    is_cost = request.path.is_relative_to(HERE / "costs")
    if is_cost == jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", not is_cost)
        compilation_cache.reset_cache()  # whether it is used is asked once


@pytest.fixture(autouse=True)
def _traces():
    """`chex.assert_max_traces` counts over all tests that define the same function."""
    chex.clear_trace_counter()
