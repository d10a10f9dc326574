"""The trace of a user's function, and the scales and wrappers in it."""

from planted.fault import Fault

FAULTS: list[Fault] = []
