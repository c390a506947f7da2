"""Kernels of recurrent layers: close to the F64 reference, the same bits in any split."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import supported
from engine.backends.cpu.kernels.recurrent import delta_net
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.ops import CpuOps
from engine.backends.cpu.recorder import Recorder
from engine.backends.cpu.recurrent import RecurrentOps
from engine.model.forward.batch import Batch, Piece
from engine.model.forward.operands import RELU2, SILU, DeltaInputs, PlacedStates, ScanInputs
from engine.model.forward.ops import Ops
from tests.helpers.tiers import paired

EXACT = Ops()
TEAMS: list[ThreadPool] = []
"""Pools of one and of three threads, for the tests of this file."""


@pytest.fixture(autouse=True, scope="module")
def pools() -> Iterator[None]:
    TEAMS.extend((ThreadPool(1), ThreadPool(3)))
    yield
    for pool in TEAMS:
        pool.close()
    TEAMS.clear()


@dataclass
class Layer:
    """A recurrent operation with the inputs of a pass.

    Attributes:
        compute: operation on some of the tokens; takes its implementation, their inputs and the
            states.
        inputs: inputs with a row for each token.
        state: state before the pass.
    """

    compute: Callable[[Any, list[Tensor], PlacedStates], Tensor]
    inputs: list[Tensor]
    state: Tensor

    def run(self, ops: Any, inputs: list[Tensor], state: Tensor) -> Tensor:
        """Compute some tokens of one sequence."""
        placed = PlacedStates(state[None], Batch.of_one(0, len(inputs[0]), 0))
        return self.compute(ops, inputs, placed)

    def whole(self, ops: Any) -> tuple[Tensor, Tensor]:
        """Return the outputs of all tokens, and the state after them."""
        state = self.state.clone()
        return self.run(ops, self.inputs, state), state

    def cut(self, ops: Any, *bounds: int) -> tuple[Tensor, Tensor]:
        """Return outputs and state of a pass that is split at some tokens."""
        state = self.state.clone()
        parts = [
            self.run(ops, [x[a:b] for x in self.inputs], state)
            for a, b in pairwise([0, *bounds, len(self.inputs[0])])
        ]
        return torch.cat(parts), state

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return outputs and state of the reference in F64, token by token."""
        exact, state = [x.double() for x in self.inputs], self.state.double()
        tokens = range(len(exact[0]))
        outputs = [self.run(EXACT, [x[n : n + 1] for x in exact], state) for n in tokens]
        return torch.cat(outputs).float(), state.float()


def like(x: Tensor | None, inputs: list[Tensor]) -> Any:
    """Return a parameter in the type of the inputs."""
    return None if x is None else x.to(inputs[0].dtype)


def columns(n_token: int, *widths: int) -> list[Tensor]:
    """Return inputs side by side in one matrix, between unused columns."""
    return list(torch.randn(n_token, sum(widths) + 5)[:, 2:-3].split(list(widths), 1))


def steps(shape: tuple[int, ...]) -> Tensor:
    """Return steps before the softplus, from total decay to none."""
    kind = torch.randint(0, 8, shape)
    return torch.where(kind == 0, 3e4, torch.where(kind == 1, -200.0, torch.randn(shape)))


def delta_layer(n_token: int, sizes: tuple[int, int, int], *, by_channel: bool = False) -> Layer:
    n_group, n_key, n_value = sizes
    n_head = 2 * n_group
    key_of = torch.arange(n_head) % n_group
    q, k, v = columns(n_token, n_group * n_key, n_group * n_key, n_head * n_value)
    shape = (n_head, n_key) if by_channel else (n_head,)
    bias, rate = torch.randn(shape), -torch.rand(n_head)
    beta = columns(n_token, n_head)[0] * 3

    def run(ops: Any, inputs: list[Tensor], state: PlacedStates) -> Tensor:
        q, k, v, step, beta = inputs
        heads = (x.unflatten(1, (-1, n)) for x, n in ((q, n_key), (k, n_key), (v, n_value)))
        return ops.delta_net(
            DeltaInputs(*heads, step, like(bias, inputs), like(rate, inputs), beta, key_of, 1e-6),
            state,
        )

    inputs = [q, k, v, steps((n_token, *shape)), beta]
    return Layer(run, inputs, torch.randn(n_head, n_key, n_value))


def delta_by_channel(n_token: int, sizes: tuple[int, int, int]) -> Layer:
    return delta_layer(n_token, sizes, by_channel=True)


def selective_layer(n_token: int, sizes: tuple[int, int, int]) -> Layer:
    _, n_channel, n_state = sizes
    x, gate, b, c = columns(n_token, n_channel, n_channel, n_state, n_state)
    a, d = -torch.rand(n_channel, n_state), torch.randn(n_channel)
    step = steps((n_token, n_channel))

    def run(ops: Any, inputs: list[Tensor], state: PlacedStates) -> Tensor:
        x, step, b, c, gate = inputs
        return ops.selective_scan(
            x, step, like(a, inputs), b, c, like(d, inputs), gate, state
        )  # fmt: skip

    inputs = [x / (1 + step.abs()), step, b, c, gate]
    return Layer(run, inputs, torch.randn(n_channel, n_state))


def state_space_layer(n_token: int, sizes: tuple[int, int, int]) -> Layer:
    n_group, n_row, n_state = sizes
    n_head = 2 * n_group
    bias, rate, skip = torch.randn(n_head), -torch.rand(n_head), torch.randn(n_head)
    key_of = torch.arange(n_head) // 2
    x, gate, b, c = columns(n_token, *[n_head * n_row] * 2, *[n_group * n_state] * 2)
    step = steps((n_token, n_head))

    def run(ops: Any, inputs: list[Tensor], state: PlacedStates) -> Tensor:
        x, step, b, c, gate = inputs
        values, b, c = (
            t.unflatten(1, (-1, n)) for t, n in ((x, n_row), (b, n_state), (c, n_state))
        )  # fmt: skip
        vectors = (like(t, inputs) for t in (bias, rate))
        found = ScanInputs(values, step, *vectors, b, c, like(skip, inputs), gate, key_of)
        return ops.state_space_scan(found, state)

    factor = (1 + step.abs()).repeat_interleave(n_row, 1)
    return Layer(run, [x / factor, step, b, c, gate], torch.randn(n_head, n_row, n_state))


def conv_layer(n_token: int, sizes: tuple[int, int, int], act: Any = SILU) -> Layer:
    n_tap, n_channel, n_gate = 2 + sizes[0] % 3, sizes[1] * sizes[2], sizes[0] % 2
    weight, bias = torch.randn(n_channel, n_tap), torch.randn(n_channel)

    def run(ops: Any, inputs: list[Tensor], state: PlacedStates) -> Tensor:
        x, *gates = inputs
        pair = (gates[0], gates[1]) if gates else None
        shift = None if gates else like(bias, inputs)
        return ops.causal_conv(x, state, like(weight, inputs), shift, act, pair)

    inputs = columns(n_token, *[n_channel] * (1 + 2 * n_gate))
    return Layer(run, inputs, torch.randn(n_channel, n_tap - 1))


def conv_without_activation(n_token: int, sizes: tuple[int, int, int]) -> Layer:
    return conv_layer(n_token, sizes, None)


LAYERS = [
    conv_layer, conv_without_activation, delta_layer, delta_by_channel, selective_layer,
    state_space_layer,
]  # fmt: skip
every_layer = pytest.mark.parametrize("make", LAYERS)
every_isa = pytest.mark.parametrize("isa", supported(), ids=lambda isa: isa.name)
Make = Callable[[int, tuple[int, int, int]], Layer]

SIZES = [(1, 1, 1), (1, 16, 16), (2, 24, 24), (3, 5, 33), (1, 128, 64), (2, 33, 100)]
isas_and_sizes = pytest.mark.parametrize(
    ("isa", "sizes"), paired(supported(), SIZES), ids=lambda x: getattr(x, "name", str(x))
)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    limit = 1e-5 * max(1.0, float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= limit  # false for NaN


@every_layer
@isas_and_sizes
def test_results_match_the_recurrence(make: Make, isa: Any, sizes: Any) -> None:
    torch.manual_seed(1)
    for n_token in (1, 2, 37):
        layer = make(n_token, sizes)
        for found, expected in zip(
            layer.whole(RecurrentOps(TEAMS[1], isa)), layer.expected(), strict=True
        ):
            assert_near(found, expected)


@every_layer
@isas_and_sizes
def test_bits_do_not_depend_on_splits_and_threads(make: Make, isa: Any, sizes: Any) -> None:
    torch.manual_seed(2)
    layer = make(70, sizes)
    one, three = (RecurrentOps(pool, isa) for pool in TEAMS)
    y, state = layer.whole(one)
    for other in (
        layer.whole(three), layer.cut(three, *range(1, 70)), layer.cut(one, 16, 17, 33, 64),
    ):  # fmt: skip
        assert torch.equal(other[0], y)
        assert torch.equal(other[1], state)


@every_layer
@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 80), st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
    st.sets(st.integers(1, 79)), st.integers(0, 1 << 32),
)  # fmt: skip
def test_any_sizes_in_any_pieces(
    make: Make, n_token: int, sizes: tuple[int, int, int], cuts: set[int], seed: int
) -> None:
    torch.manual_seed(seed)
    layer, ops = make(n_token, sizes), CpuOps(TEAMS[1])
    y, state = layer.whole(ops)
    expected = layer.expected()
    assert_near(y, expected[0])
    assert_near(state, expected[1])
    again = layer.cut(ops, *sorted(cut for cut in cuts if cut < n_token))
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], state)


@every_layer
@isas_and_sizes
def test_a_token_of_each_sequence_has_the_bits_it_has_alone(
    make: Make, isa: Any, sizes: Any
) -> None:
    torch.manual_seed(7)
    layer = make(5, sizes)
    states = torch.randn(7, *layer.state.shape)
    before, ops = states.clone(), RecurrentOps(TEAMS[1], isa)
    batch = Batch(tuple(Piece(3, 1, (), slot) for slot in range(5)), 0)
    y = layer.compute(ops, layer.inputs, PlacedStates(states[1:6], batch))
    for n in range(5):
        alone, state = [x[n : n + 1] for x in layer.inputs], before[1 + n].clone()
        assert torch.equal(layer.run(ops, alone, state), y[n : n + 1])
        assert torch.equal(state, states[1 + n])
    assert torch.equal(states[::6], before[::6])
    placed = PlacedStates(before.double()[1:6], batch)
    assert_near(y, layer.compute(EXACT, [x.double() for x in layer.inputs], placed).float())


def chained(*chains: Sequence[int]) -> Batch:
    """Return the single tokens of chains, given the slots that their rows read and write."""
    return Batch(
        tuple(
            Piece(3 + row, 1, (), slot, source=source if row else None)
            for source, *goals in chains
            for row, (source, slot) in enumerate(pairwise([source, source, *goals]))
        ),
        0,
    )


@every_layer
@isas_and_sizes
def test_each_draft_token_stores_its_state_in_a_separate_slot(
    make: Make, isa: Any, sizes: Any
) -> None:
    """Chains of four, three and one rows: the next token of a sequence and its draft tokens."""
    torch.manual_seed(8)
    layer = make(8, sizes)
    states = torch.randn(9, *layer.state.shape)
    before = states.clone()
    chains = [(4, 1, 8, 2), (6, 0, 3), (7,)]
    ops = RecurrentOps(TEAMS[1], isa)
    y = layer.compute(ops, layer.inputs, PlacedStates(states, chained(*chains)))
    row = 0
    for chain in chains:
        state = before[chain[0]].clone()
        for place in chain:
            alone = layer.run(ops, [x[row : row + 1] for x in layer.inputs], state)
            assert torch.equal(alone, y[row : row + 1])
            assert torch.equal(state, states[place])
            row += 1
    assert torch.equal(states[5], before[5])
    exact = before.double()
    found = layer.compute(
        EXACT, [x.double() for x in layer.inputs], PlacedStates(exact, chained(*chains))
    )
    assert_near(y, found.float())
    assert_near(states, exact.float())


@every_layer
@every_isa
def test_only_the_state_is_written(make: Make, isa: Any) -> None:
    torch.manual_seed(3)
    layer, ops = make(20, (3, 7, 21)), RecurrentOps(TEAMS[0], isa)
    around = torch.full((3, *layer.state.shape), 7.0)
    around[1] = layer.state
    inputs = [x.clone() for x in layer.inputs]
    y = layer.run(ops, layer.inputs, around[1])
    expected, state = layer.whole(ops)
    assert torch.equal(y, expected)
    assert torch.equal(around[1], state)
    assert bool((around[::2] == 7).all())
    assert all(map(torch.equal, inputs, layer.inputs))


@every_layer
def test_large_layers_are_split_among_threads(make: Make) -> None:
    """Many pieces, of whole heads and of parts."""
    torch.manual_seed(4)
    for sizes in ((1, 128, 160), (8, 128, 128)):
        layer = make(24, sizes)
        one, three = (layer.whole(RecurrentOps(pool)) for pool in TEAMS)
        assert all(map(torch.equal, one, three))


@every_layer
def test_a_recorded_token_is_replayed_with_other_data(make: Make) -> None:
    torch.manual_seed(5)
    layer, ops = make(6, (2, 24, 40)), CpuOps(TEAMS[1])
    token, state = [x[:1].clone() for x in layer.inputs], layer.state.clone()
    layer.run(ops, token, state)  # as a model's first token
    recorder = Recorder(TEAMS[1], ())

    def compute() -> Tensor | None:
        y = layer.run(ops, token, state)
        return recorder.run_live(lambda: y)

    found = [recorder.record(compute)]
    recording = recorder.recording(0, ())
    assert recording is not None, recorder.refusal
    assert recorder.log.n_used > 0
    for n in range(2, 6):
        for now, every in zip(token, layer.inputs, strict=True):
            now.copy_(every[n : n + 1])
        found.append(recording.run())
    layer.inputs = [torch.cat((x[:1], x[:1], x[2:])) for x in layer.inputs]
    y, last = layer.whole(ops)
    assert torch.equal(torch.cat([one for one in found if one is not None]), y[1:])
    assert torch.equal(state, last)


def test_unsupported_tensors_use_the_reference() -> None:
    torch.manual_seed(6)
    kernels, ops = RecurrentOps(TEAMS[0]), CpuOps(TEAMS[0])
    cases = [(make(5, (2, 3, 4)), torch.float64) for make in LAYERS]
    cases.append((conv_layer(5, (2, 3, 4), RELU2), torch.float32))
    cases.append((delta_layer(5, (1, delta_net.MAX_KEY + 1, 2)), torch.float32))
    for layer, dtype in cases:
        layer.inputs = [x.to(dtype) for x in layer.inputs]
        layer.state = layer.state.to(dtype)
        assert layer.whole(kernels)[0] is None
        y, state = layer.whole(ops)
        assert y.dtype is dtype
        expected = layer.whole(EXACT)
        assert torch.equal(y, expected[0])
        assert torch.equal(state, expected[1])
