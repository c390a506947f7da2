"""On CPUs a sequence has the same bits alone and beside others: every architecture."""

from collections.abc import Sequence

import numpy as np
import pytest

from engine import Model, load_model
from engine.decoding.sampling.sampler import Logits
from engine.model.forward.batch import Batch, Piece
from tests.helpers.golden import golden_logits, golden_models, golden_path
from tests.helpers.tiers import paired

pytestmark = pytest.mark.usefixtures("kernels")

SPLITS = ((1,), (3, 1, 2), (1, 1))

PAGES = (1, 2, 0)
"""Page of each sequence."""

N_TOKENS = 30


def models() -> list[str]:
    """Return the models that differ in more than the types of their weights."""
    found = [name for name in golden_models() if not name.startswith("types-")]
    return [*found, "types-f16-pure", "types-f32"] if found else ["none"]


class Side:
    """Sequences of a model, each with a page and a place of its own.

    Attributes:
        done: number of computed tokens of each.
        logits: logits after each computed token, (n_vocab,); None where nobody asked.
    """

    def __init__(self, model: Model, sequences: Sequence[Sequence[int]]) -> None:
        self._runner, self._sequences = model.runtime.runner, sequences
        self.done = [0] * len(sequences)
        self.logits: list[list[Logits | None]] = [[] for _ in sequences]

    def run(self, *parts: tuple[int, int]) -> None:
        """Compute pairs of a sequence and a number of its tokens in one pass."""
        ids, pieces = list[int](), list[Piece]()
        for number, n in parts:
            at = self.done[number]
            tables = tuple([PAGES[number]] for _ in self._runner.groups)
            pieces.append(Piece(at, n, tables, number))
            ids += self._sequences[number][at : at + n]
        first = parts[0][1] - 1
        rows = iter(self._runner.forward(ids, Batch(tuple(pieces), first)))
        for number, n in parts:
            self.done[number] += n
            self.logits[number] += [*[None] * (n - 1), next(rows)]


@pytest.mark.parametrize(("name", "split"), paired(models(), SPLITS), ids=str)
def test_rows_of_several_sequences(name: str, split: tuple[float, ...]) -> None:
    whole = golden_logits(name)[0]
    sequences = [(3 * whole)[at : at + N_TOKENS] for at in (0, 9, 20)]
    path, devices = golden_path(f"{name}.gguf"), ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=768, parallel=3) as model:
        alone, beside = Side(model, sequences), Side(model, sequences)
        beside.run((0, 5))
        beside.run((1, 17), (0, 1))
        beside.run((2, 3), (0, 1), (1, 1))
        beside.run((2, 9), (1, 1), (0, 1))
        for _ in range(5):  # recorded at the second, and repeated
            beside.run((0, 1), (1, 1), (2, 1))
        for number in range(3):
            n = beside.done[number]
            assert n > 12
            for at in range(n):
                alone.run((number, 1))
                found = beside.logits[number][at]
                if found is not None:
                    assert np.array_equal(found, alone.logits[number][at]), (number, at)


def test_recordings_of_the_sizes_used_last_are_kept() -> None:
    """Sizes that come and go are recorded again, and the rows stay what they are."""
    name = "llama-gqa-q4_k_m"
    sequences = [(9 * golden_logits(name)[0])[at : at + 40] for at in (0, 9, 20)]
    with load_model(golden_path(f"{name}.gguf"), n_ctx=768, parallel=3) as model:
        alone, beside = Side(model, sequences), Side(model, sequences)
        for number in range(3):
            for _ in range(30):
                alone.run((number, 1))
        (rank,) = model.runtime.ranks
        kept = []
        for size in (2, 3, 2, 3):
            for _ in range(3):
                beside.run(*((number, 1) for number in range(size)))
            kept.append(set(rank.recordings))
        assert kept == [{1, 2}, {1, 2, 3}, {1, 2, 3}, {1, 2, 3}]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.runtime.pass_executor.MAX_RECORDED", 1)
            for size in (2, 3, 2):
                for _ in range(3):
                    beside.run(*((number, 1) for number in range(size)))
                assert set(rank.recordings) == {1, size}
        for number in range(3):
            for found, expected in zip(beside.logits[number], alone.logits[number], strict=False):
                assert np.array_equal(found, expected)
