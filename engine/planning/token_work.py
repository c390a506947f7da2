"""Least bytes and operations of a token, from a file's header alone: no torch, no weights.

Beside a device's bandwidth and compute they say how close a measured speed is to its limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.formats.gguf.reader import GGUFFile
from engine.formats.gguf.tensors import split_name
from engine.load_params import LoadParams
from engine.model.architectures.declare import Declaration, declare
from engine.model.layers.linear import Embedding, ExpertLinear

if TYPE_CHECKING:
    from engine.model.layers.module import Slot


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
