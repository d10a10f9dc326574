"""`compare` and `fingerprint`."""

from planted.fault import Fault

COMPARE = "tests/test_compare.py::"
PAIRS = "jls/_tools/compare/pairs.py"

FAULTS = [
    Fault(
        "a mask of -1e9 hides all else",
        "jls/_tools/compare/sketch.py",
        "large = xp.where(x < 0, -1 - exponent, 1 + exponent)",
        "large = x",
        (COMPARE + "test_a_mask_does_not_hide_the_rest",),
    ),
    Fault(
        "a sum that cancels is a difference",
        PAIRS,
        "more = apart(side.run.results[k], other).error.item()",
        "more = 0.0",
        (COMPARE + "test_rounding_that_grows_is_no_difference",),
    ),
    Fault(
        "what half precision rounds counts in float32 too",
        PAIRS,
        "self.most = UNIT if run == IN_FLOAT32 else math.inf",
        "self.most = math.inf",
        (COMPARE + "test_a_mistake_in_half_precision_is_found",),
    ),
    Fault(
        "a loop that runs backwards is counted as one that does not",
        "jls/_tools/compare/compare.py",
        "found.append(loop.length - 1 - index if loop.is_reversed else index)",
        "found.append(index)",
        (COMPARE + "test_the_first_iteration_that_differs_is_named",),
    ),
    Fault(
        "what reaches no result is deterministic",
        PAIRS,
        "behind_a = set(filter(self.is_odd, self.a.kept))",
        "pass",
        (COMPARE + "test_what_is_not_deterministic_is_named",),
    ),
    Fault(
        "a stop_gradient is not named",
        PAIRS,
        "if any(x.is_backward for x in ends):",
        "if not ends:",
        (COMPARE + "test_a_gradient_that_is_stopped",),
    ),
    Fault(
        "an argument that differs is not named",
        PAIRS,
        "((i, x) for i, x in self.given.items() if x > FACTOR * UNIT), None",
        "((i, x) for i, x in self.given.items() if x < 0), None",
        (COMPARE + "test_another_argument_is_named",),
    ),
    Fault(
        "the choice of a branch by other numbers is rounding",
        PAIRS,
        "if self.is_same or not self.a.unit(i):",
        "is_birth &= bool(self.a.unit(i))\n            if self.is_same:",
        (COMPARE + "test_a_choice_that_falls_otherwise_is_followed",),
    ),
]
