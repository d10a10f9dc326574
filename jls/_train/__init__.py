# SPDX-License-Identifier: Apache-2.0
"""`jls.train_step`: one pure step, and one adapter for each model library."""
