"""Activations rounded to BF16 for `vdpbf16ps`, which multiplies twice as many numbers as F32."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu.kernels import compiled
from engine.cpu.kernels.team import Team


class Bf16Rows:
    """Memory for the activations that were rounded last; several matrices often multiply the same.

    Attributes:
        memory: what kernels read.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._last: Tensor | None = None
        self.memory = torch.empty(0, dtype=torch.bfloat16)

    def address(self, x: Tensor) -> int:
        """Round activations x (T, n), F32.

        Returns:
            Address of the rounded ones, contiguous, valid until the next call.
        """
        if x is not self._last:
            rows = x if x.stride(-1) == 1 else x.contiguous()
            if self.memory.numel() < x.numel():
                self.memory = torch.empty(x.numel(), dtype=torch.bfloat16)
            self._team.wake()
            compiled.round_rows()(
                self._team.address, rows.data_ptr(), 4 * rows.stride(0), *rows.shape,
                self.memory.data_ptr(),
            )  # fmt: skip
            self._last = x
        return self.memory.data_ptr()

    def forget(self) -> None:
        """Release the last activations."""
        self._last = None

    def release(self) -> None:
        """Free the memory."""
        self.forget()
        self.memory = torch.empty(0, dtype=torch.bfloat16)
