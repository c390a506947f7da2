"""Tests of a sequence that is computed without an answer."""

import numpy as np
import pytest

from engine.generation.scheduler import Scheduler
from engine.generation.solo_sequence import solo_sequence
from engine.model.forward.batch import Batch
from tests.engine.generation.test_scheduler import KINDS, made, prompt_of


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_in_the_place_of_the_next_token_leaves_nothing(kind: str) -> None:
    runtime = made(kind, n_ctx=900)
    scheduler = Scheduler(runtime)
    other, ids = prompt_of(300, 1), prompt_of(40, 2)
    with solo_sequence(scheduler, runtime) as sequence:
        expected = [*sequence.compute(other, 299), *sequence.compute([5], 0)]
    with solo_sequence(scheduler, runtime) as sequence:
        for _ in sequence.compute(ids, len(ids)):
            raise AssertionError("no logits are wanted")
        with sequence.scratch() as place:
            assert place.n_past == len(ids)
            for token in (7, 8, 7):
                runtime.forward([token], Batch((place,), 0))
        (found,) = sequence.compute([9], 0)
        assert list(sequence.ids) == [*ids, 9]
    scheduler.forget()
    with solo_sequence(scheduler, runtime) as sequence:
        (fresh,) = sequence.compute([*ids, 9], len(ids))
    assert np.array_equal(found, fresh)
    with solo_sequence(scheduler, runtime) as sequence:
        again = [*sequence.compute(other, 299), *sequence.compute([5], 0)]
    assert all(map(np.array_equal, again, expected))
