"""Four small kernels that sample a token from logits as `engine.decoding.sampling.sampler` does.

`survey` reads all logits, applies the penalties and finds the largest in each group of neighbours.
From those, `bound` finds a threshold that enough tokens reach; `gather` collects these tokens, in
any order; `draw` sorts and filters them, samples one, and writes the next step's inputs.

`settings`, `state`, `limits` and `found` are vectors with the indices below. If each rank has a
slice of the logits, `sharded_sampling` replaces the last two kernels.

The second grid dimension is the row: several rows are sampled in parallel. `rows`, int32 (rows, 3),
has, for each row, its index in the logits; its slot, which is its sampler's index in all other
tensors (dense, slots first); and its mask's index, or -1 for no mask.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.asm import atomic_add

# indices in `settings`
REPEAT, FREQUENCY, PRESENCE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
IS_PENALISED = tl.constexpr(3)
N_LAST = tl.constexpr(4)  # number of tokens that the penalties consider; -1 for all, 0 for none
N_WANTED = tl.constexpr(5)  # number of most likely tokens to consider
IS_TOP_K = tl.constexpr(6)  # whether only those have a probability; otherwise all count for top-p
TOP_P = tl.constexpr(7)
MIN_P = tl.constexpr(8)  # logarithm of min-p, rounded to F32; -inf for none
TEMPERATURE = tl.constexpr(9)
IS_BY_ID = tl.constexpr(10)  # whether tokens are accumulated by ascending id, not descending logit
N_SETTING = tl.constexpr(11)

N_STEP, N_UNIFORM, N_HISTORY, HALT = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3),
)  # fmt: skip
"""Indices in `state`: steps so far; random numbers used; tokens added to the history; how sampling
ended, or DRAWN if it has not."""
N_STATE = tl.constexpr(4)

BEST, BOUND = tl.constexpr(0), tl.constexpr(1)
"""Indices in `limits`: the largest logit, infinite if none is usable; the candidates' threshold."""
N_LIMIT = tl.constexpr(2)
N_FOUND, IS_WHOLE, N_DONE, CHECK = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3),
)  # fmt: skip
"""Indices in `found`: number of candidates; whether no other token could pass the filters; finished
programs in the kernel after `bound`; checksum of the residual stream."""
N_FACT = tl.constexpr(4)

DRAWN, UNUSABLE, FOR_HOST, WRONG = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3),
)  # fmt: skip
"""Outcomes of a step: a token; logits are NaN or infinite; the host has to sample; the ranks'
numbers differ, and a bit for each seat to blame replaces the id."""

ENDING_BITS, ENDING_MASK = tl.constexpr(4), tl.constexpr((1 << 4) - 1)  # the outcome's bits in HALT
WORD_BITS, ENTRY_BITS = tl.constexpr(32), tl.constexpr(36)
"""Shifts in a ring entry: `(step number << ENTRY_BITS) | (outcome << WORD_BITS) | id`."""

LARGEST = tl.constexpr((1 << 31) - 1)  # int32
LOWEST = tl.constexpr(-(1 << 63))  # int64
RANK_OF_NONE = tl.constexpr(0x007FFFFF)  # `rank_of(-inf)`, below the ranks of all numbers


@triton.jit
def rank_of(x):
    """Return uint32 values in the order of x (F32), equal for equal x, including 0 and -0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def number_of(rank):
    """Return the F32 value for a result of `rank_of`."""
    bits = tl.where((rank >> 31) != 0, rank ^ 0x80000000, rank ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def below(x, best):
    """Return x (F32) minus the largest logit, as F64."""
    return x.to(tl.float64) - best.to(tl.float64)


@triton.jit
def _filtered(x, there, n, best, is_whole, total, settings):
    """Return a mask of the candidates that pass top-p and min-p, and whether no other token does.

    Args:
        x: logits in the order of accumulation, (N,); the first n are `there`.
        total: sum of all tokens' probabilities, relative to the largest; unused with top-k.
    """
    lane = tl.arange(0, x.shape[0])
    is_known = (tl.load(settings + IS_TOP_K) != 0) | is_whole
    keep = there
    top_p = tl.load(settings + TOP_P)
    if top_p < 1:
        weight = tl.where(there, tl.exp(below(x, best)), 0.0)
        if tl.load(settings + IS_TOP_K) != 0:
            total = tl.sum(weight)
        total = tl.where(total > 0, total, 1.0)  # if no token is allowed
        n_less = tl.sum((there & (tl.cumsum(weight, axis=0) / total < top_p)).to(tl.int32))
        keep = there & (lane <= n_less)
        is_known = is_known | (n_less < n)
    return keep & (x >= best + tl.load(settings + MIN_P).to(tl.float32)), is_known


@triton.jit
def sort(x, n, run, SIZE: tl.constexpr):
    """Sort x (SIZE,) in descending order: a bitonic sort, written as a loop to keep the code short.

    Args:
        n: number of entries; the rest are LOWEST.
        run: 2, or twice the length of already sorted runs, alternately descending and ascending.
    """
    lane = tl.arange(0, SIZE)
    run = tl.full((), 0, tl.int32) + run  # not a compile-time constant, so that loops stay loops
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
    """Return the token for a uniform random number, and whether the candidates determine it.

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
    """Add `change` to a token's count in the history if the token is in the rank's slice."""
    own = token - first
    if is_wanted & (own >= 0) & (own < n_own):
        atomic_add(counts + own, change, "relaxed")


@triton.jit
def _accept(token, is_drawn, settings, state, counts, history, first, n_own):
    """Add a token to the history, and remove the one that leaves the penalty window."""
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

    If no token was sampled, this step and all later ones change only the ring; the same token at
    the same position is then computed again.

    Args:
        token: the sampled token, or the value that replaces its id.
        now: this step's outcome, if no earlier step halted.
        counts: counts in the history for n_own tokens, starting at `first`.
    """
    halt, n_step = tl.load(state + HALT), tl.load(state + N_STEP)
    is_new = halt == DRAWN
    is_drawn = is_new & (now == DRAWN)
    shown = tl.where((now == UNUSABLE) | (now == FOR_HOST), 0, token)
    result = tl.where(is_new, now | (shown << ENDING_BITS), halt)
    token = tl.where(is_drawn, token, 0)
    _accept(token, is_drawn, settings, state, counts, history, first, n_own)
    tl.store(ids, token, mask=is_drawn)
    tl.store(position, tl.load(position) + 1, mask=is_drawn)
    ending = result & ENDING_MASK
    entry = ((n_step + 1) << ENTRY_BITS) | (ending << WORD_BITS) | (result >> ENDING_BITS)
    tl.store(ring + n_step % RING, entry)
    n_uniform = tl.load(state + N_UNIFORM)
    tl.store(state + N_STEP, n_step + 1)
    tl.store(state + N_UNIFORM, n_uniform + 1, mask=is_drawn)
    tl.store(state + HALT, result, mask=is_new & (now != DRAWN))


@triton.jit
def _slot(rows):
    return tl.load(rows + 3 * tl.program_id(1) + 1)


@triton.jit(do_not_specialize=["n_vocab"])
def survey(logits, rows, masks, counts, settings, penalised, maxima, n_vocab, FACTOR: tl.constexpr,
           BLOCK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Compute logits after penalties, and the largest in each GROUP; BLOCK logits per program.

    NaN becomes +inf, so it shows in the maxima.

    Args:
        logits, penalised: input and output, F32 (n_vocab,) per row and per slot.
        masks: a bit for each allowed token, int32 (ceil(n_vocab / 32),) per mask.
        counts: each token's count in the history, int32 (n_vocab,); negative if it is banned.
        maxima: output, F32 (ceil(n_vocab / BLOCK) * BLOCK / GROUP,).
        FACTOR: a power of two that divides n_vocab, so that loads can be wide.
    """
    slot, width = _slot(rows), n_vocab // FACTOR * FACTOR  # shows the compiler the factor
    logits += tl.load(rows + 3 * tl.program_id(1)) * width
    mask = tl.load(rows + 3 * tl.program_id(1) + 2)
    counts += slot * width
    penalised += slot * width
    settings += slot * N_SETTING
    maxima += slot * tl.num_programs(0) * (BLOCK // GROUP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(logits + at, mask=inside, other=-float("inf"))
    count = tl.load(counts + at, mask=inside, other=0)
    word = masks + mask * ((n_vocab + 31) // 32) + at // 32
    may_come = (tl.load(word, mask=inside & (mask >= 0), other=-1) >> (at % 32)) & 1
    x = tl.where((count < 0) | (may_come == 0), -float("inf"), x)
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


@triton.jit
def _check_of(stream, n_embd, BLOCK: tl.constexpr):
    """Return an int32 checksum of a residual stream, F32 (n_embd,); all NaNs count as equal.

    Each number is mixed with its index (Appleby's MurmurHash3 finaliser); sums of integers do not
    depend on their order.
    """
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, n_embd, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(stream + at, mask=at < n_embd, other=0.0)
        word = tl.where(x == x, x, float("inf")).to(tl.uint32, bitcast=True)
        word = word ^ (at.to(tl.uint32) * 0x9E3779B1)
        word = (word ^ (word >> 16)) * 0x85EBCA6B
        word = (word ^ (word >> 13)) * 0xC2B2AE35
        total += tl.where(at < n_embd, (word ^ (word >> 16)).to(tl.int64), 0)
    return tl.sum(total).to(tl.int32)


@triton.jit(do_not_specialize=["n_group", "n_maxima", "n_embd"])
def bound(maxima, stream, rows, settings, limits, found, n_group, n_maxima, n_embd,
          SIZE: tl.constexpr, HAS_STREAM: tl.constexpr, STREAM_BLOCK: tl.constexpr):  # fmt: skip
    """Find a threshold that the wanted tokens reach, and few others; one program per row.

    As many maxima reach it as tokens are wanted, and each is a different token. The threshold is
    found bit by bit, starting with the highest, until the count is right. If top-k is off, min-p
    may raise it, since min-p excludes all lower tokens anyway.

    Args:
        maxima: F32 (n_maxima,), of which the first n_group count.
        stream: residual stream behind the first row's logits, F32 (n_embd,), if HAS_STREAM; ranks
            compare its checksum.
        SIZE: a power of two, at least n_group.
        STREAM_BLOCK: elements of the stream to read per iteration.
    """
    slot, at = _slot(rows), tl.arange(0, SIZE)
    settings += slot * N_SETTING
    limits += slot * N_LIMIT
    found += slot * N_FACT
    maxima += slot * n_maxima
    x = tl.load(maxima + at, mask=at < n_group, other=-float("inf"))
    best = tl.max(x)
    ranks = rank_of(x)
    n_wanted = tl.load(settings + N_WANTED).to(tl.int32)
    low = tl.where(n_wanted == 1, rank_of(best), 0).to(tl.uint32)
    bit = tl.where(n_wanted == 1, 0, 0x80000000).to(tl.uint32)
    while bit != 0:
        tried = low | bit
        n = tl.sum((ranks >= tried).to(tl.int32))
        low = tl.where(n >= n_wanted, tried, low)
        bit = tl.where(n == n_wanted, 0, bit >> 1).to(tl.uint32)
    reached = number_of(tl.maximum(low, RANK_OF_NONE).to(tl.uint32))
    is_whole = (n_wanted >= n_group) | (reached == -float("inf"))
    if tl.load(settings + IS_TOP_K) == 0:
        is_finite = (best > -float("inf")) & (best < float("inf"))
        least = tl.where(is_finite, best, 0.0) + tl.load(settings + MIN_P).to(tl.float32)
        is_whole = is_whole | (least >= reached)
        reached = tl.maximum(reached, least)
    tl.store(limits + BEST, best)
    tl.store(limits + BOUND, reached)
    tl.store(found + N_FOUND, 0)
    tl.store(found + N_DONE, 0)
    if HAS_STREAM:
        tl.store(found + CHECK, _check_of(stream, n_embd, STREAM_BLOCK))
    tl.store(found + IS_WHOLE, is_whole.to(tl.int32))


@triton.jit
def candidates_of(penalised, settings, limits, found, candidates, sums, n_vocab, first,
                  IS_SPLIT: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr,
                  ROOM: tl.constexpr):  # fmt: skip
    """Do one program's part of `gather`; `first` is the first logit's token id.

    Args:
        IS_SPLIT: whether to pack candidates by descending logit, whatever order `choose` needs.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n_vocab // FACTOR * FACTOR  # shows the compiler the factor
    x = tl.load(penalised + at, mask=inside, other=-float("inf"))
    best = tl.load(limits + BEST)
    x = tl.where(x == float("inf"), -float("inf"), x)
    is_in = (x >= tl.load(limits + BOUND)) & (x > -float("inf"))
    n = tl.sum(is_in.to(tl.int32))
    if n > 0:
        start = atomic_add(found + N_FOUND, n, "relaxed")
        place = start + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
        rank = rank_of(x).to(tl.int64)
        turn = ((at + first) ^ LARGEST).to(tl.int64)
        packed = ((rank - 0x80000000) << 32) | turn
        if not IS_SPLIT:
            packed = tl.where(tl.load(settings + IS_BY_ID) != 0, (turn << 32) | rank, packed)
        tl.store(candidates + place, packed, mask=is_in & (place < ROOM))
    if (tl.load(settings + IS_TOP_K) == 0) & (tl.load(settings + TOP_P) < 1):
        best = tl.where(tl.abs(best) == float("inf"), 0.0, best)
        tl.store(sums + tl.program_id(0), tl.sum(tl.exp(below(x, best))))


@triton.jit
def total_of(sums, n_sum, settings, SUMS: tl.constexpr):
    """Return the total of all programs' `sums`, including this kernel's; 0 if none are written."""
    at = tl.arange(0, SUMS)
    n = tl.where(tl.load(settings + TOP_P) < 1, n_sum, 0)
    n = tl.where(tl.load(settings + IS_TOP_K) != 0, 0, n)
    return tl.sum(tl.load(sums + at, mask=at < n, other=0.0, cache_modifier=".cg"))


@triton.jit(do_not_specialize=["n_vocab"])
def gather(penalised, rows, settings, limits, found, candidates, sums, n_vocab,
           FACTOR: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
    """Gather the tokens that reach the bound, packed for `choose` to take in descending order.

    Args:
        candidates: output, int64 (ROOM,): the logit's rank in the upper half, which decides the
            order, and the id counted from above in the lower half.
        sums: output, F64 (programs,): sums of all tokens' probabilities, relative to the largest;
            written if top-p needs them.
    """
    slot = _slot(rows)
    candidates_of(
        penalised + slot * (n_vocab // FACTOR * FACTOR), settings + slot * N_SETTING,
        limits + slot * N_LIMIT, found + slot * N_FACT, candidates + slot * ROOM,
        sums + slot * tl.num_programs(0), n_vocab, 0, False, FACTOR, BLOCK, ROOM,
    )  # fmt: skip


@triton.jit
def _of_all(candidates, n_found, best, is_whole, total, settings, uniform, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    packed = tl.load(candidates + lane, mask=lane < n_found, other=LOWEST)
    packed = sort(packed, n_found, 2, SIZE)
    return choose(packed, n_found, best, is_whole, total, settings, uniform, SIZE)


@triton.jit(do_not_specialize=["n_sum", "n_vocab", "n_uniform", "n_history"])
def draw(rows, candidates, sums, settings, limits, found, uniforms, state, counts, history, ids,
         position, ring, n_sum, n_vocab, n_uniform, n_history, FEW: tl.constexpr,
         ROOM: tl.constexpr, SUMS: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """Sample a token and write the next step's inputs (see `finish`); one program per row.

    Args:
        uniforms: ring of random numbers in [0, 1), F64 (n_uniform,).
        state: int64 (N_STATE,).
        history: ring of the last tokens, int32 (n_history,).
        ids, position: the next step's token and position, (1,).
        ring: ring of results for the host, int64 (RING,); see ENTRY_BITS.
        FEW: number of candidates up to which a smaller sort is enough.
        SUMS: a power of two, at least n_sum.
    """
    slot = _slot(rows)
    candidates += slot * ROOM
    sums += slot * n_sum
    settings += slot * N_SETTING
    limits += slot * N_LIMIT
    found += slot * N_FACT
    state += slot * N_STATE
    n_found, is_whole = tl.load(found + N_FOUND), tl.load(found + IS_WHOLE) != 0
    best = tl.load(limits + BEST)
    is_usable = (best > -float("inf")) & (best < float("inf"))
    best = tl.where(is_usable, best, 0.0)
    uniform = tl.load(uniforms + slot * n_uniform + tl.load(state + N_UNIFORM) % n_uniform)
    total = total_of(sums, n_sum, settings, SUMS)
    if n_found <= FEW:
        token, is_known = _of_all(
            candidates, n_found, best, is_whole, total, settings, uniform, FEW
        )
    else:
        token, is_known = _of_all(
            candidates, tl.minimum(n_found, ROOM), best, is_whole, total, settings, uniform, ROOM
        )
    is_known = is_known & (n_found <= ROOM)
    now = tl.where(is_usable, tl.where(is_known, DRAWN, FOR_HOST), UNUSABLE).to(tl.int64)
    finish(token, now, settings, state, counts + slot * n_vocab, history + slot * n_history,
           ids + slot, position + slot, ring + slot * RING, 0, n_vocab, RING)  # fmt: skip
