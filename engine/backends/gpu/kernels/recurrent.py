"""Kernels for recurrent layers: a program keeps part of the state and walks through the tokens.

States are read once. The parts of a state are independent, and one warp holds a part, so nothing
synchronises within a program. If heads share keys, `key_of` maps each head to its key head. Head
sizes are constants; strides are between tokens.

If not PLACED, the tokens continue one state, which is written once, in place. If PLACED, they are
rows from several sequences, and a program runs for the chain that starts at each row (see
`gpu.page_tables.StateChains`): `state` has `slot_size` elements per slot, a chain reads its first
row's state once, and the state after each row is written. Rows that repeat another row get its
result.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.elementwise import activated, sigmoid, softplus

CHAIN_WORDS = tl.constexpr(4)  # int64 words per row; see `gpu.page_tables.WORDS`


@triton.jit
def n_in_chain(chains, row):
    """Return the number of rows in the chain that starts at a row; 0 or less if none does."""
    return tl.load(chains + row * CHAIN_WORDS).to(tl.int32)


@triton.jit
def state_before(chains, row, slot_size):
    """Return the offset of the state before a row."""
    return tl.load(chains + row * CHAIN_WORDS + 1) * slot_size


@triton.jit
def state_after(chains, row, slot_size):
    """Return the offset of the state after a row."""
    return tl.load(chains + row * CHAIN_WORDS + 2) * slot_size


@triton.jit
def store_repeats(chains, row, y, stride, at, result, mask):
    """Store a row's result again for each later row that repeats it.

    `y` points to the row's own result; each repetition is `stride` elements further.
    """
    for n in range(tl.load(chains + row * CHAIN_WORDS + 3).to(tl.int32)):
        tl.store(y + (n + 1) * stride + at, result, mask=mask)


@triton.jit
def unit(x, eps):
    """Normalise a vector to unit length, like `Ops.l2_norm`."""
    return x / tl.maximum(tl.sqrt(tl.sum(x * x)), eps)


@triton.jit(do_not_specialize=["n_token", "q_stride", "k_stride", "v_stride", "step_stride",
                               "beta_stride"])  # fmt: skip
def delta_net(q, k, v, step, beta, step_bias, rate, key_of, state, chains, y, n_token, slot_size,
              q_stride, k_stride, v_stride, step_stride, beta_stride, scale, eps,
              PLACED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_MAP: tl.constexpr,
              N_KEY: tl.constexpr, N_VALUE: tl.constexpr, SIZE: tl.constexpr,
              COLUMNS: tl.constexpr):  # fmt: skip
    """Compute `Ops.delta_net`, COLUMNS columns of one head's state per program.

    Args:
        q, k: F32 (n_token, key heads, N_KEY), not normalised.
        v: F32 (n_token, n_head, N_VALUE).
        step: decay steps, F32 (n_token, n_head), or (n_token, n_head, N_KEY) if PER_CHANNEL.
        beta: F32 (n_token, n_head), before the sigmoid.
        step_bias: F32 (n_head,), or (n_head, N_KEY) if PER_CHANNEL.
        rate: decay rates, F32 (n_head,), negative.
        key_of: int64 (n_head,) if HAS_MAP.
        state: F32 (n_head, N_KEY, N_VALUE), updated; one per slot if PLACED.
        chains: int64 (n_token, CHAIN_WORDS) if PLACED.
        y: output, F32 (n_token, n_head, N_VALUE).
        scale: factor on the normalised queries.
        SIZE: a power of two, at least N_KEY.
    """
    head, n_head = tl.program_id(0), tl.num_programs(0)
    row, column = tl.arange(0, SIZE), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = row < N_KEY, column < N_VALUE
    key_head = tl.load(key_of + head) if HAS_MAP else head
    state += head.to(tl.int64) * (N_KEY * N_VALUE)
    place = row[:, None] * N_VALUE + column[None, :]
    inside = in_key[:, None] & in_value[None, :]
    first, n, before, read = tl.program_id(2), n_token, state, inside
    if PLACED:
        n = n_in_chain(chains, first)
        before, read = state + state_before(chains, first, slot_size), inside & (n > 0)
    matrix = tl.load(before + place, mask=read, other=0.0)
    own_rate = tl.load(rate + head)
    at, wanted = head, head < n_head
    if PER_CHANNEL:
        at, wanted = head * N_KEY + row, in_key
    bias = tl.load(step_bias + at, mask=wanted, other=0.0)
    q += first * q_stride + key_head * N_KEY
    k += first * k_stride + key_head * N_KEY
    v += first * v_stride + head * N_VALUE
    step += first * step_stride
    beta += first * beta_stride
    y += (first * n_head + head) * N_VALUE
    for i in range(n):
        query = unit(tl.load(q + row, mask=in_key, other=0.0), eps) * scale
        key = unit(tl.load(k + row, mask=in_key, other=0.0), eps)
        value = tl.load(v + column, mask=in_value, other=0.0)
        gate = tl.load(step + at, mask=wanted, other=0.0) + bias
        kept = tl.exp(own_rate * softplus(gate))
        share = sigmoid(tl.load(beta + head))
        if PER_CHANNEL:
            matrix *= kept[:, None]
        else:
            matrix *= kept
        written = share * (value - tl.sum(matrix * key[:, None], 0))
        matrix += key[:, None] * written[None, :]
        result = tl.sum(matrix * query[:, None], 0)
        tl.store(y + column, result, mask=in_value)
        if PLACED:
            after = state + state_after(chains, first + i, slot_size)
            tl.store(after + place, matrix, mask=inside)
            store_repeats(chains, first + i, y, n_head * N_VALUE, column, result, in_value)
        q += q_stride
        k += k_stride
        v += v_stride
        step += step_stride
        beta += beta_stride
        y += n_head * N_VALUE
    if not PLACED:
        tl.store(state + place, matrix, mask=inside)


@triton.jit(do_not_specialize=["n_token", "n_channel", "x_stride", "step_stride", "b_stride",
                               "c_stride", "gate_stride"])  # fmt: skip
def selective_scan(x, step, a, b, c, d, gate, state, chains, y, n_token, slot_size, n_channel,
                   x_stride, step_stride, b_stride, c_stride, gate_stride, PLACED: tl.constexpr,
                   N_STATE: tl.constexpr, SIZE: tl.constexpr,
                   CHANNELS: tl.constexpr):  # fmt: skip
    """Compute `Ops.selective_scan` for CHANNELS channels in each program.

    Args:
        x: F32 (n_token, n_channel).
        step: F32 (n_token, n_channel), before the softplus.
        gate: F32 (n_token, n_channel); its SiLU is a factor on the output.
        a, state: F32 (n_channel, N_STATE); state is updated, with one per slot if PLACED.
        chains: int64 (n_token, CHAIN_WORDS) if PLACED.
        b, c: F32 (n_token, N_STATE).
        d: F32 (n_channel,).
        y: contiguous output, F32 (n_token, n_channel).
        SIZE: a power of two, at least N_STATE.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, SIZE)
    in_channel, in_state = channel < n_channel, column < N_STATE
    inside = in_channel[:, None] & in_state[None, :]
    place = channel[:, None] * N_STATE + column[None, :]
    first, n, before, read = tl.program_id(1), n_token, state, inside
    if PLACED:
        n = n_in_chain(chains, first)
        before, read = state + state_before(chains, first, slot_size), inside & (n > 0)
    held = tl.load(before + place, mask=read, other=0.0)
    rates = tl.load(a + place, mask=read, other=0.0)
    skip = tl.load(d + channel, mask=in_channel, other=0.0)
    x += first * x_stride
    step += first * step_stride
    b += first * b_stride
    c += first * c_stride
    gate += first * gate_stride
    y += first * n_channel
    for i in range(n):
        value = tl.load(x + channel, mask=in_channel, other=0.0)
        size = softplus(tl.load(step + channel, mask=in_channel, other=0.0))
        door = tl.load(gate + channel, mask=in_channel, other=0.0)
        key = tl.load(b + column, mask=in_state, other=0.0)
        query = tl.load(c + column, mask=in_state, other=0.0)
        held = tl.exp(size[:, None] * rates) * held + (size * value)[:, None] * key[None, :]
        total = tl.sum(held * query[None, :], 1) + skip * value
        result = total * activated(door, "silu")
        tl.store(y + channel, result, mask=in_channel)
        if PLACED:
            after = state + state_after(chains, first + i, slot_size)
            tl.store(after + place, held, mask=inside)
            store_repeats(chains, first + i, y, n_channel, channel, result, in_channel)
        x += x_stride
        step += step_stride
        b += b_stride
        c += c_stride
        gate += gate_stride
        y += n_channel
    if not PLACED:
        tl.store(state + place, held, mask=inside)


@triton.jit(do_not_specialize=["n_token", "x_stride", "step_stride", "b_stride", "c_stride",
                               "gate_stride"])  # fmt: skip
def state_space_scan(x, step, step_bias, a, b, c, d, gate, key_of, state, chains, y, n_token,
                     slot_size, x_stride, step_stride, b_stride, c_stride, gate_stride,
                     PLACED: tl.constexpr, HAS_MAP: tl.constexpr, N_ROW: tl.constexpr,
                     N_STATE: tl.constexpr, SIZE: tl.constexpr,
                     ROWS: tl.constexpr):  # fmt: skip
    """Compute `Ops.state_space_scan`, ROWS rows of one head's state per program.

    Args:
        x: F32 (n_token, n_head, N_ROW).
        step: F32 (n_token, n_head), before the bias and softplus.
        step_bias, a, d: F32 (n_head,).
        b, c: F32 (n_token, groups, N_STATE).
        gate: F32 (n_token, n_head * N_ROW); its SiLU is a factor on the output.
        key_of: each head's group, int64 (n_head,), if HAS_MAP.
        state: F32 (n_head, N_ROW, N_STATE), updated; one per slot if PLACED.
        chains: int64 (n_token, CHAIN_WORDS) if PLACED.
        y: contiguous output, F32 (n_token, n_head, N_ROW).
        SIZE: a power of two, at least N_STATE.
    """
    head, n_head = tl.program_id(0), tl.num_programs(0)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    in_row, in_state = row < N_ROW, column < N_STATE
    group = tl.load(key_of + head) if HAS_MAP else head
    inside = in_row[:, None] & in_state[None, :]
    state += head.to(tl.int64) * (N_ROW * N_STATE)
    place = row[:, None] * N_STATE + column[None, :]
    first, n, before, read = tl.program_id(2), n_token, state, inside
    if PLACED:
        n = n_in_chain(chains, first)
        before, read = state + state_before(chains, first, slot_size), inside & (n > 0)
    held = tl.load(before + place, mask=read, other=0.0)
    rate, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(step_bias + head)
    x += first * x_stride + head * N_ROW
    step += first * step_stride
    gate += first * gate_stride + head * N_ROW
    y += (first * n_head + head) * N_ROW
    b += first * b_stride + group * N_STATE
    c += first * c_stride + group * N_STATE
    for i in range(n):
        value = tl.load(x + row, mask=in_row, other=0.0)
        size = softplus(tl.load(step + head) + bias)
        door = tl.load(gate + row, mask=in_row, other=0.0)
        key = tl.load(b + column, mask=in_state, other=0.0)
        query = tl.load(c + column, mask=in_state, other=0.0)
        held = tl.exp(size * rate) * held + (size * value)[:, None] * key[None, :]
        total = tl.sum(held * query[None, :], 1) + skip * value
        result = total * activated(door, "silu")
        tl.store(y + row, result, mask=in_row)
        if PLACED:
            after = state + state_after(chains, first + i, slot_size)
            tl.store(after + place, held, mask=inside)
            store_repeats(chains, first + i, y, n_head * N_ROW, row, result, in_row)
        gate += gate_stride
        x += x_stride
        step += step_stride
        b += b_stride
        c += c_stride
        y += n_head * N_ROW
    if not PLACED:
        tl.store(state + place, held, mask=inside)


@triton.jit(do_not_specialize=["n_chunk"])
def scan_chunks(q, k, v, products, from_start, to_end, inverse, state, y, n_chunk,
                HAS_INVERSE: tl.constexpr, PER_CHANNEL: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
                N_KEY: tl.constexpr, N_VALUE: tl.constexpr, CHUNK: tl.constexpr,
                PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Compute `model.forward.recurrent.scan_chunks`, COLUMNS columns of a head's state per program.

    The columns are kept as PARTS matrices of ROWS rows, so that no operand takes all registers.

    Args:
        q, k: F32 (n_chunk, n_head, CHUNK, N_KEY); contiguous, like all other arguments.
        v: F32 (n_chunk, n_head, CHUNK, N_VALUE).
        products, inverse: F32 (n_chunk, n_head, CHUNK, CHUNK); inverse only if HAS_INVERSE.
        from_start, to_end: F32 (n_chunk, n_head, CHUNK, N_KEY if PER_CHANNEL else 1).
        state: F32 (n_head, N_KEY, N_VALUE), or (n_head, N_VALUE, N_KEY) if IS_TRANSPOSED; updated.
        y: output, F32 (n_chunk * CHUNK, n_head, N_VALUE).
    """
    head, n_head = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    token = tl.arange(0, CHUNK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_value = (column < N_VALUE)[None, :]
    state += head * (N_KEY * N_VALUE)
    matrix = ()
    for part in tl.static_range(PARTS):
        at, inside = part_of_state(part, column, IS_TRANSPOSED, N_KEY, N_VALUE, ROWS)
        matrix = matrix + (tl.load(state + at, mask=inside, other=0.0),)
    value_at = token[:, None] * N_VALUE + column[None, :]
    pair_at = token[:, None] * CHUNK + token[None, :]
    for i in range(n_chunk):
        start = (i * n_head + head) * CHUNK
        value = tl.load(v + start * N_VALUE + value_at, mask=in_value, other=0.0)
        found = tl.zeros((CHUNK, COLUMNS), tl.float32)
        for part in tl.static_range(PARTS):
            key_at, in_key = part_of_keys(part, token, N_KEY, ROWS)
            first = decay_of(from_start, start, key_at, token, in_key, PER_CHANNEL, N_KEY)
            query = tl.load(q + start * N_KEY + key_at, mask=in_key, other=0.0)
            found += tl.dot(query * first, matrix[part], input_precision=PRECISION)
            if HAS_INVERSE:
                key = tl.load(k + start * N_KEY + key_at, mask=in_key, other=0.0)
                value -= tl.dot(key * first, matrix[part], input_precision=PRECISION)
        if HAS_INVERSE:
            pairs = tl.load(inverse + start * CHUNK + pair_at)
            value = tl.dot(pairs, value, input_precision=PRECISION)
        pairs = tl.load(products + start * CHUNK + pair_at)
        found += tl.dot(pairs, value, input_precision=PRECISION)
        out = (i * CHUNK + token[:, None]) * n_head + head
        tl.store(y + out * N_VALUE + column[None, :], found, mask=in_value)
        after = ()
        for part in tl.static_range(PARTS):
            key_at, in_key = part_of_keys(part, token, N_KEY, ROWS)
            last = decay_of(to_end, start, key_at, token, in_key, PER_CHANNEL, N_KEY)
            key = tl.load(k + start * N_KEY + key_at, mask=in_key, other=0.0)
            written = tl.dot(tl.trans(key * last), value, input_precision=PRECISION)
            end = start + CHUNK - 1
            if PER_CHANNEL:
                row = part * ROWS + tl.arange(0, ROWS)
                kept = tl.load(from_start + end * N_KEY + row, mask=row < N_KEY, other=0.0)
                after = after + (matrix[part] * kept[:, None] + written,)
            else:
                after = after + (matrix[part] * tl.load(from_start + end) + written,)
        matrix = after
    for part in tl.static_range(PARTS):
        at, inside = part_of_state(part, column, IS_TRANSPOSED, N_KEY, N_VALUE, ROWS)
        tl.store(state + at, matrix[part], mask=inside)


@triton.jit
def part_of_state(part: tl.constexpr, column, IS_TRANSPOSED: tl.constexpr, N_KEY: tl.constexpr,
                  N_VALUE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Return the offsets of some rows and columns in a head's state, and a mask of them."""
    row = part * ROWS + tl.arange(0, ROWS)
    inside = (row < N_KEY)[:, None] & (column < N_VALUE)[None, :]
    if IS_TRANSPOSED:
        return column[None, :] * N_KEY + row[:, None], inside
    else:
        return row[:, None] * N_VALUE + column[None, :], inside


@triton.jit
def part_of_keys(part: tl.constexpr, token, N_KEY: tl.constexpr, ROWS: tl.constexpr):
    """Return the offsets of a chunk's key elements for some of the state's rows, and a mask."""
    row = part * ROWS + tl.arange(0, ROWS)
    return token[:, None] * N_KEY + row[None, :], (row < N_KEY)[None, :]


@triton.jit
def decay_of(decay, start, at, token, inside, PER_CHANNEL: tl.constexpr, N_KEY: tl.constexpr):
    """Load the decays for a chunk's tokens, per key element if PER_CHANNEL, else per token."""
    if PER_CHANNEL:
        return tl.load(decay + start * N_KEY + at, mask=inside, other=0.0)
    else:
        return tl.load(decay + start + token)[:, None]


@triton.jit(do_not_specialize=["n_token", "n_channel", "stride"])
def causal_conv(x, before, after, state, weight, bias, y, n_token, n_channel, stride,
                TAPS: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr,
                HAS_GATES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Convolve BLOCK channels of TOKENS tokens; `state` has the earlier inputs and is updated.

    Only the program for the first tokens reads the state, so that it can be updated in place; more
    than TOKENS tokens need TOKENS ≥ TAPS - 1. The order of sums does not depend on the token count.
    Each thread has the same channels in everything it loads, so threads exchange nothing.

    Args:
        x: inputs, F32 (n_token, n_channel), `stride` elements from token to token.
        before, after: factors on x and on the result, shaped like x; any pointers if not HAS_GATES.
        state: inputs before x, F32 (n_channel, TAPS - 1), oldest first.
        weight: F32 (n_channel, TAPS), the last column for the token itself.
        bias: F32 (n_channel,); any pointer if not HAS_BIAS.
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
        tl.debug_barrier()  # all threads have read the overwritten inputs
        for i in tl.static_range(TAPS - 1):
            tl.store(state + channel * (TAPS - 1) + i, kept[i], mask=inside)


@triton.jit(do_not_specialize=["n_channel", "stride"])
def causal_conv_of_chains(x, before, after, state, chains, weight, bias, y, slot_size, n_channel,
                          stride, TAPS: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr,
                          HAS_GATES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Convolve BLOCK channels of the chain that starts at a row; see `gpu.page_tables.StateChains`.

    The last row comes first: the first row may overwrite the state before it, which others read.
    Sums are in the same order as in `causal_conv`.

    Args:
        state: F32 (slots, n_channel, TAPS - 1), with `slot_size` elements per slot.
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
        tl.debug_barrier()  # all threads have read the overwritten inputs
        new = state + state_after(chains, first + row, slot_size)
        for tap in tl.static_range(TAPS - 1):
            tl.store(new + channel * (TAPS - 1) + tap, kept[tap], mask=inside)


@triton.jit
def input_at(x, before, state, place, channel, wanted, stride, TAPS: tl.constexpr,
             HAS_GATES: tl.constexpr):  # fmt: skip
    """Load token `place`'s inputs; inputs before the first token are in the state."""
    is_new = wanted & (place >= 0)
    value = tl.load(x + place * stride + channel, mask=is_new, other=0.0)
    if HAS_GATES:
        value *= tl.load(before + place * stride + channel, mask=is_new, other=0.0)
    old = state + channel * (TAPS - 1) + place + (TAPS - 1)
    return value + tl.load(old, mask=wanted & (place < 0), other=0.0)
