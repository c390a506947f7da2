"""What a chat template may use, and what both sides of its pipes agree on."""

from __future__ import annotations

MAX_SOURCE = 128 << 10
"""Largest number of characters of a template."""

MAX_SECONDS = 2.0
"""Longest time to compile and render a template."""

GRACE_S = 0.25
"""Seconds after that time for the sandbox to stop a template; then its process is killed."""

MAX_MEMORY = 512 << 20
"""Largest number of bytes of memory that a template's process may take."""

MAX_REQUEST = 16 << 20
"""Largest number of bytes of a template and a conversation as JSON."""

MAX_ADDED = 4 << 20
"""Largest number of characters by which a prompt may be longer than the request for it."""
