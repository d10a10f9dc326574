# SPDX-License-Identifier: Apache-2.0
"""Logs a line if what the user waits for takes over five seconds."""

import contextlib
import logging
import threading
from collections.abc import Iterator

_PATIENCE_IN_SECONDS = 5.0


@contextlib.contextmanager
def logging_if_slow(message: str) -> Iterator[None]:
    """Logs one line, which goes to stderr by default, if the block takes long."""
    warn = logging.getLogger("jls").warning
    timer = threading.Timer(_PATIENCE_IN_SECONDS, warn, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
