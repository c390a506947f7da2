"""Ranks that are processes: same logits and tokens as with threads, and how they end."""

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import (
    EngineError,
    Finished,
    LoadParams,
    Model,
    SamplingParams,
    Timings,
    TokenText,
    Usage,
    printable,
)
from engine.distributed.program import _params, _parser, _write
from engine.distributed.wire import GlooWire
from engine.generation.results import GenerationEvent
from tests.helpers.acting_texts import ESCAPES, acting
from tests.helpers.tiny_gguf import least_gguf, tiny_gguf

PROMPTS = [[5, 6, 7, 9], [5, 6, 7, 9, 4], [8, 3] * 9, [7]]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 6, "ignore_eos": True},
    {"seed": 7, "temperature": 1.5, "top_k": 20, "max_tokens": 6, "ignore_eos": True},
    {"seed": 8, "temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 6},
    {"seed": 7, "top_k": 20, "max_tokens": 12, "ignore_eos": True, "banned_strings": ["e", "s"]},
]
END_S = 5.0


class Processes:
    """Processes of the distributed program on this machine, one per rank."""

    def __init__(self, n: int, arguments: list[str], **variables: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n)}
        common = {**os.environ, **place, "OMP_NUM_THREADS": "1", **variables}
        if sys.platform == "linux":
            common["GLOO_SOCKET_IFNAME"] = "lo"
        self._all = [
            subprocess.Popen(
                [sys.executable, "-m", *arguments], env={**common, "RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(n)
        ]  # fmt: skip

    def ends(self) -> list[tuple[int, str, str]]:
        """Return the exit status, the output and the error output of each process."""
        try:
            found = [process.communicate(timeout=180) for process in self._all]
        finally:
            for process in self._all:
                process.kill()
        return [(p.returncode, *texts) for p, texts in zip(self._all, found, strict=True)]


def tasks(folder: Path, splits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases: a small model in several splits."""
    path = str(tiny_gguf(folder / "m.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=128))
    common = {"ids": [*range(3, 20)], "prompts": PROMPTS, "sampling": SAMPLING}
    return [
        {"name": f"tiny-{n}", "params": {"path": path, **split}, **common}
        for n, split in enumerate(splits)
    ]


def check(task: dict[str, Any], folder: Path) -> None:
    """Check that processes give the logits and tokens that threads give, also several at once."""
    model = Model(LoadParams(**task["params"]))
    assert np.array_equal(np.load(folder / f"{task['name']}.npy"), model.logits(task["ids"]))
    expected = []
    for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True):
        events = model.generate(prompt, SamplingParams(**sampling))
        expected.append([i for event in events for i in getattr(event, "ids", ())])
    sampled = json.loads((folder / f"{task['name']}.json").read_text())
    assert sampled == expected * 2, task["name"]
    model.close()


@pytest.mark.parametrize(
    ("n", "splits", "end", "said"),
    [
        pytest.param(
            2,
            [{"split": (3, 1)}, {"split": (1, 2), "split_mode": "layer"}],
            "sleep",
            "(rank 1) has not answered for 1.5 seconds.",
            marks=pytest.mark.slow,
        ),
        (
            3,
            [{"split": (2, 1, 1)}, {"split": (1, 0, 1)}],
            "kill",
            "(rank 1) has ended in the middle of a step.",
        ),
    ],
    ids=["2", "3"],
)
def test_processes_give_what_threads_give_and_end_together(
    tmp_path: Path, n: int, splits: list[dict[str, Any]], end: str, said: str
) -> None:
    splits = [{"devices": ("cpu",) * n, "n_ctx": 64, "cpu_threads": 1, **s} for s in splits]
    wanted = tasks(tmp_path, splits)
    (tmp_path / "job.json").write_text(json.dumps({"tasks": wanted, "end": end}))
    processes = Processes(n, ["tests.helpers.rank_process", str(tmp_path)])
    if end == "sleep":
        processes._all[0].wait(90)
        processes._all[1].kill()
    ends = processes.ends()
    for task in wanted:
        check(task, tmp_path)
    for rank in [rank for rank in range(n) if rank != 1]:
        status, _, errors = ends[rank]
        assert status == 1, errors
        kind, sentence, hint, seconds = json.loads((tmp_path / f"end.{rank}.json").read_text())
        assert kind == "CommError"
        assert sentence == f"cpu on {socket.gethostname()} {said}"
        assert hint.startswith("Load the model again")
        assert seconds < END_S


def test_the_command_answers_on_rank_0(tmp_path: Path) -> None:
    """Several prompts at once as each alone."""
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")
    prompts = ["hello world", "other"]
    rest = [x for prompt in prompts for x in ("-p", prompt)]
    rest += ["-n", "5", "--ignore-eos", "--json", "--split", "3,1", "--parallel", "2"]
    ends = Processes(2, ["engine.distributed", str(path), *rest]).ends()
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert ends[1][1] == ""
    found = [json.loads(line) for line in ends[0][1].splitlines()]
    with Model(LoadParams(str(path), ("cpu", "cpu"), (3, 1), parallel=2)) as model:
        greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        for answer, prompt in zip(found, prompts, strict=True):
            events = list(model.generate(prompt, greedy))
            assert answer["ids"] == [i for event in events for i in getattr(event, "ids", ())]
            assert answer["text"] == "".join(getattr(event, "text", "") for event in events)
            assert answer["warnings"] == list(model.warnings) != []
    for rank, (_, _, said) in enumerate(ends):
        assert said.splitlines() == [f"rank {rank}: {text}" for text in found[0]["warnings"]]


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("output", [Screen, io.StringIO])
def test_what_a_model_says_is_not_obeyed_by_the_terminal(
    monkeypatch: pytest.MonkeyPatch, output: type[io.StringIO]
) -> None:
    """A file gets every character."""
    stdout = output()
    monkeypatch.setattr("sys.stdout", stdout)
    events = [TokenText(text, (3,)) for text in ESCAPES]
    _write([iter(events)], (), as_json=False)
    said = "".join(ESCAPES)
    assert stdout.getvalue() == (printable(said) if output is Screen else said)
    assert acting(said)
    assert not acting(stdout.getvalue()) or output is not Screen


@pytest.mark.parametrize("as_json", [False, True])
def test_answers_are_written_one_after_the_other(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """The first as it comes, others once those before them have ended."""
    seen: list[str] = []

    def said(*texts: str) -> Iterator[GenerationEvent]:
        for n, text in enumerate(texts):
            yield TokenText(text, (n,))
            seen.append(capsys.readouterr().out)
        yield Finished("stop", Usage(), Timings())

    _write([said("a", "b", "c"), said("A"), said("1", "2")], (), as_json=as_json)
    seen.append(capsys.readouterr().out)
    if as_json:
        assert [json.loads(line)["text"] for line in "".join(seen).splitlines()] == [
            "abc",
            "A",
            "12",
        ]
    else:
        assert "".join(seen) == "abc\nA\n12\n"
        assert seen[0] == "a", "the first is not kept back"


def test_an_error_is_one_line_that_does_not_act() -> None:
    ends = Processes(1, ["engine.distributed", "no\x1b[31m\nfile.gguf", "-p", "a"]).ends()
    status, out, errors = ends[0]
    assert (status, out) == (1, "")
    assert "file.gguf" in errors
    assert errors.count("\n") == 1
    assert not acting(errors)


@pytest.mark.slow
def test_a_gpu_of_a_process_says_that_it_starts_kernels_one_by_one(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = least_gguf(tmp_path / "m.gguf")
    rest = ["-p", "a", "-n", "2", "--ignore-eos", "--json", "--ctx", "16"]
    ends = Processes(
        1, ["engine.distributed", str(path), *rest], TANDEM_BACKEND="interpreter"
    ).ends()
    assert ends[0][0] == 0, ends
    expected = "On cpu, kernels are started one by one: ranks that are processes do not capture"
    assert [w for w in json.loads(ends[0][1])["warnings"] if w.startswith(expected)]
    assert f"rank 0: {expected}" in ends[0][2]


def test_what_one_process_cannot_do_all_say(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")
    rest = ["-p", "hello", "--devices", "cpu,cuda:77"]
    ends = Processes(2, ["engine.distributed", str(path), *rest]).ends()
    assert [(status, shown) for status, shown, _ in ends] == [(1, "")] * 2
    why = "There is no device 'cuda:77' on this machine"
    who = f"cuda:77 on {socket.gethostname()} (rank 1)"
    assert ends[0][2].startswith(f"rank 0: {who} has failed: {why}")
    assert ends[1][2].startswith(f"rank 1: {why}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--devices", "cpu"], "There are 2 processes for 1 devices."),
        (["--split", "three"], "The split 'three' is not a list of numbers."),
    ],
)
def test_what_is_not_meant_is_said(given: list[str], said: str) -> None:
    options = _parser().parse_args(["m.gguf", "-p", "hello", *given])
    with pytest.raises(EngineError, match=said):
        _params(options, 2)


def test_without_a_launcher_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EngineError, match="cannot be reached") as found:
        GlooWire(1)
    assert "torchrun" in found.value.hint
