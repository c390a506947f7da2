"""One-shot all-reduce kernels: each rank writes its values into the slots of all others.

A value travels in 64-bit packets: a 32-bit word (one F32 number or two BF16 numbers), and the round
number as a flag. Both are written together, so a reader that sees the flag also has the word
(NCCL's LL protocol). Packets are written in adjacent pairs; each packet is atomic on its own.

Why no packet is overwritten before it has been read: rounds alternate between the two halves of
each slot. Suppose A writes round r into B's slot. A's kernel for round r - 1 has finished by then,
so it had received a packet for that round from B. B's kernel for round r - 1 only starts after its
kernel for round r - 2 has finished, so B has read all that A wrote in round r - 2, the previous
content of this half. This only requires that in each round every member writes something for every
other one (just a header if it has no values), and that a rank's kernels run in sequence.

Why no old packet is mistaken for a new one after the 32-bit round number wraps around: in each
round, a member also rewrites some unused packets in its own slots, which no one reads, so that none
is more than a few thousand rounds old.

Why all threads in a program leave a loop together: the values they read there (flags, clocks, the
host's words) may differ between threads, so conditions only use values reduced over all threads.
Only one thread reads each pair of packets, because a program has at least as many pairs as threads;
otherwise, one thread could continue with data that another has not yet seen.

No program waits for another program in its kernel, since that one may not have started.

Slots in host memory are read over the link. If all threads polled there, their requests would fill
the link and delay the very packets they wait for. So a program first polls one pair of packets per
warp, and reads all pairs once these have arrived.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.asm import atomic_add, store_pair
from engine.backends.gpu.kernels.elementwise import add_norm_of

HEADER = tl.constexpr(2)  # packets in the header of a slot's half; one says if there are values
HAS_VALUES, IS_EMPTY = tl.constexpr(1), tl.constexpr(2)  # words in a header
RENEWED = tl.constexpr(32)  # pairs of packets that are rewritten per slot and round
LOOK = tl.constexpr(64)  # polls between checks of the host's word

MAX_MEMBERS = tl.constexpr(8)
"""Maximum group size: kernels are unrolled over the members, and `received` needs seat + 1 < 16."""

UNREAD = tl.constexpr(1 << 16)
"""Added to the state of a pair that was read but is missing; more than any unread pair's state."""

GIVEN_UP, ABORTED, LATE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Reasons to stop waiting: an earlier kernel gave up, the host aborted, or time ran out."""


@triton.jit
def clock():
    """Return NVIDIA's global timer, in units of 1024 ns."""
    now = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    return now >> 10


@triton.jit
def time_now(epoch, ASM: tl.constexpr):
    """Return `clock()` if the target has one, else 0."""
    if ASM:
        return clock()
    else:
        return epoch.to(tl.int64) * 0


@triton.jit
def write_pair(address, first, second, flag, mask, ASM: tl.constexpr):
    """Write two packets with the same `flag` at each address, which is a multiple of 16 bytes."""
    if ASM:
        tl.inline_asm_elementwise(
            store_pair(), "=r,l,r,r,r,r", [address, first, second, flag, mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        at = address.to(tl.pointer_type(tl.int64))
        upper = flag.to(tl.int64) << 32
        low, high = first.to(tl.int64) & 0xFFFFFFFF, second.to(tl.int64) & 0xFFFFFFFF
        tl.store(at, upper | low, mask=mask, cache_modifier=".wt")
        tl.store(at + 1, upper | high, mask=mask, cache_modifier=".wt")


@triton.jit
def read_pair(address, mask, ASM: tl.constexpr):
    """Read two packets, bypassing caches; return the first's word and flag, then the second's."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, $5, 0; mov.b64 a, 0; mov.b64 b, 0; "
            "@p ld.volatile.global.v2.b64 {a, b}, [$4]; mov.b64 {$0, $1}, a; "
            "mov.b64 {$2, $3}, b; }",
            "=r,=r,=r,=r,l,r", [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b, c, d
    else:
        at = address.to(tl.pointer_type(tl.int64))
        one = tl.load(at, mask=mask, other=0, cache_modifier=".cv")
        two = tl.load(at + 1, mask=mask, other=0, cache_modifier=".cv")
        return (
            one.to(tl.int32), (one >> 32).to(tl.int32), two.to(tl.int32), (two >> 32).to(tl.int32)
        )  # fmt: skip


@triton.jit
def read_word(at, mask, ASM: tl.constexpr):
    """Read 64 bits, bypassing caches; Triton's options for that differ between GPU makers."""
    if ASM:
        return tl.load(at, mask=mask, other=0, volatile=True)
    else:
        return tl.load(at, mask=mask, other=0, cache_modifier=".cv")


@triton.jit
def as_bf16(value):
    """Return the nearest BF16 (ties to even) in the lower 16 of 32 bits; equal on all targets."""
    bits = value.to(tl.int32, bitcast=True)
    near = bits + 0x7FFF + ((bits >> 16) & 1)
    near = tl.where(value == value, near, bits | 0x400000)  # else some NaNs would become infinite
    return (near >> 16) & 0xFFFF


@triton.jit
def words_of(x, at, n, HALVES: tl.constexpr):
    """Return the two words for each of the packet pairs `at`, given n numbers x.

    If HALVES, numbers are rounded to BF16, four to a pair; otherwise a pair has two F32 numbers.
    """
    if HALVES:
        at *= 4
        a, b = tl.load(x + at, mask=at < n, other=0), tl.load(x + at + 1, at + 1 < n, other=0)
        c, d = tl.load(x + at + 2, at + 2 < n, other=0), tl.load(x + at + 3, at + 3 < n, other=0)
        return as_bf16(a) | (as_bf16(c) << 16), as_bf16(b) | (as_bf16(d) << 16)
    else:
        at *= 2
        a, b = tl.load(x + at, mask=at < n, other=0), tl.load(x + at + 1, at + 1 < n, other=0)
        return a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)


@triton.jit
def numbers_of(first, second, HALVES: tl.constexpr):
    """Return the numbers in words from `words_of`, in order: (pairs, 2), or (pairs, 2, 2)."""
    if HALVES:
        even = tl.join((first << 16), (first >> 16) << 16)
        odd = tl.join((second << 16), (second >> 16) << 16)
        return tl.join(even, odd).to(tl.float32, bitcast=True)
    else:
        return tl.join(first, second).to(tl.float32, bitcast=True)


@triton.jit
def half_of(table, member, epoch, SLOT: tl.constexpr):
    """Return the address of the half slot that a round uses; it has SLOT packets."""
    return tl.load(table + member) + (epoch & 1).to(tl.int64) * (SLOT * 8)


@triton.jit
def push(table, seat, epoch, at, first, second, inside, n_pairs, N: tl.constexpr,
         HAS_OWN: tl.constexpr, SLOT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Write this program's packet pairs `at` for all other members; program 0 adds the header.

    `n_pairs` counts all programs' pairs.
    """
    lane = tl.arange(0, at.shape[0]).to(tl.int64)
    header = at * 0 + (HAS_VALUES if HAS_OWN else IS_EMPTY)
    turn = ((epoch >> 1) & 0x7FFFFFFF).to(tl.int64)
    old = turn % ((SLOT - HEADER) // (2 * RENEWED)) * RENEWED + lane
    is_old = lane < RENEWED
    if HAS_OWN:
        is_old = is_old & (old >= n_pairs)
    for peer in tl.static_range(N):
        if peer != seat:
            half = half_of(table, peer, epoch, SLOT)
            pairs = half + HEADER * 8
            if HAS_OWN:
                write_pair(pairs + at.to(tl.int64) * 16, first, second, epoch, inside, ASM)
            if tl.program_id(0) == 0:
                write_pair(half + lane * 16, header, header, epoch, lane == 0, ASM)
                write_pair(pairs + old * 16, header, header, epoch - 2, is_old, ASM)


@triton.jit
def received(table, seat, begin, epoch, at, inside, stop, begun, turn, patience, probe, nothing,
             N: tl.constexpr, TOGETHER: tl.constexpr, SLOT: tl.constexpr,
             ASM: tl.constexpr):  # fmt: skip
    """Wait for the pairs `at` from TOGETHER members, starting at seat `begin`.

    Args:
        stop: whether not to wait.
        begun, turn: when this program started to wait, and its number of polls since then.
        probe: distance between the pairs polled until all of those have arrived; 1 polls all.
        nothing: word for missing packets: from members without values, and from this rank.

    Returns:
        Both words of each pair, for each member; the number of polls; and 0, or 16 * the reason to
        stop waiting + 1 + the missing member's seat.
    """
    M: tl.constexpr = N - begin if N - begin < TOGETHER else TOGETHER
    addresses, headers, firsts, seconds = (), (), (), ()
    for k in tl.static_range(M):
        half = half_of(table, N + begin + k, epoch, SLOT)
        addresses = addresses + (half + (HEADER * 8 + at.to(tl.int64) * 16),)
        headers = headers + (half.to(tl.pointer_type(tl.int64)),)
        firsts, seconds = firsts + (at * 0,), seconds + (at * 0,)
    empty = (epoch.to(tl.int64) << 32) | IS_EMPTY
    state, is_aborted, reads_all = epoch * 0 + 1, epoch * 0, epoch * 0
    is_probe = tl.arange(0, at.shape[0]) % probe == 0
    while (state > 0) & (state < 16):
        reads, heads = (), ()
        is_read = inside & (is_probe | (reads_all != 0))
        for k in tl.static_range(M):  # all loads are in flight before the first is used
            reads = reads + (read_pair(addresses[k], is_read & (begin + k != seat), ASM),)
            heads = heads + (read_word(headers[k], begin + k != seat, ASM),)
        new_firsts, new_seconds, missing = (), (), at * 0
        for k in tl.static_range(M):
            first, flag, second, flag_2 = reads[k]
            is_there = (flag == epoch) & (flag_2 == epoch) & is_read
            new_firsts = new_firsts + (tl.where(is_there, first, nothing),)
            new_seconds = new_seconds + (tl.where(is_there, second, nothing),)
            is_missing = (is_there == 0) & (heads[k] != empty) & (begin + k != seat)
            missing = tl.where(is_missing & (missing == 0), begin + k + 1, missing)
        firsts, seconds = new_firsts, new_seconds
        turn += 1
        if turn % LOOK == 0:
            word = tl.load(table + 2 * N + 1).to(tl.pointer_type(tl.int64))
            is_aborted = (read_word(word, True, ASM) != 0).to(tl.int32)
        if ASM:
            waited = clock() - begun
        else:
            waited = turn.to(tl.int64)
        why = tl.where(waited > patience, LATE, 0)
        why = tl.where(is_aborted != 0, ABORTED, why)
        why = tl.where(stop != 0, GIVEN_UP, why)
        found = tl.where(is_read, UNREAD + 16 * why + missing, 16 * why + missing)
        state = tl.max(tl.where(inside & (missing > 0), found, 0), axis=0)
        reads_all = reads_all | (state < UNREAD).to(tl.int32)
        state = state % UNREAD
    return firsts, seconds, turn, state


@triton.jit
def note(table, flags, epoch, state, N: tl.constexpr):
    """Make later kernels not wait if this one gave up; report a late member to the host."""
    if state >= 16 * ABORTED:
        tl.store(flags, 1)
        if state >= 16 * LATE:
            status = tl.load(table + 2 * N).to(tl.pointer_type(tl.int64))
            tl.store(status, (epoch.to(tl.int64) << 32) | (state % 16))


@triton.jit
def collect(table, flags, seat, epoch, at, own, own_2, inside, patience, probe, N: tl.constexpr,
            TOGETHER: tl.constexpr, HALVES: tl.constexpr, HAS_OWN: tl.constexpr,
            SLOT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return the sum of all members' numbers, added in seat order: (pairs * numbers per pair,)."""
    stop = tl.load(flags) | tl.load(flags + 1)
    begun, turn = time_now(epoch, ASM), epoch * 0
    nothing = -0x7FFF8000 if HALVES else -0x80000000  # -0.0, which changes no sum
    total = numbers_of(at * 0 + nothing, at * 0 + nothing, HALVES)
    for begin in tl.static_range(0, N, TOGETHER):
        firsts, seconds, turn, state = received(
            table, seat, begin, epoch, at, inside, stop, begun, turn, patience, probe, nothing,
            N, TOGETHER, SLOT, ASM,
        )  # fmt: skip
        note(table, flags, epoch, state, N)
        stop = stop | (state > 0).to(tl.int32)
        for k in tl.static_range(TOGETHER):
            if begin + k < N:
                first, second = firsts[k], seconds[k]
                if HAS_OWN:
                    is_own = begin + k == seat
                    first, second = tl.where(is_own, own, first), tl.where(is_own, own_2, second)
                total += numbers_of(first, second, HALVES)
    return tl.reshape(total, (at.shape[0] * (4 if HALVES else 2),))


@triton.jit
def end_round(words, epoch):
    """Increment the round number for the next kernel, once all programs have read it."""
    tl.debug_barrier()  # all threads have read the number
    n = tl.num_programs(0)
    ticket = n - 1
    if n > 1:
        ticket = atomic_add(words + 1, 1, "relaxed")
    if ticket == n - 1:
        tl.store(words + 1, 0)
        tl.store(words, epoch + 1)


@triton.jit(do_not_specialize=["seat", "n", "patience", "probe"])
def all_reduce(x, out, table, words, flags, seat, n, patience, probe, N: tl.constexpr,
               TOGETHER: tl.constexpr, HALVES: tl.constexpr, HAS_OWN: tl.constexpr,
               PUSH: tl.constexpr, COLLECT: tl.constexpr, SLOT: tl.constexpr, PAIRS: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """Sum n numbers over all members; PAIRS packet pairs per program.

    Args:
        x: contiguous F32 (n,); any pointer if not HAS_OWN.
        out: output, F32 (n,).
        table: addresses, int64 (2 * N + 2,): for each member, the slot to write; for each member,
            the slot it writes; the status word and the host's word (both int64).
        words: int32 (2,): the round number, and the number of programs that are done with it.
        flags: the rank's flags, int32 (2,): a kernel gave up; kernels must not wait.
        seat: this rank's index in its group of N.
        patience: longest wait, in units of 1024 ns, or in polls if there is no clock.
        probe: see `received`.
        TOGETHER: members to wait for simultaneously.
        HALVES: whether packets hold BF16; see `words_of`.
        HAS_OWN: whether this rank has values.
        PUSH, COLLECT: which of the two steps to do.
        SLOT: packets per half slot.
    """
    PER: tl.constexpr = 4 if HALVES else 2
    n_pairs = (n + PER - 1) // PER
    at = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    epoch = tl.load(words)
    own, own_2 = at * 0, at * 0
    if HAS_OWN:
        own, own_2 = words_of(x, at, n, HALVES)
    if PUSH:
        push(table, seat, epoch, at, own, own_2, at < n_pairs, n_pairs, N, HAS_OWN, SLOT, ASM)
    if COLLECT:
        total = collect(table, flags, seat, epoch, at, own, own_2, at < n_pairs, patience, probe, N,
                        TOGETHER, HALVES, HAS_OWN, SLOT, ASM)  # fmt: skip
        goal = tl.program_id(0) * (PAIRS * PER) + tl.arange(0, PAIRS * PER)
        tl.store(out + goal, total, mask=goal < n)
        end_round(words, epoch)


@triton.jit(do_not_specialize=["seat", "n", "patience", "probe"])
def all_words(x, out, table, words, flags, seat, n, patience, probe, N: tl.constexpr,
              TOGETHER: tl.constexpr, PUSH: tl.constexpr, COLLECT: tl.constexpr,
              SLOT: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Gather n words (int32) from each member in `out` (N, n); -1 for those that did not arrive.

    The other arguments are as in `all_reduce`.
    """
    n_pairs = (n + 1) // 2
    at = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = at < n_pairs
    epoch = tl.load(words)
    own, own_2 = words_of(x, at, n, False)
    if PUSH:
        push(table, seat, epoch, at, own, own_2, inside, n_pairs, N, True, SLOT, ASM)
    if COLLECT:
        stop = tl.load(flags) | tl.load(flags + 1)
        begun, turn = time_now(epoch, ASM), epoch * 0
        for begin in tl.static_range(0, N, TOGETHER):
            firsts, seconds, turn, state = received(
                table, seat, begin, epoch, at, inside, stop, begun, turn, patience, probe, -1, N,
                TOGETHER, SLOT, ASM,
            )  # fmt: skip
            note(table, flags, epoch, state, N)
            stop = stop | (state > 0).to(tl.int32)
            for k in tl.static_range(TOGETHER):
                if begin + k < N:
                    is_own = begin + k == seat
                    goal = out + (begin + k) * n + at * 2
                    tl.store(goal, tl.where(is_own, own, firsts[k]), mask=at * 2 < n)
                    tl.store(goal + 1, tl.where(is_own, own_2, seconds[k]), mask=at * 2 + 1 < n)
        end_round(words, epoch)


@triton.jit(do_not_specialize=["n", "seat", "patience", "probe"])
def add_norm(x, own, own_bias, inner_weight, inner_bias, weight, bias, sum_scale, total, y,
             numbers, facts, counters, n, inner_eps, scale, eps, table, words, flags, seat,
             patience, probe, N: tl.constexpr, TOGETHER: tl.constexpr, HALVES: tl.constexpr,
             HAS_OWN: tl.constexpr, PUSH: tl.constexpr, COLLECT: tl.constexpr, SLOT: tl.constexpr,
             ASM: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr, X_BYTES: tl.constexpr,
             N_COUNTERS: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr,
             HAS_DELTA_BIAS: tl.constexpr, HAS_INNER_WEIGHT: tl.constexpr,
             HAS_INNER_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
             HAS_SCALE: tl.constexpr, HAS_SUM_SCALE: tl.constexpr):  # fmt: skip
    """Compute `elementwise.add_norm` for the sum of all members' rows; one row per program.

    Args:
        own: this rank's rows, F32 (rows, n); any pointer if not HAS_OWN. The other arguments are as
            in `elementwise.add_norm` and `all_reduce`.
    """
    PER: tl.constexpr = 4 if HALVES else 2
    n *= UNIT
    index = tl.program_id(0)
    n_pairs = (n + PER - 1) // PER
    lane = tl.arange(0, SIZE // PER)
    inside = lane < n_pairs
    at = index * n_pairs + lane
    epoch = tl.load(words)
    mine, mine_2 = at * 0, at * 0
    if HAS_OWN:
        mine, mine_2 = words_of(own + index.to(tl.int64) * n, lane, n, HALVES)
    if PUSH:
        push(table, seat, epoch, at, mine, mine_2, inside, n_pairs * tl.num_programs(0), N, HAS_OWN,
             SLOT, ASM)  # fmt: skip
    if COLLECT:
        value = collect(table, flags, seat, epoch, at, mine, mine_2, inside, patience, probe, N,
                        TOGETHER, HALVES, HAS_OWN, SLOT, ASM)  # fmt: skip
        add_norm_of(
            value, x, own_bias, inner_weight, inner_bias, weight, bias, sum_scale, total, y,
            numbers, facts, counters, n, inner_eps, scale, eps, INNER, KIND, X_BYTES, N_COUNTERS,
            SIZE, HAS_DELTA_BIAS, HAS_INNER_WEIGHT, HAS_INNER_BIAS, HAS_WEIGHT, HAS_BIAS, HAS_SCALE,
            HAS_SUM_SCALE,
        )  # fmt: skip
        end_round(words, epoch)
