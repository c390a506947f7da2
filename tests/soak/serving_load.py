"""Clients that ask a server all at once, stop, and vanish: each whole answer is the one alone.

    python -m tests.soak.serving_load --minutes 30 --seed 1

The server is `tandem serve` with the demo model, in a process of its own. Clients ask known
questions at a temperature of 0, streamed or not, in three protocols; a third of them go away in the
middle. Ten times they all pause, and the processes are measured after they have collected their
garbage: then nothing may run, and in the second half nothing may grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx2

from tests.helpers.serve_process import ServeProcess, is_quiet

N_CLIENTS = 8
N_SLICES = 10
MAX_GROWTH_MIB = 2.0
"""MiB by which each process may grow per 1000 requests of the second half."""

QUESTIONS = (
    "What is tensor parallelism?", "What is a rank?", "What is an all-reduce?", "Who are you?",
    "What does a split do?", "Tell me a story.", "What is a KV cache?", "Hello!",
)  # fmt: skip
LENGTHS = (1, 8, 40, 120)


@dataclass(frozen=True)
class Ask:
    """A request whose answer is always the same."""

    protocol: str
    question: str
    n_tokens: int

    def request(self, *, is_streamed: bool) -> tuple[str, dict[str, object]]:
        """Return the path and the body."""
        messages = [{"role": "user", "content": self.question}]
        body: dict[str, object] = {"model": "", "temperature": 0, "stream": is_streamed}
        if self.protocol == "responses":
            return "/v1/responses", body | {
                "input": self.question, "max_output_tokens": self.n_tokens,
            }  # fmt: skip
        body |= {"messages": messages, "max_tokens": self.n_tokens}
        return ("/v1/messages" if self.protocol == "messages" else "/v1/chat/completions"), body

    def text_of(self, document: dict[str, object]) -> str:
        """Return the text of a whole answer."""
        paths = {
            "messages": ("content", 0, "text"),
            "responses": ("output", 0, "content", 0, "text"),
            "chat": ("choices", 0, "message", "content"),
        }
        return _at(document, paths[self.protocol])

    def delta_of(self, document: dict[str, object]) -> str:
        """Return the text that an event of a stream adds."""
        if self.protocol == "messages":
            return _at(document, ("delta", "text"))
        if self.protocol == "responses":
            is_text = document.get("type") == "response.output_text.delta"
            return _at(document, ("delta",)) if is_text else ""
        return _at(document, ("choices", 0, "delta", "content"))


def _at(value: object, path: tuple[str | int, ...]) -> str:
    """Return a text inside of a document; "" if it is not there."""
    for key in path:
        try:
            value = value[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return ""
    return value if isinstance(value, str) else ""


@dataclass
class Load:
    """What clients have seen."""

    known: dict[Ask, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def whole(client: httpx2.AsyncClient, ask: Ask, *, is_streamed: bool) -> str:
    """Return the text of an answer."""
    path, body = ask.request(is_streamed=is_streamed)
    if not is_streamed:
        reply = await client.post(path, json=body)
        reply.raise_for_status()
        return ask.text_of(reply.json())
    async with client.stream("POST", path, json=body) as reply:
        reply.raise_for_status()
        lines = [line async for line in reply.aiter_lines() if line.startswith("data: {")]
    return "".join(ask.delta_of(json.loads(line.removeprefix("data: "))) for line in lines)


async def vanish(client: httpx2.AsyncClient, ask: Ask, n_lines: int) -> None:
    """Ask, and go away after some lines."""
    path, body = ask.request(is_streamed=True)
    async with client.stream("POST", path, json=body) as reply:
        async for _ in reply.aiter_lines():
            if (n_lines := n_lines - 1) < 0:
                return


async def client_life(address: str, load: Load, until: float, number: int) -> None:
    """Ask until a time, as one of many clients."""
    chance = random.Random(number)
    limit = httpx2.Timeout(120)
    async with httpx2.AsyncClient(base_url=address, timeout=limit, trust_env=False) as client:
        while time.monotonic() < until:
            ask = chance.choice(list(load.known))
            try:
                if chance.random() < 1 / 3:
                    await vanish(client, ask, chance.randrange(12))
                    load.counts["vanished"] += 1
                    continue
                is_streamed = chance.random() < 0.5
                text = await whole(client, ask, is_streamed=is_streamed)
            except httpx2.HTTPError as error:
                load.problems.append(f"{ask}: {type(error).__name__}: {error}")
                continue
            load.counts[ask.protocol] += 1
            if text != load.known[ask]:
                load.problems.append(f"{ask}: {text!r}, alone {load.known[ask]!r}")


async def run(server: ServeProcess, minutes: float, number: int) -> Load:
    """Ask alone, then all at once, and watch the server's processes."""
    load, address = Load(), server.address
    async with httpx2.AsyncClient(base_url=address, timeout=120, trust_env=False) as client:
        for protocol in ("chat", "messages", "responses"):
            for question in QUESTIONS:
                for n in LENGTHS:
                    ask = Ask(protocol, question, n)
                    load.known[ask] = await whole(client, ask, is_streamed=False)
    for at in range(N_SLICES):
        until = time.monotonic() + 60 * minutes / N_SLICES
        first = (number * N_SLICES + at) * 100
        lives = (client_life(address, load, until, first + n) for n in range(N_CLIENTS))
        await asyncio.gather(*lives)
        server.measure(load.counts.total())
        if not is_quiet(address):
            load.problems.append("answers go on although nobody asks any more")
        print_line(f"{dict(load.counts)}, MiB: {server.watch.sizes()}", *load.problems[:20])
    print_line(*server.watch.lines())
    load.problems += server.watch.leaks(MAX_GROWTH_MIB)
    return load


def print_line(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def main() -> int:
    """Load a server, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with ServeProcess("--parallel", str(N_CLIENTS)) as server:
        load = asyncio.run(run(server, args.minutes, args.seed))
    print_line(f"{len(load.problems)} findings", *load.problems[:20])
    return bool(load.problems)


if __name__ == "__main__":
    sys.exit(main())
