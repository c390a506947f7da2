"""One rank of a loaded model: what it holds, and one forward pass of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.events import MemoryUse
from engine.ops.fast import FastOps
from engine.ops.recorder import Recorder, Recording
from engine.ops.reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.context import Context
    from engine.gpu.card import Card
    from engine.gpu.graph import Captured
    from engine.models.declare import Declaration
    from engine.ops.weights import Weight
    from engine.ops.worker import Worker
    from engine.session import TokenSource


class Rank:
    """Slices of the weights and a part of the cache, on one device.

    Args:
        declaration: of the model, with modules of its own, whose attributes are its slices.
        storage: how it holds matrices, see `engine.plan.DevicePlan`.
        worker: what it computes with, where it uses the CPU's kernels.
        card: the same where it uses those for GPUs.
        is_alone: no other rank has a part of the model.
    """

    def __init__(
        self, declaration: Declaration, storage: str, context: Context,
        worker: Worker | None = None, card: Card | None = None, *, is_alone: bool = True,
    ) -> None:  # fmt: skip
        self.model = declaration.model
        self.slots = declaration.slots
        self.states = declaration.states
        self.storage = storage
        self.context = context
        self.worker = worker
        self.card = card
        self.is_alone = is_alone
        self.recording: Recording | Replay | None = None
        self.refusal = "" if worker or card else "its device has no kernels that can be repeated"
        if card and not is_alone:
            self.refusal = "GPUs meet between the kernels"
        self._id = torch.zeros(1, dtype=torch.int64, device=context.device)

    @property
    def number(self) -> int:
        """Its place among all ranks."""
        return self.context.rank

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def held(self) -> MemoryUse:
        """Bytes of weights and of the cache."""
        values = (self.value(index) for index in range(len(self.slots)))
        weights = sum(bytes_of(value) for value in values if value is not None)
        on_host = self.context.cache.host_bytes
        return MemoryUse(weights, self.context.cache.n_bytes - on_host, host_kv=on_host)

    def value(self, index: int) -> Weight | Tensor | None:
        """What it holds of a slot; None if it has no part of it, or not yet."""
        slot = self.slots[index]
        value: Weight | Tensor | None = getattr(slot.owner, slot.attribute)
        return value

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
        self._begin(token, n_past)
        if self.card is not None:
            return self._capture(self.card)
        if self.worker is None:
            return self._forward()
        recorder = Recorder(self.worker.team, self._memory())
        self.context.recorder = recorder
        try:
            logits = recorder.record(self._forward)
        finally:
            self.context.recorder = None
        self._forget()
        self.recording = recorder.recording(self.context.rank, self._memory())
        self.refusal = recorder.log.refusal
        return logits

    def _forward(self) -> Tensor | None:
        """One token, of which all that matters lies in memory already."""
        return self.model.forward(self._id, self.context)

    def _capture(self, card: Card) -> Tensor | None:
        if not self.refusal:
            captured, self.refusal = card.capture(self._forward)
            if captured is not None:
                self.recording = replay = Replay(captured)
                return replay.result
        return self._forward()

    def token_stream(self, n_vocab: int, n_past: int, *, can_rewind: bool) -> TokenSource | None:
        """What draws tokens where they are computed; None where that cannot be.

        Args:
            n_past: cached tokens, which stay.
        """
        if self.card is None or self.refusal:
            return None
        return self.card.token_stream(
            n_vocab, self._id, self.context.position, self._begin, self._forward, n_past,
            can_rewind=can_rewind,
        )  # fmt: skip

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

    def let_go(self) -> None:
        """Forget what holds on to weights and caches beside the places where they belong."""
        self.recording = None
        self.context.ops = make_ops(self.worker, self.card)
        if self.worker is not None:
            self.worker.release()

    def close(self) -> None:
        """End its threads; safe to call twice."""
        if self.worker is not None:
            self.worker.close()


def warm_rows(most: int) -> list[int]:
    """Tokens at once that need, all together, every kernel that a pass on a GPU may start.

    How kernels are cut up changes at powers of two, if anywhere.

    Args:
        most: tokens of a pass.
    """
    return [*(1 << n for n in range((most - 1).bit_length())), most]


class Replay:
    """Computes one more token as one was captured."""

    def __init__(self, captured: Captured[Tensor | None]) -> None:
        self._captured = captured

    def run(self) -> Tensor | None:
        """What it gives."""
        self._captured.replay()
        return self.result

    @property
    def result(self) -> Tensor | None:
        """What it gave last; on a GPU in memory that the next one writes anew."""
        found = self._captured.result
        return found.clone() if found is not None and found.is_cpu else found


def make_ops(worker: Worker | None, card: Card | None = None) -> ReferenceOps:
    """The arithmetic of a rank that computes with one of them, or with neither."""
    if card is not None:
        return card.make_ops()
    return FastOps(worker.team) if worker else ReferenceOps()


def bytes_of(value: Weight | Tensor) -> int:
    """Bytes of a slot's value."""
    return value.nbytes if isinstance(value, Tensor) else value.n_bytes
