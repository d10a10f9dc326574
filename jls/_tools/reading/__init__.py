# SPDX-License-Identifier: Apache-2.0
"""Takes the arguments of a user's function apart, and traces its program."""
