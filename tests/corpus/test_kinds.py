"""`jls.check_step` on kinds of programs that its other tests do not have."""

import pytest
from right_kinds import KINDS
from wrong_kinds import WRONG

import jls
from jls._tools.check.check import read_step

# The mistakes that are planted here are warned of too.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
]


# They return arrays that look like their data, and are computed from it.
LOOK_ALIKE = {"predictions_like_the_inputs": {"x"}}


# What is not half in them is said, and is no mistake: most of a small model, a gradient
# inside the loss.
NOT_ALL_HALF = {"nnx_lora", "simclr", "equation_in_the_loss", "wgan_gp"}


@pytest.mark.parametrize("name", KINDS)
def test_right_step_is_not_called_broken(name):
    step, args, *kwargs = KINDS[name]()
    result = jls.check_step(step, *args, **dict(*kwargs))
    assert result.ok, str(result)
    assert bool(result.half) == (name in NOT_ALL_HALF), result.half
    # An ok is one: all that applies was looked at.
    assert result.not_tried.keys() == LOOK_ALIKE.get(name, set()), str(result)


# What the program says by itself takes no run: it is read.
READ = {"not scaled", "scale leaks", "loss not passed", "gradients narrowed"}
READ |= {"scale stuck"}
TRIED = [name for name, wrong in WRONG.items() if wrong.code not in READ]


@pytest.mark.parametrize("name", [x for x in WRONG if WRONG[x].code in READ])
def test_mistake_is_read(name):
    wrong = WRONG[name]
    step, args, *kwargs = wrong.make()
    options = dict(*kwargs)
    carried = options.pop("carried", None)
    _, findings = read_step(step, args, options, carried)
    broken = findings.of("broken").keys()
    assert broken & ({wrong.code} | wrong.instead)
    assert broken <= {wrong.code} | wrong.also | wrong.instead


@pytest.mark.parametrize("name", TRIED)
def test_mistake_is_found(name):
    wrong = WRONG[name]
    step, args, *kwargs = wrong.make()
    result = jls.check_step(step, *args, **dict(*kwargs))
    broken = set(result.broken)
    assert broken & ({wrong.code} | wrong.instead), str(result)
    assert broken <= {wrong.code} | wrong.also | wrong.instead, str(result)
