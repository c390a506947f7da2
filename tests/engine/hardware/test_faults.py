"""Faults after which a GPU is lost: recognised, marked, and not taken for a lack of memory."""

import pytest
import torch

from engine.errors import CommError, DeviceStopped, EngineError, KernelError
from engine.hardware import host_memory, torch_devices
from engine.hardware.cuda_api import CudaApi
from engine.hardware.devices.catalog import list_devices, parse_devices, require_devices
from engine.hardware.devices.visibility import mark_stopped, stopped_gpus
from engine.hardware.faults import FAULT_CODES, explain_faults, fault_of, stopped_error
from engine.hardware.host_memory import HostTensor
from engine.hardware.torch_devices import is_out_of_memory, release_cached_memory, torch_device
from tests.helpers.dead_card import ASSERT, fault, forget_stopped, install_dead_cards
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fake_nvml import install, three_gpus

CPU, FIRST, SECOND = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_stopped(monkeypatch)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError(ASSERT), "device-side assert triggered"),
        (fault("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"),
         "an illegal memory access was encountered"),
        (fault("HIP error: unspecified launch failure"), "unspecified launch failure"),
        (fault("something else", 719), "unspecified launch failure"),
        (fault("something else", 214), "uncorrectable ECC error encountered"),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), "misaligned address"),
        (RuntimeError("CUDA error: unknown error"), "unknown error"),
        (RuntimeError("CUDA driver: GPU 0000:01:00.0 has fallen off the bus"),
         "fallen off the bus"),
        (KernelError("cuda:0", "NVIDIA's driver reports 'invalid program counter'"),
         "invalid program counter"),
        (DeviceStopped("cuda:0", "hardware stack error"), "hardware stack error"),
    ],
    ids=str,
)  # fmt: skip
def test_faults_are_recognised(error: Exception, why: str) -> None:
    assert fault_of(error) == why
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        fault("CUDA error: out of memory", 2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        fault("CUDA error: invalid argument", 1),
        fault("CUDA error: operation not permitted when stream is capturing", 900),
        fault("CUDA error: too many resources requested for launch", 701),
        fault("CUDA error: peer access is already enabled", 704),
        RuntimeError("an unknown error of something else"),
        EngineError("The system does not allow pinned memory that several GPUs can write to."),
        ValueError("misaligned address"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors_are_no_faults(error: BaseException) -> None:
    assert fault_of(error) == ""
    assert stopped_error(error, [FIRST]) is None
    assert not stopped_gpus()


def test_the_cause_of_an_error_counts() -> None:
    error = KernelError("cuda:0", "it does not compile")
    error.__cause__ = EngineError("No kernel.")
    error.__cause__.__cause__ = fault()
    assert fault_of(error) == "device-side assert triggered"
    error.__cause__.__cause__ = error
    assert fault_of(error) == "", "a circle ends"


@pytest.mark.parametrize("code", sorted(FAULT_CODES))
def test_faults_in_calls_of_the_driver_are_recognised_by_their_number(code: int) -> None:
    with pytest.raises(EngineError, match="made-up error") as caught:
        CudaApi(FakeCuda(failing=("cuMemAlloc_v2", code))).allocate(64, 0)
    assert fault_of(caught.value) == FAULT_CODES[code]
    with pytest.raises(EngineError) as caught:
        CudaApi(FakeCuda(failing=("cuMemAlloc_v2", 2))).allocate(64, 0)
    assert fault_of(caught.value) == ""


def streams(monkeypatch: pytest.MonkeyPatch, *lost: torch.device) -> None:
    """Let the streams of some GPUs report a fault."""

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def query(self) -> bool:
            if self._device in lost:
                raise fault("CUDA error: misaligned address")
            return False

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)


def test_the_gpu_that_reports_the_fault_is_named_and_not_the_one_at_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams(monkeypatch, SECOND)
    with pytest.raises(DeviceStopped) as caught, explain_faults([CPU, FIRST, SECOND]):
        raise fault()
    assert str(caught.value) == "cuda:1 has stopped working: misaligned address."
    assert caught.value.hint == "Restart Tandem to use cuda:1 again; models still run on the CPU."
    assert stopped_gpus() == {"cuda:1": "misaligned address"}
    streams(monkeypatch)
    found = stopped_error(fault(), [FIRST, SECOND])
    assert found is not None
    assert found.device == "cuda:1", "it stays the one"


def test_where_none_reports_it_the_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    found = stopped_error(fault(), [CPU, SECOND, FIRST])
    assert found is not None
    assert (found.device, found.why) == ("cuda:1", "device-side assert triggered")
    assert stopped_error(fault(), [CPU]) is None


def test_a_rank_that_missed_another_is_asked_whether_a_gpu_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missed = CommError(1, "did not answer the other devices in time", "cuda:1")
    streams(monkeypatch)
    assert stopped_error(missed, [FIRST, SECOND]) is None
    streams(monkeypatch, SECOND)
    found = stopped_error(missed, [FIRST, SECOND])
    assert found is not None
    assert (found.device, found.why) == ("cuda:1", "misaligned address")


def test_a_stopped_gpu_is_shown_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(three_gpus(), monkeypatch)
    mark_stopped("cuda:1", "misaligned address")
    first, second, _, cpu = list_devices()
    assert first.usable
    assert cpu.usable
    assert not second.usable
    assert second.reason == (
        "cuda:1 has stopped working: misaligned address. "
        "Restart Tandem to use cuda:1 again; models still run on the CPU."
    )
    assert parse_devices("cuda:1") == ["cuda:1"]
    with pytest.raises(DeviceStopped, match="cuda:1 has stopped working: misaligned address"):
        require_devices(["cpu", "cuda:1"])
    with pytest.raises(DeviceStopped):
        torch_device("cuda:1")


def test_a_stopped_gpu_is_not_asked_to_free_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would free the memory of all GPUs at once, which fails."""
    monkeypatch.setattr(torch_devices, "_hanging", set())
    _, called = install_dead_cards(monkeypatch)
    mark_stopped("cuda:1", "misaligned address")
    release_cached_memory([CPU, FIRST, SECOND])
    assert called == []


@pytest.mark.parametrize("is_marked", [True, False])
def test_pinned_memory_is_dropped_quietly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_marked: bool
) -> None:
    _, called = install_dead_cards(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "_pin", lambda held, device: True)
        held = HostTensor((16,), torch.uint8, FIRST)
    if is_marked:
        mark_stopped("cuda:0", "misaligned address")
    del held
    assert called == ([] if is_marked else ["device"])
    assert ("cleanup failed" in caplog.text) == (not is_marked)
