"""The program that renders chat templates: for each line of JSON with a prompt, one of text."""

from __future__ import annotations

import json
from datetime import datetime

from engine.text.templates.limits import GRACE_S, MAX_ADDED, MAX_MEMORY
from engine.text.templates.rendering import render
from engine.util.sandbox.answering import answer_lines, ending_after


def _answer(line: bytes) -> dict[str, str]:
    request = json.loads(line)
    now, seconds = request["now"], request["seconds"]
    with ending_after(seconds + 4 * GRACE_S):
        return render(
            request["source"],
            request["given"],
            None if now is None else datetime.fromisoformat(now),
            seconds,
            len(line) + MAX_ADDED,
        )


if __name__ == "__main__":
    answer_lines(_answer, MAX_MEMORY)
