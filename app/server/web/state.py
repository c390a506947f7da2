"""The server's state: health, running requests, and metrics for Prometheus (format 0.0.4)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from app.server.context import Admission, Labels, MachinesState, ServerContext
from app.server.request_log import RequestLog, RequestRecord
from app.server.web.operations import Operation
from app.server.web.responses import Document, json_response

if TYPE_CHECKING:
    from engine import CacheCounted, ModelLoaded

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ALONE = MachinesState()


def metrics_text(
    request_log: RequestLog, admission: Admission, model: ModelLoaded | None,
    cache: CacheCounted | None, machines: MachinesState = ALONE,
) -> str:  # fmt: skip
    """Return all metrics, each with its help text and type."""
    sums, running = request_log.sums, list(request_log.running.values())
    requests = (
        ({"route": route, "status": status}, n) for (route, status), n in sums.requests.items()
    )
    n_cells = 0 if model is None else model.n_ctx * model.params.parallel
    families = [
        _family("requests_total", "counter", "Finished requests.", requests),
        _sum("request_seconds_total", "Total duration of finished requests.", sums.seconds),
        _sum("prompt_tokens_total", "Prompt tokens.", sums.n_prompt),
        _sum("cached_prompt_tokens_total", "Cached prompt tokens.", sums.n_cached),
        _sum("drafted_tokens_total", "Draft tokens.", sums.n_drafted),
        _sum("accepted_tokens_total", "Accepted draft tokens.", sums.n_accepted),
        _sum("decode_seconds_total", "Total decode time.", sums.decode_s),
        _gauge("draft_saved_seconds", "Decode time saved by draft tokens.", sums.saved_s),
        _sum("completion_tokens_total", "Generated tokens.", sums.n_tokens),
        _sum("answers_total", "Requests with at least one generated token.", sums.n_answered),
        _sum("first_token_seconds_total", "Total time to first token.", sums.first_token_s),
        _gauge("answers_running", "Running answers.", admission.n_running),
        _gauge("answers_waiting", "Queued answers.", admission.n_waiting),
        _gauge(
            "completion_tokens_per_second", "Combined speed of all answers.",
            sum(record.tokens_per_s for record in running),
        ),
        _gauge("model_loaded", "Whether a model is loaded.", int(model is not None)),
        _gauge("kv_cache_tokens", "Capacity of the KV cache in tokens.", n_cells),
        *_cache_use(cache, n_cells),
        _family(
            "client_completion_tokens_total", "counter", "Generated tokens by client.",
            (({"client": client}, n) for client, n in sums.tokens.items()),
        ),
        _family(
            "client_completion_tokens_per_second", "gauge", "Speed of running answers by client.",
            (({"client": client}, speed) for client, speed in request_log.clients()),
        ),
        *(_family(name, "gauge", text, values) for name, text, values in machines.figures()),
    ]  # fmt: skip
    return "".join(families)


def _cache_use(cache: CacheCounted | None, n_cells: int) -> list[str]:
    """Return cache usage metrics, capped since pages may hold more than the capacity."""
    if cache is None:
        return []
    n_used = min(cache.n_used, n_cells)
    n_kept = min(cache.n_kept, n_cells - n_used)
    return [
        _gauge("kv_cache_used_tokens", "KV cache tokens in use by answers.", n_used),
        _gauge("kv_cache_kept_tokens", "KV cache tokens kept for later prompts.", n_kept),
    ]


def _sum(name: str, text: str, value: float) -> str:
    return _family(name, "counter", text, [({}, value)])


def _gauge(name: str, text: str, value: float) -> str:
    return _family(name, "gauge", text, [({}, value)])


def _family(name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> str:
    lines = [f"# HELP tandem_{name} {text}", f"# TYPE tandem_{name} {kind}"]
    for labels, value in values:
        inside = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
        lines.append(f"tandem_{name}{f'{{{inside}}}' if inside else ''} {value:.10g}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


async def _health(context: ServerContext, record: RequestRecord, request: Request) -> Response:
    """Return whether the server can answer, but nothing confidential, since this needs no key."""
    if problem := context.problem():
        headers = {"retry-after": str(context.models.back_s)}
        return json_response({"status": "waiting", "reason": problem}, 503, headers)
    return json_response({"status": "ok"})


async def _metrics(context: ServerContext, record: RequestRecord, request: Request) -> Response:
    cache = await context.cache.read()
    machines = context.machines()
    text = metrics_text(
        context.request_log, context.admission, context.engine.model, cache, machines
    )
    return Response(text, media_type=MEDIA_TYPE)


async def _slots(context: ServerContext, record: RequestRecord, request: Request) -> Response:
    records = context.request_log.running.values()
    return json_response(
        {
            "slots": [_slot(one) for one in records if one is not record],
            "running": context.admission.n_running,
            "waiting": context.admission.n_waiting,
            "most_running": context.settings.most_running,
            "most_waiting": context.settings.most_waiting,
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
    Operation("/health", "Check that the server is running.", _health),
    Operation("/metrics", "Return metrics for Prometheus.", _metrics, media_type=MEDIA_TYPE),
    Operation("/slots", "List the running requests.", _slots),
)
