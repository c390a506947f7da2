"""A loaded model, of which each process is one rank: rank 0 answers, the others follow it.

The model code is the same as on ranks that are threads, and gives the same logits to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import numpy as np

from engine.cpu.kernels.isa import chosen
from engine.distributed.orders import Orders
from engine.distributed.process_rank import ProcessRank, follow
from engine.distributed.process_runtime import ProcessRuntime
from engine.errors import NoDevice
from engine.generation.answers import Answers
from engine.generation.occupancy import Occupancy
from engine.generation.prompts import Prompts
from engine.generation.scheduling.own import own_sequence
from engine.generation.scheduling.scheduler import Scheduler
from engine.generation.scheduling.stream import AnswerStream
from engine.gguf.identity import model_hash
from engine.gguf.reader import GGUFFile
from engine.hardware.torch_devices import kind_of, torch_device
from engine.models.info import describe
from engine.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.config.load import LoadParams
    from engine.config.sampling import SamplingParams
    from engine.distributed.wire import GlooWire
    from engine.sampling.token_source import Logits


class RankModel:
    """A loaded model, of which this process is one rank.

    All processes load it and close it. In between, rank 0 is asked, and the others follow it.

    Args:
        params: parameters of the load, equal in all processes.
        wire: connections to the other ranks.

    Attributes:
        rank: rank of this process.
        leader: what can be asked on rank 0; None on the others.

    Raises:
        EngineError: the file or the split cannot be used, or another rank is gone.
    """

    def __init__(self, params: LoadParams, wire: GlooWire) -> None:
        with GGUFFile.open(params.path) as file:
            name = params.devices[wire.rank]
            wire.introduce(name, _kind(name), model_hash(file))
            self._prompts = Prompts(file, describe(file).name, params.chat_template)
            self.rank = ProcessRank(file, params, wire)
        most_bytes = wire.least_of_all(self.rank.plan.checkpoint_bytes)
        self._orders = Orders(wire)
        self.leader: Leader | None = None
        if wire.rank == 0:
            self.leader = Leader(self.rank, self._orders, self._prompts, most_bytes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on this rank's split, file and GPU that a person should see."""
        slower = tuple(fallback.sentence for fallback in self.rank.fallbacks.current)
        return self.rank.plan.warnings + self._prompts.warnings + slower

    def follow(self) -> None:
        """Do what rank 0 does, until it closes the model.

        Raises:
            EngineError: this rank cannot do it, or another one is gone or asks nothing.
        """
        follow(self.rank, self._orders)

    def close(self) -> None:
        """Free all memory, on rank 0 once the others stop following; safe to call twice."""
        if self.leader is not None:
            self.leader.close()
        self.rank.close()


class Leader:
    """What can be asked of a model whose ranks are processes, on rank 0.

    Args:
        rank: rank of this process.
        orders: orders to the other ranks.
        prompts: writer of the model's prompts.
        checkpoint_bytes: most bytes of recurrent states that are kept for later answers.

    Attributes:
        scheduler: what decides who of the answers is computed.
    """

    def __init__(
        self, rank: ProcessRank, orders: Orders, prompts: Prompts, checkpoint_bytes: int
    ) -> None:
        self._runtime = ProcessRuntime(rank, orders)
        self.scheduler = Scheduler(self._runtime, checkpoint_bytes)
        self._answers = Answers(prompts, self._runtime.n_ctx, is_marked=not rank.can_rewind)
        self._occupancy = Occupancy()

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, is_cancelled: IsCancelled = never
    ) -> AnswerStream:
        """Return the events of an answer; see `engine.api.Model.generate`."""
        steps = self._answers.plain(prompt, params, timed_every=0)
        return AnswerStream(self._occupancy, self.scheduler, steps, is_cancelled)

    def logits(self, ids: Sequence[int]) -> Logits:
        """Return the logits (len(ids), n_vocab) after each of `ids`, as a fresh sequence.

        Raises:
            EngineError: the tokens cannot be computed, or a rank is gone.
        """
        with self._occupancy.use("it computes logits"):
            self.scheduler.check(ids)
            with own_sequence(self.scheduler, self._runtime) as sequence:
                return np.concatenate(list(sequence.compute(ids, 0)))

    def close(self) -> None:
        """Have the other ranks stop following, unless they are lost; safe to call twice."""
        self._occupancy.close(self._runtime.close)


def _kind(name: str) -> str:
    """Return the kind of a device of this host; ranks of one kind compute the same bits."""
    try:
        device = torch_device(name)
    except NoDevice:  # reported later, once the other processes know of this one
        return name
    return kind_of(device) if device.type == "cuda" else f"{name} {chosen()}"
