"""Recurrent layers by kernels against the reference, tokens together and in pieces."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.gpu import recurrent
from engine.backends.gpu.ops import GpuOps
from engine.model.forward.batch import Batch, Piece
from engine.model.forward.operands import SILU, DeltaInputs, PlacedStates, ScanInputs
from engine.model.forward.ops import Ops
from engine.model.forward.recurrent import Chunks

EXACT = Ops()

Step = Callable[[slice, Tensor], Tensor | None]
"""A layer's results for some of the tokens, from a state that it updates."""


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


def check(step: Step, expected: Step, state: Tensor, n_token: int) -> None:
    """Check a layer against the reference: in one pass, and with the last token alone."""
    wanted, kept = expected(slice(None), want := state.clone()), state.clone()
    got = step(slice(None), state)
    assert got is not None
    assert wanted is not None
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, want, rtol=1e-5, atol=1e-5)
    pieces = [slice(0, n_token - 1), slice(n_token - 1, n_token)][n_token == 1 :]
    parts = [step(piece, kept) for piece in pieces]
    assert torch.equal(torch.cat([part for part in parts if part is not None]), got)
    assert torch.equal(kept, state)


@pytest.mark.parametrize("n_token", [1, 2, 5, 20])
@pytest.mark.parametrize(("n_channel", "n_tap", "act"), [(5, 2, None), (300, 4, SILU)])
def test_causal_conv(n_token: int, n_channel: int, n_tap: int, act: Any, device: str) -> None:
    before, x, after = randn(n_token, 3 * n_channel).to(device).chunk(3, dim=1)
    weight, bias = randn(n_channel, n_tap).to(device), randn(n_channel).to(device)

    def made(ops: Any, b: Tensor | None, is_gated: bool, piece: slice, state: Tensor) -> Any:
        gates = (before[piece], after[piece]) if is_gated else None
        return ops.causal_conv(x[piece], state, weight, b, act, gates)

    for b, is_gated in ((bias, False), (None, True)):
        check(
            partial(made, recurrent, b, is_gated),
            partial(made, EXACT, b, is_gated),
            randn(n_channel, n_tap - 1).to(device),
            n_token,
        )


def delta_inputs(
    n_token: int, n_head: int, dim: int, device: str, *, per_channel: bool, is_shared: bool
) -> DeltaInputs:
    n_key = 2 if is_shared else n_head
    mixed = randn(n_token, (2 * n_key + n_head) * dim).to(device)
    q, k, v = (
        part.reshape(n_token, -1, dim)
        for part in mixed.split([n_key * dim, n_key * dim, n_head * dim], 1)
    )
    shape = (n_head, dim) if per_channel else (n_head,)
    step, bias = randn(n_token, *shape).to(device), randn(*shape).to(device)
    step[..., 0] = 300.0  # forgets everything
    rate, beta = -torch.rand(n_head).to(device), 3 * randn(n_token, 2 * n_head).to(device)
    key_of = torch.arange(n_head, device=device) % 2 if is_shared else None
    return DeltaInputs(q, k, v, step, bias, rate, beta[:, n_head:], key_of, 1e-6)


def delta_piece(x: DeltaInputs, piece: slice) -> DeltaInputs:
    rows = {name: getattr(x, name)[piece] for name in ("q", "k", "v", "step", "beta")}
    return x._replace(**rows)


@pytest.mark.parametrize("n_token", [1, 3])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("dim", "is_shared"), [(16, True), (20, False), (128, True)])
def test_delta_net(n_token: int, dim: int, is_shared: bool, per_channel: bool, device: str) -> None:
    n_head = 2 if dim == 128 else 4
    x = delta_inputs(n_token, n_head, dim, device, per_channel=per_channel, is_shared=is_shared)
    state = randn(n_head, dim, dim).to(device)
    check(
        lambda piece, state: recurrent.delta_net(delta_piece(x, piece), state),
        lambda piece, state: EXACT.delta_net(delta_piece(x, piece), state),
        state,
        n_token,
    )


@pytest.mark.parametrize("n_token", [1, 4])
@pytest.mark.parametrize(("n_channel", "n_state"), [(70, 16), (5, 3)])
def test_selective_scan(n_token: int, n_channel: int, n_state: int, device: str) -> None:
    x, step, gate = (randn(n_token, n_channel).to(device) for _ in range(3))
    mixed = randn(n_token, 7 + 2 * n_state).to(device)
    b, c = mixed[:, 7 : 7 + n_state], mixed[:, 7 + n_state :]
    a, d = -torch.rand(n_channel, n_state).to(device), randn(n_channel).to(device)
    state = randn(n_channel, n_state).to(device)
    check(
        lambda p, state: recurrent.selective_scan(x[p], step[p], a, b[p], c[p], d, gate[p], state),
        lambda p, state: EXACT.selective_scan(x[p], step[p], a, b[p], c[p], d, gate[p], state),
        state,
        n_token,
    )


@pytest.mark.parametrize("n_token", [1, 4])
@pytest.mark.parametrize(("n_row", "n_state", "is_shared"), [(24, 128, True), (5, 12, False)])
def test_state_space_scan(
    n_token: int, n_row: int, n_state: int, is_shared: bool, device: str
) -> None:
    n_head, n_group = 4, 2 if is_shared else 4
    sizes = [n_head * n_row, n_group * n_state, n_group * n_state]
    values, b, c = randn(n_token, sum(sizes)).to(device).split(sizes, 1)
    step, bias, skip = (randn(*s).to(device) for s in ((n_token, n_head), (n_head,), (n_head,)))
    key_of = torch.tensor([0, 0, 1, 1], device=device) if is_shared else None
    rate = -torch.rand(n_head).to(device)
    gate = randn(n_token, n_head * n_row + 4).to(device)[:, 4:]
    heads = [part.reshape(n_token, -1, n) for part, n in ((values, n_row), (b, n_state))]
    x = ScanInputs(
        heads[0], step, bias, rate, heads[1], c.reshape(n_token, -1, n_state), skip, gate, key_of
    )

    def cut(piece: slice) -> ScanInputs:
        return x._replace(
            **{name: getattr(x, name)[piece] for name in ("values", "step", "b", "c", "gate")}
        )

    check(
        lambda piece, state: recurrent.state_space_scan(cut(piece), state),
        lambda piece, state: EXACT.state_space_scan(cut(piece), state),
        randn(n_head, n_row, n_state).to(device),
        n_token,
    )


PIECES = tuple(
    Piece(9, 1, state_slot=slot, source=source)
    for source, slot in ((3, 3), (3, 0), (0, 4), (2, 2), (1, 5), (5, 6))
)
"""Rows of a pass: the next token of a sequence and two draft tokens after it; one that is alone;
and one that leaves its state in another slot, with a draft token."""


@pytest.mark.parametrize("has_kernels", [True, False])
def test_rows_of_several_sequences_find_their_states(
    has_kernels: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch computes them, which must not read back from the device."""
    n, ops, batch = len(PIECES), GpuOps(torch.device(device)), Batch(PIECES, 0)
    x, step, gate = (randn(n, 8).to(device) for _ in range(3))
    b, c, matrix = randn(n, 4).to(device), randn(n, 4).to(device), -torch.rand(8, 4).to(device)
    vector = torch.rand(8).to(device)
    delta = delta_inputs(n, 2, 16, device, per_channel=False, is_shared=False)
    heads = [t.view(n, 2, 4) for t in (x, step, gate)]
    scan = ScanInputs(
        heads[0], step[:, :2].contiguous(), vector[:2], -vector[:2], heads[1], heads[2],
        vector[:2], gate, None,
    )  # fmt: skip
    weight = randn(8, 4).to(device)
    ops.begin(batch, torch.arange(n, device=device))
    for name, arguments, shape in (
        ("causal_conv", (x, ..., weight, vector, SILU, (step, gate)), (8, 3)),
        ("causal_conv", (x, ..., weight, None), (8, 3)),
        ("delta_net", (delta, ...), (2, 16, 16)),
        ("selective_scan", (x, step, matrix, b, c, vector, gate, ...), (8, 4)),
        ("state_space_scan", (scan, ...), (2, 4, 4)),
    ):
        states = randn(8, *shape).to(device)
        if not has_kernels:
            monkeypatch.setattr(recurrent, name, lambda *args: None)
            monkeypatch.setattr(Tensor, "__index__", None)
        results = []
        for one in (ops, EXACT):
            held = states.clone()
            placed = PlacedStates(held, batch)
            given = (placed if argument is ... else argument for argument in arguments)
            results.append((getattr(one, name)(*given), held))
        monkeypatch.undo()
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
        changed = [slot for slot in range(8) if not torch.equal(results[0][1][slot], states[slot])]
        assert changed == [0, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("n", [1, 3, 4, 6], ids=lambda n: f"{n} rows")
def test_rows_of_padding_repeat_the_last_one(
    has_kernels: bool, n: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have its bits, and do not change any state: in place, or elsewhere."""
    n_rows, ops = n + 2, GpuOps(torch.device(device))
    x, step, gate, b, c = (randn(n_rows, 8).to(device) for _ in range(5))
    matrix, weight = -torch.rand(8, 8).to(device), randn(8, 4).to(device)
    vector = torch.rand(8).to(device)
    delta = delta_inputs(n_rows, 2, 16, device, per_channel=False, is_shared=False)
    for t in (x, step, gate, b, c, *delta[:4], delta.beta):
        if t.shape[0] == n_rows:
            t[n:] = t[n - 1]
    heads = [t.view(n_rows, 2, 4) for t in (x, step, gate, b, c)]
    scan = ScanInputs(
        heads[0], step[:, :2].contiguous(), vector[:2], -vector[:2], heads[3], heads[4],
        vector[:2], gate, None,
    )  # fmt: skip
    pieces = PIECES[:n]
    padded, plain = Batch(pieces + pieces[-1:] * 2, 0), Batch(pieces, 0)
    for name, compute, shape in (
        ("causal_conv", lambda o, s, r: o.causal_conv(x[r], s, weight, vector), (8, 3)),
        ("delta_net", lambda o, s, r: o.delta_net(delta.rows(r), s), (2, 16, 16)),
        ("selective_scan", lambda o, s, r: o.selective_scan(
            x[r], step[r], matrix, b[r], c[r], vector, gate[r], s), (8, 8)),
        ("state_space_scan", lambda o, s, r: o.state_space_scan(scan.rows(r), s), (2, 4, 4)),
    ):  # fmt: skip
        if not has_kernels:
            monkeypatch.setattr(recurrent, name, lambda *args: None)
        states, results = randn(8, *shape).to(device), []
        for one, batch in ((ops, padded), (ops, plain), (EXACT, padded)):
            held = states.clone()
            ops.begin(batch, torch.arange(batch.n_rows, device=device))
            y = compute(one, PlacedStates(held, batch), slice(0, batch.n_rows))
            results.append((y, held))
        monkeypatch.undo()
        (found, held), (expected, expected_held), exact = results
        assert torch.equal(held, expected_held)
        assert torch.equal(found[:n], expected)
        assert torch.equal(found[n:], expected[-1:].expand(2, *expected.shape[1:]))
        torch.testing.assert_close((found, held), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_tap", [2, 3, 4])
def test_a_guess_has_the_bits_of_a_token(n_tap: int, device: str) -> None:
    """A chain leaves the same states as its rows one by one, each in its slot."""
    ops, x = GpuOps(torch.device(device)), randn(3, 300).to(device)
    weight, bias = randn(300, n_tap).to(device), randn(300).to(device)
    delta = delta_inputs(3, 2, 20, device, per_channel=True, is_shared=True)
    together, alone = Batch(PIECES[:3], 0), [Batch((piece,), 0) for piece in PIECES[:3]]
    inputs, matrices = randn(6, 300, n_tap - 1).to(device), randn(6, 2, 20, 20).to(device)
    kept = inputs.clone(), matrices.clone()
    ops.begin(together, torch.arange(3, device=device))
    wanted = (
        ops.causal_conv(x, PlacedStates(inputs, together), weight, bias),
        ops.delta_net(delta, PlacedStates(matrices, together)),
    )
    for row, batch in enumerate(alone):
        ops.begin(batch, torch.arange(1, device=device))
        rows = slice(row, row + 1)
        y = ops.causal_conv(x[rows], PlacedStates(kept[0], batch), weight, bias)
        z = ops.delta_net(delta.rows(rows), PlacedStates(kept[1], batch))
        assert torch.equal(y, wanted[0][rows])
        assert torch.equal(z, wanted[1][rows])
    assert torch.equal(inputs, kept[0])
    assert torch.equal(matrices, kept[1])


class ChunkOps(Ops):
    """The reference with chunks computed by the kernel, which must support them."""

    def scan_chunks(self, chunks: Chunks, state: Tensor) -> Tensor:
        y = recurrent.scan_chunks(chunks, state)
        assert y is not None
        return y


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("n_token", "dim"), [(70, 16), (130, 40)])
def test_chunks_of_a_delta_net(n_token: int, dim: int, per_channel: bool, device: str) -> None:
    x = delta_inputs(n_token, 2, dim, device, per_channel=per_channel, is_shared=True)
    state, expected = (torch.ones(2, dim, dim, device=device) for _ in range(2))
    y = ChunkOps().delta_net(x, state)
    torch.testing.assert_close(y, EXACT.delta_net(x, expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


def test_chunks_of_a_state_space(device: str) -> None:
    n_token, n_head, n_row, n_state = 70, 2, 20, 24
    values, step = randn(n_token, n_head, n_row).to(device), randn(n_token, n_head).to(device)
    b, c = (randn(n_token, n_head, n_state).to(device) for _ in range(2))
    bias, skip, rate = (torch.rand(n_head).to(device) for _ in range(3))
    gate = randn(n_token, n_head * n_row).to(device)
    x = ScanInputs(values, step, bias, -rate, b, c, skip, gate, None)
    state, expected = (torch.ones(n_head, n_row, n_state, device=device) for _ in range(2))
    y = ChunkOps().state_space_scan(x, state)
    torch.testing.assert_close(y, EXACT.state_space_scan(x, expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


def test_many_tokens_are_left_to_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "FEW_TOKENS", 2)
    x = delta_inputs(3, 2, 16, "cpu", per_channel=False, is_shared=False)
    assert recurrent.delta_net(x, randn(2, 16, 16)) is None
    assert recurrent.causal_conv(randn(2, 4), randn(4, 0), randn(4, 1), None, None) is None


@pytest.mark.parametrize("n_token", [1, 130])
def test_without_memory(n_token: int) -> None:
    """Kernels, and matrix products for many tokens, need only the shapes."""
    meta = torch.device("meta")

    def on_meta(x: Any) -> Any:
        return x.to(meta) if isinstance(x, Tensor) else x

    x = delta_inputs(n_token, 4, 16, "cpu", per_channel=True, is_shared=True)
    x = DeltaInputs(*map(on_meta, x))
    state = torch.empty(4, 16, 16, device=meta)
    exact = EXACT if n_token == 1 else ChunkOps()
    few, many = recurrent.delta_net(x, state), exact.delta_net(x, state)
    assert many.shape == x.v.shape
    assert n_token > 1 or (few is not None and few.shape == x.v.shape)
    channels = torch.empty(n_token, 8, device=meta)
    conv = recurrent.causal_conv(
        channels, torch.empty(8, 3, device=meta), torch.empty(8, 4, device=meta), None, SILU
    )
    vector, matrix, states = (torch.empty(*s, device=meta) for s in ((8,), (8, 4), (n_token, 4)))
    scan = recurrent.selective_scan(
        channels, channels, matrix, states, states, vector, channels, matrix
    )  # fmt: skip
    assert conv is not None
    assert scan is not None
    heads = torch.empty(n_token, 8, 4, device=meta)
    y = exact.state_space_scan(
        ScanInputs(heads, channels, vector, vector, heads, heads, vector, heads.flatten(1), None),
        torch.empty(8, 4, 4, device=meta),
    )
    assert conv.shape == scan.shape == channels.shape
    assert y.shape == (n_token, 32)
