# SPDX-License-Identifier: Apache-2.0
"""Finds the first operation at which two programs give different numbers."""
