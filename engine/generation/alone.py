"""Driver of an answer that has the cache alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

from engine.generation.results import GenerationEvent, PrefillProgress
from engine.generation.work import Follow, Found, Prefill, Steps
from engine.progress import never

if TYPE_CHECKING:
    from engine.generation.generate import Generation
    from engine.generation.session import Session


def run_alone(
    session: Session,
    generation: Generation,
    prompt: Sequence[int],
    is_cancelled: Callable[[], bool] = never,
) -> Generator[GenerationEvent, None, None]:
    """Yield the events of an answer, and do its work with a session.

    Args:
        is_cancelled: asked before each token and each batch of a prompt.

    Raises:
        EngineError: the prompt cannot be used, a device failed, or the session was used otherwise.
    """
    try:
        yield from _run(session, generation.run(prompt), is_cancelled)
    finally:
        if generation.is_useless:
            session.ids.clear()  # the cache may hold what made the logits useless


def _run(
    session: Session, steps: Steps, is_cancelled: Callable[[], bool]
) -> Generator[GenerationEvent, None, None]:
    turn = 0
    found: Found | None = None
    while True:
        try:
            item = steps.send(found)
        except StopIteration:
            return
        found = None
        if isinstance(item, Prefill):
            if turn:
                session.check_turn(turn)
            else:
                session.check(item.ids)
                turn = session.begin()
            item.n_cached = session.keep_common(item.ids)
            found = yield from _prefill(session, item, turn, is_cancelled)
        elif isinstance(item, Follow):
            if is_cancelled():
                found = "cancelled"
                continue
            wanted = (item.token, item.sampler, item.never, item.n_left, turn)
            if item.is_timed:
                found, times = session.timed(*wanted)
                yield times
            else:
                found = session.follow(*wanted)
        else:
            yield item


def _prefill(
    session: Session, work: Prefill, turn: int, is_cancelled: Callable[[], bool]
) -> Generator[GenerationEvent, None, Found]:
    """Compute the tokens that are not cached; return the logits of the last one."""
    total, done = len(work.ids) - len(session.ids), 0
    for chunk, first_logit in session.chunks(work.ids):
        if is_cancelled():
            return "cancelled"
        logits = session.forward(chunk, first_logit, turn)
        done += len(chunk)
        if work.is_told:
            yield PrefillProgress(done - session.n_running, total)
    row: Found = logits[0]
    return row
