"""The operations that tell what the server is doing."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.web.metrics import MEDIA_TYPE, metrics_text
from app.server.web.operation import Operation
from app.server.web.responses import Document, json_response


async def _health(desk: Desk, record: RequestRecord, request: Request) -> Response:
    """Return whether the server can answer; it needs no key, and so tells nothing else."""
    if problem := desk.problem():
        headers = {"retry-after": str(desk.models.back_s)}
        return json_response({"status": "waiting", "reason": problem}, 503, headers)
    return json_response({"status": "ok"})


async def _metrics(desk: Desk, record: RequestRecord, request: Request) -> Response:
    cache = await desk.cache.read()
    machines = desk.machines()
    text = metrics_text(desk.ledger, desk.admission, desk.link.model, cache, machines)
    return Response(text, media_type=MEDIA_TYPE)


async def _slots(desk: Desk, record: RequestRecord, request: Request) -> Response:
    """Return the requests under way, but for the one that asks."""
    found = [_slot(one) for one in desk.ledger.running.values() if one is not record]
    return json_response(
        {
            "slots": found,
            "running": desk.admission.n_running,
            "waiting": desk.admission.n_waiting,
            "most_running": desk.settings.most_running,
            "most_waiting": desk.settings.most_waiting,
        }
    )


def _slot(record: RequestRecord) -> Document:
    return {
        "id": record.number, "client": record.client, "route": record.route,
        "model": record.model, "state": record.phase, "n_prompt_to_read": record.n_to_read,
        "n_prompt_read": record.n_read, "n_decoded": record.n_tokens,
        "tokens_per_second": round(record.tokens_per_s, 2),
        "seconds": round(time.perf_counter() - record.start, 3),
    }  # fmt: skip


STATE = (
    Operation("/health", "Tell that the server is there.", _health),
    Operation("/metrics", "Show the figures for Prometheus.", _metrics, media_type=MEDIA_TYPE),
    Operation("/slots", "List the requests under way.", _slots),
)
"""All operations about the server itself."""
