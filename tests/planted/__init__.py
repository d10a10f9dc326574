"""Faults that a test must catch, a module for each part of jls."""

from planted import audit, core, origin, presets, program, report, trace
from planted.fault import Fault as Fault

FAULTS = [
    fault
    for module in (core, presets, program, trace, origin, report, audit)
    for fault in module.FAULTS
]
