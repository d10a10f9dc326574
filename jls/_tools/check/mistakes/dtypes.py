# SPDX-License-Identifier: Apache-2.0
"""True gradients, or states, in a dtype that is too narrow for them."""

from jls._program.places import place_of
from jls._scopes import GRADIENTS
from jls._tools.check.findings import Found, away, broken, right, untried
from jls._tools.check.mistakes.mistake import Mistake
from jls._tools.check.subject import Subject

# Gradients that are multiplied by 16 or more before the cast are scaled on purpose.
# Smaller factors come from sums over micro-batches or devices.
_SCALED_ON_PURPOSE = 2.0**4


def _read_narrowed(subject: Subject) -> Found:
    if not subject.has_wrapper:
        yield away("no wrapper is given the gradients")
    elif not subject.live:
        yield away("the loss scale is static and 1")
    gradients = [x for _, call in subject.calls for x in call.values(GRADIENTS)]
    for gradient in gradients:
        if gradient.narrowed is None:
            continue
        place = place_of(gradient.narrowed.site)
        if gradient.narrowed.gain >= _SCALED_ON_PURPOSE:
            yield right(f", except a cast of scaled ones by {place}")
        else:
            yield broken(f"the true gradients became float16 by {place}", place)
    if subject.calls:
        yield right()


GRADIENTS_NARROWED = Mistake(
    "gradients narrowed",
    right="the true gradients stay in float32",
    write="keep what jls.value_and_grad returns in float32; to send fewer bytes, cast "
    "to bfloat16, which has the range",
    needs="updates",
    read=_read_narrowed,
)


def _read_state(subject: Subject) -> Found:
    """In float16 a loss scale is inf from 65520 on, and every later step is skipped."""
    for evidence in subject.program.narrowed:
        yield broken(evidence, ends="mend the dtypes of the state first")
    program = subject.program
    if program.reading is None:
        yield untried(f"there is no program to read: {program.reason}")
    else:
        yield right()


STATE_NARROWED = Mistake(
    "state narrowed",
    right="the state of the optimizer keeps its dtypes",
    write="return the opt_state that optimizer.update returns, without a cast; moments "
    "in bfloat16: optax.adamw(3e-4, mu_dtype=jnp.bfloat16)",
    read=_read_state,
)
