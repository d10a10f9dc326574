"""The scalers of other systems."""

from planted.fault import Fault

FAULTS: list[Fault] = []
