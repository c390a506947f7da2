"""How far an answer is, in words."""

from __future__ import annotations

from app.core.engine_client import AnswerStage, RunningAnswer
from app.core.translation import tr
from app.core.units import decimal


def status_text(answer: RunningAnswer) -> str:
    """Return what stands below an answer while it is being written."""
    if answer.stage is AnswerStage.WAITING:
        return tr("Waiting…")
    if answer.stage is AnswerStage.READING and answer.n_read < answer.n_prompt:
        reading = tr("Reading the prompt · {done} of {total} tokens")
        return reading.format(done=answer.n_read, total=answer.n_prompt)
    return decimal(f"{answer.tokens_per_s:.1f} tok/s") if answer.tokens_per_s else "…"


def stage_text(answer: RunningAnswer) -> str:
    """Return what stands beside its chat in the list of running answers."""
    if answer.stage is AnswerStage.WAITING:
        return tr("waiting")
    if answer.stage is AnswerStage.READING:
        share = round(100 * answer.n_read / max(1, answer.n_prompt))
        return tr("reading the prompt · {share} %").format(share=share)
    if not answer.tokens_per_s:
        return tr("writing")
    rate = decimal(f"{answer.tokens_per_s:.1f}")
    return tr("writing · {rate} tok/s").format(rate=rate)
