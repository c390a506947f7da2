"""The routes of Ollama's protocol that say which models there are."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.models import OfferedModel, capabilities_of
from app.server.ollama.ollama_request import OllamaShowRequest, model_of
from app.server.web.responses import Document, json_response

VERSION = "0.14.0"
"""Version of Ollama whose protocol this is; some clients refuse older ones."""

FOREVER = "2318-01-01T00:00:00Z"
"""When a model leaves that nobody unloads, as Ollama writes it."""


async def tell_version(desk: Desk, record: RequestRecord, request: Request) -> Response:
    """Return which version's protocol this is."""
    return json_response({"version": VERSION})


async def list_tags(desk: Desk, record: RequestRecord, request: Request) -> Response:
    """Return the models that clients can ask for."""
    return json_response({"models": [_described(one) for one in desk.models.offered()]})


async def list_running(desk: Desk, record: RequestRecord, request: Request) -> Response:
    """Return the models that are loaded."""
    loaded = [one for one in desk.models.offered() if one.n_ctx is not None]
    memory = desk.link.model.memory if desk.link.model is not None else ()
    on_gpus = sum(one.measured.total for one in memory if not one.device.startswith("cpu"))
    more = {"expires_at": FOREVER, "size_vram": on_gpus}
    models = [_described(one) | more | {"context_length": one.n_ctx} for one in loaded]
    return json_response({"models": models})


async def show(desk: Desk, record: RequestRecord, request: OllamaShowRequest) -> Response:
    """Return what is known of a model.

    Raises:
        Refusal: there is no such model.
    """
    one = desk.find(model_of(request.model or request.name), record)
    info = one.info
    facts = {
        "general.architecture": info.architecture, "general.basename": info.name,
        "general.parameter_count": info.n_params,
        f"{info.architecture}.context_length": info.n_ctx_train,
        f"{info.architecture}.embedding_length": info.n_embd,
        f"{info.architecture}.block_count": info.n_layer,
    }  # fmt: skip
    return json_response(
        {
            "modelfile": "", "parameters": "", "template": "", "details": _details(one),
            "model_info": facts, "capabilities": capabilities_of(info, sees=one.sight is not None),
            "modified_at": _written_at(one),
        }
    )  # fmt: skip


def _described(one: OfferedModel) -> Document:
    return {
        "name": one.id, "model": one.id, "modified_at": _written_at(one),
        "size": one.info.n_bytes, "digest": "", "details": _details(one),
    }  # fmt: skip


def _written_at(one: OfferedModel) -> str:
    return datetime.fromtimestamp(one.created, UTC).isoformat().replace("+00:00", "Z")


def _details(one: OfferedModel) -> Document:
    info = one.info
    return {
        "parent_model": "", "format": "gguf", "family": info.architecture,
        "families": [info.architecture], "parameter_size": f"{info.n_params / 1e9:.1f}B",
        "quantization_level": info.quant,
    }  # fmt: skip
