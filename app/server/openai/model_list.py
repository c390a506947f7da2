"""The routes that list models."""

from __future__ import annotations

from app.server.desk import Desk
from app.server.models import OfferedModel, capabilities_of, find_model
from app.server.web.responses import Document


def list_document(desk: Desk) -> Document:
    """Return the models that clients can ask for."""
    return {"object": "list", "data": [_document(model) for model in desk.models.offered()]}


def model_document(desk: Desk, name: str) -> Document:
    """Return what is said of a model.

    Raises:
        Refusal: there is no such model.
    """
    return _document(find_model(desk.models, name))


def _document(model: OfferedModel) -> Document:
    """Return a model with what programs look for that know other servers.

    `meta` is llama.cpp's, `max_model_len` vLLM's, `context_length` that of hubs, and the words in
    `capabilities` are Ollama's; by `pictures` another Tandem counts the tokens of pictures.
    """
    info = model.info
    meta = {
        "n_vocab": info.n_vocab, "n_ctx_train": info.n_ctx_train, "n_embd": info.n_embd,
        "n_params": info.n_params, "size": info.n_bytes, "ftype": info.quant,
    }  # fmt: skip
    found: Document = {
        "id": model.id, "object": "model", "created": model.created, "owned_by": "tandem",
        "name": info.name, "architecture": info.architecture, "quantization": info.quant,
        "n_params": info.n_params, "size_bytes": info.n_bytes, "n_vocab": info.n_vocab,
        "n_ctx_train": info.n_ctx_train, "loaded": model.n_ctx is not None,
        "capabilities": capabilities_of(info, sees=model.sight is not None), "meta": meta,
    }  # fmt: skip
    if model.n_ctx is not None:
        meta["n_ctx"] = model.n_ctx
        found |= dict.fromkeys(("n_ctx", "max_model_len", "context_length"), model.n_ctx)
    if model.sight is not None:
        found["pictures"] = model.sight.sizes()
    return found
