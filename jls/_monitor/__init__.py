# SPDX-License-Identifier: Apache-2.0
"""What the host asks of a run: verdicts, reports, records. No step needs any of it."""
