"""Faults that a test must catch, a module for each part of jls."""

from planted import (
    autocast,
    bfloat16,
    check,
    compare,
    core,
    float8,
    origin,
    presets,
    program,
    reading,
    run,
)
from planted.fault import Fault as Fault

FAULTS = [
    fault
    for module in (
        core,
        bfloat16,
        autocast,
        float8,
        presets,
        program,
        reading,
        origin,
        run,
        check,
        compare,
    )
    for fault in module.FAULTS
]
