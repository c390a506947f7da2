"""Findings about links while a model is loaded are among its warnings."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LoadParams, load_model
from engine.backends.cpu.thread_comm import ThreadGroup
from engine.hardware.devices.topology import Routes
from engine.hardware.fallbacks import Fallbacks
from engine.runtime.loader import make_group
from tests.helpers.tiny_gguf import tiny_gguf

NOTE = "Kernels on cuda:0 cannot write to cuda:1; copies are used instead."


def test_a_person_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object) -> ThreadGroup:
        group = ThreadGroup()
        group.notes = (NOTE,)
        return group

    path = tiny_gguf(tmp_path / "m.gguf", n_layer=1)
    with load_model(path, n_ctx=8) as model:
        assert NOTE not in model.warnings
    monkeypatch.setattr("engine.runtime.thread_runtime.make_group", made)
    with load_model(path, n_ctx=8) as model:
        assert NOTE in model.warnings


def test_ways_are_found_for_gpus_that_hold_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for with the p2p mode of the load."""
    pytest.importorskip("triton")
    asked = []

    def find(devices: list[str], p2p: str) -> Routes:
        asked.append((devices, p2p))
        return Routes(notes=(NOTE,))

    monkeypatch.setattr("engine.runtime.loader.find_routes", find)
    monkeypatch.setattr("engine.runtime.loader.kernels_for", lambda device: "gpu")
    held = [
        SimpleNamespace(device=f"cuda:{n}", storage="kernels", memory=SimpleNamespace(total=size))
        for n, size in enumerate((1, 0, 2))
    ]
    params = LoadParams("m", ("cuda:0", "cuda:1", "cuda:2"), p2p="off")
    devices = [torch.device("cpu")] * 3
    plan: Any = SimpleNamespace(devices=held)
    group = make_group(plan, devices, params, Fallbacks())
    assert asked == [(["cuda:0", "cuda:2"], "off")]
    assert group.notes == (NOTE,)
