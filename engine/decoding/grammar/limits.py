"""Limits of what compiling a grammar may take, as strangers write it."""

from __future__ import annotations

MAX_CHARACTERS = 1 << 20
"""Largest number of characters of a grammar."""

MAX_DEPTH = 100
"""Deepest nesting of a schema, and of brackets in other grammars."""

MAX_SECONDS = 3.0
"""Longest time to check a grammar."""

MAX_AT_ONCE = 2
"""Largest number of grammars that are checked at once."""

MAX_MEMORY = 1 << 30
"""Largest number of bytes of memory that checking a grammar may take."""

MAX_REQUEST = 4 * MAX_CHARACTERS
"""Largest number of bytes of a grammar as a line of JSON, which escapes some characters."""

MAX_SYMBOLS = 200_000
"""Largest number of symbols of a compiled grammar; llguidance's default is 500 000."""

MAX_STATES = 50_000
"""Largest number of states of a lexer, of 1 to 2 kB each; llguidance's default is 250 000."""

USUAL_MASK_SECONDS = 0.03
"""Processor time, in seconds, that a mask may take. Most take well below a millisecond, and 10 ms
with a large vocabulary of which nearly everything is allowed."""

MAX_MASK_SECONDS = 0.3
"""Processor time, in seconds, that the masks of one answer may take beyond that, all together.

All other answers wait meanwhile. Where a grammar can read a text in very many ways, each mask takes
longer than the one before."""

DRAFTED_MASK_SECONDS = 0.01
"""Processor time, in seconds, beyond which a mask is too slow for one pass to compute several."""

MAX_PLACING_SECONDS = 1.0
"""Longest time to search for the part of a schema that is wrong."""
