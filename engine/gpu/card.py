"""What a rank on a GPU computes with, as a `Worker` is for a rank on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.gpu.compiling import Compiling
from engine.gpu.graph import Captured, NotRepeatable, capture
from engine.gpu.ops import GpuOps
from engine.gpu.rehearsal import rehearse
from engine.gpu.sampling import draw_starts
from engine.gpu.stream import TokenStep, TokenStream
from engine.gpu.target import target_of

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.models.declare import Declaration

log = logging.getLogger(__name__)


class Card:
    """Kernels for one GPU, and what is captured of a token on it.

    Args:
        x_bytes: of a quantised activation, see `engine.footprint.x_bytes`.

    Attributes:
        target: what kernels are compiled for.
    """

    def __init__(self, device: torch.device, x_bytes: int) -> None:
        self.device = device
        self.x_bytes = x_bytes
        self.target = target_of(device)

    @property
    def compiles(self) -> bool:
        """Whether a kernel's first start takes longer than the others."""
        return self.target.maker != "interpreter"

    def compile_ahead(
        self, declaration: Declaration, rank: int, params: LoadParams, row_counts: Sequence[int],
        note: Callable[[str], None],
    ) -> Compiling:  # fmt: skip
        """Begin to compile what passes over so many rows will start.

        Args:
            declaration: with modules that nobody else uses.
            note: told how far it is, as a sentence; "" at the end.
        """
        starts = rehearse(declaration, rank, params, self.target, row_counts)
        if len(declaration.split.holders) == 1:
            starts += draw_starts(declaration.hp.n_vocab)

        def tell(n_done: int, n_total: int) -> None:
            note(f"Compiling kernels: {n_done} of {n_total}" if n_done < n_total else "")

        return Compiling(self.device, starts, tell)

    def make_ops(self) -> GpuOps:
        """The arithmetic of one rank."""
        return GpuOps(self.device, self.x_bytes)

    def token_stream(
        self, n_vocab: int, token: Tensor, position: Tensor, begin: Callable[[int, int], None],
        forward: Callable[[], Tensor | None], n_past: int, *, can_rewind: bool,
    ) -> TokenStream | None:  # fmt: skip
        """Draws tokens on the card, see `TokenStep`; None, with a line in the log, if it cannot."""

        def logits() -> Tensor:
            found = forward()
            assert found is not None, "a rank that is alone has the output head"
            return found

        step = TokenStep(self.device, n_vocab, token, position, begin, logits, can_rewind)
        try:
            stream = TokenStream(step)
            stream.prepare(0, n_past)
        except (EngineError, NotRepeatable) as error:
            log.warning("tokens are drawn by the host, not on %s: %s", self.device, error)
            return None
        return stream

    def capture(
        self, compute: Callable[[], Tensor | None]
    ) -> tuple[Captured[Tensor | None] | None, str]:
        """What computes a token, ready to be replayed; or None, and why that cannot be."""
        try:
            return capture(self.device, compute), ""
        except NotRepeatable as error:
            log.warning("a token on %s is computed step by step: %s", self.device, error)
            return None, str(error)
