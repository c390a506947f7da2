"""Guesses that GPUs check: answers are those of tokens that a device samples ahead, one by one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine import Finished, Model, SamplingParams, TokenText, load_model
from engine.generation.scheduling.drafts import Drafts
from engine.gpu import quantise
from engine.gpu.matmul import gemv
from tests.helpers.golden import golden_path
from tests.helpers.prophet import Prophet, always
from tests.helpers.tiny_gguf import least_gguf

PROMPTS = [[5, 9, 33, 12, 7, 21], [21, 4, 4, 8], [1, 17, 2, 40, 11]]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


def said(
    model: Model, prompts: Sequence[Sequence[int]], n: int, **wished: object
) -> tuple[list[list[int]], int, int]:
    """Return answers that are computed together, and the numbers of guesses and of right ones."""
    streams = [
        model.generate(
            ids, SamplingParams(temperature=0.7, seed=k, max_tokens=n, ignore_eos=True, **wished)
        )
        for k, ids in enumerate(prompts)
    ]
    found: list[list[int]] = [[] for _ in streams]
    n_guessed = n_right = 0
    while not all(stream.is_over for stream in streams):
        for mine, stream in zip(found, streams, strict=True):
            for event in stream.ready():
                if isinstance(event, TokenText):
                    mine += event.ids
                elif isinstance(event, Finished):
                    n_guessed += event.usage.n_drafted
                    n_right += event.usage.n_accepted
        model.step()
    return found, n_guessed, n_right


def check(
    model: Model, n: int, most: int, prompts: Sequence[Sequence[int]] = PROMPTS[:1],
    **wished: object,
) -> None:  # fmt: skip
    """Check answers with guesses that are wrong at another place each time, or not at all."""
    model.scheduler.drafts = Drafts()
    expected, n_guessed, _ = said(model, prompts, n, **wished)
    assert n_guessed == 0
    known = [[*p, *ids] for p, ids in zip(prompts, expected, strict=True)]
    model.scheduler.drafts = Drafts(most, [Prophet(known, lambda k: k % (most + 2))], always())
    found, n_guessed, n_right = said(model, prompts, n, **wished)
    assert found == expected
    assert n_guessed > n_right > 0
    assert model.fallbacks == ()


def test_guesses_are_checked_by_a_captured_pass(tmp_path: Path) -> None:
    """Between tokens that the device samples ahead, which go on behind it."""
    path = least_gguf(tmp_path / "m.gguf")
    with load_model(path, n_ctx=256, draft="ngram") as model:
        assert model.runtime.token_source is not None
        check(model, 14, 3)
        assert {1, 2, 4} >= set(model.runtime.ranks[0].recordings) >= {1, 4}
        assert model.runtime.token_source is not None


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1,), (2, 1), (3, 1, 2)], ids=str)
def test_guesses_at_any_place_alone_and_together(tmp_path: Path, split: tuple[int, ...]) -> None:
    """Behind a change of the split, and with a grammar, whose tokens the host samples."""
    path, devices = least_gguf(tmp_path / "m.gguf"), ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=512, parallel=4, draft="ngram") as model:
        check(model, 24, 7)
        check(model, 12, 1, PROMPTS)
        check(model, 12, 3, PROMPTS[:2])
        check(model, 12, 3, grammar='root ::= ("A" | "B" | "C")+')
        model.resplit(split[::-1])
        check(model, 12, 3)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1,), (2, 1)], ids=str)
def test_guesses_in_more_rows_than_gemv_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: tuple[int, ...]
) -> None:
    """Twelve in a captured pass of sixteen, to the bit if tokens without guesses take tile GEMM.

    Otherwise these take gemv, which rounds otherwise.
    """
    monkeypatch.setattr(gemv, "SMALL_BATCH", 0)
    monkeypatch.setattr(quantise, "SMALL_BATCH", 0)
    path, devices = least_gguf(tmp_path / "m.gguf"), ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=512, parallel=4, draft="ngram") as model:
        check(model, 12, 3, PROMPTS)
        assert 16 in model.runtime.ranks[0].recordings


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mixtral-q4_k_m", "deepseek3-mla-q4_k_m", "gemma3-q4_0", "llama-gqa-q4_k_m"]
)
def test_guesses_of_further_models(name: str) -> None:
    """Experts, latent attention, windows."""
    with load_model(golden_path(f"{name}.gguf"), n_ctx=256, draft="ngram") as model:
        check(model, 10, 3)


@pytest.mark.slow
def test_models_with_recurrent_layers_go_without() -> None:
    """Their kernels for GPUs have no place for the state behind each guess."""
    with load_model(golden_path("lfm2-q4_k_m.gguf"), n_ctx=256, draft="ngram") as model:
        expected, *_ = said(model, PROMPTS[:1], 6)
        known = [[*PROMPTS[0], *expected[0]]]
        model.scheduler.drafts = Drafts(3, [Prophet(known, lambda _: None)], always())
        assert said(model, PROMPTS[:1], 6) == (expected, 0, 0)
