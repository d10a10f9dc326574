# SPDX-License-Identifier: Apache-2.0
"""Eight host devices, in processes of their own: the number is fixed at the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = [
    "sharded_program.py",
    "sharded_jit_program.py",
    "sharded_flax_program.py",
    "checkpoint_program.py",
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_passes_on_eight_devices(name):
    program = Path(__file__).with_name(name)
    flags = "--xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(program)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
