"""Routing of tokens to experts, and the weighted sum of the experts' results (`layers.moe`).

Scores are compared as integer keys that have the same order. Experts already chosen get the lowest
key, so even NaNs select distinct experts. Among equal scores, the first wins.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language import maths
from engine.backends.cpu.kernels.language.loops import (
    Named,
    SimdLanes,
    add_row_kernel,
    ceil_div,
    for_each_vector,
    piece,
    rows_per_piece,
    share,
)
from engine.backends.cpu.kernels.language.values import (  # fmt: skip
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    VOID,
    Code,
    Value,
    function,
    internal,
)
from engine.backends.cpu.kernels.running.thread_pool import add_run

GATINGS = ("softmax", "sigmoid", "softmax_chosen")
"""Functions that turn logits into scores; see `layers.moe`. `softmax_chosen` is applied only to the
chosen experts' logits."""

ASSIGN = (
    "logits", "n_token", "n_expert", "n_used", "bias", "normalise", "scale", "smallest", "n_group",
    "n_group_used", "weights", "chosen", "table", "expert_of", "pair_of", "row_of", "n_found",
)  # fmt: skip
"""Arguments of the routing kernels. logits are F32, (n_token, n_expert); bias (n_expert,), or 0 for
none; `normalise` is 0 or 1; scale and smallest (the least sum by which weights are divided) are F32
bits. weights are F32, (n_token, n_used), in ascending order of experts, like `chosen`.
`table` to `row_of` are as in `forward.expert_rows.Groups`; n_found is the address of the number of
experts in use."""

SUM = ("y", "y_stride", "weights", "row_of", "n_token", "n_used", "n", "out")
"""Arguments of `sum_of_experts`. y is F32, (n_row, n) with a stride in bytes; weights (n_token,
n_used), or 0 for none; row_of has the rows of y to add up for each token; out is F32,
(n_token, n)."""

TAKEN, OUT_OF_REACH = -(1 << 31), 1 - (1 << 31)
"""Keys for chosen and for excluded experts, lower than any number's key."""

MAX_EXPERTS = 4096
"""Maximum number of experts, as arrays of this length are on the stack."""


def build(module: ir.Module) -> None:
    """Emit `gating(pool, *ASSIGN)` for each gating, and `sum_of_experts(pool, *SUM)`."""
    add_run(module)
    _add_take_largest(module)
    _add_best_groups(module)
    _add_sort(module)
    _add_normalise(module)
    _add_softmax(module)
    for gating in GATINGS:
        _add_token(module, gating)
        _add_assign(module, gating)
    add_row_kernel(
        module, "sum_of_experts", SUM, lambda given: given["n"] * given["n_used"], _emit_sum,
        "n_token",
    )  # fmt: skip


def _key(code: Code, x: Value) -> Value:
    """Return integer keys in the same order as floats x; NaNs are lowest or highest, by sign."""
    kind = INTS if isinstance(x.kind, ir.VectorType) else I32
    bits = x.bitcast(kind)
    key = code.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    least = code.constant(kind, OUT_OF_REACH + 1)
    return code.where(key < least, least, key)


def _number(code: Code, key: Value) -> Value:
    return code.where(key < 0, key ^ 0x7FFFFFFF, key).bitcast(F32)


def _list(code: Code, n: Value) -> Value:
    """Reserve n 32-bit numbers on the stack, padded to a multiple of 16; return their address."""
    place = code.builder.alloca(I8, (_padded(n) * 4).raw)
    return Value(code, code.builder.ptrtoint(place, I64))


def _padded(n: Value) -> Value:
    return (n + (LANES - 1)) // LANES * LANES


def _add_take_largest(module: ir.Module) -> None:
    """Emit `take_largest(keys, n)`: marks the first of the largest keys as taken."""
    code, (keys, n) = internal(module, "take_largest", 2)
    best = code.variable(code.constant(INTS, TAKEN))
    places = code.variable(code.constant(INTS, 0))
    lanes = code.vector_of(INTS, range(LANES))
    with code.loop(code.number(0), n, LANES) as index:
        found = code.load(keys + index * 4, INTS)
        is_better = found > best.get()
        places.set(code.where(is_better, lanes + code.splat(index.to(I32)), places.get()))
        best.set(code.where(is_better, found, best.get()))
    key, place = best.get(), places.get()
    while key.kind.count > 1:
        half = key.kind.count // 2
        parts = [(v.shuffle(range(half)), v.shuffle(range(half, 2 * half))) for v in (key, place)]
        (key, other), (place, other_place) = parts
        is_better = (other > key) | (other.equals(key) & (other_place < place))
        key, place = code.where(is_better, other, key), code.where(is_better, other_place, place)
    code.store(code.constant(I32, TAKEN), keys + place[0].to(I64) * 4)
    code.builder.ret_void()


def _add_best_groups(module: ir.Module) -> None:
    """Emit `best_groups(keys, n, n_group, n_used)`: excludes the experts in all other groups.

    A group's score is the sum of its two highest scores.
    """
    code, (keys, n, n_group, n_used) = internal(module, "best_groups", 4)
    groups, size, none = _list(code, n_group), n // n_group, code.number(0)
    with code.loop(none, _padded(n_group), LANES) as group:
        code.store(code.constant(INTS, TAKEN), groups + group * 4)
    with code.loop(none, n_group) as group:
        first, second = (code.variable(code.constant(F32, float("-inf"))) for _ in range(2))
        with code.loop(group * size, (group + 1) * size) as expert:
            number = _number(code, code.load(keys + expert * 4, I32))
            best = first.get()
            lower = code.where(number > best, best, number)
            second.set(code.where(lower > second.get(), lower, second.get()))
            first.set(code.where(number > best, number, best))
        code.store(_key(code, first.get() + second.get()), groups + group * 4)
    with code.loop(none, n_used):
        code.call("take_largest", VOID, groups, _padded(n_group))
    with (
        code.loop(none, n_group) as group,
        code.when(code.load(groups + group * 4, I32) > TAKEN),
        code.loop(group * size, (group + 1) * size) as expert,
    ):
        code.store(code.constant(I32, OUT_OF_REACH), keys + expert * 4)
    code.builder.ret_void()


def _add_softmax(module: ir.Module) -> None:
    """Emit `apply_softmax(x, n, out)`; out is padded to a multiple of 16."""
    code, (x, n, out) = internal(module, "apply_softmax", 3)
    lowest = code.constant(FLOATS, float("-inf"))
    largest, total = code.variable(lowest), code.variable(code.constant(FLOATS, 0.0))

    def compare(lanes: SimdLanes) -> None:
        numbers = lanes.load(x)
        if lanes.left is not None:
            numbers = code.where(code.lane_mask(lanes.left), numbers, lowest)
        largest.set(code.maximum(largest.get(), numbers))

    for_each_vector(code, n, compare)
    top = code.splat(code.reduce("max", largest.get()))

    def raise_to_e(lanes: SimdLanes) -> None:
        powers = lanes.only(maths.exp(code, lanes.load(x) - top))
        code.store(powers, out + lanes.index * 4)
        total.set(total.get() + powers)

    for_each_vector(code, n, raise_to_e)
    whole = code.splat(code.reduce("add", total.get()))
    with code.loop(code.number(0), n, LANES) as index:
        code.store(code.load(out + index * 4, FLOATS) / whole, out + index * 4)
    code.builder.ret_void()


def _add_normalise(module: ir.Module) -> None:
    """Emit `normalise(weights, n, smallest)`: divides by the larger of the sum and `smallest`."""
    code, (weights, n, smallest) = internal(module, "normalise", 3)
    total = code.variable(code.constant(F32, 0.0))
    with code.loop(code.number(0), n) as index:
        total.set(total.get() + code.load(weights + index * 4, F32))
    whole = code.maximum(total.get(), smallest.to(I32).bitcast(F32))
    with code.loop(code.number(0), n) as index:
        code.store(code.load(weights + index * 4, F32) / whole, weights + index * 4)
    code.builder.ret_void()


TOKEN = ("n_expert", "n_used", "bias", "normalise", "scale", "smallest", "n_group", "n_group_used")
"""The arguments from `ASSIGN` that routing one token needs."""


def _add_token(module: ir.Module, gating: str) -> None:
    """Emit `gating_token(logits, weights, chosen, *TOKEN)`: routes one token."""
    name = f"{gating}_token"
    code, (logits, weights, chosen, *values) = internal(module, name, 3 + len(TOKEN))
    given = dict(zip(TOKEN, values, strict=True))
    n, n_used, none = given["n_expert"], given["n_used"], code.number(0)
    scores, keys = _list(code, n), _list(code, n)
    if gating == "softmax":
        code.call("apply_softmax", VOID, logits, n, scores)
    elif gating == "sigmoid":
        for_each_vector(
            code, n, lambda lanes: lanes.store(maths.sigmoid(code, lanes.load(logits)), scores)
        )
    else:
        for_each_vector(code, n, lambda lanes: lanes.store(lanes.load(logits), scores))
    _emit_keys(code, given, logits, scores, keys)
    if gating != "softmax_chosen":
        with code.when(given["n_group"] > 1):
            code.call("best_groups", VOID, keys, n, given["n_group"], given["n_group_used"])
    with code.loop(none, n_used):
        code.call("take_largest", VOID, keys, _padded(n))
    _emit_chosen(code, n, keys, scores, weights, chosen)
    if gating == "softmax_chosen":
        powers = _list(code, n_used)
        code.call("apply_softmax", VOID, weights, n_used, powers)
        for_each_vector(code, n_used, lambda lanes: lanes.store(lanes.load(powers), weights))
    else:
        with code.when(given["normalise"] > 0):
            code.call("normalise", VOID, weights, n_used, given["smallest"])
    scale = code.splat(given["scale"].to(I32).bitcast(F32))
    for_each_vector(code, n_used, lambda lanes: lanes.store(lanes.load(weights) * scale, weights))
    code.builder.ret_void()


def _emit_keys(code: Code, given: Named, logits: Value, scores: Value, keys: Value) -> None:
    """Emit the keys by which experts are chosen, computed from the biased scores.

    If there is neither bias nor groups, use the logits, as different logits may have equal scores.
    """
    bias = given["bias"]
    source = code.where(bias.equals(0) & given["n_group"].equals(1), logits, scores)

    def emit(lanes: SimdLanes) -> None:
        wanted = code.variable(lanes.load(source))
        with code.when(bias.differs(0)):
            wanted.set(wanted.get() + lanes.load(bias))
        key = _key(code, wanted.get())
        if lanes.left is not None:
            key = code.where(code.lane_mask(lanes.left), key, code.constant(INTS, TAKEN))
        code.store(key, keys + lanes.index * 4)

    for_each_vector(code, given["n_expert"], emit)


def _emit_chosen(
    code: Code, n: Value, keys: Value, scores: Value, weights: Value, chosen: Value
) -> None:
    """Store the chosen experts in ascending order, and their scores."""
    place = code.variable(code.number(0))
    with (
        code.loop(code.number(0), n) as expert,
        code.when(code.load(keys + expert * 4, I32).equals(TAKEN)),
    ):
        at = place.get()
        code.store(expert, chosen + at * 8)
        code.store(code.load(scores + expert * 4, F32), weights + at * 4)
        place.set(at + 1)


def _add_sort(module: ir.Module) -> None:
    """Emit `sort_rows(*ASSIGN)`: a counting sort of (token, expert) pairs by expert."""
    code, values = internal(module, "sort_rows", len(ASSIGN))
    given, none = dict(zip(ASSIGN, values, strict=True)), code.number(0)
    n_pairs, n_expert = given["n_token"] * given["n_used"], given["n_expert"]
    next_rows = _list(code, n_expert * 2)
    with code.loop(none, n_expert) as expert:
        code.store(none, next_rows + expert * 8)
    with code.loop(none, n_pairs) as pair:
        place = next_rows + code.load(given["chosen"] + pair * 8, I64) * 8
        code.store(code.load(place, I64) + 1, place)
    first, entry = code.variable(none), code.variable(given["table"])
    with code.loop(none, n_expert) as expert:
        n = code.load(next_rows + expert * 8, I64)
        code.store(first.get(), next_rows + expert * 8)
        with code.when(n > 0):
            for part, number in enumerate((expert, first.get(), n)):
                code.store(number, entry.get() + 8 * part)
            entry.set(entry.get() + 24)
        first.set(first.get() + n)
    code.store((entry.get() - given["table"]) // 24, given["n_found"])
    with code.loop(none, n_pairs) as pair:
        expert = code.load(given["chosen"] + pair * 8, I64)
        row = code.load(next_rows + expert * 8, I64)
        code.store(row + 1, next_rows + expert * 8)
        code.store(expert, given["expert_of"] + row * 8)
        code.store(pair, given["pair_of"] + row * 8)
        code.store(row, given["row_of"] + pair * 8)
    code.builder.ret_void()


def _add_assign(module: ir.Module, gating: str) -> None:
    """Emit `gating(pool, *ASSIGN)`: routes all tokens, then sorts the rows."""
    with piece(module, gating, ASSIGN) as (code, given, index):
        per_piece = rows_per_piece(code, given["n_expert"])
        stop = code.min_signed((index + 1) * per_piece, given["n_token"])
        with code.loop(index * per_piece, stop) as token:
            logits = given["logits"] + token * given["n_expert"] * 4
            first = token * given["n_used"]
            goals = given["weights"] + first * 4, given["chosen"] + first * 8
            code.call(f"{gating}_token", VOID, logits, *goals, *(given[name] for name in TOKEN))
    code, (pool, *values) = function(module, gating, 1 + len(ASSIGN))
    given = dict(zip(ASSIGN, values, strict=True))
    n_pieces = ceil_div(given["n_token"], rows_per_piece(code, given["n_expert"]))
    share(code, gating, pool, code.stack_array(values), n_pieces)
    code.call("sort_rows", VOID, *values)
    code.builder.ret_void()


def _emit_sum(code: Code, given: Named, token: Value) -> None:
    n, n_used, weights = given["n"], given["n_used"], given["weights"]
    first = token * n_used

    def emit(lanes: SimdLanes) -> None:
        total = code.variable(code.constant(FLOATS, 0.0))
        with code.loop(first, first + n_used) as pair:
            row = code.load(given["row_of"] + pair * 8, I64)
            numbers = code.variable(lanes.load(given["y"] + row * given["y_stride"]))
            with code.when(weights.differs(0)):
                weight = code.splat(code.load(weights + pair * 4, F32))
                numbers.set(numbers.get() * weight)
            total.set(total.get() + numbers.get())
        lanes.store(total.get(), given["out"] + token * n * 4)

    for_each_vector(code, n, emit)
