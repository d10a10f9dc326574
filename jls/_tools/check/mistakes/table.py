# SPDX-License-Identifier: Apache-2.0
"""All mistakes that `jls.check_step` looks for."""

from jls._tools.check.mistakes import (
    devices,
    dtypes,
    loss,
    overflow,
    scaling,
    skips,
    spikes,
    steps,
)

# What others wait for, or ask for, comes before them.
MISTAKES = (
    dtypes.STATE_NARROWED,
    steps.NO_STEP,
    steps.RETRACED,
    steps.HOST_SYNC,
    scaling.NOT_SCALED,
    scaling.SCALE_LEAKS,
    loss.LOSS_NOT_PASSED,
    dtypes.GRADIENTS_NARROWED,
    overflow.OVERFLOW_HIDDEN,
    overflow.SCALE_STUCK,
    skips.NAN_COMMITTED,
    skips.NOT_ATOMIC,
    skips.NEVER_RECOVERS,
    spikes.SPIKE_NOT_SKIPPED,
    devices.SUMMED_OVER_DEVICES,
    devices.OUT_OF_SYNC,
)
