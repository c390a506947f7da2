"""A storm of threads on one model: they ask, cancel, split, save, load and close it at random.

    python -m tests.helpers.thread_storm SECONDS [SEED]

It ends with 0 and a line of JSON, the numbers of what was done, if every answer is that which the
model gives when nobody else calls it, and if nothing but an `EngineError` is raised. A test runs it
as a process of its own, so that a crash is seen as one; threads that wait for each other for ever
end it with their stacks on stderr.
"""

import faulthandler
import json
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from engine import BenchTest, EngineError, Finished, Model, SamplingParams, load_model
from tests.helpers.tiny_gguf import tiny_gguf

N_THREADS = 8
N_TOKENS = 12
N_PROMPTS = 6
HANG_S = 60.0
"""Seconds after the end at which threads that still wait count as hung."""

ABANDONED_S = 0.1
"""Mean number of seconds for which an answer is held and not read."""

MIN_MARGIN = 0.1
"""Least distance of the two largest logits before each token of an answer. What splits, batches and
single tokens round differently was up to 0.026 here, where an activation fell on another byte."""

ACTS = ("ask", "cancel", "drop", "abandon", "compute", "look", "split", "save", "restore", "close")
"""What has to be done at least once."""

GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
SPLITS = ((1,), (1, 1), (3, 1), (1, 1, 1))


class Storm:
    """One storm: the model that all threads call, and what they found.

    Attributes:
        counts: number of times that each thing was done or happened.
        failures: descriptions of what must not happen.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._path = tiny_gguf(folder / "m.gguf", quant="Q8_0", n_ctx=128)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._model = self._load((1,))
        self._wanted = self._answers()
        self._logits = {prompt: self._model.logits(prompt) for prompt in self._wanted}
        self._until = 0.0

    def _load(self, split: tuple[int, ...]) -> Model:
        return load_model(self._path, ["cpu"] * len(split), split, cpu_threads=len(split))

    def _answers(self) -> dict[tuple[int, ...], list[int]]:
        """Return prompts whose answers are the same on every split, each with its answer."""
        found: dict[tuple[int, ...], list[int]] = {}
        draw = random.Random(0)
        for _ in range(400):
            prompt = tuple(draw.randrange(3, 60) for _ in range(draw.randrange(3, 20)))
            answer = ids_of(self._model, prompt)
            rows = np.sort(self._model.logits([*prompt, *answer])[len(prompt) - 1 : -1])
            if (rows[:, -1] - rows[:, -2]).min() > MIN_MARGIN:
                found[prompt] = answer
                if len(found) == N_PROMPTS:
                    return found
        raise AssertionError(f"only {len(found)} prompts have a sure answer")

    def run(self, seconds: float) -> None:
        """Let all threads call the model for so long, and until each thing was done once."""
        self._until = time.monotonic() + seconds
        threads = [threading.Thread(target=self._rage, args=(n,)) for n in range(N_THREADS)]
        for thread in threads:
            thread.start()
        time.sleep(seconds / 2)
        self._close(self._model, random.Random(self._seed), self._folder)
        self._count("close")
        for thread in threads:
            thread.join()
        self._model.close()

    @property
    def _is_over(self) -> bool:
        is_late = time.monotonic() > self._until
        return bool(self.failures) or (is_late and all(self.counts[act] for act in ACTS))

    def _rage(self, number: int) -> None:
        """Do one thing after another, as one of the threads."""
        draw = random.Random(f"{self._seed} {number}")
        state = self._folder / f"{number}.state"
        actions: list[tuple[float, Callable[[Model, random.Random, Path], None]]] = [
            (8, self._ask), (4, self._cancel), (3, self._drop), (0.5, self._abandon),
            (2, self._compute), (1, self._measure), (2, self._look), (3, self._split),
            (2, self._save), (2, self._restore), (0.1, self._close),
        ]  # fmt: skip
        while not self._is_over:
            (act,) = draw.choices([a for _, a in actions], [weight for weight, _ in actions])
            name, model = act.__name__[1:], self._model
            try:
                act(model, draw, state)
                self._count(name)
            except EngineError as error:
                self._count(f"{name}: {type(error).__name__}")
                if not model.is_loaded:
                    time.sleep(0.01)  # until another one is loaded
            except BaseException:  # noqa: BLE001 whatever it is, it is a finding
                self.failures.append(f"{name} on thread {number}: {traceback.format_exc()}")

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.failures.append(what)

    def _prompt(self, draw: random.Random) -> tuple[int, ...]:
        return draw.choice(list(self._wanted))

    def _ask(self, model: Model, draw: random.Random, _: Path) -> None:
        """Read a whole answer."""
        prompt = self._prompt(draw)
        found = ids_of(model, prompt)
        self._check(found == self._wanted[prompt], f"{prompt} is answered by {found}")

    def _begun(self, model: Model, draw: random.Random, n: int) -> object:
        """Read the first events of an answer; return its iterator."""
        prompt, found = self._prompt(draw), []
        events = model.generate(prompt, GREEDY)
        for event, _ in zip(events, range(n), strict=False):
            found += getattr(event, "ids", ())
        self._check(found == self._wanted[prompt][: len(found)], f"{prompt} begins with {found}")
        return events

    def _cancel(self, model: Model, draw: random.Random, _: Path) -> None:
        """Cancel an answer, perhaps while it waits for another one."""
        prompt, left, found = self._prompt(draw), draw.randrange(N_TOKENS), []
        asked = Counter[str]()

        def is_cancelled() -> bool:
            asked["times"] += 1
            return asked["times"] > left

        for event in model.generate(prompt, GREEDY, is_cancelled):
            found += getattr(event, "ids", ())
        was_told = asked["times"] > left  # several right guesses may end an answer before
        is_right = isinstance(event, Finished) and (event.reason == "cancelled") == was_told
        self._check(is_right, f"an answer that was told to end, {was_told}, ends with {event}")
        n = len(found) if was_told else N_TOKENS
        self._check(found == self._wanted[prompt][:n], f"{prompt} begins with {found}")

    def _drop(self, model: Model, draw: random.Random, _: Path) -> None:
        """Read a part of an answer, and hold it no more."""
        self._begun(model, draw, draw.randrange(1, 6))

    def _abandon(self, model: Model, draw: random.Random, _: Path) -> None:
        """Read a part of an answer, and hold it for a while."""
        events = self._begun(model, draw, draw.randrange(1, 6))
        time.sleep(draw.random() * 2 * ABANDONED_S)
        del events

    def _compute(self, model: Model, draw: random.Random, _: Path) -> None:
        """Compute the logits of a prompt."""
        prompt = self._prompt(draw)
        off = np.abs(model.logits(prompt) - self._logits[prompt]).max()
        self._check(off < MIN_MARGIN / 2, f"the logits of {prompt} are off by {off}")

    def _measure(self, model: Model, _: random.Random, __: Path) -> None:
        model.bench(BenchTest(n_prompt=8), 1, warm_up=False)

    def _look(self, model: Model, _: random.Random, __: Path) -> None:
        """Read what can be known about a model."""
        _ = model.warnings, model.plan, model.n_threads, model.is_loaded, model.has_stopped
        self._check(0 <= model.n_cached <= 128, "more tokens are cached than fit")
        self._check(len(model.memory()) <= 3, "more ranks than there are")

    def _split(self, model: Model, draw: random.Random, _: Path) -> None:
        """Split the model anew, perhaps between two tokens of another thread's answer."""
        split = draw.choice(SPLITS)
        model.resplit(split, devices=["cpu"] * len(split))

    def _save(self, model: Model, _: random.Random, state: Path) -> None:
        model.save_state(state)

    def _restore(self, model: Model, _: random.Random, state: Path) -> None:
        if state.exists():
            model.load_state(state)

    def _close(self, model: Model, draw: random.Random, _: Path) -> None:
        """Close the model under all others; one thread loads it again."""
        model.close()
        with self._lock:
            if self._model is model:
                self._model = self._load(draw.choice(SPLITS))


def ids_of(model: Model, prompt: tuple[int, ...]) -> list[int]:
    """Return the token ids of a greedy answer."""
    return [i for e in model.generate(prompt, GREEDY) for i in getattr(e, "ids", ())]


def main(seconds: float, seed: int = 0) -> int:
    """Run a storm; return 0 if nothing happened that must not."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds + HANG_S, exit=True)
    with TemporaryDirectory() as folder:
        storm = Storm(Path(folder), seed)
        storm.run(seconds)
    sys.stdout.write(json.dumps(storm.counts, sort_keys=True) + "\n")
    sys.stderr.writelines(f"{failure}\n" for failure in storm.failures)
    return 1 if storm.failures else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *map(int, sys.argv[2:])))
