"""Kernels that test whether packets from one GPU reach another intact, and measure their latency.

They write and read with the functions from `one_shot`. Rounds alternate between the two halves of a
slot: a device that writes round r has read all of round r - 1, so the other GPU has finished with
the half used in round r - 2.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.one_shot import read_pair, time_now, write_pair

WAITING, TOO_LATE = tl.constexpr(1), tl.constexpr(2)  # states of a program


@triton.jit
def write_packets(slot, words, n, flag, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Write n pairs of packets, given words int32 (2 n,), to the address `slot`."""
    for start in range(0, n, SIZE):
        at = start + tl.arange(0, SIZE)
        inside = at < n
        first = tl.load(words + at * 2, mask=inside, other=0)
        second = tl.load(words + at * 2 + 1, mask=inside, other=0)
        write_pair(slot + at.to(tl.int64) * 16, first, second, flag, inside, ASM)


@triton.jit
def time_left(left, begun, limit, ASM: tl.constexpr):
    """Return the remaining time, in units of 1024 ns, or in polls if there is no clock."""
    if ASM:
        return limit - (time_now(begun, ASM) - begun)
    else:
        return left - 1


@triton.jit
def read_packets(slot, words, n, flag, limit, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Wait for n pairs of packets and compare them with `words`, int32 (2 n,).

    `limit` is the longest wait for all of them; see `time_left`. Return how many pairs did not
    arrive, and how many of those that did have wrong words.
    """
    missing = limit * 0
    wrong = limit * 0
    left = limit
    begun = time_now(limit, ASM)
    for start in range(0, n, SIZE):
        at = start + tl.arange(0, SIZE)
        inside = at < n
        address = slot + at.to(tl.int64) * 16
        first, flag_1, second, flag_2 = read_pair(address, inside, ASM)
        is_late = inside & ((flag_1 != flag) | (flag_2 != flag))
        state = tl.max(is_late.to(tl.int32), axis=0)
        while state == WAITING:
            first, flag_1, second, flag_2 = read_pair(address, inside, ASM)
            is_late = inside & ((flag_1 != flag) | (flag_2 != flag))
            left = time_left(left, begun, limit, ASM)
            # threads' clocks differ, but all threads must leave the loop together
            state = tl.max(tl.where(is_late, tl.where(left > 0, WAITING, TOO_LATE), 0), axis=0)
        word_1 = tl.load(words + at * 2, mask=inside, other=0)
        word_2 = tl.load(words + at * 2 + 1, mask=inside, other=0)
        is_wrong = inside & (is_late == 0) & ((first != word_1) | (second != word_2))
        missing += tl.sum(is_late.to(tl.int64), axis=0)
        wrong += tl.sum(is_wrong.to(tl.int64), axis=0)
    return missing, wrong


@triton.jit
def slot_of(table, which, turn, most):
    """Return the address of this program's packets for a round, in the slot `table[which]`."""
    half = tl.program_id(0) * 2 + (turn & 1)
    return tl.load(table + which) + half.to(tl.int64) * most * 16


@triton.jit
def words_of(words, turn, n_rows, most):
    """Return a pointer to this program's words for a round; rounds cycle through (n_rows, …)."""
    row = (turn % n_rows).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    return words + row * most * 2


@triton.jit
def note(status, n_rounds, missing, wrong):
    """Add to status, int64 (n_programs, 3): rounds read, missing pairs, wrong pairs."""
    at = status + tl.program_id(0) * 3
    tl.store(at, tl.load(at) + n_rounds)
    tl.store(at + 1, tl.load(at + 1) + missing)
    tl.store(at + 2, tl.load(at + 2) + wrong)


@triton.jit(do_not_specialize=["first", "n_rows", "n_mine", "most"])
def write_round(mine, table, first, n_rows, n_mine, most, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Write one round; for the arguments, see `exchange`."""
    turn = first.to(tl.int32)
    to = slot_of(table, 0, turn, most)
    write_packets(to, words_of(mine, turn, n_rows, most), n_mine, turn + 1, SIZE, ASM)


@triton.jit(do_not_specialize=["first", "n_rows", "n_theirs", "most", "limit"])
def read_round(theirs, table, status, first, n_rows, n_theirs, most, limit, SIZE: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """Read one round; for the arguments, see `exchange`."""
    turn = first.to(tl.int32)
    slot = slot_of(table, 1, turn, most)
    words = words_of(theirs, turn, n_rows, most)
    patience = limit.to(tl.int64)
    missing, wrong = read_packets(slot, words, n_theirs, turn + 1, patience, SIZE, ASM)
    note(status, (missing == 0).to(tl.int64), missing, wrong)


@triton.jit(do_not_specialize=["first", "n_rounds", "n_rows", "n_mine", "n_theirs", "most",
                               "limit"])  # fmt: skip
def exchange(mine, theirs, table, status, first, n_rounds, n_rows, n_mine, n_theirs, most, limit,
             SIZE: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Run rounds in which each of two devices writes its packets and then waits for the other's.

    This stops at the first round that does not arrive.

    Args:
        mine: words that this device writes, int32 (n_rows, n_programs, 2 most).
        theirs: words that the other device writes, in the same layout.
        table: addresses of the slot to write and the slot to read, int64 (2,); each slot is int64
            (n_programs, 2, 2 most).
        status: see `note`.
        first: number of the first round; slots hold no flag for this round or later ones.
        n_mine, n_theirs: pairs of packets that each program writes and reads.
        most: the larger of the two.
        limit: see `read_packets`; the first round may take five times as long, since the other
            device may start later.
        SIZE: pairs per iteration, at least the number of threads in a program.
    """
    turn = first.to(tl.int32)
    patience = limit.to(tl.int64) * 5
    n_done = patience * 0
    missing = patience * 0
    wrong = patience * 0
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
        patience = limit.to(tl.int64)
    note(status, n_done, missing, wrong)


@triton.jit(do_not_specialize=["flag", "n"])
def store_pairs(words, table, flag, n, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Write n pairs of packets, given words int32 (2 n,), to the first address in `table`."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    first = tl.load(words + at * 2, mask=at < n, other=0)
    second = tl.load(words + at * 2 + 1, mask=at < n, other=0)
    write_pair(tl.load(table) + at.to(tl.int64) * 16, first, second, flag, at < n, ASM)


@triton.jit(do_not_specialize=["n"])
def load_pairs(out, table, n, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Read n pairs of packets, including flags, from `table`'s first address into out (4 n,)."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    first, flag_1, second, flag_2 = read_pair(
        tl.load(table) + at.to(tl.int64) * 16, at < n, ASM
    )  # fmt: skip
    out += at * 4
    tl.store(out, first, mask=at < n)
    tl.store(out + 1, flag_1, mask=at < n)
    tl.store(out + 2, second, mask=at < n)
    tl.store(out + 3, flag_2, mask=at < n)
