"""Nemotron 3 and 4, Minitron: GPT-2's block with squared ReLU and rotated positions."""

from __future__ import annotations

from engine.model.architectures.base import CausalLM
from engine.model.architectures.gpt2 import GPT2Block
from engine.model.architectures.registry import register
from engine.model.forward.operands import RELU2
from engine.model.layers.hparams import Traits


class NemotronBlock(GPT2Block):
    """GPT-2's block with squared ReLU; in files the one of norms' weights is already added."""

    act = RELU2


@register("nemotron")
class Nemotron(CausalLM):
    """Nemotron (arXiv 2402.16819)."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = NemotronBlock
