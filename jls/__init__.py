# SPDX-License-Identifier: Apache-2.0
"""jls: loss scaling and bad-step skipping for JAX."""

from jls import presets as presets
from jls._adaptive import AdaptiveState as AdaptiveState
from jls._adaptive import adaptive as adaptive
from jls._cautious import cautious as cautious
from jls._cumulative import cumulative as cumulative
from jls._dynamic import dynamic as dynamic
from jls._ema import eval_params as eval_params
from jls._ema import params_ema as params_ema
from jls._grad import grad as grad
from jls._grad import value_and_grad as value_and_grad
from jls._health import Health as Health
from jls._health import UnhealthyError as UnhealthyError
from jls._health import health as health
from jls._history import History as History
from jls._hysteresis import hysteresis as hysteresis
from jls._leaves import nonfinite_leaves as nonfinite_leaves
from jls._log_max import LogMaxState as LogMaxState
from jls._log_max import log_max as log_max
from jls._magnitude import all_finite as all_finite
from jls._magnitude import max_abs as max_abs
from jls._migrate import unwrap_state as unwrap_state
from jls._migrate import wrap_state as wrap_state
from jls._nonfinite import LeafReport as LeafReport
from jls._nonfinite import NonfiniteReport as NonfiniteReport
from jls._nonfinite import nonfinite_report as nonfinite_report
from jls._optax import loss_scaled as loss_scaled
from jls._optax import skip_nonfinite as skip_nonfinite
from jls._progress import progress as progress
from jls._read import loss_scale as loss_scale
from jls._read import metrics as metrics
from jls._read import set_loss_scale as set_loss_scale
from jls._report import StepReport as StepReport
from jls._scale import scale as scale
from jls._scale import unscale as unscale
from jls._static import static as static
from jls._suggest import suggest_scale as suggest_scale
from jls._sync import check_in_sync as check_in_sync
from jls._train_step import train_step as train_step
from jls._tree import select as select
from jls._types import AdjustFn as AdjustFn
from jls._types import InitFn as InitFn
from jls._types import LossScaledState as LossScaledState
from jls._types import LossScaler as LossScaler
from jls._types import LossScaleState as LossScaleState
from jls._types import MagnitudeAdjustFn as MagnitudeAdjustFn
from jls._types import MagnitudeScaler as MagnitudeScaler
from jls._types import ParamsEmaState as ParamsEmaState
from jls._underflow import Underflow as Underflow
from jls._underflow import UnderflowShares as UnderflowShares
from jls._underflow import underflow as underflow
from jls._upgrade import upgrade_state as upgrade_state

__version__ = "0.1.0"
