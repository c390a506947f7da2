"""Several matrices in planes times the same activations, as one job of a rank's threads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels import calls
from engine.kernels.extent import n_tiles
from engine.kernels.product import ARGUMENTS
from engine.kernels.together import JOB
from engine.ops.planes import PlaneWeight

PANELS, N_TOKENS, OUT, OUT_STRIDE = (
    ARGUMENTS.index(name) for name in ("panels", "n_tokens", "out", "out_stride")
)


class Together:
    """Products of a few tokens; for many, the time between jobs does not count.

    Args:
        weights: of one rank, with the same columns.
    """

    def __init__(self, weights: Sequence[PlaneWeight]) -> None:
        first = weights[0]
        self.weights = tuple(weights)
        self.n_tokens = first.n_tokens_per_pass
        self._worker, self._extent = first.worker, first.extent
        self._rows = [weight.n_rows for weight in weights]
        self._width = sum(self._rows)
        self._arguments = [array("q", weight.arguments(0, 0, 0, 0)) for weight in weights]
        self._jobs = array("q")
        for weight, arguments in zip(weights, self._arguments, strict=True):
            task = calls.multiply_task(weight.type_number, self._worker.x_bytes)
            n_piece = -(-n_tiles(weight.n_rows) // weight.n_tiles_per_piece)
            self._jobs.extend((task, arguments.buffer_info()[0], n_piece))
        self._run = calls.run_all()

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """The product with each matrix, for x (T, n_in), T ≤ `n_tokens`."""
        n_tokens, worker = x.shape[0], self._worker
        y = torch.empty(n_tokens, self._width)
        panels, out, stride = worker.panels(x, self._extent), y.data_ptr(), 4 * self._width
        for arguments, n_rows in zip(self._arguments, self._rows, strict=True):
            arguments[PANELS], arguments[N_TOKENS] = panels, n_tokens
            arguments[OUT], arguments[OUT_STRIDE] = out, stride
            out += 4 * n_rows
        worker.team.wake()
        self._run(worker.team.address, self._jobs.buffer_info()[0], len(self._jobs) // len(JOB))
        return torch.split_with_sizes(y, self._rows, 1)
