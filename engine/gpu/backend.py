"""What a rank on a GPU computes with, as a `Worker` is for a rank on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.gpu.comm.host_collectives import HostCollectives
from engine.gpu.decode.sampling import sampling_starts
from engine.gpu.launch.compiling import Compiling
from engine.gpu.launch.graph import Captured, capture
from engine.gpu.launch.target import target_of, use_target
from engine.gpu.loading.dry_run import collect_launches
from engine.gpu.ops import GpuOps

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.forward.communicator import Communicator
    from engine.models.declare import Declaration


class Card:
    """Kernels for one GPU, and what is captured of a token on it.

    Args:
        x_bytes: of a quantised activation, see `engine.planning.footprint.x_bytes`.

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
        starts = collect_launches(declaration, rank, params, self.target, row_counts)
        split, hp = declaration.split, declaration.hp
        n_embd = hp.n_embd if rank in split.last_group else None
        own = range(*split.output.spans[rank])
        with use_target(self.target):
            starts += sampling_starts(hp.n_vocab, own, len(split.holders), n_embd)

        def tell(n_done: int, n_total: int) -> None:
            note(f"Compiling kernels: {n_done} of {n_total}" if n_done < n_total else "")

        return Compiling(self.device, starts, tell)

    def make_ops(self) -> GpuOps:
        """The arithmetic of one rank."""
        return GpuOps(self.device, self.x_bytes)

    def cutting(self, inner: Communicator) -> Communicator:
        """The same collectives, made by the hosts, which cut what is captured into parts."""
        return HostCollectives(inner)

    def capture(self, compute: Callable[[], Tensor | None]) -> Captured[Tensor | None]:
        """What computes a token, ready to be replayed.

        Raises:
            NotRepeatable: that cannot be.
        """
        return capture(self.device, compute)
