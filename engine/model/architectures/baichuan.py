"""Baichuan 1 and 2: Llama with rotated positions (7B) or ALiBi (13B)."""

from __future__ import annotations

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import Block, TransformerBlock
from engine.model.layers.hparams import HParams
from engine.model.layers.mixers.attention import AlibiAttention
from engine.model.layers.rope import Rope

N_LAYER_13B = 40
"""Number of layers of the 13B model; no key tells the two models apart, for llama.cpp neither."""


class BaichuanAlibiBlock(TransformerBlock):
    """Llama's block with ALiBi."""

    mixer_type = AlibiAttention


@register("baichuan")
class Baichuan(CausalLM):
    """Baichuan (arXiv 2309.10305); the converter permuted q and k for adjacent rotation pairs."""

    block_type = TransformerBlock

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        return BaichuanAlibiBlock if hp.n_layer == N_LAYER_13B else cls.block_type

    def rope_of(self, layer: int) -> Rope | None:
        return None if self.hp.n_layer == N_LAYER_13B else super().rope_of(layer)
