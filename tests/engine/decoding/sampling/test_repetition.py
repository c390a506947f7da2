"""DRY against a slow reading of its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decoding.sampling.repetition import Dry, DryHistory
from engine.decoding.sampling.sampler import Sampler
from engine.decoding.sampling.steps import Candidates
from engine.sampling_params import SamplingParams


def history(
    tokens: list[int], *, allowed: int = 2, n_last: int = -1, breaks: str = ""
) -> DryHistory:
    """Return a history in which token n is the n-th letter, and some letters break."""
    made = DryHistory(1.0, 2.0, allowed, n_last, list(breaks), lambda token: bytes([97 + token]))
    for token in tokens:
        made.append(token)
    return made


def slow(tokens: list[int], allowed: int, n_last: int, breaks: str) -> dict[int, float]:
    """Return the penalties by comparing every earlier stretch with the end of the text."""
    since = 0
    for token in reversed(tokens):
        if chr(97 + token) in breaks:
            break
        since += 1
    recent = tokens if n_last < 0 else tokens[len(tokens) - min(n_last, len(tokens)) :]
    if len(recent) <= allowed or min(since, len(recent)) < allowed:
        return {}
    found: dict[int, int] = {}
    for end in range(len(recent) - 1):
        length = 0
        while length < since and length <= end and recent[end - length] == recent[-1 - length]:
            length += 1
        follower = recent[end + 1]
        if length >= allowed and chr(97 + follower) not in breaks:
            found[follower] = max(found.get(follower, 0), length)
    return {token: 2.0 ** (length - allowed) for token, length in found.items()}


def as_dict(made: DryHistory) -> dict[int, float]:
    tokens, penalties = made.penalties()
    assert sorted(tokens.tolist()) == tokens.tolist()
    return dict(zip(tokens.tolist(), penalties.tolist(), strict=True))


@given(
    st.lists(st.integers(0, 4), max_size=40),
    st.integers(0, 4),
    st.sampled_from([-1, 0, 1, 5, 20, 100]),
    st.sampled_from(["", "a", "ce"]),
)
def test_penalties_are_those_of_the_definition(
    tokens: list[int], allowed: int, n_last: int, breaks: str
) -> None:
    made = history(tokens, allowed=allowed, n_last=n_last, breaks=breaks)
    assert as_dict(made) == pytest.approx(slow(tokens, allowed, n_last, breaks))


def test_the_example_of_its_description() -> None:
    """a b c c b c y a b c: c would go on with "a b c", b with "c", y with "b c"."""
    a, b, c, y = 0, 1, 2, 3
    found = as_dict(history([a, b, c, c, b, c, y, a, b, c], allowed=1))
    assert found == {b: 2.0**0, c: 2.0**2, y: 2.0**1}


def test_breakers_are_found_across_tokens_and_inside_them() -> None:
    pieces = [b"one", b" two", b"\n", b"\nUser", b": "]
    made = DryHistory(1.0, 2.0, 1, -1, ["\n\nUser:"], lambda token: pieces[token])
    for token in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4):
        made.append(token)
    assert as_dict(made) == {}, "right after a breaker nothing is a repetition"
    made.append(0)
    assert as_dict(made) == {1: 1.0}


def test_a_model_that_repeats_itself_stops() -> None:
    """Its favourite goes on with what was said, until that is too unlikely."""
    params = {"temperature": 0, "dry_multiplier": 0.8, "dry_breakers": ()}
    sampler, plain = Sampler(SamplingParams(**params)), Sampler(SamplingParams(temperature=0))
    cycle = [1, 2, 3, 4]
    for kind, expected in ((sampler, False), (plain, True)):
        said = list(cycle)
        for token in said:
            kind.accept(token)
        for _ in range(24):
            logits = np.zeros(10, np.float32)
            logits[cycle[len(said) % 4]] = 10.0
            said.append(kind.sample(logits))
            kind.accept(said[-1])
        assert (said == cycle * 7) is expected


def test_a_long_repetition_is_cheap_and_no_penalty_is_infinite() -> None:
    made = history([0] * 20_000, allowed=2)
    tokens, penalties = made.penalties()
    assert tokens.tolist() == [0]
    assert np.isfinite(penalties).all()
    logits = Dry(made)(Candidates.from_logits(np.array([1.0, 0.0], np.float32))).logits
    assert np.isfinite(logits).all()
    assert logits[0] < logits[1]
