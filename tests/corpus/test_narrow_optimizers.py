"""Optimizers with narrow parameters in a vmapped scan, where a branch is a select."""

import pytest
from test_optimizers import (
    CANNOT_NARROW,
    OPTIMIZERS,
    assert_members_skip_on_their_own,
    exported,
    pytestmark,  # noqa: F401
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", [name for name in exported(OPTIMIZERS) if name not in CANNOT_NARROW]
)
def test_members_of_a_vmapped_scan_skip_on_their_own(name, dtype):
    assert_members_skip_on_their_own(name, dtype)
