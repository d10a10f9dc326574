# SPDX-License-Identifier: Apache-2.0
"""check_step: tries the user's own step."""
