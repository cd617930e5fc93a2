"""Silences transformers' progress bars, where rayk draws its own, and advice."""

from __future__ import annotations

import logging as python_logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switch progress bars off inside the block."""
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


@contextmanager
def no_kernel_advice() -> Iterator[None]:
    """Suppress the advice to install faster kernels: the reference should be transformers' own code."""
    # A filter, because setting a level would clear every logger's cache for each token.
    logger = python_logging.getLogger("transformers.integrations.hub_kernels")
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: python_logging.LogRecord) -> bool:
    return record.levelno >= python_logging.ERROR
