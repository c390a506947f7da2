"""One rank of a model by interpreted GPU kernels, loaded and ready for the check of a load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.checks.rank_check import DryModel, Verdicts, check_rank
from engine.backends.gpu.launch.configs import INTERPRETER
from engine.backends.gpu.loading.dry_run import OpCallLog, collect_launches
from engine.formats.gguf.reader import GGUFFile
from engine.hardware.fallbacks import Fallbacks
from engine.load_params import LoadParams
from engine.model.architectures.declare import declare
from engine.model.forward.cache import Cache
from engine.model.forward.state import CacheSize
from engine.planning.footprint import x_bytes
from engine.runtime.loader import ByteProgress, load_rank

CPU = torch.device("cpu")
NOWHERE = Verdicts(None, "")


class CheckedRank:
    """Rank of a model, run dry and loaded.

    Args:
        row_counts: numbers of tokens of the passes.
        options: parameters of the load.

    Attributes:
        calls: log of the dry run.
        fallbacks: what the check reports.
        cache: cache of the rank.
    """

    def __init__(
        self, path: Path, row_counts: Sequence[int] = (1, 16), rank: int = 0, **options: object
    ) -> None:
        params = LoadParams(str(path), **{"n_ctx": 64, **options})
        self.file = GGUFFile.open(path)
        dry, self.calls = declare(self.file, params), OpCallLog()
        self.starts = collect_launches(dry, rank, params, INTERPRETER, row_counts, self.calls)
        real, n_bytes = declare(self.file, params), x_bytes(dry.hp)
        self.slots, self.model = real.slots, real.model
        backend = GpuBackend(CPU, n_bytes, real.hp.n_ctx)
        progress = ByteProgress(1 << 30, lambda _: None, lambda: False)
        load_rank(self.file, real.slots, rank, CPU, "kernels", backend, progress)
        self.cache = Cache(real.states, rank, CacheSize.asked(params, real.hp.n_ctx), CPU)
        self.dry = DryModel(self.calls, dry, rank, n_bytes)
        self.fallbacks = Fallbacks(["cpu"])

    def only(self, *names: str) -> CheckedRank:
        """Leave out all operations with other names."""
        self.calls.calls = [call for call in self.calls.calls if call.name in names]
        return self

    def check(self, verdicts: Verdicts = NOWHERE) -> int:
        """Check the kernels once; return the number of operations that were compared."""
        return check_rank(
            self.dry, self.file, self.slots, self.cache, CPU, self.fallbacks, verdicts
        )

    @property
    def warnings(self) -> str:
        """What the check reports, for a person."""
        return " ".join(found.sentence for found in self.fallbacks.current)
