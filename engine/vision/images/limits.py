"""What a picture may be, and what both sides of the child's pipes agree on."""

from __future__ import annotations

MOST_FILE_BYTES = 32 << 20
"""Largest number of bytes of a picture's file."""

MOST_PICTURES = 64
"""Largest number of pictures of a conversation."""

MOST_PIXELS = 1 << 26
"""Largest number of pixels of a picture: 67 megapixels."""

MAX_MEMORY = 1280 << 20
"""Largest number of bytes of memory for decoding: a picture of `MOST_PIXELS` with alpha or turned,
the result, and what a progressive JPEG needs beside them."""

MAX_SECONDS = 20.0
"""Longest time to decode and resize a picture."""

MORE_SECONDS = 1.0
"""Seconds that each further picture adds to that, for all of a conversation together."""

MAX_AT_ONCE = 2
"""Largest number of pictures that are decoded at once."""

GRACE_S = 1.0
"""Seconds after that time for the child to end by itself; then it is killed."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of files that are read, as Pillow names them; of several frames the first counts."""
