"""A token drawn from logits as `engine.sampler` draws it, in four small kernels.

`survey` reads all logits, applies the penalties and finds the largest of each few neighbours.
`bound` finds from those a number that enough tokens reach, `gather` the tokens that reach it, in
any order, and `draw` sorts and filters these, draws one, and writes what the next token needs.

What differs from answer to answer stands in `settings` (F64), what differs from token to token in
`state` (int64), `counts` and `history`. `limits` (F32) and `found` (int32) go from kernel to
kernel.
"""

import triton
import triton.language as tl

REPEAT, FREQUENCY, PRESENCE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
IS_PENALISED = tl.constexpr(3)
N_LAST = tl.constexpr(4)
"""How many tokens count for the penalties; -1 for all, 0 for none."""
N_WANTED = tl.constexpr(5)
"""How many of the likeliest tokens are looked at."""
IS_TOP_K = tl.constexpr(6)
"""Whether those are all: otherwise what was not looked at counts for top-p."""
TOP_P = tl.constexpr(7)
MIN_P = tl.constexpr(8)
"""The logarithm as F32; -inf for none."""
TEMPERATURE = tl.constexpr(9)
IS_BY_ID = tl.constexpr(10)
"""Whether the draw counts tokens by rising id and not by falling logit."""
N_SETTING = 11

N_STEP, N_UNIFORM, N_HISTORY, HALT = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3),
)  # fmt: skip
"""Steps so far; random numbers used; tokens that came to the history; why nothing is drawn."""
N_STATE = 4

BEST, BOUND = tl.constexpr(0), tl.constexpr(1)
"""In `limits`: the largest logit, infinite if none is of use; what candidates reach."""
N_FOUND, IS_WHOLE = tl.constexpr(0), tl.constexpr(1)
"""In `found`: how many do; whether no other token could pass the filters."""

DRAWN, UNUSABLE, FOR_HOST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How a step ended: with a token; with logits that are not numbers; the host has to draw."""

WORD_BITS, ENTRY_BITS = tl.constexpr(32), tl.constexpr(36)
"""An entry of the ring is `(number of the step << ENTRY_BITS) | (ending << WORD_BITS) | id`."""

LARGEST = tl.constexpr((1 << 31) - 1)
LOWEST = tl.constexpr(-(1 << 63))
"""Of int32; of int64."""

RANK_OF_NONE = tl.constexpr(0x007FFFFF)
"""`_rank` of -inf, below that of all numbers."""


@triton.jit
def _rank(x):
    """uint32 that rise with x (F32); equal ones for equal x, so also for both zeros."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _number(rank):
    """The F32 of a `_rank`."""
    bits = tl.where((rank >> 31) != 0, rank ^ 0x80000000, rank ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _below(x, best):
    """How far x (F32) lies below the largest, F64."""
    return x.to(tl.float64) - best.to(tl.float64)


@triton.jit(do_not_specialize=["n_vocab"])
def survey(logits, counts, settings, penalised, maxima, n_vocab, FACTOR: tl.constexpr,
           BLOCK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Logits after penalties, and the largest of each GROUP; each program does BLOCK of them.

    What is not a number becomes +inf, and so shows in the maxima.

    Args:
        logits, penalised: (n_vocab,), F32.
        counts: (n_vocab,), int32, how often each is in the history; below 0: it must not come.
        maxima: (ceil(n_vocab / BLOCK) * BLOCK / GROUP,), F32.
        FACTOR: a power of two that n_vocab is a multiple of, so that several are read at once.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n_vocab // FACTOR * FACTOR  # so that the compiler knows
    x = tl.load(logits + at, mask=inside, other=-float("inf"))
    count = tl.load(counts + at, mask=inside, other=0)
    x = tl.where(count < 0, -float("inf"), x)
    unusable = (x != x) | (x == float("inf"))
    if tl.load(settings + IS_PENALISED) != 0:
        repeat = tl.load(settings + REPEAT).to(tl.float32)
        usable = tl.where(unusable, 0.0, x)
        usable = tl.where(usable > 0, tl.div_rn(usable, repeat), usable * repeat)
        cost = count.to(tl.float64) * tl.load(settings + FREQUENCY)
        cost = cost + tl.load(settings + PRESENCE)
        x = tl.where(count > 0, (usable.to(tl.float64) - cost).to(tl.float32), x)
    x = tl.where(unusable, float("inf"), x)
    tl.store(penalised + at, x, mask=inside)
    group = tl.program_id(0) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(maxima + group, tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1))


@triton.jit(do_not_specialize=["n_group"])
def bound(maxima, settings, limits, found, n_group, SIZE: tl.constexpr):
    """A number that the wanted tokens reach, and few others; one program.

    As many maxima reach it as tokens are wanted, and each is a token of its own. It is found bit by
    bit, from the highest, until exactly so many do. Without top-k, min-p may raise it: then what
    lies below is certainly left out.

    Args:
        maxima: (n_group,), F32.
        SIZE: the power of two from n_group on.
    """
    at = tl.arange(0, SIZE)
    x = tl.load(maxima + at, mask=at < n_group, other=-float("inf"))
    best = tl.max(x)
    ranks = _rank(x)
    n_wanted = tl.load(settings + N_WANTED).to(tl.int32)
    low = tl.where(n_wanted == 1, _rank(best), 0).to(tl.uint32)
    bit = tl.where(n_wanted == 1, 0, 0x80000000).to(tl.uint32)
    while bit != 0:
        tried = low | bit
        n = tl.sum((ranks >= tried).to(tl.int32))
        low = tl.where(n >= n_wanted, tried, low)
        bit = tl.where(n == n_wanted, 0, bit >> 1).to(tl.uint32)
    reached = _number(tl.maximum(low, RANK_OF_NONE).to(tl.uint32))
    is_whole = (n_wanted >= n_group) | (reached == -float("inf"))
    if tl.load(settings + IS_TOP_K) == 0:
        is_finite = (best > -float("inf")) & (best < float("inf"))
        least = tl.where(is_finite, best, 0.0) + tl.load(settings + MIN_P).to(tl.float32)
        is_whole = is_whole | (least >= reached)
        reached = tl.maximum(reached, least)
    tl.store(limits + BEST, best)
    tl.store(limits + BOUND, reached)
    tl.store(found + N_FOUND, 0)
    tl.store(found + IS_WHOLE, is_whole.to(tl.int32))


@triton.jit(do_not_specialize=["n_vocab"])
def gather(penalised, settings, limits, found, candidates, sums, n_vocab, FACTOR: tl.constexpr,
           BLOCK: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
    """The tokens that reach the bound, packed so that larger numbers come first in the draw.

    Args:
        candidates: (ROOM,), int64: rank of the logit and id counted from above, the one that
            decides in the upper half.
        sums: (programs,), F64, of the probabilities of all tokens, as multiples of the largest;
            written where top-p asks for them.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n_vocab // FACTOR * FACTOR  # so that the compiler knows
    x = tl.load(penalised + at, mask=inside, other=-float("inf"))
    best = tl.load(limits + BEST)
    x = tl.where(x == float("inf"), -float("inf"), x)
    is_in = (x >= tl.load(limits + BOUND)) & (x > -float("inf"))
    n = tl.sum(is_in.to(tl.int32))
    if n > 0:
        first = tl.atomic_add(found + N_FOUND, n, sem="relaxed")
        place = first + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
        rank = _rank(x).to(tl.int64)
        turn = (at ^ LARGEST).to(tl.int64)
        if tl.load(settings + IS_BY_ID) != 0:
            packed = (turn << 32) | rank
        else:
            packed = ((rank - 0x80000000) << 32) | turn
        tl.store(candidates + place, packed, mask=is_in & (place < ROOM))
    if (tl.load(settings + IS_TOP_K) == 0) & (tl.load(settings + TOP_P) < 1):
        best = tl.where(best == float("inf"), 0.0, best)
        tl.store(sums + tl.program_id(0), tl.sum(tl.exp(_below(x, best))))


@triton.jit
def _filtered(x, there, n, best, is_whole, settings, sums, n_sum, SUMS: tl.constexpr):
    """Which of the candidates pass top-p and min-p; and whether these are known to be all.

    Args:
        x: (N,), logits, in the order of the draw; the first n are `there`.
    """
    lane = tl.arange(0, x.shape[0])
    is_known = (tl.load(settings + IS_TOP_K) != 0) | is_whole
    keep = there
    top_p = tl.load(settings + TOP_P)
    if top_p < 1:
        weight = tl.where(there, tl.exp(_below(x, best)), 0.0)
        if tl.load(settings + IS_TOP_K) != 0:
            total = tl.sum(weight)
        else:
            at = tl.arange(0, SUMS)
            total = tl.sum(tl.load(sums + at, mask=at < n_sum, other=0.0))
        n_less = tl.sum((there & (tl.cumsum(weight, axis=0) / total < top_p)).to(tl.int32))
        keep = there & (lane <= n_less)
        is_known = is_known | (n_less < n)
    return keep & (x >= best + tl.load(settings + MIN_P).to(tl.float32)), is_known


@triton.jit
def _sorted(x, SIZE: tl.constexpr):
    """x (SIZE,) by falling value: a bitonic sort, as a loop because that is less to read."""
    lane = tl.arange(0, SIZE)
    run = 2
    while run <= SIZE:
        step = run // 2
        while step > 0:
            other = tl.gather(x, lane ^ step, axis=0)
            is_larger = ((lane & step) == 0) == ((lane & run) == 0)
            x = tl.where((other > x) == is_larger, other, x)
            step = step // 2
        run = run * 2
    return x


@triton.jit
def _choose(candidates, n_found, best, is_whole, settings, sums, n_sum, uniform,
            SIZE: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """The token of a uniform random number; and whether the candidates were enough to know it."""
    lane = tl.arange(0, SIZE)
    is_by_id = tl.load(settings + IS_BY_ID) != 0
    packed = tl.load(candidates + lane, mask=lane < n_found, other=LOWEST)
    packed = _sorted(packed, SIZE)
    n = n_found
    if tl.load(settings + IS_TOP_K) != 0:
        n = tl.minimum(n, tl.load(settings + N_WANTED).to(tl.int32))
    there = lane < n
    upper, lower = packed >> 32, packed & 0xFFFFFFFF
    ids = tl.where(is_by_id, upper, lower) ^ LARGEST
    rank = tl.where(is_by_id, lower, upper + 0x80000000).to(tl.uint32)
    x = tl.where(there, _number(tl.where(there, rank, 0x80000000).to(tl.uint32)), -float("inf"))
    keep, is_known = _filtered(x, there, n, best, is_whole, settings, sums, n_sum, SUMS)
    below = tl.where(keep, _below(x, best), -1e30)
    temperature = tl.load(settings + TEMPERATURE)
    warm = tl.maximum(below / temperature, -1e30).to(tl.float32).to(tl.float64)
    weight = tl.where(keep, tl.exp(tl.where(temperature == 1, below, warm)), 0.0)
    cumulative = tl.cumsum(weight, axis=0)
    point = uniform * tl.max(cumulative)
    last = tl.max(tl.where(weight > 0, lane, 0))
    chosen = tl.minimum(tl.sum((keep & (cumulative <= point)).to(tl.int32)), last)
    return tl.sum(tl.where(lane == chosen, ids, 0)), is_known


@triton.jit
def _accept(token, is_drawn, settings, state, counts, history):
    """Let a token count for the penalties, and the one that leaves their window no more."""
    n_last = tl.load(settings + N_LAST).to(tl.int64)
    n = tl.load(state + N_HISTORY)
    place = tl.where(n_last > 0, n % tl.maximum(n_last, 1), 0)
    leaves = is_drawn & (n_last > 0) & (n >= n_last)
    old = tl.load(history + place, mask=leaves, other=0)
    tl.debug_barrier()
    tl.atomic_add(counts + old, -1, mask=leaves, sem="relaxed")
    tl.atomic_add(counts + token, 1, mask=is_drawn & (n_last != 0), sem="relaxed")
    tl.store(history + place, token.to(tl.int32), mask=is_drawn & (n_last > 0))
    tl.store(state + N_HISTORY, n + 1, mask=is_drawn)


@triton.jit(do_not_specialize=["n_sum"])
def draw(candidates, sums, settings, limits, found, uniforms, state, counts, history, ids, position,
         ring, n_sum, FEW: tl.constexpr, ROOM: tl.constexpr, SUMS: tl.constexpr,
         UNIFORMS: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """Draw a token and write what the next step reads; one program.

    Where nothing can be drawn, this step and all later ones leave everything as it is, but for the
    ring: the same token at the same place is then computed once more.

    Args:
        uniforms: (UNIFORMS,), F64, a ring of random numbers in [0, 1).
        state: (N_STATE,), int64.
        history: int32, a ring of the last tokens.
        ids, position: (1,), what the next step computes, and where.
        ring: (RING,), int64, what the host reads, see ENTRY_BITS.
        FEW: candidates up to which less work is enough.
        SUMS: the power of two from n_sum on.
    """
    n_found, is_whole = tl.load(found + N_FOUND), tl.load(found + IS_WHOLE) != 0
    best, halt = tl.load(limits + BEST), tl.load(state + HALT)
    is_usable = (best > -float("inf")) & (best < float("inf"))
    best = tl.where(is_usable, best, 0.0)
    n_step, n_uniform = tl.load(state + N_STEP), tl.load(state + N_UNIFORM)
    uniform = tl.load(uniforms + n_uniform % UNIFORMS)
    if n_found <= FEW:
        token, is_known = _choose(
            candidates, n_found, best, is_whole, settings, sums, n_sum, uniform, FEW, SUMS
        )
    else:
        token, is_known = _choose(
            candidates, tl.minimum(n_found, ROOM), best, is_whole, settings, sums, n_sum, uniform,
            ROOM, SUMS,
        )  # fmt: skip
    is_known = is_known & (n_found <= ROOM)
    now = tl.where(is_usable, tl.where(is_known, DRAWN, FOR_HOST), UNUSABLE).to(tl.int64)
    ending = tl.where(halt == DRAWN, now, halt)
    is_drawn = ending == DRAWN
    token = tl.where(is_drawn, token, 0)
    _accept(token, is_drawn, settings, state, counts, history)
    tl.store(ids, token, mask=is_drawn)
    tl.store(position, tl.load(position) + 1, mask=is_drawn)
    entry = ((n_step + 1) << ENTRY_BITS) | (ending << WORD_BITS) | token
    tl.store(ring + n_step % RING, entry)
    tl.store(state + N_STEP, n_step + 1)
    tl.store(state + N_UNIFORM, n_uniform + 1, mask=is_drawn)
    tl.store(state + HALT, ending)
