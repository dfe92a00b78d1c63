"""Puts the settings of logging back that a test changes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from cdcpipe import logs


@contextmanager
def logging_as_before() -> Iterator[None]:
    """Put back the handlers and the level of the root logger, and the format of text."""
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        yield
    finally:
        logs.use("text")
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
