"""Streaming: whole characters, and the text of the bytes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.text.tokenizer import StreamDecoder


def decoder(pieces: list[bytes]) -> StreamDecoder:
    return StreamDecoder(pieces.__getitem__)


@given(st.lists(st.binary(max_size=5), max_size=30))
def test_a_stream_says_what_the_whole_decoding_says(pieces: list[bytes]) -> None:
    """For any bytes, valid or not."""
    stream = decoder(pieces)
    text = "".join(stream.feed(i) for i in range(len(pieces))) + stream.flush()
    assert text == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=20), st.data())
def test_valid_text_never_shows_a_replacement_character(text: str, data: st.DataObject) -> None:
    """However its bytes are cut into tokens; each part is a prefix of the text."""
    text = text.replace("\ufffd", "")
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    ends = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(ends)]
    stream, shown = decoder(pieces), ""
    for i in range(len(pieces)):
        shown += stream.feed(i)
        assert text.startswith(shown)
    assert shown == text
    assert stream.flush() == ""


def test_a_character_appears_with_its_last_byte() -> None:
    stream = decoder([b"\xf0\x9f", b"\x91", b"\x8b!"])
    assert [stream.feed(i) for i in range(3)] == ["", "", "👋!"]


def test_flush_shows_half_a_character_as_one_replacement_and_starts_afresh() -> None:
    stream = decoder([b"a\xf0\x9f", b"b"])
    assert stream.feed(0) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.feed(1) + stream.flush() == "b"
