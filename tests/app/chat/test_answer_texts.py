"""The footer of answers."""

import pytest

from app.chat.message import AnswerStats, Message
from app.chat.views.answer_view import fitting_text, footer_parts, problem_of
from app.core.translation import use_language
from engine import ContextOverflow, Finished, Timings, Usage


@pytest.mark.parametrize(
    ("usage", "saved_s", "guesses"),
    [
        (Usage(5, 0, 12), 0.0, ""),
        (Usage(5, 0, 12, 7, 0), -0.1, ""),
        (Usage(5, 0, 12, 9, 7), 0.0, "7 of 9 draft tokens accepted · "),
        (Usage(5, 0, 12, 9, 7), 2.4, "7 of 9 draft tokens accepted, 2.2× as fast · "),
        (Usage(5, 0, 12, 9, 1), -0.2, "1 of 9 draft tokens accepted, 0.9× as fast · "),
    ],
)
def test_the_footer_has_the_figures_of_the_answer(
    usage: Usage, saved_s: float, guesses: str
) -> None:
    timings = Timings(decode_s=2.0, decode_per_s=61.84, first_token_s=0.3, saved_s=saved_s)
    stats = AnswerStats.of(Finished("stop", usage, timings))
    expected = f"61.8 tok/s · 12 tokens · 0.30 s to first token · {guesses}end of turn"
    assert fitting_text(footer_parts(stats), lambda _: True) == expected
    message = Message("assistant", "Hi", stats)
    assert Message.from_json(message.to_json()) == message


def test_what_went_wrong_is_said_in_the_language_of_the_window() -> None:
    message = Message("assistant", "", problem=str(ContextOverflow(9, 4)))
    use_language("de")
    try:
        assert problem_of(message) == (
            "Der Prompt mit 9 Tokens ist länger als der verfügbare Kontext von 4."
        )
    finally:
        use_language("en")
    assert problem_of(message) == str(ContextOverflow(9, 4))


def test_what_matters_less_gives_way_first() -> None:
    stopped = AnswerStats("cancelled", 12, 61.84, 0.3, 20, 9, 7, 2.2)
    ended = AnswerStats("stop", 12, 61.84, 0.3, 20)
    for stats, most, text in (
        (ended, 45, "61.8 tok/s · 12 tokens · 0.30 s to first token …"),
        (ended, 30, "61.8 tok/s · 12 tokens …"),
        (ended, 1, "61.8 tok/s …"),
        (
            stopped,
            80,
            "61.8 tok/s · 12 tokens · 7 of 9 draft tokens accepted, 2.2× as fast · stopped …",
        ),
        (stopped, 40, "61.8 tok/s · 12 tokens · stopped …"),
        (stopped, 25, "61.8 tok/s · stopped …"),
    ):
        assert fitting_text(footer_parts(stats), lambda shown: len(shown) - 3 <= most) == text  # noqa: B023
    assert fitting_text([], lambda _: False) == ""


def test_chats_of_versions_without_guesses_are_read() -> None:
    data = Message("assistant", "Hi", AnswerStats("stop", 3, 9.0, 0.1, 8)).to_json()
    del data["stats"]["n_drafted"], data["stats"]["n_accepted"], data["stats"]["draft_gain"]
    found = Message.from_json(data).stats
    assert found == AnswerStats("stop", 3, 9.0, 0.1, 8)
