"""Several ranks on one real GPU, with kernels that wait for each other on their own streams.

TRITON_INTERPRET=0 pytest -m gpu tests/engine/backends/gpu/test_virtual_gpus.py
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Model, SamplingParams, TokenText, load_model
from engine.model.forward.batch import Piece
from engine.runtime.measuring.kernel_times import host_s
from tests.helpers.passes import forward_alone
from tests.helpers.tiny_gguf import tiny_gguf

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

IDS = [5, 9, 33, 12]
N_RANKS = (2, 4)
MAX_HOST_S = 300e-6
"""Seconds per rank and token; a step that takes longer is the host's fault."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return tiny_gguf(
        folder / "m.gguf", quant="Q8_0", n_layer=4, n_embd=512, n_ff=1024, n_head=8, n_head_kv=4
    )


@pytest.fixture(params=N_RANKS)
def split(request: pytest.FixtureRequest, path: Path) -> Iterator[Model]:
    n: int = request.param
    with load_model(path, ["cuda:0"] * n, [1] * n, n_ctx=512) as model:
        yield model


def answer(model: Model, **settings: object) -> list[int]:
    params = SamplingParams(max_tokens=64, ignore_eos=True, **settings)
    events = model.generate(IDS, params)
    return [token for event in events if isinstance(event, TokenText) for token in event.ids]


def singly(model: Model, ids: list[int]) -> np.ndarray:
    return np.stack([forward_alone(model.runtime.runner, [t], n)[0] for n, t in enumerate(ids)])


def test_they_capture_a_token_whole_and_give_what_computing_gives(split: Model) -> None:
    passes = split.runtime.runner
    assert passes.is_captured_whole, [rank.refusal for rank in split.runtime.ranks]
    assert split.runtime.token_source is not None
    streams = {torch.cuda.current_stream().cuda_stream}
    streams |= {stream.cuda_stream for stream in passes.executor._streams if stream is not None}
    assert len(streams) == len(split.runtime.ranks) + 1
    repeated = singly(split, IDS)
    passes.drop_recordings()
    passes.n_single[1] = 1000
    assert np.array_equal(singly(split, IDS), repeated)


def test_they_write_what_one_rank_writes(split: Model, path: Path) -> None:
    settings = [{"temperature": 0}, {"temperature": 0.9, "top_k": 20, "seed": 3}]
    found = [answer(split, **some) for some in settings]
    with load_model(path, ["cuda:0"], n_ctx=512) as model:
        assert found == [answer(model, **some) for some in settings]


def test_many_replays_give_the_same_bits(split: Model) -> None:
    """No replay hangs, and no bit differs."""
    expected = forward_alone(split.runtime.runner, [7], 100)
    for _ in range(2000):
        assert np.array_equal(forward_alone(split.runtime.runner, [7], 100), expected)


@pytest.mark.parametrize("n", [1, *N_RANKS])
def test_the_host_starts_a_token_quickly(
    n: int, path: Path, record_property: Callable[[str, object], None]
) -> None:
    with load_model(path, ["cuda:0"] * n, [1] * n, n_ctx=512) as model:
        seconds = host_s(model.runtime, Piece(100, 1))
        assert seconds is not None
        record_property("host_us", round(1e6 * seconds))
        assert seconds < n * MAX_HOST_S


def test_another_split_and_back(path: Path) -> None:
    with load_model(path, ["cuda:0"], n_ctx=512) as model:
        expected = answer(model, temperature=0)
        for n in (2, 3, 1):
            model.resplit([1] * n, devices=["cuda:0"] * n)
            assert answer(model, temperature=0) == expected
            assert model.runtime.token_source is not None
