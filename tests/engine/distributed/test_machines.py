"""Models that several machines compute: the bits and the abilities of one process.

Here the machines are threads with queues in place of connections.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import EngineError, Finished, LoadParams, Model, SamplingParams
from engine.errors import CommError
from tests.helpers.golden import golden_path
from tests.helpers.machine_threads import machines, model_on
from tests.helpers.tiny_gguf import tiny_gguf

PROMPTS = [[5, 6, 7, 9], [8, 3] * 9, [7]]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SAMPLED: dict[str, Any] = {
    "seed": 7, "temperature": 1.5, "top_k": 20, "max_tokens": 6, "ignore_eos": True,
}  # fmt: skip
ALL_LOGITS: dict[str, Any] = {
    "seed": 8, "temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 6,
}  # fmt: skip


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep torch's number of threads, which a process has for itself."""
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf(folder / "m.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=128, n_ctx=600)


def params(path: Path, sizes: Sequence[int], mode: str = "groups", **more: Any) -> LoadParams:
    given = {"n_ctx": 512, "parallel": 3, "cpu_threads": 1, "draft": "off", **more}
    groups = tuple(sizes) if mode == "groups" else None
    return LoadParams(str(path), ("cpu",) * sum(sizes), split_mode=mode, groups=groups, **given)


def answers(model: Model, prompts: Sequence[Sequence[int]], *wishes: dict[str, Any]) -> list[Any]:
    """Return the tokens of answers that are computed at once."""
    asked = [model.generate(p, SamplingParams(**w)) for p in prompts for w in wishes]
    found: list[list[int]] = [[] for _ in asked]
    while not all(answer.is_over for answer in asked):
        for answer, ids in zip(asked, found, strict=True):
            ids += getattr(next(answer, None), "ids", ())
    return found


def results(model: Model) -> tuple[np.ndarray, list[Any]]:
    logits = model.logits([*range(3, 20)])
    return logits, [
        answers(model, PROMPTS[:1], GREEDY),  # alone, so that tokens are replayed
        answers(model, PROMPTS, GREEDY, SAMPLED, ALL_LOGITS),
        answers(model, [[*range(3, 203), *range(3, 203)]], GREEDY),  # in parts, one behind another
    ]


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        ((1, 1), "groups"), ((2, 1), "groups"), ((1, 2, 1), "groups"), ((1, 2), "layer"),
        ((1, 1), "tensor"), ((2, 1, 2), "tensor"),
    ],
)  # fmt: skip
def test_machines_compute_the_bits_of_one_process(
    path: Path, sizes: Sequence[int], mode: str
) -> None:
    with Model(params(path, sizes, mode)) as one:
        logits, tokens = results(one)
    with machines(len(sizes)) as there, model_on(sizes, params(path, sizes, mode)) as model:
        found, found_tokens = results(model)
        assert np.array_equal(found, logits)
        assert found_tokens == tokens
        assert all(rank.recordings for rank in model.runtime.ranks), "tokens were replayed"
    assert there.ends == dict.fromkeys(range(1, len(sizes)))
    assert not there.failures


@pytest.mark.parametrize(("split", "mode"), [((0, 1, 0), "groups"), ((0, 1), "tensor")])
def test_one_machine_computes_alone_while_others_only_stay(
    path: Path, split: Sequence[float], mode: str
) -> None:
    """Also where the first one, which has the tokenizer and samples, has no share."""
    sizes = (1,) * len(split)
    with Model(params(path, (1,))) as one:
        logits, tokens = results(one)
    shared = params(path, sizes, mode, split=tuple(map(float, split)))
    with machines(len(sizes)) as there, model_on(sizes, shared) as model:
        found, found_tokens = results(model)
        assert model.runtime.plan.devices[0].memory.total == 0
        assert np.array_equal(found, logits)
        assert found_tokens == tokens
        model.resplit([1.0] * len(split))
        assert answers(model, PROMPTS[:1], GREEDY)
    assert not there.failures


@pytest.mark.parametrize("name", ["llama-gqa-q4_k_m", "olmoe-q4_k_m", "falcon-h1-q4_k_m"])
def test_golden_models_have_these_bits_on_three_machines(name: str) -> None:
    """A dense one, one with experts, and a hybrid."""
    wanted = params(golden_path(f"{name}.gguf"), (1, 1, 1))
    with Model(wanted) as one:
        logits, tokens = results(one)
    with machines(3), model_on((1, 1, 1), wanted) as model:
        found, found_tokens = results(model)
    assert np.array_equal(found, logits)
    assert found_tokens == tokens


@pytest.mark.parametrize("tied", [False, True])
def test_a_boundary_carries_the_hidden_state_once_for_each_token(
    path: Path, tmp_path: Path, *, tied: bool
) -> None:
    """Also where the output head is the embedding, of which the first machine has a copy."""
    if tied:
        sizes = {"n_embd": 128, "n_head_kv": 4, "n_ff": 128, "n_ctx": 600}
        path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", tied=True, **sizes)
    wanted = params(path, (1, 1))
    with machines(2) as there, model_on((1, 1), wanted) as model:
        n_vocab = model.runtime.runner.n_vocab
        answers(model, PROMPTS[:1], GREEDY)
        before = [wire.n_sent for wire in there.wires]
        (ids,) = answers(model, [[11, 12]], {**GREEDY, "max_tokens": 20})
        sent = [wire.n_sent - n for wire, n in zip(there.wires, before, strict=True)]
    row = 128 * 4
    assert sent[0] < (len(ids) + 2) * (row + 4096 + 200), "the residual stream and an order"
    assert sent[1] < n_vocab * 4 + len(ids) * 400, "candidates, after the prompt's logits"


def test_a_shared_beginning_is_found_and_guesses_are_checked(path: Path) -> None:
    with machines(2), model_on((1, 1), params(path, (1, 1), draft="ngram")) as model:
        prompt, wanted = [4, 5, 6] * 90, SamplingParams(**{**GREEDY, "max_tokens": 30})
        list(model.generate(prompt, wanted))
        *_, end = model.generate([*prompt, 7], wanted)
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens >= 256


def test_another_file_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    other = tiny_gguf(tmp_path / "o.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=256)
    with machines(2, [str(other)]), pytest.raises(EngineError, match="host1 has a different file"):
        model_on((1, 1), params(path, (1, 1)))


def test_what_a_machine_lacks_is_told_and_the_next_load_succeeds(path: Path) -> None:
    wanted = params(path, (1, 1))
    with machines(2) as there:
        with pytest.raises(EngineError, match=r"host1: .*cuda:7"):
            model_on((1, 1), replace(wanted, devices=("cpu", "cuda:7")))
        with model_on((1, 1), wanted) as model:
            assert answers(model, PROMPTS[:1], GREEDY)
    assert there.ends == {1: None}


@pytest.mark.parametrize(
    ("sizes", "mode"), [((1, 1), "groups"), ((2, 1), "tensor"), ((1, 2), "layer")]
)
def test_embeddings_scores_and_forms_are_those_of_one_process(
    path: Path, sizes: Sequence[int], mode: str
) -> None:
    number = SamplingParams(temperature=0, max_tokens=30, json_schema='{"type": "integer"}')

    def found(model: Model) -> list[Any]:
        texts = [getattr(event, "text", "") for event in model.generate("one", number)]
        return [model.embed([[5, 6, 7], [3]]), model.score([5, 6, 7, 8] * 3, 4), texts]

    with Model(params(path, sizes, mode)) as one:
        expected = found(one)
    with machines(len(sizes)) as there, model_on(sizes, params(path, sizes, mode)) as model:
        assert found(model) == expected
    assert not there.failures


def test_a_machine_that_is_gone_ends_the_model(path: Path) -> None:
    with machines(2) as there:
        model = model_on((1, 1), params(path, (1, 1)))
        there.queues.is_broken.set()
        with pytest.raises(CommError, match="has stopped"):
            answers(model, PROMPTS[:1], GREEDY)
        assert len(there.failures) == 1
        assert not model.is_loaded
        with pytest.raises(EngineError):
            answers(model, PROMPTS[:1], GREEDY)
        model.close()


def test_settings_for_machines_need_them(path: Path) -> None:
    with pytest.raises(EngineError, match="have not joined"):
        Model(replace(params(path, (1, 1)), machines=(1, 1)))
