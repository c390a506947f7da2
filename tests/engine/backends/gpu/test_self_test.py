"""Kernels are used only where they give the right numbers."""

from collections.abc import Iterator

import pytest
import torch

from engine.backends.gpu import self_test
from engine.backends.gpu.matmul import gemv
from engine.hardware import backend_choice
from engine.runtime import kernel_proof

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend_choice, "_refused", {})
    clear = self_test.problem_of.cache_clear
    clear()
    yield
    clear()


def test_kernels_that_work_are_used(device: str) -> None:
    assert self_test.problem_of(torch.device(device)) == ""


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gemv.product
    monkeypatch.setattr(gemv, "product", lambda x, weight: right(x, weight) * 1.1)
    assert "gave wrong results (relative error 0.1" in self_test.problem_of(CPU)


def test_a_compiler_that_fails_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("ptxas died\nin many lines")

    monkeypatch.setattr(self_test, "CHECKS", {"norms": fail})
    assert self_test.problem_of(CPU) == "RuntimeError: ptxas died"


def test_a_refused_gpu_has_no_kernels_and_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_proof, "kernels_for", lambda name: "gpu")
    monkeypatch.setattr(self_test, "problem_of", lambda device: "it computes nonsense")
    (found,) = kernel_proof.prove_kernels(["cpu", "cuda:0", "cuda:0"]).current
    assert (found.kind, found.devices) == ("kernels", ("cuda:0",))
    assert found.sentence.startswith(
        "On cuda:0, PyTorch computes instead of Tandem's kernels: it computes nonsense. "
    )
    assert backend_choice.kernels_for("cuda:0") == ""
    assert kernel_proof.prove_kernels(["cuda:0"]).current == (found,)


@pytest.mark.parametrize(
    ("backend", "has_triton", "kind", "why", "helps"),
    [
        ("reference", True, "kernels", "TANDEM_BACKEND is set to reference", "Unset the "),
        ("eager", True, "graph", "TANDEM_BACKEND is set to eager", "Unset the "),
        ("graph", False, "kernels", "Triton is not installed", "Run: pip install triton"),
    ],
)
def test_a_gpu_that_is_slow_by_choice_or_for_lack_of_triton_says_so(
    backend: str, has_triton: bool, kind: str, why: str, helps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(backend_choice.VARIABLE, backend)
    monkeypatch.setattr(backend_choice, "has_triton", lambda: has_triton)
    monkeypatch.setattr(self_test, "problem_of", lambda device: "")
    (found,) = kernel_proof.prove_kernels(["cpu", "cuda:0"]).current
    assert (found.kind, found.why) == (kind, why)
    assert found.help.startswith(helps)


def test_a_gpu_whose_kernels_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "problem_of", lambda device: "")
    assert kernel_proof.prove_kernels(["cpu", "cuda:0"]).current == ()
