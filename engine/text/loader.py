"""Loads the tokenizer of a file on disk."""

from __future__ import annotations

from pathlib import Path

from engine.formats.gguf.reader import GGUFFile
from engine.text.chat_template import KEY, ChatTemplate, fallback_template
from engine.text.tokenizer import Tokenizer

TOKENS = "tokenizer.ggml."


def load_chat_template(path: str | Path, source: str = "") -> ChatTemplate:
    """Return the chat template of a GGUF file, or the plain one, without its tokenizer.

    Args:
        source: Jinja source to use in place of the file's; "" for that.

    Raises:
        ModelFileError: the file cannot be read.
    """
    with GGUFFile.open(path) as file:
        meta = file.meta
        tokens = meta.strs(TOKENS + "tokens") if TOKENS + "tokens" in meta else ()
        spelling = []
        for name in ("bos", "eos"):
            number = meta.int(f"{TOKENS}{name}_token_id", -1)
            spelling.append(tokens[number] if 0 <= number < len(tokens) else "")
        source = source or meta.str(KEY, "")
    return ChatTemplate(source, *spelling) if source.strip() else fallback_template(*spelling)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file: of a model, or of a vocabulary alone.

    Raises:
        ModelFileError: the file cannot be read, or has no supported tokenizer.
    """
    with GGUFFile.open(path) as file:
        return Tokenizer.from_metadata(file.meta)
