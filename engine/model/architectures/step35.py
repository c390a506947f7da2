"""Step 3.5: attention with a gate per head, and experts with clamped activations."""

from __future__ import annotations

from dataclasses import replace

from engine.model.architectures.base import SwaRopeLM
from engine.model.architectures.deepseek import SigmoidRoutedBlock
from engine.model.architectures.registry import register
from engine.model.forward.operands import Activation, RopeParams
from engine.model.layers.ffn import FFN, MoE, separate
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import GatedAttention
from engine.model.layers.module import TensorSource


class Step35Block(SigmoidRoutedBlock):
    """A block with limits of its own: one for routed experts, one for shared and dense FFNs."""

    mixer_type = GatedAttention

    def limited(self, part: str) -> Activation:
        """Return the activation of "exp" (routed) or "shexp" (shared) experts."""
        limits = self.hp.keys.numbers(f"swiglu_clamp_{part}", self.hp.n_layer, 0.0)
        return Activation("silu", limits[self.layer])

    def make_dense(self) -> FFN:
        hp, split = self.hp, self.split
        n_ff, act = hp.n_ff[self.layer], self.limited("shexp")
        return FFN(hp.n_embd, n_ff, split.ffn, split.group, act)

    def make_experts(self) -> MoE:
        routed, shared = self.limited("exp"), self.limited("shexp")
        return MoE(self.hp, self.split, self.layer, self.routing(), routed, shared_act=shared)


@register("step35")
class Step35(SwaRopeLM):
    """Step 3.5 Flash and the text of 3.7; in files the one of norms' weights is already added."""

    traits = Traits(rope_style="neox", swa_period=4, swa_first_full=True, mtp_hidden="raw")
    block_type = Step35Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Halve the rotated elements of the layers without a window.

        Raises:
            InvalidGGUF: there are no windows, or a RoPE does not fit its heads.
        """
        hp.require_windows()
        return super().refine(replace(hp, rope=replace(hp.rope, n_rot=hp.rope.n_rot // 2)))

    @classmethod
    def swa_rope(cls, hp: HParams) -> RopeParams:
        n_rot = hp.keys.integer("rope.dimension_count", max(hp.head_dim_k))
        n_rot = hp.keys.integer("rope.dimension_count_swa", n_rot)
        return replace(super().swa_rope(hp), n_rot=n_rot)

    @classmethod
    def adapt(cls, source: TensorSource, hp: HParams) -> None:
        """Leave out frequency divisors that only layers with a window would use: they are ones."""
        super().adapt(source, hp)
        found, n = source.tensors.get("rope_freqs.weight"), hp.rope.n_rot // 2
        if found is not None and (n_rest := found.shape[0] - n) > 0:
            separate(source, "rope_freqs", (("rope_freqs", n), ("rope_freqs_rest", n_rest)), ())
