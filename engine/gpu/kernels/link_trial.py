"""Whether what kernels of one GPU write comes to another one whole, and how soon.

A packet is four bytes of data and a flag of four, the number of the round, written at once (NCCL's
protocol LL). Packets of a round lie in one of two halves of a slot by turns: whoever writes round
r has read all of round r - 1, so the other one is done with the half of round r - 2.
"""

import triton
import triton.language as tl

WAITING, TOO_LATE = tl.constexpr(1), tl.constexpr(2)
"""Of a program: packets are on their way, or they are no longer awaited."""


@triton.jit
def clock(ASM: tl.constexpr):
    """Nanoseconds since some time; only for use where ASM is set."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def store_packets(at, packet, inside, ASM: tl.constexpr):
    """Write 64 bits to each address at once, and neither later nor together with other writes."""
    if ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.volatile.global.b64 [$1], $2; "
            "mov.u32 $0, 0; }",
            "=r,l,l,r", [at, packet, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, packet, mask=inside)


@triton.jit
def write_packets(slot, words, n, epoch, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Write n words (int32) as packets of a round; slot: pointer to int64."""
    flag = epoch.to(tl.int64) << 32
    for start in range(0, n, SIZE):
        at = start + tl.arange(0, SIZE)
        word = tl.load(words + at, mask=at < n, other=0)
        store_packets(slot + at, (word.to(tl.int64) & 0xFFFFFFFF) | flag, at < n, ASM)


@triton.jit
def time_left(left, begun, limit, ASM: tl.constexpr):
    """Nanoseconds until it is too late, or reads where there is no clock."""
    if ASM:
        return limit - (clock(ASM) - begun)
    else:
        return left - 1


@triton.jit
def read_packets(slot, words, n, epoch, limit, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Wait for n packets of a round; how many never came, and how many hold other data than words.

    Args:
        limit: nanoseconds to wait, or how often to read where there is no clock.
    """
    missing = tl.program_id(0).to(tl.int64) * 0
    wrong = missing
    left = missing + limit
    begun = missing
    if ASM:
        begun = clock(ASM)
    for start in range(0, n, SIZE):
        at = start + tl.arange(0, SIZE)
        inside = at < n
        packet = tl.load(slot + at, mask=inside, other=0, volatile=True)
        is_late = inside & ((packet >> 32) != epoch)
        state = tl.max(is_late.to(tl.int32))
        while state == WAITING:
            packet = tl.load(slot + at, mask=inside, other=0, volatile=True)
            is_late = inside & ((packet >> 32) != epoch)
            left = time_left(left, begun, limit, ASM)
            # clocks of threads differ, and all of them have to leave the loop at once
            state = tl.max(tl.where(is_late, tl.where(left > 0, WAITING, TOO_LATE), 0))
        word = tl.load(words + at, mask=inside, other=0)
        is_wrong = inside & (is_late == 0) & (packet.to(tl.int32) != word)
        missing += tl.sum(is_late.to(tl.int64))
        wrong += tl.sum(is_wrong.to(tl.int64))
    return missing, wrong


@triton.jit
def slot_of(table, which, turn, most):
    """Where this program's packets of a round lie, in the memory that `table` names."""
    slot = tl.load(table + which).to(tl.pointer_type(tl.int64))
    return slot + (tl.program_id(0) * 2 + (turn & 1)) * most


@triton.jit
def words_of(words, turn, n_rows, most):
    """This program's data of a round: words (n_rows, n_programs, most) serve by turns."""
    row = (turn % n_rows).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    return words + row * most


@triton.jit
def note(status, n_rounds, missing, wrong):
    """status (n_programs, 3) int64: rounds that were read, what never came, what was wrong."""
    at = status + tl.program_id(0) * 3
    tl.store(at, tl.load(at) + n_rounds)
    tl.store(at + 1, tl.load(at + 1) + missing)
    tl.store(at + 2, tl.load(at + 2) + wrong)


@triton.jit(do_not_specialize=["first", "n_rows", "n_mine", "most"])
def write_round(mine, table, first, n_rows, n_mine, most, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Write one round; arguments as in `exchange`."""
    turn = first.to(tl.int32)
    to = slot_of(table, 0, turn, most)
    write_packets(to, words_of(mine, turn, n_rows, most), n_mine, turn + 1, SIZE, ASM)


@triton.jit(do_not_specialize=["first", "n_rows", "n_theirs", "most", "limit"])
def read_round(theirs, table, status, first, n_rows, n_theirs, most, limit, SIZE: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """Read one round; arguments as in `exchange`."""
    turn = first.to(tl.int32)
    slot = slot_of(table, 1, turn, most)
    words = words_of(theirs, turn, n_rows, most)
    missing, wrong = read_packets(slot, words, n_theirs, turn + 1, limit, SIZE, ASM)
    note(status, (missing == 0).to(tl.int64), missing, wrong)


@triton.jit(do_not_specialize=["first", "n_rounds", "n_rows", "n_mine", "n_theirs", "most",
                               "limit"])  # fmt: skip
def exchange(mine, theirs, table, status, first, n_rounds, n_rows, n_mine, n_theirs, most, limit,
             SIZE: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Rounds in which each of two devices writes its packets and then waits for the other's.

    It ends with the first round that does not come.

    Args:
        mine: int32 (n_rows, n_programs, most): what this device writes.
        theirs: the same of the other one, which is what has to come.
        table: int64 (2,): addresses of the slots to write and of those to read, each int64
            (n_programs, 2, most).
        status: see `note`.
        first: number of the first round; slots hold no flag of it or of later ones.
        n_mine, n_theirs: packets of a program that are written and that come, at most `most`.
        limit: see `read_packets`; the first round may take five times that, as the other device
            may start later.
        SIZE: packets at once.
    """
    turn = first.to(tl.int32)
    n_done = tl.program_id(0).to(tl.int64) * 0
    missing = n_done
    wrong = n_done
    patience = n_done + limit * 5
    while (n_done < n_rounds) & (missing == 0):
        to = slot_of(table, 0, turn, most)
        write_packets(to, words_of(mine, turn, n_rows, most), n_mine, turn + 1, SIZE, ASM)
        slot = slot_of(table, 1, turn, most)
        words = words_of(theirs, turn, n_rows, most)
        lost, bad = read_packets(slot, words, n_theirs, turn + 1, patience, SIZE, ASM)
        missing += lost
        wrong += bad
        n_done += (lost == 0).to(tl.int64)
        turn += 1
        patience = n_done * 0 + limit
    note(status, n_done, missing, wrong)


@triton.jit(do_not_specialize=["n"])
def store_words(words, table, n, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Write words (n,) int64 to the memory that `table` names first, of the same size."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    to = tl.load(table).to(tl.pointer_type(tl.int64))
    word = tl.load(words + at, mask=at < n, other=0)
    store_packets(to + at, word, at < n, ASM)
