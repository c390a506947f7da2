"""Banned strings: never in an answer, and as if every prefix had been tried from the start."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import (
    AnswerRequest,
    ChatMessage,
    EngineError,
    Event,
    Finished,
    Model,
    SamplingParams,
    TokenText,
    load_model,
)
from engine.decoding.sampling.sampler import Sampler
from engine.generation.generate import AnswerToken, BannedStrings
from tests.helpers.ahead import AheadSource
from tests.helpers.hf_models import FAMILIES
from tests.helpers.tiny_gguf import tiny_gguf
from tests.helpers.token_streams import answer, toy
from tests.helpers.toy_runtime import Letters

PROMPT = [9, 10]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
BANS = [
    ("spl",),  # one token, among others
    ("L SP", "pl s"),  # across tokens, in the middle of them, in other letters
    ("s", "l"),  # parts of most tokens
    ("\u462e",),  # a character of three tokens
    ("never said",),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=96)


@pytest.fixture(scope="module", params=["host", "ahead", "2 ranks", "3 ranks"])
def model(path: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    """Yield the same model, computed in several ways."""
    n_rank = int(request.param[0]) if request.param[0].isdigit() else 1
    with load_model(path, ["cpu"] * n_rank, n_ctx=96, n_batch=8, kv_type="f32") as loaded:
        if request.param == "ahead":
            loaded.runtime.token_source = AheadSource(loaded.runtime.runner, 2)
        yield loaded


def ids_of(events: Sequence[Event]) -> list[int]:
    return [i for event in events if isinstance(event, TokenText) for i in event.ids]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenText))


def last_of(events: Sequence[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def expected_ids(model: Model, tokenizer: Any, n: int, banned: Sequence[str]) -> list[int]:
    """Return the answer by brute force: each token from a fresh pass over all before it."""
    answer, not_here = list[int](), dict[tuple[int, ...], set[int]]()
    while len(answer) < n:
        logits = model.logits([*PROMPT, *answer])[-1]
        logits[[*tokenizer.never_ids, *not_here.get(tuple(answer), ())]] = -np.inf
        answer.append(int(logits.argmax()))
        pieces = [tokenizer.token_bytes(token) for token in answer]
        text = b"".join(pieces).lower()
        begin = max(text.rfind(ban.lower().encode()) for ban in banned)
        if begin >= 0:
            ends = np.cumsum([len(piece) for piece in pieces])
            at = int(np.searchsorted(ends, begin, side="right"))
            not_here.setdefault(tuple(answer[:at]), set()).add(answer[at])
            del answer[at:]
    return answer


@pytest.mark.parametrize("banned", BANS, ids=str)
def test_a_greedy_answer_is_that_of_brute_force(model: Model, banned: tuple[str, ...]) -> None:
    plain = list(model.generate(PROMPT, SamplingParams(**GREEDY)))
    events = list(model.generate(PROMPT, SamplingParams(**GREEDY, banned_strings=banned)))
    said = text_of(plain).lower()
    assert any(ban.lower() in said for ban in banned) == (banned != BANS[-1]), "a case of its kind"
    assert not any(ban.lower() in text_of(events).lower() for ban in banned)
    assert ids_of(events) == expected_ids(model, model.tokenizer, 40, banned)
    assert last_of(events).usage.completion_tokens == 40
    assert last_of(events).reason == "length"


def test_a_recurrent_state_goes_back_as_well(tmp_path: Path) -> None:
    """It cannot be cut, so it is computed again."""
    (family,) = (f for f in FAMILIES if f.name == "jamba")
    family.build(tmp_path / "m.gguf")
    letters: Any = Letters()
    with load_model(tmp_path / "m.gguf", ["cpu", "cpu"], n_ctx=64, kv_type="f32") as model:
        params = SamplingParams(temperature=0, max_tokens=12)

        def said(params: SamplingParams) -> list[Event]:
            return answer(model.runtime.runner, params, tokenizer=letters, prompt=PROMPT)

        plain = text_of(said(params))
        bans = (plain[3:5], plain[7])
        params = SamplingParams(temperature=0, max_tokens=12, banned_strings=bans)
        found = said(params)
        assert ids_of(found) == expected_ids(model, letters, 12, params.banned_strings)
        assert not any(ban in text_of(found) for ban in params.banned_strings)


@pytest.mark.parametrize(
    "changes",
    [
        {"mirostat": True}, {"dry_multiplier": 2.0, "repeat_penalty": 1.3, "repeat_last_n": 5},
        {"top_k": 20},
    ],
    ids=str,
)  # fmt: skip
def test_a_random_answer_has_none_either_and_repeats_with_its_seed(
    model: Model, changes: dict[str, Any]
) -> None:
    params = SamplingParams(
        temperature=1.3, seed=4, max_tokens=40, ignore_eos=True, banned_strings=("s", " m"),
        **changes,
    )  # fmt: skip
    text = text_of(list(model.generate(PROMPT, params)))
    assert text
    assert not {"s", "S"} & set(text)
    assert " m" not in text.lower()
    assert text_of(list(model.generate(PROMPT, params))) == text


def test_the_sampler_forgets_what_is_taken_back() -> None:
    """Its history is then that of a sampler that never saw those tokens."""
    params = SamplingParams(
        dry_multiplier=1.0, repeat_penalty=1.2, repeat_last_n=4, dry_breakers=("ab",), mirostat=True
    )

    def token_bytes(token: int) -> bytes:
        return b"abcdefgh"[token : token + 1]

    def state(sampler: Sampler) -> object:
        dry, counts = sampler._dry, sampler.history.counts()
        return sampler.history.tokens, [x.tolist() for x in counts], [
            x.tolist() for x in dry.penalties()
        ], dry._tail, dry._n_since  # fmt: skip

    random = np.random.default_rng(3)
    for n in range(1, 60):
        tokens = random.integers(0, 4, 60).tolist()
        changed, fresh = Sampler(params, token_bytes), Sampler(params, token_bytes)
        for token in tokens[:n]:
            changed.accept(token)
        n_back = int(random.integers(0, n))
        changed.take_back(n_back)
        for token in tokens[: n - n_back]:
            fresh.accept(token)
        assert state(changed) == state(fresh)
        for sampler in (changed, fresh):
            sampler.accept(1)
        assert state(changed) == state(fresh)


def test_an_answer_that_is_continued_does_not_complete_one(model: Model) -> None:
    """Its beginning was shown and stays, so the first new token of the string is replaced."""
    plain = text_of(list(model.generate(PROMPT, SamplingParams(**GREEDY))))
    prompt = model.tokenizer.decode(PROMPT)
    turns = (ChatMessage("user", prompt), ChatMessage("assistant", "hello wor"))
    request = AnswerRequest(turns, sampling=SamplingParams(**GREEDY), continue_last=True)
    first = text_of(list(model.answer(request)))[:2]
    ban = f"wor{first}"
    assert plain
    sampling = SamplingParams(**GREEDY, banned_strings=(ban,))
    request = AnswerRequest(turns, sampling=sampling, continue_last=True)
    assert ban.lower() not in ("hello wor" + text_of(list(model.answer(request)))).lower()


def test_a_stop_string_ends_the_answer_before_what_could_become_banned(model: Model) -> None:
    plain = text_of(list(model.generate(PROMPT, SamplingParams(**GREEDY))))
    at = plain.index("spl")
    stop, ban = plain[at : at + 2], plain[at : at + 8]
    params = SamplingParams(**GREEDY, stop=(stop,), banned_strings=(ban + "x",))
    events = list(model.generate(PROMPT, params))
    assert text_of(events) == plain[: plain.index(stop)]
    assert last_of(events).reason == "stop"
    without = list(model.generate(PROMPT, SamplingParams(**GREEDY, stop=(stop,))))
    assert last_of(events).usage == last_of(without).usage


def test_what_was_held_back_is_shown_at_the_end(model: Model) -> None:
    plain = list(model.generate(PROMPT, SamplingParams(**GREEDY)))
    ban = text_of(plain)[-6:] + "z"
    events = list(model.generate(PROMPT, SamplingParams(**GREEDY, banned_strings=(ban,))))
    assert text_of(events) == text_of(plain)
    assert ids_of(events) == ids_of(plain)


def test_a_full_context_shifts_between_what_is_held_back(model: Model) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=150, ignore_eos=True, on_overflow="shift",
        banned_strings=("x" * 90, "sp", "e", "mo"),
    )  # fmt: skip
    events = list(model.generate(list(range(5, 60)), params))
    assert last_of(events).usage.completion_tokens == 150
    assert not any(ban in text_of(events).lower() for ban in ("sp", "e", "mo"))
    assert len(ids_of(events)) == 150


def test_where_nothing_may_follow_the_answer_ends_in_a_sentence() -> None:
    runtime, letters = toy("cpu"), Letters()
    every = tuple(letters.feed(token) for token in range(runtime.n_vocab))
    with pytest.raises(EngineError, match="continuation is banned"):
        answer(runtime, SamplingParams(**GREEDY, banned_strings=every), tokenizer=letters)


@given(
    st.text("abA\u00e4\u00c4", max_size=30),
    st.lists(st.text("aB\u00e4", min_size=1, max_size=4), max_size=3),
    st.integers(0, 3),
)
def test_banned_strings_are_found_as_they_end_and_before_they_are_shown(
    text: str, banned: list[str], n_said: int
) -> None:
    said, shown = text[:n_said], text[:n_said]
    watch = BannedStrings(banned, said)
    low, bans = text.lower(), [ban.lower() for ban in banned]
    for index, char in enumerate(text[n_said:], n_said):
        ends = [low[: index + 1].endswith(ban) for ban in bans]
        n_back = watch.feed(AnswerToken(ord(char), char))
        lengths = [len(ban) for ban, is_end in zip(bans, ends, strict=True) if is_end]
        expected = min(lengths, default=0)
        assert n_back == min(expected, index + 1 - n_said)
        if n_back:
            assert watch.take_back(n_back).text == text[index + 1 - n_back]
            assert shown + watch.held_text == text[: index + 1 - n_back]
            return
        shown += "".join(s.text for s in watch.release(watch.n_settled(is_half=False)))
        held = text[len(shown) : index + 1]
        assert watch.held_text == held
        if held and len(shown) > n_said:
            assert any(ban.startswith(held.lower()) for ban in bans)
