"""CPU kernels for recurrent layers on torch tensors: token by token, in a fixed order.

A row's result has the same bits in any pass. Methods return None for unsupported arguments: tensors
other than F32, and states without slots. Tensors may be slices with strided rows.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import chosen, named
from engine.backends.cpu.kernels.recurrent import conv, delta_net, state_space
from engine.backends.cpu.kernels.recurrent.state_rows import StateRows
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.fastcall import BoundKernel, Kernel, bind_both
from engine.backends.cpu.kernels.small.small_ops import F32, SHORT_CALL, f32_bits, is_plain
from engine.model.forward.batch import MAX_AT_ONCE
from engine.model.forward.operands import SILU, PlacedStates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.backends.cpu.kernels.language.isa import Isa
    from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
    from engine.model.forward.batch import Batch
    from engine.model.forward.operands import Activation, DeltaInputs, ScanInputs, States

PIECE = 1 << 15
"""Minimum work per piece: state elements times tokens."""

PER_THREAD = 4
"""Minimum number of pieces per thread if there is enough work."""


@cache
def _delta_net(isa_name: str, *, by_channel: bool) -> BoundKernel:
    isa, name = named(isa_name), "delta-net-by-channel" if by_channel else "delta-net"
    build = partial(delta_net.build, isa=isa, by_channel=by_channel)
    found = jit.addresses_by_source(name, isa, [delta_net.NAME], build)
    return bind_both(found[delta_net.NAME], len(delta_net.ARGUMENTS))


@cache
def _scans(isa_name: str) -> Mapping[str, BoundKernel]:
    names = state_space.NAMES
    found = jit.addresses_by_source("state-space", named(isa_name), names, state_space.build)
    return {name: bind_both(found[name], len(state_space.ARGUMENTS)) for name in names}


@cache
def _convolutions(isa_name: str, n_tap: int) -> Mapping[str, BoundKernel]:
    build = partial(conv.build, n_tap=n_tap)
    found = jit.addresses_by_source(f"conv-{n_tap}", named(isa_name), conv.NAMES, build)
    return {name: bind_both(found[name], len(conv.ARGUMENTS)) for name in conv.NAMES}


class RecurrentOps:
    """Operations for recurrent layers, computed by one pool.

    Args:
        pool: threads that compute.
        isa: instruction set of the kernels; None for the best that this processor supports.
    """

    def __init__(self, pool: ThreadPool, isa: Isa | None = None) -> None:
        self._pool = pool
        self._address = pool.address
        self._isa = isa or chosen()
        self._batch: Batch | None = None
        self._rows: StateRows | None = None
        self._rows_of_singles: dict[int, StateRows] = {}

    def causal_conv(
        self, x: Tensor, state: States, weight: Tensor, bias: Tensor | None,
        act: Activation | None = None, gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Compute `Ops.causal_conv` for 2 to 4 taps, with SiLU or no activation."""
        (n_token, n_channel), n_tap = x.shape, weight.shape[1]
        if n_tap not in conv.TAPS or act not in (None, SILU):
            return None
        held = self._found(state, n_token)
        if not _are_rows(x, *(gates or ())) or not _are_plain(weight, bias) or held is None:
            return None
        out = torch.empty(n_token, n_channel)
        gate_places = (0,) * 4 if gates is None else (*_rows(gates[0]), *_rows(gates[1]))
        n_groups = -(-n_channel // conv.GROUP)
        kernel = _convolutions(self._isa.name, n_tap)["conv_silu" if act else "conv"]
        self._binding(kernel, x.numel())(
            self._address, *_rows(x), *gate_places, weight.data_ptr(), _place(bias),
            held.state, held.stride, held.chains, held.goals, n_channel,
            self._per_piece(n_groups, 1, n_token * conv.GROUP * n_tap), out.data_ptr(),
        )  # fmt: skip
        return out

    def delta_net(self, x: DeltaInputs, state: States) -> Tensor | None:
        """Compute `Ops.delta_net`."""
        (n_token, n_head, n_value), n_key = x.v.shape, x.q.shape[2]
        held = self._found(state, n_token)
        if n_key > delta_net.MAX_KEY or not _are_rows(x.q, x.k, x.v, x.step, x.beta):
            return None
        if not _are_plain(x.step_bias, x.rate) or not _is_map(x.key_of) or held is None:
            return None
        out = torch.empty(n_token, n_head, n_value)
        kernel = _delta_net(self._isa.name, by_channel=x.step.dim() == 3)
        columns = delta_net.columns_of(self._isa)
        n_strips = -(-n_value // columns)
        per_piece = self._per_piece(
            held.n_chain * n_head * n_strips, n_strips, held.most * n_key * columns
        )
        self._binding(kernel, n_token * held.n_element)(
            self._address, *_rows(x.q), *_rows(x.k), *_rows(x.v), *_rows(x.step), *_rows(x.beta),
            x.step_bias.data_ptr(), x.rate.data_ptr(), _place(x.key_of), held.chains, held.goals,
            n_head, n_key, n_value, f32_bits(x.scale), f32_bits(x.eps), held.state, held.stride,
            per_piece, out.data_ptr(),
        )  # fmt: skip
        return out

    def selective_scan(
        self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor,
        state: States,
    ) -> Tensor | None:  # fmt: skip
        """Compute `Ops.selective_scan`."""
        held = self._found(state, len(x))
        if not _are_rows(x, step, b, c, gate) or not _are_plain(a, d) or held is None:
            return None
        places = 0, a.data_ptr(), d.data_ptr(), 0
        return self._scan("selective_scan", (x, step, b, c, gate), places, 1, held)

    def state_space_scan(self, x: ScanInputs, state: States) -> Tensor | None:
        """Compute `Ops.state_space_scan`."""
        rows, held = (x.values, x.step, x.b, x.c, x.gate), self._found(state, len(x.step))
        if not _are_rows(*rows) or not _are_plain(x.step_bias, x.rate, x.skip):
            return None
        if not _is_map(x.key_of) or held is None:
            return None
        places = x.step_bias.data_ptr(), x.rate.data_ptr(), x.skip.data_ptr(), _place(x.key_of)
        return self._scan("state_space_scan", rows, places, x.step.shape[1], held)

    def _scan(
        self, name: str, rows: tuple[Tensor, ...], places: tuple[int, int, int, int], n_head: int,
        held: _Held,
    ) -> Tensor:  # fmt: skip
        """Run a scan.

        Args:
            rows: values, steps, b, c and the gate.
            places: addresses of the steps' bias, the rates, d and `key_of`.
        """
        x, step, b, c, gate = rows
        bias, a, d, key_of = places
        n_row, n_state = x[0].numel() // n_head, held.width
        out = torch.empty(len(x), n_head * n_row)
        n_units = held.n_chain * n_head * -(-n_row // state_space.UNIT)
        per_piece = self._per_piece(n_units, 1, held.most * n_state * state_space.UNIT)
        self._binding(_scans(self._isa.name)[name], len(x) * held.n_element)(
            self._address, *_rows(x), *_rows(step), bias, a, *_rows(b), *_rows(c), d, *_rows(gate),
            key_of, held.chains, held.goals, n_head, n_row, n_state, held.state, held.stride,
            per_piece, out.data_ptr(),
        )  # fmt: skip
        return out

    def begin(self, batch: Batch) -> None:
        """Write a pass's state slots to the memory that recorded calls read."""
        self._batch, self._rows = batch, None
        rows = self._rows_of_singles.get(len(batch.pieces))
        if rows is not None and batch.is_of_singles:
            rows.set(batch)
            self._rows = rows

    def _found(self, state: States, n_row: int) -> _Held | None:
        """Return the states for `n_row` rows; None if the kernels do not support them."""
        if not isinstance(state, PlacedStates) or not is_plain(state.held):
            return None
        rows, held = self._rows_of(state.batch), state.held
        if n_row != state.batch.n_rows or rows.n_slots > len(held):
            return None
        one = held[0]
        return _Held(
            held.data_ptr(), 4 * held.stride(0), rows.chains, rows.goals, rows.n_chain, rows.most,
            one.numel(), one.shape[-1],
        )  # fmt: skip

    def _rows_of(self, batch: Batch) -> StateRows:
        """Return a batch's rows; batches with the same number of single tokens share the memory."""
        if batch is not self._batch:
            self.begin(batch)
        if self._rows is None:
            n = batch.n_rows
            self._rows = StateRows(n)
            self._rows.set(batch)
            if batch.is_of_singles and n <= MAX_AT_ONCE:
                self._rows_of_singles[n] = self._rows
        return self._rows

    def _per_piece(self, n_units: int, n_together: int, unit_size: int) -> int:
        """Return the number of units per piece.

        Args:
            n_together: number of units that share a preparation.
            unit_size: work per unit, in elements.
        """
        n = max(1, PIECE // max(unit_size, 1))
        if n_units // n_together >= PER_THREAD * self._pool.n_threads:
            n = max(n, n_together)
        return n if n < n_together else n - n % n_together

    def _binding(self, kernel: BoundKernel, n_elements: int) -> Kernel:
        return kernel.chosen(self._pool, is_short=n_elements <= SHORT_CALL)


class _Held(NamedTuple):
    """A call's states.

    Attributes:
        state: address of the first slot.
        stride: bytes between slots.
        chains, goals, n_chain, most: see `StateRows`.
        n_element: number of elements per state.
        width: size of a state's last dimension.
    """

    state: int
    stride: int
    chains: int
    goals: int
    n_chain: int
    most: int
    n_element: int
    width: int


def _are_rows(*tensors: Tensor) -> bool:
    return all(x.dtype is F32 and x.is_cpu and x.shape[0] and x[0].is_contiguous() for x in tensors)


def _are_plain(*tensors: Tensor | None) -> bool:
    return all(x is None or is_plain(x) for x in tensors)


def _is_map(key_of: Tensor | None) -> bool:
    return key_of is None or (key_of.dtype is torch.int64 and key_of.is_contiguous())


def _rows(x: Tensor) -> tuple[int, int]:
    """Return the first token's address and the bytes between tokens."""
    return x.data_ptr(), 4 * x.stride(0)


def _place(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
