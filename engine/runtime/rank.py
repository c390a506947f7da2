"""One rank of a loaded model: what it holds, and one forward pass of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.planning.memory import MemoryUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.forward.context import Context
    from engine.forward.recording import TokenRecording
    from engine.forward.weight import Weight
    from engine.gpu.decode.rank_capture import CaptureTask
    from engine.gpu.decode.sampling import WordExchange
    from engine.gpu.decode.token_stream import TokenStep
    from engine.gpu.launch.graph import Captured
    from engine.models.declare import Declaration
    from engine.runtime.backend import Backend
    from engine.runtime.micro_batches import MicroBatches


class Rank:
    """Slices of the weights and a part of the cache, on one device.

    Args:
        declaration: of the model, with modules of its own, whose attributes are its slices.
        storage: how it holds matrices, see `engine.planning.plan.DevicePlan`.
        backend: what it computes with.
        micro_batches: computes batches in halves, where hosts do not wait for devices in sums.

    Attributes:
        is_idle: it has no part of the model.
        token: what is computed next when it is computed singly, int64 (1,).
        recording: repeats a token; None as long as there is none.
        refusal: why there will be none; "" if there may be one.
    """

    def __init__(
        self, declaration: Declaration, storage: str, context: Context,
        backend: Backend, micro_batches: MicroBatches | None = None,
    ) -> None:  # fmt: skip
        self.model = declaration.model
        self.slots = declaration.slots
        self.states = declaration.states
        self.storage = storage
        self.context = context
        self.backend = backend
        self.micro_batches = micro_batches
        self.is_idle = context.rank not in declaration.split.holders
        self.recording: TokenRecording | Replay | None = None
        self.refusal = (
            ""
            if backend.records or backend.captures
            else "its device has no kernels that can be repeated"
        )
        self.token = torch.zeros(1, dtype=torch.int64, device=context.device)

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

    def compute(
        self, ids: Tensor, n_past: int, first_logit: int, *, in_micro_batches: bool = False
    ) -> Tensor | None:
        """Run ids (T,) after `n_past` cached tokens: `CausalLM.forward`."""
        if in_micro_batches and self.micro_batches:
            logits = self.micro_batches.compute(self.model, self.context, ids, n_past, first_logit)
        else:
            self.context.begin(n_past, len(ids), first_logit)
            logits = self.model.forward(ids.to(self.context.device), self.context)
        self._forget()
        return logits

    def record(self, token: int, n_past: int) -> Tensor | None:
        """Run one token and record how, or note in `refusal` why that cannot be repeated.

        There must have been one token by itself before: what is made once is made then.
        """
        self.begin(token, n_past)
        recorder = self.backend.recorder(self._memory())
        if recorder is None:
            return self.forward()
        self.context.recorder = recorder
        try:
            logits = recorder.record(self.forward)
        finally:
            self.context.recorder = None
        self._forget()
        self.recording = recorder.recording(self.context.rank, self._memory())
        self.refusal = recorder.refusal
        return logits

    def forward(self) -> Tensor | None:
        """The token that `begin` wrote, from nothing but what lies in memory."""
        return self.model.forward(self.token, self.context)

    def capture_task(self, token: int, n_past: int) -> CaptureTask:
        """The same as what can be captured, for a model with ranks on GPUs."""
        from engine.gpu.decode.rank_capture import CaptureTask

        return CaptureTask(
            lambda: self.begin(token, n_past),
            self.forward,
            lambda: self.captured(self.forward),
            self.context.cache.recurrent_tensors(),
        )

    def token_step(
        self, n_vocab: int, one_shot: WordExchange | None, *, can_rewind: bool
    ) -> TokenStep | None:
        """How it takes part in drawing tokens on devices; None if it has no part of the model.

        Args:
            one_shot: to the others that draw.
        """
        from engine.gpu.decode.token_stream import TokenStep

        if self.is_idle:
            return None
        own = range(*self.model.split.output.spans[self.number])
        return TokenStep(
            self.device, n_vocab, self.token, self.context.position, self.begin, self._sliced,
            can_rewind, own, one_shot, self.context.cache.recurrent_tensors(),
        )  # fmt: skip

    def _sliced(self) -> tuple[Tensor | None, Tensor | None]:
        """As `forward`, but each rank keeps its logits; and what these were computed from."""
        context = self.context
        context.is_sliced, context.head_input = True, None
        try:
            logits = self.forward()
            stream = context.head_input
        finally:
            context.is_sliced, context.head_input = False, None
        return logits, None if stream is None else stream[-1]

    def captured(self, compute: Callable[[], Tensor | None]) -> Captured[Tensor | None]:
        """What repeats `compute`: a graph, or just computing it where others have graphs.

        Raises:
            NotRepeatable: see `engine.gpu.launch.graph`.
        """
        if self.backend.captures and not self.is_idle:
            return self.backend.capture(compute)
        from engine.gpu.decode.rank_capture import Recomputed

        found = Recomputed(lambda: self._anew(compute), is_idle=self.is_idle)
        found.replay()  # others have parts of graphs, between which they meet this one
        return found

    def _anew(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        found = compute()
        self._forget()
        return found

    def repeat(self, token: int, n_past: int) -> Tensor | None:
        """Run one token as the recorded one."""
        assert self.recording is not None, "there is nothing to repeat"
        assert not isinstance(self.recording, Replay), "what was captured is started"
        self.begin(token, n_past)
        return self.recording.run()

    def restart(self, token: int, n_past: int) -> None:
        """Start one token as the one that was captured."""
        self.begin(token, n_past)
        self.start()

    def start(self) -> None:
        """The same where `begin` was called already."""
        assert isinstance(self.recording, Replay), "there is nothing to start"
        self.recording.start()

    def begin(self, token: int, n_past: int) -> None:
        """Write what differs from token to token."""
        self.token.fill_(token)
        self.context.begin(n_past, 1, 0)

    def _memory(self) -> Sequence[Tensor]:
        """What kernels use beside what a pass allocates, as it is now."""
        return [*self.backend.memory, *self.context.ops.memory]

    def _forget(self) -> None:
        self.backend.forget()

    def let_go(self) -> None:
        """Forget what holds on to weights and caches beside the places where they belong."""
        self.recording = None
        if self.micro_batches is not None:
            self.micro_batches.forget()
        self.context.ops = self.backend.make_ops()
        self.backend.release()

    def close(self) -> None:
        """End its threads; safe to call twice."""
        self.backend.close()


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

    @property
    def is_whole(self) -> bool:
        """Any thread may start it, see `engine.gpu.launch.graph.Captured`."""
        return self._captured.is_whole

    def start(self) -> None:
        """Start it on the device."""
        self._captured.replay()

    @property
    def result(self) -> Tensor | None:
        """What it gave last; on a GPU in memory that the next one writes anew."""
        found = self._captured.result
        return found.clone() if found is not None and found.is_cpu else found


def bytes_of(value: Weight | Tensor) -> int:
    """Bytes of a slot's value."""
    return value.nbytes if isinstance(value, Tensor) else value.n_bytes
