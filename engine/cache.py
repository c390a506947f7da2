"""Keys and values of the tokens computed so far, per rank, cut like the heads that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.models.hparams import HParams
    from engine.parallel.split import BlockSplit, ModelSplit

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class LayerCache:
    """Keys and values of one layer on one rank.

    Attributes:
        k: (n_head_kv of the rank, n_ctx, head_dim_k)
        v: (n_head_kv of the rank, n_ctx, head_dim_v)
        head_map: for each query head the row of k and v it uses; None where each row serves the
            same number of neighbouring heads.
    """

    def __init__(
        self, hp: HParams, split: BlockSplit, rank: int, n_ctx: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        n_kv = split.kv_heads.size(rank)
        self.k = torch.zeros(n_kv, n_ctx, hp.head_dim_k, dtype=dtype, device=device)
        self.v = torch.zeros(n_kv, n_ctx, hp.head_dim_v, dtype=dtype, device=device)
        rows = head_rows(split, rank)
        self.head_map = None if rows is None else torch.tensor(rows, device=device)

    @property
    def n_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write(self, k: Tensor, v: Tensor, start: int) -> None:
        """Store k and v (T, n_head_kv, head_dim) at positions start, start + 1, …"""
        stop = start + k.shape[0]
        self.k[:, start:stop] = k.transpose(0, 1)
        self.v[:, start:stop] = v.transpose(0, 1)

    def read(self, n: int) -> tuple[Tensor, Tensor]:
        """The first n positions in F32, each (n_head_kv or n_head, n, head_dim)."""
        k, v = self.k[:, :n].float(), self.v[:, :n].float()
        if self.head_map is not None:
            k, v = k[self.head_map], v[self.head_map]
        return k, v


def head_rows(split: BlockSplit, rank: int) -> list[int] | None:
    """Which local key-value head each local query head uses, where that is not regular."""
    start, stop = split.heads.spans[rank]
    group = split.heads.total // split.kv_heads.total
    first = split.kv_heads.spans[rank][0]
    rows = [head // group - first for head in range(start, stop)]
    n_kv = split.kv_heads.size(rank)
    share = len(rows) // n_kv
    regular = share * n_kv == len(rows) and rows == [i // share for i in range(len(rows))]
    return None if regular else rows


class KVCache:
    """All layers of one rank; None where the rank has no heads."""

    def __init__(
        self, hp: HParams, split: ModelSplit, rank: int, n_ctx: int, kv_type: str,
        device: torch.device,
    ) -> None:  # fmt: skip
        dtype = DTYPES[kv_type]
        self.layers = [
            LayerCache(hp, block, rank, n_ctx, dtype, device) if block.kv_heads.size(rank) else None
            for block in split.blocks
        ]

    @property
    def n_bytes(self) -> int:
        return sum(layer.n_bytes for layer in self.layers if layer is not None)
