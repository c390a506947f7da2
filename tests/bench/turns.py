"""Time to the first token of a chat's second turn, beside that of computing all of its tokens.

    python -m tests.bench.turns FILE [--tokens 4000] [--chats 8] [--splits 1 1,1,1 3,1,2]

Three ways: the second turn right behind the first; a turn in one of eight chats that take turns;
and a turn behind a restart, with the state from a file (the median of three restarts).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from engine import Model, SamplingParams, TokenText, load_model

N_CHATS = 8
"""Number of chats that take turns."""

N_RESTARTS = 3
"""Number of restarts, of which the median counts."""

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


def loaded(path: str, split: Sequence[float], n_ctx: int, n_parallel: int) -> Model:
    """Return the model on virtual devices, with room for as many whole chats."""
    return load_model(path, ["cpu"] * len(split), split, n_ctx=n_ctx, parallel=n_parallel)


def restarted(
    path: str, split: Sequence[float], n_ctx: int, file: Path, warm: Sequence[int],
    turn: Sequence[int],
) -> tuple[float, float]:  # fmt: skip
    """Load a model anew; return the seconds of loading a state, and from there to a first token."""
    with loaded(path, split, n_ctx, 1) as model:
        asked(model, warm)
        begun = time.perf_counter()
        model.load_state(file)
        return time.perf_counter() - begun, asked(model, turn)[0]


def measure(path: str, split: Sequence[float], n_tokens: int, n_chats: int) -> None:
    """Print the times on one split, as shares of those of whole prompts."""
    n_ctx, rng = n_tokens + 256, np.random.default_rng(1)
    with (
        loaded(path, split, n_ctx, n_chats) as model, tempfile.TemporaryDirectory() as folder
    ):  # fmt: skip
        top = min(900, model.info.n_vocab)
        asked(model, warm := rng.integers(10, top, 600).tolist())  # compiles and records
        chats = rng.integers(10, top, (n_chats, n_tokens)).tolist()
        whole = []
        for chat in chats:
            seconds, answer = asked(model, chat)
            whole.append(seconds)
            chat += answer + rng.integers(10, top, N_NEW).tolist()
        prefill = median(whole)
        second, answer = asked(model, chats[-1])
        chats[-1] += answer + rng.integers(10, top, N_NEW).tolist()
        turns = [asked(model, chat)[0] for chat in chats[:-1]]
        asked(model, chats[-1])
        file = Path(folder) / "state"
        begun = time.perf_counter()
        model.save_state(file)
        saving, mib = time.perf_counter() - begun, file.stat().st_size / (1 << 20)
        turn = [*chats[-1], *rng.integers(10, top, N_NEW).tolist()]
        found = [restarted(path, split, n_ctx, file, warm, turn) for _ in range(N_RESTARTS)]
    reading, first = sorted(found, key=sum)[N_RESTARTS // 2]
    shares = {
        "second turn": second, "switched, worst": max(turns, default=second),
        "restarted": reading + first,
    }  # fmt: skip
    text = ", ".join(f"{name} {s * 1e3:.0f} ms ({s / prefill:.1%})" for name, s in shares.items())
    sys.stdout.write(
        f"{list(split)}: prefill of {n_tokens} tokens {prefill * 1e3:.0f} ms; {text}, of which "
        f"{reading * 1e3:.0f} ms read {mib:.1f} MiB; saved in {saving * 1e3:.0f} ms\n"
    )
    sys.stdout.flush()


def main() -> None:
    """Measure on each split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of the first turn")
    parser.add_argument("--chats", type=int, default=N_CHATS, help="chats that take turns")
    parser.add_argument(
        "--splits", nargs="+", default=["1", "3,1,2"], help="shares of virtual devices"
    )
    args = parser.parse_args()
    for split in args.splits:
        measure(args.file, [float(share) for share in split.split(",")], args.tokens, args.chats)


if __name__ == "__main__":
    main()
