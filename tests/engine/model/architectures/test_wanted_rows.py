"""Behind the last keys and values of a prompt only rows go on whose logits are wanted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from engine import load_model
from engine.model.forward.batch import SMALL_BATCH
from engine.model.forward.context import Context
from engine.model.layers.ffn import FFN
from tests.helpers.passes import forward_alone
from tests.helpers.tiny_gguf import tiny_gguf

IDS = [3, 17, 40, 5, 5, 9, 61, 22, 30, 2, 11, 50, 7, 8, 19, 33, 4, 4, 60, 1]

N_LAYER = 3

SPLITS: Sequence[dict[str, Any]] = (
    {"split": (1,)},
    {"split": (3, 1, 2)},
    {"split": (2, 0, 1)},
    {"split": (1, 1), "split_mode": "layer"},
    {"split": (1, 2, 1), "split_mode": "groups", "groups": (2, 1)},
    {"split": (1, 2, 1), "split_mode": "groups", "groups": (1, 2)},
    {"split": (1, 1), "overrides": (("ffn", "#1"), ("attn", "#0"))},
)


@pytest.fixture(scope="module", params=["llama", "bitnet", "command-r"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three blocks, plain, with norms over all heads, or with parallel blocks."""
    arch, extra = request.param, dict[str, Any]()
    if arch == "command-r":
        extra = {f"blk.{layer}.ffn_norm.weight": None for layer in range(N_LAYER)}
        extra[f"{arch}.attention.layer_norm_epsilon"] = 1e-5
    return tiny_gguf(
        tmp_path_factory.mktemp("models") / "m.gguf",
        arch=arch, n_layer=N_LAYER, n_head_kv=4, tied=True, tokenizer=False, extra=extra,
    )  # fmt: skip


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_logits_are_the_same_however_many_are_wanted(path: Path, splits: dict[str, Any]) -> None:
    n, devices = len(IDS), ["cpu"] * len(splits["split"])
    with load_model(path, devices, n_ctx=256, **splits) as model:
        runner = model.runtime.runner
        expected = forward_alone(runner, IDS, 0)
        for first in (n - 1, n - 3, 1):
            found = forward_alone(runner, IDS, 0, first)
            assert np.array_equal(found, expected[first:]), first
        assert len(forward_alone(runner, IDS[:10], 0, 10)) == 0
        assert np.array_equal(forward_alone(runner, IDS[10:], 10, 9), expected[-1:])


def test_the_last_block_computes_wanted_rows_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier blocks compute all of them, as the next block's keys and values need them."""
    rows, original = list[int](), FFN.inner

    def inner(ffn: FFN, x: Tensor, ctx: Context) -> Tensor:
        rows.append(x.shape[0])
        return original(ffn, x, ctx)

    n = len(IDS)
    with load_model(path, n_ctx=256) as model:
        monkeypatch.setattr(FFN, "inner", inner)
        for first, expected in ((n - 1, 1), (n - 3, 3), (n, 1), (0, n)):
            rows.clear()
            forward_alone(model.runtime.runner, IDS, 0, first)
            assert rows == [n] * (N_LAYER - 1) + [expected]
        rows.clear()
        forward_alone(model.runtime.runner, IDS[:SMALL_BATCH], 0, SMALL_BATCH - 1)
        assert rows == [SMALL_BATCH] * N_LAYER
