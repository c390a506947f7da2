"""Kernels of expert routing: choice of experts, order of rows by expert, sum of experts' results.

Numbers are compared as integers of the same order, so that NaNs choose distinct experts, too; of
equal ones the first wins, as in `engine.backends.cpu.kernels.small.routing`.
"""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(1 << 60))
"""Mark of an entry that is taken, below all keys with indices."""

LEAST_KEY = tl.constexpr(2 - (1 << 31))
"""Least key of a number; experts of groups that were not chosen have one less."""


@triton.jit
def key_of(x):
    """Return a 32-bit integer for each F32, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LEAST_KEY)


@triton.jit
def number_of(key):
    """Return the F32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def highest(x):
    """Return the largest number; NaNs are larger than all others."""
    return number_of(tl.max(key_of(x)))


@triton.jit
def largest(key, at, inside, N: tl.constexpr):
    """Return a mask of the N largest keys, the first ones of equal; `at` holds their indices."""
    order = tl.where(inside, key.to(tl.int64) * 65536 + (65535 - at), TAKEN)
    for _ in range(N):
        order = tl.where(order == tl.max(order), TAKEN, order)
    return inside & (order == TAKEN)


@triton.jit
def within_best_groups(key, N_GROUP: tl.constexpr, N_GROUP_USED: tl.constexpr,
                       GROUPS: tl.constexpr, MEMBERS: tl.constexpr):  # fmt: skip
    """Return keys (GROUPS * MEMBERS,), lowered outside the groups whose two best sum highest."""
    groups = tl.reshape(key, (GROUPS, MEMBERS))
    member = tl.arange(0, MEMBERS)[None, :]
    first = tl.max(groups, axis=1)
    place = tl.min(tl.where(groups == first[:, None], member, MEMBERS), axis=1)
    second = tl.max(tl.where(member == place[:, None], LEAST_KEY, groups), axis=1)
    group = tl.arange(0, GROUPS)
    best = largest(
        key_of(number_of(first) + number_of(second)), group, group < N_GROUP, N_GROUP_USED
    )
    return tl.reshape(tl.where(best[:, None], groups, LEAST_KEY - 1), (GROUPS * MEMBERS,))


@triton.jit
def assign(logits, bias, weights, chosen, pair_of, scale, smallest, N_EXPERT: tl.constexpr,
           N_USED: tl.constexpr, N_GROUP: tl.constexpr, N_GROUP_USED: tl.constexpr,
           GROUPS: tl.constexpr, MEMBERS: tl.constexpr, GATING: tl.constexpr,
           HAS_BIAS: tl.constexpr, NORMALISES: tl.constexpr, IN_PAIRS: tl.constexpr):  # fmt: skip
    """Choose the experts of one token in each program, and their weights; see `Routing`.

    Args:
        logits: contiguous F32 (T, N_EXPERT).
        bias: F32 (N_EXPERT,); any pointer where there is none.
        weights, chosen: outputs, F32 and integers (T, N_USED), by ascending expert.
        pair_of: output (T * N_USED,), set to 0, 1, 2, … where IN_PAIRS.
        scale: factor on the weights.
        smallest: least divisor of the weights.
        GROUPS, MEMBERS: powers of two, at least the number of groups and of experts in a group.
    """
    token = tl.program_id(0)
    at = tl.arange(0, GROUPS * MEMBERS)
    expert = at // MEMBERS * (N_EXPERT // N_GROUP) + at % MEMBERS
    inside = (at % MEMBERS < N_EXPERT // N_GROUP) & (at // MEMBERS < N_GROUP)
    lowest = float("-inf")
    row = logits + token.to(tl.int64) * N_EXPERT
    logit = tl.load(row + expert, mask=inside, other=lowest)
    score = logit
    if GATING == "softmax":
        power = tl.where(inside, tl.exp(logit - highest(logit)), 0.0)
        score = power / tl.sum(power)
    elif GATING == "sigmoid":
        score = 1 / (1 + tl.exp(-logit))
    wanted = score
    if not HAS_BIAS and N_GROUP == 1:
        wanted = logit  # in the same order, but large scores do not all round to 1
    if HAS_BIAS:
        wanted = wanted + tl.load(bias + expert, mask=inside, other=0.0)
    key = tl.where(inside, key_of(wanted), LEAST_KEY)
    if N_GROUP > 1 and GATING != "softmax_chosen":
        key = within_best_groups(key, N_GROUP, N_GROUP_USED, GROUPS, MEMBERS)
    is_chosen = largest(key, at, inside, N_USED)
    weight = tl.where(is_chosen, score, 0.0)
    if GATING == "softmax_chosen":
        top = highest(tl.where(is_chosen, score, lowest))
        weight = tl.where(is_chosen, tl.exp(score - top), 0.0)
        weight = weight / tl.sum(weight)
    elif NORMALISES:
        weight = weight / tl.maximum(tl.sum(weight), smallest)
    pair = token * N_USED + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(weights + pair, weight * scale, mask=is_chosen)
    tl.store(chosen + pair, expert, mask=is_chosen)
    if IN_PAIRS:
        tl.store(pair_of + token * N_USED + at, token * N_USED + at, mask=at < N_USED)


@triton.jit(do_not_specialize=["n_pair", "n_block"])
def sort(chosen, n_pair, expert_of, pair_of, row_of, table, n_block, N_EXPERT: tl.constexpr,
         SIZE: tl.constexpr, STEP: tl.constexpr, BLOCK_ROWS: tl.constexpr):  # fmt: skip
    """Collect the rows of one expert in each program; pairs of an expert keep their order.

    Every program counts all pairs by itself, so that one launch does everything.

    Args:
        chosen: expert of each pair of token and expert, (n_pair,).
        expert_of, pair_of: outputs, expert and pair of each row, (n_pair,).
        row_of: output, row of each pair, (n_pair,).
        table: output, expert, first row and number of rows of each block of at most BLOCK_ROWS
            rows, (n_block, 3).
        SIZE: a power of two above N_EXPERT.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, STEP)
    counts = tl.zeros((SIZE,), tl.int32)
    for start in range(0, n_pair, STEP):
        found = tl.load(chosen + start + at, mask=start + at < n_pair, other=N_EXPERT)
        counts += tl.histogram(found, SIZE)
    number = tl.arange(0, SIZE)
    counts = tl.where(number < N_EXPERT, counts, 0)
    blocks = (counts + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    first = tl.sum(tl.where(number < expert, counts, 0))
    n_row = tl.sum(tl.where(number == expert, counts, 0))
    block = tl.sum(tl.where(number < expert, blocks, 0))
    for start in range(0, n_row, BLOCK_ROWS):
        entry = table + (block + start // BLOCK_ROWS) * 3
        tl.store(entry, expert)
        tl.store(entry + 1, first + start)
        tl.store(entry + 2, tl.minimum(n_row - start, BLOCK_ROWS))
    if expert == N_EXPERT - 1:
        for n in range(tl.sum(blocks), n_block):
            tl.store(table + n * 3 + 2, 0)
    for start in range(0, n_pair, STEP):
        found = tl.load(chosen + start + at, mask=start + at < n_pair, other=N_EXPERT)
        is_mine = found == expert
        row = first + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
        tl.store(expert_of + row, expert, mask=is_mine)
        tl.store(pair_of + row, start + at, mask=is_mine)
        tl.store(row_of + start + at, row, mask=is_mine)
        first += tl.sum(is_mine.to(tl.int32))


@triton.jit(do_not_specialize=["n"])
def sum_of_experts(y, weights, row_of, out, n, N_USED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
                   SIZE: tl.constexpr):  # fmt: skip
    """Compute `out[t] = Σ y[row_of[t, i]] * weights[t, i]` in the order of i.

    A program computes SIZE columns of one token.

    Args:
        y: contiguous F32 (n_row, n).
        weights: F32 (T, N_USED); any pointer where there are none.
        row_of: row of y for each token and expert, (T, N_USED).
        out: contiguous output, F32 (T, n).
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    total = tl.zeros((SIZE,), tl.float32)
    for i in tl.static_range(N_USED):
        row = tl.load(row_of + token * N_USED + i).to(tl.int64)
        number = tl.load(y + row * n + at, mask=inside, other=0.0)
        if HAS_WEIGHTS:
            number = number * tl.load(weights + token * N_USED + i)
        total += number
    tl.store(out + token * n + at, total, mask=inside)
