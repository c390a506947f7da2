"""F16 and BF16 matrices as int16: precision, bits, limits of the scales, lookup."""

from collections.abc import Iterator
from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import LoadParams, Planner, load_model
from engine.backends.cpu.file_packing import pack_rows
from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.weights import Int16Weight, JointProduct
from engine.backends.cpu.worker import Worker
from engine.formats.quants.layout import Extent, n_tiles, word_tile_bytes
from tests.helpers.tiny_gguf import tiny_gguf

pytestmark = pytest.mark.skipif(
    not chosen().has_word_dots, reason="this processor does not add up products of words"
)

NUMBERS = {torch.float16: 1, torch.bfloat16: 30}

N_ROWS = 75
"""Neither whole tiles nor whole pairs of tiles."""


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(2)
    yield worker
    worker.close()


def in_words(w: Tensor, worker: Worker) -> Int16Weight:
    """Pack a matrix in two pieces."""
    number, extent = NUMBERS[w.dtype], Extent.of(0, w.shape[1])
    planes = torch.zeros(n_tiles(len(w)), word_tile_bytes(extent.n_blocks), dtype=torch.uint8)
    raw = w.view(torch.uint8).numpy()
    for first, last in ((0, 5), (5, len(w))):
        pack_rows(raw[first:last], number, extent, planes, first, worker)
    return Int16Weight(planes, number, len(w), extent, worker)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, w: Tensor, x: Tensor) -> float:
    """Return the NMSE of products."""
    exact = x.double() @ w.double().T
    return float(((found - exact) ** 2).sum() / (exact**2).sum())


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("n_columns", [32, 288, 2048])
def test_products_match_the_matrix(worker: Worker, dtype: torch.dtype, n_columns: int) -> None:
    """A row has the same bits in batches of any size."""
    w, x = (0.02 * numbers(N_ROWS, n_columns)).to(dtype), numbers(37, n_columns, seed=1)
    weight = in_words(w, worker)
    whole = weight.matmul(x)
    assert error(whole, w, x) < 4e-8
    for n in (1, 2, 3, 8, 15, 16, 17, 31):
        for start in (0, 37 - n):
            assert torch.equal(weight.matmul(x[start : start + n]), whole[start : start + n])


def test_more_rows_than_fit_on_the_stack(worker: Worker) -> None:
    w, x = numbers(N_ROWS, 512).half(), numbers(64 * 8 + 20, 512, seed=1)
    assert error(in_words(w, worker).matmul(x), w, x) < 4e-8


@pytest.mark.parametrize("size", [1.0, 6e4, 2e-7])
def test_the_largest_sums_fit(worker: Worker, size: float) -> None:
    """Rows and tokens of equal numbers have the largest products for their lengths."""
    w, x = torch.full((16, 512), size).half(), torch.full((16, 512), 1e30)
    w[1], x[1] = -w[1], -x[1]
    w[2, 1:], x[2, 1:] = 0, 0
    found = in_words(w, worker).matmul(x)
    torch.testing.assert_close(found, (x.double() @ w.double().T).float(), rtol=2e-4, atol=0)


@pytest.mark.parametrize("n_tokens", [3, 40])
@pytest.mark.parametrize("size", [2e-27, 5e36, 3e38])
def test_activations_of_any_size(worker: Worker, size: float, n_tokens: int) -> None:
    """If a result is finite, no intermediate sum overflows."""
    w, x = (0.01 * numbers(N_ROWS, 2048)).half(), numbers(n_tokens, 2048, seed=1)
    x *= size / x.abs().max()
    found = in_words(w, worker).matmul(x)
    assert error(found, w, x) < 1e-7


def test_outliers(worker: Worker) -> None:
    """Outliers cause only small relative errors."""
    w, x = numbers(N_ROWS, 512).half(), numbers(20, 512, seed=1)
    w[:, 7] *= 1000
    x[:, 400] *= 1000
    assert error(in_words(w, worker).matmul(x), w, x) < 1e-6


def test_zeros_nan_and_infinity(worker: Worker) -> None:
    w, x = numbers(N_ROWS, 512).half(), numbers(20, 512, seed=1)
    w[3], x[4] = 0, 0
    x[5, 300], x[6, 3], w[9, 500] = nan, inf, inf
    found = in_words(w, worker).matmul(x)
    is_number = torch.ones(20, N_ROWS, dtype=torch.bool)
    is_number[5:7], is_number[:, 9] = False, False
    assert torch.equal(found.isnan(), ~is_number)
    assert not found[0, 3]
    assert not found[4, :9].any()


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_lookup(worker: Worker, dtype: torch.dtype) -> None:
    """Larger numbers are exact."""
    w, ids = (0.02 * numbers(N_ROWS, 544)).to(dtype), torch.tensor([3, 74, -1, 16, 75, 3])
    found = in_words(w, worker).lookup(ids)
    assert not found[[2, 4]].any()
    rows = w[[3, 74, 16, 3]].float()
    difference = (found[[0, 1, 3, 5]] - rows).abs()
    assert difference.max() < 0.02 / 2000
    assert not difference[rows.abs() > 0.05].any()


def test_joint_products(worker: Worker) -> None:
    matrices = [numbers(N_ROWS, 512, seed=n).half() for n in range(2)]
    weights = [in_words(w, worker) for w in matrices]
    joint = JointProduct(weights)
    for n in (1, 1, joint.n_tokens):
        x = numbers(n, 512, seed=n)
        for part, weight in zip(joint(x), weights, strict=True):
            assert torch.equal(part, weight.matmul(x))


def test_moe_models_and_fast_prompts_do_not_use_int16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.cpu.worker.is_bf16_fast", lambda n_threads: True)
    for x_bytes, fast_prompts, expected in ((1, False, True), (2, False, False), (1, True, False)):
        worker = Worker(1, x_bytes, fast_prompts=fast_prompts)
        assert worker.uses_int16 == expected
        worker.close()


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_plans_count_int16_weights(tmp_path: Path, n_ranks: int) -> None:
    """To the byte, also by the evaluator; heads and FFN are whole blocks of columns on a rank."""
    path = tiny_gguf(
        tmp_path / "m.gguf", n_embd=288, n_head=4, n_head_kv=4, head_dim=32, n_ff=320, n_vocab=75,
        quant="F16",
    )  # fmt: skip
    params = LoadParams(str(path), ("cpu",) * n_ranks)
    found = [device.memory.weights for device in Planner(path).plan(params).devices]
    with load_model(str(path), devices=["cpu"] * n_ranks) as model:
        for rank, planned in zip(model.memory(), found, strict=True):
            assert rank.predicted.weights == rank.measured.weights == planned
