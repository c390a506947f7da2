"""One rank of a loaded model: what it holds, and one forward pass of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.ops.recorder import Recorder, Recording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.context import Context
    from engine.events import MemoryUse
    from engine.models.base import CausalLM
    from engine.ops.worker import Worker


class Rank:
    """Slices of the weights and a part of the cache, on one device.

    Args:
        held: bytes of these.
        worker: what it computes with, where it uses the CPU's kernels.
    """

    def __init__(
        self, model: CausalLM, context: Context, held: MemoryUse, worker: Worker | None
    ) -> None:
        self.model = model
        self.context = context
        self.held = held
        self.worker = worker
        self.recording: Recording | None = None
        self.refusal = "" if worker else "its device has no kernels that can be repeated"
        self._id = torch.zeros(1, dtype=torch.int64)

    def compute(self, ids: Tensor, n_past: int, first_logit: int) -> Tensor | None:
        """Run ids (T,) after `n_past` cached tokens: `CausalLM.forward`."""
        self.context.begin(n_past, len(ids), first_logit)
        logits = self.model.forward(ids.to(self.context.device), self.context)
        self._forget()
        return logits

    def record(self, token: int, n_past: int) -> Tensor | None:
        """Run one token and record how, or note in `refusal` why that cannot be repeated.

        There must have been one token by itself before: what is made once is made then.
        """
        if self.worker is None:
            return self.compute(torch.tensor([token]), n_past, 0)
        self._begin(token, n_past)
        recorder = Recorder(self.worker.team, self._memory())
        self.context.recorder = recorder
        try:
            logits = recorder.record(lambda: self.model.forward(self._id, self.context))
        finally:
            self.context.recorder = None
        self._forget()
        self.recording = recorder.recording(self.context.rank, self._memory())
        self.refusal = recorder.log.refusal
        return logits

    def repeat(self, token: int, n_past: int) -> Tensor | None:
        """Run one token as the recorded one."""
        assert self.recording is not None, "there is nothing to repeat"
        self._begin(token, n_past)
        return self.recording.run()

    def _begin(self, token: int, n_past: int) -> None:
        self._id.fill_(token)
        self.context.begin(n_past, 1, 0)

    def _memory(self) -> Sequence[Tensor]:
        """What kernels use beside what a pass allocates, as it is now."""
        assert self.worker is not None
        return [*self.worker.memory, *self.context.ops.memory]

    def _forget(self) -> None:
        if self.worker is not None:
            self.worker.forget()
