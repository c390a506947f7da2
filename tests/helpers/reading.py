"""Readers of answers that a scheduler computes."""

from collections.abc import Iterator

from engine.generation.results import GenerationEvent
from engine.generation.scheduler import Scheduler
from engine.generation.sequence import TokenSequence


def events_of(scheduler: Scheduler, asked: TokenSequence) -> Iterator[GenerationEvent]:
    """Yield the events of an answer, and compute as its reader does.

    Raises:
        BaseException: what has ended the answer.
    """
    while asked.events or not asked.is_over:
        while asked.events:
            yield asked.events.popleft()
        if not asked.is_over:
            scheduler.step()
    if asked.error is not None:
        raise asked.error


def read(scheduler: Scheduler, asked: TokenSequence) -> list[GenerationEvent]:
    """Return all events of an answer; see `events_of`."""
    return list(events_of(scheduler, asked))
