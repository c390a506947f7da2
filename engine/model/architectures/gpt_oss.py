"""gpt-oss: attention sinks, a window on every second layer, experts with clamped SwiGLU."""

from __future__ import annotations

from typing import ClassVar

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.forward.operands import Activation
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.attention import SinkAttention


class GptOssBlock(TransformerBlock):
    """A block with attention sinks and experts gated by a softmax over the chosen ones."""

    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}
    mixer_type = SinkAttention
    act = Activation("oai", limit=7.0)
    gating = "softmax_chosen"


@register("gpt-oss")
class GptOss(CausalLM):
    """gpt-oss (arXiv 2508.10925); biases load where a file has them."""

    traits = Traits(rope_style="neox", swa_period=2)
    block_type = GptOssBlock
