"""Sums over ranks inside kernels: each writes its values into the others' slots and awaits theirs.

A value travels in packets of 64 bits: a word of 32 bits (one number in F32, or two in BF16), and
the number of the round as a flag. Both are written at once, so whoever sees the flag has the word
(the protocol LL of NCCL). Two packets go side by side, each whole by itself.

Why no packet is overwritten before it was read. Rounds of a group alternate between two halves of
each slot. Let A write round r into B's slot: A's kernel of round r - 1 is at its end by then, so a
packet of that round had come from B. B's kernel of round r - 1 only begins when that of round
r - 2 is at its end, so B has read all that A wrote then, which is what lies in this half. It takes
no more than that every member writes something for every other one in each round, and that the
kernels of a rank run one after the other. A member that has nothing writes its header only.

Why no old packet is taken for a new one once the 32 bits of a round's number are used up: each
round, a member writes some further packets of its slots anew, beside its values, so that all of
them are a few thousand rounds old at most. Nobody reads those, and they are its own to write.

Why all threads of a program leave a loop together: what they read there (flags, clocks, words of
the host) may differ between them, so nothing decides but what is reduced over all of them. A pair
of packets is read by one thread alone, as a program has no more threads than pairs: else one could
go on with what another one has not seen yet.

No program waits for another one of its own kernel, which may not have begun.
"""

import triton
import triton.language as tl

from engine.gpu.kernels.norm import add_norm_of

HEADER = tl.constexpr(2)
"""Packets at the beginning of a half of a slot: whether there are values, and nothing."""

HAS_VALUES, IS_EMPTY = tl.constexpr(1), tl.constexpr(2)
"""The word of a header."""

RENEWED = tl.constexpr(32)
"""Pairs of packets of each slot that are written anew in a round."""

LOOK = tl.constexpr(64)
"""Polls between two looks at the host's word."""

MOST_MEMBERS = tl.constexpr(8)
"""Of a group. Kernels are written out for each; a seat and one must be below 16, see `received`."""

GIVEN_UP, ABORTED, LATE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Why a kernel does not wait: it shall not, the host says so, or it has waited long enough."""


@triton.jit
def clock():
    """Time in units of 1024 ns; NVIDIA's own."""
    now = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    return now >> 10


@triton.jit
def time_now(epoch, ASM: tl.constexpr):
    """`clock`, where there is one."""
    if ASM:
        return clock()
    else:
        return epoch.to(tl.int64) * 0


@triton.jit
def write_pair(address, first, second, flag, mask, ASM: tl.constexpr):
    """Two packets from each address on, a multiple of 16 bytes; `flag` is one for all."""
    if ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, $5, 0; mov.b64 a, {$2, $4}; "
            "mov.b64 b, {$3, $4}; @p st.relaxed.sys.global.v2.b64 [$1], {a, b}; mov.u32 $0, 0; }",
            "=r,l,r,r,r,r", [address, first, second, flag, mask.to(tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        at = address.to(tl.pointer_type(tl.int64))
        upper = flag.to(tl.int64) << 32
        low, high = first.to(tl.int64) & 0xFFFFFFFF, second.to(tl.int64) & 0xFFFFFFFF
        tl.store(at, upper | low, mask=mask, cache_modifier=".wt")
        tl.store(at + 1, upper | high, mask=mask, cache_modifier=".wt")


@triton.jit
def read_pair(address, mask, ASM: tl.constexpr):
    """Word, flag, word and flag of two packets, from the memory itself each time."""
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
    """64 bits from the memory itself; Triton's own words for that differ between makers."""
    if ASM:
        return tl.load(at, mask=mask, other=0, volatile=True)
    else:
        return tl.load(at, mask=mask, other=0, cache_modifier=".cv")


@triton.jit
def as_bf16(value):
    """The nearest BF16 (ties to even) in the lower 16 of 32 bits; the same bits everywhere."""
    bits = value.to(tl.int32, bitcast=True)
    near = bits + 0x7FFF + ((bits >> 16) & 1)
    near = tl.where(value == value, near, bits | 0x400000)  # else some NaNs became infinite
    return (near >> 16) & 0xFFFF


@triton.jit
def words_of(x, at, n, HALVES: tl.constexpr):
    """The two words of each pair of packets `at` of n numbers x.

    HALVES: numbers are rounded to BF16, four in a pair; else two in 32 bits each.
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
    """What `words_of` made words of: (pairs, 2), or (pairs, 2, 2), in their order."""
    if HALVES:
        even = tl.join((first << 16), (first >> 16) << 16)
        odd = tl.join((second << 16), (second >> 16) << 16)
        return tl.join(even, odd).to(tl.float32, bitcast=True)
    else:
        return tl.join(first, second).to(tl.float32, bitcast=True)


@triton.jit
def half_of(table, member, epoch, SLOT: tl.constexpr):
    """The address of the half of a slot that serves in a round.

    SLOT: packets in a half.
    """
    return tl.load(table + member) + (epoch & 1).to(tl.int64) * (SLOT * 8)


@triton.jit
def push(table, seat, epoch, at, first, second, inside, n_pairs, N: tl.constexpr,
         HAS_OWN: tl.constexpr, SLOT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Write this program's packets, pairs `at`, and once the header, for all other members.

    Args:
        n_pairs: of all programs.
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
def received(table, seat, begin, epoch, at, inside, stop, begun, turn, patience, nothing,
             N: tl.constexpr, TOGETHER: tl.constexpr, SLOT: tl.constexpr,
             ASM: tl.constexpr):  # fmt: skip
    """The pairs `at` of TOGETHER members from the seat `begin` on, once they are there.

    Args:
        stop: whether not to wait.
        begun, turn: when this program began to wait, and the polls it has made since then.
        nothing: the word of packets that are not there: of members that have none, and this rank.

    Returns:
        Of each member both words of each pair; the polls so far; and 0, or 16 times why it does
        not wait for all, plus a seat and one.
    """
    M: tl.constexpr = N - begin if N - begin < TOGETHER else TOGETHER
    addresses, headers, firsts, seconds = (), (), (), ()
    for k in tl.static_range(M):
        half = half_of(table, N + begin + k, epoch, SLOT)
        addresses = addresses + (half + (HEADER * 8 + at.to(tl.int64) * 16),)
        headers = headers + (half.to(tl.pointer_type(tl.int64)),)
        firsts, seconds = firsts + (at * 0,), seconds + (at * 0,)
    empty = (epoch.to(tl.int64) << 32) | IS_EMPTY
    state, is_aborted = epoch * 0 + 1, epoch * 0
    while (state > 0) & (state < 16):
        reads, heads = (), ()
        for k in tl.static_range(M):  # all are on their way before the first is looked at
            reads = reads + (read_pair(addresses[k], inside & (begin + k != seat), ASM),)
            heads = heads + (read_word(headers[k], begin + k != seat, ASM),)
        new_firsts, new_seconds, missing = (), (), at * 0
        for k in tl.static_range(M):
            first, flag, second, flag_2 = reads[k]
            is_there = (flag == epoch) & (flag_2 == epoch)
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
        state = tl.max(tl.where(inside & (missing > 0), 16 * why + missing, 0), axis=0)
    return firsts, seconds, turn, state


@triton.jit
def note(table, flags, epoch, state, N: tl.constexpr):
    """Let later kernels not wait if this one had to give up, and tell the host for whom it did."""
    if state >= 16 * ABORTED:
        tl.store(flags, 1)
        if state >= 16 * LATE:
            status = tl.load(table + 2 * N).to(tl.pointer_type(tl.int64))
            tl.store(status, (epoch.to(tl.int64) << 32) | (state % 16))


@triton.jit
def collect(table, flags, seat, epoch, at, own, own_2, inside, patience, N: tl.constexpr,
            TOGETHER: tl.constexpr, HALVES: tl.constexpr, HAS_OWN: tl.constexpr,
            SLOT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """The sum of all members' numbers, in the order of seats: (pairs * numbers of a pair,)."""
    stop = tl.load(flags) | tl.load(flags + 1)
    begun, turn = time_now(epoch, ASM), epoch * 0
    nothing = -0x7FFF8000 if HALVES else -0x80000000  # -0.0: added to a number, it changes none
    total = numbers_of(at * 0 + nothing, at * 0 + nothing, HALVES)
    for begin in tl.static_range(0, N, TOGETHER):
        firsts, seconds, turn, state = received(
            table, seat, begin, epoch, at, inside, stop, begun, turn, patience, nothing, N,
            TOGETHER, SLOT, ASM,
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
    """Let the next kernel have the next round, when all programs know the number of this one."""
    tl.debug_barrier()  # all threads have read it
    n = tl.num_programs(0)
    ticket = n - 1
    if n > 1:
        ticket = tl.atomic_add(words + 1, 1, sem="relaxed")
    if ticket == n - 1:
        tl.store(words + 1, 0)
        tl.store(words, epoch + 1)


@triton.jit(do_not_specialize=["seat", "n", "patience"])
def all_reduce(x, out, table, words, flags, seat, n, patience, N: tl.constexpr,
               TOGETHER: tl.constexpr, HALVES: tl.constexpr, HAS_OWN: tl.constexpr,
               PUSH: tl.constexpr, COLLECT: tl.constexpr, SLOT: tl.constexpr, PAIRS: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """The sum of all members' n numbers; PAIRS pairs of packets for each program.

    Args:
        x: F32 (n,), without gaps; any pointer if not HAS_OWN.
        out: F32 (n,).
        table: int64 (2 * N + 2,): addresses of the slots for each member, of those of each member,
            of the status and of the host's word, both int64.
        words: int32 (2,): the number of the round, and programs that are done with it.
        flags: int32 (2,) of the rank: something went wrong, and no kernel shall wait.
        seat: this rank's place in its group of N.
        patience: how long to wait, in units of 1024 ns; or polls where there is no clock.
        TOGETHER: members that are awaited at once.
        HALVES: BF16 on the way, see `words_of`.
        PUSH, COLLECT: which half of the work is done.
        SLOT: packets in a half of a slot.
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
        total = collect(table, flags, seat, epoch, at, own, own_2, at < n_pairs, patience, N,
                        TOGETHER, HALVES, HAS_OWN, SLOT, ASM)  # fmt: skip
        goal = tl.program_id(0) * (PAIRS * PER) + tl.arange(0, PAIRS * PER)
        tl.store(out + goal, total, mask=goal < n)
        end_round(words, epoch)


@triton.jit(do_not_specialize=["seat", "n", "patience"])
def all_words(x, out, table, words, flags, seat, n, patience, N: tl.constexpr,
              TOGETHER: tl.constexpr, PUSH: tl.constexpr, COLLECT: tl.constexpr,
              SLOT: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """n words (int32) of each member in `out` (N, n), or -1 if they did not come.

    The rest is as in `all_reduce`.
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
                table, seat, begin, epoch, at, inside, stop, begun, turn, patience, -1, N, TOGETHER,
                SLOT, ASM,
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


@triton.jit(do_not_specialize=["n", "seat", "patience"])
def add_norm(x, own, own_bias, inner_weight, inner_bias, weight, bias, sum_scale, total, y,
             numbers, facts, counters, n, inner_eps, scale, eps, table, words, flags, seat,
             patience, N: tl.constexpr, TOGETHER: tl.constexpr, HALVES: tl.constexpr,
             HAS_OWN: tl.constexpr, PUSH: tl.constexpr, COLLECT: tl.constexpr, SLOT: tl.constexpr,
             ASM: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr, X_BYTES: tl.constexpr,
             N_COUNTERS: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr,
             HAS_DELTA_BIAS: tl.constexpr, HAS_INNER_WEIGHT: tl.constexpr,
             HAS_INNER_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
             HAS_SCALE: tl.constexpr, HAS_SUM_SCALE: tl.constexpr):  # fmt: skip
    """`norm.add_norm` of the sum of all members' rows; a row for each program.

    Args:
        own: F32 (rows, n), this rank's; any pointer if not HAS_OWN.
        The rest is as in `norm.add_norm` and `all_reduce`.
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
        value = collect(table, flags, seat, epoch, at, mine, mine_2, inside, patience, N,
                        TOGETHER, HALVES, HAS_OWN, SLOT, ASM)  # fmt: skip
        add_norm_of(
            value, x, own_bias, inner_weight, inner_bias, weight, bias, sum_scale, total, y,
            numbers, facts, counters, n, inner_eps, scale, eps, INNER, KIND, X_BYTES, N_COUNTERS,
            SIZE, HAS_DELTA_BIAS, HAS_INNER_WEIGHT, HAS_INNER_BIAS, HAS_WEIGHT, HAS_BIAS, HAS_SCALE,
            HAS_SUM_SCALE,
        )  # fmt: skip
        end_round(words, epoch)
