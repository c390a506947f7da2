"""Recurrent layers, which have a state of fixed size instead of keys and values, in torch and F32.

A state is one layer's memory on one rank. Every function takes the T tokens in a pass, updates the
state in place, and gives the same results for a whole pass as for its pieces, up to rounding. A
single token is computed by the recurrence, several tokens in chunks: contributions between tokens
in a chunk are matrix products, and only the state is carried from chunk to chunk.

Decays are logarithms ≤ 0. They are summed over exactly the tokens between two positions, never
taken as differences of running totals, because after a decay of -inf such a difference has no
correct digits, and if it is split into two factors, one of them overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK_TOKENS = 64
"""Tokens per chunk, a power of two. The work within a chunk grows quadratically, and chunks are
computed sequentially."""

SCAN_TOKENS = 16  # number of tokens whose states the selective scan keeps at a time


class Decays(NamedTuple):
    """Decay factors for each token of the chunks, (n_chunk, n_head, C, d_k or 1).

    Attributes:
        from_start: factor on the state before the chunk, including this token's decay.
        to_end: factor on this token's update, up to the end of the chunk.
    """

    from_start: Tensor
    to_end: Tensor


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve each channel with its own filter over the latest K tokens; no activation.

    The sum has the same order for any T, so that pieces of a pass give the same bits.

    Args:
        x: input, (T, channels).
        state: inputs before x, oldest first, (channels, K - 1).
        weight: filters, (channels, K); the last column is for the token itself.
        bias: bias of each channel, (channels,).
    """
    n_tokens = x.shape[0]
    inputs = torch.cat((state.T, x))
    state.copy_(inputs[n_tokens:].T)
    first, *others = weight.unbind(1)
    y = inputs[:n_tokens] * first
    for offset, column in enumerate(others, start=1):
        y.addcmul_(inputs[offset : offset + n_tokens], column)
    return y if bias is None else y.add_(bias)


class Chunks(NamedTuple):
    """Operands of a scan over the T tokens of a pass, in chunks of C tokens.

    Attributes:
        q, k: queries and keys, (n_chunk, n_head, C, d_k).
        v: values, (n_chunk, n_head, C, d_v).
        products: decayed products of q and k, (n_chunk, n_head, C, C).
        decays: decay factors to both ends of each chunk.
        inverse: matrix (n_chunk, n_head, C, C) of the delta rule, which writes inverse @ (v - the
            state read with k). None if v itself is written.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    products: Tensor
    decays: Decays
    inverse: Tensor | None = None


def scan_chunks(chunks: Chunks, state: Tensor) -> Tensor:
    """Carry the state (n_head, d_k, d_v) through the chunks and read it with q.

    Returns all outputs, (n_chunk * C, n_head, d_v).
    """
    q, k, v, products, decays, inverse = chunks
    chunk_decays = decays.from_start[:, :, -1, :, None]
    outputs = []
    for i in range(q.shape[0]):
        values = v[i]
        if inverse is not None:
            values = inverse[i] @ (values - (k[i] * decays.from_start[i]) @ state)
        read = (q[i] * decays.from_start[i]) @ state
        outputs.append(read.baddbmm_(products[i], values))
        state.mul_(chunk_decays[i]).add_((k[i] * decays.to_end[i]).mT @ values)
    return torch.cat(outputs, dim=1).transpose(0, 1)


Scan = Callable[[Chunks, Tensor], Tensor]
"""Function like `scan_chunks`, which a backend may replace."""


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor,
    scan: Scan = scan_chunks,
) -> Tensor:  # fmt: skip
    """Run a gated delta net (arXiv 2412.06464), also with a gate per channel (arXiv 2510.26692).

    For each token `S = exp(g) S; S += k ⊗ β (v - Sᵀ k); o = Sᵀ q`. Within a chunk, the values u
    written to S solve `u_i = β_i (v_i - (decayed S₀)ᵀ k_i - Σ_{j<i} a_ij u_j)`, a triangular system
    with the decayed products a_ij of the keys (the WY representation).

    Args:
        q, k: queries and keys, (T, n_head, d_k), normalised and scaled by the caller.
        v: values, (T, n_head, d_v).
        log_decay: g ≤ 0, (T, n_head), or (T, n_head, d_k) for a gate per channel.
        beta: β, (T, n_head).
        state: S, (n_head, d_k, d_v).

    Returns:
        Outputs o, (T, n_head, d_v).
    """
    n_tokens = q.shape[0]
    gate = log_decay if log_decay.dim() == q.dim() else log_decay[..., None]
    beta = beta[..., None]
    if n_tokens == 1:
        state.mul_(gate[0, :, :, None].exp())
        written = beta * (v - _read(k, state))
        state.addcmul_(k[0, :, :, None], written[0, :, None])
        return _read(q, state)
    q, k, v, gate, beta = (_split_chunks(t) for t in (q, k, v, gate, beta))
    (k_products, q_products), decays = _decayed_products((k, q), k, gate)
    # |k| ≤ 1 and β ≤ 2 bound the elements of the inverse by β, so forming it loses no accuracy
    inverse: Tensor = torch.linalg.solve_triangular(
        beta * k_products, beta.squeeze(-1).diag_embed(), upper=False, unitriangular=True
    )
    return scan(Chunks(q, k, v, q_products, decays, inverse), state)[:n_tokens]


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> Tensor:
    """Run Mamba 1 (arXiv 2312.00752): `S = exp(Δ a) S + Δ x ⊗ b; y = S c + d x` for each token.

    Every element of the state decays at its own rate, which no matrix product can express, so this
    is one fused operation per token.

    Args:
        x: input, (T, channels).
        dt: step sizes Δ ≥ 0 after the softplus, (T, channels).
        a: rates, negative, (channels, n_state).
        b, c: vectors that write to the state and read it, (T, n_state).
        d: factor on the input that bypasses the state, (channels,).
        state: S, (channels, n_state).

    Returns:
        Outputs y, (T, channels).
    """
    y = x * d
    for start in range(0, x.shape[0], SCAN_TOKENS):
        piece = slice(start, start + SCAN_TOKENS)
        decays = (dt[piece, :, None] * a).exp_()
        states = (dt[piece] * x[piece])[:, :, None] * b[piece, None]
        previous = state
        for current, decay in zip(states, decays, strict=True):
            previous = current.addcmul_(decay, previous)
        state.copy_(previous)
        y[piece] += (states @ c[piece, :, None]).squeeze(-1)
    return y


def state_space_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor,
    scan: Scan = scan_chunks,
) -> Tensor:  # fmt: skip
    """Run Mamba 2 (arXiv 2405.21060): `S = exp(Δ a) S + Δ x ⊗ b; y = S c + d x` for each token.

    With one decay per head this is linear attention with query c, key b and value Δ x, so chunks
    are matrix products (the state space duality).

    Args:
        x: input, (T, n_head, head_dim).
        dt: step sizes Δ ≥ 0 after the softplus, (T, n_head).
        a: rates, negative, (n_head,).
        b, c: vectors that write to the state and read it, repeated from groups to heads, (T,
            n_head, n_state).
        d: factor on the input that bypasses the state, (n_head,).
        state: S, (n_head, head_dim, n_state).

    Returns:
        Outputs y, (T, n_head, head_dim).
    """
    n_tokens = x.shape[0]
    skipped = d[:, None] * x
    memory = state.transpose(1, 2)
    values, gate = dt[..., None] * x, (dt * a)[..., None]
    if n_tokens == 1:
        memory.mul_(gate[0, :, :, None].exp()).addcmul_(b[0, :, :, None], values[0, :, None])
        return _read(c, memory) + skipped
    b, c, values, gate = (_split_chunks(t) for t in (b, c, values, gate))
    (products,), decays = _decayed_products((c,), b, gate)
    y = scan(Chunks(c, b, values, products, decays), memory)
    return skipped.add_(y[:n_tokens])


def _read(keys: Tensor, state: Tensor) -> Tensor:
    return (keys.transpose(0, 1) @ state).transpose(0, 1)


def _split_chunks(x: Tensor) -> Tensor:
    """Split x (T, n_head, d) into chunks (n_chunk, n_head, C, d), C a power of two ≤ CHUNK_TOKENS.

    The last chunk is padded with zeros, which do not change the state as keys, gates or steps.
    """
    n_tokens = x.shape[0]
    size = min(CHUNK_TOKENS, 1 << (n_tokens - 1).bit_length())
    if n_tokens % size:
        x = pad(x, (0, 0, 0, 0, 0, -n_tokens % size))
    return x.reshape(-1, size, *x.shape[1:]).transpose(1, 2).contiguous()


def _decayed_products(
    rows: Sequence[Tensor], k: Tensor, gate: Tensor
) -> tuple[list[Tensor], Decays]:
    """Return `Σ_d row[i, d] k[j, d] exp(Σ_{j<m≤i} gate[m, d])` for j ≤ i in a chunk, 0 for later j.

    Args:
        rows: left factors, each (n_chunk, n_head, C, d).
        k: keys, (n_chunk, n_head, C, d).
        gate: logarithms of the decays, (n_chunk, n_head, C, d or 1).

    Returns:
        Products (n_chunk, n_head, C, C) for each of `rows`; the decays to the ends of each chunk.
    """
    if gate.shape[-1] > 1:
        return _products_by_halves(rows, k, gate)
    size = gate.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=gate.device).tril()
    sums = torch.where(lower.tril(-1), gate, 0.0).cumsum(-2)
    decay = sums.exp() * lower
    decays = Decays(gate.cumsum(-2).exp(), decay[:, :, -1, :, None])
    return [(row @ k.mT).mul_(decay) for row in rows], decays


def _products_by_halves(
    rows: Sequence[Tensor], k: Tensor, gate: Tensor
) -> tuple[list[Tensor], Decays]:
    """Compute `_decayed_products` with a gate per channel, so the decay is part of the sum over d.

    For any j < i there is a power of two such that j and i lie in two neighbouring spans of that
    many tokens. The decay is then a product of two factors ≤ 1, from j to the border of the spans
    and from the border to i, so that each span times the span before it is one matrix product.
    """
    size = k.shape[-2]
    products = [torch.diag_embed((row * k).sum(-1)) for row in rows]
    decays = Decays(gate.exp(), torch.ones_like(gate))
    span = 1
    while span < size:
        start_early, start_late = _halves(decays.from_start, span)
        end_early = _halves(decays.to_end, span)[0]
        k_early = _halves(k, span)[0] * end_early
        by_pair = (size // (2 * span), 2, span)
        for row, product in zip(rows, products, strict=True):
            row_late = _halves(row, span)[1] * start_late
            blocks = product.view(*k.shape[:2], *by_pair, *by_pair).diagonal(dim1=2, dim2=5)
            blocks[:, :, 1, :, 0] = (row_late @ k_early.mT).movedim(2, -1)
        end_early *= start_late[..., -1:, :]
        start_late *= start_early[..., -1:, :]
        span *= 2
    return products, decays


def _halves(x: Tensor, span: int) -> tuple[Tensor, ...]:
    """Return the first and the second spans of x (..., C, d) as two views (..., pair, span, d)."""
    return x.view(*x.shape[:-2], -1, 2, span, x.shape[-1]).unbind(-3)
