"""Guesses and pictures of models that several machines compute: the answers of one process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import (
    AnswerRequest,
    ChatMessage,
    EngineError,
    Finished,
    LoadParams,
    Model,
    SamplingParams,
)
from engine.generation.drafts import Drafts, MTPSource
from tests.engine.generation.test_drafts import answers
from tests.engine.model.architectures.test_file_variants import with_drafting_block
from tests.helpers.answers import ids_of, n_cached
from tests.helpers.hf_models.seeing import SEEING
from tests.helpers.machine_threads import machines, model_on
from tests.helpers.mtp_models import apart, mtp_gguf
from tests.helpers.pictures import random_picture, shown
from tests.helpers.prophet import always
from tests.helpers.tiny_gguf import tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def params(path: Path, sizes: Sequence[int], mode: str, **more: Any) -> LoadParams:
    groups = tuple(sizes) if mode == "groups" else None
    found = LoadParams(
        str(path), ("cpu",) * sum(sizes), split_mode=mode, groups=groups, n_ctx=512, parallel=3,
        cpu_threads=1, draft="off", mmproj="off",
    )  # fmt: skip
    return replace(found, **more)


@pytest.mark.parametrize(
    ("sizes", "mode", "arch"),
    [((1, 1), "groups", "glm4moe"), ((2, 1), "tensor", "step35"), ((1, 1), "groups", "qwen3next")],
)
def test_an_mtp_block_guesses(tmp_path: Path, sizes: Sequence[int], mode: str, arch: str) -> None:
    if arch == "qwen3next":  # with recurrent layers
        draft = with_drafting_block("qwen3next-q4_k_m")
        (other,) = (tensor for tensor in draft.tensors if "layer_output_norm" in tensor)
        del draft.tensors[other]
        path = draft.write(tmp_path / "m.gguf")
    else:
        n_mtp = 3 if arch == "step35" else 1
        path = mtp_gguf(tmp_path / "m.gguf", arch, quant="Q8_0", n_mtp=n_mtp)
    prompts = [[3 + (7 * n + i) % 190 for i in range(60 + n)] for n in range(3)]
    prompts.append(prompts[0][:50] + [9] * 20)
    wanted = params(path, sizes, mode)
    with Model(wanted) as one:
        expected = answers(one, prompts)
    with machines(len(sizes)) as there, model_on(sizes, replace(wanted, draft="auto")) as model:
        assert model._mtp.can_draft
        model.scheduler.drafts = Drafts(3, [MTPSource(model.runtime.runner)], always())
        assert answers(model, prompts) == expected
        assert answers(model, prompts[:1]) == expected[:1]
        assert any(rank.draft_recordings for rank in model.runtime.ranks), "guesses were replayed"
    assert not there.failures


def test_a_draft_model_guesses(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=128)
    wanted = params(path, (1, 1), "groups")
    with Model(wanted) as one:
        expected = answers(one, [[4, 5, 6]])
    with machines(2) as there, model_on((1, 1), replace(wanted, draft=str(path))) as model:
        assert model._draft is not None
        model.scheduler.drafts = Drafts(3, [model._draft.source], always())
        assert answers(model, [[4, 5, 6]]) == expected
        *_, end = model.generate([4, 5, 6], replace(GREEDY, max_tokens=20))
        assert isinstance(end, Finished)
        assert end.usage.n_accepted > 0.8 * end.usage.n_drafted > 0
    assert not there.failures


def test_a_file_of_a_block_alone_guesses(tmp_path: Path) -> None:
    """Each machine has a copy; another one of the same shape is refused by name."""
    path, block = apart(mtp_gguf(tmp_path / "m.gguf", "glm4moe", quant="Q8_0"))
    wanted, prompts = params(path, (1, 1), "groups"), [[3 + i for i in range(40)], [9] * 20]
    with Model(wanted) as one:
        expected = answers(one, prompts)
    guessing = replace(wanted, draft=str(block))
    there = tmp_path / "there"
    there.mkdir()
    copies = [there / file.name for file in (path, block)]
    for copy, file in zip(copies, (path, block), strict=True):
        copy.write_bytes(file.read_bytes())
    with machines(2, [str(copies[0])]) as found, model_on((1, 1), guessing) as model:
        assert model._mtp.can_draft
        model.scheduler.drafts = Drafts(3, [MTPSource(model.runtime.runner)], always())
        assert answers(model, prompts) == expected
        model.resplit([3.0, 1.0])
        assert answers(model, prompts) == expected
    assert not found.failures
    data = bytearray(block.read_bytes())
    for at in range(len(data) // 2, len(data), 500):
        data[at] ^= 1
    copies[1].write_bytes(data)
    with machines(2, [str(copies[0])]):
        with pytest.raises(EngineError, match="host1 has a different MTP file from host0"):
            model_on((1, 1), guessing)
        copies[1].unlink()
        with model_on((1, 1), guessing) as model:  # at the path of machine 0
            assert answers(model, prompts[:1]) == expected[:1]


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen35", "qwen3vl"])
def test_pictures_are_seen(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that see themselves, those with rows and columns, and those that are added later."""
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    next(found for found in SEEING if found.name == family).build(tmp_path)
    first = shown("the split model", random_picture(90, 60), random_picture(50, 120, seed=1))
    second = [first, ChatMessage("assistant", "hello"), ChatMessage("user", "world")]
    wanted = params(tmp_path / "model.gguf", (1, 1), "groups", mmproj="auto", kv_type="f32")

    def found(model: Model) -> list[tuple[list[int], int]]:
        told = [
            list(model.answer(AnswerRequest(messages=tuple(messages), sampling=GREEDY)))
            for messages in ([first], second)
        ]
        assert model._images.encoder is not None
        assert model._images.encoder.n_encoded == 2
        return [(ids_of(events), n_cached(events)) for events in told]

    with Model(wanted) as one:
        expected = found(one)
    with machines(2) as there, model_on((1, 1), wanted) as model:
        assert found(model) == expected
    assert not there.failures
