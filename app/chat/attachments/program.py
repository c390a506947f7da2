"""The program that reads files for messages: a line of JSON in, one with a text or tokens out."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import engine
from app.chat.attachments.documents import NoText, Problem, cuts, read_text
from engine import answer_lines, ending_after

MAX_MEMORY = 2 << 30
"""Largest number of bytes that the program may take: a vocabulary has up to some 500 MB."""

MAX_SECONDS = 60.0
"""Longest time for one file."""


def answer(request: dict[str, Any]) -> dict[str, object]:
    """Return the text of a file with its tokens, or the tokens of a text.

    Args:
        request: "path" of a file or "text"; "model", the file of a model, "" for none.

    Returns:
        "text" of a file and its "n_bytes"; "marks", pairs of a place in the text and the number of
        tokens up to there, none without a model; or "problem", and "why" for one of the disk.
    """
    made: dict[str, object] = {}
    text = request.get("text")
    if text is None:
        path = Path(request["path"])
        try:
            text = read_text(path)
            made = {"text": text, "n_bytes": path.stat().st_size}
        except NoText as error:
            return {"problem": str(error)}
        except OSError as error:
            return {"problem": Problem.UNREADABLE, "why": error.strerror or str(error)}
    made["marks"] = _marks(text, request["model"]) if request["model"] else []
    return made


def _marks(text: str, model: str) -> list[tuple[int, int]]:
    """Return places where a text may be cut, each with the number of tokens before it."""
    try:
        tokenizer = _tokenizer(model)
    except engine.EngineError:  # a model without a vocabulary
        return []
    marks, start, n_tokens = list[tuple[int, int]](), 0, 0
    for end in cuts(text):
        n_tokens += len(tokenizer.encode(text[start:end], add_special=False))
        marks.append((end, n_tokens))
        start = end
    return marks


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Any:
    return engine.load_tokenizer(model)


def _answer(line: bytes) -> dict[str, object]:
    with ending_after(2 * MAX_SECONDS):
        return answer(json.loads(line))


if __name__ == "__main__":
    answer_lines(_answer, MAX_MEMORY)
