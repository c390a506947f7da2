"""The route of embeddings."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import Literal

from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.openai.errors import error_document
from app.server.openai.texts.inputs import MOST_IDS, TextInput, TextOrIds, separate_inputs
from app.server.refusal import bad_value
from app.server.requests.reading import asked
from app.server.web.responses import AwaitedJson, Document
from engine import Embed, Embedded

MOST_INPUTS = 2048
"""Largest number of texts of a request, as in OpenAI's protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A request for embeddings."""

    input: TextInput = asked(
        "A text, or several, or the ids of their tokens.", least=1, most=MOST_IDS
    )
    model: str = asked("Name of the model; any that is loaded if it is empty.", "")
    encoding_format: Literal["float", "base64"] = asked(
        "Numbers, or the bytes of little-endian F32 in base64.", "float"
    )
    dimensions: int | None = asked("Must be the model's, if anything.", None)
    user: str = asked("Without effect.", "")


async def embeddings(desk: Desk, record: RequestRecord, request: EmbeddingRequest) -> Response:
    """Return the embeddings of texts.

    Raises:
        Refusal: the request cannot be answered.
    """
    info = desk.find(request.model, record).info
    if request.dimensions not in (None, info.n_embd):
        raise bad_value("dimensions", f"dimensions must be {info.n_embd}, the model's own.")
    command = Embed(embedding_inputs(request.input, info.n_vocab))

    async def make() -> Document:
        done = await embedded(desk, record, command)
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, request)}
            for index, vector in enumerate(done.vectors)
        ]
        usage = {"prompt_tokens": done.n_tokens, "total_tokens": done.n_tokens}
        return {"object": "list", "data": data, "model": record.model, "usage": usage}

    return AwaitedJson(make, error_document)


async def embedded(desk: Desk, record: RequestRecord, command: Embed) -> Embedded:
    """Return the embeddings of texts, once the engine has room for them.

    Raises:
        Refusal: they cannot be computed.
    """
    async with desk.admission.places(1):
        done = await desk.run(record, command)
    assert isinstance(done, Embedded), "the closing event of this command"
    record.n_prompt = done.n_tokens
    return done


def embedding_inputs(given: TextInput, n_vocab: int) -> tuple[TextOrIds, ...]:
    """Return the texts of a request one by one, each as it is or as its tokens.

    Raises:
        Refusal: there is an empty one or a token that the model lacks, or there are too many.
    """
    found = separate_inputs(given, "input", n_vocab)
    if len(found) > MOST_INPUTS:
        text = f"input has {len(found)} texts, at most {MOST_INPUTS} can be."
        raise bad_value("input", text)
    if "" in found:
        place = f"input[{found.index('')}]"
        raise bad_value(place, f"{place} is empty.")
    return found


def _written(vector: Sequence[float], request: EmbeddingRequest) -> list[float] | str:
    """Return a vector as the request wants it."""
    if request.encoding_format == "float":
        return [*vector]
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
