"""Interface to the arithmetic: operations that layers call, and the layers as operations use them.

`reference.ops` is the oracle in torch, `cpu.ops` and `gpu.ops` are the fast
ones. None of them is below another: what all share is in `engine.backends.reference.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.batch import Batch, Tables
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.expert_rows import Groups
    from engine.model.forward.operands import (
        Activation,
        DeltaInputs,
        RopeParams,
        Routing,
        ScanInputs,
        Scores,
        States,
    )

ALL = slice(None)
"""Slice of all rows."""


class Weight(Protocol):
    """A matrix (n_out, n_in), or one per expert."""

    @property
    def n_bytes(self) -> int:
        """Bytes that the matrix takes."""
        ...

    def matmul(self, x: Tensor) -> Tensor:
        """Return `x Wᵀ`, (T, n_out), for x (T, n_in) in F32."""
        ...

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` (T,) as (T, n_in); zeros for ids that this rank has no row of."""
        ...

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        """Multiply each row of x (n_row, n_in) by its expert's matrix (grouped GEMM).

        On CPUs, x may have a row for each token instead, (T, n_in), where these are fewer.
        """
        ...

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        """Return `x Wᵀ` with one matrix per head, (T, n_head, n_out), for x (T, n_head, n_in).

        Args:
            rows: rows of each W to multiply by.
            transposed: whether to return `x W` instead: (T, n_head, n_out) to (T, n_head, n_in).
        """
        ...


class LinearLayer(Protocol):
    """Interface of a linear map to operations; see `engine.model.layers.linear.Linear`."""

    weight: Weight | None
    scale: Tensor | None

    @property
    def is_bare(self) -> bool:
        """Whether nothing follows the product: neither bias nor scale."""
        ...

    @property
    def added_bias(self) -> Tensor | None:
        """Bias to add to the product on this rank, (n_out,)."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (T, n_in) to (T, n_out)."""
        ...

    def finish(self, y: Tensor) -> Tensor:
        """Apply scale and bias to a product y (T, n_out)."""
        ...


class ExpertLayer(Protocol):
    """Interface of one matrix per expert to operations; see `layers.linear.ExpertLinear`."""

    weight: Weight | None
    bias: Tensor | None
    scale: Tensor | None

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """Map each row of x (n_row, n_in) to (n_row, n_out) with the matrix of its expert."""
        ...


class NormLayer(Protocol):
    """Interface of a norm to operations; see `engine.model.layers.norm.Norm`.

    Attributes:
        eps: number added to the mean square or variance.
        is_absent: whether the file has no such norm, and vectors stay as they are.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    is_absent: bool

    @property
    def kind(self) -> Literal["rms", "layer"]:
        """Formula of the norm."""
        ...

    def apply(self, x: Tensor, ops: Ops) -> Tensor:
        """Normalise x (..., n) with operations of `ops`."""
        ...


class RopeLayer(Protocol):
    """Interface of a rotation to operations; see `engine.model.layers.norm.Rope`.

    Attributes:
        params: parameters of the map from positions to angles.
        weight: divisors of the frequencies, (n_rot / 2,), or None.
    """

    params: RopeParams
    weight: Tensor | None


class Addend(NamedTuple):
    """Value to add to the residual stream: `norm(sum of partial + bias) * scale`.

    `Context.all_reduce_add` adds it.

    Attributes:
        partial: this rank's partial sum, (T, n_embd); None if it has none.
        bias: vector that is added once to the sum, (n_embd,).
        norm: norm of the biased sum, if any.
        scale: factor on what is added.
        is_whole: whether `partial` is the whole sum already, the same on all ranks.
        sum_scale: factor on the residual stream afterwards, (1,).
    """

    partial: Tensor | None
    bias: Tensor | None = None
    norm: NormLayer | None = None
    scale: float = 1.0
    is_whole: bool = False
    sum_scale: Tensor | None = None

    def summed(self, total: Tensor) -> Addend:
        """Return the addend with the sum of all ranks in place of the partial one."""
        return self._replace(partial=total, is_whole=True)


class FusedAllReduce(Protocol):
    """One-shot all-reduce inside a kernel, which can compute the operations after the sum too."""

    def all_reduce(self, x: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Return the sum of the members' values, with the same bits on all of them.

        Args:
            x: this rank's values, F32 of `shape`; None if it has none.
        """
        ...

    def add_norm(
        self, x: Tensor, addend: Addend, norm: NormLayer | None, x_bytes: int | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Compute `Ops.add_norm` of the all-reduced addend in one kernel.

        Args:
            x_bytes: bytes of a quantised activation; None if the result is not quantised as well.

        Returns:
            The result of `Ops.add_norm`; None, on all members alike, if the kernel cannot do it.
        """
        ...


class Ops(Protocol):
    """Operations of one rank. Tensors are F32 and on its device; T is the number of tokens."""

    def begin(self, batch: Batch, positions: Tensor) -> None:
        """Prepare for a pass.

        Args:
            positions: position of each row in the device's memory, int64 (T,); in passes over
                single tokens the same memory each time.
        """
        ...

    def extend(self, tables: Tables) -> None:
        """Note that the only sequence of a pass has got more pages, while it is being computed.

        What has been started ahead of the host goes on, and what follows sees these tables.
        """
        ...

    @property
    def memory(self) -> Sequence[Tensor]:
        """Persistent memory that operations use beside what a pass allocates."""
        ...

    def linears(self, x: Tensor, *layers: LinearLayer) -> Sequence[Tensor]:
        """Apply several linear maps to the same x (T, n_in)."""
        ...

    def gated_linears(
        self, act: Activation, x: Tensor, gate: LinearLayer, up: LinearLayer
    ) -> Tensor:
        """Return `act(gate(x)) * up(x)` for x (T, n_in)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Return `x / sqrt(mean(x²) + eps) * weight + bias` over the last dimension."""
        ...

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Return `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension."""
        ...

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        """Return `x / max(|x|, eps)` over the last dimension."""
        ...

    def add_norm(
        self,
        x: Tensor,
        addend: Addend,
        norm: NormLayer | None,
        one_shot: FusedAllReduce | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Add to the residual stream x (T, n_embd), and normalise the result for its next reader.

        Args:
            addend: value to add: the sum of all ranks, or this rank's partial sum with `one_shot`.
            norm: norm that reads the result next; None if unknown.
            one_shot: all-reduce that adds the ranks' partial sums.

        Returns:
            The residual stream, and the normalised one or None without a norm.
        """
        ...

    def concat(self, *parts: Tensor) -> Tensor:
        """Join the parts along the last dimension."""
        ...

    def activate(self, act: Activation, x: Tensor) -> Tensor:
        """Apply the activation of an FFN without a gate, element by element."""
        ...

    def gated(self, act: Activation, gate: Tensor, up: Tensor) -> Tensor:
        """Return `act(gate) * up`, element by element."""
        ...

    def softplus(self, x: Tensor) -> Tensor:
        """Return `ln(1 + e^x)`, element by element."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Return `cap * tanh(x / cap)`, element by element."""
        ...

    def xielu(self, x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
        """Apply xIELU, element by element (see `architectures.llama_variants.Xielu`)."""
        ...

    def norm_gated(self, x: Tensor, norm: NormLayer, act: Activation, gate: Tensor) -> Tensor:
        """Return `act(gate) * norm(x)` for heads x (T, n_head, n) and gate (T, n_head × n)."""
        ...

    def opened(self, x: Tensor, door: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor:
        """Return `other + sigmoid(x · door) * y`.

        Args:
            x: input of the gate, (T, n_in).
            door: vector that maps x to the gate's logit, (n_in,).
            y: gated value, (T, n).
            other: value to add, (T, n); or None.
        """
        ...

    def causal_conv(
        self, x: Tensor, state: States, weight: Tensor, bias: Tensor | None,
        act: Activation | None = None, gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Convolve over time (see `reference.recurrent.causal_conv`), then activate.

        Args:
            state: inputs before x, (channels, K - 1) for each sequence, updated in place.
            act: activation of the result; None for none.
            gates: factors on x and on the activated result, both shaped like x.
        """
        ...

    def delta_net(self, x: DeltaInputs, state: States) -> Tensor:
        """Run a gated delta net over the projected operands; return (T, n_head, head_dim).

        Args:
            state: recurrent state, (n_head, head_dim, head_dim) for each sequence, updated in
                place.
        """
        ...

    def selective_scan(
        self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor,
        state: States,
    ) -> Tensor:  # fmt: skip
        """Return `silu(gate) * y` with y of `reference.recurrent.selective_scan` (Mamba 1).

        Args:
            step: step size Δ before the softplus, (T, channels).
            gate: gate before its SiLU, (T, channels).
            state: recurrent state, (channels, n_state) for each sequence, updated in place.
        """
        ...

    def state_space_scan(self, x: ScanInputs, state: States) -> Tensor:
        """Run a Mamba 2 scan over the projected operands; return (T, n_head × head_dim).

        Args:
            state: recurrent state, (n_head, head_dim, n_state) for each sequence, updated in place.
        """
        ...

    def assign(
        self, routing: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups]:
        """Choose each token's experts.

        Args:
            logits: the router's logits, (T, n_expert).
            bias: bias for the choice, which does not change the weights, (n_expert,); or None.

        Returns:
            Weights (T, n_used) in ascending order of experts, and the rows grouped by expert.
        """
        ...

    def experts(
        self,
        act: Activation,
        x: Tensor,
        gate: ExpertLayer | None,
        up: ExpertLayer | None,
        down: ExpertLayer,
        groups: Groups,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Return `down(act(gate(x)) * up(x))` of each token's experts, (n_row, n_out).

        Args:
            x: input, (T, n_in).
            gate: gate matrices; None for `down(act(up(x)))`.
            up: up matrices; None where `gate` has the rows of both, those of the gate first.
            factors: factor on each expert's input, (T, n_used); or None.
        """
        ...

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
        """Add up each token's rows of y (n_row, n), times weights (T, n_used) if any, to (T, n)."""
        ...

    def rope_angles(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (T, 1, n_rot / 2), for positions (T,)."""
        ...

    def ropes(
        self,
        xs: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        style: str,
        norms: Sequence[NormLayer] = (),
    ) -> Sequence[Tensor]:
        """Apply RoPE to several tensors of equal head size, (T, n_head, head_dim).

        Args:
            norms: norm of each tensor before its rotation; empty for none.
        """
        ...

    def write_cache(self, cache: LayerCache, k: Tensor, v: Tensor | None, batch: Batch) -> None:
        """Write k and v to the cache at the rows' positions; see `LayerCache.write`."""
        ...

    def attention(
        self,
        q: Tensor,
        cache: LayerCache,
        batch: Batch,
        scores: Scores,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Attend with q (T, n_head, head_dim) over the cache: causal softmax attention.

        The cache holds the keys and values of all rows already. Each row sees the positions of its
        own sequence up to its own, and those behind it in the same interval of `Batch.two_way`;
        fewer if a window or chunk limits it.

        Args:
            sinks: logits that take weight but have no value, (n_head,); or None.
            slopes: decrease of the scores per token of distance, (n_head,) (ALiBi, arXiv
                2108.12409); or None.

        Returns:
            (T, n_head, head_dim_v)
        """
        ...

    def new_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: LayerCache,
        batch: Batch,
        scores: Scores,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Write k and v to the cache at the rows' positions, then attend as `attention`."""
        ...


Group = tuple[int, ...]
"""Ranks that take part in a collective, in ascending order."""


class Communicator(Protocol):
    """Collectives of one rank; a rank that has no value passes `None`.

    Every member of a group makes the same calls in the same order. Sums run in rank order on every
    rank, so all members end with the same bits, whatever the number of ranks.

    Raises:
        CommError: a rank left, or passed an invalid value; the error names that rank. `LeftAlone`
            names none: another rank's error says what has happened.

    Attributes:
        rank: number of this rank.
    """

    rank: int

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far, replayed calls excluded."""
        ...

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the sum of the members' values; all members get the same bits.

        Args:
            shape: shape of the members' values, if every member knows it.
        """
        ...

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        """Join slices along the last dimension, in rank order, on the first member of the group.

        The others get None.

        Args:
            alike: a tensor that has the same bits on all ranks whose devices round as this one's;
                it is compared between ranks where that costs little.
        """
        ...

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the tensor of rank `source` on every member of the group.

        Args:
            shape: shape of the tensor, if every member knows it.
        """
        ...

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        """Return the one-shot all-reduce inside kernels for values of n numbers.

        Returns:
            None, on all members alike, if there is none for this group and size.
        """
        ...
