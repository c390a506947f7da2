"""The routes that turn texts into tokens and back, and conversations into prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass

from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.openai.chat_request import MOST_TOOLS, ChatTurn, OfferedTool
from app.server.openai.errors import error_document
from app.server.openai.messages import chat_messages, offered_tools
from app.server.openai.texts.inputs import check_ids
from app.server.refusal import check_conversation, check_size
from app.server.requests.reading import JsonObject, asked
from app.server.web.responses import AwaitedJson, Document, json_response
from engine import (
    ApplyTemplate,
    Detokenize,
    Detokenized,
    TemplateApplied,
    Tokenize,
    Tokenized,
)

MOST_TOKENISED = 1 << 20
"""Maximum number of characters of a text to tokenise."""

MOST_SPELT = 1 << 17
"""The same if the text of each token is returned, too."""

MOST_DECODED = 1 << 18
"""Maximum number of tokens to detokenise at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A text whose tokens are wanted."""

    content: str = asked("The text.")
    model: str = asked("Name of the model.", "")
    add_special: bool = asked("Add what begins and ends a text.", default=False)
    parse_special: bool = asked("Read the names of control tokens as such.", default=True)
    with_pieces: bool = asked("Tell the text of each token, too.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """Tokens whose text is wanted."""

    tokens: tuple[int, ...] = asked("Ids of the tokens.", most=MOST_DECODED)
    model: str = asked("Name of the model.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRequest:
    """A conversation whose prompt is wanted."""

    messages: tuple[ChatTurn, ...] = asked("The conversation.", least=1)
    model: str = asked("Name of the model.", "")
    tools: tuple[OfferedTool, ...] = asked("What the model may call.", (), most=MOST_TOOLS)
    chat_template_kwargs: JsonObject | None = asked("Variables for the chat template.", None)
    add_generation_prompt: bool = asked("End where the assistant begins.", default=True)


async def tokenize(desk: Desk, record: RequestRecord, request: TokenizeRequest) -> Response:
    """Return the tokens of a text.

    Raises:
        Refusal: it is too long.
    """
    check_size(request.content, "content", MOST_SPELT if request.with_pieces else MOST_TOKENISED)
    command = Tokenize(
        request.content, request.add_special, request.parse_special, request.with_pieces
    )
    desk.find(request.model, record)
    done = await desk.run(record, command)
    assert isinstance(done, Tokenized), "the closing event of this command"
    tokens: list[int] | list[Document] = [*done.ids]
    if request.with_pieces:
        pairs = zip(done.ids, done.pieces, strict=True)
        tokens = [{"id": token, "piece": _piece(bytes(piece))} for token, piece in pairs]
    return json_response({"tokens": tokens, "count": len(done.ids)})


def _piece(spelt: bytes) -> str | list[int]:
    """Return a token's text, or its bytes where they are no whole characters."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return [*spelt]


async def detokenize(desk: Desk, record: RequestRecord, request: DetokenizeRequest) -> Response:
    """Return the text of tokens.

    Raises:
        Refusal: the model has no such tokens.
    """
    n_vocab = desk.find(request.model, record).info.n_vocab
    if request.tokens:
        check_ids(request.tokens, "tokens", n_vocab)
    done = await desk.run(record, Detokenize(request.tokens))
    assert isinstance(done, Detokenized), "the closing event of this command"
    return json_response({"content": done.text})


async def apply_template(desk: Desk, record: RequestRecord, request: TemplateRequest) -> Response:
    """Return the prompt of a conversation.

    Raises:
        Refusal: it is too long, or cannot be written.
    """
    variables = request.chat_template_kwargs
    command = ApplyTemplate(
        chat_messages(request.messages),
        offered_tools(request.tools),
        json.dumps(variables) if variables else "",
        add_generation_prompt=request.add_generation_prompt,
    )
    check_conversation(command)
    desk.find(request.model, record)

    async def make() -> Document:
        done = await desk.run(record, command)
        assert isinstance(done, TemplateApplied), "the closing event of this command"
        return {"prompt": done.prompt}

    return AwaitedJson(make, error_document)
