"""Answers with guesses of an MTP block say what they say without, and right guesses are known."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Finished, LoadParams, Model, SamplingParams, load_model
from engine.errors import OutOfDeviceMemory
from engine.generation.drafts import Drafts, MTPSource
from engine.planning.planner import Planner
from tests.engine.generation.test_drafts import answers
from tests.engine.model.architectures.test_file_variants import with_drafting_block
from tests.helpers.mtp_models import MTP, N_EMBD, N_LAYER, OWN, mtp_gguf
from tests.helpers.prophet import always
from tests.helpers.tiers import paired

ARCHITECTURES = "glm4moe", "qwen35", "step35"
SPLITS = ((1,), (1, 1), (3, 1, 2))


def guessing(model: Model, most: int = 3) -> None:
    """Have every pass check as many guesses of the block as it can."""
    model.scheduler.drafts = Drafts(most, [MTPSource(model.runtime.runner)], always())


@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_answers_are_those_without_guesses(
    tmp_path: Path, arch: str, split: tuple[int, ...]
) -> None:
    """Alone and three at once, behind each other's beginnings, and behind a change of the split."""
    path = mtp_gguf(tmp_path / "m.gguf", arch, quant="Q8_0")
    prompts = [[3 + (7 * n + i) % 190 for i in range(250 + n)] for n in range(3)]
    prompts.append(prompts[0][:240] + [9] * 20)
    devices = ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=512, parallel=3, draft="off") as model:
        expected = answers(model, prompts)
        again = answers(model, prompts[:1])  # what is cached then has the bits of this split
        model.resplit(split[::-1])
        turned = answers(model, prompts[:1])
    with load_model(path, devices, split, n_ctx=512, parallel=3, draft="mtp") as model:
        guessing(model)
        assert answers(model, prompts) == expected
        assert answers(model, prompts[:1]) == again == expected[:1]
        model.resplit(split[::-1])
        guessing(model)
        assert answers(model, prompts[:1]) == turned


@pytest.mark.parametrize("split", [(1,), (3, 1, 2)])
@pytest.mark.parametrize("name", ["qwen35-q4_k_m", "qwen3next-q4_k_m"])
def test_answers_of_models_with_recurrent_layers_are_those_without_guesses(
    tmp_path: Path, name: str, split: tuple[int, ...]
) -> None:
    draft = with_drafting_block(name)
    (other,) = (tensor for tensor in draft.tensors if "layer_output_norm" in tensor)
    del draft.tensors[other]
    path = draft.write(tmp_path / "m.gguf")
    prompts = [[3 + (7 * n + i) % 190 for i in range(60 + n)] for n in range(3)]
    devices, options = ["cpu"] * len(split), {"n_ctx": 512, "parallel": 3}
    with load_model(path, devices, split, draft="off", **options) as model:
        expected = answers(model, prompts)
    with load_model(path, devices, split, **options) as model:
        guessing(model)
        assert answers(model, prompts) == expected
        assert any(rank.draft_recordings for rank in model.runtime.ranks)
        prompts[0] += [*expected[0][:-1], 5, 6, 7]
        again = answers(model, prompts[:1])
    with load_model(path, devices, split, draft="off", **options) as model:
        assert answers(model, prompts[:1]) == again


N_VOCAB = 40


def following(token: int) -> int:
    """Return the token that follows one in the text of `certain`."""
    return 3 + (token * 5 + 1) % (N_VOCAB - 3)


def certain(
    path: Path, arch: str, *, reads_hidden: bool, n_mtp: int = 1,
    more: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a model whose next token is a function of the last one, which its MTP blocks know.

    Blocks add nothing, so hidden states are embeddings of signs, and normed ones have other signs.

    Args:
        reads_hidden: whether the blocks see no embedding, only the hidden state of the token
            before; so it must be that of the right token, normed as the architecture has it.
        n_mtp: number of MTP blocks, of which each hands its hidden state on.
        more: metadata and tensors to add or replace, see `tiny_gguf`.
    """
    rng = np.random.default_rng(1)
    signs = np.sign(rng.standard_normal((N_VOCAB, N_EMBD))).astype(np.float32)
    turned = np.sign(rng.standard_normal(N_EMBD)).astype(np.float32)
    follows = [following(token) for token in range(N_VOCAB)]
    head, goals = np.zeros_like(signs), follows
    head[follows] = signs * turned
    read = signs * turned if reads_hidden and arch != "step35" else signs
    joint, zero = np.zeros((N_EMBD, 2 * N_EMBD), np.float32), np.zeros((N_EMBD, N_EMBD), np.float32)
    half = slice(N_EMBD, None) if reads_hidden else slice(N_EMBD)
    joint[:, half] = np.eye(N_EMBD)
    ones = np.ones(N_EMBD, np.float32)
    extra = {
        "token_embd.weight": signs, "output.weight": head, "output_norm.weight": turned,
    }  # fmt: skip
    for layer in range(N_LAYER, N_LAYER + n_mtp):
        if reads_hidden:
            goals = [follows[n] for n in goals]
        own_head, block = np.zeros_like(signs), f"blk.{layer}.nextn"
        own_head[goals] = read
        extra |= {f"{block}.eh_proj.weight": joint, f"{block}.shared_head_head.weight": own_head}
        extra |= {f"{block}.{name}.weight": ones for name in ("enorm", "hnorm", "shared_head_norm")}
    for layer in range(N_LAYER + n_mtp):
        extra[f"blk.{layer}.attn_output.weight"] = zero
        extra[f"blk.{layer}.ffn_down.weight"] = np.zeros((N_EMBD, 96), np.float32)
    changed = extra | dict(more or {})
    return mtp_gguf(path, arch, n_mtp=n_mtp, n_vocab=N_VOCAB, extra=changed)


def said(model: Model, prompt: Sequence[int], n: int) -> tuple[list[int], Finished]:
    """Return the greedy answer to a prompt, and its end."""
    ids, wanted = list[int](), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    for event in model.generate(prompt, wanted):
        ids += getattr(event, "ids", ())
    assert isinstance(event, Finished)
    return ids, event


@pytest.mark.parametrize("n_mtp", [1, 3])
@pytest.mark.parametrize("reads_hidden", [False, True], ids=["embedding", "hidden state"])
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_blocks_that_know_what_comes_are_always_right(
    tmp_path: Path, arch: str, split: tuple[int, ...], reads_hidden: bool, n_mtp: int
) -> None:
    """Token and hidden state belong to each other; one alone has a true state for one guess."""
    path = certain(tmp_path / "m.gguf", arch, reads_hidden=reads_hidden, n_mtp=n_mtp)
    with load_model(path, ["cpu"] * len(split), split, n_ctx=600, draft="mtp") as model:
        guessing(model, 1 if reads_hidden and n_mtp == 1 else 7 if n_mtp > 1 else 3)
        for prompt in ([7], [11, 20, 5] * 90):
            ids, end = said(model, prompt, 60)
            expected = [following(prompt[-1])]
            while len(expected) < 60:
                expected.append(following(expected[-1]))
            assert ids == expected
            assert end.usage.n_accepted == end.usage.n_drafted > 25


def test_guesses_are_used_where_nothing_else_is_asked_for(tmp_path: Path) -> None:
    """On CPUs, and not where guesses are switched off or come from the text."""
    path = certain(tmp_path / "m.gguf", "glm4moe", reads_hidden=False)
    n_bytes = {}
    for draft in ("auto", "ngram", "off"):
        with load_model(path, n_ctx=600, draft=draft) as model:
            n_bytes[draft] = sum(rank.measured.weights for rank in model.memory())
            has_block = model.runtime.runner.drafter is not None
            assert has_block == (draft == "auto")
            said(model, [7], 40)
    assert n_bytes["auto"] > n_bytes["ngram"] == n_bytes["off"]


def test_a_block_without_room_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plan said that the window showed before."""
    path = mtp_gguf(tmp_path / "m.gguf", own=OWN)
    planner, params = Planner(path), LoadParams(str(path), n_ctx=64)
    needed = {
        draft: planner.plan(replace(params, draft=draft)).bytes_by_device()["cpu"]
        for draft in ("ngram", "mtp")
    }
    free = {"cpu": sum(needed.values()) // 2}
    assert planner.plan(params, free).bytes_by_device()["cpu"] <= free["cpu"] < needed["mtp"]
    planner.close()
    monkeypatch.setattr("engine.runtime.thread_runtime.free_bytes", lambda devices: free)
    with load_model(path, n_ctx=64) as model:
        assert model.runtime.runner.drafter is None
        model.resplit([1], devices=["cpu"])
    with pytest.raises(OutOfDeviceMemory):
        load_model(path, n_ctx=64, draft="mtp").close()


def test_a_block_that_cannot_be_used_is_left_out(tmp_path: Path) -> None:
    """The file was good for answers before there were guesses."""
    extra = {f"{MTP}nextn.hnorm.weight": None}
    path = mtp_gguf(tmp_path / "m.gguf", extra=extra)
    with load_model(path, n_ctx=64) as model:
        assert model.runtime.runner.drafter is None


def test_states_are_those_without_a_block(tmp_path: Path) -> None:
    """A file of one load can be used by the other."""
    path = mtp_gguf(tmp_path / "m.gguf", quant="Q8_0")
    prompt = [3 + i % 190 for i in range(300)]
    saved, found = {}, {}
    for draft in ("mtp", "off"):
        with load_model(path, n_ctx=512, draft=draft) as model:
            found[draft], _ = said(model, prompt, 20)
            saved[draft] = tmp_path / f"{draft}.state"
            model.save_state(saved[draft])
    assert saved["mtp"].read_bytes() == saved["off"].read_bytes()
    with load_model(path, n_ctx=512, draft="mtp") as model:
        guessing(model)
        model.load_state(saved["off"])
        assert said(model, prompt, 20)[0] == found["off"] == found["mtp"]
