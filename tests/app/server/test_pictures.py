"""Pictures in requests of all protocols, as the engine gets them."""

import pytest

from app.server.openai.conversation import ShownParts
from app.server.refusal import Refusal
from engine import IMAGE_PLACEHOLDER


def test_texts_and_pictures_keep_their_order() -> None:
    shown = ShownParts()
    shown.add_text(f"one{IMAGE_PLACEHOLDER}")
    shown.add_address("data:image/png;base64,AAAA", "here")
    shown.add_text("two")
    shown.add_text("three")
    shown.add_file("BBBB")
    assert shown.text == f"one{IMAGE_PLACEHOLDER}two\nthree{IMAGE_PLACEHOLDER}"
    assert shown.pictures == ("AAAA", "BBBB")


@pytest.mark.parametrize(
    "url", ["https://example.org/a.png", "file:///etc/passwd", "", "data:image/png,raw"]
)
def test_nothing_is_fetched_for_a_client(url: str) -> None:
    with pytest.raises(Refusal, match="other URLs are not fetched"):
        ShownParts().add_address(url, "messages[0].content[0].image_url")
