"""One rank of a loaded model: its weights, its cache and its forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.backends.cpu.backend import CpuBackend
from engine.formats.gguf.tensors import split_name
from engine.model.forward.attention import computing
from engine.model.forward.batch import MAX_AT_ONCE, Batch, PassSize, Piece
from engine.model.layers.linear import CopiedHead
from engine.planning.memory import MemoryUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.backends.cpu.recorder import Recording
    from engine.backends.gpu.comm.one_shot import OneShot, OneShotGroups
    from engine.backends.gpu.decode.rank_capture import CaptureTask
    from engine.backends.gpu.decode.token_stream import TokenStep
    from engine.backends.reference.backend import Backend
    from engine.model.architectures.declare import Declaration
    from engine.model.forward.context import Context
    from engine.model.forward.operands import Weight
    from engine.model.forward.recording import Captured
    from engine.model.forward.state import State
    from engine.model.layers.module import Slot
    from engine.runtime.micro_batches import MicroBatches

DraftSize = tuple[int, int, int]
"""Index of an MTP block, number of tokens in its pass, and how many of them are only read."""


class Captures(NamedTuple):
    """Which of the ranks that hold part of a model capture single-token passes on their devices.

    Attributes:
        some: whether any rank does; the others then take part step by step, with as many rows.
        all: whether all ranks do.
    """

    some: bool
    all: bool


NO_RANKS = Captures(some=False, all=True)


class Rank:
    """One rank: its slices of the weights and its part of the cache, on one device.

    Args:
        declaration: declaration of the model, with only this rank's modules.
        storage: storage format of the rank's matrices; see `engine.planning.plan.DevicePlan`.
        context: context of the forward pass, with the cache and the communicator.
        micro_batches: computes batches as micro-batches; None if hosts run the all-reduces.

    Attributes:
        model: the rank's modules, which hold its slices of the weights.
        slots: the model's tensors and the attributes that hold the rank's parts of them.
        states: keys, values and recurrent states of the layers.
        is_idle: whether the rank has no part of the model.
        tokens: input ids for single-token passes, int64 (MAX_AT_ONCE,).
        recordings: recordings of such passes, by size.
        draft_recordings: recordings of passes over MTP blocks.
        refusal: reason why tokens cannot be recorded; "" if they can.
        elsewhere: which ranks on other machines capture.
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
        self.recordings: dict[PassSize, Recording | Replay] = {}
        self.draft_recordings: dict[DraftSize, Recording | Replay] = {}
        self.refusal = (
            ""
            if backend.records or backend.captures
            else "its device has no kernels that can be replayed"
        )
        self.elsewhere = NO_RANKS
        self.tokens = torch.zeros(MAX_AT_ONCE, dtype=torch.int64, device=context.device)

    @property
    def number(self) -> int:
        """Number of the rank, from 0."""
        return self.context.rank

    @property
    def device(self) -> torch.device:
        """Device of the rank."""
        return self.context.device

    @property
    def trunk_states(self) -> Sequence[State]:
        """Keys, values and recurrent states of the main blocks, excluding MTP blocks."""
        return self.states[: sum(len(block.states()) for block in self.model.trunk)]

    @property
    def trunk_slots(self) -> Sequence[Slot]:
        """Tensors of the main blocks and of the model's input and output, without duplicates."""
        n_trunk = self.model.hp.n_trunk
        slots = (slot for slot in self.slots if not isinstance(slot.owner, CopiedHead))
        places = ((slot, split_name(slot.tensor.name)) for slot in slots)
        return [slot for slot, place in places if place is None or place[0] < n_trunk]

    @property
    def held(self) -> MemoryUse:
        """Current size of the rank's weights and cache, in bytes."""
        values = (self.value(index) for index in range(len(self.slots)))
        weights = sum(bytes_of(value) for value in values if value is not None)
        on_host = self.context.cache.host_bytes
        return MemoryUse(weights, self.context.cache.n_bytes - on_host, host_kv=on_host)

    def value(self, index: int) -> Weight | Tensor | None:
        """Return the rank's part of a slot's tensor; None if it has none or has not loaded it."""
        slot = self.slots[index]
        value: Weight | Tensor | None = getattr(slot.owner, slot.attribute)
        return value

    def compute(
        self, ids: Tensor, batch: Batch, *, in_micro_batches: bool = False
    ) -> Tensor | None:
        """Run ids (T,), the rows of a batch; see `CausalLM.forward`."""
        if in_micro_batches and self.micro_batches:
            logits = self.micro_batches.compute(self.model, self.context, ids, batch)
        else:
            self.context.begin(batch)
            with computing(batch):
                logits = self.model.forward(
                    ids.to(self.context.device, non_blocking=True), self.context
                )
        self._forget()
        return logits

    def record(self, ids: Sequence[int], batch: Batch, block: int | None = None) -> Tensor | None:
        """Run single tokens, or an MTP block for them, and record the calls.

        If tokens cannot be replayed, set `refusal`. A pass of this size must have run before,
        because the first one allocates persistent buffers.
        """
        self.begin(ids, batch)
        if not isinstance(self.backend, CpuBackend):
            return self._pass(len(ids), block)
        recorder = self.backend.recorder(self._memory())
        self.context.run_live = recorder.run_live
        try:
            logits = recorder.record(lambda: self._pass(len(ids), block))
        finally:
            self.context.run_live = None
        self._forget()
        recording = recorder.recording(self.context.rank, self._memory())
        if recording is not None and block is None:
            self.recordings[len(ids)] = recording
        elif recording is not None and block is not None:
            self.draft_recordings[block, len(ids), batch.first_logit] = recording
        if block is None and len(ids) == 1:
            self.refusal = recorder.refusal
        return logits

    def draft(self, ids: Sequence[int], batch: Batch, block: int) -> Tensor | None:
        """Run an MTP block, given by its index, for single tokens."""
        self.begin(ids, batch)
        logits = self._pass(len(ids), block)
        self._forget()
        return logits

    def read(self, ids: Tensor, batch: Batch, block: int) -> None:
        """Have an MTP block read ids (T,), which were computed before; see `MTP.read`."""
        self.context.begin(batch)
        self.model.read(ids.to(self.context.device), self.context, block)
        self._forget()

    def _pass(self, n: int, block: int | None) -> Tensor | None:
        if block is None:
            return self.forward(n)
        return self.model.guess(self.tokens[:n], self.context, block)

    def forward(self, n: int = 1) -> Tensor | None:
        """Compute the n tokens that `begin` wrote; return their logits."""
        with computing(self.context.batch):
            return self.model.forward(self.tokens[:n], self.context)

    def capture_task(
        self, ids: Sequence[int], batch: Batch, block: int | None = None
    ) -> CaptureTask:
        """Return a pass over an MTP block or the model as a task for `capture_on_all`."""
        from engine.backends.gpu.decode.rank_capture import CaptureTask

        states = (
            ()
            if block is not None
            else self.context.cache.recurrent_tensors(
                piece.state_slot for piece in batch.pieces if piece.read_slot == piece.state_slot
            )
        )
        return CaptureTask(
            lambda: self.begin(ids, batch),
            lambda: self._pass(len(ids), block),
            lambda: self.captured(lambda: self._pass(len(ids), block)),
            states,
        )

    def token_step(
        self, n_vocab: int, one_shot: OneShot | None, *, can_rewind: bool
    ) -> TokenStep | None:
        """Return the rank's part in sampling on devices; None if the rank is idle."""
        from engine.backends.gpu.decode.token_stream import TokenStep

        if self.is_idle:
            return None
        own = range(*self.model.split.output.spans[self.number])
        return TokenStep(
            self.device, n_vocab, self.tokens[:1], self.context.position, self.begin_token,
            self._sliced, can_rewind, own, one_shot,
            lambda piece: self.context.cache.recurrent_tensors([piece.state_slot]),
            self.context.ops.extend,
        )  # fmt: skip

    def _sliced(self) -> tuple[Tensor | None, Tensor | None]:
        context = self.context
        context.is_sliced, context.head_input = True, None
        context.follow_position()
        try:
            logits = self.forward()
            hidden = context.head_input
        finally:
            context.is_sliced, context.head_input = False, None
        return logits, None if hidden is None else hidden[-1]

    def captured(self, compute: Callable[[], Tensor | None]) -> Captured[Tensor | None]:
        """Return a capture of `compute`; on ranks without a GPU, a replay recomputes it.

        Raises:
            NotRepeatable: the computation cannot be captured; see `gpu.launch.graph`.
        """
        if self.backend.captures and not self.is_idle:
            return self.backend.capture(compute)
        from engine.backends.gpu.decode.rank_capture import Recomputed

        found = Recomputed(lambda: self._recompute(compute), is_idle=self.is_idle)
        found.replay()  # takes part in the collectives between the graphs of other ranks
        return found

    def _recompute(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        found = compute()
        self._forget()
        return found

    def replay(self, ids: Sequence[int], batch: Batch, block: int | None = None) -> Tensor | None:
        """Replay the native recording made by `record`; return the logits."""
        recording = (
            self.recordings[len(ids)]
            if block is None
            else self.draft_recordings[block, len(ids), batch.first_logit]
        )
        assert not isinstance(recording, Replay), "a captured pass is started instead"
        self.begin(ids, batch)
        return recording.run()

    def start(self) -> None:
        """Start the captured graph for the tokens that `begin` wrote."""
        recording = self.recordings[self.context.batch.captured_size]
        assert isinstance(recording, Replay), "there is nothing to start"
        recording.start()

    def begin(self, ids: Sequence[int], batch: Batch) -> None:
        """Write the inputs for single tokens, their ids and positions, to memory."""
        if len(ids) == 1:
            self.tokens[:1].fill_(ids[0])
        else:
            self.tokens[: len(ids)].copy_(torch.tensor(ids))
        self.context.begin(batch)

    def begin_token(self, token: int, piece: Piece) -> None:
        """Write the inputs for one token of one sequence."""
        self.begin([token], Batch((piece,), 0))

    def _memory(self) -> Sequence[Tensor]:
        """Return the tensors that kernels currently use, except those that a pass allocates."""
        return [*self.backend.memory, *self.context.ops.memory]

    def _forget(self) -> None:
        self.backend.forget()

    def drop_references(self) -> None:
        """Drop all references to weights and caches except the rank's modules and cache."""
        self.recordings.clear()
        self.draft_recordings.clear()
        if self.micro_batches is not None:
            self.micro_batches.forget()
        self.context.ops = self.backend.make_ops()
        self.backend.release()

    def close(self) -> None:
        """Stop the backend's threads; safe to call twice."""
        self.backend.close()


FEW_ROWS = 512
"""Batch size, in tokens, up to which a pass adds little to the load time."""


def warm_rows(most: int) -> list[int]:
    """Return batch sizes that together launch every kernel that any pass on a GPU may launch.

    The choice of kernels changes only at powers of two.

    Args:
        most: maximum number of tokens per pass.
    """
    return [*(1 << n for n in range((most - 1).bit_length())), most]


def token_steps(
    ranks: Sequence[Rank], one_shots: OneShotGroups | None, n_vocab: int, *, can_rewind: bool
) -> list[TokenStep | None]:
    """Return each rank's part in sampling on devices; empty if candidates cannot be exchanged.

    Args:
        one_shots: one-shot all-reduces of the ranks' kernels; None if there are none.
        n_vocab, can_rewind: see `Rank.token_step`.
    """
    holders = tuple(rank.number for rank in ranks if not rank.is_idle)
    exchanges: dict[int, OneShot] = {}
    if len(holders) > 1 and one_shots is not None:
        found = {rank: one_shots.one_shot(rank, holders) for rank in holders}
        exchanges = {rank: one_shot for rank, one_shot in found.items() if one_shot is not None}
    if len(exchanges) < len(holders) > 1:
        return []
    return [
        rank.token_step(n_vocab, exchanges.get(rank.number), can_rewind=can_rewind)
        for rank in ranks
    ]


def rehearsed_rows(most: int) -> list[int]:
    """Return the batch sizes to compute during a load: small ones, and the largest.

    Kernels for sizes in between are already compiled. The largest batch needs the most memory.
    """
    return [n for n in warm_rows(most) if n <= FEW_ROWS or n == most]


class Replay:
    """A rank's captured pass."""

    def __init__(self, captured: Captured[Tensor | None]) -> None:
        self._captured = captured

    @property
    def is_whole(self) -> bool:
        """Whether any thread may start the replay; see `gpu.launch.graph.Captured`."""
        return self._captured.is_whole

    def start(self) -> None:
        """Start the replay on the device."""
        self._captured.replay()

    @property
    def result(self) -> Tensor | None:
        """Logits of the last replay; on a GPU, the next replay overwrites them."""
        found = self._captured.result
        return found.clone() if found is not None and found.is_cpu else found


def bytes_of(value: Weight | Tensor) -> int:
    """Return the size of a slot's value in bytes."""
    return value.nbytes if isinstance(value, Tensor) else value.n_bytes
