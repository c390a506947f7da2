"""Joint products have the same bits as separate products."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine import load_model
from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.ops import CpuOps
from engine.backends.cpu.weights import FineWeight, PlaneWeight
from engine.backends.cpu.worker import Worker
from engine.formats.quants.layout import Extent
from engine.model.forward.operands import Activation
from engine.model.layers.linear import Linear
from engine.model.sharding.placement import Replicate
from tests.helpers.kernels import multiplied, packed, random_rows
from tests.helpers.tiny_gguf import tiny_gguf

N_COLUMNS = 512


@pytest.fixture(params=[1, 2])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = Worker(2, x_bytes=request.param)
    yield worker
    worker.close()


class Matrix:
    """A random matrix in planes, in a linear layer."""

    def __init__(
        self, kind: Kind, n_rows: int, worker: Worker, seed: int = 0, *,
        made: type[PlaneWeight] = PlaneWeight,
    ) -> None:  # fmt: skip
        raw = random_rows(kind, n_rows, N_COLUMNS, seed=seed)
        self.kind, self.n_rows, self.worker = kind, n_rows, worker
        self.planes = packed(raw, kind, chosen(), worker.pool)
        tiles = torch.from_numpy(self.planes).view(-(-n_rows // 16), -1)
        weight = made(tiles, kind, n_rows, Extent.of(0, N_COLUMNS), worker)
        self.x_bytes = weight.x_bytes
        self.linear = Linear(N_COLUMNS, n_rows, Replicate((0,)))
        self.linear.weight = weight

    def product(self, x: Tensor) -> Tensor:
        """Return the GEMM kernel's product with x."""
        return torch.from_numpy(
            multiplied(
                self.planes, self.n_rows, x.numpy(), self.kind, chosen(), self.worker.pool,
                x_bytes=self.x_bytes,
            )
        )  # fmt: skip


def numbers(n_tokens: int, seed: int = 0) -> Tensor:
    rows = np.random.default_rng(seed).standard_normal((n_tokens, N_COLUMNS), np.float32)
    return torch.from_numpy(rows)


@pytest.mark.parametrize("n_tokens", [1, 3, 20])
def test_products_of_several_types(worker: Worker, n_tokens: int) -> None:
    kinds = (Kind.Q4_K, Kind.Q4_K, Kind.Q6_K)
    matrices = [Matrix(k, n, worker, n) for k, n in zip(kinds, (96, 32, 40), strict=True)]
    ops, layers = CpuOps(worker.pool), [matrix.linear for matrix in matrices]
    for seed in range(2):
        x = numbers(n_tokens, seed)
        for _ in range(2):  # the second time x is quantised already
            for matrix, y in zip(matrices, ops.linears(x, *layers), strict=True):
                assert torch.equal(y, matrix.product(x))
        for matrix in matrices:
            assert torch.equal(matrix.linear(x), matrix.product(x))


@pytest.mark.parametrize("n_tokens", [1, 3, 20])
def test_values_have_finer_activations_in_the_same_product(n_tokens: int) -> None:
    """One byte for queries and keys, two for values, whichever was packed first."""
    worker = Worker(2)
    value = Matrix(Kind.Q6_K, 40, worker, 3, made=FineWeight)
    matrices = [Matrix(Kind.Q4_K, 96, worker, 1), Matrix(Kind.Q4_K, 32, worker, 2), value]
    layers = [matrix.linear for matrix in matrices]
    for seed, first in enumerate([[], [0], [2], [0, 2]]):
        x, ops = numbers(n_tokens, seed), CpuOps(worker.pool)
        assert ops._joint_product(tuple(layers))[0], "one call for all three"
        for index in first:
            assert torch.equal(layers[index](x), matrices[index].product(x))
        for matrix, y in zip(matrices, ops.linears(x, *layers), strict=True):
            assert torch.equal(y, matrix.product(x))
    exact = Matrix(Kind.Q6_K, 40, worker, 3).product(x)
    assert not torch.equal(value.product(x), exact)
    worker.close()


@pytest.mark.parametrize("n_expert", [0, 4])
def test_which_matrices_have_finer_activations(tmp_path: Path, n_expert: int) -> None:
    """Only values, on any split; MoE models have two bytes in all products."""
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_expert=n_expert)
    with load_model(path, devices=["cpu"]) as model:
        for devices in (["cpu"], ["cpu", "cpu"], ["cpu"]):
            model.resplit(None, devices=devices)
            for slot in (slot for rank in model.runtime.ranks for slot in rank.slots):
                weight = getattr(slot.owner, slot.attribute)
                if isinstance(weight, PlaneWeight):
                    is_fine = slot.tensor.name.endswith("attn_v.weight") or n_expert > 0
                    assert weight.x_bytes == 1 + is_fine, slot.tensor.name


def test_activations_for_other_blocks_are_quantised_again(worker: Worker) -> None:
    x = numbers(1)[:, :256]
    whole = Matrix(Kind.Q8_0, 32, worker)
    weight = whole.linear.weight
    assert isinstance(weight, PlaneWeight)
    shifted = PlaneWeight(weight.planes, Kind.Q8_0, 32, Extent(0, N_COLUMNS // 32, 5, 256), worker)
    same = PlaneWeight(weight.planes, Kind.Q8_0, 32, Extent(0, N_COLUMNS // 32, 0, 256), worker)
    padded = torch.zeros(2, N_COLUMNS)
    padded[0, 5 : 5 + 256], padded[1, :256] = x, x
    for _ in range(2):
        assert torch.equal(shifted.matmul(x), whole.product(padded[:1]))
        assert torch.equal(same.matmul(x), whole.product(padded[1:]))


@pytest.mark.parametrize("n_tokens", [1, 3, 20])
@pytest.mark.parametrize("act", [Activation("silu"), Activation("oai", 0.5)], ids=str)
def test_gated_products(worker: Worker, act: Activation, n_tokens: int) -> None:
    gate, up = Matrix(Kind.Q4_K, 200, worker, 1), Matrix(Kind.Q6_K, 200, worker, 2)
    ops, x = CpuOps(worker.pool), numbers(n_tokens)
    y = ops.gated_linears(act, x, gate.linear, up.linear)
    assert torch.equal(y, ops.gated(act, gate.product(x), up.product(x)))
    gate.linear.bias = torch.ones(200)
    y = CpuOps(worker.pool).gated_linears(act, x, gate.linear, up.linear)
    assert torch.equal(y, ops.gated(act, gate.product(x) + 1, up.product(x)))
