"""Logits against llama.cpp's with parts of a model in unusual places."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from engine import load_model
from engine.formats.gguf.reader import GGUFFile
from engine.generation.solo_sequence import solo_sequence
from engine.model.sharding.shares import movable_tensors
from tests.helpers.golden import (
    MIN_BAR,
    TOLERANCE,
    Case,
    golden_error,
    golden_logits,
    golden_models,
    golden_path,
    kernel_bars,
    nmse,
    routed_models,
)


@dataclass(frozen=True)
class Mode:
    """One pattern of shares.

    Attributes:
        overrides: those that match nothing in a model are left out.
    """

    case: Case
    overrides: tuple[tuple[str, str], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


MIXERS, FEEDERS = r"attn|ssm|shortconv", r"ffn_(gate|up|down|gate_up)(_exps|_shexp)?\."
EVEN, ODD = (r"^blk\.\d*" + f"[{digits}]" + r"\." for digits in ("02468", "13579"))
MODES = {
    "groups of 2 and 1": Mode(
        Case((3, 1, 2), "groups", chunk=9, n_decode=6), options={"groups": (2, 1)}
    ),
    "groups of 1 and 2": Mode(
        Case((1, 1, 1), "groups", chunk=12, n_decode=4), options={"groups": (1, 2)}
    ),
    "groups with an idle rank": Mode(Case((0, 1, 2, 1), "groups"), options={"groups": (2, 2)}),
    "experts on one rank": Mode(Case((1, 1), n_decode=4), (("_exps", "#1"),)),
    "first experts on the CPU": Mode(Case((0, 2, 1), chunk=11), options={"n_cpu_moe": 1}),
    "first block on the CPU": Mode(Case((0, 2, 1), n_decode=5), options={"n_cpu_blocks": 1}),
    "first blocks on the CPU, by groups": Mode(
        Case((0, 2, 1, 1), "groups", n_decode=4), options={"n_cpu_blocks": 1, "groups": (3, 1)}
    ),
    "attention and FFN on ranks of their own": Mode(
        Case((1, 1), chunk=7, n_decode=6), ((MIXERS, "#0"), (FEEDERS, "#1"))
    ),
    "blocks by turns": Mode(Case((1, 1, 1), n_decode=5), ((EVEN, "#2"), (ODD, "#0"))),
    "ends elsewhere": Mode(
        Case((1, 0, 0), chunk=10, n_decode=4), (("token_embd", "#1"), (r"^output\.", "#2"))
    ),
}
SOME = [
    "deepseek3-mla-q4_k_m", "falcon-h1-q4_k_m", "gemma4-e2b-q5_1", "gemma4-moe-q4_k_m",
    "glm4moe-q4_k_m", "gptoss-mxfp4", "kimi-linear-q4_k_m", "llama-gqa-q4_k_m",
    "mixtral-q4_k_m", "nemotron_h_moe-q4_k_m", "olmo2-q4_k_m", "qwen3next-q4_k_m",
]  # fmt: skip
ON_KERNELS = ["gptoss-mxfp4", "llama-gqa-q4_k_m", "mixtral-q4_k_m", "qwen35-q4_k_m"]


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return each model with each mode that it has parts for."""
    routed = routed_models()
    return [(n, mode) for n in names for mode in MODES if n in routed or "experts" not in mode]


def error_of(name: str, mode: Mode) -> float:
    """Return the NMSE of a model's logits."""
    with GGUFFile.open(golden_path(f"{name}.gguf")) as file:
        movable = movable_tensors(tuple(file.tensors), ())
    found = (movable.matching(pattern) for pattern, _ in mode.overrides)
    overrides = [
        override
        for override, parts in zip(mode.overrides, found, strict=True)
        if parts.blocks or parts.ends
    ]
    assert bool(overrides) == bool(mode.overrides)
    return golden_error(name, mode.case, overrides=overrides, **mode.options)


@pytest.mark.parametrize(("name", "mode"), pairs(SOME))
def test_logits_equal_llama_cpp_wherever_parts_lie(name: str, mode: str) -> None:
    assert error_of(name, MODES[mode]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), pairs(golden_models()) or [("none", "none")])
def test_logits_of_all_models_equal_llama_cpp(name: str, mode: str) -> None:
    assert error_of(name, MODES[mode]) <= TOLERANCE


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "mode"), pairs(ON_KERNELS))
def test_the_kernels_are_as_close_wherever_parts_lie(name: str, mode: str) -> None:
    assert error_of(name, MODES[mode]) <= kernel_bars().get(name, MIN_BAR)


STATIONS: tuple[dict[str, Any], ...] = (
    {"devices": ("cpu",) * 3, "split_mode": "groups", "groups": (2, 1)},
    {"devices": ("cpu",) * 3, "split_mode": "groups", "groups": (1, 2), "split": (2.0, 1.0, 1.0)},
    {"devices": ("cpu",) * 2, "split": (0.0, 1.0), "n_cpu_blocks": 1},
    {"devices": ("cpu",) * 2, "split": (0.0, 1.0), "n_cpu_moe": 1, "kv_on_host": True},
    {"devices": ("cpu",) * 3, "overrides": (("attn", "#2"), ("_exps", "#0"))},
    {"devices": ("cpu",), "reserve": (("cpu", 1 << 20),)},
)
"""Splits to which a loaded model is changed, one after the other."""


def error_on_the_way(name: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the NMSE where each mode computes tokens after those that other modes have cached."""
    monkeypatch.setattr(
        "engine.runtime.loader.keeps_kv_on_host", lambda params, _: params.kv_on_host
    )
    ids, expected = golden_logits(name)
    is_routed = name in routed_models()
    stations = [s for s in STATIONS if is_routed or not ("n_cpu_moe" in s or "_exps" in str(s))]
    step, rows = len(ids) // (len(stations) + 1), []
    with load_model(golden_path(f"{name}.gguf"), n_ctx=len(ids), kv_type="f32") as model:
        plain = model.params
        for number, station in enumerate(({}, *stations)):
            model.split_as(replace(plain, **station))
            stop = len(ids) if number == len(stations) else (number + 1) * step
            with solo_sequence(model.scheduler, model.runtime.runner) as sequence:
                sequence.hold(ids[: number * step])
                assert len(sequence.ids) == number * step, "the rest of it was kept"
                rows += sequence.compute(ids[number * step : stop - 1], 0)
                rows += sequence.compute(ids[stop - 1 : stop], 0)
            assert len(model.memory()) == len(model.params.all_devices)
    return nmse(np.concatenate(rows), expected)


@pytest.mark.parametrize("name", ["gemma4-e2b-q5_1", "mixtral-q4_k_m", "qwen35moe-q4_k_m"])
def test_a_conversation_goes_on_in_every_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_on_the_way(name, monkeypatch) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", golden_models() or ["none"])
def test_a_conversation_with_any_model_goes_on_in_every_mode(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error_on_the_way(name, monkeypatch) <= TOLERANCE


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["llama-gqa-q4_k_m", "mixtral-q4_k_m", "qwen35moe-q4_k_m"])
def test_the_kernels_go_on_in_every_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_on_the_way(name, monkeypatch) <= kernel_bars().get(name, MIN_BAR)


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ["llama-gqa-q4_k_m", "deepseek3-mla-q4_k_m", "gemma4-e2b-q5_1"])
def test_keys_and_values_in_host_memory_change_nothing(
    name: str, kv_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU does it, here with the CPU in its place."""
    case = Case((3, 1, 2), chunk=7, n_decode=5)
    at_home = golden_error(name, case, kv_type=kv_type)
    monkeypatch.setattr("engine.runtime.loader.keeps_kv_on_host", lambda params, device: True)
    assert golden_error(name, case, kv_type=kv_type) == at_home
