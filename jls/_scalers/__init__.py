# SPDX-License-Identifier: Apache-2.0
"""The scalers, one file each. `rule` holds what they share."""
