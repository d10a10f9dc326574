# SPDX-License-Identifier: Apache-2.0
"""The programs behind `python -m jls`."""
