"""Time to the first token of a chat's second turn, beside that of computing all of its tokens.

    python -m tests.bench.turns FILE [--tokens 4000] [--ranks 1,3]

Three ways: the second turn right behind the first; a turn in one of eight chats that take turns;
and a turn behind a restart, with the state from a file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine import Model, SamplingParams, TokenText, load_model

N_CHATS = 8
"""Number of chats that take turns."""

N_NEW = 16
"""Number of tokens of each further question."""

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def asked(model: Model, ids: Sequence[int]) -> tuple[float, list[int]]:
    """Return the seconds to the first token of an answer, and the answer's tokens."""
    begun, first, found = time.perf_counter(), 0.0, list[int]()
    for event in model.generate(ids, PARAMS):
        if isinstance(event, TokenText):
            first = first or time.perf_counter() - begun
            found += event.ids
    return first, found


def loaded(path: str, n_ranks: int, n_ctx: int, n_parallel: int) -> Model:
    """Return the model on some ranks, with room for as many whole chats."""
    split = [3, 1, 2] if n_ranks == 3 else [1] * n_ranks
    return load_model(path, ["cpu"] * n_ranks, split, n_ctx=n_ctx, parallel=n_parallel)


def measure(path: str, n_tokens: int, n_ranks: int) -> None:
    """Print the times on some ranks, as shares of those of whole prompts."""
    n_ctx = n_tokens + 256
    with loaded(path, n_ranks, n_ctx, N_CHATS) as model, tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(1)
        top = min(900, model.info.n_vocab)
        asked(model, rng.integers(10, top, 600).tolist())  # compiles and records
        chats = rng.integers(10, top, (N_CHATS, n_tokens)).tolist()
        whole = []
        for chat in chats:
            seconds, answer = asked(model, chat)
            whole.append(seconds)
            chat += answer + rng.integers(10, top, N_NEW).tolist()
        prefill = sorted(whole)[len(whole) // 2]
        second, answer = asked(model, chats[-1])
        chats[-1] += answer + rng.integers(10, top, N_NEW).tolist()
        turns = [asked(model, chat)[0] for chat in chats[:-1]]
        asked(model, chats[-1])
        file = Path(folder) / "state"
        model.save_state(file)
        with loaded(path, n_ranks, n_ctx, 1) as again:
            asked(again, rng.integers(10, top, 600).tolist())
            begun = time.perf_counter()
            again.load_state(file)
            loading = time.perf_counter() - begun
            restart = (
                loading + asked(again, [*chats[-1], *rng.integers(10, top, N_NEW).tolist()])[0]
            )
    shares = {"second turn": second, "switched, worst": max(turns), "restarted": restart}
    text = ", ".join(f"{name} {s * 1e3:.0f} ms ({s / prefill:.1%})" for name, s in shares.items())
    sys.stdout.write(
        f"{n_ranks} ranks: prefill of {n_tokens} tokens {prefill * 1e3:.0f} ms; {text}" + "\n"
    )


def main() -> None:
    """Measure on each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of the first turn")
    parser.add_argument("--ranks", default="1,3", help="numbers of virtual devices")
    args = parser.parse_args()
    for n in args.ranks.split(","):
        measure(args.file, args.tokens, int(n))


if __name__ == "__main__":
    main()
