"""gpt-oss: sinks, a window on every second layer, experts with biases and clamped SwiGLU."""

from __future__ import annotations

from engine.layers.attention import SinkAttention
from engine.layers.ffn import Activation
from engine.layers.hparams import Traits
from engine.layers.moe import Routing
from engine.models.base import CausalLM, TransformerBlock
from engine.models.registry import register


class GptOssBlock(TransformerBlock):
    """Tokens weigh their experts by a softmax over the chosen ones."""

    tensor_names = {"ffn_norm": "post_attention_norm"}  # noqa: RUF012
    mixer_type = SinkAttention
    act = Activation("oai", limit=7.0)

    def routing(self) -> Routing:
        return Routing.read(self.hp, "softmax_chosen")


@register("gpt-oss")
class GptOss(CausalLM):
    """arXiv 2508.10925; all biases load by themselves."""

    traits = Traits(rope_style="neox", swa_period=2)
    block_type = GptOssBlock
