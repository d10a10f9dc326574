# SPDX-License-Identifier: Apache-2.0
"""What reads a run, at the host: health, History, underflow."""
