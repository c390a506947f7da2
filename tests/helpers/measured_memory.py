"""Measured and predicted memory of a model in a process of its own, at the end of its context.

`python -m tests.helpers.measured_memory MODEL RANKS N_CTX N_BATCH` prints one JSON document.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from engine import LoadParams
from engine.api import Model
from engine.runtime.thread_runtime import ThreadRuntime
from tests.helpers.passes import forward_alone


def measured(path: Path, n_ranks: int, n_ctx: int, n_batch: int) -> dict[str, dict[str, int]]:
    """Return the predicted and the measured bytes of all ranks, by purpose."""
    arguments = [str(path), str(n_ranks), str(n_ctx), str(n_batch)]
    run = subprocess.run(
        [sys.executable, "-m", __name__, *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, int]] = json.loads(run.stdout)
    return found


def main(path: str, n_ranks: int, n_ctx: int, n_batch: int) -> None:
    devices = ("cpu",) * n_ranks
    with Model(LoadParams(path, devices, n_ctx=512, n_batch=n_batch)) as small:
        compute(small.runtime, 512, n_batch)  # whatever a process needs once
    with Model(LoadParams(path, devices, n_ctx=n_ctx, n_batch=n_batch)) as model:
        compute(model.runtime, n_ctx, n_batch)
        total: dict[str, dict[str, int]] = {"predicted": {}, "measured": {}}
        for rank in model.memory():
            for name, use in (("predicted", rank.predicted), ("measured", rank.measured)):
                for purpose, n_bytes in asdict(use).items():
                    total[name][purpose] = total[name].get(purpose, 0) + n_bytes
    sys.stdout.write(json.dumps(total))


def compute(runtime: ThreadRuntime, n_ctx: int, n_batch: int) -> None:
    """Fill the cache with zeros, then compute its last tokens, together and singly.

    The logits of all of them are wanted, so that the last block computes as many rows as others:
    in a small model it may be the only one that sees the whole context.
    """
    with torch.inference_mode():
        for rank in runtime.ranks:
            for layer in rank.context.cache.layers:
                layer.k.zero_()
                layer.v.zero_()
    ids = [i % 200 + 3 for i in range(n_batch)]
    for _ in range(2):
        forward_alone(runtime.runner, ids, n_ctx - n_batch)
    for back in (3, 2, 1):
        forward_alone(runtime.runner, [5], n_ctx - back)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
