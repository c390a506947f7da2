"""The planned scratch memory of a GPU, against the tensors of real passes without memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.backends.gpu.attention import AttentionShape, work_bytes
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.loading import dry_run
from engine.backends.gpu.loading.dry_run import collect_launches
from engine.formats.gguf.reader import GGUFFile
from engine.load_params import LoadParams
from engine.model.architectures.declare import Declaration, declare
from engine.model.forward.batch import CAPTURED_ROWS
from engine.model.forward.state import SHARED_ROWS, AttentionSize, CacheSize, pieces_bytes
from engine.planning import footprint
from engine.planning.rank_size import cache_bytes, rank_size
from tests.helpers.hollow import hollow_llama, hollow_moe
from tests.helpers.live_memory import LiveMemory

H200, T4 = KernelTarget("nvidia", 90, 132), KernelTarget("nvidia", 75, 40)


def moe(path: Path) -> Path:
    return hollow_moe(path, n_layer=2, n_embd=2048, n_head=32, n_head_kv=4, n_ff_exp=768)


def llama(path: Path) -> Path:
    return hollow_llama(path, n_layer=2)


@pytest.fixture(scope="module", params=[moe, llama], ids=["moe", "llama"])
def file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GGUFFile]:
    write: Callable[[Path], Path] = request.param
    with GGUFFile.open(write(tmp_path_factory.mktemp("hollow") / "model.gguf")) as opened:
        yield opened


def measured(
    declaration: Declaration, params: LoadParams, n_tokens: int, target: KernelTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> int:  # fmt: skip
    """Return the peak bytes of a pass's tensors, without weights and cache."""
    monkeypatch.setattr(dry_run, "_record", lambda *_: False)  # launches would keep tensors
    live = LiveMemory()
    with live:
        collect_launches(declaration, 0, params, target, [n_tokens])
    layers = rank_size(declaration, 0, "kernels", params.kv_type).layers
    cached = cache_bytes(layers, CacheSize.asked(params, declaration.hp.n_ctx)).kv
    return live.peak - live.n_bytes - cached


@pytest.mark.parametrize("target", [H200, T4], ids=["h200", "t4"])
@pytest.mark.parametrize("n_ctx", [8192, 131072])
@pytest.mark.parametrize("n_tokens", [1, 8, 64, 256, 512, 2048])
def test_a_pass_takes_what_is_planned(
    file: GGUFFile, n_tokens: int, n_ctx: int, target: KernelTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = LoadParams(str(file.path), ("cuda:0",), n_ctx=n_ctx, n_batch=n_tokens)
    declaration = declare(file, params)
    working = rank_size(declaration, 0, "kernels", params.kv_type).working
    found = measured(declaration, params, n_tokens, target, monkeypatch)
    planned = footprint._device_pass(working, declaration.hp, n_tokens, n_ctx, is_kv_on_host=False)
    planned += 8 * declaration.hp.n_vocab
    assert planned >= 0.99 * found
    if n_tokens >= 512:
        assert planned <= 1.25 * found


def test_a_part_of_a_model_takes_what_is_planned(
    file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = ("cuda:0", "cuda:1")
    params = LoadParams(str(file.path), devices, n_ctx=8192, n_batch=2048)
    declaration = declare(file, params)
    working = rank_size(declaration, 0, "kernels", params.kv_type).working
    found = measured(declaration, params, 2048, H200, monkeypatch)
    planned = footprint._device_pass(working, declaration.hp, 2048, 8192, is_kv_on_host=False)
    assert found <= planned + 8 * declaration.hp.n_vocab <= 1.4 * found


@pytest.mark.parametrize("n_sm", [10, 40, 82, 132, 160])
@pytest.mark.parametrize("heads", [(8, 8, 64, 64), (32, 8, 128, 128), (128, 1, 576, 512)])
@pytest.mark.parametrize("n_ctx", [512, 8192, 131072])
def test_pieces_of_attention(n_sm: int, heads: tuple[int, ...], n_ctx: int) -> None:
    n_head, n_kv, dim_k, dim_v = heads
    shape = AttentionShape(n_head, n_kv, dim_k, dim_v, n_ctx, n_ctx, "f16")
    is_shared = n_kv == 1
    cache = AttentionSize(n_head, n_kv, dim_k if is_shared else dim_k + dim_v, is_shared)
    for n_tokens in (1, 8, 64, 256):
        needed = work_bytes(shape, n_tokens, KernelTarget("nvidia", 90, n_sm))
        few = min(n_tokens, SHARED_ROWS // n_head)
        planned = max(pieces_bytes(cache, n, n_ctx) for n in {few, min(8, n_tokens)})
        assert planned >= needed
    for n in CAPTURED_ROWS:
        needed = work_bytes(shape, 1, KernelTarget("nvidia", 90, n_sm), n)
        assert pieces_bytes(cache, n, n_ctx, are_singles=True) >= needed
