"""Between text and token ids: tokenizers, streaming decoding and chat templates."""

from __future__ import annotations

from pathlib import Path

from engine.gguf import GGUFFile
from engine.text.chat_template import (
    ChatTemplate,
    chat_template_from_metadata,
    fallback_template,
)
from engine.text.stream import StreamDecoder
from engine.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "StreamDecoder",
    "Tokenizer",
    "chat_template_from_metadata",
    "fallback_template",
    "load_tokenizer",
]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF; files with nothing but a vocabulary will do.

    Raises:
        ModelFileError: the file is no GGUF, or has no tokenizer that can be used.
    """
    with GGUFFile.open(path) as file:
        return Tokenizer.from_metadata(file.meta)
