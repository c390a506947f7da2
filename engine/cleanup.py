"""Calls everything that frees something, whatever fails on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def call_all(*steps: Callable[[], object]) -> None:
    """Call functions in order; log those that fail, and go on with the next.

    For closing: once a GPU has stopped working any call may fail; the rest must still be freed.
    """
    for step in steps:
        try:
            step()
        except Exception:
            log.warning("something could not be closed", exc_info=True)
