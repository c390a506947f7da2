"""Draft tokens that GPUs check: answers equal those sampled ahead by a device, one by one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine import Model, load_model
from engine.generation.drafts import Drafts
from engine.model.forward.batch import CheckedRows
from engine.runtime import model_runner
from tests.helpers.golden import golden_path
from tests.helpers.guessed_answers import guessed_answers
from tests.helpers.least_recurrent import least_recurrent_gguf
from tests.helpers.prophet import Prophet, always
from tests.helpers.tiny_gguf import least_gguf

PROMPTS = [[5, 9, 33, 12, 7, 21], [21, 4, 4, 8], [1, 17, 2, 40, 11]]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


def check(
    model: Model, n: int, most: int, prompts: Sequence[Sequence[int]] = PROMPTS[:1],
    **wished: object,
) -> None:  # fmt: skip
    """Check answers with draft tokens that are wrong at another place each time, or never."""
    model.scheduler.drafts = Drafts()
    expected, n_guessed, _ = guessed_answers(model, prompts, n, **wished)
    assert n_guessed == 0
    known = [[*p, *ids] for p, ids in zip(prompts, expected, strict=True)]
    model.scheduler.drafts = Drafts(most, [Prophet(known, lambda k: k % (most + 2))], always())
    found, n_guessed, n_right = guessed_answers(model, prompts, n, **wished)
    assert found == expected
    assert n_guessed > n_right > 0
    assert model.fallbacks == ()


def test_guesses_are_checked_by_a_captured_pass(tmp_path: Path) -> None:
    """Between tokens that the device samples ahead, and continues to afterwards."""
    path = least_gguf(tmp_path / "m.gguf")
    with load_model(path, n_ctx=256, draft="ngram") as model:
        assert model.runtime.token_source is not None
        check(model, 9, 3)
        sizes = set(model.runtime.ranks[0].recordings)
        assert {1, CheckedRows(2), CheckedRows(4)} >= sizes >= {1, CheckedRows(4)}
        assert model.runtime.token_source is not None


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1,), (2, 1), (3, 1, 2)], ids=str)
def test_guesses_at_any_place_alone_and_together(tmp_path: Path, split: tuple[int, ...]) -> None:
    """After a re-split, and with a grammar, with which the host samples."""
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
def test_more_guesses_than_a_program_has_rows(tmp_path: Path, split: tuple[int, ...]) -> None:
    """Passes of sixteen rows, captured apart from those over sixteen answers, which round."""
    path, devices = least_gguf(tmp_path / "m.gguf"), ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=512, draft="ngram", draft_max=15) as model:
        check(model, 20, 15)
        assert set(model.runtime.ranks[0].recordings) >= {1, CheckedRows(16)}


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
def test_guesses_for_several_answers(tmp_path: Path, n: int) -> None:
    """Three for each, in a batch of up to four, in one pass."""
    path, prompts = least_gguf(tmp_path / "m.gguf"), [*PROMPTS, [2, 3, 5, 8]][:n]
    with load_model(path, n_ctx=512, parallel=4, draft="ngram", draft_max=15) as model:
        check(model, 12, 3, prompts)
        assert CheckedRows(8 if n == 2 else 16) in model.runtime.ranks[0].recordings


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mixtral-q4_k_m", "deepseek3-mla-q4_k_m", "gemma3-q4_0", "llama-gqa-q4_k_m"]
)
@pytest.mark.timeout(1800)
def test_guesses_of_further_models(name: str) -> None:
    """Experts, latent attention, windows; each takes minutes, as these models are larger."""
    with load_model(golden_path(f"{name}.gguf"), n_ctx=256, draft="ngram") as model:
        check(model, 6, 1)


@pytest.mark.parametrize(
    ("arch", "split"),
    [
        pytest.param(arch, split, marks=() if (arch, split) == ("lfm2", (1,)) else pytest.mark.slow)
        for arch in ("lfm2", "mamba", "mamba2", "qwen35")
        for split in ((1,), (1, 1), (3, 1, 2))
    ],
    ids=str,
)
def test_guesses_of_models_with_recurrent_states(
    tmp_path: Path, arch: str, split: tuple[int, ...]
) -> None:
    """States after each draft token have their own slots, in captured passes."""
    path, devices = least_recurrent_gguf(tmp_path / "m.gguf", arch), ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=256, parallel=2, draft="ngram") as model:
        assert model.runtime.token_source is not None
        if (arch, split) == ("lfm2", (1,)):
            check(model, 6, 1)
        else:
            check(model, 14, 3)
            check(model, 8, 1, PROMPTS[:2])
            model.resplit(split[::-1])
            check(model, 8, 7)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1,), (2, 1)], ids=str)
@pytest.mark.parametrize("arch", ["lfm2", "mamba", "mamba2", "qwen35"])
def test_recurrent_states_change_once_in_padded_passes(
    tmp_path: Path, arch: str, split: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three, five, six and seven answers, and drafts for three: pass sizes without captures."""
    path, devices = least_recurrent_gguf(tmp_path / "m.gguf", arch), ["cpu"] * len(split)
    prompts = [[5 + k, 9, 33 - k, 12][: 2 + k % 3] for k in range(7)]
    with load_model(path, devices, split, n_ctx=256, parallel=7, draft="ngram") as model:
        check(model, 6, 1, PROMPTS)
        check(model, 6, 3, PROMPTS)
        sizes = set(model.runtime.ranks[0].recordings)
        assert sizes >= {1, 2, 4, CheckedRows(8), CheckedRows(16)}, "of three, six, twelve rows"
        model.scheduler.drafts = Drafts()
        found = [said_after(model, prompts[:n]) for n in (3, 7)]
        assert 8 in model.runtime.ranks[0].recordings, "of five, six and seven rows"
        monkeypatch.setattr(model_runner, "may_repeat", lambda *args, **options: False)
        assert [said_after(model, prompts[:n]) for n in (3, 7)] == found


def said_after(model: Model, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return answers that begin one after the other, without cached tokens."""
    model.scheduler.forget()
    return guessed_answers(model, prompts, 8)[0]
