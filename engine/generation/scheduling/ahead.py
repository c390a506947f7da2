"""Sampling of one answer's tokens on a device, ahead of their reader."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits
    from engine.generation.scheduling.requests import Request
    from engine.generation.work import Follow
    from engine.model.forward.batch import Piece
    from engine.runtime.model_runner import ModelRunner


class Ahead:
    """The token source of a runtime, and the answer that it serves.

    Where a device has computed tokens that nobody has read, and recurrent states cannot go back,
    they become a part of the sequence: mostly it is the token that has ended the answer, with which
    the next turn begins.

    Attributes:
        request: the answer; None while there is none.
        sampled_at: when its last token was read, in seconds of `time.perf_counter`, as the device
            has computed the next one since then; None if it has not.
    """

    def __init__(self, runtime: ModelRunner) -> None:
        self._runtime = runtime
        self.request: Request | None = None
        self.sampled_at: float | None = None
        self._lost: Follow | None = None  # what the device could not do, so that the host does it

    def move(self, runtime: ModelRunner) -> None:
        """Go on with another runtime."""
        self._runtime = runtime

    @property
    def is_beyond(self) -> bool:
        """Whether states have seen the answer's last token already, and cannot go back."""
        source = self._runtime.token_source
        return self.request is not None and source is not None and source.is_beyond

    def can_serve(self, work: Follow) -> bool:
        """Return whether a device can do some work, and sample the next token."""
        source = self._runtime.token_source
        is_open = not work.wants_logits and work.allowed is None
        if source is None or not is_open or work is self._lost:
            return False
        return source.serve(work.sampler, work.never)

    def follow(
        self, request: Request, work: Follow, piece: Piece, n_left: int
    ) -> int | Logits | None:
        """Have the device compute a token and sample the next one; see `TokenSource.next`.

        Args:
            n_left: number of tokens for which there are pages.
        """
        source = self._runtime.token_source
        assert source is not None, "it can serve"
        self.request = request
        found = source.next(work.token, piece, n_left)
        self.sampled_at = time.perf_counter() if isinstance(found, int) else None
        if found is None:
            request.is_ahead, self._lost = True, work
        return found

    def stop(self, request: Request | None = None) -> None:
        """End sampling there, and note if the answer's states have seen what nobody has read.

        Args:
            request: answer to do it for, if it is served; None for any.
        """
        served, source = self.request, self._runtime.token_source
        if served is None or request not in (None, served):
            return
        self.request = self.sampled_at = None
        beyond = source.stop() if source is not None else ()
        if beyond:
            served.note_ahead(beyond)
