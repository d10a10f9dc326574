"""`check_step`."""

from planted.fault import Fault

FAULTS: list[Fault] = []
