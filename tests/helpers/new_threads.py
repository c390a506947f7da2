"""Threads that something has started and not ended."""

from __future__ import annotations

import threading
from collections.abc import Collection


def new_threads(before: Collection[threading.Thread], *begins: str) -> list[str]:
    """Return the names of the product's threads that run now and did not before.

    Servers of other tests may have theirs for the whole run.

    Args:
        begins: beginnings of the names; none for all of the product's.
    """
    new = (thread for thread in threading.enumerate() if thread not in before)
    return [thread.name for thread in new if thread.name.startswith(begins or "tandem")]
