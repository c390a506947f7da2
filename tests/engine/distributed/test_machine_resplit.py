"""Models on several machines that are split anew: nothing of the cache is lost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine import EngineError, LoadParams, Model, OutOfDeviceMemory, SamplingParams
from engine.distributed import machine_runtime
from tests.helpers.answers import ids_of, n_cached
from tests.helpers.golden import golden_path
from tests.helpers.machine_threads import machines, model_on
from tests.helpers.tiny_gguf import tiny_gguf

PROMPT = [4, 5, 6, 9] * 70
WISH = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf(
        folder / "m.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=128, n_layer=4, n_ctx=600
    )


def params(path: Path, sizes: Sequence[int], mode: str) -> LoadParams:
    groups = tuple(sizes) if mode == "groups" else None
    return LoadParams(
        str(path), ("cpu",) * sum(sizes), split_mode=mode, groups=groups, n_ctx=512, parallel=2,
        cpu_threads=1, draft="off",
    )  # fmt: skip


def answer(model: Model, prompt: Sequence[int]) -> tuple[list[int], int]:
    """Return an answer, and how many tokens of the prompt were cached."""
    events = list(model.generate(prompt, WISH))
    return ids_of(events), n_cached(events)


def check(model: Model, split: Sequence[float]) -> list[list[int]]:
    """Return answers before, in the middle of, and behind a change of the split."""
    first, _ = answer(model, PROMPT)
    stream, told = model.generate([7, 8, 9], replace(WISH, max_tokens=20)), list[int]()
    while len(told) < 5:
        told += getattr(next(stream), "ids", ())
    model.resplit(split)
    told += [token for event in stream for token in getattr(event, "ids", ())]
    second, cached = answer(model, [*PROMPT, *first, 3])
    assert cached > len(PROMPT), "nothing is computed again"
    return [first, told, second]


@pytest.mark.parametrize(
    ("sizes", "mode", "split"),
    [
        ((1, 1), "groups", [3, 1]), ((2, 1), "tensor", [1, 1, 2]), ((1, 1, 1), "layer", [1, 2, 1]),
        ((1, 1), "groups", [1, 0]),
    ],
)  # fmt: skip
def test_a_split_changes_while_an_answer_is_computed(
    path: Path, sizes: Sequence[int], mode: str, split: Sequence[float]
) -> None:
    wanted = params(path, sizes, mode)
    with Model(wanted) as one:
        expected = check(one, split)
    with machines(len(sizes)) as there, model_on(sizes, wanted) as model:
        assert check(model, split) == expected
        assert model.params.split == tuple(split)
        model.resplit(None)
        assert answer(model, PROMPT) == (expected[0], len(PROMPT) - 1)
    assert there.ends == dict.fromkeys(range(1, len(sizes)))
    assert not there.failures


@pytest.mark.parametrize("mode", ["groups", "tensor"])
def test_recurrent_states_are_kept(mode: str) -> None:
    wanted = params(golden_path("falcon-h1-q4_k_m.gguf"), (1, 1), mode)
    with Model(wanted) as one:
        expected = check(one, [3, 1])
    with machines(2) as there, model_on((1, 1), wanted) as model:
        assert check(model, [3, 1]) == expected
    assert not there.failures


def test_too_little_memory_leaves_the_old_split(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = params(path, (1, 1), "groups")
    with machines(2) as there, model_on((1, 1), wanted) as model:
        expected, _ = answer(model, PROMPT)
        full = replace(wanted, split=(1, 3), reserve=(("cpu", 1 << 50),))
        with pytest.raises(OutOfDeviceMemory):
            model.split_as(replace(full, machines=(1, 1), n_batch=model.params.n_batch))
        assert answer(model, PROMPT) == (expected, len(PROMPT) - 1)

        def fail(*_: object) -> None:
            raise EngineError("The disk is broken.")

        monkeypatch.setattr(machine_runtime.MachineRuntime, "_load", fail)
        with pytest.raises(EngineError, match="broken"):
            model.resplit([1, 3])
        assert not model.is_loaded
        with pytest.raises(EngineError, match="unloaded"):
            answer(model, PROMPT)
        monkeypatch.undo()
        with model_on((1, 1), wanted) as again:
            assert answer(again, PROMPT)[0] == expected
    assert not there.failures
