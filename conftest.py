"""Every test and doctest runs under strict dtype promotion, without rank promotion.

optax is not written for strict promotion (`optax.adam` is a TypeError there), so tests
that drive more of it than `optax.sgd` carry the marker `standard_promotion`.
"""

import gc
import hashlib
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import pytest
from jax._src.interpreters import mlir

import jls

# Each worker has a core: to split a compilation over threads costs a quarter more.
ONE_THREAD = "--xla_cpu_parallel_codegen_split_count=1"
# Most of the time goes into compilation, and these take more than half of it away.
# `--optimize` compiles as users do: so .ci/run does for what compares bits, and for the
# promises on the versions of JAX. What is measured or printed is always compiled so.
QUICK = "--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"

# Tracing makes garbage fast, and each collection looks at all that JAX has cached.
gc.set_threshold(50_000, 20, 20)


def _machine():
    """Stands for what this CPU can do: compiled programs use all of that."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    able = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256(repr([platform.node(), able]).encode()).hexdigest()[:16]


def pytest_addoption(parser):
    parser.addoption("--optimize", action="store_true", help="compile as users do")


def _set_xla_flags(config):
    """For this process and its workers, before JAX starts."""
    paths = [Path(config.invocation_params.dir, x.split("::")[0]) for x in config.args]
    tests = Path(__file__).parent / "tests"
    shown = [tests / name for name in ("costs", "pages", "examples", "notebooks")]
    is_shown = any(path.is_relative_to(folder) for path in paths for folder in shown)
    as_users_do = config.getoption("optimize") or is_shown
    flags = [ONE_THREAD] if as_users_do else [ONE_THREAD, *QUICK]
    missing = [flag for flag in flags if flag not in os.environ.get("XLA_FLAGS", "")]
    known = [x for x in missing if x == ONE_THREAD or _is_known(x, config)]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *known])


def _is_known(flag, config):
    """A flag that a version of XLA does not know ends the process: asked once."""
    cache = getattr(config, "cache", None)
    key = f"jls/{QUICK.index(flag)}-{jaxlib.__version__}"
    is_known = cache and cache.get(key, None)
    if is_known is None:
        probe = [sys.executable, "-c", "import jax; jax.devices('cpu')"]
        env = os.environ | {"XLA_FLAGS": flag}
        done = subprocess.run(probe, capture_output=True, env=env)
        is_known = done.returncode == 0
        if cache:
            cache.set(key, is_known)
    return is_known


def _share_contexts():
    """Lowers ten programs in one MLIR context, as JAX 0.12 does by itself.

    To make a context takes longer than to lower most programs of the tests.
    """
    if hasattr(mlir, "_thread_local_context") or not hasattr(mlir, "make_ir_context"):
        return
    make, kept = mlir.make_ir_context, threading.local()

    def shared():
        kept.uses = getattr(kept, "uses", 0) + 1
        if kept.uses % 10 == 1:
            kept.context = make()
        return kept.context

    mlir.make_ir_context = shared


def pytest_configure(config):
    """Keeps each compiled program, under a hash of it, for both workers and later runs.

    `--cache-clear` compiles anew, `-p no:cacheprovider` every time.
    """
    _set_xla_flags(config)
    _share_contexts()
    # No test reads a line of Python in what is lowered, and to write it takes time.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    if hasattr(config, "cache"):
        folder = config.cache.mkdir(f"xla-{_machine()}")
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(autouse=True)
def _promotion(request):
    if request.node.get_closest_marker("standard_promotion"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(jax=jax, jls=jls, jnp=jnp, np=np, optax=optax)
