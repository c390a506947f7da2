"""Mamba 1 and 2: recurrent layers only."""

from __future__ import annotations

from typing import ClassVar

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import Block, MixerBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.mamba import Mamba
from engine.model.layers.mixers.mamba2 import Mamba2


class MambaBlock(MixerBlock):
    """A block of Mamba 1, with a state per channel."""

    mixer_type = Mamba


@register("mamba")
class MambaLM(CausalLM):
    """Mamba 1 (arXiv 2312.00752); also Falcon Mamba."""

    traits = Traits(rope_style=None, is_hybrid=True)
    block_type: ClassVar[type[Block]] = MambaBlock


class Mamba2Block(MixerBlock):
    """A block of Mamba 2, with a state per head."""

    mixer_type = Mamba2


@register("mamba2")
class Mamba2LM(MambaLM):
    """Mamba 2 (arXiv 2405.21060); also Codestral Mamba."""

    block_type = Mamba2Block
