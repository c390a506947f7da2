"""Speed of the server with several clients at once, beside the engine alone.

    python -m tests.bench.serving FILE [-n 128] [--prompt 64] [--clients 8] [--rounds 3]

The server has an engine in a process of its own, as `tandem serve` does; clients are threads of
this process with a connection each. "alone" are the same prompts at once, read from the engine's
events without HTTP, in turns with the server: what is between the two is the server's cost. Times
to the first token are those of clients.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx2

from app.server.async_engine import AsyncEngine
from app.server.context import ServerContext
from app.server.models import HeldModel
from app.server.settings import ServerSettings
from app.server.web.server import ServerThread
from engine import (
    AnswerRequest,
    Failed,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    ModelLoaded,
    SamplingParams,
    TokenText,
)
from engine.hosts.process.process_host import ProcessHost

WORDS = [
    "split",
    "rank",
    "weight",
    "layer",
    "cache",
    "token",
    "head",
    "block",
    "device",
    "link",
    "page",
    "share",
]


@dataclass(frozen=True)
class Round:
    """What some answers at once took.

    Attributes:
        tokens_per_s: tokens of all answers by the seconds from the first request to the last token.
        first_s: seconds from request to first token, of each answer.
    """

    tokens_per_s: float
    first_s: Sequence[float]


class Engine:
    """An engine in a process, whose events go to whoever measures."""

    def __init__(self, path: str, n_ctx: int, parallel: int) -> None:
        events = queue.SimpleQueue[HostEvent]()
        self.take: Callable[[HostEvent], None] = events.put
        self.host = ProcessHost(lambda event: self.take(event))
        self.host.submit(Load(LoadParams(path, n_ctx=n_ctx, parallel=parallel)))
        while not isinstance(event := events.get().event, ModelLoaded):
            if isinstance(event, Failed):
                raise event.error
        self.loaded = event


def prompts(n: int, length: int, salt: int) -> list[str]:
    """Return n prompts of about `length` tokens that begin differently, so that none is cached."""
    return [
        " ".join(WORDS[(salt * 31 + at * 7 + i * (at + 3)) % len(WORDS)] for i in range(length))
        for at in range(n)
    ]


def alone(engine: Engine, asked: Sequence[str], n_tokens: int) -> Round:
    """Have the engine answer all prompts at once."""
    events = queue.SimpleQueue[HostEvent]()
    engine.take = events.put
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    begun = time.perf_counter()
    commands = [AnswerRequest(prompt=text, sampling=params, timed_every=0) for text in asked]
    running = {engine.hosts.thread_host.submit(command) for command in commands}
    first: dict[int, float] = {}
    n = 0
    while running:
        event = events.get()
        if isinstance(event.event, TokenText):
            first.setdefault(event.command_id, time.perf_counter() - begun)
            n += len(event.event.ids)
        elif isinstance(event.event, Finished | Failed):
            running.discard(event.command_id)
    return Round(n / (time.perf_counter() - begun), list(first.values()))


def served(engine: Engine, asked: Sequence[str], n_tokens: int, *, stream: bool) -> Round:
    """Have a client for each prompt ask the server."""
    async_engine = AsyncEngine(engine.host.submit, engine.host.cancel)
    async_engine.model = engine.loaded
    engine.take = async_engine.on_event
    settings = ServerSettings(port=0)
    thread = ServerThread(
        lambda: ServerContext(async_engine, HeldModel(async_engine), settings), settings
    )
    address = thread.start()
    first, counts = list[float](), list[int]()

    def ask(text: str, client: httpx2.Client) -> None:
        body = {
            "prompt": text, "temperature": 0, "max_tokens": n_tokens, "ignore_eos": True,
            "stream": stream, "stream_options": {"include_usage": True},
        }  # fmt: skip
        start = time.perf_counter()
        if not stream:
            done = client.post(f"{address}/v1/completions", json=body).json()
            counts.append(done["usage"]["completion_tokens"])
            return
        with client.stream("POST", f"{address}/v1/completions", json=body) as response:
            for at, line in enumerate(one for one in response.iter_lines() if one):
                if at == 0:
                    first.append(time.perf_counter() - start)
                if line.startswith("data: {") and '"choices":[]' in line:
                    counts.append(json.loads(line[6:])["usage"]["completion_tokens"])

    clients = [httpx2.Client(trust_env=False, timeout=600) for _ in asked]
    pairs = zip(asked, clients, strict=True)
    threads = [threading.Thread(target=ask, args=pair) for pair in pairs]
    begun = time.perf_counter()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    seconds = time.perf_counter() - begun
    for client in clients:
        client.close()
    thread.stop()
    return Round(sum(counts) / seconds, first)


def main() -> None:
    """Measure by turns, and print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("-n", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--prompt", type=int, default=64, help="words of each prompt")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    engine = Engine(args.file, 4 * args.prompt + args.n, args.clients)
    rounds: dict[str, list[Round]] = {"alone": [], "streamed": [], "whole": []}
    try:
        alone(engine, prompts(args.clients, args.prompt, 99), 8)  # records
        for at in range(args.rounds):
            sets = [prompts(args.clients, args.prompt, 3 * at + i) for i in range(3)]
            rounds["alone"].append(alone(engine, sets[0], args.n))
            rounds["streamed"].append(served(engine, sets[1], args.n, stream=True))
            rounds["whole"].append(served(engine, sets[2], args.n, stream=False))
    finally:
        engine.hosts.thread_host.close()
    base = statistics.median(one.tokens_per_s for one in rounds["alone"])
    sys.stdout.write(f"{'':10}  tokens/s  of alone  first token, median and worst (ms)\n")
    for name, found in rounds.items():
        speed = statistics.median(one.tokens_per_s for one in found)
        first = sorted(1e3 * seconds for one in found for seconds in one.first_s)
        times = f"{statistics.median(first):8.0f} {first[-1]:8.0f}" if first else ""
        sys.stdout.write(f"{name:10}  {speed:8.1f}  {speed / base:8.2f}  {times}\n")


if __name__ == "__main__":
    main()
