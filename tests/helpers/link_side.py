"""One of two processes whose kernels wait for each other in a mapped file: one side of a link.

    python -m tests.helpers.link_side FILE N_ROUNDS

It plays the second device, prints "ready" when it begins, and its counts at the end.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch

from engine.backends.gpu.kernels import link_trial
from engine.backends.gpu.launch.kernel_launch import launch

N_PROGRAMS, N_ROWS, MOST, SIZE, LIMIT = 2, 2, 5, 4, 2000
N_PACKETS = N_PROGRAMS * 2 * 2 * MOST
FILE_BYTES = 2 * N_PACKETS * 8


def play(side: int, path: Path, n_rounds: int, *, limit: int = LIMIT, n_bad: int = 0) -> list[int]:
    """Take part in rounds; return the rounds read, and the pairs that were lost and wrong.

    Args:
        path: a file of `FILE_BYTES` zeros, mapped by both sides.
        n_bad: number of words for which this side expects a wrong value.
    """
    slots = np.memmap(path, dtype=np.int64, mode="r+", shape=(2, N_PACKETS))
    generator = torch.Generator().manual_seed(7)
    words = [
        torch.randint(
            -(1 << 31), 1 << 31, (N_ROWS, N_PROGRAMS, 2 * MOST), dtype=torch.int32,
            generator=generator,
        )
        for _ in range(2)
    ]  # fmt: skip
    theirs = words[1 - side].clone()
    theirs.view(-1)[:n_bad] ^= 1
    addresses = [slots[number].ctypes.data for number in (side, 1 - side)]
    table = torch.tensor(addresses, dtype=torch.int64)
    status = torch.zeros(N_PROGRAMS, 3, dtype=torch.int64)
    launch(
        link_trial.exchange, (N_PROGRAMS,), words[side], theirs, table, status, 0, n_rounds, N_ROWS,
        MOST, MOST, MOST, limit, SIZE=SIZE, ASM=False,
    )  # fmt: skip
    return [int(status[:, 0].min()), int(status[:, 1].sum()), int(status[:, 2].sum())]


if __name__ == "__main__":
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdout.write(json.dumps(play(1, Path(sys.argv[1]), int(sys.argv[2]))) + "\n")
