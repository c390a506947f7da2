"""Results of an answer: its tokens, and the number of cached tokens of the prompt."""

from collections.abc import Iterable, Sequence

from engine import Event, Finished, Model, SamplingParams, TokenText


def ids_of(events: Iterable[Event]) -> list[int]:
    """Return the ids of all generated tokens."""
    return [i for event in events if isinstance(event, TokenText) for i in event.ids]


def n_cached(events: Sequence[Event]) -> int:
    """Return the number of tokens of the prompt that were not computed again."""
    (last,) = [event for event in events if isinstance(event, Finished)]
    return last.usage.cached_tokens


def ask(model: Model, prompt: list[int], n: int = 6) -> tuple[list[int], int]:
    """Generate `n` tokens, the likeliest each time; return these and the number of cached ones."""
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    events = list(model.generate(prompt, params))
    return ids_of(events), n_cached(events)
