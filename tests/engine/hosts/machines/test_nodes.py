"""`tandem serve --nodes` and `tandem join`: official clients, refusals, and machines that fail."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest

from engine.distributed.straight import BACKEND_VARIABLE
from tests.helpers.node_processes import NodeProcess, nodes, read_until_lost, until
from tests.helpers.tiny_gguf import tiny_gguf

NAMED_S = 5.0
"""Seconds within which a machine that has failed must be named."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf(folder / "m.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=128, n_ctx=4096)


def asked(client: openai.OpenAI, prompt: str, **options: Any) -> str:
    given = {"max_tokens": 12, "temperature": 0, **options}
    return client.completions.create(model="m", prompt=prompt, **given).choices[0].text


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["", "gloo:cpu"], ids=["by host memory", "straight"])
def test_clients_are_answered_and_a_killed_machine_is_named_and_comes_back(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    link = "nccl" if backend else "auto"  # also if it is slower
    with nodes(tmp_path, path, 3, "--machine-link", link) as there:
        said = "GLOO carries values between the machines: proven in"
        assert all((said in x.text) == bool(backend) for x in there.joined)
        client = openai.OpenAI(base_url=f"{there.address}/v1", api_key="-", max_retries=0)
        prompts = ["one", "two two", "three", "four"]
        alone = [asked(client, prompt) for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda prompt: asked(client, prompt), prompts)) == alone
        assert httpx.get(f"{there.address}/health").status_code == 200

        for number, how in ((1, signal.SIGKILL), (0, signal.SIGSTOP)):
            begins = [len(x.text) for x in (there.server, *there.joined)]
            problem: list[str] = []
            answering = threading.Thread(target=read_until_lost, args=(client, problem))
            answering.start()
            until(lambda: httpx.get(f"{there.address}/slots").json()["running"] > 0, 10)
            victim = there.joined[number].worker()
            victim.send_signal(how)
            seconds = until(lambda problem=problem: bool(problem), 2 * NAMED_S)
            assert seconds < NAMED_S
            assert "its process was" in problem[0]
            answering.join()
            for process, begin in zip((there.server, *there.joined), begins, strict=True):
                process.wait_for("its process was", NAMED_S, begin)
            until(lambda victim=victim: is_gone(victim), NAMED_S)
            assert asked(client, prompts[0]) == alone[0], "the next request loads it again"


def test_refusals_are_sentences(path: Path, tmp_path: Path) -> None:
    """Wrong tokens, files and addresses where nobody listens; torch is not needed for it."""
    server = NodeProcess(
        tmp_path / "serve.log", "serve", str(path), "--nodes", "2", "--rendezvous", "127.0.0.1:0",
        "--devices", "cpu", "--port", "0",
    )  # fmt: skip
    try:
        address = server.wait_for(r"join \S+").removeprefix("join ")
        for options, sentence in (
            (("--token", "another token"), "The token is wrong."),
            (("--model", str(tmp_path / "none.gguf")), "There is no file"),
            (("--interface", "none0"), "There is no interface none0."),
        ):
            joining = NodeProcess(
                tmp_path / "join.log", "join", address, "--devices", "cpu", *options
            )
            assert joining.process.wait(60) == 1
            assert sentence in joining.text
            assert "Traceback" not in joining.text
            joining.end()
        assert server.process.poll() is None
    finally:
        assert not server.end()
    joining = NodeProcess(tmp_path / "join.log", "join", address, "--devices", "cpu")
    assert joining.process.wait(60) == 1
    assert "cannot be reached" in joining.text
    joining.end()
