"""What it costs that several answers may be computed at once, for one that is alone.

    python -m tests.bench.thread_cost

It prints the time of a token of a small model read through `Model.generate`, alone and while seven
other answers are held that nobody reads, beside that of the forward pass alone.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from engine import Model, SamplingParams, TokenText, load_model
from engine.model.forward.batch import Batch
from tests.helpers.tiny_gguf import tiny_gguf

N_TOKENS, N_OTHERS, ROUNDS = 1500, 7, 3

GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)


def token_s(model: Model, n_others: int) -> float:
    """Return the seconds of a token while so many answers are held."""
    others = [model.generate([9], GREEDY) for _ in range(n_others)]
    for other in others:
        next(other)
    events = model.generate([5, 6], GREEDY)
    for _ in range(20):
        next(events)
    begun = time.perf_counter()
    n = sum(isinstance(event, TokenText) for event in events)
    return (time.perf_counter() - begun) / n


def pass_s(model: Model) -> float:
    """Return the seconds of a pass over one token."""
    forward, begun = model.runtime.runner.forward, time.perf_counter()
    for position in range(20, N_TOKENS):
        forward([5], Batch.of_one(position, 1, 0))
    return (time.perf_counter() - begun) / (N_TOKENS - 20)


def main() -> None:
    with TemporaryDirectory() as folder:
        path = tiny_gguf(Path(folder) / "m.gguf", quant="Q8_0", n_ctx=N_TOKENS + 16)
        with load_model(path, cpu_threads=1) as model:
            for _ in range(ROUNDS):
                alone, held = token_s(model, 0), token_s(model, N_OTHERS)
                sys.stdout.write(
                    f"a token: {pass_s(model) * 1e6:.0f} us computed, {alone * 1e6:.0f} us alone, "
                    f"{held * 1e6:.0f} us while {N_OTHERS} are held\n"
                )


if __name__ == "__main__":
    main()
