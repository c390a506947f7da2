"""Kernels are used only where they give the right numbers."""

from collections.abc import Iterator

import pytest
import torch

from engine import backend, machine
from engine.gpu import few, probe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend, "_refused", {})
    clear = probe.problem_of.cache_clear
    clear()
    yield
    clear()


def test_kernels_that_work_are_used(device: str) -> None:
    assert probe.problem_of(torch.device(device)) == ""


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = few.product
    monkeypatch.setattr(few, "product", lambda x, weight: right(x, weight) * 1.1)
    assert "came out wrong, by 0.1" in probe.problem_of(CPU)


def test_a_compiler_that_fails_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("ptxas died\nin many lines")

    monkeypatch.setattr(probe, "_norm", fail)
    assert probe.problem_of(CPU) == "RuntimeError: ptxas died"


def test_a_refused_gpu_has_no_kernels_and_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "kernels_for", lambda name: "gpu")
    monkeypatch.setattr(probe, "problem_of", lambda device: "it computes nonsense")
    (note,) = machine.prove_kernels(["cpu", "cuda:0", "cuda:0"])
    assert note == "cuda:0 computes with PyTorch's kernels, which are slower: it computes nonsense."
    assert backend.kernels_for("cuda:0") == ""
    assert machine.prove_kernels(["cuda:0"]) == (note,)
