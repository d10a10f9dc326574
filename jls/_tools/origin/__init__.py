# SPDX-License-Identifier: Apache-2.0
"""Traces an inf or a NaN to its origin, and finds the largest loss scale."""
