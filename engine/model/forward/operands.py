"""Operands that are not plain tensors: weights and layers, activations, scores, routing, RoPE.

Imports no torch at run time, so that models can be declared without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, log, pi
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from engine.model.forward.pages import AttentionWindow

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.batch import Batch
    from engine.model.forward.expert_rows import Groups

Gating = Literal["softmax", "sigmoid", "softmax_chosen"]
"""Function from router logits to scores; see `Routing`."""

RopeStyle = Literal["norm", "neox"]
"""Pairing of rotated elements: adjacent (2i, 2i+1), or halves (i, i + n/2)."""

BETA_FAST, BETA_SLOW = 32.0, 1.0
"""YaRN's bounds in rotations; llama.cpp reads them from files only for a few architectures."""

ALL = slice(None)

NO_SLICE = "a rank without a slice must not call it"
"""Message for assertions that a rank has weights."""


class Weight(Protocol):
    """A matrix (n_out, n_in), or one per expert."""

    @property
    def n_bytes(self) -> int:
        """Size of the matrix in bytes."""

    def matmul(self, x: Tensor) -> Tensor:
        """Return `x Wᵀ`, (T, n_out), for x (T, n_in) in F32."""

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` (T,) as (T, n_in); zeros for ids that this rank does not hold."""

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        """Multiply each row of x (n_row, n_in) by its expert's matrix (grouped GEMM).

        On CPUs, x may instead have one row per token, (T, n_in), if there are fewer tokens than
        rows.
        """

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        """Return `x Wᵀ` with one matrix per head, (T, n_head, n_out), for x (T, n_head, n_in).

        Args:
            rows: rows of each W to multiply by.
            transposed: whether to return `x W`, (T, n_head, n_in), for x (T, n_head, n_out).
        """


class LinearLayer:
    """Arithmetic of a linear map; `engine.model.layers.linear.Linear` declares its tensors.

    Attributes:
        weight: this rank's part of (n_out, n_in), or None.
        bias: this rank's part of (n_out,), or None.
        scale: factor on the whole matrix, (1,) (ternary and NVFP4 models), or None.
        is_partial: whether the result is a partial sum, because W is split by columns.
    """

    weight: Weight | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    is_partial = False

    def __call__(self, x: Tensor) -> Tensor:
        """Map this rank's slice of x (T, n_in) to its slice or partial sum of y (T, n_out)."""
        assert self.weight is not None, NO_SLICE
        return self.finish(self.weight.matmul(x))

    @property
    def is_bare(self) -> bool:
        """Whether the layer has neither bias nor scale."""
        return self.scale is None and self.bias is None

    @property
    def added_bias(self) -> Tensor | None:
        """Bias to add on this rank, (n_out,); None for a partial sum."""
        return None if self.is_partial else self.bias

    def finish(self, y: Tensor) -> Tensor:
        """Apply scale and bias to a product y (T, this rank's n_out)."""
        if self.scale is not None:
            y = y * self.scale
        return y if self.added_bias is None else y + self.added_bias


class ExpertLayer:
    """Arithmetic of linear maps, one per routed expert, all split the same way; see `ExpertLinear`.

    Attributes:
        weight: this rank's part of all experts, (n_expert, n_out, n_in), or None.
        bias: this rank's part of (n_expert, n_out), or None.
        scale: factor on each expert's matrix, (n_expert,), or None.
    """

    weight: Weight | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """Map each row of x (n_row, n_in) to (n_row, n_out) with its expert's matrix."""
        assert self.weight is not None, NO_SLICE
        y = self.weight.grouped(x, groups)
        if self.scale is not None:
            y = y * self.scale[groups.expert_of, None]
        return y if self.bias is None else y + self.bias[groups.expert_of]


class NormLayer:
    """Parameters of a norm; `engine.model.layers.norm.Norm` declares its tensors.

    If the file has no such norm (`is_absent`), vectors are unchanged.
    """

    kind: ClassVar[Literal["rms", "layer"]]
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float
    is_absent = False


class RopeLayer:
    """Rotation of queries and keys by their positions; see `engine.model.layers.norm.Rope`.

    `weight` contains divisors of the frequencies (Llama 3's `rope_freqs`), (n_rot / 2,).
    """

    params: RopeParams
    weight: Tensor | None = None


class Addend(NamedTuple):
    """Value that `Context.all_reduce_add` adds to the residual stream:
    `norm(sum(partial) + bias) * scale`.

    Attributes:
        partial: this rank's partial sum, (T, n_embd); None if it has none.
        bias: vector to add to the sum once, (n_embd,).
        norm: norm of the biased sum, if any.
        is_whole: whether `partial` is already the complete sum, the same on all ranks.
        sum_scale: factor on the residual stream afterwards, (1,).
    """

    partial: Tensor | None
    bias: Tensor | None = None
    norm: NormLayer | None = None
    scale: float = 1.0
    is_whole: bool = False
    sum_scale: Tensor | None = None

    def summed(self, total: Tensor) -> Addend:
        """Return the addend with the ranks' total in place of the partial sum."""
        return self._replace(partial=total, is_whole=True)


@dataclass(frozen=True, slots=True)
class Activation:
    """Activation between the matrices of an FFN or expert.

    Attributes:
        kind: "silu"; "gelu" (tanh approximation); "relu"; "relu2" (ReLU squared); "oai" (gpt-oss):
            gate × sigmoid(1.702 × gate) × (up + 1); "sigmoid".
        limit: upper bound on the gate and on the magnitude of `up`; 0 for no limit.
    """

    kind: Literal["silu", "gelu", "relu", "relu2", "oai", "sigmoid"] = "silu"
    limit: float = 0.0


OAI_ALPHA = 1.702  # factor on the gate inside the sigmoid of "oai"

SILU, GELU, RELU2 = Activation("silu"), Activation("gelu"), Activation("relu2")
SIGMOID = Activation("sigmoid")


@dataclass(frozen=True, slots=True)
class Scores:
    """Scale, mask and soft cap of attention scores.

    Attributes:
        window: number of tokens that a query sees, including itself; 0 for no limit.
        chunk: number of tokens per chunk, if a query sees only its own chunk; 0 for no limit.
        softcap: cap of the scores: s becomes softcap × tanh(s / softcap); 0 for no cap.
        first: first visible position; MTP blocks store no earlier ones.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    first: int = 0

    @property
    def attention_window(self) -> AttentionWindow:
        """Attention window of the queries."""
        if self.chunk and not 0 < self.window <= self.chunk:
            return AttentionWindow(self.chunk, is_chunked=True)
        return AttentionWindow(self.window or None)

    def first_visible(self, position: int) -> int:
        """Return the first position visible to any query at or after `position`."""
        first = min(self.first, position)
        if self.window:
            first = max(first, position - self.window + 1)
        return max(first, position // self.chunk * self.chunk) if self.chunk else first


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a router selects each token's experts and their weights.

    Attributes:
        n_used: number of experts per token; the maximum if layers differ.
        gating: function from router logits to scores: softmax over all experts, sigmoid of each, or
            softmax over the selected ones only.
        normalise: whether the weights of the selected experts are divided by their sum.
        scale: factor on the weights.
        n_group: number of expert groups. The best groups are selected first, by the sum of the
            scores of their two best experts (DeepSeek V3).
        n_group_used: number of groups from which experts are selected.
    """

    n_expert: int
    n_used: int
    gating: Gating = "softmax"
    normalise: bool = True
    scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1


class PlacedStates(NamedTuple):
    """Recurrent states (n_slots, ...) of several sequences, read and written by a batch's rows.

    A piece's rows start from the state in its `read_slot` and write the resulting state to its
    `state_slot`. A piece that repeats the previous one has the same result and changes nothing.
    """

    held: Tensor
    batch: Batch


States: TypeAlias = "Tensor | PlacedStates"
"""State that a recurrent operation reads and updates in place: the state of a single sequence, or
those of several."""


class DeltaInputs(NamedTuple):
    """Operands of a gated delta net for a rank's value heads, as returned by the projections.

    Attributes:
        q, k: queries and keys, (T, the rank's key heads, head_dim), before their L2 norm.
        v: values, (T, n_head, head_dim).
        step: step size before bias and softplus, (T, n_head), or (T, n_head, head_dim) with one per
            channel.
        step_bias: bias of the step size, (n_head,) or (n_head, head_dim).
        rate: decay rate, negative, (n_head,); the logarithm of a decay is step × rate.
        beta: fraction of a key's old value in the state that v replaces, before the sigmoid, (T,
            n_head).
        key_of: key head of each value head, int64 (n_head,); None if each has its own.
        eps: lower bound on the lengths by which queries and keys are divided.
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
        """Factor on the queries after their L2 norm."""
        return float(self.q.shape[-1] ** -0.5)

    def rows(self, rows: slice) -> DeltaInputs:
        """Return the operands of some of the T tokens."""
        return self._replace(
            q=self.q[rows], k=self.k[rows], v=self.v[rows], step=self.step[rows],
            beta=self.beta[rows],
        )  # fmt: skip


class ScanInputs(NamedTuple):
    """Operands of a Mamba 2 scan for a rank's heads, as returned by the projections.

    Attributes:
        values: values, (T, n_head, head_dim).
        step: step size before bias and softplus, (T, n_head).
        step_bias: bias of the step size, (n_head,).
        rate: decay rate, negative, (n_head,).
        b, c: vectors that write to the states and read them, (T, the rank's groups, n_state).
        skip: factor on the values that bypass the state, (n_head,).
        gate: gate of the output before its SiLU, (T, n_head × head_dim).
        key_of: group of each head, int64 (n_head,); None if each has its own.
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

    def rows(self, rows: slice) -> ScanInputs:
        """Return the operands of some of the T tokens."""
        return self._replace(
            values=self.values[rows], step=self.step[rows], b=self.b[rows], c=self.c[rows],
            gate=self.gate[rows],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeParams:
    """Parameters of rotary position embedding: the map from positions to angles.

    Attributes:
        n_rot: number of rotated elements per head; the rest pass through.
        style: pairing of the elements: adjacent ("norm") or halves ("neox").
        base: base of the frequencies base^(-2i / n_rot).
        scale: reciprocal of the factor by which the context was stretched.
        yarn: whether scaled and unscaled frequencies are blended (YaRN) or all are scaled (linear).
        n_ctx_orig: context length before stretching, in tokens.
        attn_factor: extra factor on cos and sin.
        sections: numbers of pairs that rotate by an image token's time, row and column (M-RoPE,
            arXiv 2409.12191); () if tokens have one position. For text, all three are equal.
        is_interleaved: whether those pairs alternate (Qwen 3) instead of being contiguous.
        beta_fast, beta_slow: YaRN's bounds in rotations within `n_ctx_orig`; pairs above the first
            are not scaled, pairs below the second are scaled fully.
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
    sections: tuple[int, ...] = ()
    is_interleaved: bool = False

    def axes(self) -> tuple[int, ...]:
        """Return what each pair rotates by: time (0), row (1) or column (2)."""
        n = self.n_rot // 2
        if self.is_interleaved:
            return tuple(i % 3 if i < 3 * self.sections[i % 3] else 0 for i in range(n))
        axes = [axis for axis, size in enumerate(self.sections[:3]) for _ in range(size)]
        return tuple((axes + [0] * n)[:n])

    def unscaled(self, base: float) -> RopeParams:
        """Return the parameters without stretching, for sliding-window layers."""
        return replace(self, base=base, scale=1.0, yarn=False, attn_factor=1.0)

    def yarn_bounds(self) -> tuple[float, float]:
        """Return the pair indices between which YaRN (arXiv 2309.00071) blends, rounded as in
        llama.cpp."""

        def pair_of(rotations: float) -> float:
            return self.n_rot * log(self.n_ctx_orig / (rotations * 2 * pi)) / (2 * log(self.base))

        low, high = floor(pair_of(self.beta_fast)), ceil(pair_of(self.beta_slow))
        return max(0, low), min(self.n_rot - 1, high)

    def mscale(self, multiplier: float = 1.0) -> float:
        """Return YaRN's m(x) = 1 + 0.1 x ln(stretch), which sharpens attention; 1 if YaRN is
        off."""
        return 1.0 - 0.1 * multiplier * log(self.scale) if self.yarn and self.scale < 1 else 1.0

    def balanced(self, mscale: float, mscale_all: float) -> RopeParams:
        """Return the parameters with m(mscale) / m(mscale_all) instead of m(1) on cos and sin."""
        ratio = self.mscale(mscale) / self.mscale(mscale_all)
        return replace(self, attn_factor=self.attn_factor * ratio / self.mscale())

    def magnitude(self) -> float:
        """Return the factor on cos and sin; YaRN sharpens attention by 0.1 ln(stretch) + 1."""
        return self.attn_factor * (1.0 - 0.1 * log(self.scale) if self.yarn else 1.0)
