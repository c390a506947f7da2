"""Nemotron 3 and 4, Minitron: GPT-2's block with squared ReLU and rotated positions."""

from __future__ import annotations

from engine.forward.operands import RELU2
from engine.layers.hparams import Traits
from engine.models.base import CausalLM
from engine.models.gpt2 import GPT2Block
from engine.models.registry import register


class NemotronBlock(GPT2Block):
    """GPT-2's block with squared ReLU; in files the one of norms' weights is already added."""

    act = RELU2


@register("nemotron")
class Nemotron(CausalLM):
    """Nemotron (arXiv 2402.16819)."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = NemotronBlock
