"""Runs optax's own tests on what could take the place of `optax.apply_if_finite`.

    python tests/pages/optax_own_tests.py [CHECKOUT]

Without a checkout of optax these are the tests that its package has installed.
`docs/upstream.md` says what came of it.
"""

import importlib
import importlib.util
import linecache
import runpy
import sys
import unittest
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

PROPOSED = Path(__file__).parents[2] / "docs" / "upstream.py"


class Renamed(NamedTuple):
    """The state of a candidate, with the names that `apply_if_finite` has."""

    notfinite_count: Any
    last_finite: Any
    total_notfinite: Any
    state: Any


def in_place_of_apply_if_finite(wrap, read):
    """`wrap` called like `apply_if_finite`; `read` gives the three counts."""
    import optax

    def apply_if_finite(inner, max_consecutive_errors):
        del max_consecutive_errors
        wrapped = wrap(inner)

        def init(params):
            state = wrapped.init(params)
            return Renamed(*read(state), state)

        def update(updates, state, params=None, **extra):
            updates, state = wrapped.update(updates, state.state, params, **extra)
            return updates, Renamed(*read(state), state)

        return optax.GradientTransformationExtraArgs(init, update)

    return apply_if_finite


def read_jls(state):
    return state.consecutive_skips, state.applied, state.skips


def read_proposed(state):
    return state.consecutive_skips, state.skip_reason == 0, state.total_skips


def proposed():
    """What docs/upstream.py defines."""
    return runpy.run_path(str(PROPOSED))


def candidates():
    import jls

    return {
        "jls.skip_nonfinite": (jls.skip_nonfinite, read_jls),
        "docs/upstream.py": (proposed()["skip_nonfinite"], read_proposed),
    }


def tests_of_apply_if_finite(wrap, read):
    """Name of each test -> what it says that is not so of the candidate, if anything.

    A test goes on after an `assertTrue` that fails. What else fails is an error.
    """
    from optax.transforms import _conditionality

    module = importlib.import_module("optax.transforms._conditionality_test")
    case, said = module.ConditionalityTest, {}
    names = [
        name
        for name in unittest.TestLoader().getTestCaseNames(case)
        if "apply_if_finite" in name
    ]

    def assert_true(test, expression, message=None):
        if not expression:
            frame = sys._getframe(1)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            said[test._testMethodName].append(line.strip())

    stand_in = in_place_of_apply_if_finite(wrap, read)
    with (
        mock.patch.object(_conditionality, "apply_if_finite", stand_in),
        mock.patch.object(case, "assertTrue", assert_true),
    ):
        for name in names:
            said[name] = []
            result = unittest.TestResult()
            case(name).run(result)
            said[name] += [text for _, text in result.errors + result.failures]
    return said


def wrappers():
    """Name -> a wrapper, and its arguments after the inner transformation."""
    import jls

    ours = proposed()
    skip_nonfinite, loss_scaled = ours["skip_nonfinite"], ours["loss_scaled"]
    return {
        "jls.skip_nonfinite": (jls.skip_nonfinite, {}),
        "skip_nonfinite of docs/upstream.py": (skip_nonfinite, {}),
        "the same with spike_guard": (
            skip_nonfinite,
            {"spikes": ours["spike_guard"]()},
        ),
        "loss_scaled of docs/upstream.py": (loss_scaled, {}),
    }


def common_tests_of_contrib(wrapper, kwargs):
    """Name of each test that a contribution must pass -> how `wrapper` fails it, if so.

    optax lists what it tests in the file itself; here that is `wrapper` around sgd.
    """
    from optax import contrib

    path = importlib.util.find_spec("optax.contrib._common_test").origin
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    place = lines.index("_ALL_OPTIMIZERS_UNDER_TEST = tuple(")
    lists = "_MAIN_OPTIMIZERS_UNDER_TEST, _OTHER_OPTIMIZERS_UNDER_TEST = OURS, []"
    lines[place] = f"{lists}; {lines[place]}"
    ours = {
        "opt_name": "sgd",
        "opt_kwargs": {"learning_rate": 1e-3},
        "wrapper_name": "wrapper",
        "wrapper_kwargs": kwargs,
    }
    names = {"__name__": "common_tests", "OURS": [ours]}
    exec(compile("\n".join(lines), path, "exec"), names)
    case, failed = names["ContribTest"], {}
    with mock.patch.object(contrib, "wrapper", wrapper, create=True):
        for name in unittest.TestLoader().getTestCaseNames(case):
            result = unittest.TestResult()
            case(name).run(result)
            failed[name] = [text for _, text in result.errors + result.failures]
    return failed


def main():
    if len(sys.argv) > 1:
        sys.path.insert(0, sys.argv[1])
    import optax

    print(f"optax {optax.__version__} in {Path(optax.__file__).parent}")
    for name, (wrap, read) in candidates().items():
        print(f"\n{name} in the place of apply_if_finite")
        for test, said in tests_of_apply_if_finite(wrap, read).items():
            print(f"  {test}: {'passes, but for' if said else 'passes'}")
            for text in said:
                print(f"    {text}")
    for name, wrapper in wrappers().items():
        failed = common_tests_of_contrib(*wrapper)
        bad = [test for test, problems in failed.items() if problems]
        print(f"\n{name} in the common tests of optax.contrib")
        print(f"  {len(failed) - len(bad)} of {len(failed)} pass")
        for test in bad:
            print(f"  {test}: {failed[test][0].strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
