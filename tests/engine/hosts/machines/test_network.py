"""Three machines that a bridge joins: the answers of one process, and machines that fail.

Where network namespaces are not permitted, addresses of the loopback interface stand for machines.
"""

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import openai
import pytest

from engine import Model
from tests.helpers import node_numbers
from tests.helpers.golden import golden_path
from tests.helpers.hf_models.seeing import SEEING
from tests.helpers.network import Place, loopback, network
from tests.helpers.node_processes import NodeProcess, nodes, wait_until_all_end_well
from tests.helpers.pictures import as_file, random_picture
from tests.helpers.tiny_gguf import tiny_gguf

pytestmark = pytest.mark.slow

N = 3

T = TypeVar("T")


@pytest.fixture(scope="module", params=["bridge", "loopback"])
def places(request: pytest.FixtureRequest) -> Iterator[Sequence[Place]]:
    """Return three machines."""
    if request.param == "loopback":
        yield loopback(N)
        return
    with ExitStack() as stack:
        try:
            made = stack.enter_context(network(N))
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made: {error}")
        yield made.places


@pytest.mark.parametrize("name", ["llama-gqa-q4_k_m", "olmoe-q4_k_m", "falcon-h1-q4_k_m"])
def test_golden_models_have_the_bits_of_one_process(
    places: Sequence[Place], tmp_path: Path, name: str
) -> None:
    """A dense one, one with experts, and a hybrid."""
    path = golden_path(f"{name}.gguf")
    with Model(node_numbers.params(path, N)) as one:
        expected = node_numbers.numbers(one, tmp_path / "one.state")
    started = [
        subprocess.Popen(
            [*place.prefix, sys.executable, "-m", "tests.helpers.node_numbers", str(path),
             str(tmp_path / "found.npz")],
            env=_environment(places, rank), stdin=subprocess.DEVNULL,
        )
        for rank, place in enumerate(places)
    ]  # fmt: skip
    wait_until_all_end_well(started)
    with np.load(tmp_path / "found.npz") as found:
        assert set(found) == {*expected, "straight"}
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def _environment(places: Sequence[Place], rank: int) -> dict[str, str]:
    """Return what torchrun's agent would tell a process."""
    return {
        **os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(places)), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": places[0].address, "MASTER_PORT": str(29500 + os.getpid() % 1000),
        "GLOO_SOCKET_IFNAME": "eth0" if places[0].namespace else "lo",
    }  # fmt: skip


def likelihoods(address: str) -> list[Any]:
    """Return tokens and log probabilities of four answers, which are computed at once."""

    def asked(prompt: str) -> Any:
        found = client.completions.create(
            model="m", prompt=prompt, max_tokens=12, temperature=0, logprobs=5,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        kept = found.choices[0].logprobs
        assert kept is not None
        assert len(kept.tokens or ()) == 12
        return kept.tokens, kept.token_logprobs, kept.top_logprobs

    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        return list(pool.map(asked, ["one", "two two", "three", "four"]))


def told_by_one(path: Path, log: Path, ask: Callable[[str], T], *options: str) -> T:
    """Return what the server of one process tells, given its address."""
    alone = NodeProcess(
        log, "serve", str(path), "--devices", "cpu,cpu,cpu", "--port", "0",
        "--split-mode", "groups", "--groups", "1,1,1", "--threads", "3", *options,
    )  # fmt: skip
    try:
        return ask(alone.wait_for(r"listening on \S+").removeprefix("listening on "))
    finally:
        assert not alone.end()


def test_clients_get_the_numbers_of_one_process(places: Sequence[Place], tmp_path: Path) -> None:
    """All numbers that four requests at once are answered with are equal."""
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=128)
    options = ("--parallel", "4", "--alias", "m")
    expected = told_by_one(path, tmp_path / "alone.log", likelihoods, *options)
    with nodes(tmp_path, path, places, *options) as there:
        assert likelihoods(there.address) == expected


def test_clients_show_pictures(
    places: Sequence[Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    next(family for family in SEEING if family.name == "gemma3").build(tmp_path)
    picture = base64.b64encode(as_file(random_picture(90, 60))).decode()
    parts: Any = [
        {"type": "text", "text": "hello"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    ]

    def seen(address: str) -> Any:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:
            found = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": parts}], max_tokens=8,
                temperature=0, logprobs=True, top_logprobs=5,
            ).choices[0]  # fmt: skip
        assert found.logprobs is not None
        return found.logprobs.content

    path, options = tmp_path / "model.gguf", ("--alias", "m", "--kv-type", "f32")
    expected = told_by_one(path, tmp_path / "alone.log", seen, *options)
    assert expected
    with nodes(tmp_path, path, places, *options) as there:
        assert seen(there.address) == expected
