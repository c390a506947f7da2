"""State files of models that several machines compute: those of one process, to the byte."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine import Finished, LoadParams, Model, SamplingParams
from tests.helpers.golden import golden_path
from tests.helpers.machine_threads import machines, model_on
from tests.helpers.tiny_gguf import tiny_gguf

PROMPT = [4, 5, 6, 9] * 70
WISH = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def params(path: Path, sizes: Sequence[int], mode: str, kv_type: str = "f16") -> LoadParams:
    groups = tuple(sizes) if mode == "groups" else None
    return LoadParams(
        str(path), ("cpu",) * sum(sizes), split_mode=mode, groups=groups, n_ctx=512, parallel=2,
        cpu_threads=1, draft="off", kv_type=kv_type,
    )  # fmt: skip


def answer(model: Model, prompt: Sequence[int]) -> tuple[list[int], int]:
    """Return an answer, and how many tokens of the prompt were cached."""
    ids: list[int] = []
    for event in model.generate(prompt, WISH):
        ids += getattr(event, "ids", ())
    assert isinstance(event, Finished)
    return ids, event.usage.cached_tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf(folder / "m.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=128, n_ctx=600)


def check(path: Path, folder: Path, sizes: Sequence[int], mode: str, kv_type: str = "f16") -> None:
    """Check that the file is that of one process, and that each goes on from the other's."""
    wanted = params(path, sizes, mode, kv_type)
    with Model(wanted) as one:
        first, _ = answer(one, PROMPT)
        one.save_state(folder / "one")
        second, n_cached = answer(one, [*PROMPT, *first, 3])
    with machines(len(sizes)) as there, model_on(sizes, wanted) as model:
        assert answer(model, PROMPT)[0] == first
        model.save_state(folder / "many")
        assert (folder / "many").read_bytes() == (folder / "one").read_bytes()
    assert not there.failures
    with machines(len(sizes)) as there, model_on(sizes, wanted) as model:
        model.load_state(folder / "one")
        assert answer(model, [*PROMPT, *first, 3]) == (second, n_cached)
        assert n_cached > len(PROMPT)
        assert answer(model, PROMPT)[0] == first
    assert not there.failures


@pytest.mark.parametrize(
    ("sizes", "mode", "kv_type"),
    [((1, 1), "groups", "q8_0"), ((2, 1), "tensor", "f16"), ((1, 1, 1), "layer", "f16")],
)
def test_states_are_those_of_one_process(
    path: Path, tmp_path: Path, sizes: Sequence[int], mode: str, kv_type: str
) -> None:
    check(path, tmp_path, sizes, mode, kv_type)


@pytest.mark.parametrize("mode", ["groups", "tensor"])
def test_recurrent_states_are_those_of_one_process(tmp_path: Path, mode: str) -> None:
    check(golden_path("falcon-h1-q4_k_m.gguf"), tmp_path, (1, 1), mode)
