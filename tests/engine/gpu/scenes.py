"""What kernels are started with in real models: `engine.gpu` on tensors without memory.

Sizes are those of models of 3 to 30 billion weights, so that variants are those people will have.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from engine.cache import LayerCache
from engine.config import KV_TYPES
from engine.gpu import attention, few, many, routing, rows, steps
from engine.gpu.launch import Start, watched
from engine.gpu.sampling import DeviceSampler
from engine.gpu.target import Target, aimed
from engine.gpu.weights import GpuPlanes
from engine.kernels.extent import Extent, n_tiles
from engine.kernels.layout import LAYOUTS
from engine.layers.addend import Addend
from engine.layers.attention import Scores
from engine.layers.ffn import Activation
from engine.layers.moe import Routing
from engine.layers.state import KVState
from engine.parallel.ranges import Ranges

META = torch.device("meta")

N_COLUMNS, N_ROWS, N_CTX, N_VOCAB = 4096, 4096, 8192, 128256

Q4_K = 12

ROW_COUNTS = (1, 2, 4, 8)
"""Of the products of few rows."""

HEADS = ((32, 8, 128), (16, 8, 64), (32, 16, 256))
"""Of queries, of keys and values, and the size of each."""


def collect(target: Target, *, is_brief: bool) -> list[Start]:
    """All starts of the scenes on a target.

    Args:
        is_brief: one type of weights and of the cache, and few sizes.
    """
    starts: list[Start] = []
    with torch.inference_mode(), aimed(target), watched(lambda s: bool(starts.append(s))):
        for scene in SCENES:
            scene(is_brief)
    return starts


def of_weights(is_brief: bool) -> None:
    """Products of each type: whole matrices, one that is cut inside a super-block, two together."""
    for number in (Q4_K,) if is_brief else LAYOUTS:
        for extent in (Extent.of(0, N_COLUMNS), Extent.of(96, N_COLUMNS))[: 1 if is_brief else 2]:
            weight = _planes(number, extent)
            for x_bytes in (1,) if is_brief else (1, 2):
                weight.x_bytes = x_bytes
                for n in (1,) if is_brief else ROW_COUNTS:
                    x = _f32(n, extent.n_columns)
                    few.product(x, weight)
                    few.products(x, [weight] * 3, [_f32(N_ROWS)] * 3)
                    few.gated(x, weight, weight, Activation("silu"))
            for n in (64,) if is_brief else (16, 32, 64, 128, 256):
                many.product(_f32(n, extent.n_columns), weight)
            for dtype in (torch.float16, torch.bfloat16, torch.float32)[: 1 if is_brief else 3]:
                rows.dequantised_rows(weight.planes, number, extent, N_ROWS, 0, N_ROWS, dtype)
            rows.looked_up(weight.planes, number, extent, N_ROWS, _ids(4))


def of_steps(is_brief: bool) -> None:
    """What is done between products."""
    for n in (N_COLUMNS,) if is_brief else (128, 2880, N_COLUMNS, 8192):
        x, weight = _f32(4, n), _f32(n)
        steps.rms_norm(x, weight, None, 1e-6)
        norm = SimpleNamespace(kind="rms", weight=weight, bias=None, eps=1e-6, is_absent=False)
        steps.add_norm(x, Addend(x), norm)
        steps.gated(Activation("silu"), x, x)
        steps.softplus(x, weight)
        steps.xielu(x, 0.8, 0.8, 0.5, 1e-6)
        steps.l2_norm(x, 1e-6)
        steps.layer_norm(x, weight, weight, 1e-6)
    steps.rms_norm(_f32(2, 1 << 17), None, None, 1e-6)
    if not is_brief:
        for kind in ("gelu", "relu", "relu2", "oai"):
            steps.gated(Activation(kind, 7.0), _f32(4, N_COLUMNS), _f32(4, N_COLUMNS))
            steps.activate(Activation(kind), _f32(4, N_COLUMNS))


def of_routing(is_brief: bool) -> None:
    """How tokens find experts."""
    rules = [
        Routing(128, 8),
        Routing(32, 4, "softmax_chosen"),
        Routing(256, 8, "sigmoid", n_group=8, n_group_used=4),
    ]
    for rule in rules[: 1 if is_brief else 3]:
        for n in (4, 512):
            found = routing.assign(rule, _f32(n, rule.n_expert), None)
            assert found is not None
            weights, groups = found
            routing.sum_of_experts(_f32(n * rule.n_used, 2048), groups.weights(weights), groups)


def of_attention(is_brief: bool) -> None:
    """Writing to the cache, and reading it, for one token and for prompts."""
    n_past = torch.zeros(1, dtype=torch.int64, device=META)
    for kv_type in ("f16",) if is_brief else KV_TYPES:
        for n_head, n_kv, dim in HEADS[: 1 if is_brief else 3]:
            state = KVState(_whole(n_head), _whole(n_kv), dim, dim)
            cache = LayerCache(state, 0, N_CTX, kv_type, META)
            for n in (1, 512) if is_brief else (1, 4, 64, 512):
                k = _f32(n, n_kv, dim)
                attention.write(cache, k, k, n_past)
                for scores in (Scores(0.1), Scores(0.1, window=1024, softcap=50.0)):
                    attention.attention(_f32(n, n_head, dim), cache, n_past, scores)


def of_sampling(is_brief: bool) -> None:
    """How the next token is drawn."""
    sampler = DeviceSampler(META, N_VOCAB)
    sampler.draw(_f32(N_VOCAB), _ids(1), _ids(1))


SCENES: tuple[Callable[[bool], None], ...] = (
    of_weights, of_steps, of_routing, of_attention, of_sampling,
)  # fmt: skip


def _planes(number: int, extent: Extent) -> GpuPlanes:
    shape = n_tiles(N_ROWS), extent.tile_bytes(LAYOUTS[number])
    return GpuPlanes(
        torch.empty(*shape, dtype=torch.uint8, device=META), number, N_ROWS, extent, x_bytes=1
    )


def _whole(n: int) -> Ranges:
    return Ranges(((0, n),), n)


def _f32(*shape: int) -> Tensor:
    return torch.empty(*shape, device=META)


def _ids(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int64, device=META)
