"""Rows of a pass that a model's devices sample, compared with samplers of the host."""

import numpy as np

from engine import Model, SamplingParams
from engine.decoding.sampling.sampler import Sampler, SamplingRequest
from engine.model.forward.batch import Batch, Piece

SETTINGS = (
    SamplingParams(temperature=0, repeat_penalty=1.5, repeat_last_n=3),
    SamplingParams(seed=3, temperature=3, top_k=20, presence_penalty=2, frequency_penalty=1),
    SamplingParams(seed=4, temperature=3, typical_p=0.9),  # which only the host knows
    SamplingParams(seed=5, temperature=3, top_k=0, top_p=0.9, min_p=0),
)


def check_rows(model: Model, n: int) -> None:
    """Check what devices sample behind n single tokens, twice, against samplers of the host.

    The first time the host samples the last row itself, and the third one always.
    """
    runner = model.runtime.runner
    host, followed = ([Sampler(params) for params in SETTINGS[:n]] for _ in range(2))
    ids = [5, 9, 33, 9][:n]
    for at in range(2):
        for one, token in enumerate(ids):
            host[one].accept(token)
            followed[one].accept(token)
        pieces = [Piece(at, 1, ([one],) * len(runner.groups), one) for one in range(n)]
        batch = Batch(tuple(pieces), 0)
        wishes = [SamplingRequest(sampler, [17, 3]) for sampler in followed]
        found = runner.sample(ids, batch, [*wishes[: n - 1], wishes[-1] if at else None])
        logits = runner.forward(ids, batch)
        is_sampled = [*(True, True, False, True)[: n - 1], at == 1]
        assert [isinstance(row, int) for row in found] == is_sampled
        for one, row in enumerate(found):
            logits[one, [17, 3]] = -np.inf
            ids[one] = host[one].sample(logits[one])
            if isinstance(row, int):
                assert row == ids[one]
            else:
                row[[17, 3]] = -np.inf
                assert np.array_equal(row, logits[one])
                assert followed[one].sample(row) == ids[one]
