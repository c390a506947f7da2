"""The route of embeddings in Ollama's protocol."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.ollama.errors import error_document
from app.server.ollama.ollama_answer import NS
from app.server.ollama.ollama_request import model_of
from app.server.openai.texts.embeddings import MOST_INPUTS, embedded, embedding_inputs
from app.server.requests.reading import JsonObject, asked
from app.server.web.responses import AwaitedJson, Document
from engine import Embed


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaEmbedRequest:
    """A request for embeddings."""

    model: str = asked("Name of the model; any that is loaded if it is empty.", "")
    input: str | tuple[str, ...] = asked("A text, or several.", least=1, most=MOST_INPUTS)
    truncate: bool | None = asked("Without effect: texts that are too long are refused.", None)
    dimensions: int | None = asked("Without effect: all numbers come.", None)
    options: JsonObject | None = asked("Without effect.", None)
    keep_alive: str | float | None = asked("Without effect: the server says how long.", None)


async def embed(desk: Desk, record: RequestRecord, request: OllamaEmbedRequest) -> Response:
    """Return the embeddings of texts.

    Raises:
        Refusal: the request cannot be answered.
    """
    begun = time.perf_counter()
    info = desk.find(model_of(request.model), record).info
    command = Embed(embedding_inputs(request.input, info.n_vocab))

    async def make() -> Document:
        done = await embedded(desk, record, command)
        return {
            "model": record.model, "embeddings": [[*vector] for vector in done.vectors],
            "total_duration": int((time.perf_counter() - begun) * NS), "load_duration": 0,
            "prompt_eval_count": done.n_tokens,
        }  # fmt: skip

    return AwaitedJson(make, error_document)
