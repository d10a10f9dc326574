# SPDX-License-Identifier: Apache-2.0
"""jls: mixed precision for JAX.

It runs float32 programs in half precision, skips bad steps, and says why.
"""

# The floors of the package. A module imports only from lower floors; modules in one
# folder may also import each other. A test reads this.
#
#   __main__
#   __init__
#   types _tools.cli
#   _wrapper _checkpoint _train _tools.check _tools.compare _tools.run
#   _scale _ema _unguarded _tools.origin
#   _step _bfloat16 _autocast _tools.reading
#   _metrics _mistakes _train_state _applied presets
#   _state _spikes
#   _scalers _reduce _rollback _placement _later
#   _types _validate _tree _rollback_cpu _scopes _devices _elsewhere _tools.figure
#   _text _nnx _notes _program _tools

# isort: off
import typing as _typing

from jls import _later

# The optimizer.
from jls._wrapper import loss_scaled as loss_scaled
from jls._wrapper import skip_nonfinite as skip_nonfinite
from jls._train.step import train_step as train_step
from jls._train.apply import apply_gradients as apply_gradients
from jls._train.atomic import atomic as atomic
from jls._scale import value_and_grad as value_and_grad
from jls._scale import grad as grad

# Half precision.
from jls._autocast.autocast import autocast as autocast

# Scalers.
from jls._scalers.static import static as static
from jls._scalers.dynamic import dynamic as dynamic
from jls._scalers.hysteresis import hysteresis as hysteresis
from jls import presets as presets

# Bad steps that are finite.
from jls._spikes import spikes as spikes

# The loss scale of a running job.
from jls._state import loss_scale as loss_scale
from jls._state import set_loss_scale as set_loss_scale
from jls._metrics import metrics as metrics

# Monitoring, on the host.
if _typing.TYPE_CHECKING:  # loaded when they are used
    from jls._tools.run.health import health as health
    from jls._tools.run.health import UnhealthyError as UnhealthyError
    from jls._tools.run.history import History as History
    from jls._tools.check.check import check_step as check_step
    from jls._tools.origin.calibrate import calibrate as calibrate
    from jls._tools.origin.why import why as why
    from jls._tools.compare.compare import compare as compare
    from jls._tools.compare.fingerprint import fingerprint as fingerprint
    from jls._tools.run.sync import check_in_sync as check_in_sync
    from jls._tools.run.requeue import requeue as requeue
from jls._types import JlsWarning as JlsWarning

# Pure functions, for training loops without optax.
from jls._scale import scale as scale
from jls._scale import unscale as unscale
from jls._reduce import all_finite as all_finite
from jls._tree import select as select

# Parameters in bfloat16.
from jls._bfloat16 import bfloat16_params as bfloat16_params
from jls._bfloat16 import master_params as master_params

# Checkpoints, and adding jls to a running job.
from jls._checkpoint import wrap_state as wrap_state
from jls._checkpoint import unwrap_state as unwrap_state
from jls._checkpoint import upgrade_state as upgrade_state

# An average of the parameters.
from jls._ema import params_ema as params_ema
from jls._ema import eval_params as eval_params

from jls import types as types

__version__ = "0.6.0"

if not _typing.TYPE_CHECKING:  # to a type checker every name would be one
    __getattr__, __dir__, __all__ = _later.attach(
        __name__,
        {
            "health": "run.health",
            "UnhealthyError": "run.health",
            "History": "run.history",
            "check_step": "check.check",
            "calibrate": "origin.calibrate",
            "why": "origin.why",
            "compare": "compare.compare",
            "fingerprint": "compare.fingerprint",
            "check_in_sync": "run.sync",
            "requeue": "run.requeue",
        },
    )
