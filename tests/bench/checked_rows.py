"""Time of a pass that checks guesses, beside that of a single token.

    python -m tests.bench.checked_rows FILE [--guesses 0,1,3,7] [--rounds 40]

A sequence of 64 tokens goes on by one token and some guesses, which are replayed as answers replay
them: the states behind each guess go to a place of their own, where the model has states. Passes of
each size take turns; what counts is the median time. Nothing is accepted, as that takes no time.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from statistics import median

from engine import Model, load_model
from engine.model.forward.batch import Batch, Piece

N_PAST = 64
"""Number of tokens of the sequence."""


def checked(model: Model, n_guess: int) -> float:
    """Return the seconds of a pass over a token and guesses."""
    runner = model.runtime.runner
    tables = tuple((0,) for _ in runner.groups)
    slots = [0, *range(1 + n_guess)] if not runner.can_rewind else [0] * (2 + n_guess)
    states = enumerate(pairwise(slots))
    pieces = [Piece(N_PAST + i, 1, tables, goal, source=source) for i, (source, goal) in states]
    begun = time.perf_counter()
    runner.forward([7] * (1 + n_guess), Batch(tuple(pieces), 0))
    return time.perf_counter() - begun


def main() -> None:
    """Measure, and print a line for each number of guesses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--guesses", default="0,1,3,7")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    sizes = [int(n) for n in args.guesses.split(",")]
    # three sequences have places for 7 guesses, too
    with load_model(args.file, n_ctx=256, parallel=3) as model:
        runner = model.runtime.runner
        prompt = Piece(0, N_PAST, tuple((0,) for _ in runner.groups))
        runner.forward([7] * N_PAST, Batch((prompt,), N_PAST))
        found = {}
        for n in sizes:
            for turn in range(3 + args.rounds):
                seconds = checked(model, n), checked(model, 0)
                if turn > 2:
                    found.setdefault(n, []).append(seconds)
    for n, times in found.items():
        ours, alone = (median(column) for column in zip(*times, strict=True))
        ratio = median(a / b for a, b in times)
        line = f"{1 + n} rows: {1000 * ours:.2f} ms, one {1000 * alone:.2f} ms, {ratio:.2f} times"
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
