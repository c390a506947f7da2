"""Sends generated requests to a server: what its OpenAPI page allows, and what it does not.

    python -m tests.fuzz.server_attacker 10000 --seed 1

prints how many answers had which status, the slowest, and what each process of the server holds:
resident memory after it has collected its garbage, threads, open files. A status of 500 and above,
an answer that is no document of its kind, one that takes too long, work that goes on in the engine
behind the last request, and what grows without an end are findings. What can be generated of some
operations is soon exhausted, so that fewer requests are sent than are asked for.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from typing import Any

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode

from tests.helpers.serve_process import ServeProcess, is_quiet

SLOWEST_S = 60.0
"""Seconds after which an answer of a small model is a hang."""

MAX_TOKENS = 8
"""Most tokens of an answer, so that thousands of requests take minutes."""

ANSWERED = 0.6
"""Part of the chats that are mended to messages of text, which else are hardly ever right."""

N_MIXED = 5
"""Requests with fields of several generated ones, for each of these: they take long to generate."""

N_WARM_UP = 1500
"""Number of requests before the server is measured."""

N_ROUNDS = 5
"""Number of rounds, each with all operations; the server is measured behind each."""

MAX_GROWTH_MIB = 1.0
"""MiB by which each process of the server may grow per 1000 requests of the second half."""

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")


IDS = ("prompt", "input", "tokens")
"""Fields that may have ids of tokens."""

N_KNOWN = 1000
"""Number of tokens that any model has."""


@dataclass
class Findings:
    """What came of many requests.

    Attributes:
        statuses: numbers of answers by operation and status.
        problems: what should not be, each as a sentence.
        slowest: seconds of the slowest answer, and which it was.
    """

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def note(self, name: str, reply: httpx2.Response, seconds: float, body: object) -> None:
        """Note an answer, and what is wrong with it."""
        self.statuses[name, reply.status_code] += 1
        self.slowest = max(self.slowest, (seconds, name))
        told = f"{name} with {str(body)[:400]}: {reply.status_code}"
        if reply.status_code >= 500:
            self.problems.append(f"{told}: {reply.text[:300]}")
        elif problem := wrong_document(reply):
            self.problems.append(f"{told}: {problem}: {reply.text[:300]}")
        elif seconds > SLOWEST_S:
            self.problems.append(f"{told} after {seconds:.0f} s")

    def add(self, other: Findings) -> None:
        """Add what came of more requests."""
        self.statuses += other.statuses
        self.problems += other.problems
        self.slowest = max(self.slowest, other.slowest)

    def counts(self) -> dict[int, int]:
        """Return the numbers of answers by their status."""
        found = Counter[int]()
        for (_, status), n in self.statuses.items():
            found[status] += n
        return dict(sorted(found.items()))


def wrong_document(reply: httpx2.Response) -> str:
    """Return why an answer is no document of its kind; "" if it is one."""
    kind = reply.headers.get("content-type", "").partition(";")[0]
    lines = reply.text.splitlines()
    if kind == "text/event-stream":
        found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        found = [line for line in found if line != "[DONE]"]
    else:
        found = {"application/x-ndjson": lines, "application/json": [reply.text]}.get(kind, [])
    for text in found:
        try:
            json.loads(text)
        except ValueError as error:
            return f"no JSON ({error})"
    return ""


def shorten(body: Any, known: set[str], chance: random.Random) -> Any:
    """Make a request cheap, and mostly one that is answered: few unknown fields, short answers."""
    if not isinstance(body, dict):
        return body
    if chance.random() < 0.8:
        body = {key: value for key, value in body.items() if key in known}
    if chance.random() < 0.9 and isinstance(body.get("model", ""), str):
        body["model"] = ""
    lengths = [name for name in LENGTHS if name in known]
    given_lengths = [name for name in lengths if isinstance(body.get(name), int | float)]
    for name in given_lengths:
        body[name] = min(body[name], MAX_TOKENS) if body[name] > 0 else MAX_TOKENS
    if lengths and not given_lengths:
        body[lengths[0]] = MAX_TOKENS
    if isinstance(body.get("messages"), list) and chance.random() < ANSWERED:
        body["messages"] = [_of_text(message) for message in body["messages"]]
    for name in IDS:
        if name in body and chance.random() < 0.8:
            body[name] = with_known_ids(body[name])
    if "options" in known:
        body["options"] = {"num_predict": MAX_TOKENS}
    return body


def _of_text(message: Any) -> dict[str, str]:
    """Return a message of text with what can be used of a generated one."""
    found = message if isinstance(message, dict) else {}
    role, content = found.get("role"), found.get("content")
    return {
        "role": role if isinstance(role, str) and role else "user",
        "content": content if isinstance(content, str) and content else "Hello!",
    }


def attack_at_once(pool: Executor, address: str, n: int, numbers: Sequence[int]) -> Findings:
    """Send n requests from several processes, each with the requests that follow from a number."""
    findings = Findings()
    parts = [pool.submit(attack, address, n // len(numbers), number) for number in numbers]
    for part in parts:
        findings.add(part.result())
    return findings


@cache
def _operations(address: str) -> tuple[dict[str, Any], list[Any]]:
    """Return a server's OpenAPI document, and its operations."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    return schema.raw_schema, [found.ok() for found in schema.get_all_operations()]


def with_known_ids(value: Any) -> Any:
    """Return a text, or ids of tokens, of which a model has all."""
    if isinstance(value, list):
        return [with_known_ids(one) for one in value]
    return abs(value) % N_KNOWN if type(value) is int else value


def attack(address: str, n: int, number: int) -> Findings:
    """Send n requests, shared out evenly between the operations.

    Args:
        number: number from which all requests follow.
    """
    findings, chance = Findings(), random.Random(number)
    document, operations = _operations(address)
    with httpx2.Client(base_url=address, timeout=2 * SLOWEST_S, trust_env=False) as client:
        for operation in operations:
            name = f"{operation.method.upper()} {operation.path}"
            known = _fields(document, operation.path, operation.method)
            bodies: list[dict[str, Any]] = []
            n_cases = max(1, n // (2 * (1 + N_MIXED) * len(operations)))
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

                def ask(
                    case: Case, name: str = name, known: set[str] = known, bodies: Any = bodies
                ) -> None:
                    for body in _mixed(shorten(case.body, known, chance), bodies, chance):
                        reply, seconds = _sent(client, case, body)
                        findings.note(name, reply, seconds, body)

                _many(operation, mode, n_cases, number, ask)
    return findings


def _mixed(body: Any, bodies: list[dict[str, Any]], chance: random.Random) -> Iterator[Any]:
    """Yield a body, and some with fields of it and of earlier ones, which are kept in `bodies`."""
    yield body
    if not isinstance(body, dict):
        return
    bodies.append(body)
    for _ in range(N_MIXED):
        other = chance.choice(bodies)
        keys = [*body, *(key for key in other if key not in body)]
        sources = {key: chance.choice([body, other]) for key in keys}
        yield {key: source[key] for key, source in sources.items() if key in source}


def _fields(document: dict[str, Any], path: str, method: str) -> set[str]:
    """Return the names of the fields that an operation's body may have."""
    operation = document["paths"][path][method]
    if "requestBody" not in operation:
        return set()
    found = operation["requestBody"]["content"]["application/json"]["schema"]
    name = found.get("$ref", "").rpartition("/")[2]
    return set((document["components"]["schemas"].get(name) or found).get("properties", ()))


def _many(operation: Any, mode: GenerationMode, n: int, number: int, ask: Any) -> None:
    """Call `ask` with n generated cases of an operation."""

    def ask_one(case: Case) -> None:
        ask(case)

    try:
        cases = operation.as_strategy(generation_mode=mode)
        seed(number)(
            settings(
                max_examples=n, deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )(given(case=cases)(ask_one))
        )()  # fmt: skip
    except (schemathesis.errors.SchemathesisError, Unsatisfiable):
        return  # nothing of this kind can be generated, such as a wrong request without a body


def _sent(client: httpx2.Client, case: Case, body: Any) -> tuple[httpx2.Response, float]:
    """Send a case with a body; return the answer and its seconds."""
    begun = time.perf_counter()
    content = None
    if case.method.upper() != "GET":
        content = body if isinstance(body, bytes) else json.dumps(body, default=str).encode()
    path = case.formatted_path or case.path
    reply = client.request(case.method.upper(), path, content=content)
    return reply, time.perf_counter() - begun


def still_running(address: str) -> Iterator[str]:
    """Yield what a server still does although nobody asks any more."""
    deadline = time.monotonic() + 5
    while not is_quiet(address):
        if time.monotonic() > deadline:
            yield "answers go on although nobody asks any more"
            return
        time.sleep(0.05)


def print_line(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def main() -> int:
    """Attack a server with the demo model, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("n", type=int, help="number of requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes that send requests")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # a line for each unknown field
    jobs = range(args.jobs)
    quiet = logging.disable, [logging.WARNING]
    with (
        ProcessPoolExecutor(args.jobs, get_context("spawn"), *quiet) as pool,
        ServeProcess("--ollama") as server,
    ):
        # all is imported and compiled by then, and the server notes no more requests than now
        attack_at_once(pool, server.address, N_WARM_UP, [-1 - job for job in jobs])
        server.measure(0)
        findings = Findings()
        for at in range(N_ROUNDS):
            numbers = [1000 * args.seed + args.jobs * at + job for job in jobs]
            found = attack_at_once(pool, server.address, args.n // N_ROUNDS, numbers)
            findings.add(found)
            findings.problems += still_running(server.address)
            server.measure(findings.statuses.total())
            told = f"{findings.statuses.total()} requests, {findings.counts()}"
            print_line(f"{told}, MiB: {server.watch.sizes()}", *found.problems[:20])
        print_line(*server.watch.lines())
        findings.problems += server.watch.leaks(MAX_GROWTH_MIB)
    for (name, status), n in sorted(findings.statuses.items()):
        print_line(f"{n:7} {status} {name}")
    print_line(
        f"{findings.statuses.total()} requests, slowest {findings.slowest[0]:.2f} s "
        f"({findings.slowest[1]}), {len(findings.problems)} findings",
        *findings.problems[:50],
    )
    return bool(findings.problems)


if __name__ == "__main__":
    sys.exit(main())
