"""The figures of a Tandem's server, from its page for Prometheus.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.remote.client.address import RemoteAddress
from app.remote.client.connection import Connection

MOST_LINES = 20_000


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Figures of a server at one moment.

    Attributes:
        tokens_per_s: speed of all answers together.
        n_running, n_waiting: answers that are computed, and that wait for that.
        kv_used, kv_room: tokens in the KV cache, and those for which it has room; None where the
            server does not tell.
    """

    tokens_per_s: float = 0.0
    n_running: int = 0
    n_waiting: int = 0
    kv_used: int | None = None
    kv_room: int | None = None


def read_figures(address: RemoteAddress, connection: Connection) -> ServerFigures:
    """Return the present figures of a server.

    Raises:
        EngineError: it cannot be asked.
    """
    text = connection.read(f"{address.root}/metrics").decode("utf-8", "replace")
    return parse_figures(text)


def parse_figures(text: str) -> ServerFigures:
    """Return the figures in a text; those that it lacks are 0 or None."""
    values: dict[str, float] = {}
    for line in text.splitlines()[:MOST_LINES]:
        name, _, value = line.strip().rpartition(" ")
        if not name or name.startswith("#"):
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number) and 0 <= number < 1e15:
            values[name] = number
    used, room = values.get("tandem_kv_cache_used_tokens"), values.get("tandem_kv_cache_tokens")
    return ServerFigures(
        values.get("tandem_completion_tokens_per_second", 0.0),
        int(values.get("tandem_answers_running", 0)),
        int(values.get("tandem_answers_waiting", 0)),
        None if used is None else int(used),
        None if room is None else int(room),
    )
