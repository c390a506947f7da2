"""Speed of several answers at once, beside that of one.

    python -m tests.bench.batched FILE [-n 64] [--prompt 32] [--sequences 1,2,4,8]

Each answer has a prompt of its own and is read in turn with the others. Rounds of one sequence come
before and behind each measurement, so that a machine's changes of speed show.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from engine import Model, SamplingParams, TokenText, load_model


def prompts(model: Model, n: int, length: int) -> list[list[int]]:
    """Return n different prompts of random tokens."""
    rng = np.random.default_rng(7)
    return rng.integers(10, min(900, model.info.n_vocab), (n, length)).tolist()


def speed(model: Model, asked: Sequence[Sequence[int]], n_tokens: int) -> float:
    """Return the tokens per second of all answers together, without their prompts."""
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    answers = [model.generate(prompt, params) for prompt in asked]
    for answer in answers:  # the prompts, and the first tokens
        next(event for event in answer if isinstance(event, TokenText))
    begun, left, n = time.perf_counter(), list(answers), 0
    while left:
        for answer in list(left):
            event = next(answer, None)
            if event is None:
                left.remove(answer)
            elif isinstance(event, TokenText):
                n += len(event.ids)
    return n / (time.perf_counter() - begun)


def main() -> None:
    """Measure, and print a row for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("-n", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--sequences", default="2,4,8", help="numbers of answers at once")
    parser.add_argument("--ranks", type=int, default=1, help="virtual devices")
    args = parser.parse_args()
    counts = [int(n) for n in args.sequences.split(",")]
    with load_model(
        args.file, ["cpu"] * args.ranks, n_ctx=args.prompt + args.n + 8, parallel=max(counts)
    ) as model:
        asked = prompts(model, max(counts), args.prompt)
        for n in (1, *counts):
            speed(model, asked[:n], 8)  # records
        sys.stdout.write("sequences  tokens/s  one before  one behind  ratio" + "\n")
        for n in counts:
            before = speed(model, asked[:1], args.n)
            together = speed(model, asked[:n], args.n)
            behind = speed(model, asked[:1], args.n)
            ratio = 2 * together / (before + behind)
            sys.stdout.write(
                f"{n:9}  {together:8.1f}  {before:10.1f}  {behind:10.1f}  {ratio:5.2f}" + "\n"
            )


if __name__ == "__main__":
    main()
