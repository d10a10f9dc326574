# SPDX-License-Identifier: Apache-2.0
"""Reads JAX programs: walks, replays, and places in the source."""
