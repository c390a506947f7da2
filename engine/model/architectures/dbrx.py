"""DBRX: LayerNorms, clamped queries, keys and values, and routed experts."""

from __future__ import annotations

from typing import ClassVar

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.attention import ClampedAttention
from engine.model.layers.norm import LayerNorm


class DbrxBlock(TransformerBlock):
    """A block with routed experts alone, whose weights sum to 1."""

    tensor_names: ClassVar = {"ffn_norm": "attn_output_norm"}
    norm_type = LayerNorm
    mixer_type = ClampedAttention


@register("dbrx")
class Dbrx(CausalLM):
    """DBRX, Databricks' 132B model."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = DbrxBlock
