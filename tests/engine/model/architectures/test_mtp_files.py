"""A file of an MTP block alone is loaded with the model that it belongs to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine import EngineError, LoadParams, Model, load_model, read_model_info
from engine.decoding.drafting.ngram import DraftTokens
from engine.formats.gguf.reader import GGUFFile
from engine.generation.drafts import Drafts, MTPSource
from engine.generation.sequence import TokenSequence
from engine.model.architectures.declare import declare
from engine.model.forward.batch import Batch
from engine.planning.draft import is_mtp_file, mtp_path, with_mtp_file
from engine.planning.plan import make_plan
from engine.planning.planner import Planner
from tests.engine.generation.test_drafts import answers
from tests.engine.model.architectures.test_mtp import IDS, prefilled
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.mtp_models import MTP, N_EMBD, OWN, PlainMTP, apart, mtp_gguf
from tests.helpers.plain_llama import Array
from tests.helpers.prophet import always
from tests.helpers.tiers import paired

ARCHITECTURES = "glm4moe", "qwen35", "step35"
SPLITS = ((1,), (1, 1), (3, 1, 2))
Guessed = list[np.ndarray]


def guessed(model: Model) -> Guessed:
    """Return the logits of some guesses of the model's block."""
    runner = model.runtime.runner
    found, at = [], prefilled(model)
    for n in range(3):
        found.append(runner.draft(IDS[at + n : at + n + 1], Batch.of_one(at + n, 1, 0)))
        runner.forward(IDS[at + n : at + n + 1], Batch.of_one(at + n, 1, 0))
    return found


@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_its_guesses_are_those_of_a_whole_file(
    tmp_path: Path, arch: str, split: tuple[int, ...]
) -> None:
    """Found beside the model, named, and behind a change of the split; answers are the same."""
    path, devices = mtp_gguf(tmp_path / "m.gguf", arch, quant="Q8_0"), ["cpu"] * len(split)
    prompts = [[3 + (7 * n + i) % 190 for i in range(40 + n)] for n in range(2)]

    def found(draft: str) -> tuple[Guessed, list[list[int]], Guessed]:
        with load_model(path, devices, split, n_ctx=256, draft=draft) as model:
            first, said = guessed(model), answers(model, prompts)
            model.resplit(split[::-1])
            return first, said, guessed(model)

    expected = found("mtp")
    _, block = apart(path)
    for draft in ("auto", "mtp", str(block)):
        ours = found(draft)
        assert ours[1] == expected[1]
        for one, other in zip(ours[0] + ours[2], expected[0] + expected[2], strict=True):
            assert np.array_equal(one, other)


def test_a_named_file_is_taken_in_place_of_the_model_s_own_block(tmp_path: Path) -> None:
    own = mtp_gguf(tmp_path / "m.gguf", quant="Q8_0")
    _, block = apart(mtp_gguf(tmp_path / "other.gguf", quant="Q8_0", seed=0, own=OWN))
    with load_model(own, n_ctx=256, draft=str(block)) as model:
        assert model.runtime.runner.ranks[0].model.mtp.heads[0].shared_head_head is not None


@pytest.mark.parametrize("split", SPLITS)
def test_its_memory_is_planned(tmp_path: Path, split: tuple[int, ...]) -> None:
    path, block = apart(mtp_gguf(tmp_path / "m.gguf", own=OWN))
    devices = ("cpu",) * len(split)
    planner, held = Planner(path), {}
    for draft in ("off", "auto", str(block)):
        params = LoadParams(str(path), devices, split, n_ctx=64, draft=draft)
        with GGUFFile.open(path) as file, with_mtp_file(file, mtp_path(file, params)) as whole:
            expected = make_plan(declare(whole, params), params, None)
        assert planner.plan(params) == expected
        with load_model(path, devices, split, n_ctx=64, draft=draft) as model:
            for rank in model.memory():
                assert rank.measured.weights == rank.predicted.weights
                assert rank.measured.kv == rank.predicted.kv
            held[draft] = sum(rank.measured.weights for rank in model.memory())
    assert held["auto"] == held[str(block)] > 1.4 * held["off"]
    assert any(t.name.startswith(MTP) for t in planner.placement(params).tensors)
    planner.close()


SHORT = DraftTensor.of(np.zeros((32, N_EMBD), np.float32))
"""Head of some tokens alone."""


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"output": SHORT}, "only some of the model's tokens, and the file does not say which"),
        ({"output": SHORT, "d2t": DraftTensor.of(np.zeros(31, np.int32))}, "only some of the"),
        (
            {"output": SHORT, "d2t": DraftTensor.of(np.full(32, 320, np.int64))},
            "tokens that do not exist",
        ),
        (
            {"output": SHORT, "d2t": DraftTensor.of(np.zeros(32, np.float32))},
            "not a list of tokens",
        ),
        (
            {"output": SHORT}
            | {
                name: DraftTensor.of(np.arange(32, dtype=np.int32))
                for name in ("d2t", f"{MTP}nextn.d2t")
            },
            "d2t.* both list the tokens of its MTP heads",
        ),
        ({"extra": DraftTensor.of(np.zeros(32, np.float32))}, "has the tensor 'extra.weight'"),
    ],
    ids=[
        "shortened head",
        "other length",
        "unknown token",
        "no integers",
        "two lists",
        "unknown tensor",
    ],
)
def test_what_cannot_be_used_is_said_or_left_out(
    tmp_path: Path, changed: dict[str, DraftTensor], sentence: str
) -> None:
    tokens = {"tokenizer.ggml.tokens": [f"t{n}" for n in range(320)]}
    whole = mtp_gguf(tmp_path / "m.gguf", extra=tokens)
    path, block = apart(whole, **changed)
    with pytest.raises(EngineError, match=sentence):
        load_model(path, n_ctx=64, draft=str(block))
    with load_model(path, n_ctx=64) as model:
        assert model.runtime.runner.drafter is None
    with pytest.raises(EngineError, match="no MTP block for drafting"):
        load_model(path, n_ctx=64, draft="mtp")


class ShortMTP(PlainMTP):
    """A model whose MTP block guesses some tokens alone, in float64."""

    def __init__(self, path: Path, tokens: np.ndarray) -> None:
        super().__init__(path)
        self._others = np.setdiff1d(np.arange(320), tokens)

    def pairs(self, ids: Sequence[int], before: Array, number: int = 0) -> tuple[Array, Array]:
        logits, own = super().pairs(ids, before, number)
        logits[:, self._others] = -np.inf
        return logits, own


TOKENS = np.random.default_rng(11).permutation(320)[:96]
"""Tokens of a shortened head, in its order."""


def shortened(path: Path, where: str, dtype: type, **options: object) -> tuple[Path, str]:
    """Write a model whose block has `TOKENS` alone; return its path and what guesses.

    Args:
        where: place of the head: "in the model", or as "own" or "output" of a block's file.
    """
    whole = ModelDraft.read(mtp_gguf(path, own=OWN[2:] if where != "output" else (), **options))
    ids = DraftTensor.of(TOKENS.astype(dtype))
    key = "output" if where == "output" else f"{MTP}nextn.shared_head_head"
    full = whole.tensors[f"{key}.weight"]
    row = len(full.data) // 320
    rows = b"".join(full.data[row * token : row * (token + 1)] for token in TOKENS)
    short = replace(full, shape=(len(TOKENS), N_EMBD), data=rows)
    if where == "in the model":
        whole.tensors |= {f"{key}.weight": short, "d2t": ids}
        return whole.write(path), "mtp"
    _, block = apart(path, **{key: short, "d2t": ids})
    return path, str(block)


@pytest.mark.parametrize(
    ("where", "split", "dtype"),
    [
        ("own", (1,), np.int32), ("output", (1, 1), np.int64), ("in the model", (3, 1, 2), np.int32)
    ],
)  # fmt: skip
def test_a_head_of_some_tokens_guesses_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: tuple[int, ...], dtype: type, where: str
) -> None:
    """Its logits, and a chain of guesses, are those of all tokens without the rest."""
    made, guess = list[tuple[list[int], list[int]]](), MTPSource.draft

    def logged(
        self: MTPSource, texts: Mapping[TokenSequence, Sequence[int]], most: int
    ) -> Mapping[TokenSequence, DraftTokens]:
        found = guess(self, texts, most)
        made.extend((list(texts[answer]), list(one.tokens)) for answer, one in found.items())
        return found

    monkeypatch.setattr(MTPSource, "draft", logged)
    plain = ShortMTP(mtp_gguf(tmp_path / "plain.gguf", own=OWN[2:] * (where != "output")), TOKENS)
    path, draft = shortened(tmp_path / "m.gguf", where, dtype)
    devices, options = ["cpu"] * len(split), {"n_ctx": 64, "kv_type": "f32"}
    with load_model(path, devices, split, draft=draft, **options) as model:
        at, expected = prefilled(model), plain.guesses(IDS)
        found = model.runtime.runner.draft(IDS[at : at + 1], Batch.of_one(at, 1, 0))[0]
        np.testing.assert_allclose(found, expected[at - 1][TOKENS], atol=2e-5)
        for rank in model.memory():
            assert rank.measured.weights == rank.predicted.weights
        model.resplit(split[::-1])
        model.scheduler.drafts = Drafts()
        wanted = answers(model, [IDS[:20]])
        model.scheduler.forget()
        model.scheduler.drafts = model.draft_variants()["mtp"]
        model.scheduler.drafts.control = always()
        assert answers(model, [IDS[:20]]) == wanted
        assert made
        for text, guesses in made:
            assert guesses == plain.chain(text, len(guesses))
            assert set(guesses) <= set(TOKENS.tolist())


def test_a_named_file_s_head_is_not_that_of_the_model_s_own_tokens(tmp_path: Path) -> None:
    path, _ = shortened(tmp_path / "m.gguf", "in the model", np.int32)
    _, block = apart(mtp_gguf(tmp_path / "other.gguf", own=OWN[2:]))
    with load_model(path, n_ctx=64, kv_type="f32", draft=str(block)) as model:
        at = prefilled(model)
        found = model.runtime.runner.draft(IDS[at : at + 1], Batch.of_one(at, 1, 0))[0]
    whole = mtp_gguf(tmp_path / "whole.gguf", own=OWN[2:])
    np.testing.assert_allclose(found, PlainMTP(whole).guesses(IDS)[at - 1], atol=2e-5)


def test_a_shortened_head_may_be_shortened_again(tmp_path: Path) -> None:
    path, draft = shortened(tmp_path / "m.gguf", "in the model", np.int32, n_vocab=320)
    with pytest.raises(EngineError, match="only 96 tokens, not 256"):
        load_model(path, n_ctx=64, draft=draft, draft_vocab=256)
    with load_model(path, n_ctx=64) as model:
        assert model.runtime.runner.drafter is not None
    with load_model(path, n_ctx=64, draft="off") as model:
        assert answers(model, [[5, 6, 7]])


@pytest.mark.parametrize("other", ["width", "depth", "family"])
def test_a_block_of_another_model_is_named(tmp_path: Path, other: str) -> None:
    path, _ = apart(mtp_gguf(tmp_path / "m.gguf"), "mtp-own.gguf")
    arch = "qwen35" if other == "family" else "glm4moe"
    _, block = apart(mtp_gguf(tmp_path / "other.gguf", arch), "mtp-other.gguf")
    if other != "family":
        draft = ModelDraft.read(block)
        if other == "width":
            draft = draft.changed({"glm4moe.embedding_length": 2 * N_EMBD})
        else:
            draft = draft.changed({"glm4moe.block_count": 6, "glm4moe.nextn_predict_layers": 1})
            moved = {n.replace(MTP, "blk.5."): t for n, t in draft.tensors.items()}
            draft = replace(draft, tensors=moved)
        draft.write(block)
    with pytest.raises(EngineError, match=r"mtp-other\.gguf is the MTP block of another model: of"):
        load_model(path, n_ctx=64, draft=str(block))


def test_a_damaged_block_is_left_out(tmp_path: Path) -> None:
    path, block = apart(mtp_gguf(tmp_path / "m.gguf"))
    block.write_bytes(block.read_bytes()[:900])
    assert not is_mtp_file(str(block))
    with load_model(path, n_ctx=64) as model:
        assert model.runtime.runner.drafter is None


def test_a_re_split_asks_for_the_same_file(tmp_path: Path) -> None:
    path, block = apart(mtp_gguf(tmp_path / "m.gguf"))
    with load_model(path, ["cpu", "cpu"], n_ctx=64) as model:
        block.unlink()
        with pytest.raises(EngineError, match="There is no file"):
            model.resplit([3, 1])
        assert answers(model, [[5, 6, 7]])


def test_a_description_tells_of_a_block_in_the_file_or_beside_it(tmp_path: Path) -> None:
    path = mtp_gguf(tmp_path / "m.gguf")
    assert read_model_info(path).has_mtp
    trunk, block = apart(path)
    assert read_model_info(trunk).has_mtp
    block.unlink()
    assert not read_model_info(trunk).has_mtp
