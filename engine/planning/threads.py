"""Number of CPU threads per rank in a plan."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.formats.gguf.reader import GGUFFile
from engine.formats.gguf.tensors import split_name
from engine.hardware.devices.host import usable_cores
from engine.load_params import LoadParams
from engine.model.architectures.declare import Declaration, declare
from engine.model.layers.linear import Embedding, ExpertLinear

if TYPE_CHECKING:
    from engine.model.layers.module import Slot
    from engine.planning.plan import DevicePlan, Plan

ONE_THREAD_BYTES = 64 << 20
"""A rank with fewer weight bytes gets one thread by default; they fit into one core's caches."""


def threads_per_rank(cpu_threads: int | None, plan: Plan) -> int:
    """Return the number of threads per rank; the ranks on the CPU share `cpu_threads`.

    For a small model, one thread is faster than waiting for a second thread at every operation,
    especially on a busy machine.

    Args:
        cpu_threads: total threads over all ranks; None means one per usable core.
    """
    on_cpu = busy_on_cpu(plan)
    if cpu_threads is None and all(d.memory.weights < ONE_THREAD_BYTES for d in on_cpu):
        return 1
    n_threads = min(cpu_threads or usable_cores(), os.cpu_count() or 1)
    return max(1, n_threads // max(1, len(on_cpu)))


def busy_on_cpu(plan: Plan) -> list[DevicePlan]:
    """Return the ranks on the CPU that hold anything."""
    return [d for d in plan.devices if d.device == "cpu" and d.memory.total]


@dataclass(frozen=True, slots=True)
class TokenWork:
    """Bytes and operations per token for weights, without KV cache, attention and activations.

    Attributes:
        n_bytes: weight bytes, as in the file, that are read for one token and its logits; includes
            only the experts that the token is routed to, and one row of the embedding.
        n_flop: multiplications and additions for one token, except those for its logits.
        n_head_flop: multiplications and additions for the logits.
    """

    n_bytes: float
    n_flop: float
    n_head_flop: float

    def prompt_flop(self, n_tokens: int) -> float:
        """Return the operations for a prompt, including the logits for its last token."""
        return n_tokens * self.n_flop + self.n_head_flop


def token_work(path: str | Path) -> TokenWork:
    """Return the minimum bytes and operations per token for the model in `path`.

    Raises:
        ModelFileError: the model cannot be run.
    """
    with GGUFFile.open(path) as file:
        return work_of(declare(file, LoadParams(str(file.path))))


def work_of(declaration: Declaration) -> TokenWork:
    """Return the minimum bytes and operations per token for a declared model."""
    n_bytes = n_flop = n_head_flop = 0.0
    model = declaration.model
    head = model.token_embd if declaration.hp.tied else model.output
    for slot in declaration.slots:
        block = split_name(slot.tensor.name)
        if block is not None and block[0] >= declaration.hp.n_trunk:
            continue  # such a block only drafts
        if isinstance(slot.owner, Embedding) and slot.owner is not head:
            n_bytes += slot.tensor.row_bytes
            continue
        used = _used_part(slot, declaration)
        n_bytes += used * slot.tensor.n_bytes
        flop = 2 * used * slot.tensor.n_elements if slot.is_matrix else 0.0
        if slot.owner is head:
            n_head_flop += flop
        else:
            n_flop += flop
    return TokenWork(n_bytes, n_flop, n_head_flop)


def _used_part(slot: Slot, declaration: Declaration) -> float:
    block = split_name(slot.tensor.name)
    if block is None or not isinstance(slot.owner, ExpertLinear):
        return 1.0
    return declaration.hp.n_expert_used[block[0]] / slot.tensor.shape[0]
