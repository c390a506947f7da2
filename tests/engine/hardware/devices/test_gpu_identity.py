"""The GPU that is meant is used, and no other one holds anything of this process."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from engine import NoDevice
from engine.hardware.torch_devices import torch_device
from tests.helpers.fake_nvml import FakeDriver, install, three_gpus
from tests.helpers.tiny_gguf import tiny_gguf

HOLDERS = """
import json, sys
import pynvml
from engine import load_model

def holders():
    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return {
        pynvml.nvmlDeviceGetUUID(handle): len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        for handle in handles
    }

path, devices, split = json.loads(sys.argv[1])
before = holders()
with load_model(path, devices, split) as model:
    list(model.generate([5, 9, 3]))
    model.memory()
    after = holders()
print(json.dumps({uuid: after[uuid] - before[uuid] for uuid in after}))
"""


@pytest.fixture
def torch_says(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the UUIDs that torch gives the numbers, to be filled in."""
    uuids: dict[str, object] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda name: types.SimpleNamespace(**({"uuid": uuids[name]} if name in uuids else {})),
    )
    return uuids


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(three_gpus(), monkeypatch)


@pytest.mark.usefixtures("driver")
def test_a_number_that_means_another_gpu_to_torch_is_refused(torch_says: dict[str, object]) -> None:
    """CUDA was started before its order was settled: the fastest GPU is its first one."""
    torch_says |= {"cuda:0": "aaaa3333", "cuda:1": "bbbb2222", "cuda:2": "aaaa1111"}
    with pytest.raises(NoDevice, match=r"cuda:0 is the driver's cuda:1; restart with"):
        torch_device("cuda:0")
    assert torch_device("cuda:2") == torch.device("cuda:2")


@pytest.mark.usefixtures("driver")
def test_a_uuid_that_nobody_knows_is_no_contradiction(torch_says: dict[str, object]) -> None:
    """As of a part of a GPU, or from a version of torch that tells none."""
    torch_says["cuda:0"] = "1234-of-a-part"
    assert torch_device("cuda:0") == torch.device("cuda:0")
    assert torch_device("cuda:1") == torch.device("cuda:1")


def new_holders(path: Path, devices: list[str], split: list[int] | None) -> dict[str, int]:
    """Return by UUID how many more processes use a GPU while another process has a model."""
    arguments = json.dumps([str(path), devices, split])
    found = subprocess.run(
        [sys.executable, "-c", HOLDERS, arguments], capture_output=True, text=True, check=True,
        env=os.environ,
    )  # fmt: skip
    counted: dict[str, int] = json.loads(found.stdout.splitlines()[-1])
    return counted


@pytest.mark.gpu
@pytest.mark.alone  # it looks at who uses the GPU
@pytest.mark.parametrize(
    ("devices", "split"), [(["cpu", "cpu"], None), (["cuda:0", "cpu"], [0, 1])], ids=str
)
def test_a_model_elsewhere_leaves_no_context_on_a_gpu(
    tmp_path: Path, devices: list[str], split: list[int] | None
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", n_head_kv=4)
    assert set(new_holders(path, devices, split).values()) == {0}


@pytest.mark.gpu
@pytest.mark.alone  # it looks at who uses the GPU
def test_only_the_gpu_with_a_share_gets_a_context(tmp_path: Path) -> None:
    """Named by its UUID; others take part without a share, if there are any."""
    path = tiny_gguf(tmp_path / "m.gguf", n_head_kv=4)
    from engine import list_devices

    gpus = [info for info in list_devices() if info.kind == "cuda" and info.usable]
    used = gpus[-1]
    found = new_holders(
        path, [used.uuid, *(info.id for info in gpus[:-1])], [1] + [0] * len(gpus[:-1])
    )
    assert found[used.uuid] == 1
    assert all(count == 0 for uuid, count in found.items() if uuid != used.uuid)
