"""Turns text into tokens and back: tokenizers and chat templates from GGUF metadata.

Imports no torch, and of the engine only `errors`, `gguf` and `templates`.
"""

from engine.text.chat_template import ChatTemplate, chat_template_from_metadata, fallback_template
from engine.text.loader import load_tokenizer
from engine.text.stream import StreamDecoder
from engine.text.support import NO_VOCABULARY, has_vocabulary, tokenizer_warnings
from engine.text.tokenizer import Tokenizer

__all__ = [
    "NO_VOCABULARY",
    "ChatTemplate",
    "StreamDecoder",
    "Tokenizer",
    "chat_template_from_metadata",
    "fallback_template",
    "has_vocabulary",
    "load_tokenizer",
    "tokenizer_warnings",
]
