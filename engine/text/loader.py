"""The tokenizer of a file on disk."""

from __future__ import annotations

from pathlib import Path

from engine.gguf.reader import GGUFFile
from engine.text.tokenizer import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF: a model, or a file with nothing but a vocabulary.

    Raises:
        ModelFileError: the file cannot be read, or has no tokenizer that Tandem knows.
    """
    with GGUFFile.open(path) as file:
        return Tokenizer.from_metadata(file.meta)
