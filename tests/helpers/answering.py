"""Answers of a model that are computed together."""

from collections.abc import Sequence

from engine import Finished, Model, SamplingParams, TokenText, Usage


def answered(
    model: Model, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[list[int]], list[Usage]]:
    """Return the tokens of the answers to several prompts, and what they used."""
    streams = [model.generate(prompt, params) for prompt in prompts]
    found: list[list[int]] = [[] for _ in streams]
    usages: dict[int, Usage] = {}
    while len(usages) < len(streams):
        for n, stream in enumerate(streams):
            event = next(stream, None) if n not in usages else None
            if isinstance(event, TokenText):
                found[n] += event.ids
            elif isinstance(event, Finished):
                usages[n] = event.usage
    return found, [usages[n] for n in range(len(streams))]
