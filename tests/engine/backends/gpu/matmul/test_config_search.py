"""The search for kernel configurations, with interpreted kernels and fake times."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine import Cancelled, EngineError, KernelTuning, tune_kernels
from engine.backends.gpu.launch import configs
from engine.backends.gpu.launch.configs import (
    INTERPRETER,
    KernelTarget,
    config_of,
    configs_file,
    key_of,
    read_configs,
    save_configs,
)
from engine.backends.gpu.matmul import config_search as module
from engine.backends.gpu.matmul.config_search import (
    ConfigSearch,
    MatrixKind,
    facts_of,
    hill_climb,
    matrices_of,
    neighbours,
    search_cases,
)
from engine.formats.gguf.reader import GGUFFile
from engine.runtime.measuring import kernel_tuning
from engine.runtime.measuring.kernel_tuning import tunable
from tests.helpers.fake_nvml import install, three_gpus
from tests.helpers.hollow import hollow_moe
from tests.helpers.tiny_gguf import tiny_gguf

CPU = torch.device("cpu")
H200 = KernelTarget("nvidia", 90, 132)
Q4_K, Q8_0, F16 = 12, 8, 1
SMALL = [
    MatrixKind(Q4_K, 32, 256), MatrixKind(Q8_0, 48, 64), MatrixKind(F16, 16, 64, torch.float16),
    MatrixKind(Q8_0, 16, 64, n_expert=4),
]  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    monkeypatch.setattr(module, "DISTINCT_BYTES", 1)
    monkeypatch.setattr(module, "EXPERT_ROWS", (16,))
    yield
    configs.use_found({})


class FakeClock:
    """Timer with given measurements, the last one repeated."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = seconds
        self.n_asked = 0

    def __call__(self, device: torch.device, compute: Callable[[], object], n: int) -> float:
        compute()
        self.n_asked += 1
        return self._seconds[min(self.n_asked, len(self._seconds)) - 1]


def quiet(n_done: int, n_total: int, what: str) -> None:
    assert 0 <= n_done < n_total
    assert what


# --- the search


def test_it_climbs_to_the_best_neighbour() -> None:
    def seconds_of(config: configs.Config) -> float:
        if config["num_warps"] == 16:
            return math.inf
        return abs(math.log2(config["num_warps"]) - 3) + abs(config["num_stages"] - 4) + 1

    start = {"num_warps": 1, "num_stages": 2, "other": 5}
    best, best_s, first_s, n_tried = hill_climb(start, seconds_of)
    assert best == {"num_warps": 8, "num_stages": 4, "other": 5}
    assert (best_s, first_s) == (1, 6)
    assert n_tried < 30
    flat, *_ = hill_climb(start, lambda config: 1.0)
    assert flat == start, "an equally fast one replaces nothing"


def test_neighbours_are_within_bounds() -> None:
    found = list(neighbours({"num_warps": 16, "num_stages": 1, "parts": 1, "mystery": 3}))
    assert found == [
        {"num_warps": 8, "num_stages": 1, "parts": 1, "mystery": 3},
        {"num_warps": 16, "num_stages": 1, "parts": 2, "mystery": 3},
        {"num_warps": 16, "num_stages": 2, "parts": 1, "mystery": 3},
    ]


def test_products_ask_under_the_facts_that_are_searched() -> None:
    """Otherwise search results would never be used."""
    for kernel, matrix, n_token in search_cases(SMALL):
        facts = facts_of(kernel, INTERPRETER, matrix, n_token)
        rule = dict(config_of(INTERPRETER, kernel, **facts))
        asked: list[object] = []
        product = module.ProductCopies(module.SearchCase(kernel, facts, matrix, n_token), CPU)

        class Watched(dict):  # type: ignore[type-arg]
            def get(self, key: object, default: object = None) -> object:
                asked.append(key)  # noqa: B023 used at once
                return super().get(key, default)

        found, configs._found = configs._found, Watched()
        try:
            product.compute_first(1)
        finally:
            configs._found = found
        assert key_of(INTERPRETER, kernel, facts) in asked, (kernel, facts)
        assert set(rule) & set(module.BOUNDS), "and there is something to try"


def test_what_is_faster_is_kept_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKEN_COUNTS", (16,))
    monkeypatch.setattr(module, "BOUNDS", {"num_warps": (1, 16)})
    clock = FakeClock(9.0, 5.0, 7.0)
    found = ConfigSearch(CPU, clock, lambda: False).run(SMALL[:1], quiet)
    assert [tuning.kernel for tuning in found] == ["few", "few_parts", "many"]
    first = found[0]
    assert (first.rule_s, first.best_s) == (9.0, 5.0)
    assert first.n_tried > 1
    assert config_of(INTERPRETER, "few", **first.facts) == first.config
    assert first.config != configs.RULES["few"](INTERPRETER, **first.facts)
    assert all(tuning.best_s == tuning.rule_s == 7.0 for tuning in found[1:])
    path = configs_file()
    assert path is not None
    assert len(json.loads(path.read_text())["configs"]) == 1


def test_what_cannot_be_computed_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FakeClock):
        def __call__(self, device: torch.device, compute: Callable[[], object], n: int) -> float:
            found = super().__call__(device, compute, n)
            if self.n_asked > 1:
                raise RuntimeError("out of resources")
            return found

    monkeypatch.setattr(module, "search_cases", lambda matrices: [("few", SMALL[1], 1)])
    (tuning,) = ConfigSearch(CPU, Failing(1.0), lambda: False).run(SMALL, quiet)
    assert (tuning.best_s, tuning.rule_s) == (1.0, 1.0)
    monkeypatch.setattr(module, "is_same", lambda a, b: a is b)
    (tuning,) = ConfigSearch(CPU, FakeClock(2.0, 1.0), lambda: False).run(SMALL, quiet)
    assert tuning.best_s == 2.0, "nor does what computes something else count"


def test_it_can_be_cancelled() -> None:
    asked = iter([False, False, True])
    with pytest.raises(Cancelled, match="Tuning kernels was cancelled"):
        ConfigSearch(CPU, FakeClock(1.0), lambda: next(asked)).run(SMALL, quiet)


def test_the_matrices_of_a_model(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_embd=64)
    with GGUFFile.open(path) as file:
        found = matrices_of(file)
    assert len(set(found)) == len(found)
    assert {matrix.type_number for matrix in found if matrix.dtype is None} == {Q8_0}
    assert not any(matrix.n_expert for matrix in found)
    path = hollow_moe(tmp_path / "moe.gguf", n_layer=1, n_embd=256, n_head=4, n_head_kv=4)
    with GGUFFile.open(path) as file:
        experts = {matrix[1:] for matrix in matrices_of(file) if matrix.n_expert}
    assert experts == {(1536, 256, None, 128), (256, 1536, None, 128)}


# --- the file


def test_what_is_found_outlives_the_program() -> None:
    path = configs_file()
    key = key_of(H200, "few_parts", {"n_blocks": 128, "n_rows": 4096, "num_warps": 4})
    other = key_of(H200, "few", {"n_blocks": 128})
    save_configs(path, {key: {"parts": 4}})
    save_configs(path, {other: {"num_warps": 2, "unroll": 4}})
    assert read_configs(path) == {key: {"parts": 4}, other: {"num_warps": 2, "unroll": 4}}
    configs.use_found(read_configs(path))
    assert config_of(H200, "few", n_blocks=128) == {"num_warps": 2, "unroll": 4}
    assert config_of(KernelTarget("nvidia", 86, 82), "few", n_blocks=128) == configs.RULES["few"](
        H200, n_blocks=128
    )


def test_rows_of_activations_count_as_powers_of_two() -> None:
    keys = [key_of(H200, "many", {"n_token": n, "low": 4}) for n in (9, 16, 17, 32, 33)]
    assert keys[0] == keys[1] != keys[2] == keys[3] != keys[4]


@pytest.mark.parametrize(
    "damage",
    [
        {"maker": "somebody"}, {"kernel": "nothing"}, {"facts": []}, {"facts": {"n_blocks": "x"}},
        {"capability": None}, {"n_sm": "many"}, {"config": None}, {"config": {"num_warps": 2.5}},
        {"config": {"num_warps": -1}},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_left_out(damage: dict[str, object]) -> None:
    path = configs_file()
    assert path is not None
    save_configs(path, {key_of(H200, "few", {"n_blocks": 128}): {"num_warps": 2, "unroll": 4}})
    document = json.loads(path.read_text())
    document["configs"][0].update(damage)
    document["configs"].append("rubbish")
    path.write_text(json.dumps(document))
    assert read_configs(path) == {}


def test_another_version_begins_anew() -> None:
    path = configs_file()
    assert path is not None
    save_configs(path, {key_of(H200, "few", {"n_blocks": 128}): {"num_warps": 2, "unroll": 4}})
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "version": "0.0"}))
    assert read_configs(path) == {}
    path.write_text("[]")
    assert read_configs(path) == {}


# --- the command


def test_without_a_gpu_there_is_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(EngineError, match="There is no GPU with kernels to tune: "):
        tune_kernels("model.gguf")


def test_only_gpus_are_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    install(three_gpus(), monkeypatch)
    assert tunable() == ["cuda:0", "cuda:1", "cuda:2"]
    assert tunable(["cpu", "cuda:1"]) == ["cuda:1"]
    with pytest.raises(EngineError, match="Only GPUs have kernels to tune") as caught:
        tunable(["cpu"])
    assert caught.value.hint == "Specify cuda:0, or no device."
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with pytest.raises(EngineError, match="TANDEM_BACKEND=reference"):
        tunable()


def test_a_search_goes_over_all_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_embd=64)
    install(three_gpus(), monkeypatch)
    monkeypatch.setattr(module, "prepare", lambda: "own")
    monkeypatch.setattr(kernel_tuning, "torch_device", torch.device)
    asked: list[str] = []

    class FakeSearch:
        def __init__(self, device: torch.device, *_: object) -> None:
            asked.append(str(device))

        def run(self, matrices: list[MatrixKind], on_progress: object) -> list[KernelTuning]:
            return [KernelTuning(asked[-1], "few", {}, 2.0, 1.0, {}, len(matrices))]

    monkeypatch.setattr(module, "ConfigSearch", FakeSearch)
    found = tune_kernels(path, ["cuda:2", "cuda:0"])
    assert [tuning.device for tuning in found] == asked == ["cuda:2", "cuda:0"]
    assert found[0].n_tried > 1
