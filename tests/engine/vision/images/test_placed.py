"""Where pictures stand among tokens, and where a prompt may be cut."""

from dataclasses import replace

import numpy as np

from engine.vision.images.placed import (
    FIRST_ID,
    PlacedImages,
    PromptImage,
    n_before_image,
    text_ids,
)
from engine.vision.images.resizing import ImageProcessor, Resizing, TileTexts

RULE = ImageProcessor(
    Resizing("bilinear", side=12), 4, (0.5,) * 3, (0.5,) * 3, "<", ">", is_two_way=True
)


def picture(shade: int, rule: ImageProcessor = RULE, encoder: str = "tower") -> PromptImage:
    return PromptImage.of(np.full((12, 12, 3), shade, np.uint8), (40, 40), rule, encoder)


def placed(rule: ImageProcessor = RULE) -> PlacedImages:
    """Return two pictures of nine tokens: 3 to 11 and 14 to 22."""
    one, two = picture(1, rule), picture(2, rule)
    ids = [1, 2, 3, *one.ids, 4, 5, *two.ids, 6]
    return PlacedImages(ids, {one.number: one, two.number: two})


def test_ids_tell_pixels_and_encoders_apart() -> None:
    assert picture(1).ids == picture(1).ids
    others = {picture(2).number, picture(1, encoder="other").number, picture(1).number}
    assert len(others) == 3
    assert len(picture(1).ids) == 9
    assert picture(1).ids[0] >= FIRST_ID
    assert picture(1).ids[-1] < 1 << 63


def test_texts_and_pictures_are_told_apart() -> None:
    ids = [1, 2, *picture(1).ids, 3]
    assert text_ids(ids) == [1, 2, 3]
    assert n_before_image(ids) == 2
    assert [found.start for found in placed()] == [3, 14]
    assert [found.start for found in placed().among(5, 15)] == [3, 14]
    assert placed().among(12, 14) == []


def test_two_way_pictures_are_never_cut() -> None:
    found = placed()
    assert [found.whole(n) for n in (2, 3, 4, 11, 12, 13, 14, 15, 23)] == [
        2, 3, 3, 3, 12, 13, 14, 14, 23,
    ]  # fmt: skip
    assert found.piece(0, 8) == 3
    assert found.piece(3, 2) == 9  # more than wanted, as nothing comes before
    assert found.piece(0, 12) == 12
    assert found.piece(12, 4) == 2


def test_pictures_that_see_only_what_is_before_may_be_cut() -> None:
    found = placed(replace(RULE, is_two_way=False))
    assert found.whole(5) == 5
    assert found.piece(0, 8) == 8


def test_positions_behind_pictures_go_on_from_their_longer_side() -> None:
    """As in Qwen 2-VL: a picture of 2 rows and 4 columns takes four positions."""
    rule = replace(RULE, is_two_way=False, has_places=True)
    one = PromptImage.of(np.zeros((8, 16, 3), np.uint8), (40, 40), rule, "tower")
    found = PlacedImages([1, 2, *one.ids, 3, *one.ids, 4], {one.number: one})
    assert [found.shift(n) for n in (0, 2, 10, 11, 19)] == [0, 0, -4, -4, -8]
    times, rows, columns = found.places(1, 11)
    assert times == [1, *[2] * 8, 6, 7]
    assert rows == [1, 2, 2, 2, 2, 3, 3, 3, 3, 6, 7]
    assert columns == [1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7]
    assert found.places(10, 1) == ()
    assert placed().places(0, 5) == ()


def test_texts_stand_around_the_tiles_of_a_picture() -> None:
    tiles = TileTexts("<", "[{row},{column}]", "\n", "all")
    rule = replace(RULE, tiles=tiles)
    assert rule.texts(1, 1) == ["<", ">"]
    assert rule.texts(1, 2) == ["<[1,1]", "[1,2]", "\nall", ">"]
    assert rule.texts(2, 1) == ["<[1,1]", "\n[2,1]", "\nall", ">"]


def test_breaks_between_rows_are_tokens_of_a_picture() -> None:
    assert len(picture(1, replace(RULE, has_breaks=True)).ids) == 11
