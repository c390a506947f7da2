"""What a server tells of its models, each in words of its own; nothing of it is relied on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import engine  # for names that are resolved when they are used
from app.core.translation import tr
from app.remote.client.address import RemoteAddress
from app.remote.client.connection import Connection
from engine import EngineError, one_line

if TYPE_CHECKING:
    from engine import VisionInfo

MOST_MODELS = 5000
LONGEST_NAME = 300
MOST_CONTEXT = 1 << 32

TANDEM = "tandem"
"""Owner of models that a Tandem serves."""

CONTEXT_NAMES = ("n_ctx", "max_model_len", "context_length", "context_window", "max_context_length")
"""Names of a model's context: Tandem's and llama.cpp's, vLLM's, and those of others."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of a server.

    Attributes:
        name: its name in requests.
        n_ctx: its context in tokens; 0 where the server does not tell it.
        is_tandem: whether a Tandem serves it.
        sight: how many tokens it makes of a picture; None where the server does not tell it.
    """

    name: str
    n_ctx: int = 0
    is_tandem: bool = False
    sight: VisionInfo | None = None


def list_models(address: RemoteAddress, connection: Connection) -> list[ListedModel]:
    """Return the models of a server, in its order.

    Raises:
        EngineError: it cannot be asked, or does not answer as OpenAI's interface does.
    """
    document = connection.json(f"{address.url}/models")
    listed = document.get("data") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise EngineError(
            tr("{host} does not list its models.").format(host=address.host),
            tr("Check that the address is one of OpenAI's interface."),
        )
    return [found for entry in listed[:MOST_MODELS] if (found := _model(entry)) is not None]


def find_model(models: list[ListedModel], address: RemoteAddress) -> ListedModel:
    """Return the model that an address names; the only one of its server if it names none.

    Raises:
        EngineError: there is no such model, or a name is wanted.
    """
    names = ", ".join(one_line(model.name, 60) for model in models[:10])
    has = tr("It has: {names}.").format(names=names) if names else ""
    if not address.model:
        if len(models) == 1:
            return models[0]
        text = tr("{host} has several models.") if models else tr("{host} has no model.")
        raise EngineError(text.format(host=address.host), has)
    for model in models:
        if model.name == address.model:
            return model
    text = tr("{host} has no model {name}.").format(
        host=address.host, name=one_line(address.model, 80)
    )
    raise EngineError(text, has)


def _model(entry: Any) -> ListedModel | None:
    """Return the model of an entry; None for one that has no usable name."""
    if not isinstance(entry, dict):
        return None
    name, meta = entry.get("id"), entry.get("meta")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        return None
    facts = {**entry, **(meta if isinstance(meta, dict) else {})}
    sizes = (facts.get(key) for key in CONTEXT_NAMES)
    known = (n for n in sizes if type(n) is int and 0 < n < MOST_CONTEXT)
    is_tandem = entry.get("owned_by") == TANDEM
    sight = engine.VisionInfo.of_sizes(entry.get("pictures")) if is_tandem else None
    return ListedModel(name, next(known, 0), is_tandem, sight)
