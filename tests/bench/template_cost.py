"""Prints what a message pays for its chat template being rendered in a process of its own.

    python -m tests.bench.template_cost

Prompts of chats of several lengths are rendered by turns in this process and in the child.
"""

import json
import sys
import time
from collections.abc import Callable

from engine.text.chat_template import TemplateRenderer
from engine.text.templates.program import MAX_SECONDS, render
from tests.helpers.golden import golden_path

NAMES = ("Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b")
N_TURNS = (1, 20, 400)
"""Numbers of questions, each with an answer of 1000 characters but the last."""

N_ROUNDS = 30


def conversation(n_turns: int) -> list[dict[str, str]]:
    """Return a chat that ends with a question."""
    turns = []
    for _ in range(n_turns):
        turns += [{"role": "user", "content": "What is that? " * 10}]
        turns += [{"role": "assistant", "content": "It is something. " * 60}]
    return turns[:-1]


def time_ms(work: Callable[[], object]) -> float:
    """Return how long `work` takes, once."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def median(times: list[float]) -> float:
    """Return the middle of some times."""
    return sorted(times)[len(times) // 2]


def main() -> None:
    """Print a table."""
    renderer = TemplateRenderer()
    started = time.perf_counter()
    renderer.prepare()
    prepared = time.perf_counter()
    renderer.render("{{ 1 }}", {}, MAX_SECONDS)
    begun, answered = ((t - started) * 1e3 for t in (prepared, time.perf_counter()))
    sys.stdout.write(f"start: {begun:.1f} ms to begin, {answered:.0f} ms to the first answer\n")
    sys.stdout.write("template, turns: here / in the child, median ms (first prompt there)\n")
    for name in NAMES:
        golden = json.loads(golden_path("templates", f"{name}.json").read_text("utf-8"))
        source = golden["template"]
        for n_turns in N_TURNS:
            given = {
                "bos_token": golden["bos_token"], "eos_token": golden["eos_token"],
                "messages": conversation(n_turns), "tools": None, "add_generation_prompt": True,
            }  # fmt: skip
            first = time_ms(lambda: renderer.render(source, given, MAX_SECONDS))  # noqa: B023
            here, there = [], []
            for _ in range(N_ROUNDS):
                here.append(time_ms(lambda: render(source, given, None, 2, 1 << 24)))  # noqa: B023
                there.append(time_ms(lambda: renderer.render(source, given, MAX_SECONDS)))  # noqa: B023
            times = f"{median(here):.2f} / {median(there):.2f} ({first:.1f})"
            sys.stdout.write(f"{name}, {n_turns}: {times}\n")
    renderer.close()


if __name__ == "__main__":
    main()
