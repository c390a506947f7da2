"""The list of devices, their names and problems, with a made-up NVIDIA driver."""

import importlib
import os
import pickle
import re
import subprocess
import sys
import types

import psutil
import pytest

from engine.errors import NoDevice
from engine.hardware.devices import torch_builds as torch_build
from engine.hardware.devices.catalog import (
    cuda_status,
    hidden_gpus,
    list_devices,
    parse_devices,
    parse_target,
    require_devices,
)
from engine.hardware.devices.other_gpus import Adapter
from engine.hardware.devices.torch_builds import TorchBuild, find_torch_build
from engine.hardware.devices.types import DeviceInfo
from engine.hardware.devices.visibility import variables_for, visible, visible_problem
from tests.helpers.fake_nvml import CODES, GIB, FakeDriver, install, no_gpus, three_gpus, use_build


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    return install(three_gpus(), monkeypatch)


@pytest.fixture
def no_driver(monkeypatch) -> FakeDriver:
    return install(no_gpus(), monkeypatch)


def names(devices: list[DeviceInfo]) -> dict[str, str]:
    return {info.id: info.name for info in devices if info.kind == "cuda"}


# --- listing


def test_the_made_up_driver_has_only_names_of_the_real_binding():
    """Otherwise the tests below would pass on functions that do not exist."""
    real = importlib.import_module("pynvml")
    for name in [*vars(FakeDriver), *CODES]:
        if name.lower().startswith("nvml") and name != "NVMLError":
            assert hasattr(real, name), name
    for name, code in CODES.items():
        assert getattr(real, name) == code


def test_gpus_are_numbered_in_pci_order_and_the_cpu_comes_last(driver):
    devices = list_devices()
    assert [d.id for d in devices] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert [d.name for d in devices[:3]] == ["RTX 3060", "RTX 5090", "RTX 4090"]
    assert driver.n_open == 0


def test_a_gpu_is_described_whole(driver):
    assert list_devices()[1] == DeviceInfo(
        id="cuda:1",
        kind="cuda",
        name="RTX 5090",
        total_bytes=32 * GIB,
        free_bytes=31 * GIB,
        uuid="GPU-aaaa3333",
        pci_bus="00000000:2A:00.0",
        compute_capability="12.0",
        driver="580.65",
    )


def test_device_infos_survive_pickling(driver):
    devices = list_devices()
    assert pickle.loads(pickle.dumps(devices)) == devices


def test_without_a_driver_there_is_just_the_cpu_and_a_sentence(no_driver):
    assert [d.id for d in list_devices()] == ["cpu"]
    assert cuda_status() == "No NVIDIA driver was found; Tandem runs on the CPU."


def test_without_the_nvml_package_there_is_just_the_cpu_and_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert [d.id for d in list_devices()] == ["cpu"]
    assert "nvidia-ml-py is missing" in cuda_status()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("NVML_ERROR_DRIVER_NOT_LOADED", "No NVIDIA driver was found"),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", "restart the machine"),
        ("NVML_ERROR_UNKNOWN", "does not answer (code 999)"),
    ],
)
def test_a_driver_that_does_not_start_is_explained(driver, error, expected):
    driver.init_error = CODES[error]
    assert expected in cuda_status()
    assert [d.id for d in list_devices()] == ["cpu"]


def test_a_driver_that_fails_after_the_start_is_explained_and_closed(driver):
    driver.count_error = CODES["NVML_ERROR_UNKNOWN"]
    assert [d.id for d in list_devices()] == ["cpu"]
    assert "code 999" in cuda_status()
    assert driver.n_open == 0


def test_a_gpu_lost_before_it_could_be_asked_is_listed_last_with_the_reason(driver):
    """CUDA does not count it, so the others keep the numbers that torch gives them."""
    driver.named("RTX 5090").errors["handle"] = CODES["NVML_ERROR_GPU_IS_LOST"]
    devices = list_devices()
    assert names(devices) == {"cuda:0": "RTX 3060", "cuda:1": "RTX 4090", "cuda:2": "NVIDIA GPU"}
    assert [d.usable for d in devices] == [True, True, False, True]
    assert "fell off the bus" in devices[2].reason
    assert cuda_status() == ""


def test_a_gpu_lost_in_the_middle_keeps_its_name_and_is_not_usable(driver):
    driver.named("RTX 5090").errors["memory"] = CODES["NVML_ERROR_RESET_REQUIRED"]
    info = list_devices()[1]
    assert (info.name, info.usable, info.total_bytes) == ("RTX 5090", False, 0)
    assert "needs a reset" in info.reason


def test_when_every_gpu_is_lost_the_status_says_so(driver):
    for gpu in driver.gpus:
        gpu.errors["*"] = CODES["NVML_ERROR_GPU_IS_LOST"]
    assert "fell off the bus" in cuda_status()


def test_a_gpu_this_process_may_not_open_is_not_listed(driver):
    driver.named("RTX 3060").errors["handle"] = CODES["NVML_ERROR_NO_PERMISSION"]
    assert names(list_devices()) == {"cuda:0": "RTX 5090", "cuda:1": "RTX 4090"}


def test_facts_that_a_gpu_does_not_tell_are_left_empty(driver):
    gpu = driver.named("RTX 3060")
    gpu.errors |= dict.fromkeys(["name", "capability"], CODES["NVML_ERROR_NOT_SUPPORTED"])
    info = list_devices()[0]
    assert (info.name, info.compute_capability, info.usable) == ("NVIDIA GPU", "", True)


def test_a_gpu_that_shares_the_hosts_memory_shows_that(driver):
    driver.named("RTX 3060").errors["memory"] = CODES["NVML_ERROR_NOT_SUPPORTED"]
    assert list_devices()[0].total_bytes == psutil.virtual_memory().total


# --- visible devices


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["RTX 3060", "RTX 5090", "RTX 4090"]),
        ("2,0", ["RTX 4090", "RTX 3060"]),
        ("GPU-aaaa3, GPU-bbbb2222", ["RTX 5090", "RTX 3060"]),
        ("", []),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_picks_and_orders_the_gpus(driver, monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert list(names(list_devices()).values()) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,2,-1,1", [0, 2]),
        ("1,7,0", [1]),
        ("1,1", []),
        ("GPU-aaaa", []),
        ("GPU-bbbb,GPU-cccc,GPU-aaaa1", [1]),
        ("MIG-1234", []),
        ("NoDevFiles", []),
        ("²", []),
    ],
)
def test_visible_follows_cudas_rules(value, expected):
    assert visible(["GPU-aaaa1111", "GPU-bbbb2222", "GPU-aaaa3333"], value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ""),
        ("2,0,1", ""),
        ("GPU-aaaa1,GPU-bbbb2222", ""),
        ("0,-1,7", ""),
        ("", ""),
        ("NoDevFiles", ""),
        ("0,7", "'0,7': there is no GPU 7, as only 3 are present, which ends the list."),
        ("1,0,1", "'1,0,1': it names GPU 1 twice, which hides all GPUs."),
        ("GPU-aaaa3333,1", ""),
        ("GPU-aaaa1111,0", "'GPU-aaaa1111,0': it names GPU 0 twice, which hides all GPUs."),
        ("GPU-aaaa", "2 GPUs have UUIDs that start with 'GPU-aaaa', which ends the list."),
        ("GPU-cc", "no GPU has a UUID that starts with 'GPU-cc', which ends"),
        ("MIG-12ab", "'MIG-12ab' is a part of a GPU (MIG), which Tandem cannot use"),
        ("cuda:0", "'cuda:0' is neither a number nor a GPU's UUID"),
    ],
)
def test_what_is_named_in_vain_is_told(value, expected):
    """What hides GPUs on purpose is no problem."""
    found = visible_problem(["GPU-aaaa1111", "GPU-bbbb2222", "GPU-aaaa3333"], value)
    assert expected in found
    assert bool(expected) == bool(found)
    assert found in ("", expected) or found.startswith(f"CUDA_VISIBLE_DEVICES is '{value}': ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("9", "CUDA_VISIBLE_DEVICES is '9': there is no GPU 9, as only 3 are present"),
        ("1,1", "CUDA_VISIBLE_DEVICES is '1,1': it names GPU 1 twice, which hides all GPUs."),
        ("MIG-1", "'MIG-1' is a part of a GPU (MIG), which Tandem cannot use"),
        ("", "CUDA_VISIBLE_DEVICES is '' and hides all GPUs. Tandem runs on the CPU."),
        ("-1", "CUDA_VISIBLE_DEVICES is '-1' and hides all GPUs. Tandem runs on the CPU."),
    ],
)
def test_the_status_names_the_variable_that_hides_all(driver, monkeypatch, value, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert expected in cuda_status()
    assert cuda_status().endswith("; Tandem runs on the CPU.") or cuda_status().endswith(
        ". Tandem runs on the CPU."
    )
    with pytest.raises(NoDevice, match="CUDA_VISIBLE_DEVICES"):
        require_devices(["cuda:0"])


def test_gpus_that_are_named_in_vain_are_told_also_where_others_are_shown(driver, monkeypatch):
    assert hidden_gpus() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,7,0")
    assert list(names(list_devices()).values()) == ["RTX 4090"]
    assert cuda_status() == ""
    assert "there is no GPU 7" in hidden_gpus()


def test_gpus_that_are_hidden_on_purpose_are_named(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert hidden_gpus() == "CUDA_VISIBLE_DEVICES is '2' and hides RTX 3060, RTX 5090."


def test_without_a_driver_no_gpu_is_hidden(no_driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert hidden_gpus() == ""


def hip(value: str) -> dict[str, str]:
    return dict.fromkeys(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), value)


@pytest.mark.parametrize(
    ("uuids", "on_hip", "set_ones", "expected"),
    [
        (
            {"cuda:1": "GPU-b", "cuda:0": "GPU-a"}, False, {},
            {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"},
        ),
        ({"cuda:1": "", "cuda:0": ""}, False, {}, {"CUDA_VISIBLE_DEVICES": "1,0"}),
        (
            {"cuda:1": ""}, False, {"CUDA_VISIBLE_DEVICES": "5, 3"}, {"CUDA_VISIBLE_DEVICES": "3"},
        ),
        ({"cuda:1": "GPU-b"}, True, {}, hip("1")),
        ({"cuda:1": ""}, True, {"CUDA_VISIBLE_DEVICES": "5,3"}, hip("3")),
        (
            {"cuda:0": ""}, True, {"CUDA_VISIBLE_DEVICES": "5,3", "HIP_VISIBLE_DEVICES": "7"},
            hip("7"),
        ),
    ],
)  # fmt: skip
def test_a_child_process_is_shown_the_same_gpus(monkeypatch, uuids, on_hip, set_ones, expected):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_ones.items():
        monkeypatch.setenv(name, value)
    assert variables_for(uuids, on_hip=on_hip) == expected


@pytest.mark.parametrize(
    ("order", "value", "is_known"),
    [
        (None, "1,0", True),
        ("PCI_BUS_ID", "1,0", True),
        ("FASTEST_FIRST", None, True),
        ("FASTEST_FIRST", "GPU-bbbb2222,GPU-aaaa1", True),
        ("FASTEST_FIRST", "-1", True),
        ("FASTEST_FIRST", "1", False),
        ("FASTEST_FIRST", "GPU-bbbb2222,1", False),
    ],
)
def test_numbers_in_another_order_than_the_bus_are_not_guessed(
    driver, monkeypatch, order, value, is_known
):
    """CUDA would count the fastest GPU first, which NVML cannot tell."""
    for name, text in (("CUDA_DEVICE_ORDER", order), ("CUDA_VISIBLE_DEVICES", value)):
        if text is not None:
            monkeypatch.setenv(name, text)
        else:
            monkeypatch.delenv(name, raising=False)
    gpus = [info for info in list_devices() if info.kind == "cuda"]
    assert all(info.usable == is_known for info in gpus)
    if not is_known:
        assert gpus
        assert "CUDA_DEVICE_ORDER is FASTEST_FIRST" in gpus[0].reason
        assert cuda_status() == gpus[0].reason


def test_a_single_gpu_has_one_number_in_any_order(driver, monkeypatch):
    driver.gpus = driver.gpus[:1]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert list_devices()[0].usable
    assert cuda_status() == ""


@pytest.mark.parametrize(
    ("order", "value", "expected"),
    [
        ("", "", "PCI_BUS_ID"),
        ("FASTEST_FIRST", "", "PCI_BUS_ID"),
        ("FASTEST_FIRST", "GPU-aaaa", "PCI_BUS_ID"),
        ("FASTEST_FIRST", "1", "FASTEST_FIRST"),
    ],
)
def test_gpus_are_in_pci_order_unless_somebody_counted_in_another(order, value, expected):
    """Before torch is imported, as it reads the variables then."""
    set_ones = {"CUDA_DEVICE_ORDER": order, "CUDA_VISIBLE_DEVICES": value}
    others = {k: v for k, v in os.environ.items() if k not in set_ones}
    program = "import engine.hardware.environment, os, sys; assert 'torch' not in sys.modules; "
    program += "print(os.environ['CUDA_DEVICE_ORDER'])"
    found = subprocess.run(
        [sys.executable, "-c", program], env=others | {k: v for k, v in set_ones.items() if v},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == expected


@pytest.mark.parametrize(("loading", "expected"), [("EAGER", "32"), ("LAZY", ""), ("", "")])
def test_ranks_that_share_a_gpu_have_queues_enough(loading, expected):
    """Where kernels are loaded early they may wait for each other."""
    others = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    program = "import engine.hardware.environment, os; "
    program += "print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS', ''))"
    found = subprocess.run(
        [sys.executable, "-c", program], env=others | {"CUDA_MODULE_LOADING": loading},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == expected


def test_a_driver_without_gpus_is_told_apart(driver):
    driver.gpus = []
    assert cuda_status() == "There is an NVIDIA driver but no GPU; Tandem runs on the CPU."


@pytest.mark.parametrize(
    ("makers", "expected"),
    [
        (["nvidia"], "There is an NVIDIA GPU but no driver for it; install NVIDIA's driver"),
        (["intel", "nvidia"], "There is an NVIDIA GPU but no driver for it"),
        (["amd"], "The AMD GPU has too little dedicated memory, or no compute driver"),
        (["intel"], "Tandem can use NVIDIA and AMD GPUs, but not Intel GPUs; it runs on the CPU."),
        (["apple"], "but not Apple GPUs; it runs on the CPU."),
    ],
)
def test_without_a_driver_the_maker_of_the_gpu_is_told(no_driver, monkeypatch, makers, expected):
    adapters = [Adapter(maker) for maker in makers]
    monkeypatch.setattr("engine.hardware.devices.catalog.find_adapters", lambda: adapters)
    assert expected in cuda_status()


def test_a_gpu_that_torch_cannot_use_is_refused_with_the_command(driver, monkeypatch):
    use_build(monkeypatch, TorchBuild(True, "", version="2.15.0+cpu"))
    with pytest.raises(NoDevice, match="has no CUDA support") as caught:
        require_devices(["cuda:0"])
    assert caught.value.hint.startswith("Run: pip install --force-reinstall ")
    assert pickle.loads(pickle.dumps(caught.value)).hint == caught.value.hint


# --- the torch build


@pytest.mark.parametrize(
    ("build", "driver_cuda", "expected"),
    [
        (TorchBuild(True, "13.0"), 13000, ""),
        (TorchBuild(True, "12.8"), 12040, ""),
        (TorchBuild(True, "12.8"), 13000, ""),
        (TorchBuild(True, "unknown"), 12040, ""),
        (
            TorchBuild(True, "13.0"),
            12080,
            "supports CUDA 12, but this PyTorch build needs CUDA 13.0",
        ),
        (TorchBuild(True, ""), 13000, "this PyTorch build has no CUDA support"),
        (TorchBuild(False, ""), 13000, "but PyTorch is not"),
    ],
)
def test_a_build_that_does_not_fit_the_driver_is_explained(
    driver, monkeypatch, build, driver_cuda, expected
):
    use_build(monkeypatch, build)
    driver.cuda = driver_cuda
    gpu = list_devices()[0]
    assert gpu.usable == (not expected)
    assert cuda_status() == gpu.reason
    assert expected in gpu.reason


def find_build_with(monkeypatch, tmp_path, source: str | None, version: str = "") -> TorchBuild:
    """Run `find_torch_build` for an installation with this torch/version.py and package version."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    origin = tmp_path / "torch" / "__init__.py"
    origin.parent.mkdir()
    if source is not None:
        origin.with_name("version.py").write_text(source)
    spec = types.SimpleNamespace(origin=str(origin))
    monkeypatch.setattr(torch_build.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch_build.metadata, "version", lambda name: version)
    return find_torch_build()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip = None\n", ""),
        ("debug = False\ncuda: Optional[str] = '12.8'\n", "12.8"),
        ('cuda = "13.0"\n', "13.0"),
        ("nothing = 1\n", "unknown"),
    ],
)
def test_cuda_is_read_from_torchs_version_file(monkeypatch, tmp_path, source, expected):
    found = find_build_with(monkeypatch, tmp_path, source)
    assert (found.is_installed, found.cuda, found.hip) == (True, expected, "")


@pytest.mark.parametrize(
    ("version", "platform", "expected"),
    [
        ("2.13.0+cpu", "linux", ""),
        ("2.13.0+cu130", "win32", "unknown"),
        ("2.13.0", "linux", "unknown"),
        ("2.13.0", "win32", ""),
        ("2.13.0", "darwin", ""),
    ],
)
def test_without_the_version_file_the_package_version_tells(
    monkeypatch, tmp_path, version, platform, expected
):
    monkeypatch.setattr(torch_build.sys, "platform", platform)
    found = find_build_with(monkeypatch, tmp_path, None, version)
    assert found == TorchBuild(True, expected, version=version)


def test_a_build_for_amd_is_told_apart(monkeypatch, tmp_path):
    source = "__version__ = '2.13.0+rocm7.2'\ncuda: Optional[str] = None\nhip = '7.2.53211'\n"
    found = find_build_with(monkeypatch, tmp_path, source)
    assert found == TorchBuild(True, "", "7.2.53211", "2.13.0+rocm7.2")
    assert found.has_gpus


def test_a_build_for_amd_is_told_by_its_package_version(monkeypatch, tmp_path):
    found = find_build_with(monkeypatch, tmp_path, None, "2.13.0+rocm7.2")
    assert (found.cuda, found.hip) == ("", "7.2")


def test_an_imported_torch_is_asked_itself(monkeypatch):
    version = types.SimpleNamespace(cuda="12.6")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=version))
    assert find_torch_build() == TorchBuild(True, "12.6")


def test_a_missing_torch_is_noticed(monkeypatch):
    def not_found(name):
        raise torch_build.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(torch_build.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch_build.metadata, "version", not_found)
    assert find_torch_build() == TorchBuild(False, "")


def test_devices_and_sampler_never_import_torch():
    code = (
        "import sys, engine.decoding.sampling.sampler, engine as d; "
        "d.list_devices(); d.cuda_status(); "
        "d.DeviceMonitor().snapshot(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- names


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("cpu", ["cpu"]),
        ("cpu,cpu", ["cpu", "cpu"]),
        (" CUDA:0 , gpu:1", ["cuda:0", "cuda:1"]),
        (["cuda:10", "cpu"], ["cuda:10", "cpu"]),
        (("cuda:007",), ["cuda:7"]),
    ],
)
def test_device_names_are_read(written, expected):
    assert parse_devices(written) == expected


def test_gpus_are_named_by_their_uuids_or_what_these_begin_with(driver, monkeypatch):
    """In capital letters or small ones; the number is the one that the GPU has now."""
    assert parse_devices("GPU-aaaa1111,cpu,gpu-BBBB") == ["cuda:2", "cpu", "cuda:0"]
    assert parse_devices(["GPU-aaaa3", "GPU-aaaa3333"]) == ["cuda:1", "cuda:1"], "two ranks"
    assert parse_target(" GPU-bbbb2222 ") == "cuda:0"
    assert parse_target("#1") == "#1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa1111")
    assert parse_devices("GPU-aaaa") == ["cuda:0"], "the only one that is shown"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("GPU-aaaa", "the UUIDs of cuda:1 and cuda:2 start with this; write more of it"),
        (
            "GPU-cccc",
            "this machine has cuda:0 with GPU-bbbb2222, cuda:1 with GPU-aaaa3333 and cuda:2 with",
        ),
        ("MIG-3f2a", "part of a GPU cannot be used; name the whole GPU"),
        ("GPU-xyz", "write cpu, or cuda:0 for the first GPU, or a GPU's UUID"),
        ("GPU-", "or a GPU's UUID"),
    ],
)
def test_a_uuid_that_names_no_single_gpu_is_refused(driver, written, expected):
    for parse in (parse_devices, parse_target):
        with pytest.raises(NoDevice, match=re.escape(expected)):
            parse(written)


def test_a_uuid_without_a_driver_is_refused_with_the_cause(no_driver):
    with pytest.raises(NoDevice, match="No NVIDIA driver"):
        parse_devices("GPU-aaaa1111")


@pytest.mark.parametrize("written", ["cuda", "cuda:", "cuda:-1", "tpu:0", "", "cpu,,cpu", "0", []])
def test_other_device_names_are_refused_with_a_sentence(written):
    with pytest.raises(NoDevice, match=r"(cpu|cuda:0)"):
        parse_devices(written)


def test_required_devices_come_back_in_order_and_as_often(driver):
    assert [d.id for d in require_devices(["cuda:1", "cpu", "cuda:1"])] == [
        "cuda:1",
        "cpu",
        "cuda:1",
    ]


def test_a_required_device_that_is_not_here_is_refused(driver):
    with pytest.raises(NoDevice, match=r"no device 'cuda:5'.*cuda:0, cuda:1, cuda:2, cpu"):
        require_devices(["cpu", "cuda:5"])


def test_a_gpu_that_vanished_is_refused(driver):
    """After it was listed: the others keep their numbers or get new ones, so it is asked anew."""
    assert len(require_devices(["cuda:2"])) == 1
    driver.gpus = [gpu for gpu in driver.gpus if gpu.name != "RTX 4090"]
    with pytest.raises(NoDevice, match=r"no device 'cuda:2'.*cuda:0, cuda:1, cpu"):
        require_devices(["cuda:2"])
    with pytest.raises(
        NoDevice, match="this machine has cuda:0 with GPU-bbbb2222 and cuda:1 with GPU-aaaa33"
    ):
        parse_devices("GPU-aaaa1111")


def test_a_required_gpu_without_a_driver_is_refused_with_the_cause(no_driver):
    with pytest.raises(NoDevice, match="No NVIDIA driver"):
        require_devices(["cuda:0"])


def test_a_required_gpu_that_is_not_usable_is_refused_with_the_cause(driver, monkeypatch):
    use_build(monkeypatch, TorchBuild(True, ""))
    with pytest.raises(NoDevice, match="no CUDA support"):
        require_devices(["cuda:0"])
