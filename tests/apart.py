"""The folders that pytest collects only if they are named, and what is in them.

CONTRIBUTING.md has the command for each, and .ci/run runs it.
"""

APART = {
    "devices": "what needs eight devices",
    "pages": "README, docs and the demo",
    "examples": "the examples, each trained for a few steps",
    "notebooks": "the notebooks, each run from top to bottom",
    "costs": "the benchmarks, and what a step may cost",
    "truth": "an autocast beside its reference, on many programs",
    "origin": "programs with a known line that is NaN, or limits the loss scale",
    "compare": "pairs of programs, edited in a line or equal",
    "corpus": "many right and wrong steps, every optimizer, four processes",
    "processes": "what needs several processes, or kills one",
}


EIGHT_DEVICES = {"devices", "origin"}  # of a CPU, their number is fixed when JAX starts


def command(folder):
    return f"pytest -n 2 --dist loadfile tests/{folder}"
