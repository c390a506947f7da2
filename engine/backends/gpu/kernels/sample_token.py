"""Device functions that choose a token among candidates, and the layout of the sampler's memory.

`settings` (F64) holds what differs from answer to answer; `state` (int64), `counts` and `history`
hold what differs from token to token. `limits` (F32) and `found` (int32) pass from kernel to
kernel.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.asm import atomic_add

REPEAT, FREQUENCY, PRESENCE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
IS_PENALISED = tl.constexpr(3)
N_LAST = tl.constexpr(4)
"""Index of the number of tokens that count for the penalties; -1 for all, 0 for none."""
N_WANTED = tl.constexpr(5)
"""Index of the number of most likely tokens that are considered."""
IS_TOP_K = tl.constexpr(6)
"""Index of whether only those have a probability (top-k); else all tokens count for top-p."""
TOP_P = tl.constexpr(7)
MIN_P = tl.constexpr(8)
"""Index of min-p's logarithm, rounded to F32; -inf for none."""
TEMPERATURE = tl.constexpr(9)
IS_BY_ID = tl.constexpr(10)
"""Index of whether tokens are accumulated by rising id instead of by falling logit."""
N_SETTING = tl.constexpr(11)

N_STEP, N_UNIFORM, N_HISTORY, HALT = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3),
)  # fmt: skip
"""Indices in `state`: steps so far; random numbers used; tokens added to the history; how sampling
ended, DRAWN while it goes on."""
N_STATE = tl.constexpr(4)

BEST, BOUND = tl.constexpr(0), tl.constexpr(1)
"""Indices in `limits`: the largest logit, infinite if none is usable; the candidates' threshold."""
N_LIMIT = tl.constexpr(2)
N_FOUND, IS_WHOLE, N_DONE, CHECK = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3),
)  # fmt: skip
"""Indices in `found`: number of candidates; whether no other token could pass the filters; finished
programs of the kernel after `bound`; checksum of the residual stream."""
N_FACT = tl.constexpr(4)

DRAWN, UNUSABLE, FOR_HOST, WRONG = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3),
)  # fmt: skip
"""Endings of a step: a token; logits that are NaN or infinite; the host has to sample; ranks have
computed with different numbers, and instead of an id there is a bit for each seat to blame."""

ENDING_BITS, ENDING_MASK = tl.constexpr(4), tl.constexpr((1 << 4) - 1)
"""Number of the bits of the ending in `state` at HALT, below those of the id; their mask."""

WORD_BITS, ENTRY_BITS = tl.constexpr(32), tl.constexpr(36)
"""Shifts in an entry of the ring: `(step number << ENTRY_BITS) | (ending << WORD_BITS) | id`."""

LARGEST = tl.constexpr((1 << 31) - 1)
LOWEST = tl.constexpr(-(1 << 63))
"""Largest int32; lowest int64."""

RANK_OF_NONE = tl.constexpr(0x007FFFFF)
"""`rank_of` -inf, below that of all numbers."""


@triton.jit
def rank_of(x):
    """Return uint32 in the order of x (F32), equal for equal x, so also for both zeros."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def number_of(rank):
    """Return the F32 of a `rank_of`."""
    bits = tl.where((rank >> 31) != 0, rank ^ 0x80000000, rank ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def below(x, best):
    """Return x (F32) less the largest logit, as F64."""
    return x.to(tl.float64) - best.to(tl.float64)


@triton.jit
def _filtered(x, there, n, best, is_whole, total, settings):
    """Return a mask of the candidates that pass top-p and min-p, and whether no other token does.

    Args:
        x: logits in the order of accumulation, (N,); the first n are `there`.
        total: sum of the probabilities of all tokens, relative to the largest; unused with top-k.
    """
    lane = tl.arange(0, x.shape[0])
    is_known = (tl.load(settings + IS_TOP_K) != 0) | is_whole
    keep = there
    top_p = tl.load(settings + TOP_P)
    if top_p < 1:
        weight = tl.where(there, tl.exp(below(x, best)), 0.0)
        if tl.load(settings + IS_TOP_K) != 0:
            total = tl.sum(weight)
        total = tl.where(total > 0, total, 1.0)  # of nothing that may come
        n_less = tl.sum((there & (tl.cumsum(weight, axis=0) / total < top_p)).to(tl.int32))
        keep = there & (lane <= n_less)
        is_known = is_known | (n_less < n)
    return keep & (x >= best + tl.load(settings + MIN_P).to(tl.float32)), is_known


@triton.jit
def sort(x, n, run, SIZE: tl.constexpr):
    """Sort x (SIZE,) by falling value: a bitonic sort, as a loop to keep the code short.

    Args:
        n: number of entries before the rest, which are LOWEST.
        run: 2, or twice the length of runs that are sorted already, falling and rising by turns.
    """
    lane = tl.arange(0, SIZE)
    run = tl.full((), 0, tl.int32) + run  # not a constant at compile time, so that loops stay loops
    while (run <= SIZE) & (run // 2 < n):
        step = run // 2
        while step > 0:
            other = tl.gather(x, lane ^ step, axis=0)
            is_larger = ((lane & step) == 0) == ((lane & run) == 0)
            x = tl.where((other > x) == is_larger, other, x)
            step = step // 2
        run = run * 2
    return x


@triton.jit
def choose(packed, n_found, best, is_whole, total, settings, uniform, SIZE: tl.constexpr):
    """Return the token of a uniform random number, and whether the candidates determine it.

    Args:
        packed: n_found candidates in the order of accumulation, int64 (SIZE,).
        total: see `_filtered`.
    """
    lane = tl.arange(0, SIZE)
    is_by_id = tl.load(settings + IS_BY_ID) != 0
    n = n_found
    if tl.load(settings + IS_TOP_K) != 0:
        n = tl.minimum(n, tl.load(settings + N_WANTED).to(tl.int32))
    there = lane < n
    upper, lower = packed >> 32, packed & 0xFFFFFFFF
    ids = tl.where(is_by_id, upper, lower) ^ LARGEST
    rank = tl.where(is_by_id, lower, upper + 0x80000000).to(tl.uint32)
    x = tl.where(there, number_of(tl.where(there, rank, 0x80000000).to(tl.uint32)), -float("inf"))
    keep, is_known = _filtered(x, there, n, best, is_whole, total, settings)
    under = tl.where(keep, below(x, best), -1e30)
    temperature = tl.load(settings + TEMPERATURE)
    warm = tl.maximum(under / temperature, -1e30).to(tl.float32).to(tl.float64)
    weight = tl.where(keep, tl.exp(tl.where(temperature == 1, under, warm)), 0.0)
    cumulative = tl.cumsum(weight, axis=0)
    point = uniform * tl.max(cumulative)
    last = tl.max(tl.where(weight > 0, lane, 0))
    chosen = tl.minimum(tl.sum((keep & (cumulative <= point)).to(tl.int32)), last)
    return tl.sum(tl.where(lane == chosen, ids, 0)), is_known


@triton.jit
def _count(counts, token, change, first, n_own, is_wanted):
    """Add `change` to a token's count in the history, if it is in the rank's slice."""
    own = token - first
    if is_wanted & (own >= 0) & (own < n_own):
        atomic_add(counts + own, change, "relaxed")


@triton.jit
def _accept(token, is_drawn, settings, state, counts, history, first, n_own):
    """Add a token to the history, and remove the one that leaves the penalties' window."""
    n_last = tl.load(settings + N_LAST).to(tl.int64)
    n = tl.load(state + N_HISTORY)
    place = tl.where(n_last > 0, n % tl.maximum(n_last, 1), 0)
    leaves = is_drawn & (n_last > 0) & (n >= n_last)
    old = tl.load(history + place, mask=leaves, other=0)
    tl.debug_barrier()
    _count(counts, old, -1, first, n_own, leaves)
    _count(counts, token, 1, first, n_own, is_drawn & (n_last != 0))
    tl.store(history + place, token.to(tl.int32), mask=is_drawn & (n_last > 0))
    tl.store(state + N_HISTORY, n + 1, mask=is_drawn)


@triton.jit
def finish(token, now, settings, state, counts, history, ids, position, ring, first, n_own,
           RING: tl.constexpr):  # fmt: skip
    """Write the next step's inputs, and the result for the host.

    If no token was sampled, this step and all later ones change only the ring: the same token at
    the same position is then computed once more.

    Args:
        token: the sampled token, or what replaces its id.
        now: ending of this step, if no earlier step halted.
        counts: counts in the history of n_own tokens from `first` on.
    """
    halt, n_step = tl.load(state + HALT), tl.load(state + N_STEP)
    is_new = halt == DRAWN
    is_drawn = is_new & (now == DRAWN)
    shown = tl.where((now == UNUSABLE) | (now == FOR_HOST), 0, token)
    told = tl.where(is_new, now | (shown << ENDING_BITS), halt)
    token = tl.where(is_drawn, token, 0)
    _accept(token, is_drawn, settings, state, counts, history, first, n_own)
    tl.store(ids, token, mask=is_drawn)
    tl.store(position, tl.load(position) + 1, mask=is_drawn)
    ending = told & ENDING_MASK
    entry = ((n_step + 1) << ENTRY_BITS) | (ending << WORD_BITS) | (told >> ENDING_BITS)
    tl.store(ring + n_step % RING, entry)
    n_uniform = tl.load(state + N_UNIFORM)
    tl.store(state + N_STEP, n_step + 1)
    tl.store(state + N_UNIFORM, n_uniform + 1, mask=is_drawn)
    tl.store(state + HALT, told, mask=is_new & (now != DRAWN))
