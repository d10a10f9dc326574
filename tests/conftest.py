"""What all tests share: jitted and eager; and which of the folders are collected."""

from pathlib import Path

import chex
import jax
import pytest

DEVICES = Path(__file__).parent / "devices"

# One folder is for the type checkers, the programs are for processes of their own.
collect_ignore = ["typing"]
collect_ignore_glob = ["processes/*_program.py"]


def _wants_devices(config):
    paths = (Path(config.invocation_params.dir, a.split("::")[0]) for a in config.args)
    return any(path.is_relative_to(DEVICES) for path in paths)


def pytest_ignore_collect(collection_path, config):
    """Eight devices are for the whole process, so only a call by name wants them."""
    return True if collection_path == DEVICES and not _wants_devices(config) else None


def pytest_report_header(config):
    if _wants_devices(config):
        return None
    return (
        "not collected: tests/devices, which wants eight of them: pytest tests/devices"
    )


@pytest.fixture(params=[jax.jit, lambda fun: fun], ids=["jit", "eager"])
def jit_or_eager(request):
    return request.param


@pytest.fixture(autouse=True)
def _traces():
    """`chex.assert_max_traces` counts over all tests that define the same function."""
    chex.clear_trace_counter()
