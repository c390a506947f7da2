"""How many tokens a picture takes, told to another program as numbers, whatever that sends back."""

import json
from typing import Any

import pytest

from engine import VisionInfo
from engine.formats.gguf.reader import GGUFFile
from engine.model.layers.keys import Keys
from engine.vision.encoders.registry import ENCODERS
from engine.vision.images.resizing import TooNarrow
from tests.helpers.tiny_mmproj import text_of, tiny_mmproj

SIZES = [(1024, 768), (1, 1), (300, 4), (33, 4000), (4000, 33), (30000, 2000)]


def counts(vision: VisionInfo) -> list[int | None]:
    """Return the tokens of pictures of `SIZES`; None for those that are too narrow."""
    found: list[int | None] = []
    for width, height in SIZES:
        try:
            found.append(vision.n_tokens(width, height))
        except TooNarrow:
            found.append(None)
    return found


@pytest.mark.parametrize("projector", sorted(ENCODERS))
def test_vision_info_made_of_its_sizes_counts_the_same(projector: str, tmp_path: Any) -> None:
    path = tiny_mmproj(tmp_path / "mmproj.gguf", projector)
    with GGUFFile.open(path) as file:
        vision = VisionInfo(
            str(path), ENCODERS[projector](Keys(file.meta), text_of(projector)).rule
        )
    again = VisionInfo.of_sizes(json.loads(json.dumps(vision.sizes())))
    assert again is not None
    assert counts(again) == counts(vision)


GOOD = {
    "side": 0, "factor": 32, "least": 1024, "most": 1 << 20, "longest": 0, "least_tiles": 0,
    "most_tiles": 0, "fills": False, "cell": 32, "has_breaks": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        {"side": -1}, {"most": 1 << 40}, {"cell": 0}, {"factor": 0}, {"most": 0}, {"fills": 1},
        {"cell": "32"}, {"cell": True}, {"most_tiles": 65, "side": 8}, {"most_tiles": 4},
        {"least": None}, {"factor": 1.5}, {"has_breaks": None},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_that_make_no_sense_are_none(bad: dict[str, object]) -> None:
    assert VisionInfo.of_sizes(GOOD) is not None
    assert VisionInfo.of_sizes(GOOD | bad) is None


@pytest.mark.parametrize("no_sizes", [None, 7, [], "sizes", {}])
def test_anything_else_is_none(no_sizes: object) -> None:
    assert VisionInfo.of_sizes(no_sizes) is None
