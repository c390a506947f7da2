"""Causal depthwise convolution over the latest tokens, with activation and gates.

Tokens are added up from oldest to newest, so the bits do not depend on how a prompt is split.
Adjacent channels form groups; a group's filters and latest inputs are on the stack.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from engine.backends.cpu.kernels.language.loops import Named, SimdLanes, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I64,
    LANES,
    VOID,
    Code,
    Value,
    concatenated,
    internal,
)
from engine.backends.cpu.kernels.recurrent.state_rows import chain_words, n_chains
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.backends.cpu.kernels.small.activation import activated

TAPS = (2, 3, 4)
"""Supported numbers of taps."""

NAMES = ("conv", "conv_silu")
"""Names of the kernels: without activation, and with SiLU."""

ARGUMENTS = (
    "x", "x_stride", "before", "before_stride", "after", "after_stride", "weight", "bias", "state",
    "state_stride", "chains", "goals", "n_channel", "per_piece", "out",
)  # fmt: skip
"""Arguments of the kernels; see `forward.ops.Ops.causal_conv`. x is F32, (T, n_channel),
with a stride in bytes. before, after: the gates, both or none (0). weight: (n_channel, n_tap).
bias: (n_channel,), or 0. state: (n_channel, n_tap - 1) in each place, oldest first, `state_stride`
bytes apart. chains, goals: see `kernels.recurrent.state_rows`. out: like x, contiguous. per_piece:
number of channel groups per piece."""

WIDTH = 8
"""Number of channel vectors per group."""

GROUP = WIDTH * LANES
"""Number of channels per group."""

BLOCK = 16
"""Number of tokens per block, whose inputs are on the stack."""

AHEAD = 8
"""Prefetch distance for inputs and results, in tokens. Tokens are in different memory pages, and
hardware prefetchers stop at page boundaries."""

ROW = 4 * GROUP
"""Bytes between tokens in the inputs, and between taps in the filters, on the stack."""


def build(module: ir.Module, n_tap: int) -> None:
    """Emit `conv(pool, *ARGUMENTS)` and `conv_silu(pool, *ARGUMENTS)` for `n_tap` taps."""
    add_run(module)
    for name in NAMES:
        for is_whole in (True, False):
            _add_group(module, name, n_tap, is_whole=is_whole)
        with piece(module, name, ARGUMENTS) as (code, given, index):
            _emit_piece(code, name, given, index)
        add_kernel(module, name, ARGUMENTS, _n_pieces)


def _n_pieces(code: Code, given: Named) -> Value:
    return ceil_div(ceil_div(given["n_channel"], GROUP), given["per_piece"])


def _emit_piece(code: Code, name: str, given: Named, index: Value) -> None:
    values = [given[name] for name in ARGUMENTS]
    first = index * given["per_piece"] * GROUP
    stop = code.min_signed(first + given["per_piece"] * GROUP, given["n_channel"])
    whole = stop - (stop - first) % LANES
    with code.loop(first, whole, GROUP) as channel:
        n = code.min_signed(whole - channel, code.number(GROUP))
        code.call(f"{name}_whole", VOID, *values, channel, n)
    with code.when(whole < stop):
        code.call(f"{name}_partial", VOID, *values, whole, stop - whole)


def _add_group(module: ir.Module, name: str, n_tap: int, *, is_whole: bool) -> None:
    """Emit `name_whole(*ARGUMENTS, channel, n)`, for n channels in whole vectors.

    `name_partial` is for less than one vector.
    """
    part = f"{name}_{'whole' if is_whole else 'partial'}"
    code, (*values, channel, n) = internal(module, part, len(ARGUMENTS) + 2)
    given = dict(zip(ARGUMENTS, values, strict=True))
    group = _Group(code, given, channel, n, n_tap, is_whole=is_whole)
    group.emit(has_silu=name == "conv_silu")
    code.builder.ret_void()


class _Group:
    """Generates the code for a group of n channels."""

    def __init__(
        self, code: Code, given: Named, channel: Value, n: Value, n_tap: int, *, is_whole: bool
    ) -> None:
        self._code, self._given, self._channel, self._n = code, given, channel, n
        self._n_tap, self._is_whole = n_tap, is_whole
        self._filters = code.stack_buffer(F32, GROUP * n_tap)
        self._biases = code.stack_buffer(F32, GROUP)
        self._inputs = code.stack_buffer(F32, GROUP * (n_tap - 1 + BLOCK))

    def emit(self, *, has_silu: bool) -> None:
        code, none, given = self._code, self._code.number(0), self._given
        with code.loop(none, self._n, LANES) as at:
            self._load_filters(at)
        with code.loop(none, n_chains(code, given["chains"])) as number:
            begin, end, source, most = chain_words(code, given["chains"], number)
            state = given["state"] + source * given["state_stride"]
            with code.loop(none, self._n, LANES) as at:
                self._load_state(state, at)
            self._emit_tokens(begin, end, most, has_silu=has_silu)

    def _emit_tokens(self, begin: Value, end: Value, most: Value, *, has_silu: bool) -> None:
        code, none, given = self._code, self._code.number(0), self._given
        with code.loop(begin, end, code.min_signed(most, code.number(BLOCK))) as first:
            n = code.min_signed(code.min_signed(end - first, most), code.number(BLOCK))
            with code.loop(none, n) as token, code.loop(none, self._n, LANES) as at:
                self._compute(first + token, token, at, has_silu=has_silu)
            with code.loop(none, self._n, LANES) as at:
                for row in range(self._n_tap - 1):
                    latest = code.load(self._inputs + (n + row) * ROW + at * 4, FLOATS)
                    code.store(latest, self._inputs + row * ROW + at * 4)
            with code.when(most.equals(1) | (first + n).equals(end)):
                goal = code.load(given["goals"] + (first + n - 1) * 8, I64)
                state = given["state"] + goal * given["state_stride"]
                with code.loop(none, self._n, LANES) as at:
                    self._store_state(state, at)

    def _lanes(self, at: Value) -> SimdLanes:
        left = None if self._is_whole else self._n - at
        return SimdLanes(self._code, self._channel + at, left)

    def _load_filters(self, at: Value) -> None:
        code, given = self._code, self._given
        for row, tap in enumerate(self._apart(given["weight"], self._n_tap, at)):
            code.store(tap, self._filters + row * ROW + at * 4)
        code.store(code.constant(FLOATS, 0.0), self._biases + at * 4)
        with code.when(given["bias"].differs(0)):
            code.store(self._lanes(at).load(given["bias"]), self._biases + at * 4)

    def _load_state(self, state: Value, at: Value) -> None:
        for row, held in enumerate(self._apart(state, self._n_tap - 1, at)):
            self._code.store(held, self._inputs + row * ROW + at * 4)

    def _apart(self, address: Value, n: int, at: Value) -> list[Value]:
        """Load n numbers for each of 16 channels; return n vectors."""
        code, address = self._code, address + (self._channel + at) * (4 * n)
        if self._is_whole:
            parts = [code.load(address + 4 * LANES * part, FLOATS) for part in range(n)]
        else:
            n_left = (self._n - at) * n
            parts = [
                code.load_part(address + 4 * LANES * part, FLOATS, n_left - LANES * part)
                for part in range(n)
            ]
        numbers = _joined(parts)
        return [numbers.shuffle(range(row, LANES * n, n)) for row in range(n)]

    def _store_state(self, state: Value, at: Value) -> None:
        """Store the latest inputs for 16 channels, channel by channel."""
        code, n = self._code, self._n_tap - 1
        address = state + (self._channel + at) * (4 * n)
        rows = [code.load(self._inputs + row * ROW + at * 4, FLOATS) for row in range(n)]
        numbers = _joined(rows)
        for part in range(n):
            places = [divmod(i, n) for i in range(LANES * part, LANES * (part + 1))]
            vector = numbers.shuffle([row * LANES + channel for channel, row in places])
            if self._is_whole:
                code.store(vector, address + 4 * LANES * part)
            else:
                n_left = (self._n - at) * n - LANES * part
                code.store_part(vector, address + 4 * LANES * part, n_left)

    def _compute(self, row: Value, token: Value, at: Value, *, has_silu: bool) -> None:
        code, given, lanes = self._code, self._given, self._lanes(at)
        x, out = given["x"] + row * given["x_stride"], given["out"] + row * given["n_channel"] * 4
        newest = code.variable(lanes.load(x))
        for address, stride in ((x, given["x_stride"]), (out, given["n_channel"] * 4)):
            code.prefetch(address + stride * AHEAD + lanes.index * 4)
        is_gated = given["before"].differs(0)
        with code.when(is_gated):
            gate = lanes.load(given["before"] + row * given["before_stride"])
            newest.set(gate * newest.get())
        kept = self._inputs + token * ROW + at * 4
        code.store(newest.get(), kept + (self._n_tap - 1) * ROW)
        inputs = [code.load(kept + tap * ROW, FLOATS) for tap in range(self._n_tap - 1)]
        taps = [code.load(self._filters + tap * ROW + at * 4, FLOATS) for tap in range(self._n_tap)]
        y = inputs[0] * taps[0]
        for number, tap in zip((*inputs[1:], newest.get()), taps[1:], strict=True):
            y = code.fma(number, tap, y)
        y = y + code.load(self._biases + at * 4, FLOATS)
        result = code.variable(activated(code, "silu", y) if has_silu else y)
        with code.when(is_gated):
            gate = lanes.load(given["after"] + row * given["after_stride"])
            result.set(gate * result.get())
        lanes.store(result.get(), out)


def _joined(parts: Sequence[Value]) -> Value:
    """Concatenate 1 to 4 vectors; if there are three, repeat the last one."""
    return concatenated([*parts, parts[-1]] if len(parts) == 3 else parts)
