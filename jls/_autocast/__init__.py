# SPDX-License-Identifier: Apache-2.0
"""Computes the products of a float32 program in half precision."""
