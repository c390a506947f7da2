"""Kimi Delta Attention: the delta rule with a decay per channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import SIGMOID, SILU, DeltaInputs
from engine.model.forward.state import RecurrentState
from engine.model.layers.linear import Linear, Vector
from engine.model.layers.mixers.attention import split_heads
from engine.model.layers.mixers.conv import CausalConv
from engine.model.layers.mixers.delta_net import DeltaNet, DeltaSizes
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams
    from engine.model.layers.rope import Rope


class KimiDeltaAttention(DeltaNet):
    """Delta net with a decay per channel and as many key heads as value heads (arXiv 2510.26692).

    Queries, keys and values have a convolution each. Decays and gates come through low-rank maps;
    every rank with heads holds the first matrix of each map whole.
    """

    tensor_names: ClassVar = {"out_proj": "attn_output"}
    gate_act = SIGMOID

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        heads, n_head, dim = split.state_heads, self.sizes.n_head, self.sizes.head_dim
        by_head, owners, n_out = Shard(0, heads), Replicate(heads.owners()), n_head * dim
        self.attn_q = Linear(hp.n_embd, n_out, by_head)
        self.attn_k = Linear(hp.n_embd, n_out, by_head)
        self.attn_v = Linear(hp.n_embd, n_out, by_head)
        n_taps, channels = hp.keys.integer("ssm.conv_kernel"), heads.scaled(dim)
        self.ssm_conv1d_q = CausalConv(n_out, n_taps, channels)
        self.ssm_conv1d_k = CausalConv(n_out, n_taps, channels)
        self.ssm_conv1d_v = CausalConv(n_out, n_taps, channels)
        self.ssm_f_a = Linear(hp.n_embd, dim, owners)
        self.ssm_f_b = Linear(dim, n_out, by_head)
        self.ssm_dt = Vector((n_out,), by_head, (".bias",))
        self.ssm_a = Vector((n_head, 1), by_head, ("",))
        self.ssm_beta = Linear(hp.n_embd, n_head, by_head)
        self.ssm_g_a = Linear(hp.n_embd, dim, owners)
        self.ssm_g_b = Linear(dim, n_out, by_head)
        self.out_proj = Linear(n_out, hp.n_embd, Shard(1, heads), split.group)
        memory = self.ssm_conv1d_q.memory
        self.state = RecurrentState(q=memory, k=memory, v=memory, matrix=(heads, (dim, dim)))

    @classmethod
    def sizes_of(cls, hp: HParams, layer: int) -> DeltaSizes:
        n_head = hp.n_head[layer]
        if n_head < 1:
            raise hp.keys.invalid(f"block {layer} has no heads")
        return DeltaSizes(n_head, n_head, hp.keys.integer("kda.head_dim"))

    def inputs(self, x: Tensor, ctx: Context) -> tuple[DeltaInputs, Tensor]:
        dim = self.sizes.head_dim
        q = self.ssm_conv1d_q(self.attn_q(x), ctx, self.state, "q", SILU)
        k = self.ssm_conv1d_k(self.attn_k(x), ctx, self.state, "k", SILU)
        v = self.ssm_conv1d_v(self.attn_v(x), ctx, self.state, "v", SILU)
        inputs = DeltaInputs(
            split_heads(q, dim),
            split_heads(k, dim),
            split_heads(v, dim),
            split_heads(self.ssm_f_b(self.ssm_f_a(x)), dim),
            self.ssm_dt().view(-1, dim),
            self.ssm_a().flatten(),
            self.ssm_beta(x),
            None,
            self.hp.norm_eps,
        )
        return inputs, self.ssm_g_b(self.ssm_g_a(x))
