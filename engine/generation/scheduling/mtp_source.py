"""Guesses of running answers by the model's own MTP blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine.decoding.drafting.ngram import Guess, GuessSource, Kind, NgramSource
from engine.generation.kv_cache import OutOfPages
from engine.generation.scheduling.drafts import Drafts
from engine.model.forward.batch import MAX_AT_ONCE, Batch, Piece

if TYPE_CHECKING:
    from engine.generation.scheduling.requests import Request
    from engine.load_params import LoadParams
    from engine.runtime.model_runner import ModelRunner

MTP = Kind("mtp", first_share=0.7)
"""Class of all guesses of MTP blocks."""


N_HELD = 32
"""Number of tokens behind a guess that a device does not sample ahead: guesses are made where no
other work is under way, and mostly more of them are to be made."""


class MTPSource:
    """Guesses for all running answers by the MTP blocks of the model that computes them.

    They go on from the hidden state of an answer's last token, so an answer whose tokens are
    not all computed but for the next one has no guess. Neither has one whose tokens a device is
    sampling ahead: it stops to do so, and the guess is made once these tokens are read.

    Args:
        runtime: the model.
        tokens: token of each row of the block's head, if these are not those of the model.
    """

    kind = MTP

    def __init__(self, runtime: ModelRunner, tokens: Sequence[int] = ()) -> None:
        self._runtime, self._tokens = runtime, tokens

    @property
    def can_guess(self) -> bool:
        """Whether the model has an MTP block that guesses."""
        return self._runtime.drafter is not None

    @property
    def most(self) -> int:
        """Largest number of guesses for a text: as many as there are blocks; 0 for any number."""
        drafter = self._runtime.drafter
        return 0 if drafter is None else drafter.max_drafts

    def move(self, runtime: ModelRunner) -> None:
        """Go on with another runtime."""
        self._runtime = runtime

    def guess(self, texts: Mapping[Request, Sequence[int]], most: int) -> Mapping[Request, Guess]:
        """Return up to `most` tokens that may follow each text, see `GuessSource`."""
        drafter, source = self._runtime.drafter, self._runtime.token_source
        if drafter is None or (source is not None and not source.hold(N_HELD)):
            return {}
        most = min(most, self.most or most)
        requests = [request for request in texts if _is_ready(request, most)]
        if not requests or len(requests) > MAX_AT_ONCE:
            return {}
        found = [[request.wanted[-1]] for request in requests]
        for n in range(most):
            batch = Batch(tuple(_piece(request, n) for request in requests), 0)
            logits = drafter.draft([tokens[-1] for tokens in found], batch, n)
            for tokens, row in zip(found, logits.argmax(-1).tolist(), strict=True):
                tokens.append(self._tokens[row] if self._tokens else row)
        return {
            request: Guess(tokens[1:], MTP) for request, tokens in zip(requests, found, strict=True)
        }

    def n_unread(self, texts: Mapping[Request, Sequence[int]]) -> int:
        """Return 0: what the block has not read is little, and read along with a guess."""
        return 0

    def forget(self, answer: Request) -> None:
        """Do nothing: what is kept belongs to the answer's place."""


def guess_sources(params: LoadParams, mtp: MTPSource) -> list[GuessSource[Request]]:
    """Return what guesses for the answers of a model that is loaded as `params` say.

    A draft model is not among them.
    """
    sources: list[GuessSource[Request]] = []
    if params.draft not in ("off", "mtp"):
        sources.append(NgramSource())
    if mtp.can_guess:
        sources.append(mtp)
    return sources


def guess_ways(
    params: LoadParams, mtp: MTPSource, draft_model: GuessSource[Request] | None
) -> dict[str, Drafts]:
    """Return guesses of each kind for a model that is loaded as `params` say, to compare them.

    Returns:
        Guesses by kind: "off" first, which are none, then "ngram", "mtp" and "model", as far as
        there are some.
    """
    found = {"off": Drafts()}
    if not params.n_draft:
        return found
    found["ngram"] = Drafts(params.n_draft, [NgramSource()])
    if mtp.can_guess:
        found["mtp"] = Drafts(params.n_draft, [NgramSource(), mtp])
    if draft_model is not None:
        found["model"] = Drafts(params.n_draft, [NgramSource(), draft_model])
    return found


def _is_ready(request: Request, n: int) -> bool:
    """Return whether all tokens but the next one are computed; make sure of pages for n more."""
    if request.place is None or request.n_missing != 1 or not request.place.n:
        return False
    try:
        request.place.sequence.reserve(n)
    except OutOfPages:
        return False
    return True


def _piece(request: Request, n: int) -> Piece:
    """Return where the n-th token from the next one on of an answer belongs."""
    place = request.place
    assert place is not None, "it is ready"
    shift = request.pictures.shift(place.n)
    return Piece(place.n + n, 1, place.tables, place.slot, place.seat, shift=shift)
