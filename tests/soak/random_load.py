"""Random requests on one model for a long time: no page is lost, memory stays flat.

    python -m tests.soak.random_load --minutes 10 [--file FILE] [--seed 1]

Threads send prompts that often begin alike, read answers at different speeds, cancel some, drop
others, and split the model anew now and then. Every answer is compared with the one that the model
gives alone. At the end no sequence may use a page.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import psutil

from engine import Finished, Model, SamplingParams, TokenText, load_model

DEMO = Path(__file__).parents[2] / "resources" / "demo"
"""Folder of the bundled model."""

N_STEMS = 12
"""Number of beginnings that prompts share."""

SPLITS = ([1.0], [1.0, 1.0], [3.0, 1.0, 2.0])
"""Layer splits that follow each other: no sum is cut, so that answers stay the same."""


N_SAMPLE = 300
"""Number of prompts that are asked once more at the end."""


def key_of(prompt: Sequence[int]) -> bytes:
    """Return a short key of a prompt, so that what is kept of thousands stays small."""
    return blake2b(repr(list(prompt)).encode(), digest_size=12).digest()


class Load:
    """Random requests on one model, from several threads.

    Attributes:
        wrong: sentences about what went wrong.
        counts: number of answers of each kind: whole, cancelled, dropped, re-splits.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self.wrong: list[str] = []
        self.counts = dict.fromkeys(("whole", "cancelled", "dropped", "splits"), 0)
        self._known: dict[bytes, tuple[int, ...]] = {}
        self._sample: list[list[int]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        rng = random.Random(seed)
        top = min(600, model.info.n_vocab)
        self._stems = [
            [rng.randrange(5, top) for _ in range(rng.choice((3, 200, 256, 300, 700)))]
            for _ in range(N_STEMS)
        ]

    def run(self, minutes: float, n_threads: int, seed: int) -> None:
        """Send requests for a while."""
        threads = [
            threading.Thread(target=self._ask_on, args=(seed * 100 + n,)) for n in range(n_threads)
        ]
        for thread in threads:
            thread.start()
        end, rng = time.monotonic() + minutes * 60, random.Random(seed)
        while time.monotonic() < end and not self.wrong:
            time.sleep(min(20.0, max(0.0, end - time.monotonic())))
            split = rng.choice(SPLITS)
            self.model.resplit(split, devices=["cpu"] * len(split), split_mode="layer")
            self.counts["splits"] += 1
            self._report()
        self._stop.set()
        for thread in threads:
            thread.join()

    def _ask_on(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set() and not self.wrong:
            try:
                self._ask(rng)
            except Exception as error:  # noqa: BLE001 whatever it is, it is a finding
                self.wrong.append(f"{type(error).__name__}: {error}")

    def _ask(self, rng: random.Random) -> None:
        """Ask once, in one of several ways."""
        stem = rng.choice(self._stems)
        prompt = [*stem, *(rng.randrange(5, 300) for _ in range(rng.choice((0, 1, 40))))]
        n, kind = rng.choice((1, 5, 30)), rng.random()
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        until = rng.randrange(1, 8) if kind < 0.2 else None
        n_asked = 0

        def is_cancelled() -> bool:
            nonlocal n_asked
            n_asked += 1
            return until is not None and n_asked > until

        answer, found = self.model.generate(prompt, params, is_cancelled), list[int]()
        for event in answer:
            if isinstance(event, TokenText):
                found += event.ids
                if 0.2 <= kind < 0.3:
                    self._count("dropped")
                    return
            if rng.random() < 0.05:
                time.sleep(rng.random() / 10)
            if isinstance(event, Finished):
                self._compare(prompt, found, event, n)

    def _compare(self, prompt: Sequence[int], found: list[int], end: Finished, n: int) -> None:
        """Compare an answer with the others that the same prompt has had."""
        self._count("cancelled" if end.reason == "cancelled" else "whole")
        with self._lock:
            key = key_of(prompt)
            if key not in self._known and len(self._sample) < N_SAMPLE:
                self._sample.append(list(prompt))
            known = self._known.get(key, ())
            common = min(len(known), len(found))
            if tuple(found[:common]) != known[:common]:
                self.wrong.append(f"{len(prompt)} tokens were answered by {found} and {known}")
            if len(found) > len(known):
                self._known[key] = tuple(found)
            if end.reason == "length" and len(found) != n:
                self.wrong.append(f"{len(found)} tokens came instead of {n}")

    def _count(self, kind: str) -> None:
        with self._lock:
            self.counts[kind] += 1

    def compare_alone(self) -> None:
        """Ask some prompts once more, alone, and compare."""
        for prompt in self._sample:
            expected = self._known.get(key_of(prompt))
            if expected is None:  # cancelled each time
                continue
            params = SamplingParams(temperature=0, max_tokens=len(expected), ignore_eos=True)
            found: list[int] = []
            for event in self.model.generate(prompt, params):
                if isinstance(event, TokenText):
                    found += event.ids
            if tuple(found) != expected:
                self.wrong.append(f"alone {len(prompt)} tokens are answered by {found}")

    def _report(self) -> None:
        resident = psutil.Process().memory_info().rss >> 20
        sys.stdout.write(f"{self.counts}, {resident} MiB resident\n")
        sys.stdout.flush()


def main() -> None:
    """Run, and end with status 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", default=str(next(DEMO.glob("*.gguf"))))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--n-ctx", type=int, default=1024)
    args = parser.parse_args()
    with load_model(args.file, n_ctx=args.n_ctx, parallel=2) as model:
        load = Load(model, args.seed)
        load.run(args.minutes, args.threads, args.seed)
        load.compare_alone()
        used = sum(pool.n_pages - pool.n_free for pool in model.scheduler.cache.pools)
    if used:
        load.wrong.append(f"{used} pages are used although nobody asks")
    sys.stdout.write("\n".join(load.wrong or ["no finding"]) + "\n")
    sys.exit(bool(load.wrong))


if __name__ == "__main__":
    main()
