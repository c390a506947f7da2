"""Values that operations take beside tensors: activations, visibility, routing, rotations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, log, pi
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Gating = Literal["softmax", "sigmoid", "softmax_chosen"]

RopeStyle = Literal["norm", "neox"]

BETA_FAST, BETA_SLOW = 32.0, 1.0
"""YaRN's bounds in rotations; for most architectures, llama.cpp does not read the file's."""


@dataclass(frozen=True, slots=True)
class Activation:
    """What happens between the matrices.

    Attributes:
        kind: "silu"; "gelu" (tanh approximation); "relu"; "relu2" (ReLU squared); "oai": gpt-oss's
            SiLU of 1.702 × gate times (up + 1); "sigmoid".
        limit: the gate is kept below this and the factor within ±limit; 0 for no limits.
    """

    kind: Literal["silu", "gelu", "relu", "relu2", "oai", "sigmoid"] = "silu"
    limit: float = 0.0


OAI_ALPHA = 1.702
"""Factor on the gate inside the sigmoid of "oai"."""

SILU, GELU, RELU2 = Activation("silu"), Activation("gelu"), Activation("relu2")
SIGMOID = Activation("sigmoid")


@dataclass(frozen=True, slots=True)
class Scores:
    """How queries and keys become weights.

    Attributes:
        scale: factor on the scores.
        window: a query sees so many tokens, itself included; 0 for all before it.
        chunk: a query sees only tokens of its own block of so many; 0 for all before it.
        softcap: scores s become softcap × tanh(s / softcap); 0 for none.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0

    def first_visible(self, position: int) -> int:
        """The first position that any query from `position` on sees."""
        first = max(0, position - self.window + 1) if self.window else 0
        return max(first, position // self.chunk * self.chunk) if self.chunk else first


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token finds its experts and what each of them counts.

    Attributes:
        n_used: experts of a token; where layers differ, the most.
        gating: scores from the router's logits: softmax over all experts, sigmoid of each, or
            softmax over the chosen ones only.
        normalise: the weights of the chosen experts are divided by their sum.
        scale: factor on the weights.
        n_group: experts form so many groups, of which the `n_group_used` best are chosen first; a
            group is as good as its two best experts together (DeepSeek V3).
    """

    n_expert: int
    n_used: int
    gating: Gating = "softmax"
    normalise: bool = True
    scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1


class DeltaInputs(NamedTuple):
    """What a layer's tokens bring to the value heads of a rank, as the projections have it.

    Attributes:
        q, k: (T, key heads of the rank, head_dim); they are brought to length one.
        v: (T, n_head, head_dim)
        step: what decays are made of, before bias and softplus: (T, n_head), or (T, n_head,
            head_dim) with one per channel.
        step_bias: the same without T.
        rate: of forgetting, negative, (n_head,); the logarithm of a decay is a step times this.
        beta: how much of a value replaces what its key finds, (T, n_head), before the sigmoid.
        key_of: the key head of each value head, int64 (n_head,); None where each has its own.
        eps: the least length that queries and keys are divided by.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    step: Tensor
    step_bias: Tensor
    rate: Tensor
    beta: Tensor
    key_of: Tensor | None
    eps: float

    @property
    def scale(self) -> float:
        """Of queries of length one."""
        return float(self.q.shape[-1] ** -0.5)


class ScanInputs(NamedTuple):
    """What a layer's tokens bring to the heads of a rank, as the projections have it.

    Attributes:
        values: (T, n_head, head_dim)
        step: what steps are made of, before bias and softplus, (T, n_head).
        step_bias: (n_head,)
        rate: of forgetting, negative, (n_head,).
        b, c: what writes to states and reads them, (T, groups of the rank, n_state).
        skip: how much of a value goes past the state, (n_head,).
        gate: (T, n_head × head_dim); its SiLU is a factor on what is read.
        key_of: the group of each head, int64 (n_head,); None where each has its own.
    """

    values: Tensor
    step: Tensor
    step_bias: Tensor
    rate: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor
    gate: Tensor
    key_of: Tensor | None


@dataclass(frozen=True, slots=True)
class RopeParams:
    """How positions turn into angles.

    Attributes:
        n_rot: elements of a head that are rotated; the rest passes through.
        style: how elements are paired.
        base: frequencies are base^(-2i / n_rot).
        scale: 1 / the factor by which the context was stretched.
        yarn: blend scaled and unscaled frequencies (YaRN) instead of scaling all (linear).
        n_ctx_orig: context before stretching, in tokens.
        attn_factor: extra factor on cos and sin.
        beta_fast, beta_slow: rotations within the context before stretching; pairs that make more
            than the first are not scaled by YaRN, those that make less than the second fully.
    """

    n_rot: int
    style: RopeStyle
    base: float
    scale: float = 1.0
    yarn: bool = False
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    beta_fast: float = BETA_FAST
    beta_slow: float = BETA_SLOW

    def unscaled(self, base: float) -> RopeParams:
        """The same for layers with a sliding window, which need no stretching."""
        return replace(self, base=base, scale=1.0, yarn=False, attn_factor=1.0)

    def yarn_bounds(self) -> tuple[float, float]:
        """Pair indices between which YaRN (arXiv 2309.00071) blends, rounded as in llama.cpp."""

        def pair_of(rotations: float) -> float:
            return self.n_rot * log(self.n_ctx_orig / (rotations * 2 * pi)) / (2 * log(self.base))

        low, high = floor(pair_of(self.beta_fast)), ceil(pair_of(self.beta_slow))
        return max(0, low), min(self.n_rot - 1, high)

    def mscale(self, multiplier: float = 1.0) -> float:
        """YaRN's m(x) = 1 + 0.1 x ln(stretch), by which attention is sharpened; 1 without YaRN."""
        return 1.0 - 0.1 * multiplier * log(self.scale) if self.yarn and self.scale < 1 else 1.0

    def balanced(self, mscale: float, mscale_all: float) -> RopeParams:
        """The same with m(mscale) / m(mscale_all) instead of m(1) on cos and sin."""
        ratio = self.mscale(mscale) / self.mscale(mscale_all)
        return replace(self, attn_factor=self.attn_factor * ratio / self.mscale())

    def magnitude(self) -> float:
        """The factor on cos and sin; YaRN sharpens attention by 0.1 ln(stretch) + 1."""
        return self.attn_factor * (1.0 - 0.1 * log(self.scale) if self.yarn else 1.0)
