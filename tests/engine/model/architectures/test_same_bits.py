"""On CPUs a prompt has the same bits whole, in pieces and token by token: every architecture."""

import numpy as np
import pytest

from engine import load_model
from tests.helpers.golden import Case, golden_logits, golden_models, golden_path, logits_in_steps
from tests.helpers.passes import forward_alone
from tests.helpers.tiers import paired

pytestmark = pytest.mark.usefixtures("kernels")

N_TOKENS = 40

SPLITS = ((1,), (3, 1, 2), (1, 1))

SIZES = (3, 7, 16, N_TOKENS)
"""Numbers of tokens of a pass."""


def models() -> list[str]:
    """Return the models that differ in more than the types of their weights."""
    found = [name for name in golden_models() if not name.startswith("types-")]
    return [*found, "types-f16-pure", "types-bf16-pure", "types-f32"] if found else ["none"]


@pytest.mark.parametrize(("name", "split"), paired(models(), SPLITS), ids=str)
def test_passes_of_any_length(name: str, split: tuple[float, ...]) -> None:
    """Compare the logits of all tokens, computed one by one, with those of longer passes."""
    ids = golden_logits(name)[0][:N_TOKENS]
    path, devices = golden_path(f"{name}.gguf"), ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=N_TOKENS) as model:
        singly = logits_in_steps(model, ids, Case(split, n_decode=len(ids)))
        for size in SIZES:
            found = logits_in_steps(model, ids, Case(split, chunk=size))
            assert np.array_equal(found, singly), size
        n, runner = len(ids), model.runtime.runner
        for n_wanted in (1, 3):  # in the last block, other rows are left out
            found = forward_alone(runner, ids, 0, n - n_wanted)
            assert np.array_equal(found, singly[-n_wanted:]), n_wanted
        forward_alone(runner, ids[: n - 9], 0, n - 9)
        assert np.array_equal(forward_alone(runner, ids[n - 9 :], n - 9, 8), singly[-1:])
