"""Right and wrong guesses at every place leave answers as they are: all families, splits and ways.

Each answer's passes go through all patterns of acceptance in turn: none of seven guesses right, the
first one alone, and so on to all of them.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine import Model, SamplingParams, load_model
from engine.generation.drafts import Drafts
from tests.helpers.golden import golden_path
from tests.helpers.model_draft import ModelDraft
from tests.helpers.prophet import Prophet, always
from tests.helpers.tiers import swept
from tests.helpers.tiny_gguf import tiny_gguf

MODELS = {
    "dense": "llama-gqa-q4_k_m", "experts": "mixtral-q4_k_m", "latent": "deepseek3-mla-q4_k_m",
    "windowed": "gemma3-q4_0", "recurrent": "mamba-q5_0", "hybrid": "qwen35-q4_k_m",
}  # fmt: skip
SPLITS = ((1,), (1, 1), (3, 1, 2))
GRAMMAR = r'root ::= ("[" [0-9]+ "]")+'

CASES = swept(
    [(family, split, n) for family in MODELS for split in SPLITS for n in (1, 4)],
    [(family, SPLITS[at % 3], (1, 4)[at // 3]) for at, family in enumerate(MODELS)],
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return the metadata of a vocabulary, without which there are no grammars."""
    path = tiny_gguf(tmp_path_factory.mktemp("words") / "words.gguf", n_vocab=320)
    meta = ModelDraft.read(path).meta
    return {key: value for key, value in meta.items() if key.startswith("tokenizer.")}


def said(model: Model, prompts: Sequence[Sequence[int]], **wished: object) -> list[list[int]]:
    """Return answers that are computed together."""
    streams = [
        model.generate(
            ids, SamplingParams(seed=n, temperature=1.0, max_tokens=40, ignore_eos=True, **wished)
        )
        for n, ids in enumerate(prompts)
    ]
    found: list[list[int]] = [[] for _ in streams]
    while not all(stream.is_over for stream in streams):
        for mine, stream in zip(found, streams, strict=True):
            for event in stream.ready():
                mine += getattr(event, "ids", ())
        model.step()
    return found


def check(model: Model, prompts: Sequence[Sequence[int]], **wished: object) -> None:
    """Check answers with guesses, which begin with patterns of few and of many right ones."""
    model.scheduler.forget()
    model.scheduler.drafts = Drafts()
    expected = said(model, prompts, **wished)
    known = [[*p, *ids] for p, ids in zip(prompts, expected, strict=True)]
    most, patterns = 7 if len(prompts) == 1 else 3, set[int]()
    for first in (0, most // 2 + 1):

        def wrong_at(k: int, begin: int = first) -> int:
            patterns.add(n_right := (begin + k) % (most + 1))
            return n_right  # behind the last guess where all are right

        model.scheduler.forget()
        model.scheduler.drafts = Drafts(most, [Prophet(known, wrong_at)], always())
        assert said(model, prompts, **wished) == expected
    assert patterns == set(range(most + 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pattern_gives_the_answer_without_guesses(
    tmp_path: Path, words: dict[str, object], case: tuple[str, tuple[int, ...], int]
) -> None:
    """Also with a grammar, and both behind a change of the split."""
    family, split, n = case
    file = ModelDraft.read(golden_path(f"{MODELS[family]}.gguf")).changed(words)
    path, devices = file.write(tmp_path / "m.gguf"), ["cpu"] * len(split)
    prompts = [[3 + (7 * k + i) % 190 for i in range(30 + k)] for k in range(n)]
    with load_model(path, devices, split, n_ctx=512, parallel=4, draft="ngram") as model:
        for turn in range(2):
            check(model, prompts)
            check(model, prompts, grammar=GRAMMAR)
            if not turn:
                model.resplit(split[::-1] if len(split) > 1 else [1])
