"""Draft tokens of an MTP block on GPUs, also after tokens that a device samples ahead."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine import Model, SamplingParams, load_model
from engine.decoding.drafting.ngram import DraftTokens
from engine.generation.drafts import Drafts, MTPSource
from engine.generation.sequence import TokenSequence
from engine.model.forward.batch import Batch
from tests.engine.generation.test_mtp_source import certain, following
from tests.helpers.guessed_answers import guessed_answers
from tests.helpers.mtp_models import N_EMBD, PlainMTP, mtp_gguf
from tests.helpers.prophet import always

N_VOCAB = 64
PROMPTS = [[5, 9, 33, 12, 7, 21], [21, 4, 4, 8], [1, 17, 2, 40, 11]]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


class LoggedSource(MTPSource):
    """The draft tokens of a model's block, with the texts before them."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.runtime.runner)
        self.made: list[tuple[list[int], list[int]]] = []

    def draft(
        self, texts: Mapping[TokenSequence, Sequence[int]], most: int
    ) -> Mapping[TokenSequence, DraftTokens]:
        found = super().draft(texts, most)
        self.made += [(list(texts[answer]), list(guess.tokens)) for answer, guess in found.items()]
        return found


def said(
    model: Model, prompts: Sequence[Sequence[int]], n: int, later: Drafts | None = None,
    n_before: int = 0, temperature: float = 0.7,
) -> tuple[list[list[int]], int, int]:  # fmt: skip
    """Return answers computed together, and the numbers of draft tokens and of right ones.

    Nothing cached is used: after cached tokens, the block lacks the last one's hidden state.

    Args:
        later: draft tokens after the first `n_before` tokens of the first answer; none before.
    """
    model.scheduler.forget()
    model.scheduler.drafts = Drafts()

    def guess_from_now_on(found: Sequence[Sequence[int]]) -> None:
        if later is not None and len(found[0]) >= n_before:
            model.scheduler.drafts = later

    return guessed_answers(model, prompts, n, guess_from_now_on, temperature=temperature)


def check(
    model: Model, plain: PlainMTP, n: int, most: int, n_before: int,
    prompts: Sequence[Sequence[int]] = PROMPTS[:1],
) -> None:  # fmt: skip
    """Check that an answer is as without draft tokens, and that these equal the formulas'."""
    expected, n_guessed, _ = said(model, prompts, n)
    assert n_guessed == 0
    source = LoggedSource(model)
    found, n_guessed, _ = said(model, prompts, n, Drafts(most, [source], always()), n_before)
    assert found == expected
    assert n_guessed > 0
    for text, guesses in source.made:
        assert guesses == plain.chain(text, len(guesses))
    assert model.fallbacks == ()


@pytest.mark.slow
def test_guesses_behind_tokens_sampled_ahead_are_those_of_the_formulas(tmp_path: Path) -> None:
    """The block reads a device's own results, and continues from its hidden states."""
    path = mtp_gguf(tmp_path / "m.gguf", n_vocab=N_VOCAB)
    plain, expected = PlainMTP(path), PROMPTS[0][:]
    for _ in range(8):
        expected.append(int(plain.trunk(expected)[-1].argmax()))
    with load_model(path, n_ctx=256, kv_type="f32", draft="mtp") as model:
        assert model.runtime.token_source is not None
        model.scheduler.drafts = Drafts()
        wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        source, found = LoggedSource(model), list[int]()
        stream = model.generate(PROMPTS[0], wanted)
        while not stream.is_over:
            for event in stream.ready():
                found += getattr(event, "ids", ())
            for request in model.scheduler.sequences:
                if len(found) >= 2 and not source.made:  # from then on until a draft is possible
                    source.draft({request: request.tokens}, 2)
            model.step()
        sizes = set(model.runtime.ranks[0].draft_recordings)
    assert [*PROMPTS[0], *found] == expected
    ((text, guesses),) = source.made
    assert len(text) > len(PROMPTS[0]) + 2
    assert {(0, 1, 0)} < sizes <= {(0, 1, 0), (0, 4, 3), (0, 8, 7)}, "both passes were captured"
    assert guesses == plain.chain(text, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("arch", ["glm4moe", "step35", "qwen35"])
@pytest.mark.parametrize("split", [(1,), (1, 1)], ids=str)
def test_guesses_are_those_of_the_formulas(
    tmp_path: Path, arch: str, split: tuple[int, ...], mode: str
) -> None:
    """Hidden states raw and normed, and a window; alone and together, after a re-split."""
    if mode == "layer" and len(split) == 1:
        pytest.skip("it is the other mode")
    path, devices = mtp_gguf(tmp_path / "m.gguf", arch, n_vocab=N_VOCAB), ["cpu"] * len(split)
    plain, options = PlainMTP(path), {"n_ctx": 256, "kv_type": "f32", "parallel": 2}
    with load_model(path, devices, split, draft="mtp", split_mode=mode, **options) as model:
        check(model, plain, 20, 3, n_before=8)
        check(model, plain, 8, 1, 2, PROMPTS[:2])
        sizes = [set(rank.draft_recordings) for rank in model.runtime.ranks]
        assert all({(0, 1, 0), (0, 2, 0)} < found for found in sizes), "a guess is replayed"
        model.resplit(split[::-1])
        check(model, plain, 8, 3, n_before=3)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1,), (1, 1)], ids=str)
def test_of_several_blocks_each_guesses_a_token(tmp_path: Path, split: tuple[int, ...]) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", "step35", n_vocab=N_VOCAB, n_mtp=3)
    devices = ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=256, kv_type="f32", draft="mtp") as model:
        check(model, PlainMTP(path), 12, 3, n_before=4)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1,), (1, 1)], ids=str)
def test_hidden_states_are_read_before_they_are_lost(
    tmp_path: Path, split: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer pauses for that where few are kept: as with many after more than a hundred."""
    for module in ("engine.runtime.mtp_reading", "engine.model.forward.context"):
        monkeypatch.setattr(f"{module}.KEPT_STATES", 16)
    path, devices = mtp_gguf(tmp_path / "m.gguf", n_vocab=N_VOCAB), ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=256, kv_type="f32", draft="mtp") as model:
        check(model, PlainMTP(path), 40, 3, n_before=32)


RECURRENT = {
    "qwen35.attention.recurrent_layers": [True, False], "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.inner_size": N_EMBD, "qwen35.ssm.state_size": 16,
    "qwen35.ssm.time_step_rank": 4, "qwen35.ssm.group_count": 2,
    **{f"blk.0.attn_{part}.weight": None for part in ("q", "k", "v", "output")},
    **{f"blk.0.attn_{part}_norm.weight": None for part in "qk"},
    "blk.0.attn_qkv.weight": np.ones((2 * 32 + N_EMBD, N_EMBD), np.float32),
    "blk.0.attn_gate.weight": np.ones((N_EMBD, N_EMBD), np.float32),
    "blk.0.ssm_conv1d.weight": np.ones((2 * 32 + N_EMBD, 4), np.float32),
    "blk.0.ssm_dt.bias": np.ones(4, np.float32), "blk.0.ssm_a": -np.ones(4, np.float32),
    "blk.0.ssm_alpha.weight": np.ones((4, N_EMBD), np.float32),
    "blk.0.ssm_beta.weight": np.ones((4, N_EMBD), np.float32),
    "blk.0.ssm_norm.weight": np.ones(16, np.float32),
    "blk.0.ssm_out.weight": np.zeros((N_EMBD, N_EMBD), np.float32),
}  # fmt: skip
"""A recurrent layer that adds nothing, in place of the first one of a model."""


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1,), (1, 1)], ids=str)
@pytest.mark.parametrize("is_recurrent", [False, True], ids=["attention", "recurrent"])
def test_a_block_that_knows_what_comes_is_always_right(
    tmp_path: Path, split: tuple[int, ...], is_recurrent: bool
) -> None:
    """Also where states are one token too far, and the next message continues from them."""
    more, devices = RECURRENT if is_recurrent else {}, ["cpu"] * len(split)
    path = certain(tmp_path / "m.gguf", "qwen35", reads_hidden=True, more=more)
    with load_model(path, devices, split, n_ctx=256, parallel=2, draft="mtp") as model:
        assert model.runtime.can_rewind != is_recurrent
        assert model.runtime.token_source is not None
        prompt = [7]
        for _ in range(2):
            drafts = Drafts(1, [MTPSource(model.runtime.runner)], always())
            (ids,), n_guessed, n_right = said(model, [prompt], 16, drafts, 5, temperature=0)
            expected = [following(prompt[-1])]
            while len(expected) < 16:
                expected.append(following(expected[-1]))
            assert ids == expected
            assert n_right == n_guessed > 3
            prompt = [*prompt, *ids, 9, 11]


@pytest.mark.slow
def test_logits_are_close_to_the_formulas(tmp_path: Path) -> None:
    """A head with only some of the tokens gives their logits."""
    path = mtp_gguf(tmp_path / "m.gguf")
    guesses = PlainMTP(path).guesses([*PROMPTS[0], 3])
    for n in (0, 256):
        with load_model(path, n_ctx=256, kv_type="f32", draft="mtp", draft_vocab=n) as model:
            runner = model.runtime.runner
            runner.forward(PROMPTS[0], Batch.of_one(0, 6, 6))
            found = runner.draft([3], Batch.of_one(6, 1, 0))
            np.testing.assert_allclose(found[0], guesses[-1][: n or 320], atol=1e-5)
