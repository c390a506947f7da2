"""Loads the tokenizer of a file on disk."""

from __future__ import annotations

from pathlib import Path

from engine.gguf.reader import GGUFFile
from engine.text.tokenizer import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file: of a model, or of a vocabulary alone.

    Raises:
        ModelFileError: the file cannot be read, or has no supported tokenizer.
    """
    with GGUFFile.open(path) as file:
        return Tokenizer.from_metadata(file.meta)
