"""Number of CPU threads that each rank of a plan computes with."""

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
"""Smallest weights of a rank, in bytes, for which it gets more than one thread unasked; less stays
in the caches of one core's neighbourhood."""


def threads_per_rank(cpu_threads: int | None, plan: Plan) -> int:
    """Return the threads of each rank, so that the ranks on the CPU together use what was asked.

    A small model is done sooner by one thread than by waiting for a second at every operation,
    above all on a machine that has other things to do.

    Args:
        cpu_threads: threads of all ranks together; all usable cores if None.
    """
    on_cpu = busy_on_cpu(plan)
    if cpu_threads is None and all(d.memory.weights < ONE_THREAD_BYTES for d in on_cpu):
        return 1
    asked = min(cpu_threads or usable_cores(), os.cpu_count() or 1)
    return max(1, asked // max(1, len(on_cpu)))


def busy_on_cpu(plan: Plan) -> list[DevicePlan]:
    """Return the ranks on the CPU that hold something."""
    return [d for d in plan.devices if d.device == "cpu" and d.memory.total]


@dataclass(frozen=True, slots=True)
class TokenWork:
    """Bytes and operations of a token's weights; KV cache, attention and activations not counted.

    Attributes:
        n_bytes: bytes of weights, as in the file, that are read for one token and its logits: of
            the experts only those that it is routed to, of the embedding one row.
        n_flop: multiplications and additions of one token without its logits.
        n_head_flop: multiplications and additions of its logits.
    """

    n_bytes: float
    n_flop: float
    n_head_flop: float

    def prompt_flop(self, n_tokens: int) -> float:
        """Return the operations of a prompt, with the logits of its last token."""
        return n_tokens * self.n_flop + self.n_head_flop


def token_work(path: str | Path) -> TokenWork:
    """Return the least bytes and operations of one token of the model in `path`.

    Raises:
        ModelFileError: the file cannot be run.
    """
    with GGUFFile.open(path) as file:
        return work_of(declare(file, LoadParams(str(file.path))))


def work_of(declaration: Declaration) -> TokenWork:
    """Return the least bytes and operations of one token of a declared model."""
    n_bytes = n_flop = n_head_flop = 0.0
    model = declaration.model
    head = model.token_embd if declaration.hp.tied else model.output
    for slot in declaration.slots:
        block = split_name(slot.tensor.name)
        if block is not None and block[0] >= declaration.hp.n_trunk:
            continue  # it only guesses
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
    """Return the part of a tensor that one token needs: of routed experts some, else all."""
    block = split_name(slot.tensor.name)
    if block is None or not isinstance(slot.owner, ExpertLinear):
        return 1.0
    return declaration.hp.n_expert_used[block[0]] / slot.tensor.shape[0]
