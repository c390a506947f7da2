"""Recurrent layers as kernels: causal convolution, delta net, selective scan, state-space scan.

Each function returns None if its kernel does not support the arguments; otherwise it updates the
state in place: one sequence's state or, given `chains` (see `page_tables.StateChains`), those in
all slots, (slots, ...), for rows of several sequences. A kernel walks token by token, which for
many tokens takes longer than the chunked matrix products in `engine.model.forward.recurrent`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.backends.gpu.elementwise import is_plain, power_of_two
from engine.backends.gpu.kernels import recurrent
from engine.backends.gpu.launch.configs import refusable, target_of
from engine.backends.gpu.launch.kernel_launch import launch

if TYPE_CHECKING:
    from engine.model.forward.operands import Activation, DeltaInputs, ScanInputs
    from engine.model.forward.recurrent import Chunks

FEW_TOKENS = 64  # max. tokens for which token-by-token kernels match a chunk of matrix products
CONV_TOKENS = 8  # tokens per program in the convolution; more if there are more taps
CONV_CHANNELS = 128  # channels per program in the convolution
HELD = 1 << 10  # elements of a state in each warp: 32 registers per thread
MIN_TILE = 16  # smallest number of rows or columns that tensor cores multiply
STATE_ROWS = 32  # rows of a state per product with MIN_TILE columns; limited by registers


@refusable
def causal_conv(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, act: Activation | None = None,
    gates: tuple[Tensor, Tensor] | None = None, chains: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Compute `Ops.causal_conv` for any number of tokens; gates have x's strides."""
    n_token, n_channel = x.shape
    n_tap = weight.shape[1]
    if not _has_rows(x) or not all(is_plain(t) for t in (weight, state) if t.numel()):
        return None
    if n_tap < 2 or (act is not None and (act.kind == "oai" or act.limit)):
        return None
    before, after = gates or (x, x)
    if len({(t.dtype, t.shape, t.stride()) for t in (x, before, after)}) > 1:
        return None
    y = torch.empty(n_token, n_channel, device=x.device)
    constants: dict[str, Any] = {
        "TAPS": n_tap, "ACT": "none" if act is None else act.kind, "HAS_BIAS": bias is not None,
        "HAS_GATES": gates is not None, "BLOCK": CONV_CHANNELS,
    }  # fmt: skip
    blocks, added = -(-n_channel // CONV_CHANNELS), x if bias is None else bias
    if chains is not None:
        launch(
            recurrent.causal_conv_of_chains, (blocks, n_token),
            x, before, after, state, chains, weight, added, y, state.stride(0), n_channel,
            x.stride(0), **constants,
        )  # fmt: skip
        return y
    tokens = 1 if n_token == 1 else max(CONV_TOKENS, power_of_two(n_tap - 1))
    launch(
        recurrent.causal_conv, (blocks, -(-n_token // tokens)),
        x, before, after, state, weight, added, y, n_token, n_channel, x.stride(0), TOKENS=tokens,
        **constants,
    )  # fmt: skip
    return y


@refusable
def delta_net(x: DeltaInputs, state: Tensor, chains: Tensor | None = None) -> Tensor | None:
    """Compute `Ops.delta_net` for up to `FEW_TOKENS` tokens."""
    n_token, n_head, n_value = x.v.shape
    n_key = x.q.shape[2]
    rows = (x.q, x.k, x.v, x.step, x.beta)
    plain = (x.step_bias, x.rate, state)
    if n_token > FEW_TOKENS or not all(map(_has_rows, rows)) or not all(map(is_plain, plain)):
        return None
    y = torch.empty(n_token, n_head, n_value, device=state.device)
    size = power_of_two(n_key)
    columns = min(max(1, HELD // size), power_of_two(n_value))
    launch(
        recurrent.delta_net, (n_head, -(-n_value // columns), _n_programs(chains)),
        x.q, x.k, x.v, x.step, x.beta, x.step_bias, x.rate,
        x.step if x.key_of is None else x.key_of, state, state if chains is None else chains, y,
        n_token, _slot_size(state, chains), *(part.stride(0) for part in rows), x.scale, x.eps,
        num_warps=1, PLACED=chains is not None, PER_CHANNEL=x.step.dim() == 3,
        HAS_MAP=x.key_of is not None, N_KEY=n_key, N_VALUE=n_value, SIZE=size, COLUMNS=columns,
    )  # fmt: skip
    return y


@refusable
def selective_scan(
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor,
    state: Tensor, chains: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Compute `Ops.selective_scan` for any number of tokens, since torch has nothing faster."""
    rows = (x, step, b, c, gate)
    if not all(map(_has_rows, rows)) or not all(map(is_plain, (a, d, state))):
        return None
    (n_token, n_channel), n_state = x.shape, b.shape[1]
    y = torch.empty(n_token, n_channel, device=x.device)
    size = power_of_two(n_state)
    channels = min(max(1, HELD // 2 // size), power_of_two(n_channel))
    launch(
        recurrent.selective_scan, (-(-n_channel // channels), _n_programs(chains)),
        x, step, a, b, c, d, gate, state, state if chains is None else chains, y, n_token,
        _slot_size(state, chains), n_channel, *(part.stride(0) for part in rows),
        num_warps=1, PLACED=chains is not None, N_STATE=n_state, SIZE=size, CHANNELS=channels,
    )  # fmt: skip
    return y


@refusable
def state_space_scan(x: ScanInputs, state: Tensor, chains: Tensor | None = None) -> Tensor | None:
    """Compute `Ops.state_space_scan` for up to `FEW_TOKENS` tokens."""
    n_token, n_head, n_row = x.values.shape
    rows = (x.values, x.step, x.b, x.c, x.gate)
    plain = (x.step_bias, x.rate, x.skip, state)
    if n_token > FEW_TOKENS or not all(map(_has_rows, rows)) or not all(map(is_plain, plain)):
        return None
    n_state = x.b.shape[2]
    y = torch.empty(n_token, n_head * n_row, device=state.device)
    size = power_of_two(n_state)
    held = min(max(1, HELD // size), power_of_two(n_row))
    launch(
        recurrent.state_space_scan, (n_head, -(-n_row // held), _n_programs(chains)),
        x.values, x.step, x.step_bias, x.rate, x.b, x.c, x.skip, x.gate,
        x.step if x.key_of is None else x.key_of, state, state if chains is None else chains, y,
        n_token, _slot_size(state, chains), *(part.stride(0) for part in rows), num_warps=1,
        PLACED=chains is not None, HAS_MAP=x.key_of is not None, N_ROW=n_row, N_STATE=n_state,
        SIZE=size, ROWS=held,
    )  # fmt: skip
    return y


@refusable
def scan_chunks(chunks: Chunks, state: Tensor) -> Tensor | None:
    """Compute `Ops.scan_chunks` if tensor cores reach F32's precision."""
    q, k, v, products, (from_start, to_end), inverse = chunks
    (n_chunk, n_head, size, n_key), n_value = q.shape, v.shape[3]
    target = target_of(q.device)
    if target.maker != "interpreter" and target.dot_precision == "ieee":
        return None
    plain = [t.contiguous() for t in (q, k, v, products, from_start, to_end)]
    last = products if inverse is None else inverse.contiguous()
    flat = state.transpose(1, 2) if state.stride(1) == 1 and n_value > 1 else state
    if size < MIN_TILE or not is_plain(flat):
        return None
    y = torch.empty(n_chunk * size, n_head, n_value, device=q.device)
    columns, rows = MIN_TILE, min(STATE_ROWS, max(MIN_TILE, power_of_two(n_key)))
    launch(
        recurrent.scan_chunks, (n_head, -(-n_value // columns)),
        *plain, last, state, y, n_chunk, num_stages=1,
        HAS_INVERSE=inverse is not None, PER_CHANNEL=from_start.shape[3] > 1,
        IS_TRANSPOSED=flat is not state, N_KEY=n_key, N_VALUE=n_value, CHUNK=size,
        PARTS=-(-n_key // rows), ROWS=rows, COLUMNS=columns,
        PRECISION=target.dot_precision,
    )  # fmt: skip
    return y


def _n_programs(chains: Tensor | None) -> int:
    """Return how many programs compute the same part of a state: one per row, or one."""
    return 1 if chains is None else len(chains)


def _slot_size(state: Tensor, chains: Tensor | None) -> int:
    return 0 if chains is None else state.stride(0)


def _has_rows(x: Tensor) -> bool:
    """Return whether x is F32 and each token's elements are contiguous, with any token stride."""
    return x.dtype == torch.float32 and x.numel() > 0 and x[0].is_contiguous()
