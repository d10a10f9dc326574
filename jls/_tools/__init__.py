# SPDX-License-Identifier: Apache-2.0
"""What is asked about a step or a run, on the host."""
