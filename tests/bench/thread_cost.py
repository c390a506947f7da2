"""What it costs that several threads may call one model.

    python -m tests.bench.thread_cost

It prints the least time by which reading an event through an `AnswerStream` is longer than reading
it from a bare iterator, in CPU time of the thread, and the speed of an answer of a small model
alone and while seven other threads wait for its end.
"""

import sys
import threading
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

from engine import Model, SamplingParams, TokenText, load_model
from engine.generation.occupancy import AnswerStream, Occupancy
from engine.progress import never
from tests.helpers.tiny_gguf import tiny_gguf

N_EVENTS, ROUNDS, N_TOKENS, N_OTHERS = 20_000, 30, 1500, 7

GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=1)


def event_s(events: Iterator[object]) -> float:
    """Return the seconds that it takes to read an event."""
    begun = time.thread_time()
    for _ in range(N_EVENTS):
        next(events)
    return (time.thread_time() - begun) / N_EVENTS


def token_s(model: Model, n_others: int) -> float:
    """Return the seconds of a token while so many threads wait for the answer's end."""
    events = model.generate([5, 6], GREEDY)
    next(events)
    others = [
        threading.Thread(target=list, args=(model.generate([9], SHORT),)) for _ in range(n_others)
    ]
    for other in others:
        other.start()
    time.sleep(0.1)
    begun = time.perf_counter()
    n = sum(isinstance(event, TokenText) for event in events)
    seconds = (time.perf_counter() - begun) / n
    for other in others:
        other.join()
    return seconds


def main() -> None:
    bare, stream = (
        min(event_s(events) for _ in range(ROUNDS))
        for events in (
            repeat(TokenText("a", (5,))),
            AnswerStream(Occupancy(), repeat(TokenText("a", (5,))), never),
        )
    )
    sys.stdout.write(f"an event: {(stream - bare) * 1e6:.2f} us more\n")
    with TemporaryDirectory() as folder:
        path = tiny_gguf(Path(folder) / "m.gguf", quant="Q8_0", n_ctx=N_TOKENS + 16)
        with load_model(path, cpu_threads=1) as model:
            for _ in range(3):
                alone, waited = token_s(model, 0), token_s(model, N_OTHERS)
                sys.stdout.write(
                    f"a token: {alone * 1e6:.0f} us alone, {waited * 1e6:.0f} us while "
                    f"{N_OTHERS} wait, ratio {waited / alone:.2f}\n"
                )


if __name__ == "__main__":
    main()
