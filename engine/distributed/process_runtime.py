"""Runtime of a model whose ranks are processes, in the one of rank 0, which orders the others."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.distributed.process_rank import CLOSE
from engine.errors import EngineError
from engine.forward.batch import Batch, Piece
from engine.sampling.slices import (
    SliceCandidates,
    SliceQuery,
    n_candidates,
    sample_gathered,
    slice_query,
)

if TYPE_CHECKING:
    from torch import Tensor

    from engine.distributed.orders import Orders
    from engine.distributed.process_rank import ProcessRank
    from engine.runtime.interface import SlotState
    from engine.runtime.rank import Rank
    from engine.sampling.sampler import Sampler
    from engine.sampling.token_source import Logits, SamplingWish


INTERRUPTED = EngineError(
    "A rank was interrupted in the middle of a step.", "Start all ranks again."
)
"""Error of whatever is asked for once an order has ended without saying why."""


class ProcessRuntime:
    """A `PagedRuntime` whose ranks are processes; this is the one of rank 0.

    Whatever fails in the middle of an order leaves the ranks at different places, so nothing more
    can be computed after that.

    Args:
        own: rank of this process.
        orders: orders to the other ranks.
    """

    finds_states = False

    def __init__(self, own: ProcessRank, orders: Orders) -> None:
        assert own.number == 0, "rank 0 orders"
        self._own, self._orders = own, orders
        self.n_vocab = own.hp.n_vocab
        self.n_ctx, self.n_batch = own.plan.n_ctx, own.plan.n_batch
        self.can_rewind, self.groups = own.can_rewind, own.groups
        self.n_slots = own.plan.cache_size.n_slots
        self.token_source: SliceSource | None = SliceSource(self)
        self._ended: EngineError | None = None
        self._n_saved = 0
        self._dropped: list[int] = []

    def _together(self, order: str, *values: Any) -> Any:
        """Have all ranks do something; return what this one has found.

        Raises:
            EngineError: a rank cannot do it or is gone, now or before.
        """
        self.finish()
        try:
            self._orders.send(order, *values)
            return self._own.do(order, *values)
        except BaseException as error:
            self._ended = INTERRUPTED
            if isinstance(error, EngineError):
                self._ended = EngineError(error.message, error.hint)
            raise

    @property
    def ranks(self) -> Sequence[Rank]:
        """Rank of this process, as a sequence of one; empty once nothing can be computed."""
        return () if self._ended else (self._own.rank,)

    @property
    def guesser(self) -> None:
        """Nothing: ranks that are processes do not load MTP blocks."""
        return None

    @property
    def n_running(self) -> int:
        """Number of tokens that are started but not computed yet: none."""
        return 0

    def forward(self, ids: Sequence[int], batch: Batch) -> Logits:
        """Run the rows of a batch; see `PagedRuntime.forward`."""
        found: Logits | None = self._together("compute", list(ids), *batch)
        return np.empty((0, self.n_vocab), np.float32) if found is None else found

    def sample(
        self, ids: Sequence[int], batch: Batch, wishes: Sequence[SamplingWish | None]
    ) -> Sequence[Logits]:
        """Run the rows of a batch; return their logits, as this process samples all."""
        return list(self.forward(ids, batch))

    def candidates(self, token: int, piece: Piece, query: SliceQuery) -> Sequence[SliceCandidates]:
        """Run a token; return the top candidates of each slice of the vocabulary for the next."""
        found = self._together("candidates", token, piece, query)
        return [SliceCandidates.unpack(row) for row in found]

    def logits_again(self) -> Logits:
        """Return the logits (n_vocab,) of the token that `candidates` ran last."""
        row: Logits = self._together("logits_again")[0]
        return row

    def finish(self) -> None:
        """Do nothing, as each pass ends by waiting for the devices.

        Raises:
            EngineError: an earlier order has failed.
        """
        if self._ended is not None:
            raise EngineError(self._ended.message, self._ended.hint)

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy a page of a group on all ranks."""
        self._together("copy_page", group, source, target)

    def clear_slot(self, slot: int) -> None:
        """Make the recurrent states of a place those of an empty sequence."""
        self._together("clear_slot", slot)

    def move_slot(self, source: int, target: int) -> None:
        """Copy the recurrent states of a place to another one."""
        self._together("move_slot", source, target)

    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        """Keep a copy of the recurrent states of a place, each rank of its own part.

        Returns:
            What stands for the copy, and the bytes of all parts.
        """
        key, self._n_saved = self._n_saved, self._n_saved + 1
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        self._together("save_slot", slot, key, dropped)
        saved = PartsElsewhere(key)
        weakref.finalize(saved, self._dropped.append, key)
        return saved, self._own.slot_bytes

    def load_slot(self, slot: int, state: SlotState) -> None:
        """Make the recurrent states of a place those of a copy that `save_slot` kept."""
        assert isinstance(state, PartsElsewhere), "no other copies are known to the ranks"
        self._together("load_slot", slot, state.key)

    def close(self) -> None:
        """Have the other ranks stop following, unless they are lost; safe to call twice."""
        if self._ended is None:
            self._ended = EngineError("The model has been unloaded.", "Load it again.")
            with suppress(EngineError):
                self._orders.send(CLOSE)


class PartsElsewhere(list["Mapping[str, Tensor]"]):
    """Stand-in for copies of recurrent states that the ranks keep, each of its own part.

    Attributes:
        key: number of the copies.
    """

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key = key


class SliceSource:
    """A `TokenSource` that samples from the top candidates of each rank's slice of the logits.

    It computes nothing ahead.

    Attributes:
        waited_s: seconds in which the host waited for a device; always 0.
    """

    waited_s = 0.0

    def __init__(self, runtime: ProcessRuntime) -> None:
        self._runtime = weakref.ref(runtime)
        self._sampler: Sampler | None = None
        self._never: Sequence[int] = ()

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        """Sample as `sampler` would; return False where that takes all logits."""
        runtime = self._runtime()
        self._sampler, self._never = sampler, never
        return runtime is not None and n_candidates(sampler, runtime.n_vocab) is not None

    def next(self, token: int, piece: Piece, n_left: int) -> int | Logits:
        """Run a token; return the next one, or logits where the candidates do not suffice."""
        runtime, sampler = self._runtime(), self._sampler
        assert runtime is not None, "it is asked through its runtime"
        assert sampler is not None, "serve is called first"
        query = slice_query(sampler, runtime.n_vocab, self._never)
        assert query is not None, "serve has said so"
        found = sample_gathered(sampler, runtime.candidates(token, piece, query))
        return runtime.logits_again() if found is None else found

    def stop(self) -> Sequence[int]:
        """Return the tokens computed ahead: none."""
        return ()
