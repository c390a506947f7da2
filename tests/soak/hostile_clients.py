"""Clients that try to stall a server, beside four that only stream answers.

    python -m tests.soak.hostile_clients --minutes 30
    python -m tests.soak.hostile_clients --kills 30

The server is `tandem serve` with a tiny model that sees, in a process of its own. In the first form
one client of each kind in `ATTACKS` sends what once stopped all answers: long texts, slow grammars,
slow images, JSON of many small values, bodies that never end and silent connections. No stream may
pause for more than `MAX_GAP_S`, the engine must not be restarted, and memory must not grow. In the
second form the engine's process is killed every 20 seconds: each time clients must get a reason,
`/health` must tell the truth, and answers must go on within `BACK_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import sys
import tempfile
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx2
import psutil
from PIL import Image

from tests.helpers.serve_process import ServeProcess

N_STREAMS = 4
N_TOKENS = 200
MAX_GAP_S = 1.0
MAX_GROWTH_MIB = 100
BACK_S = 15.0
KILL_EVERY_S = 20.0
N_SLICES = 10


@dataclass
class Seen:
    """What clients have seen: gaps of streams, statuses of attacks, and problems."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@cache
def progressive_jpeg() -> bytes:
    """Return a progressive JPEG whose last scan is repeated 300 times."""
    held = io.BytesIO()
    Image.linear_gradient("L").resize((8000, 8000)).save(held, "JPEG", progressive=True, quality=10)
    data = held.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * 300 + data[-2:]


def chat(text: str, **fields: object) -> dict[str, object]:
    """Return the body of a chat request of one message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


Client = httpx2.AsyncClient


async def long_texts(client: Client, n: int) -> int:
    words = f"{n} " + "some words and more of them " * 150_000
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "description": words[:100_000]}}
        for i in range(40)
    ]
    requests: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"prompt": words, "max_tokens": 4}),
        ("/v1/chat/completions", chat(words)),
        ("/tokenize", {"content": words}),
        ("/v1/chat/completions", chat("hi", tools=tools)),
        ("/tokenize", {"content": "a" * 900_000}),
        ("/apply-template", chat(words[:900_000])),
        ("/v1/completions", {"prompt": words[:900_000], "max_tokens": 4}),
    ]
    path, body = requests[n % len(requests)]
    return (await client.post(path, json=body)).status_code


async def slow_grammars(client: Client, n: int) -> int:
    required = {"type": "object", "required": [f"k{n}_{i}" for i in range(20_000)]}
    words = "|".join(f'"w{n}_{i}"' for i in range(50_000))
    bodies: list[dict[str, object]] = [
        chat("hi", response_format={
            "type": "json_schema", "json_schema": {"name": "x", "schema": required},
        }),
        chat("hi", grammar=f"root ::= {words}"),
        chat("hi", grammar='root ::= w+\nw ::= [a-z ]+ | [a-z]+ " " | w w', max_tokens=60),
        chat("hi", grammar=f'root ::= "{n}" (("a"{{1000}}){{1000}})'),
    ]  # fmt: skip
    body = bodies[n % len(bodies)]
    return (await client.post("/v1/chat/completions", json=body)).status_code


async def slow_images(client: Client, n: int) -> int:
    """Send slow images; every second client goes away after a second."""
    images = []
    for number in range(1 + n % 8):
        comment = b"\xff\xfe\x00\x0a%8d" % (100 * n + number)  # so that none is in the cache
        data = b64encode(b"\xff\xd8" + comment + progressive_jpeg()[2:]).decode()
        image = {"url": f"data:image/jpeg;base64,{data}"}
        images.append({"type": "image_url", "image_url": image})
    body = {"messages": [{"role": "user", "content": images}], "max_tokens": 4}
    limit = 1.0 if n % 2 else 120.0
    return (await client.post("/v1/chat/completions", json=body, timeout=limit)).status_code


async def many_values(client: Client, n: int) -> int:
    small = ",".join(["[]"] * 1_000_000)
    bias = json.dumps({str(i): 1 for i in range(300_000)})
    texts = (
        f'{{"messages":[{small}]}}',
        f'{{"x":[{small.replace("[]", "{}")}],"messages":[{{"role":"user","content":"hi"}}]}}',
        f'{{"messages":[{{"role":"user","content":"hi"}}],"logit_bias":{bias}}}',
    )
    text = texts[n % len(texts)]
    headers = {"content-type": "application/json"}
    reply = await client.post("/v1/chat/completions", content=text.encode(), headers=headers)
    return reply.status_code


async def unfinished_bodies(client: Client, n: int) -> int:
    """Hold back the last byte of several large bodies for five seconds."""
    url = client.base_url
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 8000001\r\n\r\n"
    )
    writers = []
    for _ in range(8):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head + b" " * 4_000_000)
            writers.append(writer)
    await asyncio.sleep(5)
    for writer in writers:
        writer.close()
    return len(writers)


async def strangers(client: Client, n: int) -> int:
    """Open 600 connections of which half send half a head."""
    url = client.base_url
    writers = []
    for i in range(600):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(url.host, url.port)
            if i % 2:
                writer.write(b"GET /health HTTP/1.1\r\nHost: ")
            writers.append(writer)
    await asyncio.sleep(10)
    for writer in writers:
        writer.close()
    return len(writers)


ATTACKS: dict[str, Callable[[Client, int], Awaitable[int]]] = {
    one.__name__: one
    for one in (
        long_texts, slow_grammars, slow_images, many_values, unfinished_bodies, strangers,
    )
}  # fmt: skip


async def attack(address: str, name: str, until: float, counts: Counter[str]) -> None:
    """Repeat one kind of attack until a time, and count the statuses of its answers."""
    n = 0
    async with httpx2.AsyncClient(base_url=address, timeout=120, trust_env=False) as client:
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                status = str(await ATTACKS[name](client, n))
            except httpx2.HTTPError as error:
                status = type(error).__name__
            counts[f"{name} {status}"] += 1
            n += 1
            await asyncio.sleep(max(0.0, 0.5 - (time.monotonic() - began)))


async def attack_all(address: str, minutes: float) -> Counter[str]:
    """Attack a server in all ways at once, at a low priority; return the statuses."""
    os.nice(10)
    counts: Counter[str] = Counter()
    until = time.monotonic() + 60 * minutes
    await asyncio.gather(*(attack(address, name, until, counts) for name in ATTACKS))
    return counts


async def stream(address: str, until: float, seen: Seen, *, kills: bool) -> None:
    """Stream answers until a time, and note the largest gap of each."""
    body = chat("Tell me a story.", stream=True, ignore_eos=True, max_tokens=N_TOKENS)
    async with httpx2.AsyncClient(base_url=address, timeout=120, trust_env=False) as client:
        while time.monotonic() < until:
            at = began = time.monotonic()
            gap, n_events, is_done = 0.0, 0, False
            try:
                async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    if reply.status_code != 200:
                        seen.counts[f"stream {reply.status_code}"] += 1
                        message = json.loads(await reply.aread())["error"]["message"]
                        if not kills:
                            seen.problems.append(f"stream {reply.status_code}: {message}")
                        seen.counts[f"told: {message[:160]}"] += 1
                        await asyncio.sleep(0.5)
                        continue
                    async for line in reply.aiter_lines():
                        if not line.startswith("data: "):
                            continue
                        now = time.monotonic()
                        gap, at, n_events = max(gap, now - at), now, n_events + 1
                        is_done = is_done or line == "data: [DONE]"
                        if '"error"' in line:
                            message = json.loads(line[6:])["error"]["message"]
                            seen.counts[f"told: {message[:160]}"] += 1
                            is_done = True
                            if not kills:
                                seen.problems.append(message)
            except httpx2.HTTPError as error:
                seen.problems.append(f"stream: {type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
                continue
            if not is_done:
                seen.problems.append(f"a stream ended after {n_events} events without a reason")
            seen.counts["streams"] += 1
            seen.gaps.append((gap, began))


def engine_of(server: ServeProcess) -> psutil.Process | None:
    """Return the engine's process, or None while there is none."""
    for child in server.process.children():
        with suppress(psutil.NoSuchProcess):
            if "engine.hosts.process.program" in child.cmdline():
                return child
    return None


async def under_attack(server: ServeProcess, minutes: float, seen: Seen) -> None:
    """Attack a server from another process, and measure the server's processes ten times."""
    engine = engine_of(server)
    sizes = []
    for _ in range(N_SLICES):
        slice_minutes = minutes / N_SLICES
        until = time.monotonic() + 60 * slice_minutes
        command = [sys.executable, "-m", "tests.soak.hostile_clients", "--attack", server.address]
        attackers = await asyncio.create_subprocess_exec(
            *command, "--minutes", str(slice_minutes), stdout=asyncio.subprocess.PIPE
        )
        await asyncio.gather(
            *(stream(server.address, until, seen, kills=False) for _ in range(N_STREAMS))
        )
        told, _ = await attackers.communicate()
        seen.counts.update(json.loads(told))
        server.measure(seen.counts["streams"])
        sizes.append(server.watch.found[-1])
        gaps = sorted(gap for gap, _ in seen.gaps)
        say(
            f"{dict(sorted(seen.counts.items()))}",
            f"gaps: worst {gaps[-1]:.2f} s, 99 % {gaps[int(len(gaps) * 0.99)]:.2f} s,"
            f" median {gaps[len(gaps) // 2]:.2f} s; MiB: {server.watch.sizes()}",
            *seen.problems[:5],
        )
        if engine_of(server) != engine:
            seen.problems.append("the engine was restarted")
            engine = engine_of(server)
    seen.problems += [f"a gap of {gap:.2f} s" for gap, _ in seen.gaps if gap > MAX_GAP_S]
    say(*server.watch.lines())
    for name in ("server", "engine.hosts.process.program"):
        middle, last = (sizes[at].get(name) for at in (N_SLICES // 2, -1))
        if middle and last and last.rss - middle.rss > MAX_GROWTH_MIB * 2**20:
            seen.problems.append(f"{name} has grown in the second half")


async def health(address: str) -> tuple[int, str]:
    """Return the status and body of `/health`."""
    async with httpx2.AsyncClient(base_url=address, timeout=5, trust_env=False) as client:
        reply = await client.get("/health")
        return reply.status_code, reply.text


async def killed(server: ServeProcess, n_kills: int, seen: Seen) -> None:
    """Kill the engine again and again while clients stream."""
    until = time.monotonic() + KILL_EVERY_S * n_kills
    lives = [
        asyncio.create_task(stream(server.address, until, seen, kills=True))
        for _ in range(N_STREAMS)
    ]
    back: list[float] = []
    for number in range(n_kills):
        due = time.monotonic() + KILL_EVERY_S
        await asyncio.sleep(1)
        engine = engine_of(server)
        if engine is None:
            seen.problems.append(f"kill {number}: there is no engine to kill")
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            continue
        engine.kill()
        at = time.monotonic()
        statuses: list[int] = []
        async with httpx2.AsyncClient(base_url=server.address, timeout=60) as client:
            while True:
                status, _ = await health(server.address)
                began = time.monotonic()
                reply = await client.post("/v1/chat/completions", json=chat("hi", max_tokens=1))
                statuses.append(reply.status_code)
                if status != 200 and reply.status_code == 200 and time.monotonic() - began < 0.2:
                    seen.problems.append("/health said 503 though answers came at once")
                if status == 200 and reply.status_code == 503:
                    seen.counts["/health said ok just before a 503"] += 1
                if reply.status_code == 200:
                    break
                if time.monotonic() - at > 60:
                    seen.problems.append(f"kill {number}: not back after a minute")
                    break
                await asyncio.sleep(0.1)
        back.append(time.monotonic() - at)
        if back[-1] > BACK_S:
            seen.problems.append(f"kill {number}: back after {back[-1]:.1f} s")
        say(f"kill {number}: back after {back[-1]:.1f} s, statuses {Counter(statuses)}")
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    await asyncio.gather(*lives)
    say(f"{dict(seen.counts)}; back after at most {max(back):.1f} s")


def say(*lines: str) -> None:
    """Print lines at once."""
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def main() -> int:
    """Attack a server, or kill its engine; print what clients saw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--attack", metavar="ADDRESS", help="only attack this server")
    args = parser.parse_args()
    if args.attack:
        say(json.dumps(asyncio.run(attack_all(args.attack, args.minutes))))
        return 0
    from tests.helpers.hf_models.seeing import SEEING  # which takes seconds to import

    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder:
        next(one for one in SEEING if one.name == "gemma3").build(Path(folder))
        model = str(Path(folder) / "model.gguf")
        with ServeProcess("--parallel", "8", "--ctx", "4096", model=model) as server:
            if args.kills:
                asyncio.run(killed(server, args.kills, seen))
            else:
                asyncio.run(under_attack(server, args.minutes, seen))
    say(f"{len(seen.problems)} findings", *seen.problems[:40])
    return bool(seen.problems)


if __name__ == "__main__":
    sys.exit(main())
