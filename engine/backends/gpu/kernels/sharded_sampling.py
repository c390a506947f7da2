"""Sharded sampling: ranks that each have a slice of the logits all sample the same token.

After `sampling.survey` and `sampling.bound` on its slice, a rank offers its candidates: `offer`
gathers and packs them into a message, the ranks exchange messages, and `decide` merges them in seat
order. It uses only data that all ranks have, so all sample the same token.

A message is int64: MARK, CHECK_WORD, INFO and SUM, then SENT candidates by descending logit, packed
as in `sampling.gather`.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.asm import atomic_add
from engine.backends.gpu.kernels.sampling import (
    BEST,
    CHECK,
    DRAWN,
    FOR_HOST,
    IS_BY_ID,
    IS_WHOLE,
    LOWEST,
    MIN_P,
    N_DONE,
    N_FOUND,
    N_STEP,
    N_UNIFORM,
    N_WANTED,
    UNUSABLE,
    WRONG,
    below,
    candidates_of,
    choose,
    finish,
    number_of,
    sort,
    total_of,
)  # fmt: skip

MARK = tl.constexpr(0)  # the step's number; in the lower half, the token before the sampled one
CHECK_WORD = tl.constexpr(1)  # lower half: the hidden state's checksum; upper: whether there is one
INFO = tl.constexpr(2)  # number of candidates, OVER_BIT, LACKS_BIT; above them, the largest logit
SUM = tl.constexpr(3)  # sum of the slice's probabilities, relative to its largest one
N_HEAD = tl.constexpr(4)  # words before the candidates

OVER_BIT, LACKS_BIT = tl.constexpr(1 << 16), tl.constexpr(1 << 17)
"""Bits in INFO: there was no room for all candidates; other tokens could pass the filters."""

LOWER_HALF = tl.constexpr((1 << 32) - 1)


@triton.jit(do_not_specialize=["n_own", "first", "n_sum"])
def offer(penalised, settings, limits, found, candidates, sums, state, ids, message, n_own, first,
          n_sum, HAS_STREAM: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr,
          FEW: tl.constexpr, ROOM: tl.constexpr, SENT: tl.constexpr,
          SUMS: tl.constexpr):  # fmt: skip
    """Gather a slice's candidates like `sampling.gather`; the last program writes the message.

    Args:
        message: output, int64 (N_HEAD + SENT,).
        n_own, first: number of logits, and the first one's id.
        n_sum: number of programs.
        SENT: maximum number of candidates in a message, not less than the number wanted.
        SUMS: a power of two, at least n_sum.
    """
    candidates_of(penalised, settings, limits, found, candidates, sums, n_own, first, True, FACTOR,
                  BLOCK, ROOM)  # fmt: skip
    tl.debug_barrier()  # all threads have written before one counts the program
    if atomic_add(found + N_DONE, 1, "acq_rel") == n_sum - 1:
        n_found = tl.load(found + N_FOUND, cache_modifier=".cg")
        n_sent = tl.minimum(n_found, tl.load(settings + N_WANTED).to(tl.int32))
        if n_found <= FEW:
            _send(candidates, n_found, n_sent, message, FEW)
        else:
            _send(candidates, tl.minimum(n_found, ROOM), n_sent, message, ROOM)
        step = tl.load(state + N_STEP) & LOWER_HALF
        tl.store(message + MARK, (step << 32) | tl.load(ids).to(tl.int64))
        check = tl.zeros((), tl.int64)
        if HAS_STREAM:
            check = (1 << 32) | (tl.load(found + CHECK).to(tl.int64) & LOWER_HALF)
        tl.store(message + CHECK_WORD, check)
        lacks = (tl.load(found + IS_WHOLE) == 0) | (n_sent < n_found)
        info = n_sent | tl.where(n_found > ROOM, OVER_BIT, 0) | tl.where(lacks, LACKS_BIT, 0)
        best = tl.load(limits + BEST).to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(message + INFO, (best << 32) | info.to(tl.int64))
        total = total_of(sums, n_sum, settings, SUMS)
        tl.store(message + SUM, total.to(tl.int64, bitcast=True))


@triton.jit
def _send(candidates, n, n_sent, message, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    packed = tl.load(candidates + lane, mask=lane < n, other=LOWEST, cache_modifier=".cg")
    packed = sort(packed, n, 2, SIZE)
    tl.store(message + N_HEAD + lane, packed, mask=lane < n_sent)


@triton.jit
def _best_of(info):
    """Return each slice's largest logit; infinite if a link has corrupted it to NaN."""
    best = (info >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(best == best, best, float("inf"))


@triton.jit
def _n_sent(info, STRIDE: tl.constexpr):
    """Return the number of candidates as int32, limited in case a link has corrupted it."""
    return tl.minimum((info & (OVER_BIT - 1)).to(tl.int32), STRIDE - N_HEAD)


@triton.jit
def _agree(mark, check, other_mark, other_check):
    """Return whether two ranks' marks and checksums agree; some ranks have no checksum."""
    is_same = (check == other_check) | ((check >> 32) == 0) | ((other_check >> 32) == 0)
    return (mark == other_mark) & is_same


@triton.jit
def _wrong(msgs, own, seat, n_rank, SEATS: tl.constexpr, STRIDE: tl.constexpr):
    """Return a bit for each seat whose numbers differ from the rest.

    These are the seats that no majority agrees with. If there are none because not all ranks can
    be compared, they are the seats with less agreement than another. If the message that this rank
    reads back differs from its own, messages were not exchanged, and only this seat is named.
    """
    mine, other = tl.arange(0, SEATS)[:, None], tl.arange(0, SEATS)[None, :]
    is_mine, is_other = mine < n_rank, other < n_rank
    agree = _agree(
        tl.load(msgs + mine * STRIDE + MARK, mask=is_mine, other=0),
        tl.load(msgs + mine * STRIDE + CHECK_WORD, mask=is_mine, other=0),
        tl.load(msgs + other * STRIDE + MARK, mask=is_other, other=0),
        tl.load(msgs + other * STRIDE + CHECK_WORD, mask=is_other, other=0),
    )
    n_agree = tl.sum((agree & is_mine & is_other).to(tl.int32), axis=1)
    at = tl.arange(0, SEATS)
    is_alone = (at < n_rank) & (n_agree * 2 <= n_rank)
    is_less = (at < n_rank) & (n_agree < tl.max(n_agree))
    is_named = tl.where(tl.max(is_alone.to(tl.int32)) != 0, is_alone, is_less)
    seats = tl.sum(tl.where(is_named, 1, 0).to(tl.int64) << at.to(tl.int64))
    is_read = tl.load(msgs + seat * STRIDE + MARK) == tl.load(own + MARK)
    is_read = is_read & (tl.load(msgs + seat * STRIDE + CHECK_WORD) == tl.load(own + CHECK_WORD))
    return tl.where(is_read, seats, tl.full((), 1, tl.int64) << seat)


@triton.jit
def _logit_of(packed):
    return number_of(((packed >> 32) + 0x80000000).to(tl.uint32))


@triton.jit
def _merged(msgs, n_rank, settings, limit, best, total, n_each, uniform, SIZE: tl.constexpr,
            STRIDE: tl.constexpr):  # fmt: skip
    """Merge all ranks' candidates, except those below a limit, and `choose` a token.

    Args:
        limit: packed candidate; below it, there may be tokens that no rank has sent.
        n_each: a power of two, at least any rank's number of candidates.
        SIZE: at least n_each per rank.
    """
    lane = tl.arange(0, SIZE)
    rank, place = lane // n_each, lane % n_each
    is_rank = rank < n_rank
    info = tl.load(msgs + rank * STRIDE + INFO, mask=is_rank, other=0)
    # alternately descending and ascending, like the runs in a bitonic sort
    place = tl.where(rank % 2 != 0, n_each - 1 - place, place)
    there = is_rank & (place < _n_sent(info, STRIDE))
    packed = tl.load(msgs + rank * STRIDE + N_HEAD + place, mask=there, other=LOWEST)
    there = there & (packed >= limit)
    least = best + tl.load(settings + MIN_P).to(tl.float32)
    is_by_id = tl.load(settings + IS_BY_ID) != 0
    # if sorted by id, candidates below min-p of the overall largest logit would lie between others
    there = there & ((_logit_of(packed) >= least) | (is_by_id == 0))
    by_id = ((packed & LOWER_HALF) << 32) | ((packed >> 32) + 0x80000000)
    packed = tl.where(there, tl.where(is_by_id, by_id, packed), LOWEST)
    packed = sort(packed, n_rank * n_each, tl.where(is_by_id, 2, 2 * n_each), SIZE)
    is_whole = (limit == LOWEST) | (_logit_of(limit) < least)
    n = tl.sum(there.to(tl.int32))
    return choose(packed, n, best, is_whole, total, settings, uniform, SIZE)


@triton.jit(do_not_specialize=["seat", "n_rank", "n_own", "first", "n_vocab"])
def decide(msgs, own, settings, uniforms, state, counts, history, ids, position, ring, seat, n_rank,
           n_own, first, n_vocab, SEATS: tl.constexpr, FEW: tl.constexpr, SENT: tl.constexpr,
           UNIFORMS: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """Sample a token from all ranks' messages and write the next step's inputs; one program.

    Args:
        msgs: all ranks' messages, int64 (n_rank, N_HEAD + SENT).
        own: the message that this rank sent, (N_HEAD + SENT,).
        uniforms: for this and the next arguments, see `sampling.draw`.
        counts: counts in the history for n_own tokens, starting at `first`.
        SEATS: a power of two, at least n_rank.
        FEW: candidates per rank up to which a smaller sort is enough.
    """
    STRIDE: tl.constexpr = N_HEAD + SENT
    at = tl.arange(0, SEATS)
    there = at < n_rank
    info = tl.load(msgs + at * STRIDE + INFO, mask=there, other=0)
    bests = tl.where(there, _best_of(info), -float("inf"))
    best = tl.max(bests)
    is_usable = (best > -float("inf")) & (best < float("inf"))
    best = tl.where(is_usable, best, 0.0)
    sums = tl.load(msgs + at * STRIDE + SUM, mask=there, other=0).to(tl.float64, bitcast=True)
    is_finite = (bests > -float("inf")) & (bests < float("inf"))
    factors = tl.exp(tl.where(is_finite, below(bests, best), 0.0))
    total = tl.sum(tl.where(is_finite, sums * factors, 0.0))
    n_sent = _n_sent(info, STRIDE)
    lacks = there & ((info & LACKS_BIT) != 0)
    last = tl.maximum(n_sent - 1, 0)
    limits = tl.load(msgs + at * STRIDE + N_HEAD + last, mask=lacks & (n_sent > 0), other=LOWEST)
    limit = tl.max(limits)
    is_over = tl.max((there & ((info & OVER_BIT) != 0)).to(tl.int32))
    uniform = tl.load(uniforms + tl.load(state + N_UNIFORM) % UNIFORMS)
    n_most, n_each = tl.max(n_sent), 1
    while n_each < n_most:
        n_each = n_each * 2
    if n_each <= FEW:
        token, is_known = _merged(
            msgs, n_rank, settings, limit, best, total, n_each, uniform, SEATS * FEW, STRIDE
        )
    else:
        token, is_known = _merged(
            msgs, n_rank, settings, limit, best, total, n_each, uniform, SEATS * SENT, STRIDE
        )
    is_known = is_known & (is_over == 0) & (token < n_vocab)  # a link may have corrupted the id
    now = tl.where(is_known, DRAWN, FOR_HOST)
    now = tl.where(is_usable, now, UNUSABLE).to(tl.int64)
    seats = _wrong(msgs, own, seat, n_rank, SEATS, STRIDE)
    now = tl.where(seats != 0, WRONG, now).to(tl.int64)
    token = tl.where(seats != 0, seats, token)
    finish(token, now, settings, state, counts, history, ids, position, ring, first, n_own, RING)
