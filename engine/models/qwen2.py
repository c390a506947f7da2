"""Qwen 2 and 2.5: Llama's block with biases on q, k and v."""

from __future__ import annotations

from typing import ClassVar

from engine.layers.rope import RopeStyle
from engine.models.llama import Llama
from engine.models.registry import register


@register("qwen2")
class Qwen2(Llama):
    """arXiv 2407.10671; the biases load by themselves wherever a file has them."""

    rope_style: ClassVar[RopeStyle] = "neox"
