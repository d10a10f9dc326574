"""`health`, `History` and `requeue`."""

from planted.fault import Fault

REQUEUED = "tests/report/test_requeue.py"

FAULTS = [
    Fault(
        "a retry counts only if others pass",
        "jls/_report/requeue.py",
        "held.counted += others_pass or not scale < held.scale",
        "held.counted += others_pass",
        (REQUEUED,),
    ),
    Fault(
        "a retry counts only if the scale stays",
        "jls/_report/requeue.py",
        "held.counted += others_pass or not scale < held.scale",
        "held.counted += not scale < held.scale",
        (REQUEUED,),
    ),
    Fault(
        "a retry counts only if a batch was applied in between",
        "jls/_report/requeue.py",
        "            self._passed = scale  # the gradients were finite\n",
        "            self._passed = scale\n"
        "        if reason == SkipReason.GRADIENTS:\n"
        "            self._passed = 0.0\n",
        (REQUEUED,),
    ),
    Fault(
        "a scale of NaN is lower than another",
        "jls/_report/requeue.py",
        "not scale < held.scale",
        "scale >= held.scale",
        (REQUEUED,),
    ),
    Fault(
        "the first try of a batch counts",
        "jls/_report/requeue.py",
        "        if held.scale is not None:\n",
        "        held.counted += held.scale is None\n"
        "        if held.scale is not None:\n",
        (REQUEUED,),
    ),
    Fault(
        "a batch is tried once more than it may be",
        "jls/_report/requeue.py",
        "return held.counted < self._retries",
        "return held.counted <= self._retries",
        (REQUEUED,),
    ),
    Fault(
        "a batch with a bad loss comes again",
        "jls/_report/requeue.py",
        "if reason == SkipReason.GRADIENTS and",
        "if reason <= SkipReason.LOSS and",
        (REQUEUED,),
    ),
    Fault(
        "new batches come before those that come again",
        "jls/_report/requeue.py",
        "        if not self._waiting:\n            try:",
        "        if True:\n            try:",
        (REQUEUED,),
    ),
    Fault(
        "a flag is read a step early",
        "jls/_report/requeue.py",
        "while len(self._unread) > self._lag:",
        "while len(self._unread) >= max(self._lag, 1):",
        (REQUEUED,),
    ),
    Fault(
        "an interrupt of the wait lets the batch of a step that ran come again",
        "jls/_report/requeue.py",
        "        except Exception:\n            self._unread.pop()",
        "        except BaseException:\n            self._unread.pop()",
        (REQUEUED,),
    ),
    Fault(
        "of several processes, one reads the flags of all",
        "jls/_report/requeue.py",
        "return array.addressable_data(0) if is_global else array",
        "return array",
        ("tests/processes/test_processes.py",),
    ),
]
