# SPDX-License-Identifier: Apache-2.0
"""The names of the mistakes that `jls.check_step` finds, in the order of its table."""

from typing import Literal, get_args

Code = Literal[
    # A good step changes nothing of what it returns, or returns the old state of
    # the optimizer, or its updates reach nothing that comes back.
    "no step",
    # The third good step, or a later one, is compiled again.
    "retraced",
    # The step reads a value of the device at the host by itself.
    "host sync",
    # Gradients that a wrapper is given do not depend on its loss scale.
    "not scaled",
    # The loss scale is a factor of the gradients or the loss that the optimizer is
    # given, or of a part of them: unscaled twice, never, with the state after the
    # update; scaled twice; clipped while scaled.
    "scale leaks",
    # The optimizer is not given the loss: value= is missing or misspelt, or what is
    # around the wrapper drops it.
    "loss not passed",
    # True gradients are cast to float16 before the optimizer gets them, where the
    # small ones vanish.
    "gradients narrowed",
    # Something between the gradients and the optimizer replaces inf or NaN, so that
    # a step that overflowed is applied.
    "overflow hidden",
    # The state of a scaler comes back as it was, or a bad step is undone with the
    # counters and the loss scale: an overflow is then one for ever.
    "scale stuck",
    # The state of the optimizer comes back in a narrower dtype, or came in with a
    # loss scale narrower than float32, which is inf from 65520 on.
    "state narrowed",
    # After a fault an inf or NaN stays in what the step carries.
    "nan committed",
    # A skipped step changes parameters, or what belongs to them.
    "not atomic",
    # After one bad step the parameters never move again.
    "never recovers",
    # A step far above all that the spike policy has seen is applied.
    "spike not skipped",
    # In shard_map JAX has summed the gradients over devices, and the loss that the
    # optimizer is given is their mean.
    "summed over devices",
    # Devices hold different values of what they should hold together.
    "out of sync",
]
CODES: tuple[Code, ...] = get_args(Code)
