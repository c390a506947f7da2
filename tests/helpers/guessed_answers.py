"""Answers that a model computes together, and how many guesses it checked for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine import Finished, Model, SamplingParams, TokenText


def guessed_answers(
    model: Model,
    prompts: Sequence[Sequence[int]],
    n: int,
    before_step: Callable[[Sequence[Sequence[int]]], None] | None = None,
    **wished: object,
) -> tuple[list[list[int]], int, int]:
    """Return answers of n tokens, and the numbers of guesses and of right ones.

    Args:
        before_step: called before each step with the answers so far.
        wished: further settings of sampling; the temperature is 0.7 if it is none of them.
    """
    settings = {"temperature": 0.7, **wished}
    streams = [
        model.generate(ids, SamplingParams(seed=k, max_tokens=n, ignore_eos=True, **settings))
        for k, ids in enumerate(prompts)
    ]
    found: list[list[int]] = [[] for _ in streams]
    n_guessed = n_right = 0
    while not all(stream.is_over for stream in streams):
        for mine, stream in zip(found, streams, strict=True):
            for event in stream.ready():
                if isinstance(event, TokenText):
                    mine += event.ids
                elif isinstance(event, Finished):
                    n_guessed += event.usage.n_drafted
                    n_right += event.usage.n_accepted
        if before_step is not None:
            before_step(found)
        model.step()
    return found, n_guessed, n_right
