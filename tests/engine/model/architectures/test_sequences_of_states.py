"""Sequences that have nothing but recurrent states have the bits that they have alone."""

import numpy as np
import pytest

from engine import Model, load_model
from engine.model.forward.batch import Batch, Piece
from tests.helpers.golden import golden_logits, golden_models, golden_path

MODELS = [name for name in golden_models() if name.startswith(("mamba-", "mamba2-"))]
SEQUENCES = 4
N_PROMPT, N_TOKENS = 9, 16

pytestmark = pytest.mark.usefixtures("kernels")


class Run:
    """Sequences of tokens that are computed by one model, each in a slot of its own.

    Attributes:
        logits: logits of each sequence's tokens so far.
    """

    def __init__(self, model: Model, ids: list[list[int]]) -> None:
        self._runner, self._ids = model.runtime.runner, ids
        self.logits: list[list[np.ndarray]] = [[] for _ in ids]

    def step(self, *parts: tuple[int, int]) -> None:
        """Compute the next tokens of some sequences: pairs of a sequence and how many."""
        pieces = [Piece(len(self.logits[one]), n, (), one) for one, n in parts]
        ids = [
            token
            for (one, _), piece in zip(parts, pieces, strict=True)
            for token in self._ids[one][piece.n_past : piece.stop]
        ]
        rows = iter(self._runner.compute(ids, Batch(tuple(pieces), 0)))
        for one, n in parts:
            self.logits[one].extend(next(rows).copy() for _ in range(n))

    def is_like(self, other: "Run") -> bool:
        return all(
            np.array_equal(np.stack(a), np.stack(b))
            for a, b in zip(self.logits, other.logits, strict=True)
        )


@pytest.mark.parametrize("split", [[1], [3, 1, 2]], ids=str)
@pytest.mark.parametrize("name", MODELS or ["none"])
def test_sequences_side_by_side(name: str, split: list[int]) -> None:
    given = golden_logits(name)[0]
    ids = [[given[(n + 3 * one) % len(given)] for n in range(N_TOKENS)] for one in range(SEQUENCES)]
    path, devices = golden_path(f"{name}.gguf"), ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=N_TOKENS, parallel=SEQUENCES) as model:
        alone, beside = Run(model, ids), Run(model, ids)
        for one in range(SEQUENCES):
            for _ in range(N_TOKENS):
                alone.step((one, 1))
        beside.step((2, N_PROMPT))
        beside.step((0, N_PROMPT - 1), (2, 1))
        beside.step((1, N_PROMPT), (2, 1), (0, 1))
        beside.step((3, N_PROMPT + 1), (0, 1), (1, 1))
        while max(map(len, beside.logits)) < N_TOKENS:
            beside.step(*((one, 1) for one in range(SEQUENCES)))
        assert all(SEQUENCES in rank.recordings for rank in model.runtime.ranks)
        for one, rows in enumerate(beside.logits):
            while len(rows) < N_TOKENS:
                beside.step((one, 1))
        assert beside.is_like(alone)
