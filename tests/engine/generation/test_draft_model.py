"""A second model guesses for the first: answers stay the same, and right guesses save passes."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine import EngineError, LoadParams, Model, SamplingParams, load_model
from engine.generation.draft_model import ModelSource
from engine.generation.drafts import Drafts
from tests.helpers.answering import answered
from tests.helpers.golden import golden_path
from tests.helpers.prophet import always
from tests.helpers.tiers import paired
from tests.helpers.tiny_gguf import tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

MODELS = ("llama-gqa-q4_k_m", "mixtral-q4_k_m", "gemma3-q4_0")
"""Dense, experts, windows."""

SPLITS = ((1,), (1, 1), (3, 1, 2))


def prompts(n: int = 4) -> list[list[int]]:
    return [[3 + (7 * k + i) % 190 for i in range(250 + k)] for k in range(n)]


def guess_always(model: Model) -> None:
    """Have all guesses of the draft model checked, and none from the text."""
    draft = model._draft
    assert draft is not None
    model.scheduler.drafts = Drafts(7, [draft.source], always())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize(("name", "split"), paired(MODELS, SPLITS))
def test_a_model_that_guesses_for_itself_is_always_right(name: str, split: tuple[int, ...]) -> None:
    """Alone and four at once, with prompts that are read meanwhile; and behind a re-split."""
    devices, path = ["cpu"] * len(split), golden_path(f"{name}.gguf")
    with load_model(path, devices, split, n_ctx=512, parallel=4, draft="off") as model:
        expected, _ = answered(model, prompts(), GREEDY)
    with load_model(path, devices, split, n_ctx=512, parallel=4, draft=path) as model:
        guess_always(model)
        for n in (4, 1):
            found, usages = answered(model, prompts(n), GREEDY)
            assert found == expected[:n]
            for usage in usages:
                assert usage.n_accepted == usage.n_drafted > 12
        if len(split) > 1:
            model.resplit(split[::-1])
            _, (usage,) = answered(model, prompts(1), GREEDY)
            assert usage.n_drafted > 12
            assert usage.n_accepted > 0.8 * usage.n_drafted, "sums have another order"


def test_a_model_that_knows_nothing_is_rarely_right_and_changes_nothing(folder: Path) -> None:
    main = tiny_gguf(folder / "main.gguf", n_ctx=512)
    other = tiny_gguf(folder / "other.gguf", n_ctx=512, seed=5, n_layer=1)
    asked = [[5 + (n + i) % 40 for i in range(30)] for n in range(3)]
    wished = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True)
    with load_model(main, parallel=3, draft="off") as model:
        expected, _ = answered(model, asked, wished)
    with load_model(main, parallel=3, draft=other) as model:
        guess_always(model)
        found, usages = answered(model, asked, wished)
    assert found == expected
    assert all(usage.n_accepted < 0.3 * usage.n_drafted for usage in usages)


@pytest.mark.parametrize(
    "wished", [{"grammar": r'root ::= ("hello" | " world")+'}, {"presence_penalty": 1.0}]
)
def test_what_restricts_an_answer_holds_for_its_guesses(
    folder: Path, wished: dict[str, object]
) -> None:
    main = tiny_gguf(folder / "main.gguf", n_ctx=256)
    asked = [[5 + i % 40 for i in range(20)]]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=50, **wished)
    with load_model(main, draft="off") as model:
        expected, _ = answered(model, asked, params)
    with load_model(main, draft=main) as model:
        guess_always(model)
        found, (usage,) = answered(model, asked, params)
    assert found == expected
    assert usage.n_drafted > 0


def test_a_vocabulary_that_differs_is_refused_by_what_differs(folder: Path) -> None:
    main = tiny_gguf(folder / "main.gguf")
    key = "tokenizer.ggml."
    wrong = {
        "its tokenizer is 'gpt2', not 'llama'": {"arch": "qwen2"},
        "its EOS is token 3, not 2": {"extra": {f"{key}eos_token_id": 3}},
        "has no vocabulary": {"tokenizer": False},
        "not ": {"n_vocab": 900},
    }
    for number, (told, changes) in enumerate(wrong.items()):
        draft = tiny_gguf(folder / f"draft{number}.gguf", **changes)
        with pytest.raises(EngineError, match=r"be the draft model of main\.gguf") as caught:
            load_model(main, draft=draft)
        assert told in str(caught.value)


def test_recurrent_and_missing_draft_models_are_refused(folder: Path) -> None:
    main = golden_path("llama-gqa-q4_k_m.gguf")
    recurrent = golden_path("qwen35-q4_k_m.gguf")
    with pytest.raises(EngineError, match="its recurrent layers cannot roll back rejected tokens"):
        load_model(recurrent, draft=recurrent)
    with pytest.raises(EngineError, match=r"gone\.gguf"):
        load_model(main, draft=folder / "gone.gguf")
    with pytest.raises(EngineError, match="or the path of a GGUF file"):
        LoadParams(path=str(main), draft="ngrams")


def test_its_memory_is_planned_for_and_measured(folder: Path) -> None:
    main = tiny_gguf(folder / "main.gguf", n_ctx=2048)
    with load_model(main, ["cpu", "cpu"], [1, 3], draft=main) as model:
        first, second = model.memory()
        assert first.predicted.draft == first.measured.draft == 0
        assert 0 < second.measured.draft < second.predicted.draft
        alone = load_model(main, draft="off")
        (rank,) = alone.memory()
        alone.close()
        assert second.measured.draft == rank.measured.weights + rank.measured.kv


def test_a_failure_ends_the_guesses_but_not_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    main = tiny_gguf(folder / "main.gguf", n_ctx=256)
    asked = [[5 + i % 40 for i in range(20)]]
    with load_model(main, draft="off") as model:
        expected, _ = answered(model, asked, GREEDY)
    with load_model(main, draft=main) as model:
        guess_always(model)

        def fail(*_: object) -> Sequence[int]:
            raise EngineError("There is no memory left.")

        monkeypatch.setattr(ModelSource, "_next", fail)
        assert answered(model, asked, GREEDY)[0] == expected
        (told,) = model.fallbacks
        assert "There is no memory left" in told.sentence
        assert answered(model, asked, GREEDY)[0] == expected
        assert model.fallbacks == (told,), "once"
    assert "The draft model has failed" in caplog.text
