"""Recurrent layers with the CPU's kernels, for torch tensors: token by token, in a fixed order.

A row's result has the same bits in any pass. Methods return None for tensors that the kernels do
not accept; rows of larger tensors are accepted.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.cpu.kernels import conv, delta_net, delta_strip, jit, state_space
from engine.cpu.kernels.fastcall import BoundKernel, Kernel, bind_both
from engine.cpu.kernels.isa import chosen, named
from engine.cpu.kernels.small_ops import F32, SHORT_CALL, f32_bits, is_plain
from engine.forward.operands import SILU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.cpu.kernels.isa import Isa
    from engine.cpu.kernels.team import Team
    from engine.forward.operands import Activation, DeltaInputs, ScanInputs

PIECE = 1 << 15
"""Least number of elements that a piece visits: the elements of its states, times the tokens."""

PER_THREAD = 4
"""Number of pieces for each thread of a team, at least, where there is enough to do."""


@cache
def _delta_net(isa_name: str, *, by_channel: bool) -> BoundKernel:
    """Compile the delta net with a decay for each head, or for each channel."""
    isa, name = named(isa_name), "delta-net-by-channel" if by_channel else "delta-net"
    build = partial(delta_net.build, isa=isa, by_channel=by_channel)
    found = jit.addresses_by_source(name, isa, [delta_net.NAME], build)
    return bind_both(found[delta_net.NAME], len(delta_net.ARGUMENTS))


@cache
def _scans(isa_name: str) -> Mapping[str, BoundKernel]:
    """Compile the scans of state-space models."""
    names = state_space.NAMES
    found = jit.addresses_by_source("state-space", named(isa_name), names, state_space.build)
    return {name: bind_both(found[name], len(state_space.ARGUMENTS)) for name in names}


@cache
def _convolutions(isa_name: str, n_tap: int) -> Mapping[str, BoundKernel]:
    """Compile the convolutions with a number of taps."""
    build = partial(conv.build, n_tap=n_tap)
    found = jit.addresses_by_source(f"conv-{n_tap}", named(isa_name), conv.NAMES, build)
    return {name: bind_both(found[name], len(conv.ARGUMENTS)) for name in conv.NAMES}


class RecurrentOps:
    """The operations of recurrent layers, computed by one team.

    Args:
        team: threads that compute.
        isa: instruction set of the kernels; None for the best of this processor.
    """

    def __init__(self, team: Team, isa: Isa | None = None) -> None:
        self._team = team
        self._address = team.address
        self._isa = isa or chosen()

    def causal_conv(
        self, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None,
        act: Activation | None = None, gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Compute `Ops.causal_conv` of 2 to 4 taps, without activation or with SiLU."""
        (n_token, n_channel), n_tap = x.shape, weight.shape[1]
        if n_tap not in conv.TAPS or act not in (None, SILU):
            return None
        if not _are_rows(x, *(gates or ())) or not _are_plain(state, weight, bias):
            return None
        out = torch.empty(n_token, n_channel)
        cut = _Cut.of(n_token, state, 3)
        gate_places = (0,) * 4 if gates is None else (*_rows(gates[0]), *_rows(gates[1]))
        n_groups = -(-n_channel // conv.GROUP)
        kernel = _convolutions(self._isa.name, n_tap)["conv_silu" if act else "conv"]
        self._binding(kernel, x.numel())(
            self._address, *_rows(x), *gate_places, weight.data_ptr(), _place(bias),
            state.data_ptr(), cut.state_stride, cut.n_sequence, cut.n_token, n_channel,
            self._per_piece(n_groups, 1, n_token * conv.GROUP * n_tap), out.data_ptr(),
        )  # fmt: skip
        return out

    def delta_net(self, x: DeltaInputs, state: Tensor) -> Tensor | None:
        """Compute `Ops.delta_net`."""
        (n_token, n_head, n_value), n_key = x.v.shape, x.q.shape[2]
        if n_key > delta_net.MAX_KEY or not _are_rows(x.q, x.k, x.v, x.step, x.beta):
            return None
        if not _are_plain(x.step_bias, x.rate, state) or not _is_map(x.key_of):
            return None
        out = torch.empty(n_token, n_head, n_value)
        kernel = _delta_net(self._isa.name, by_channel=x.step.dim() == 3)
        columns = delta_strip.columns_of(self._isa)
        n_strips, cut = -(-n_value // columns), _Cut.of(n_token, state, 4)
        per_piece = self._per_piece(
            cut.n_sequence * n_head * n_strips, n_strips, cut.n_token * n_key * columns
        )
        self._binding(kernel, cut.n_token * state.numel())(
            self._address, *_rows(x.q), *_rows(x.k), *_rows(x.v), *_rows(x.step), *_rows(x.beta),
            x.step_bias.data_ptr(), x.rate.data_ptr(), _place(x.key_of), cut.n_sequence,
            cut.n_token, n_head, n_key, n_value, f32_bits(x.scale), f32_bits(x.eps),
            state.data_ptr(), cut.state_stride, per_piece, out.data_ptr(),
        )  # fmt: skip
        return out

    def selective_scan(
        self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor,
        state: Tensor,
    ) -> Tensor | None:  # fmt: skip
        """Compute `Ops.selective_scan`."""
        if not _are_rows(x, step, b, c, gate) or not _are_plain(a, d, state):
            return None
        places = 0, a.data_ptr(), d.data_ptr(), 0
        cut, n_head = _Cut.of(len(x), state, 3), 1
        return self._scan("selective_scan", (x, step, b, c, gate), places, cut, n_head, state)

    def state_space_scan(self, x: ScanInputs, state: Tensor) -> Tensor | None:
        """Compute `Ops.state_space_scan`."""
        rows = (x.values, x.step, x.b, x.c, x.gate)
        if not _are_rows(*rows) or not _are_plain(x.step_bias, x.rate, x.skip, state):
            return None
        if not _is_map(x.key_of):
            return None
        places = x.step_bias.data_ptr(), x.rate.data_ptr(), x.skip.data_ptr(), _place(x.key_of)
        cut, n_head = _Cut.of(len(x.step), state, 4), x.step.shape[1]
        return self._scan("state_space_scan", rows, places, cut, n_head, state)

    def _scan(
        self, name: str, rows: tuple[Tensor, ...], places: tuple[int, int, int, int], cut: _Cut,
        n_head: int, state: Tensor,
    ) -> Tensor:  # fmt: skip
        """Run a scan.

        Args:
            rows: values, steps, b, c and the gate.
            places: addresses of the steps' bias, of the rates, of d and of `key_of`.
        """
        x, step, b, c, gate = rows
        bias, a, d, key_of = places
        n_row, n_state = x[0].numel() // n_head, state.shape[-1]
        out = torch.empty(len(x), n_head * n_row)
        n_units = cut.n_sequence * n_head * -(-n_row // state_space.UNIT)
        per_piece = self._per_piece(n_units, 1, cut.n_token * n_state * state_space.UNIT)
        self._binding(_scans(self._isa.name)[name], cut.n_token * state.numel())(
            self._address, *_rows(x), *_rows(step), bias, a, *_rows(b), *_rows(c), d, *_rows(gate),
            key_of, cut.n_sequence, cut.n_token, n_head, n_row, n_state, state.data_ptr(),
            cut.state_stride, per_piece, out.data_ptr(),
        )  # fmt: skip
        return out

    def _per_piece(self, n_units: int, n_together: int, unit_size: int) -> int:
        """Return how many units make a piece.

        Args:
            n_together: number of units that are prepared together, and best computed so.
            unit_size: number of elements that a unit visits.
        """
        n = max(1, PIECE // max(unit_size, 1))
        if n_units // n_together >= PER_THREAD * self._team.n_threads:
            n = max(n, n_together)
        return n if n < n_together else n - n % n_together

    def _binding(self, kernel: BoundKernel, n_elements: int) -> Kernel:
        """Return the binding for a call that visits so many elements; wake the team if many."""
        if n_elements <= SHORT_CALL:
            return kernel.with_gil
        self._team.wake()
        return kernel.without_gil


class _Cut(NamedTuple):
    """The sequences to which the tokens of a call belong.

    Attributes:
        n_sequence: number of sequences.
        n_token: number of tokens of each.
        state_stride: bytes from one's state to the next one's.
    """

    n_sequence: int
    n_token: int
    state_stride: int

    @classmethod
    def of(cls, n_token: int, state: Tensor, n_dims: int) -> _Cut:
        """Return one sequence, or one for each token if the states have `n_dims` dimensions."""
        if state.dim() < n_dims:
            return cls(1, n_token, 0)
        assert len(state) == n_token, "each row has a state"
        return cls(n_token, 1, 4 * state.stride(0))


def _are_rows(*tensors: Tensor) -> bool:
    """Return whether all are F32 on the CPU and have each token's elements side by side."""
    return all(x.dtype is F32 and x.is_cpu and x.shape[0] and x[0].is_contiguous() for x in tensors)


def _are_plain(*tensors: Tensor | None) -> bool:
    return all(x is None or is_plain(x) for x in tensors)


def _is_map(key_of: Tensor | None) -> bool:
    return key_of is None or (key_of.dtype is torch.int64 and key_of.is_contiguous())


def _rows(x: Tensor) -> tuple[int, int]:
    """Return the address of the first token and the bytes from token to token."""
    return x.data_ptr(), 4 * x.stride(0)


def _place(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
