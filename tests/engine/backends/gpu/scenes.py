"""Kernel launches of real models: `engine.backends.gpu` is called on tensors without memory.

Sizes are from models of 3 to 30 billion weights, so that variants are realistic.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from torch import Tensor

from engine.backends.gpu import attention, elementwise, moe, recurrent
from engine.backends.gpu.comm.one_shot import OneShotGroups
from engine.backends.gpu.comm.slots import PacketSlot
from engine.backends.gpu.decode.sampling import DeviceSampler
from engine.backends.gpu.launch.configs import KernelTarget, use_target
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.gpu.loading.dry_run import collect_launches
from engine.backends.gpu.matmul import dequant_gemm, gemv, tile_gemm
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.backends.gpu.page_tables import WORDS, PagedRows
from engine.formats.gguf.reader import GGUFFile
from engine.formats.quants.layout import LAYOUTS, Extent, n_tiles
from engine.hardware.devices.topology import Routes
from engine.load_params import KV_TYPES, LoadParams
from engine.model.architectures.declare import declare
from engine.model.forward.cache import LayerCache
from engine.model.forward.operands import (
    Activation,
    Addend,
    DeltaInputs,
    Routing,
    ScanInputs,
    Scores,
)
from engine.model.forward.recurrent import Chunks, Decays
from engine.model.forward.state import KVState
from engine.model.sharding.shares import Ranges
from engine.runtime.interconnect.exchange import Exchange, load_pairs, store_pairs
from tests.helpers.hollow import hollow_moe

META = torch.device("meta")

N_COLUMNS, N_ROWS, N_CTX, N_VOCAB = 4096, 4096, 8192, 128256

Q4_K = 12

ROW_COUNTS = (1, 2, 4, 8)
"""Numbers of rows for products of few rows."""

HEADS = ((32, 8, 128), (16, 8, 64), (32, 16, 256))
"""Numbers of query heads and KV heads, and the size of a head."""


def collect(target: KernelTarget, *, is_brief: bool) -> list[KernelLaunch]:
    """Return all kernel launches of the scenes on a target.

    Args:
        is_brief: one type of weights and of the cache, and few sizes.
    """
    starts: list[KernelLaunch] = []
    with (
        torch.inference_mode(),
        use_target(target),
        intercept_launches(lambda s: bool(starts.append(s))),
    ):
        for scene in SCENES:
            scene(is_brief)
    return starts + of_a_model(target)


def of_a_model(target: KernelTarget) -> list[KernelLaunch]:
    """Run whole passes of a model with experts, as the dry run of a load does."""
    sizes = {"n_layer": 2, "n_embd": 2048, "n_head": 32, "n_head_kv": 4, "n_ff_exp": 768}
    with TemporaryDirectory() as folder:
        path = hollow_moe(Path(folder) / "moe.gguf", **sizes)
        params = LoadParams(str(path), devices=("cuda:0",), n_ctx=N_CTX)
        with GGUFFile.open(path) as file:
            return collect_launches(declare(file, params), 0, params, target, (1, 4, 64, 512))


def of_weights(is_brief: bool) -> None:
    """Multiply by each type: whole matrices, one cut inside a super-block, two together."""
    for number in (Q4_K,) if is_brief else LAYOUTS:
        for extent in (Extent.of(0, N_COLUMNS), Extent.of(96, N_COLUMNS))[: 1 if is_brief else 2]:
            weight = _planes(number, extent)
            for x_bytes, n in ((1, 1),) if is_brief else ((1, 1), (1, 8), (2, 1)):
                weight.x_bytes = x_bytes
                x = _f32(n, extent.n_columns)
                gemv.product(x, weight)
                gemv.product(x, weight, _f32(N_ROWS), _f32(n, N_ROWS))
                gemv.products(x, [weight] * 3, [_f32(N_ROWS)] * 3)
                for kind in ("silu",) if is_brief else ("silu", "oai"):
                    gemv.gated(x, weight, weight, Activation(kind))
            for n in (64,) if is_brief else (16, 64, 256):
                tile_gemm.product(_f32(n, extent.n_columns), weight)
            for dtype in (torch.float16, torch.bfloat16, torch.float32)[: 1 if is_brief else 3]:
                dequant_gemm.dequantise_rows(
                    weight.planes, number, extent, N_ROWS, 0, N_ROWS, dtype
                )
            dequant_gemm.look_up(weight.planes, number, extent, N_ROWS, _ids(4))


def of_steps(is_brief: bool) -> None:
    """Run the operations between products."""
    for n in (N_COLUMNS,) if is_brief else (128, 2880, N_COLUMNS, 8192):
        x, weight = _f32(4, n), _f32(n)
        elementwise.rms_norm(x, weight, None, 1e-6)
        norm = SimpleNamespace(kind="rms", weight=weight, bias=None, eps=1e-6, is_absent=False)
        elementwise.add_norm(x, Addend(x), norm)
        elementwise.gated(Activation("silu"), x, x)
        elementwise.softplus(x, weight)
        elementwise.opened(x, weight, x)
        elementwise.xielu(x, 0.8, 0.8, 0.5, 1e-6)
        elementwise.l2_norm(x, 1e-6)
        elementwise.layer_norm(x, weight, weight, 1e-6)
    elementwise.rms_norm(_f32(2, 1 << 17), None, None, 1e-6)
    for kind in ("gelu", "relu", "relu2", "oai"):
        elementwise.gated(Activation(kind, 7.0), _f32(4, N_COLUMNS), _f32(4, N_COLUMNS))
        elementwise.activate(Activation(kind), _f32(4, N_COLUMNS))


def of_routing(is_brief: bool) -> None:
    """Route tokens to experts."""
    rules = [
        Routing(128, 8),
        Routing(32, 4, "softmax_chosen"),
        Routing(256, 8, "sigmoid", n_group=8, n_group_used=4),
    ]
    for rule in rules[: 1 if is_brief else 3]:
        bias = None if is_brief else _f32(rule.n_expert)
        for n in (4, 512):
            found = moe.assign(rule, _f32(n, rule.n_expert), bias)
            assert found is not None
            weights, groups = found
            moe.sum_of_experts(_f32(n * rule.n_used, 2048), groups.weights(weights), groups)


def of_attention(is_brief: bool) -> None:
    """Write and attend over the cache, for one token and for prompts."""
    for kv_type in ("f16",) if is_brief else (*KV_TYPES, "q8_0/q4_0"):
        for n_head, n_kv, dim in HEADS[: 1 if is_brief else 3]:
            state = KVState(_whole(n_head), _whole(n_kv), dim, dim)
            cache = LayerCache(state, 0, N_CTX, kv_type, META)
            for n in (1, 512) if is_brief else (1, 4, 64, 512):
                k = _f32(n, n_kv, dim)
                rows = PagedRows.alone(torch.arange(n, device=META), N_CTX)
                attention.write(cache, k, k, rows)
                q = _f32(n, n_head, dim)
                for scores in (Scores(0.1), Scores(0.1, window=1024, softcap=50.0)):
                    attention.attention(q, cache, rows, scores)
                if not is_brief:
                    some = _f32(n_head)
                    attention.attention(q, cache, rows, Scores(0.1), sinks=some)
                    attention.attention(q, cache, rows, Scores(0.1), slopes=some)


def of_plain_weights(is_brief: bool) -> None:
    """Multiply by unquantised weights."""
    types = torch.float16, torch.bfloat16, torch.float32
    for dtype in types[: 1 if is_brief else 3]:
        for n_rows in (128, 4096):
            for n in (1,) if is_brief else ROW_COUNTS:
                data = torch.empty(n_rows, N_COLUMNS, dtype=dtype, device=META)
                gemv.plain_product(_f32(n, N_COLUMNS), data)


def of_experts_and_heads(is_brief: bool) -> None:
    """Multiply by one matrix per expert, or per head."""
    extent, n_matrix = Extent.of(0, 2048), 32
    for number in (Q4_K,) if is_brief else LAYOUTS:
        up, down = (
            GpuPlanes(_tiles(number, n_rows, of, n_matrix), number, n_rows, of, x_bytes=2)
            for n_rows, of in ((768, extent), (2048, Extent.of(0, 768)))
        )
        _grouped(up, n_matrix)
        for has_bias in (False, True):
            layers = [_layer(w, has_bias=has_bias) for w in (up, up, down)]
            for n in (1, 64):
                groups = _groups(n, n_matrix)
                moe.ffn(Activation("oai"), groups.rows(_f32(n, 2048)), *layers, groups)
    types = torch.bfloat16, torch.float16, torch.float32
    for dtype in types[: 1 if is_brief else 3]:
        _grouped(GpuPlain(torch.empty(n_matrix, 768, 2048, dtype=dtype, device=META)), n_matrix)


def _grouped(weight: GpuPlanes | GpuPlain, n_matrix: int) -> None:
    for n in (1, 4, 64, 512):
        groups = _groups(n, n_matrix)
        weight.grouped(groups.rows(_f32(n, 2048)), groups)
    for n in (1, 4):
        weight.per_head(_f32(n, n_matrix, 2048))
        weight.per_head(_f32(n, n_matrix, 512), slice(0, 512), transposed=True)


def _layer(weight: GpuPlanes, *, has_bias: bool) -> SimpleNamespace:
    """Return a linear layer with a matrix per expert."""
    bias = _f32(len(weight.planes), weight.n_rows) if has_bias else None
    return SimpleNamespace(weight=weight, scale=None, bias=bias)


def _groups(n_token: int, n_expert: int) -> moe.DeviceGroups:
    found = moe.assign(Routing(n_expert, 4), _f32(n_token, n_expert), None)
    assert found is not None
    return found[1]


def of_recurrent_layers(is_brief: bool) -> None:
    """Run gated delta nets and state spaces, token by token and for prompts."""
    for n in (1,) if is_brief else (1, 4, 64):
        recurrent.causal_conv(_f32(n, 8192), _f32(8192, 3), _f32(8192, 4), None)
        gated = _f32(n, 3 * 2048).chunk(3, dim=1)
        recurrent.causal_conv(gated[2], _f32(2048, 2), _f32(2048, 3), None, None, gated[:2])
        for dim in (128,) if is_brief else (64, 128):
            q, k, v = (_f32(n, 32, dim) for _ in range(3))
            gates = _f32(n, 32), _f32(32), _f32(32), _f32(n, 32)
            recurrent.delta_net(DeltaInputs(q, k, v, *gates, None, 1e-6), _f32(32, dim, dim))
        recurrent.selective_scan(
            _f32(n, 5120), _f32(n, 5120), _f32(5120, 16), _f32(n, 16), _f32(n, 16), _f32(5120),
            _f32(n, 5120), _f32(5120, 16),
        )  # fmt: skip
        scan = ScanInputs(
            _f32(n, 80, 64), _f32(n, 80), _f32(80), _f32(80), _f32(n, 80, 128), _f32(n, 80, 128),
            _f32(80), _f32(n, 5120), None,
        )  # fmt: skip
        recurrent.state_space_scan(scan, _f32(80, 64, 128))
    of_placed_states()
    for width in (1,) if is_brief else (1, 128):
        decays = Decays(_f32(8, 32, 64, width), _f32(8, 32, 64, width))
        parts = [_f32(8, 32, 64, n) for n in (128, 128, 128, 64)]
        recurrent.scan_chunks(Chunks(*parts, decays, _f32(8, 32, 64, 64)), _f32(32, 128, 128))
    parts[2] = _f32(8, 32, 64, 64)
    recurrent.scan_chunks(Chunks(*parts, decays), _f32(32, 64, 128).transpose(1, 2))


def of_placed_states() -> None:
    """Run recurrent layers for the rows of several sequences."""
    chains = torch.empty(4, WORDS, dtype=torch.int64, device=META)
    gated = _f32(4, 3 * 2048).chunk(3, dim=1)
    recurrent.causal_conv(gated[2], _f32(8, 2048, 2), _f32(2048, 3), None, None, gated[:2], chains)
    for step in ((4, 32), (4, 32, 128)):
        q, k, v = (_f32(4, 32, 128) for _ in range(3))
        gates = _f32(*step), _f32(*step[1:]), _f32(32), _f32(4, 32)
        inputs = DeltaInputs(q, k, v, *gates, None, 1e-6)
        recurrent.delta_net(inputs, _f32(8, 32, 128, 128), chains)
    recurrent.selective_scan(
        _f32(4, 5120), _f32(4, 5120), _f32(5120, 16), _f32(4, 16), _f32(4, 16), _f32(5120),
        _f32(4, 5120), _f32(8, 5120, 16), chains,
    )  # fmt: skip
    scan = ScanInputs(
        _f32(4, 80, 64), _f32(4, 80), _f32(80), _f32(80), _f32(4, 80, 128), _f32(4, 80, 128),
        _f32(80), _f32(4, 5120), None,
    )  # fmt: skip
    recurrent.state_space_scan(scan, _f32(8, 80, 64, 128), chains)


def of_sampling(is_brief: bool) -> None:
    """Sample the next token."""
    sampler = DeviceSampler(META, N_VOCAB)
    sampler.sample(_f32(N_VOCAB), _ids(1), _ids(1))
    for n_rank in (2,) if is_brief else (2, 3, 8):
        own = range(N_VOCAB // n_rank)
        one_shot = OneShotGroups([META] * n_rank, Routes()).one_shot(0, tuple(range(n_rank)))
        split = DeviceSampler(META, N_VOCAB, own, one_shot)
        split.sample(_f32(len(own)), _ids(1), _ids(1), _f32(N_COLUMNS))


def of_links(is_brief: bool) -> None:
    """Run the kernels of link trials."""
    exchange = Exchange(NoBench(), (NoSlot(), NoSlot()), (256, 256), 1)
    exchange.start(0, 1)
    exchange.step(0)
    words = torch.zeros(1 << 18, dtype=torch.int32, device=META)
    store_pairs(words, _ids(1), 1)
    load_pairs(words, _ids(1))


class NoSlot:
    """A slot without memory."""

    source, goal, device_bytes = 0, 0, 0

    def clear(self) -> None:
        """Do nothing."""


class NoBench:
    """Two devices without a link."""

    devices, names, spins = (META, META), ("cuda:0", "cuda:1"), True

    def carry(self, slot: PacketSlot) -> None:
        """Do nothing."""


def of_one_shots(is_brief: bool) -> None:
    """Run one-shot all-reduces, also on a rank without a partial sum."""
    for n_rank in (2,) if is_brief else (2, 3, 4, 8):
        group = tuple(range(n_rank))
        one_shot = OneShotGroups([META] * n_rank, Routes()).one_shot(0, group)
        assert one_shot is not None
        one_shot.words(torch.empty(514, dtype=torch.int32, device=META))
        for n in (N_COLUMNS,) if is_brief else (2880, N_COLUMNS, 8192):
            norm = SimpleNamespace(kind="rms", weight=_f32(n), bias=None, eps=1e-6, is_absent=False)
            for n_row in (1,) if is_brief else (1, 8):
                x = _f32(n_row, n)
                one_shot.all_reduce(x, x.shape)
                for own in (x, None):
                    one_shot.add_norm(x, Addend(own), norm, 1)


SCENES: tuple[Callable[[bool], None], ...] = (
    of_weights, of_plain_weights, of_experts_and_heads, of_steps, of_routing, of_attention,
    of_recurrent_layers, of_sampling, of_links, of_one_shots,
)  # fmt: skip


def _planes(number: int, extent: Extent) -> GpuPlanes:
    return GpuPlanes(_tiles(number, N_ROWS, extent), number, N_ROWS, extent, x_bytes=1)


def _tiles(number: int, n_rows: int, extent: Extent, *n_matrix: int) -> Tensor:
    shape = n_tiles(n_rows), extent.tile_bytes(LAYOUTS[number])
    return torch.empty(*n_matrix, *shape, dtype=torch.uint8, device=META)


def _whole(n: int) -> Ranges:
    return Ranges(((0, n),), n)


def _f32(*shape: int) -> Tensor:
    return torch.empty(*shape, device=META)


def _ids(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int64, device=META)
