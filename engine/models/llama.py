"""Llama and what shares its blocks: Llama 1-3, Mistral, Mixtral (routed experts)."""

from __future__ import annotations

from engine.models.base import CausalLM, TransformerBlock
from engine.models.registry import register


@register("llama")
class Llama(CausalLM):
    """arXiv 2302.13971; the converter has permuted q and k for neighbouring rotation pairs."""

    block_type = TransformerBlock
