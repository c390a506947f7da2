"""Requests of a server as its page shows them, for pictures and tests of the page."""

from __future__ import annotations

from dataclasses import replace

from app.server.page.log_view import ClientSpeed, LogView, ShownRequest

BEGAN = 1_764_000_000.0

WRITING = ShownRequest(
    number=5, began=BEGAN, client="192.168.1.31", route="POST /v1/chat/completions", model="tiny",
    status=200, phase="writing", read_part=1.0, n_prompt=0, n_tokens=214, tokens_per_s=27.3,
    first_token_s=0.31, seconds=0.0, problem="",
)  # fmt: skip


def server_view() -> LogView:
    """Return two requests under way, one that waits, and three that ended in different ways."""
    here = "127.0.0.1"
    ended = replace(WRITING, phase="ended", seconds=7.5, n_prompt=1200)
    requests = (
        WRITING,
        replace(WRITING, number=4, client=here, tokens_per_s=13.6, n_tokens=58),
        replace(
            WRITING, number=6, client=here, phase="waiting", status=0, n_tokens=0, tokens_per_s=0.0
        ),
        replace(ended, number=3, client=here, route="POST /v1/responses", tokens_per_s=41.2),
        replace(
            ended, number=2, status=401, route="GET /v1/models", n_prompt=0, n_tokens=0,
            tokens_per_s=0.0, problem="The key is missing or wrong.",
        ),
        replace(ended, number=1, client=here, status=499, n_tokens=12, tokens_per_s=38.0),
    )  # fmt: skip
    clients = ClientSpeed("192.168.1.31", 27.3, 0), ClientSpeed(here, 13.6, 1842)
    return LogView(requests, clients)
