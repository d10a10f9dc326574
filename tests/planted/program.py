"""What reads and replays programs."""

from planted.fault import Fault

CLIP = "tests/test_clipping.py"

FAULTS = [
    Fault(
        "a norm that overflows is not looked at, only the leaves",
        "jls/_step.py",
        "norm_finite = jnp.isfinite(squares[-1])",
        "norm_finite = jnp.asarray(True)",
        (CLIP,),
    ),
    Fault(
        "an eager step looks at every element where a traced one looks at the sum",
        "jls/_step.py",
        "    return known[key]\n",
        "    return None\n",
        (CLIP,),
    ),
    Fault(
        "the sum over some leaves is taken for that over all",
        "jls/_program/squares.py",
        "if len(result.numbers) == len(inputs):",
        "if len(result.numbers) == min(2, len(inputs)):",
        ("tests/program/test_squares.py",),
    ),
    Fault(
        "the sum over one axis is taken for that over all",
        "jls/_program/squares.py",
        "if first.power == 2 and is_whole and len(axes) == len(shape):",
        "if first.power == 2 and is_whole:",
        ("tests/program/test_squares.py",),
    ),
    Fault(
        "a part of complex numbers is taken for the whole",
        "jls/_program/squares.py",
        "is_whole = first.parts == _parts_of(inputs[first.number])",
        "is_whole = True",
        ("tests/program/test_squares.py",),
    ),
]
