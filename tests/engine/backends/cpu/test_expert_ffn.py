"""Fused expert FFNs have the same bits as separate products."""

from collections.abc import Iterator

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from engine.backends.cpu import routing
from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.ops import CpuOps
from engine.backends.cpu.routing import ExpertFFN
from engine.backends.cpu.weights import PlaneWeight
from engine.backends.cpu.worker import Worker
from engine.formats.quants.layout import Extent
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import Activation
from engine.model.layers.linear import ExpertLinear
from engine.model.sharding.placement import Shard
from engine.model.sharding.shares import Ranges
from tests.helpers.kernels import packed, random_rows

N_EXPERT, N_EMBD, N_FF = 24, 512, 256
TYPES = Kind.Q4_K, Kind.Q6_K, Kind.Q4_K


@pytest.fixture(params=[1, 2])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = Worker(2, x_bytes=request.param)
    yield worker
    worker.close()


def experts(kind: Kind, n_rows: int, n_columns: int, worker: Worker) -> ExpertLinear:
    """Return random matrices of a type."""
    planes = packed(
        random_rows(kind, N_EXPERT * n_rows, n_columns, seed=n_rows), kind, chosen(), worker.pool
    )
    tiles = torch.from_numpy(planes).view(N_EXPERT, -(-n_rows // 16), -1)
    whole = Shard(1, Ranges(((0, n_rows),), n_rows))
    layer = ExpertLinear(N_EXPERT, n_columns, n_rows, whole)
    layer.weight = PlaneWeight(tiles, kind, n_rows, Extent.of(0, n_columns), worker)
    return layer


def groups_of(n_token: int, n_used: int) -> Groups:
    """Return the rows of random experts; most tokens choose the first."""
    torch.manual_seed(n_token)
    liked = torch.tensor([2.0, *[0.0] * (N_EXPERT - 1)])
    scores = torch.randn(n_token, N_EXPERT) + liked
    return Groups.of(scores.topk(n_used).indices.sort().values)


@pytest.mark.parametrize("n_used", [1, 6])
@pytest.mark.parametrize("act", [Activation("silu"), Activation("oai", 7.0)], ids=str)
def test_fused_ffns_have_the_bits_of_separate_products(
    worker: Worker, act: Activation, n_used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_token, ops = 301, CpuOps(worker.pool)
    gate, up, down = (
        experts(kind, *shape, worker)
        for kind, shape in zip(TYPES, [(N_FF, N_EMBD)] * 2 + [(N_EMBD, N_FF)], strict=True)
    )
    groups = groups_of(n_token, n_used)
    assert groups.table[0, 2] > 2 * routing.MAX_ROWS, "an expert has several parts"
    x = torch.randn(n_token, N_EMBD)
    found = ops.experts(act, x, gate, up, down, groups)
    joint = ops._expert_ffns[gate, up, down]
    assert joint is not None
    assert joint.is_fast(groups)
    monkeypatch.setattr(routing.ExpertFFN, "is_fast", lambda *_: False)
    assert torch.equal(found, ops.experts(act, x, gate, up, down, groups))


def test_unsupported_experts_are_not_fused(worker: Worker) -> None:
    gate, up, down, other = (
        experts(Kind.Q4_0, *shape, worker).weight
        for shape in [(N_FF, N_EMBD)] * 2 + [(N_EMBD, N_FF), (32, N_EMBD)]
    )
    assert ExpertFFN.of(gate, up, down) is not None
    for weights in ((gate, other, down), (gate, up, None), (gate, up, gate)):
        assert ExpertFFN.of(*weights) is None
