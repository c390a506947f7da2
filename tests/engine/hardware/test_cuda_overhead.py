"""What CUDA takes of a GPU by itself: measured once a model is loaded, used by later plans."""

import json
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import LoadParams, Planner
from engine.errors import NoDevice
from engine.hardware import cuda_api, torch_devices
from engine.hardware.cuda_api import CUDA_OVERHEAD_BYTES, overhead_bytes, use_overheads
from engine.hardware.devices.types import DeviceInfo, DeviceSnapshot
from engine.planning.memory import MemoryUse
from engine.planning.speed.forecast import Forecaster
from engine.planning.speed.machine_file import MachineFile, use_measured_overheads
from engine.planning.speed.rigs import parse_rig
from engine.runtime import memory as overheads
from engine.runtime.memory import UsedMemory
from tests.helpers.tiny_gguf import tiny_gguf

MIB, GIB = 1 << 20, 1 << 30
GPU = DeviceInfo("cuda:0", "cuda", "RTX 3090", 24 * GIB, 23 * GIB, pci_bus="0:1", driver="580")
CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_api, "_measured", {})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes a GPU with so many bytes in use by this process."""

    def make(own: int | None, reserved: int = 0, allocated: int = 0, left: int = 20 * GIB) -> None:
        snapshot = DeviceSnapshot("cuda:0", 0.0, 0, 24 * GIB, left, own_bytes=own)

        class Monitor:
            def __init__(self, devices: list[str]) -> None:
                assert devices == ["cuda:0"]

            def __enter__(self) -> "Monitor":
                return self

            def __exit__(self, *_: object) -> None: ...

            def snapshot(self) -> list[DeviceSnapshot]:
                return [snapshot]

        fake = types.SimpleNamespace(
            memory_reserved=lambda device: reserved,
            memory_allocated=lambda device: allocated,
            mem_get_info=lambda device: (left, 24 * GIB),
        )
        monkeypatch.setattr(torch_devices, "DeviceMonitor", Monitor)
        monkeypatch.setattr(torch_devices.torch, "cuda", fake)

    return make


def test_what_is_no_segment_of_torch_is_overhead(card: Callable[..., None]) -> None:
    card(own=5 * GIB + 410 * MIB, reserved=5 * GIB)
    assert torch_devices.taken_overhead(CUDA) == 410 * MIB


@pytest.mark.parametrize("own", [None, 0, 3 * MIB, 5 * GIB - 1, 90 * GIB])
def test_nonsense_of_drivers_is_no_measurement(card: Callable[..., None], own: int | None) -> None:
    card(own=own, reserved=5 * GIB if own and own > 4 * MIB else 0)
    assert torch_devices.taken_overhead(CUDA) is None


def test_a_gpu_that_nobody_reads_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(devices: list[str]) -> None:
        raise NoDevice(devices[0], "there is cpu")

    monkeypatch.setattr(torch_devices, "DeviceMonitor", refuse)
    assert torch_devices.taken_overhead(CUDA) is None


def test_only_what_is_taken_by_now_counts_as_free(card: Callable[..., None]) -> None:
    """A plan adds all that CUDA will take; so much of that as is gone already is given back."""
    use_overheads({"cuda:0": 600 * MIB})
    card(own=2 * GIB + 250 * MIB, reserved=2 * GIB, allocated=GIB)
    assert torch_devices.free_bytes(["cuda:0"]) == {"cuda:0": 20 * GIB + GIB + 250 * MIB}
    card(own=None)
    assert torch_devices.free_bytes(["cuda:0"]) == {"cuda:0": 20 * GIB + 600 * MIB}


def test_plans_use_what_was_measured(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    planner, params = Planner(path), LoadParams(str(path), ("cuda:0", "cuda:1"))
    file = MachineFile(tmp_path / "machine.json")
    file.keep_overhead(GPU, 399 * MIB + 1)
    file = MachineFile(tmp_path / "machine.json")
    assert file.overhead(GPU) == 400 * MIB
    assert file.overhead(replace(GPU, driver="590")) is None
    use_measured_overheads([GPU, replace(GPU, id="cuda:1", name="RTX 4090")], file)
    assert planner.plan(params).overhead() == {"cuda:0": 400 * MIB, "cuda:1": CUDA_OVERHEAD_BYTES}
    Forecaster.of_rig(parse_rig("2x4090"))
    assert overhead_bytes("cuda:0") == CUDA_OVERHEAD_BYTES, "a simulated card is another one"
    assert overhead_bytes("cpu") == 0


@pytest.mark.parametrize("kept", [7, "much", True, -1, 1 << 50, None, {}])
def test_damaged_entries_do_no_harm(tmp_path: Path, kept: object) -> None:
    path = tmp_path / "machine.json"
    MachineFile(path).keep_overhead(GPU, 400 * MIB)
    document = json.loads(path.read_text())
    document["overheads"] = dict.fromkeys(document["overheads"], kept)
    path.write_text(json.dumps(document))
    assert MachineFile(path).overhead(GPU) is None
    path.write_text(json.dumps(document | {"overheads": kept}))
    assert MachineFile(path).overhead(GPU) is None


def test_a_load_measures_each_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = MachineFile(tmp_path / "machine.json")
    monkeypatch.setattr(MachineFile, "of_user", classmethod(lambda cls: file))
    monkeypatch.setattr(overheads, "list_devices", lambda: [GPU])
    monkeypatch.setattr(overheads, "taken_overhead", lambda device: 333 * MIB)
    overheads.keep_overheads([torch.device("cpu")])
    assert file.overhead(GPU) is None
    overheads.keep_overheads([CUDA, CUDA, torch.device("cpu")])
    assert file.overhead(GPU) == 333 * MIB
    overheads.plan_with_overheads([CUDA])
    assert overhead_bytes("cuda:0") == 333 * MIB
    monkeypatch.setattr(overheads, "taken_overhead", lambda device: None)
    overheads.keep_overheads([CUDA])
    assert file.overhead(GPU) == 333 * MIB


def test_a_closed_model_gives_back_all_that_torch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding and graphs as well; on the host only what the model holds."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 700)
    on_gpu = types.SimpleNamespace(device=CUDA, held=MemoryUse(500, 100, host_kv=30))
    on_cpu = types.SimpleNamespace(device=torch.device("cpu"), held=MemoryUse(5, 1))
    plans = [
        types.SimpleNamespace(
            device=str(rank.device), memory=types.SimpleNamespace(draft=n, pictures=0)
        )
        for rank, n in ((on_gpu, 0), (on_cpu, 9))
    ]
    plan = types.SimpleNamespace(devices=plans, pictures_apart=7)
    memory = UsedMemory([CUDA, on_cpu.device])
    memory.note_beside("draft", 4)
    memory.note_beside("pictures", 7)
    free = memory.free_once_closed({"cuda:0": 1, "cpu": 2}, plan, [on_gpu, on_cpu])  # type: ignore[arg-type,list-item]
    assert free == {"cuda:0": 701, "cpu": 49}
