# SPDX-License-Identifier: Apache-2.0
"""Where a number came from: the birth of an inf or a NaN."""
