# SPDX-License-Identifier: Apache-2.0
"""The mistakes that `jls.check_step` looks for, each in one place."""
