# SPDX-License-Identifier: Apache-2.0
"""Reads programs of JAX: walks through them, and says where a line of them stands."""
