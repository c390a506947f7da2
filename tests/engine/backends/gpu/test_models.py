"""Whole models by the kernels for GPUs, which Triton interprets: loaded, split, asked, repeated."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from engine import EngineError, Model, SamplingParams, TokenText, load_model
from engine.backends.cpu.backend import CpuBackend
from engine.backends.cpu.thread_comm import ThreadGroup
from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.comm.one_shot import OneShotGroups
from engine.backends.gpu.launch.graph import NotRepeatable
from engine.errors import CommError
from engine.hardware import backend_choice
from engine.planning.footprint import x_bytes
from engine.runtime.loader import RankBuilder
from engine.runtime.rank import Rank, Replay
from tests.helpers.golden import nmse
from tests.helpers.hf_models import FAMILIES
from tests.helpers.passes import forward_alone
from tests.helpers.sampled_rows import check_rows
from tests.helpers.tiny_gguf import least_gguf, tiny_gguf

BAR = 1e-3
"""Largest NMSE against exact logits: activations are rounded to bytes, the cache to F16."""

IDS = [5, 9, 33, 12]
QUICK = ("qwen3next",)
"""Family with rare features: linear attention, experts, and a shared expert."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


def singly(model: Model, ids: list[int]) -> np.ndarray:
    return np.stack([forward_alone(model.runtime.runner, [t], n)[0] for n, t in enumerate(ids)])


def never_repeated(model: Model) -> None:
    model.runtime.runner.drop_recordings()
    model.runtime.runner.n_single[1] = 1000


def answer(model: Model, **settings: object) -> list[int]:
    params = SamplingParams(max_tokens=3, ignore_eos=True, **settings)
    events = model.generate(IDS[:2], params)
    return [token for event in events if isinstance(event, TokenText) for token in event.ids]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return least_gguf(tmp_path_factory.mktemp("models") / "m.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("split", [[1], [1, 1]], ids=str)
def test_keys_and_values_of_different_types(
    tmp_path: Path, split: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a prompt and single tokens; kernels are for the pair, so nothing falls back."""
    sizes = {"head_dim": 32, "n_head": 2, "n_head_kv": 2}
    path, options = tiny_gguf(tmp_path / "m.gguf", **sizes), {"kv_type": "q8_0/q4_0", "n_ctx": 32}
    with load_model(path, ["cpu"] * len(split), split, **options) as model:
        rows = [model.logits(IDS), forward_alone(model.runtime.runner, [7], len(IDS))]
        assert model.fallbacks == ()
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(path, **options) as model:
        assert nmse(np.concatenate(rows), model.logits([*IDS, 7])) < BAR


RANDOM = {"temperature": 0.8, "top_k": 20, "seed": 3}


def test_tokens_are_captured_once_and_sampled_on_the_device(path: Path) -> None:
    with load_model(path, n_ctx=32) as model:
        check_drawing(model)


@pytest.mark.parametrize(
    "split",
    [[2, 1], pytest.param([2, 0, 1], marks=pytest.mark.slow),
     pytest.param([1, 1, 1], marks=pytest.mark.slow)],
    ids=str,
)  # fmt: skip
def test_ranks_capture_and_sample_together(
    split: list[int], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They sample what the host samples from all ranks' logits, also of two sequences at once.

    Embeddings change nothing; logits and memory are as expected.
    """
    with load_model(path, ["cpu"] * len(split), split, n_ctx=32, parallel=2) as model:
        check_rows(model, 2)
        vectors, found = model.embed([IDS[:2]]).vectors, model.logits(IDS[:3])
        check_drawing(model)
        for memory in model.memory():
            assert memory.measured.weights == memory.predicted.weights
            assert memory.measured.kv == memory.predicted.kv
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(path, n_ctx=32) as model:
        assert nmse(found, model.logits(IDS[:3])) < BAR
        assert nmse(vectors, model.embed([IDS[:2]]).vectors) < BAR


@pytest.mark.slow
def test_layers_on_different_ranks_sample_together(tmp_path: Path) -> None:
    """The rank with the first layers gets the token from the one with the logits."""
    path = least_gguf(tmp_path / "m.gguf", n_layer=2)
    with load_model(path, ["cpu"] * 2, n_ctx=32, split_mode="layer") as model:
        check_drawing(model)


def check_drawing(model: Model) -> None:
    """Check that device and host, replayed and computed, sample the same tokens."""
    assert model.runtime.token_source is not None, [rank.refusal for rank in model.runtime.ranks]
    sampled = [answer(model, temperature=0), answer(model, **RANDOM)]
    model.runtime.token_source = None
    assert [answer(model, temperature=0), answer(model, **RANDOM)] == sampled
    repeated = singly(model, IDS[:2])
    assert all(rank.recordings for rank in model.runtime.ranks)
    never_repeated(model)
    assert np.array_equal(singly(model, IDS[:2]), repeated)
    if len(model.runtime.ranks) == 1:
        assert np.array_equal(model.logits(IDS[:2]), repeated)


def test_what_one_rank_cannot_capture_none_does(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep their one-shot all-reduces, which are not the cause."""
    asked: list[tuple[int, bool]] = []
    original = Rank.captured

    def captured(self: Rank, compute: Callable[[], Tensor | None]) -> object:
        one_shots: object = self.context._comm._shared.one_shots
        asked.append((self.number, one_shots._is_retired))
        if self.number == 1:
            raise NotRepeatable("it is another kind of rank")
        return original(self, compute)

    monkeypatch.setattr(Rank, "captured", captured)
    with load_model(path, ["cpu"] * 2, [2, 1], n_ctx=32) as model:
        ranks = model.runtime.ranks
        assert sorted(asked) == [(0, False), (1, False)]
        assert not model.runtime.group.one_shots._is_retired
        assert [rank.refusal for rank in ranks] == ["it is another kind of rank"] * 2
        assert not any(rank.recordings for rank in ranks)
        found = singly(model, IDS[:2])
        assert len(asked) == 2, "there is no retry"
    monkeypatch.undo()
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(path, n_ctx=32) as model:
        assert nmse(found, model.logits(IDS[:2])) < BAR


def test_what_is_another_token_when_repeated_is_computed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.backends.gpu.decode.rank_capture._same", lambda a, b: a is None)
    with load_model(path, n_ctx=32) as model:
        (rank,) = model.runtime.ranks
        assert "different results" in rank.refusal
        assert model.runtime.token_source is None
        found = forward_alone(model.runtime.runner, IDS[:1], 0)
        assert not rank.recordings
        assert np.array_equal(found, model.logits(IDS[:1]))


@pytest.mark.slow
def test_where_one_shot_sums_fail_at_first_hosts_add_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = CommError(1, "did not answer", "cuda:1")
    monkeypatch.setattr(OneShotGroups, "problem", lambda self: problem)
    with load_model(path, ["cpu"] * 2, [2, 1], n_ctx=32) as model:
        monkeypatch.undo()
        monkeypatch.setenv("TANDEM_BACKEND", "interpreter")
        assert model.runtime.runner.one_shots is None
        assert all(rank.recordings and not rank.refusal for rank in model.runtime.ranks)
        assert model.runtime.token_source is None, "candidates go by one-shot all-reduces, too"
        repeated = singly(model, IDS[:2])
        never_repeated(model)
        assert np.array_equal(singly(model, IDS[:2]), repeated)


def test_a_rank_on_the_cpu_meets_parts_of_graphs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes each time, with its own kernels, while the other one replays."""
    original = RankBuilder._backend

    def backend(self: RankBuilder, number: int, has_kernels: bool) -> object:
        if number == 0:
            return original(self, number, has_kernels)
        return CpuBackend(1, x_bytes(self._setup.hp))

    monkeypatch.setattr(RankBuilder, "_backend", backend)
    monkeypatch.setattr(
        "engine.runtime.thread_runtime.make_group", lambda *_: ThreadGroup(spins=True)
    )
    with load_model(path, ["cpu"] * 2, [1, 1], n_ctx=32) as model:
        replays = [rank.recordings[1] for rank in model.runtime.ranks]
        assert [isinstance(x, Replay) and x.is_whole for x in replays] == [False, False]
        assert model.runtime.token_source is None
        found = singly(model, IDS[:3])
        never_repeated(model)
        assert np.array_equal(singly(model, IDS[:3]), found)
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(path, n_ctx=32) as model:
        assert nmse(found, model.logits(IDS[:3])) < BAR


@pytest.mark.slow
def test_a_rank_that_is_late_once_is_an_error_and_then_forgotten(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_model(path, ["cpu"] * 2, [2, 1], n_ctx=32) as model:
        expected = answer(model, temperature=0)
        repeated = singly(model, IDS[:2])
        for ask in (
            lambda: forward_alone(model.runtime.runner, [1], 0),
            lambda: answer(model, temperature=0),
        ):
            with monkeypatch.context() as patch:
                problem = CommError(1, "did not answer", "cuda:1")
                patch.setattr(OneShotGroups, "problem", lambda self, problem=problem: problem)
                with pytest.raises(CommError, match="cuda:1"):
                    ask()
            assert not any(rank.recordings for rank in model.runtime.ranks)
            assert np.array_equal(singly(model, IDS[:2]), repeated)
            assert all(rank.recordings for rank in model.runtime.ranks)
            assert answer(model, temperature=0) == expected


def check(name: str, folder: Path, n_ids: int, *, is_captured: bool = True) -> None:
    """Check a family's random model against transformers, all tokens at once and singly."""
    family = next(family for family in FAMILIES if family.name == name)
    path = folder / "m.gguf"
    ids, expected = family.build(path)
    ids = ids[:n_ids]
    with load_model(path, n_ctx=32) as model:
        assert nmse(model.logits(ids), expected[: len(ids)]) < BAR
        found = singly(model, ids)
        assert all(bool(rank.recordings) == is_captured for rank in model.runtime.ranks)
        assert nmse(found, expected[: len(ids)]) < BAR
        assert model.fallbacks == ()


@pytest.mark.parametrize("name", QUICK)
def test_families(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing takes long; `tests/engine/backends/gpu/decode` captures with states, too."""
    monkeypatch.setattr("engine.runtime.model_runner.captures_tokens", lambda: False)
    check(name, tmp_path, 2, is_captured=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f.name for f in FAMILIES])
def test_all_families(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, 4)


@pytest.mark.parametrize(
    "splits", [[[1, 1]], pytest.param([[2, 0, 1], [1]], marks=pytest.mark.slow)], ids=str
)
def test_after_another_split_the_devices_sample_again(splits: list[list[int]], path: Path) -> None:
    """Several ranks sample the same tokens as one."""
    with load_model(path, n_ctx=32) as model:
        expected = answer(model, temperature=0)
        for parts in splits:
            model.resplit(parts, devices=["cpu"] * len(parts))
            assert model.runtime.token_source is None
            assert answer(model, temperature=0) == expected
            assert model.runtime.token_source is not None, (
                "the device samples after the first token"
            )


def test_a_kernel_that_cannot_be_compiled_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise EngineError("The kernel products cannot be compiled for this GPU (ptxas died).")

    monkeypatch.setattr(backend_choice, "_refused", {})
    monkeypatch.setattr(GpuBackend, "compiles", True)
    monkeypatch.setattr(GpuBackend, "compile_ahead", fail)
    path = least_gguf(tmp_path / "m.gguf")
    with load_model(path, n_ctx=32) as model:
        assert not any(rank.backend.captures for rank in model.runtime.ranks)
        assert model.logits(IDS).shape[0] == len(IDS)
    assert backend_choice.refused_kernels() == {
        "cpu": "The kernel products cannot be compiled for this GPU (ptxas died)"
    }
