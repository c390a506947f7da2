"""The way from an AMD GPU in the list to the self-test of the kernels, with made-up parts.

What stands in for a card: files of Linux's driver, and what torch built for ROCm says of it.
"""

import types
from pathlib import Path

import pytest
import torch

from engine.backends.gpu.launch import configs, own_launcher
from engine.errors import NoDevice
from engine.hardware import backend_choice
from engine.hardware.backend_choice import find_gpu_path
from engine.hardware.card_records import CardVerdict
from engine.hardware.devices.catalog import list_devices
from engine.hardware.devices.torch_builds import TorchBuild
from engine.hardware.devices.types import DeviceInfo
from engine.hardware.torch_devices import torch_device
from engine.runtime import kernel_proof as card_trial
from engine.runtime.kernel_proof import prove_kernels
from tests.helpers.fake_amd import RX9070, XTX, install_amd
from tests.helpers.fake_nvml import FakeDriver, install, three_gpus, use_build


def properties_of(name: str, arch: str, number: int) -> types.SimpleNamespace:
    """Return what torch says of a card with this number of its own."""
    uuid = types.SimpleNamespace(bytes=list(f"{number:016x}".encode()))
    return types.SimpleNamespace(
        name=name, gcnArchName=f"{arch}:sramecc-:xnack-", uuid=uuid, major=11, minor=0,
        multi_processor_count=48,
    )  # fmt: skip


CARDS = {
    "cuda:0": properties_of("AMD Radeon RX 7900 XTX", "gfx1100", XTX.unique_id),
    "cuda:1": properties_of("AMD Radeon RX 9070 XT", "gfx1201", RX9070.unique_id),
}


@pytest.fixture
def hip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, types.SimpleNamespace]:
    """Install two cards and a torch that sees them; return what it says of each."""
    install_amd(monkeypatch, tmp_path, [XTX, RX9070])
    said = dict(CARDS)
    for name in ("TANDEM_BACKEND", "TANDEM_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.2.53211")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: said[str(name)])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a", "gfx1100", "gfx1201"])
    monkeypatch.setattr(backend_choice, "_refused", {})
    return said


@pytest.mark.usefixtures("hip")
def test_an_amd_gpu_reaches_the_self_test_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The self-test itself runs in a child process, which is told the card by HIP's variable."""
    tested: list[tuple[str, str, str]] = []

    def try_card(info: DeviceInfo) -> CardVerdict:
        maker = configs.target_of(torch.device(info.id)).maker
        tested.append((info.arch, maker, card_trial.only_shown(info)["HIP_VISIBLE_DEVICES"]))
        return CardVerdict("passed")

    monkeypatch.setattr(card_trial, "try_card", try_card)
    monkeypatch.setattr(own_launcher, "prepare", lambda: "triton")
    monkeypatch.setattr(configs, "_cards", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = [info.id for info in list_devices() if info.kind == "cuda" and info.usable]
    devices = [torch_device(name) for name in names]
    assert devices == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert prove_kernels(names).current == ()
    assert tested == [("gfx1100", "amd", "0"), ("gfx1201", "amd", "1")]
    assert [backend_choice.kernels_for(name) for name in names] == ["gpu", "gpu"]


def test_another_order_than_the_drivers_is_refused(hip: dict[str, types.SimpleNamespace]) -> None:
    hip["cuda:0"], hip["cuda:1"] = hip["cuda:1"], hip["cuda:0"]
    with pytest.raises(NoDevice, match="HIP was started with GPUs in another order, in which"):
        torch_device("cuda:0")


def test_a_card_that_torch_has_no_code_for_is_refused_with_amds_command(
    hip: dict[str, types.SimpleNamespace],
) -> None:
    hip["cuda:1"] = properties_of("AMD Radeon 780M", "gfx1103", RX9070.unique_id)
    assert torch_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(NoDevice, match="this PyTorch build has no code for gfx1103") as caught:
        torch_device("cuda:1")
    assert '"torch[device-gfx1103]>=2.11" --index-url https://stable.repo' in caught.value.hint


@pytest.mark.usefixtures("hip")
def test_torchs_own_words_are_told_where_it_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("No HIP GPUs are available")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(NoDevice, match="PyTorch sees no GPU: No HIP GPUs are available"):
        torch_device("cuda:0")


@pytest.mark.usefixtures("hip")
@pytest.mark.parametrize(
    ("problem", "launcher", "arithmetic", "sentence"),
    [
        ("", "triton", "kernels", "GPUs compute with Tandem's kernels, compiled and launched by"),
        (
            "there is no C compiler",
            "",
            "reference",
            "a lot of memory, because there is no C compiler.",
        ),
    ],
)
def test_what_amds_gpus_compute_with_is_told(
    monkeypatch: pytest.MonkeyPatch, problem: str, launcher: str, arithmetic: str, sentence: str
) -> None:
    """Tandem's own launcher knows only CUDA."""
    monkeypatch.setattr(backend_choice, "triton_version", lambda: "3.8.0")
    monkeypatch.setattr(backend_choice, "launcher_problem", lambda: problem)
    found = find_gpu_path(list_devices())
    assert (found.launcher, found.arithmetic) == (launcher, arithmetic)
    assert (found.has_gpu, found.torch_hip, found.missing) == (True, "7.2.53211", ())
    assert sentence in found.sentence


# --- the same checks on NVIDIA's


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return install(three_gpus(), monkeypatch)


@pytest.mark.usefixtures("cuda")
def test_without_a_uuid_the_place_on_the_bus_tells_cards_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x2A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: said)
    assert torch_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(NoDevice, match="cuda:0 is the driver's cuda:1; restart with CUDA"):
        torch_device("cuda:0")


@pytest.mark.usefixtures("cuda")
def test_a_build_without_code_for_a_card_is_found_before_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a build of one's own, of which the table knows nothing."""
    use_build(monkeypatch, TorchBuild(True, "13.0", version="2.13.0a0+gitabc"))
    said = types.SimpleNamespace(major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: said)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90", "compute_90"])
    with pytest.raises(NoDevice, match=r"has no code for compute capability 8\.6") as caught:
        torch_device("cuda:0")
    assert "pip install --force-reinstall" in caught.value.hint
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    assert torch_device("cuda:0") == torch.device("cuda:0")
