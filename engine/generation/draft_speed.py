"""Speeds of a loaded model with each way of guessing that it allows, beside that without."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Protocol

from engine.errors import Cancelled, EngineError
from engine.generation.results import Finished
from engine.planning.search.draft_results import DraftTrial, reason_for_drafts
from engine.sampling_params import SamplingParams
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.generation.results import GenerationEvent
    from engine.generation.scheduling.drafts import Drafts
    from engine.generation.scheduling.scheduler import Scheduler
    from engine.planning.search.results import TuneResult

log = logging.getLogger(__name__)

ROUNDS = 2
"""Number of answers of each way to each prompt; the ways answer by turns."""

LEAST_TOKENS = 32
"""Least number of tokens of an answer: a choice of how many to guess takes some of them."""

PROSE = "Once upon a time there was a small village at the edge of a"
CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    raise ValueError(f"unknown shape {shape.kind}")
"""
QUOTING = f"Repeat this code exactly:\n```python\n{CODE}```\nHere it is again:\n```python\ndef area"
TEXTS: Mapping[str, tuple[str, float]] = {"prose": (PROSE, 0.8), "quoting": (QUOTING, 0.0)}
"""Prompts by what follows them, and the temperatures of the answers."""


class GuessingModel(Protocol):
    """What is measured of a loaded model; see `engine.api.Model`."""

    n_ctx: int
    scheduler: Scheduler

    def guess_ways(self) -> Mapping[str, Drafts]:
        """Return the guesses of each kind that the model allows."""
        ...

    def tokenize(self, text: str) -> Sequence[int]:
        """Return a text's tokens."""
        ...

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, is_cancelled: IsCancelled
    ) -> Iterator[GenerationEvent]:
        """Return the events of an answer."""
        ...


def measure_drafts(
    model: GuessingModel, n_tokens: int, is_cancelled: IsCancelled = never
) -> tuple[DraftTrial, ...]:
    """Measure answers without guesses, which come first, and with each way of guessing.

    Args:
        n_tokens: number of tokens of an answer.
        is_cancelled: asked again and again; returning True ends it.

    Returns:
        One entry for each way; none if there is nothing to compare.

    Raises:
        Cancelled: it was cancelled.
        EngineError: a device has failed.
    """
    before, ways = model.scheduler.drafts, model.guess_ways()
    if len(ways) < 2:
        return ()
    speeds: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    try:
        for text, (prompt, temperature) in TEXTS.items():
            ids = _ids(model, prompt)
            for turn in range(-1, ROUNDS):  # the first one compiles and records
                for way, drafts in ways.items():
                    model.scheduler.drafts = drafts
                    n = max(LEAST_TOKENS, n_tokens) if turn >= 0 else LEAST_TOKENS // 2
                    found = _speed(model, ids, temperature, n, is_cancelled)
                    if turn >= 0 and found:
                        speeds[way].setdefault(text, []).append(found)
    finally:
        model.scheduler.drafts = before
    return tuple(
        DraftTrial(way, *(median(found[text]) for text in TEXTS))
        for way, found in speeds.items()
        if all(found.get(text) for text in TEXTS)
    )


def with_draft_trials(
    result: TuneResult, measure: Callable[[], tuple[DraftTrial, ...]]
) -> TuneResult:
    """Return a search's result with what guesses bring to its best split, if `measure` can tell."""
    begun = time.perf_counter()
    try:
        drafts = measure()
    except Cancelled:
        return replace(result, is_complete=False)
    except EngineError as error:
        log.warning("guesses are not measured: %s", error)
        return result
    reason = " ".join(filter(None, (result.reason, reason_for_drafts(drafts))))
    seconds = result.seconds + time.perf_counter() - begun
    return replace(result, drafts=drafts, reason=reason, seconds=seconds)


def _ids(model: GuessingModel, prompt: str) -> Sequence[int]:
    """Return a prompt's tokens; some that repeat themselves where a model has no vocabulary."""
    with suppress(EngineError):
        return model.tokenize(prompt)
    return [3 + n % 24 for n in range(72)]


def _speed(
    model: GuessingModel, ids: Sequence[int], temperature: float, n: int, is_cancelled: IsCancelled
) -> float:
    """Return the tokens per second of an answer; 0 if it was too short to tell."""
    n = min(n, model.n_ctx // 2)
    ids = ids[-(model.n_ctx - n - 1) :]
    wanted = SamplingParams(temperature=temperature, seed=3, max_tokens=n, ignore_eos=True)
    speed = 0.0
    for event in model.generate(ids, wanted, is_cancelled):
        if isinstance(event, Finished):
            speed = event.timings.decode_per_s
    if is_cancelled():
        raise Cancelled("The search")
    return speed
