"""Matrices with the same cut share one piece of a GPU's memory, and are freed together."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from engine.backends.gpu.loading.weight_loader import Arenas
from engine.formats.gguf.tensors import TYPES, TensorInfo
from engine.model.layers.module import Module, Slot
from engine.model.sharding.placement import Placement, Replicate, Shard
from engine.model.sharding.shares import Ranges
from engine.planning.footprint import padding_of_parts, tensor_parts

CPU, MIB = torch.device("cpu"), 1 << 20
HALVES = Shard(0, Ranges(((0, 1), (1, 2)), 2))
SHAPE = (2560, 4096)  # half of it is 5.8 MiB in planes


def slot(name: str, placement: Placement = HALVES, shape: tuple[int, ...] = SHAPE) -> Slot:
    tensor = TensorInfo(name, TYPES[Kind.Q8_0], shape, 0, 0)
    return Slot(Module(), "weight", tensor, placement, is_matrix=True)


def memory_of(*slots: Slot) -> list[torch.Tensor]:
    """Return the memory of rank 0's planes of some tensors, loaded one after the other."""
    arenas = Arenas(slots, 0, CPU)
    n_bytes = SHAPE[0] // 2 * SHAPE[1] * 17 // 16
    return [arenas.zeros(one, (n_bytes,), torch.uint8) for one in slots]


def n_pieces(*slots: Slot) -> int:
    return len({x.untyped_storage().data_ptr() for x in memory_of(*slots)})


def test_what_is_cut_alike_is_together() -> None:
    gate, up = slot("blk.0.ffn_gate.weight"), slot("blk.0.ffn_up.weight")
    assert n_pieces(gate, up) == 1
    assert n_pieces(gate, slot("blk.1.ffn_up.weight")) == 2, "another block"
    assert n_pieces(gate, slot("blk.0.attn_q.weight")) == 2, "another part"
    assert n_pieces(gate, slot("blk.0.ffn_up_exps.weight")) == 2, "experts have another cut"
    assert n_pieces(gate, slot("blk.0.ffn_up.weight", Replicate((0, 1)))) == 2, "not cut"
    assert n_pieces(slot("output.weight"), slot("token_embd.weight")) == 2, "outside of blocks"


def test_what_is_small_shares_torchs_segments() -> None:
    small = [slot(f"blk.0.ffn_{name}.weight", shape=(512, 4096)) for name in ("gate", "up")]
    arenas = Arenas(small, 0, CPU)
    both = [arenas.zeros(one, (256, 4352), torch.uint8) for one in small]
    assert both[0].untyped_storage().data_ptr() != both[1].untyped_storage().data_ptr()


def test_parts_are_apart_aligned_and_zero() -> None:
    first, second = memory_of(slot("blk.0.ffn_gate.weight"), slot("blk.0.ffn_up.weight"))
    assert (second.data_ptr() - first.data_ptr()) % 512 == 0
    assert not first.any()
    first.fill_(7)
    assert not second.any()
    arenas = Arenas([slot("blk.0.attn_q.weight"), slot("blk.0.attn_k.weight")], 0, CPU)
    half = arenas.zeros(slot("blk.0.attn_q.weight"), (3, 5), torch.float16)
    assert (half.shape, half.dtype) == ((3, 5), torch.float16)


def test_memory_is_free_once_nothing_uses_it() -> None:
    slots = slot("blk.0.ffn_gate.weight"), slot("blk.0.ffn_up.weight")
    arenas = Arenas(slots, 0, CPU)
    n_bytes = SHAPE[0] // 2 * SHAPE[1] * 17 // 16
    held = [arenas.zeros(one, (n_bytes,), torch.uint8) for one in slots]
    base = weakref.ref(held[0]._base)
    assert base() is not None
    held.pop()
    held.pop()
    gc.collect()
    assert base() is None, "the arenas keep nothing that is full"


@pytest.mark.parametrize("n", [2, 3])
def test_rounding_counts_once_for_all_that_are_together(n: int) -> None:
    slots = [slot(f"blk.0.ffn_{name}.weight") for name in ("gate", "up", "down")[:n]]
    size = SHAPE[0] // 2 * SHAPE[1] * 17 // 16
    whole = -(-n * size // (2 * MIB)) * 2 * MIB
    parts = tensor_parts(slots, 0, "kernels")
    assert padding_of_parts(parts, "kernels") == whole - n * size
    named = [replace(one, tensor=replace(one.tensor, name=f"x{k}")) for k, one in enumerate(slots)]
    apart = tensor_parts(named, 0, "kernels")
    assert padding_of_parts(apart, "kernels") > whole - n * size
