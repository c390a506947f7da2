"""Questions to a model are answered, also between two tokens of an answer."""

from typing import get_args

import pytest

from engine import (
    AnswerRequest,
    ApplyTemplate,
    CacheCounted,
    ChatMessage,
    Command,
    CountCache,
    CountTokens,
    Detokenize,
    Detokenized,
    Embed,
    Failed,
    Finished,
    Load,
    LoadParams,
    ScoreTokens,
    TemplateApplied,
    Tokenize,
    Tokenized,
    TokensCounted,
    TokensScored,
    TokenText,
    Tool,
)
from engine.generation.requests import Reply
from tests.helpers.desk import ASK, CLOSING, LONG, SHORT, Desk


def test_tokens_are_counted(desk: Desk, path: str) -> None:
    failed = desk.run(CountTokens(ASK))
    assert isinstance(failed, Failed)
    assert "No model is loaded" in str(failed.error)
    desk.run(Load(LoadParams(path)))
    counted = desk.run(CountTokens(ASK, "world"))
    draft = desk.run(CountTokens(None, "world"))
    assert isinstance(counted, TokensCounted)
    assert draft == TokensCounted(None, counted.n_draft)
    talk = (ChatMessage("user", "hello\n\nworld"),)  # the draft is a part of the last message
    ended = desk.run(AnswerRequest(talk, sampling=SHORT))
    assert isinstance(ended, Finished)
    assert counted.n_before is not None
    assert counted.n_before + counted.n_draft == ended.usage.prompt_tokens


@pytest.mark.parametrize(
    "question",
    [
        CountTokens((), "world"),
        Tokenize("hello"),
        Detokenize((5, 6)),
        ApplyTemplate(ASK),
        Embed(("hello", (5, 6))),
        ScoreTokens((5, 6, 7), 2),
        ScoreTokens("hello"),
        CountCache(),
    ],
    ids=str,
)
def test_questions_are_answered_in_the_middle_of_an_answer(
    desk: Desk, path: str, question: Command
) -> None:
    desk.run(Load(LoadParams(path)))
    text = desk.host.submit(AnswerRequest(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    number = desk.host.submit(question)
    while (found := desk.next()).command_id != number:
        assert not isinstance(found.event, CLOSING)
    assert isinstance(found.event, get_args(Reply))
    desk.host.cancel()
    assert isinstance(desk.closing(text), Finished)


def test_a_text_is_scored_as_the_prompt_that_it_would_be(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    found = desk.run(ScoreTokens("hello world", 1))
    assert isinstance(found, TokensScored)
    again = desk.run(ScoreTokens(found.ids, 1))
    assert again == found
    ended = desk.run(AnswerRequest(prompt="hello world", sampling=SHORT))
    assert isinstance(ended, Finished)
    assert len(found.ids) == len(found.logprobs) + 1 == ended.usage.prompt_tokens


def test_the_cache_is_used_by_answers_and_then_kept(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    assert desk.run(CountCache()) == CacheCounted(0, 0)
    text = desk.host.submit(AnswerRequest(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    number = desk.host.submit(CountCache())
    while (found := desk.next()).command_id != number:
        assert not isinstance(found.event, CLOSING)
    assert isinstance(found.event, CacheCounted)
    assert found.event.n_used in range(256, 1025, 256)
    desk.host.cancel()
    assert isinstance(desk.closing(text), Finished)
    after = desk.run(CountCache())
    assert isinstance(after, CacheCounted)
    assert after.n_used == 0
    assert after.n_kept > 0


def test_the_text_of_tokens_is_the_text_they_were_made_of(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    said = "hello  world ? \u00e9</s>"
    found = desk.run(Tokenize(said, has_pieces=True))
    assert isinstance(found, Tokenized)
    whole = b"".join(map(bytes, found.pieces)).decode()
    assert whole == " " + said, "SPM begins with a space"
    assert any(bytes(piece) == b"\xc3" for piece in found.pieces), "a part of a character"
    back = desk.run(Detokenize(found.ids, has_pieces=True))
    assert back == Detokenized(said, found.pieces)
    assert desk.run(Detokenize(found.ids, skip_special=True)) == Detokenized(said[:-4])
    failed = desk.run(Detokenize((10**9,)))
    assert isinstance(failed, Failed)
    assert "Some token ids are outside the range 0 to" in str(failed.error)


def test_a_written_prompt_is_that_of_an_answer(desk: Desk, path: str) -> None:
    """Its tokens are those that an answer computes, also where it is continued."""
    desk.run(Load(LoadParams(path)))
    talk = (*ASK, ChatMessage("assistant", "the model"))
    for messages, is_continued in ((ASK, False), (talk, True)):
        written = desk.run(ApplyTemplate(messages, continue_last=is_continued))
        assert isinstance(written, TemplateApplied)
        tokens = desk.run(Tokenize(written.prompt, add_special=True))
        assert isinstance(tokens, Tokenized)
        ended = desk.run(AnswerRequest(messages, sampling=SHORT, continue_last=is_continued))
        assert isinstance(ended, Finished)
        assert len(tokens.ids) == ended.usage.prompt_tokens
    bare = desk.run(ApplyTemplate(ASK, add_generation_prompt=False))
    full = desk.run(ApplyTemplate(ASK))
    assert isinstance(bare, TemplateApplied)
    assert isinstance(full, TemplateApplied)
    assert full.prompt == bare.prompt + "Assistant:"
    told = desk.run(ApplyTemplate(ASK, tools=(Tool("look_up"),)))
    assert isinstance(told, TemplateApplied)
    assert "look_up" in told.prompt
    for asked, sentence in (
        (ApplyTemplate(()), "no message"), (ApplyTemplate(ASK, variables="[]"), "variables"),
    ):  # fmt: skip
        failed = desk.run(asked)
        assert isinstance(failed, Failed)
        assert sentence in str(failed.error)
