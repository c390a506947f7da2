"""The form of an answer: which tokens are allowed where, with thinking and triggers."""

import re
from collections.abc import Sequence

import numpy as np
import pytest

from engine import Grammar, GrammarError
from engine.decoding.grammar.matcher import MaskVocabulary
from engine.generation.structured_output import AnswerConstraint
from engine.text.messages import HARMONY_THINKING, ThinkingMarks, ThinkingState
from tests.helpers.vocabularies import CONTROL, USER_DEFINED, bpe, tokenizer

MERGES = ("> {", "> \u010a", "t h", "th i", "n k", "thi nk", "< /", "\u010a \u010a", "y e", "ye s")
SPECIAL = {"<|end|>": CONTROL, "<THINK>": CONTROL, "</THINK>": USER_DEFINED}
TEXT = ThinkingMarks("<think>", ("</think>",))
TOKENS = ThinkingMarks("<THINK>", ("</THINK>",))
DIGITS = Grammar("regex", "[0-9]{2}")


@pytest.fixture(scope="module")
def vocabulary() -> MaskVocabulary:
    return MaskVocabulary(tokenizer(bpe(MERGES, SPECIAL) | {"eos_token_id": 256 + len(MERGES)}))


@pytest.fixture(scope="module")
def end(vocabulary: MaskVocabulary) -> int:
    (found,) = vocabulary.eog_ids
    return found


class Answer:
    """An answer of which a test says what is tried."""

    def __init__(
        self, vocabulary: MaskVocabulary, grammar: Grammar, marks: ThinkingMarks | None = None,
        thinking: ThinkingState = "over",
    ) -> None:  # fmt: skip
        self.vocabulary = vocabulary
        self.form = AnswerConstraint(vocabulary, vocabulary.matcher(grammar), marks, thinking)

    def allowed(self, ends: Sequence[int] | None = None) -> set[bytes]:
        """Return the spellings of the tokens that are allowed next."""
        return {self.vocabulary.bytes_of(token) for token in self.allowed_ids(ends)}

    def allowed_ids(self, ends: Sequence[int] | None = None) -> list[int]:
        logits = np.zeros(self.vocabulary.n + 3, np.float32)  # with rows that are no tokens
        self.form.restrict(logits, self.vocabulary.eog_ids if ends is None else ends)
        assert set(logits.tolist()) <= {0.0, -np.inf}
        return np.flatnonzero(logits == 0).tolist()

    def say(self, *tokens: str) -> None:
        """Say tokens, each of which must be allowed."""
        for text in tokens:
            (token,) = self.vocabulary.with_bytes(text.encode())
            assert token in self.allowed_ids(), text
            self.form.accept(token)


def test_the_answer_has_the_form_and_ends_with_it(vocabulary: MaskVocabulary, end: int) -> None:
    answer = Answer(vocabulary, Grammar("regex", "a[xy]?"))
    assert answer.allowed() == {b"a"}
    answer.say("a")
    assert answer.allowed() == {b"x", b"y", vocabulary.bytes_of(end)}
    assert answer.allowed(ends=()) == {b"x", b"y"}, "where the end is not wanted, more comes"
    assert not answer.form.is_over
    answer.say("y")
    assert answer.form.is_over


@pytest.mark.parametrize("marks", [TEXT, TOKENS], ids=["by letters", "as tokens"])
def test_the_grammar_begins_behind_the_end_of_thinking(
    vocabulary: MaskVocabulary, end: int, marks: ThinkingMarks
) -> None:
    answer = Answer(vocabulary, DIGITS, marks, "open")
    everything = {vocabulary.bytes_of(i) for i in range(vocabulary.n)} - {vocabulary.bytes_of(end)}
    assert answer.allowed() == everything, "all but the end may come in thinking"
    closing = marks.closing[0]
    if marks is TOKENS:
        answer.say("think", "yes", closing)
    else:
        answer.say("think", "<", "a", "</", "think")
        assert b">{" not in answer.allowed(), "it would be half in the grammar"
        assert b">\n" in answer.allowed()
        answer.say(">")
    digits = {b"%d" % n for n in range(10)}
    assert answer.allowed() == digits | {b"\n", b"\n\n"}, "models write line breaks there"
    answer.say("\n\n")
    assert answer.allowed() == digits
    answer.say("4", "2")
    assert answer.form.is_over


def test_a_token_with_a_line_break_behind_the_mark_ends_thinking(
    vocabulary: MaskVocabulary,
) -> None:
    answer = Answer(vocabulary, DIGITS, TEXT, "open")
    answer.say("</", "think", ">\n")
    assert answer.allowed() == {b"%d" % n for n in range(10)} | {b"\n"}


@pytest.mark.parametrize(
    ("marks", "tokens"),
    [(TEXT, ("<", "thi", "nk", ">", "a", "</", "think", ">\n")), (TOKENS, ("<THINK>", "</THINK>"))],
    ids=["by letters", "as tokens"],
)
def test_a_model_may_think_first_or_not(
    vocabulary: MaskVocabulary, marks: ThinkingMarks, tokens: tuple[str, ...]
) -> None:
    answer = Answer(vocabulary, DIGITS, marks, "possible")
    digits = {b"%d" % n for n in range(10)}
    first = {b"<"} if marks is TEXT else {b"<THINK>"}
    assert answer.allowed() == digits | first
    answer.say("1")
    assert answer.allowed() == digits, "thinking comes first or not at all"
    answer.form.take_back(1)
    answer.say(*tokens, "1", "2")
    assert answer.form.is_over


def test_what_may_be_thinking_or_the_grammar_is_both_until_it_differs(
    vocabulary: MaskVocabulary,
) -> None:
    for tail, is_thought in (("think", True), ("y", False)):
        answer = Answer(vocabulary, Grammar("regex", "<[a-z]y?"), TEXT, "possible")
        answer.say("<", "t")
        assert {b"h", b"y"} <= answer.allowed()
        answer.form.take_back(1)
        if is_thought:
            answer.say(tail, ">", "</", "think", ">")
            assert b"<" in answer.allowed()
        else:
            answer.say("t", tail)
            assert answer.form.is_over


def test_harmony_begins_in_the_final_channel(vocabulary: MaskVocabulary) -> None:
    answer = Answer(vocabulary, DIGITS, HARMONY_THINKING, "open")
    for said in ("<|channel|>analysis<|message|>final<|message|>", "<|channel|>final json<|messa"):
        answer.form.accept_text(said)
        assert len(answer.allowed()) > 100
    answer.form.accept_text("ge|>")
    assert b"1" in answer.allowed()
    assert b"a" not in answer.allowed()


def test_a_trigger_begins_the_grammar_again_and_again(vocabulary: MaskVocabulary, end: int) -> None:
    answer = Answer(vocabulary, Grammar("regex", "[0-9]", "<call>"))
    for _ in range(2):
        assert vocabulary.bytes_of(end) in answer.allowed(), "it need not come"
        answer.say("a", "<", "c", "a", "l", "l")
        assert b">{" not in answer.allowed()
        answer.say(">", "7")
    assert not answer.form.is_over
    answer.say("yes")


def test_a_trigger_within_thinking_is_none(vocabulary: MaskVocabulary, end: int) -> None:
    answer = Answer(vocabulary, Grammar("regex", "[0-9]", "yes"), TEXT, "open")
    answer.say("yes", "a")
    assert vocabulary.bytes_of(end) not in answer.allowed()
    answer.say("</", "think", ">", "a", "yes")
    assert b"a" not in answer.allowed()
    answer.say("1", "a")


def test_taking_back_tokens_goes_back_exactly(vocabulary: MaskVocabulary) -> None:
    answer = Answer(vocabulary, Grammar("regex", "[0-9][a-c][0-9]", "yes"), TOKENS, "open")
    said = ["a", "</THINK>", "ye", "s", "1", "b", "2", "a", "yes", "3", "c"]
    seen = []
    for text in said:
        seen.append(answer.allowed())
        answer.say(text)
    for n in range(len(said), 0, -1):
        answer.form.take_back(n)
        assert answer.allowed() == seen[-n]
        answer.say(*said[-n:])


def test_an_answer_goes_on_from_its_text(vocabulary: MaskVocabulary) -> None:
    answer = Answer(vocabulary, Grammar("regex", "[a-z]{8}"), TEXT, "open")
    answer.form.accept_text("hm</think>\n\nabcdef")
    answer.say("yes"[:1], "z")
    assert answer.form.is_over
    with pytest.raises(GrammarError):
        Answer(vocabulary, DIGITS, TEXT, "over").form.accept_text("no digits")


@pytest.mark.parametrize("seed", range(6))
def test_random_answers_match(vocabulary: MaskVocabulary, seed: int) -> None:
    pattern = r"(yes|\{[a-c]+\}){2}"
    answer, random = Answer(vocabulary, Grammar("regex", pattern)), np.random.default_rng(seed)
    said = b""
    while not answer.form.is_over:
        token = int(random.choice(answer.allowed_ids()))
        if token in vocabulary.eog_ids:
            break
        said += vocabulary.bytes_of(token)
        answer.form.accept(token)
    assert re.fullmatch(pattern, said.decode())
