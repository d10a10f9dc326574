"""What all tests share: jitted and eager; which of them run, and how."""

import functools
import inspect
import itertools
import os
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

# What compares two results bit for bit calls one of these.
COMPARES_BITS = {"assert_identical", "bits", "tobytes"}


def pytest_addoption(parser):
    group = parser.getgroup("jls")
    group.addoption(
        "--all",
        action="store_true",
        help="eager twins everywhere, and the cases that `cover` and `more` leave out",
    )
    group.addoption("--bits", action="store_true", help="only what compares bits")
    group.addoption(
        "--part",
        default="1/1",
        metavar="K/N",
        help="2/3: every third case of what has cases, from the second on",
    )


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


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no doctests, and to look for some takes as long as to import them."""
    found = yield
    return [x for x in found if type(x) is pytest.Module]


def pytest_report_header(config):
    return [
        f"not collected: {APART[folder]}: {command(folder)}"
        for folder in _left_out(config)
    ]


def pytest_generate_tests(metafunc):
    """Jitted everywhere, eager too in the tests of the promises, or with `--all`."""
    if "jit_or_eager" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker("eager")
        is_promise = metafunc.definition.path.is_relative_to(HERE / "promises")
        both = {"jit": jax.jit, "eager": lambda fun: fun}
        if not (marked or is_promise or metafunc.config.getoption("all")):
            del both["eager"]
        metafunc.parametrize("jit_or_eager", [*both.values()], ids=[*both])


def pytest_collection_modifyitems(config, items):
    kept = items[:]
    if not config.getoption("all"):
        dropped = {item for item in kept if item.get_closest_marker("more")}
        dropped.update(*map(_not_needed, _covered(kept).values()))
        kept = [item for item in kept if item not in dropped]
    if config.getoption("bits"):
        kept = [x for x in kept if _compares_bits(getattr(x, "function", None))]
    number, of = (int(x) for x in config.getoption("part").split("/"))
    if of > 1:
        cases = [item for item in kept if hasattr(item, "callspec")]
        dropped = {*cases} - {*cases[number - 1 :: of]}
        kept = [item for item in kept if item not in dropped]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[x for x in items if x not in chosen])
    items[:] = kept


def _covered(items):
    """The cases of each test that is marked with `cover`."""
    cases = {}
    for item in items:
        if item.get_closest_marker("cover"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return cases


def _not_needed(cases):
    """Cases without which each combination of n values of parameters is still there."""
    n = cases[0].get_closest_marker("cover").args[0]
    combinations = {}
    for case in cases:
        # The same objects in each case: some have no hash.
        values = [(name, id(x)) for name, x in case.callspec.params.items()]
        combinations[case] = {*itertools.combinations(values, n)}
    missing = set().union(*combinations.values())
    rest = set(cases)
    while missing:
        best = max(cases, key=lambda case: len(combinations[case] & missing))
        missing -= combinations[best]
        rest.remove(best)
    return rest


@functools.cache
def _compares_bits(function):
    """Whether a test compares bits, by itself or through functions that it calls."""
    pending, seen = [function], set()
    while pending:
        if not inspect.isfunction(function := inspect.unwrap(pending.pop())):
            continue
        if function in seen or "tests" not in Path(function.__code__.co_filename).parts:
            continue
        seen.add(function)
        names = _names_in(function.__code__)
        if names & COMPARES_BITS:
            return True
        pending += [function.__globals__.get(name) for name in names]
    return False


def _names_in(code):
    inner = [_names_in(x) for x in code.co_consts if inspect.iscode(x)]
    return set(code.co_names).union(*inner)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Without AVX2 (`--xla_cpu_max_isa`) XLA compiles no program with float16 in it."""
    try:
        return (yield)
    except BaseException as error:
        cause = error
        while cause and "Failed to materialize symbols" not in str(cause):
            cause = cause.__context__
        if cause and "xla_cpu_max_isa" in os.environ.get("XLA_FLAGS", ""):
            pytest.skip("XLA has no float16 with these instructions")
        raise


@pytest.fixture(autouse=True, scope="module")
def _compiled_anew(request):
    """What a program costs is read from what the compiler gives, not from a file."""
    is_cost = request.path.is_relative_to(HERE / "costs")
    if is_cost == jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", not is_cost)
        compilation_cache.reset_cache()  # whether it is used is asked once


@pytest.fixture
def on_cpu():
    """For what XLA makes of a program on a CPU, also where JAX has a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(autouse=True)
def _traces():
    """`chex.assert_max_traces` counts over all tests that define the same function."""
    chex.clear_trace_counter()
