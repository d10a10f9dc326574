# SPDX-License-Identifier: Apache-2.0
"""Reads a run on the host: health, History, requeue."""
