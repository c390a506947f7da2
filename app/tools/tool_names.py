"""Names under which models know tools: unique among all servers, in characters that all allow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

MOST_NAME: Final = 64
MOST_PREFIX: Final = 24

BETWEEN: Final = "__"
"""What stands between a server's part of a name and the tool's; no server's part has it."""


def server_prefixes(servers: Sequence[str]) -> dict[str, str]:
    """Return the part of tools' names that stands for each server, by the servers' names."""
    single = (re.sub("_{2,}", "_", _plain(name))[:MOST_PREFIX] for name in servers)
    plain = [name.strip("_-") or "server" for name in single]
    return dict(zip(servers, _unique(plain, MOST_PREFIX), strict=True))


def tool_names(prefix: str, tools: Sequence[str]) -> list[str]:
    """Return the name of each tool of a server for models, in their order."""
    start = prefix + BETWEEN
    return [start + name for name in _unique(map(_plain, tools), MOST_NAME - len(start))]


def _plain(name: str) -> str:
    """Return a name with "_" in the place of all characters that are not allowed."""
    return re.sub("[^A-Za-z0-9_-]", "_", name)


def _unique(names: Iterable[str], most: int) -> list[str]:
    """Cut names to `most` characters; those that are there already get a number."""
    found: list[str] = []
    known: set[str] = set()
    for name in names:
        given, n = name[:most], 1
        while given.lower() in known:
            n += 1
            given = f"{name[: most - len(str(n)) - 1].rstrip('_')}_{n}"
        known.add(given.lower())
        found.append(given)
    return found
