"""Answers of real models that are computed at once are, to the bit, those that each has alone."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from engine import Model, SamplingParams, load_model
from tests.helpers.golden import golden_path
from tests.helpers.tiers import paired


@dataclass(frozen=True)
class Way:
    """A way to load a model.

    Attributes:
        split: share of each rank.
        mode: split mode.
        groups: sizes of the groups of ranks, if any.
        parallel: number of requests for which there is room.
    """

    split: tuple[int, ...]
    mode: str = "tensor"
    groups: tuple[int, ...] | None = None
    parallel: int = 3

    def __str__(self) -> str:
        split = ":".join(map(str, self.split))
        return f"{split} {self.mode} for {self.parallel}"

    @property
    def splits(self) -> list[tuple[int, ...]]:
        """Splits with the same bits: only layers can go to other ranks, others cut sums."""
        return [self.split, self.split[::-1]] if self.mode == "layer" else [self.split]

    def load(self, name: str) -> Model:
        """Load a model whose requests have at most two pages."""
        path, devices = golden_path(f"{name}.gguf"), ["cpu"] * len(self.split)
        return load_model(
            path, devices, self.split, split_mode=self.mode, groups=self.groups, n_ctx=512,
            parallel=self.parallel,
        )  # fmt: skip


WAYS = (
    Way((1,)),
    Way((3, 1, 2)),
    Way((1, 1), parallel=1),  # answers are preempted and computed again
    Way((2, 1), "layer"),
    Way((2, 1, 1), "groups", (2, 1)),
    Way((1,), parallel=1),
)

NAMES = (
    "llama-gqa-q4_k_m", "mixtral-q4_k_m", "deepseek3-mla-q4_k_m", "gemma3-q4_0",
    "qwen35moe-q4_k_m", "jamba-q4_k_m",
)  # fmt: skip
"""Dense, experts, latent attention, windows, and two kinds of recurrent layers beside attention."""


def ids_of(events: Iterable[object]) -> list[int]:
    return [i for event in events for i in getattr(event, "ids", ())]


def params(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=16, temperature=1.0, ignore_eos=True)


def prompts(model: Model, draw: random.Random) -> list[list[int]]:
    """Return prompts some of which begin alike, within a page and beyond."""

    def some(n: int) -> list[int]:
        return [draw.randrange(3, min(model.runtime.hp.n_vocab, 200)) for _ in range(n)]

    start = some(300)
    return [[*start[:n], *some(k)] for n, k in ((0, 5), (300, 3), (260, 40), (0, 90), (100, 1))]


@pytest.mark.parametrize(("name", "way"), paired(NAMES, WAYS), ids=str)
def test_any_order_gives_each_its_own_answer(name: str, way: Way) -> None:
    """Reads in any order, answers that end early, re-splits, too few pages for all at once."""
    draw = random.Random(7)
    with way.load(name) as model:
        asked, wanted = prompts(model, draw), []
        for number, prompt in enumerate(asked):
            wanted.append(ids_of(model.generate(prompt, params(number))))
            model.scheduler.forget()
        asked.append([*asked[1][:200], 5, 6])
        streams = [model.generate(prompt, params(n)) for n, prompt in enumerate(asked)]
        found: list[list[int]] = [[] for _ in asked]
        left = set(range(len(asked)))
        while left:
            number = draw.choice(sorted(left))
            event = next(streams[number], None)
            if event is None or (number == len(wanted) and len(found[number]) > 3):
                streams[number].close()
                left.discard(number)
            found[number] += ids_of([event])
            if draw.random() < 0.03:
                model.resplit(draw.choice(way.splits))
        assert found[:-1] == wanted
        assert all(pool.n_free == pool.n_pages for pool in model.scheduler.cache.pools)
