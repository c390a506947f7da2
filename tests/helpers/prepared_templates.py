"""Waits for the threads on which chat templates of opened files are compiled."""

import threading


def wait_for_templates(limit_s: float = 30) -> None:
    """Wait until no template is being compiled, so that threads can be counted."""
    for thread in threading.enumerate():
        if thread.name == "tandem-template":
            thread.join(limit_s)
            assert not thread.is_alive()
