"""Tests of recurrent layers against their recurrences in F64, token by token, and transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from engine.model.forward.recurrent import (
    CHUNK_TOKENS,
    causal_conv,
    gated_delta_rule,
    selective_scan,
    state_space_scan,
)

DECAYS = ["none", "mild", "strong", "total", "channels apart", "forgetting"]


@dataclass
class Layer:
    """One layer with the inputs of a pass.

    Attributes:
        op: tested operation; takes the inputs, then the parameters, then the state.
        recurrence: function for one token in F64; returns the new state and the output.
        inputs: inputs of the pass, each (T, ...).
        parameters: parameters that do not depend on the token.
        state: state before the pass.
    """

    op: Callable[..., Tensor]
    recurrence: Callable[..., tuple[Tensor, Tensor]]
    inputs: list[Tensor]
    parameters: list[Tensor]
    state: Tensor

    def run(self, state: Tensor, piece: slice = slice(None)) -> Tensor:
        return self.op(*(t[piece] for t in self.inputs), *self.parameters, state)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the outputs and the last state, computed in F64."""
        state, outputs = self.state.double(), []
        parameters = [t.double() for t in self.parameters]
        for token in zip(*self.inputs, strict=True):
            state, y = self.recurrence(state, *(t.double() for t in token), *parameters)
            outputs.append(y)
        return torch.stack(outputs), state


def log_decays(name: str, shape: tuple[int, ...]) -> Tensor:
    if name == "none":
        return torch.zeros(shape)
    if name == "mild":
        return -torch.rand(shape)
    if name in ("strong", "total"):
        return torch.full(shape, -20.0 if name == "strong" else -1e30)
    if name == "channels apart":  # some keep everything while others forget at once
        return torch.where(torch.rand(shape[1:]) < 0.5, torch.full(shape, -20.0), 0.0)
    rare = torch.rand(shape) < 0.05
    return torch.where(rare, -5000.0, -0.01 * torch.rand(shape))


def delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    decay = log_decay.exp().reshape(len(k), -1, 1)
    state = decay * state
    seen = torch.einsum("hkv,hk->hv", state, k)
    state = state + torch.einsum("hk,hv->hkv", k, beta[:, None] * (v - seen))
    return state, torch.einsum("hkv,hk->hv", state, q)


def delta_layer(n_tokens: int, decay: str, sizes: tuple[int, int, int], per: str) -> Layer:
    n_head, d_k, d_v = sizes
    q, k = normalize(torch.randn(2, n_tokens, n_head, d_k), dim=-1)
    shape = (n_tokens, n_head, d_k) if per == "channel" else (n_tokens, n_head)
    v, beta = torch.randn(n_tokens, n_head, d_v), torch.rand(n_tokens, n_head)
    inputs = [q, k, v, log_decays(decay, shape), beta]
    return Layer(gated_delta_rule, delta_step, inputs, [], torch.randn(n_head, d_k, d_v))


def delta_per_head(n_tokens: int, decay: str, sizes: tuple[int, int, int]) -> Layer:
    return delta_layer(n_tokens, decay, sizes, "head")


def delta_per_channel(n_tokens: int, decay: str, sizes: tuple[int, int, int]) -> Layer:
    return delta_layer(n_tokens, decay, sizes, "channel")


def steps_and_rates(decay: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return steps Δ and a factor for the rates a, so that Δ a are the wanted decays."""
    if decay == "none":
        return torch.rand(shape), torch.zeros(())
    return -log_decays(decay, shape), -torch.ones(())


def selective_step(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    state = (dt[:, None] * a).exp() * state + (dt * x)[:, None] * b
    return state, state @ c + d * x


def selective_layer(n_tokens: int, decay: str, sizes: tuple[int, int, int]) -> Layer:
    channels, n_state, _ = sizes
    dt, rate = steps_and_rates(decay, (n_tokens, channels))
    x = torch.randn(n_tokens, channels) / dt.clamp(min=1)
    b, c = torch.randn(2, n_tokens, n_state)
    a, d = rate * (0.5 + torch.rand(channels, n_state)), torch.randn(channels)

    def op(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *rest: Tensor) -> Tensor:
        a, d, state = rest
        return selective_scan(x, dt, a, b, c, d, state)

    return Layer(op, selective_step, [x, dt, b, c], [a, d], torch.randn(channels, n_state))


def state_space_step(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    state = (dt * a).exp()[:, None, None] * state
    state = state + torch.einsum("hp,hn->hpn", dt[:, None] * x, b)
    return state, torch.einsum("hpn,hn->hp", state, c) + d[:, None] * x


def state_space_layer(n_tokens: int, decay: str, sizes: tuple[int, int, int]) -> Layer:
    n_head, head_dim, n_state = sizes
    dt, rate = steps_and_rates(decay, (n_tokens, n_head))
    x = torch.randn(n_tokens, n_head, head_dim) / dt.clamp(min=1)[..., None]
    b, c = torch.randn(2, n_tokens, n_head, n_state) / n_state**0.5
    a, d = rate * (0.5 + torch.rand(n_head)), torch.randn(n_head)

    def op(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *rest: Tensor) -> Tensor:
        a, d, state = rest
        return state_space_scan(x, dt, a, b, c, d, state)

    state = torch.randn(n_head, head_dim, n_state)
    return Layer(op, state_space_step, [x, dt, b, c], [a, d], state)


def conv_layer(n_tokens: int, decay: str, sizes: tuple[int, int, int]) -> Layer:
    n_filter, channels, _ = sizes

    def op(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Tensor:
        return causal_conv(x, state, weight, bias)

    def step(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat((state, x[:, None]), dim=1)
        return seen[:, 1:], (seen * weight).sum(1) + bias

    parameters = [torch.randn(channels, n_filter), torch.randn(channels)]
    inputs = [torch.randn(n_tokens, channels)]
    return Layer(op, step, inputs, parameters, torch.randn(channels, n_filter - 1))


LAYERS = [conv_layer, delta_per_head, delta_per_channel, selective_layer, state_space_layer]
every_layer = pytest.mark.parametrize("make", LAYERS)
many = settings(max_examples=100, deadline=None)
borders = [1, 2, 3, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS]
lengths = st.sampled_from(borders) | st.integers(1, 200)
dimensions = st.tuples(st.integers(1, 4), st.integers(1, 24), st.integers(1, 24))
seeds = st.integers(0, 1 << 32)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Assert that two tensors are equal up to `tolerance` of the largest value."""
    assert actual.shape == expected.shape
    if expected.numel():
        limit = tolerance * max(1.0, float(expected.abs().max()))
        assert float((actual - expected).abs().max()) <= limit  # false for NaN


@every_layer
@many
@given(lengths, st.sampled_from(DECAYS), dimensions, seeds)
def test_one_pass_is_the_recurrence(
    make: Callable[..., Layer], n: int, decay: str, sizes: tuple[int, int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    layer = make(n, decay, sizes)
    outputs, last_state = layer.expected()
    assert_near(layer.run(layer.state), outputs)
    assert_near(layer.state, last_state)


@every_layer
@many
@given(lengths, st.sampled_from(DECAYS), dimensions, seeds, st.sets(st.integers(1, 199)))
def test_pieces_of_a_pass_are_the_pass(
    make: Callable[..., Layer], n: int, decay: str, sizes: tuple[int, int, int], seed: int,
    cuts: set[int],
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    layer = make(n, decay, sizes)
    whole_state = layer.state.clone()
    whole = layer.run(whole_state)
    bounds = [0, *sorted(cut for cut in cuts if cut < n), n]
    pieces = [layer.run(layer.state, slice(*pair)) for pair in pairwise(bounds)]
    assert_near(torch.cat(pieces), whole)
    assert_near(layer.state, whole_state)


@every_layer
@pytest.mark.parametrize("n_tokens", [1, 5, 100])
def test_only_the_state_is_written(make: Callable[..., Layer], n_tokens: int) -> None:
    torch.manual_seed(0)
    layer = make(n_tokens, "mild", (4, 6, 8))
    inputs = [t.clone() for t in layer.inputs + layer.parameters]
    around = torch.full((layer.state.shape[0], 3, *layer.state.shape[1:]), 7.0)
    around[:, 1] = layer.state
    given_state = around[:, 1]  # not contiguous, as a cache that holds more than this layer
    output = layer.run(given_state)
    assert torch.equal(output, layer.run(layer.state))
    assert torch.equal(given_state, layer.state)
    assert bool((around[:, ::2] == 7).all())
    assert all(map(torch.equal, inputs, layer.inputs + layer.parameters))


def test_convolution_gives_the_same_bits_in_pieces_and_needs_no_bias() -> None:
    torch.manual_seed(0)
    x, weight, state = torch.randn(50, 6), torch.randn(6, 4), torch.randn(6, 3)
    expected = torch.nn.functional.conv1d(
        torch.cat((state, x.T), 1)[None], weight[:, None], groups=6
    )[0].T
    other = state.clone()
    whole = causal_conv(x, state, weight)
    assert_near(whole, expected)
    assert torch.equal(torch.cat([causal_conv(row[None], other, weight) for row in x]), whole)
    assert torch.equal(state, x[-3:].T)


@pytest.mark.parametrize("make", [delta_per_head, delta_per_channel])
def test_delta_rule_replaces_what_a_key_held(make: Callable[..., Layer]) -> None:
    torch.manual_seed(0)
    layer = make(100, "none", (1, 100, 5))
    q, k, v, _, beta = layer.inputs
    k[:, 0] = torch.eye(100)[torch.randperm(100)]
    q.copy_(k)
    beta.fill_(1)
    assert_near(layer.run(layer.state), v)


@pytest.mark.parametrize("make", [delta_per_head, delta_per_channel])
def test_delta_rule_with_keys_alike_and_reflections(make: Callable[..., Layer]) -> None:
    torch.manual_seed(0)
    layer = make(2 * CHUNK_TOKENS, "none", (2, 32, 32))
    _, k, _, _, beta = layer.inputs
    k.copy_(normalize(k[:1] + 0.1 * k, dim=-1))
    beta.mul_(2)  # above 1 the old value is not only removed but negated
    outputs, last_state = layer.expected()
    assert_near(layer.run(layer.state), outputs, 3e-5)
    assert_near(layer.state, last_state, 3e-5)


def transformers_function(model: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of transformers' implementation in torch; skip the test without it."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    if not hasattr(module, name):
        pytest.skip(f"this version of transformers has no {name}")
    return getattr(module, name)


@pytest.mark.parametrize(
    ("make", "model", "name"),
    [
        (delta_per_head, "qwen3_next", "torch_chunk_gated_delta_rule"),
        (delta_per_head, "qwen3_next", "torch_recurrent_gated_delta_rule"),
        (delta_per_channel, "kimi_linear", "chunk_kimi_delta_attention"),
        (delta_per_channel, "kimi_linear", "recurrent_kimi_delta_attention"),
    ],
)
@pytest.mark.parametrize("n_tokens", [1, 150])
def test_delta_rule_is_that_of_transformers(
    make: Callable[..., Layer], model: str, name: str, n_tokens: int
) -> None:
    function = transformers_function(model, name)
    torch.manual_seed(0)
    layer = make(n_tokens, "mild", (3, 16, 24))
    outputs, last_state = function(
        *(t[None] for t in layer.inputs),
        initial_state=layer.state[None].clone(),
        output_final_state=True,
    )
    layer.inputs[0] /= 16**0.5  # transformers scales q itself
    assert_near(layer.run(layer.state), outputs[0])
    assert_near(layer.state, last_state[0])


def test_state_space_scan_is_that_of_transformers() -> None:
    function = transformers_function("mamba2", "mamba2_chunk_scan")
    torch.manual_seed(0)
    layer = state_space_layer(150, "mild", (4, 16, 24))
    x, dt, b, c = (t[None] for t in layer.inputs)
    a, d = layer.parameters
    outputs, last_state = function(
        x, dt, a, b, c, 32, D=d, initial_states=layer.state[None], return_final_states=True
    )
    assert_near(layer.run(layer.state), outputs[0])
    assert_near(layer.state, last_state[0])


def test_selective_scan_is_that_of_transformers() -> None:
    function = transformers_function("mamba", "mamba_selective_scan")
    torch.manual_seed(0)
    layer = selective_layer(150, "mild", (24, 16, 0))
    layer.state.zero_()  # transformers starts without a state
    x, dt, b, c = (t.T[None] for t in layer.inputs)
    a, d = layer.parameters
    outputs, last_state = function(x, dt, a, b, c, D=d, return_last_state=True)
    assert_near(layer.run(layer.state), outputs[0].T)
    assert_near(layer.state, last_state[0])
