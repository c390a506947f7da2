"""The program that decodes pictures: for each line of JSON with a file, one of pixels."""

from __future__ import annotations

import json

from engine.util.sandbox.answering import answer_lines, ending_after
from engine.vision.images.decoding import Answer, prepared
from engine.vision.images.limits import GRACE_S, MAX_MEMORY, MAX_SECONDS
from engine.vision.images.resizing import Resizing


def _answer(line: bytes) -> Answer:
    request = json.loads(line)
    with ending_after(MAX_SECONDS + 4 * GRACE_S):
        return prepared(request["picture"], Resizing(**request["resizing"]))


if __name__ == "__main__":
    answer_lines(_answer, MAX_MEMORY)
