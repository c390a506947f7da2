"""A small llama in torch: tensor names and rotary pairs as in GGUF's llama architecture."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class HParams:
    """The shape of the network, under the names that llama.cpp uses."""

    n_vocab: int = 1536
    n_embd: int = 256
    n_layer: int = 4
    n_head: int = 8
    n_head_kv: int = 4
    n_ff: int = 512
    n_ctx: int = 1024
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


Past = tuple[Tensor, Tensor]
"""Keys and values of one layer's earlier tokens (batch, n_head_kv, tokens, head_dim)."""
Cache = list[Past]


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the pairs (0, 1), (2, 3), ... of x (batch, tokens, heads, head_dim).

    `turn` (tokens, 1, pairs) are complex numbers of length 1.
    """
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


class Block(nn.Module):
    """One layer: attention, then a gated feed-forward part."""

    def __init__(self, hp: HParams) -> None:
        super().__init__()
        self.hp = hp
        kv = hp.n_head_kv * hp.head_dim
        self.attn_norm = nn.RMSNorm(hp.n_embd, eps=hp.norm_eps)
        self.attn_q = nn.Linear(hp.n_embd, hp.n_embd, bias=False)
        self.attn_k = nn.Linear(hp.n_embd, kv, bias=False)
        self.attn_v = nn.Linear(hp.n_embd, kv, bias=False)
        self.attn_output = nn.Linear(hp.n_embd, hp.n_embd, bias=False)
        self.ffn_norm = nn.RMSNorm(hp.n_embd, eps=hp.norm_eps)
        self.ffn_gate = nn.Linear(hp.n_embd, hp.n_ff, bias=False)
        self.ffn_up = nn.Linear(hp.n_embd, hp.n_ff, bias=False)
        self.ffn_down = nn.Linear(hp.n_ff, hp.n_embd, bias=False)

    def forward(self, x: Tensor, turn: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        h = self.attn_norm(x)
        q, k, v = (self._heads(linear(h)) for linear in (self.attn_q, self.attn_k, self.attn_v))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, turn), rotate(k, turn), v))
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        gqa = self.hp.n_head // self.hp.n_head_kv
        mixed = F.scaled_dot_product_attention(
            q, k.repeat_interleave(gqa, 1), v.repeat_interleave(gqa, 1), is_causal=past is None
        )
        x = x + self.attn_output(mixed.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h)), (k, v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.hp.head_dim)


class Llama(nn.Module):
    """The whole network; the head is tied to the embedding."""

    turn: Tensor

    def __init__(self, hp: HParams) -> None:
        super().__init__()
        self.hp = hp
        self.token_embd = nn.Embedding(hp.n_vocab, hp.n_embd)
        self.blk = nn.ModuleList(Block(hp) for _ in range(hp.n_layer))
        self.output_norm = nn.RMSNorm(hp.n_embd, eps=hp.norm_eps)
        pairs = torch.arange(0, hp.head_dim, 2).float() / hp.head_dim
        angles = torch.outer(torch.arange(hp.n_ctx).float(), hp.rope_base**-pairs)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        self.register_buffer("turn", turn, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Normal, but each layer starts as a no-op: its last matrices are zero."""
        for name, weight in self.named_parameters():
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                nn.init.zeros_(weight)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=self.hp.n_embd**-0.5)

    def hidden(
        self, ids: Tensor, cache: Cache | None = None, drop: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """States before the head for ids (batch, tokens), and the keys and values so far.

        `drop` marks tokens whose embedding is left out.
        """
        start = cache[0][0].shape[2] if cache else 0
        turn = self.turn[start : start + ids.shape[1]]
        x = self.token_embd(ids)
        if drop is not None:
            x = x.masked_fill(drop[..., None], 0.0)
        new: Cache = []
        for i, block in enumerate(self.blk):
            x, past = block(x, turn, cache[i] if cache else None)
            new.append(past)
        return self.output_norm(x), new

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.token_embd.weight)
