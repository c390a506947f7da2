"""The caches and states of a model survive every change of its split, bit for bit.

A state file has it as a single rank would, so two files are alike if and only if two caches hold
the same. The models are random ones of `tests.helpers.hf_models`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import AnswerRequest, Model, SamplingParams, TokenText, load_model
from tests.helpers.answers import ask
from tests.helpers.golden import golden_logits, golden_path
from tests.helpers.hf_models import FAMILIES
from tests.helpers.passes import forward_alone
from tests.helpers.tiers import swept
from tests.helpers.tiny_gguf import tiny_gguf

SPLITS: dict[str, dict[str, Any]] = {
    "uneven": {"devices": ["cpu"] * 3, "split": [3, 1, 2], "split_mode": "tensor"},
    "one rank": {"devices": ["cpu"], "split": None, "split_mode": "tensor"},
    "more ranks than heads": {"devices": ["cpu"] * 5, "split": None, "split_mode": "tensor"},
    "by layers": {"devices": ["cpu"] * 2, "split": [1, 2], "split_mode": "layer"},
    "an empty rank": {"devices": ["cpu"] * 3, "split": [5, 0, 1], "split_mode": "tensor"},
    "in groups": {"devices": ["cpu"] * 4, "split": [1, 2, 2, 1], "split_mode": "groups"},
}
BY_NAME = {family.name: family for family in FAMILIES}
TYPICAL = (
    "llama", "qwen3moe", "gemma4-shared-kv", "deepseek2", "kimi-linear", "mamba2", "falcon-h1",
    "lfm2",
)  # fmt: skip
"""One for each kind of thing that is remembered: keys and values, latents, states, both."""

GOLDEN = ("deepseek3-mla-q4_k_m", "mamba-q5_0", "qwen3next-q4_k_m", "gemma3-q4_0")
PROMPT, NEXT = 11, [7, 3, 9, 4, 2]


def state_of(model: Model, path: Path) -> bytes:
    model.save_state(path)
    return path.read_bytes()


def probe(model: Model) -> Any:
    """Return logits of further tokens: two at once, then one by one, until they are replayed."""
    n = model.n_cached
    rows = [forward_alone(model.runtime.runner, NEXT[:2], n)]
    rows += [
        forward_alone(model.runtime.runner, [token], n + 2 + i) for i, token in enumerate(NEXT[2:])
    ]
    return np.concatenate(rows)


def check_walk(path: Path, ids: list[int], folder: Path, **options: Any) -> None:
    """Go from split to split and back to the first one, with a conversation in the cache."""
    first = next(iter(SPLITS))
    with load_model(path, **SPLITS[first], **options) as model:
        ask(model, ids[:PROMPT], 4)
        n_cached, state = model.n_cached, state_of(model, folder / "state")
        before = probe(model)
        for name in (*list(SPLITS)[1:], first):
            model.load_state(folder / "state")  # to before the probe
            model.resplit(**SPLITS[name])
            assert model.n_cached == n_cached
            assert state_of(model, folder / "after") == state, name
            for memory in model.memory():
                assert memory.measured.weights == memory.predicted.weights, name
                assert memory.measured.kv == memory.predicted.kv, name
            with load_model(path, **SPLITS[name], **options) as fresh:
                assert fresh.load_state(folder / "state").ids == tuple(model.scheduler.last)
                assert state_of(fresh, folder / "fresh") == state, name
                assert np.array_equal(found := probe(model), probe(fresh)), name
        assert np.array_equal(found, before), "a → b → a"


@pytest.mark.parametrize("name", swept(BY_NAME, TYPICAL))
def test_what_is_remembered_survives_every_split(name: str, tmp_path: Path) -> None:
    ids, _ = BY_NAME[name].build(tmp_path / "m.gguf")
    check_walk(tmp_path / "m.gguf", ids, tmp_path, n_ctx=64)


def told(model: Model, ids: Sequence[int], n: int) -> Iterator[TokenText]:
    """Yield n tokens behind some, with the probabilities of the likeliest."""
    wanted = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    command = AnswerRequest(prompt=tuple(ids), sampling=wanted, n_logprobs=3)
    return (event for event in model.answer(command) if isinstance(event, TokenText))


@pytest.mark.parametrize("name", swept(TYPICAL, ["llama", "falcon-h1"]))
def test_an_answer_goes_on_from_just_the_state_that_it_had(name: str, tmp_path: Path) -> None:
    """Another split adds up in another order, so this is what a re-split between tokens promises:
    what was computed so far keeps its bits, and what follows has those of a model on the new split
    that has loaded it."""
    ids, _ = BY_NAME[name].build(tmp_path / "m.gguf")
    ids, n, n_before = ids[:PROMPT], 10, 4
    with load_model(tmp_path / "m.gguf", **SPLITS["uneven"], n_ctx=64, draft="off") as model:
        events = []
        for event in told(model, ids, n):
            events.append(event)
            if len(events) == n_before:
                state = state_of(model, tmp_path / "state")
                model.resplit(**SPLITS["by layers"])
                assert state_of(model, tmp_path / "after") == state
    so_far = [token for event in events[:n_before] for token in event.ids]
    with load_model(tmp_path / "m.gguf", **SPLITS["by layers"], n_ctx=64, draft="off") as fresh:
        assert len(fresh.load_state(tmp_path / "state").ids) == len(ids) + n_before - 1
        behind = list(told(fresh, [*ids, *so_far], n - n_before))
    assert [event.ids for event in behind] == [event.ids for event in events[n_before:]]
    assert [event.logprobs for event in behind] == [event.logprobs for event in events[n_before:]]


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    "name", swept(["llama", "qwen35", "jamba", "deepseek2"], ["llama", "qwen35"])
)
def test_the_same_without_kernels(name: str, tmp_path: Path) -> None:
    ids, _ = BY_NAME[name].build(tmp_path / "m.gguf")
    check_walk(tmp_path / "m.gguf", ids, tmp_path, n_ctx=64)


@pytest.mark.parametrize(
    "kv_type",
    swept(["f32", "bf16", "q8_0", "q4_0", "q8_0/q4_0", "f16/q8_0"], ["bf16", "q4_0", "q8_0/q4_0"]),
)
def test_any_type_of_keys_and_values(kv_type: str, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", n_head=6, n_head_kv=3, head_dim=32, quant="Q4_0")
    check_walk(path, list(range(5, 25)), tmp_path, n_ctx=64, kv_type=kv_type)


@pytest.mark.parametrize("name", swept(GOLDEN, GOLDEN[2:]))
def test_quantised_models(name: str, tmp_path: Path) -> None:
    ids, _ = golden_logits(name)
    check_walk(golden_path(f"{name}.gguf"), ids, tmp_path, n_ctx=128)
