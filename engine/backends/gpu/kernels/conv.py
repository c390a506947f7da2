"""Kernel of the short causal convolution over time in front of recurrent layers."""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.elementwise import activated
from engine.backends.gpu.kernels.recurrent import (
    n_in_chain,
    state_before,
    state_behind,
    store_repeats,
)


@triton.jit(do_not_specialize=["n_token", "n_channel", "stride"])
def causal_conv(x, before, after, state, weight, bias, y, n_token, n_channel, stride,
                TAPS: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr,
                HAS_GATES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Convolve BLOCK channels of TOKENS tokens, after the inputs in `state`, which is updated.

    Only the program of the first tokens reads the state, so that it can be updated in place; more
    than TOKENS tokens need TOKENS ≥ TAPS - 1. Sums have the same order for any number of tokens.
    Each thread holds the same channels of everything it loads, so that threads exchange nothing.

    Args:
        x: inputs, F32 (n_token, n_channel), `stride` elements from token to token.
        before, after: factors on x and on the result, like x; any pointers without HAS_GATES.
        state: inputs before x, F32 (n_channel, TAPS - 1), oldest first.
        weight: F32 (n_channel, TAPS), the last column for the token itself.
        bias: F32 (n_channel,); any pointer without HAS_BIAS.
        y: contiguous output, F32 (n_token, n_channel).
        ACT: the activation that follows, or "none".
    """
    stride = stride.to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside = channel < n_channel
    taken = (token < n_token) & inside[None, :]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        place = token + tap - (TAPS - 1)
        value = input_at(x, before, state, place, channel, taken, stride, TAPS, HAS_GATES)
        factor = tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0)
        total += value * factor[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    total = activated(total, ACT)
    token = token.to(tl.int64)
    if HAS_GATES:
        total *= tl.load(after + token * stride + channel[None, :], mask=taken, other=0.0)
    tl.store(y + token * n_channel + channel[None, :], total, mask=taken)
    if tl.program_id(1) == 0:
        kept = ()
        for i in tl.static_range(TAPS - 1):
            last = n_token + i - (TAPS - 1)
            newest = input_at(x, before, state, last, channel, inside, stride, TAPS, HAS_GATES)
            kept = kept + (newest,)
        tl.debug_barrier()  # all threads have read what is overwritten now
        for i in tl.static_range(TAPS - 1):
            tl.store(state + channel * (TAPS - 1) + i, kept[i], mask=inside)


@triton.jit(do_not_specialize=["n_channel", "stride"])
def causal_conv_of_chains(x, before, after, state, chains, weight, bias, y, slot_size, n_channel,
                          stride, TAPS: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr,
                          HAS_GATES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Convolve BLOCK channels of the chain that begins at a row, see `gpu.state_chains`.

    The last row comes first: the first row may overwrite the state before it, which others read.
    Sums have the order of `causal_conv`. Rows that repeat one get its result.

    Args:
        state: F32 (places, n_channel, TAPS - 1), with `slot_size` elements for each place.
        chains: int64 (rows, CHAIN_WORDS).
    """
    stride = stride.to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < n_channel
    first = tl.program_id(1)
    n = n_in_chain(chains, first)
    old = state + state_before(chains, first, slot_size)
    x += first * stride
    before += first * stride
    after += first * stride
    y += first * n_channel
    for i in range(n):
        row = n - 1 - i
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(TAPS):
            place = row + tap - (TAPS - 1)
            value = input_at(x, before, old, place, channel, inside, stride, TAPS, HAS_GATES)
            total += value * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        total = activated(total, ACT)
        if HAS_GATES:
            total *= tl.load(after + row * stride + channel, mask=inside, other=0.0)
        own = y + row * n_channel
        tl.store(own + channel, total, mask=inside)
        store_repeats(chains, first + row, own, n_channel, channel, total, inside)
        kept = ()
        for tap in tl.static_range(TAPS - 1):
            place = row + 1 + tap - (TAPS - 1)
            newest = input_at(x, before, old, place, channel, inside, stride, TAPS, HAS_GATES)
            kept = kept + (newest,)
        tl.debug_barrier()  # all threads have read what is overwritten now
        new = state + state_behind(chains, first + row, slot_size)
        for tap in tl.static_range(TAPS - 1):
            tl.store(new + channel * (TAPS - 1) + tap, kept[tap], mask=inside)


@triton.jit
def input_at(x, before, state, place, channel, wanted, stride, TAPS: tl.constexpr,
             HAS_GATES: tl.constexpr):  # fmt: skip
    """Load the inputs of token `place`; those before the first token are in the state."""
    is_new = wanted & (place >= 0)
    value = tl.load(x + place * stride + channel, mask=is_new, other=0.0)
    if HAS_GATES:
        value *= tl.load(before + place * stride + channel, mask=is_new, other=0.0)
    old = state + channel * (TAPS - 1) + place + (TAPS - 1)
    return value + tl.load(old, mask=wanted & (place < 0), other=0.0)
