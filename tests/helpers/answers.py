"""What came of an answer: the tokens that were drawn, and what was kept of earlier turns."""

from collections.abc import Iterable, Sequence

from engine import Event, Finished, Model, SamplingParams, TokenText


def ids_of(events: Iterable[Event]) -> list[int]:
    """The ids of all tokens drawn."""
    return [i for event in events if isinstance(event, TokenText) for i in event.ids]


def n_cached(events: Sequence[Event]) -> int:
    """Tokens of the prompt that were not computed again."""
    (last,) = [event for event in events if isinstance(event, Finished)]
    return last.usage.cached_tokens


def ask(model: Model, prompt: list[int], n: int = 6) -> tuple[list[int], int]:
    """The `n` likeliest tokens, one after another, and how much of the prompt was kept."""
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    events = list(model.generate(prompt, params))
    return ids_of(events), n_cached(events)
