"""What banned strings and the counting of tokens cost: `python -m tests.bench.prompt_cost`.

The demo model answers by turns without banned strings, with six that never come up, and with two
that do; then the tokens of a long chat are counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from engine import ChatMessage, Finished, Model, SamplingParams, load_model

DEMO = Path(__file__).resolve().parents[2] / "resources" / "demo" / "tandem-demo.gguf"
ROUNDS, N_TOKENS, N_MESSAGES = 9, 600, 400
BANS = {
    "none": (),
    "six that do not come up": (
        "a testament to", "tapestry", "shivers down", "barely above a whisper", "I cannot",
        "as an AI",
    ),
    "two that come up": ("tensor", "each"),
}  # fmt: skip


def speed(model: Model, banned: tuple[str, ...]) -> float:
    """Return the speed of an answer, in tokens per second."""
    params = SamplingParams(
        temperature=0, max_tokens=N_TOKENS, ignore_eos=True, banned_strings=banned
    )
    *_, last = model.generate("What is tensor parallelism?", params)
    assert isinstance(last, Finished)
    return last.timings.decode_per_s


def main() -> None:
    with load_model(DEMO, n_ctx=1024) as model:
        speed(model, ())
        found: dict[str, list[float]] = {name: [] for name in BANS}
        for _ in range(ROUNDS):
            for name, banned in BANS.items():
                found[name].append(speed(model, banned))
        for name, speeds in found.items():
            middle = statistics.median(speeds)
            sys.stdout.write(f"{name}: {middle:.0f} t/s, {min(speeds):.0f} to {max(speeds):.0f}\n")
        text = "Some words about parallel things, and more of it. " * 20
        roles = ("user", "assistant")
        messages = [ChatMessage(roles[n % 2], text) for n in range(N_MESSAGES)]
        for asked, draft in ((messages, "draft"), (None, "draft " * 100)):
            begun = time.perf_counter()
            counted = model.count_tokens(asked, draft)
            took_ms = 1e3 * (time.perf_counter() - begun)
            sys.stdout.write(f"counted {counted} in {took_ms:.1f} ms\n")


if __name__ == "__main__":
    main()
