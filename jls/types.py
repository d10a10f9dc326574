# SPDX-License-Identifier: Apache-2.0
"""The types of jls: states, scalers and their protocols, results.

Functions return most of them, or fields hold them. To write a scaler of
your own, fill a `LossScaler`; the rest is for annotations and `isinstance`.
"""

import typing as _typing

from jls import _later
from jls._ema import ParamsEmaState as ParamsEmaState
from jls._program.places import Place as Place
from jls._scalers.adaptive import AdaptiveState as AdaptiveState
from jls._train.step import CarryingTrainStep as CarryingTrainStep
from jls._train.step import PlainTrainStep as PlainTrainStep
from jls._train.step import TrainStep as TrainStep
from jls._types import AdjustFn as AdjustFn
from jls._types import BadBatch as BadBatch
from jls._types import Bfloat16ParamsState as Bfloat16ParamsState
from jls._types import InitFn as InitFn
from jls._types import JudgeFn as JudgeFn
from jls._types import LossScaledState as LossScaledState
from jls._types import LossScaler as LossScaler
from jls._types import ScalerState as ScalerState
from jls._types import SkipReason as SkipReason
from jls._types import SpikePolicy as SpikePolicy
from jls._types import SpikeState as SpikeState
from jls._types import StaticState as StaticState
from jls._types import StepReport as StepReport
from jls._wrapper import LossScaledTransformation as LossScaledTransformation

if _typing.TYPE_CHECKING:
    from jls._tools.check.check import StepCheck as StepCheck
    from jls._tools.compare.difference import Difference as Difference
    from jls._tools.compare.difference import Parting as Parting
    from jls._tools.compare.fingerprint import Fingerprint as Fingerprint
    from jls._tools.origin.calibration import Calibration as Calibration
    from jls._tools.origin.losses import PrecisionLoss as PrecisionLoss
    from jls._tools.origin.result import Birth as Birth
    from jls._tools.origin.result import Why as Why
    from jls._tools.origin.twin import Cotangent as Cotangent
    from jls._tools.reading.precision import Precision as Precision
    from jls._tools.run.health import Health as Health
    from jls._tools.run.requeue import BatchQueue as BatchQueue
    from jls._tools.run.verdict import Verdict as Verdict
else:  # as in jls/__init__.py
    __getattr__, __dir__, __all__ = _later.attach(
        __name__,
        {
            "StepCheck": "check.check",
            "Difference": "compare.difference",
            "Parting": "compare.difference",
            "Fingerprint": "compare.fingerprint",
            "Calibration": "origin.calibration",
            "PrecisionLoss": "origin.losses",
            "Birth": "origin.result",
            "Why": "origin.result",
            "Cotangent": "origin.twin",
            "Precision": "reading.precision",
            "Health": "run.health",
            "BatchQueue": "run.requeue",
            "Verdict": "run.verdict",
        },
    )
