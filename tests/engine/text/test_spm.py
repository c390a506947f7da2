"""SPM merging against the simplest implementation of its rule."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.text.encoders import SpmEncoder

LETTERS = "ab▁"


def merge_plainly(text: str, scores: dict[str, float]) -> list[str]:
    """Join the best-scored adjacent pieces, the leftmost of equals, until none is a token."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[left + right], i)
            for i, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


vocabularies = st.dictionaries(
    st.text(LETTERS, min_size=2, max_size=4), st.sampled_from([-1.0, -2.0, -3.0]), max_size=12
)


@given(vocabularies, st.text(LETTERS, max_size=24))
def test_merging_takes_the_best_pair_and_of_equals_the_leftmost(
    scores: dict[str, float], text: str
) -> None:
    """Holds for any vocabulary, tokens that no merge can reach and equal scores included."""
    tokens = [*LETTERS, *scores]
    encoder = SpmEncoder(
        {t: i for i, t in enumerate(tokens)}, [-9.0] * 3 + [*scores.values()], None
    )
    expected = merge_plainly(text, scores)
    assert [tokens[i] for i in encoder.encode(text)] == expected
    assert [tokens[i] for i in encoder.encode(text)] == expected  # from the cache, too


def test_a_character_that_is_no_token_can_still_be_merged() -> None:
    """Only the joined piece has to be a token, not its parts."""
    encoder = SpmEncoder({"a": 0, "xy": 1}, [0.0, -1.0], None)
    assert encoder.encode("axy") == [0, 1]


def test_missing_characters_become_bytes_or_the_unknown_token() -> None:
    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    assert SpmEncoder(bytes_, [0.0] * 256, 7).encode("é") == [0xC3, 0xA9]
    assert SpmEncoder({"a": 5}, [0.0] * 6, 7).encode("aéa") == [5, 7, 5]
    assert SpmEncoder({"a": 5}, [0.0] * 6, None).encode("aéa") == [5, 5]
