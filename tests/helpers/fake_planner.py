"""A fake planner for the window's tests, which cuts at whole eighths, whatever the mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from app.devices.split.speed import MachineFacts
from engine import (
    DeviceFacts,
    DeviceInfo,
    DevicePlan,
    Evaluation,
    Forecaster,
    Links,
    LoadParams,
    MemoryUse,
    ModelInfo,
    Plan,
    Positions,
    SplitError,
)
from engine.model.sharding.shares import Ranges, normalise
from engine.model.sharding.split import ModelSplit
from engine.planning.evaluation.workload import BlockWorkload, ModelWorkload, RankWorkload

GIB = 1 << 30
GPUS = [
    DeviceInfo(f"cuda:{i}", "cuda", f"RTX {n}", size * GIB, size * GIB, uuid=f"GPU-{i}")
    for i, (n, size) in enumerate(((4090, 24), (3090, 24), (3060, 12)))
]
CPU = DeviceInfo("cpu", "cpu", "Test CPU", 32 * GIB, 24 * GIB, n_cores=8)
INFO = ModelInfo(
    "/m/m.gguf", "M", "llama", True, 8, 64, 4, 2, 99, 8192, 1, 10 * GIB, "Q4_K_M", True, ()
)
GB_PER_S = {"cuda:0": 1000, "cuda:1": 750, "cuda:2": 250, "cpu": 50}


def fake_machine(devices: Sequence[DeviceInfo]) -> MachineFacts:
    """Return devices that read as fast as `GB_PER_S` says and compute in no time."""
    facts = {d.id: DeviceFacts(d.id, 1e9 * GB_PER_S[d.id], 1e15) for d in devices if d.usable}
    speeds = {device: found.bytes_per_s for device, found in facts.items()}
    return MachineFacts(Forecaster(devices, facts, Links({})), speeds, frozenset(speeds))


class FakePlanner:
    """Planner of a model with 10 GiB of weights and 1 MiB of F16 keys and values per token."""

    info = INFO
    calls = 0
    free_bytes: Mapping[str, int] | None = None

    def __init__(self, path: str) -> None:
        assert path == INFO.path

    def close(self) -> None:
        pass

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        type(self).calls += 1
        type(self).free_bytes = free_bytes
        n_ctx = params.context_for(INFO.n_ctx_train)
        kib = {"f32": 2048, "q8_0": 512, "q4_0": 256}.get(params.kv_type, 1024)
        asked = normalise(params.split, len(params.devices))
        rows, loads, before, total = [], {}, 0.0, 0.0
        for rank, (device, share) in enumerate(zip(params.devices, asked, strict=True)):
            total += share
            end = round(total * 8) / 8
            part, before = end - before, end
            memory = MemoryUse(int(10 * GIB * part), int(n_ctx * part * kib * 1024))
            rows.append(DevicePlan(rank, device, share, part, memory, "packed"))
            loads[rank] = RankWorkload(read_bytes=10 * GIB * part)
        plan = Plan(
            tuple(rows), params.split_mode, n_ctx, params.kv_type, 10 * GIB, (), params.reserve
        )
        block = BlockWorkload(1, tuple(loads), loads, 2)
        head = {0: RankWorkload()}
        whole = Ranges(((0, 1),), 1)
        return Evaluation(
            plan,
            ModelWorkload((block,), head, head, 64, 99),
            ModelSplit(len(asked), (), whole, whole),
        )

    def positions(
        self, params: LoadParams, handle: int, free_bytes: Mapping[str, int] | None = None
    ) -> Positions:
        shares = normalise(params.split, len(params.devices))
        both = shares[handle] + shares[handle + 1]
        splits = [
            (*shares[:handle], both * n / 40, both - both * n / 40, *shares[handle + 2 :])
            for n in range(41)
        ]
        return Positions(
            splits, handle, lambda s: self.evaluate(replace(params, split=s), free_bytes).plan
        )


class RefusingPlanner(FakePlanner):
    """Planner that refuses every split."""

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        raise SplitError("This model cannot be split by tensor.", "Choose layers.")
