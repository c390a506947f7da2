"""Measure what the check at a load costs the host, for a Llama 3 8B in Q4_K_M: no kernel starts.

Weights and results are memory that nobody has written. Torch computes on the CPU, which does the
work of the GPU as well; so its operations are also counted: on a card, each costs the host some
microseconds. Run: python -m tests.bench.rank_check
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.gpu.checks import comparison, op_checks
from engine.backends.gpu.checks.comparison import Pair
from engine.backends.gpu.checks.rank_check import DryModel, Verdicts, check_rank
from engine.backends.gpu.launch.configs import KernelTarget, use_target
from engine.backends.gpu.launch.kernel_launch import intercept_launches
from engine.backends.gpu.loading import dry_run
from engine.backends.gpu.loading.dry_run import OpCallLog
from engine.backends.gpu.matmul import dequant_gemm
from engine.formats.gguf.reader import GGUFFile
from engine.hardware.card_records import CardRecords
from engine.hardware.fallbacks import Fallbacks
from engine.load_params import LoadParams
from engine.model.architectures.declare import declare
from engine.model.forward.batch import Batch
from engine.model.forward.cache import Cache
from engine.model.forward.state import CacheSize
from engine.planning.footprint import slot_pieces, x_bytes
from engine.runtime.rank import warm_rows
from tests.helpers.hollow import hollow_llama

CARD = KernelTarget("nvidia", 89, 128)
N_BATCH = 2048

LONG_S = 50e-6
"""Seconds of an operation that takes long on a CPU because of its work, not of its call."""

CPU = torch.device("cpu")
SETTINGS = comparison.SETTINGS


class Operations(TorchDispatchMode):
    """Count of torch's operations.

    Attributes:
        n: number of operations.
        long_s: seconds of those that take long here, where the CPU does the work of a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.long_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        began = time.process_time()
        found = func(*args, **(kwargs or {}))
        took = time.process_time() - began
        if took > LONG_S:
            self.long_s += took
        return found


def main() -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        path = hollow_llama(Path(folder) / "m.gguf")
        params = LoadParams(str(path), n_ctx=8192)
        with GGUFFile.open(path) as file:
            runs_dry(file, params)
            checks(file, params, CardRecords(Path(folder) / "cards.json"))
    draws()


def runs_dry(file: GGUFFile, params: LoadParams) -> None:
    """Compare a dry run that is logged with one that is not, by turns."""
    best = {"without log": 1e9, "with log": 1e9}
    for _ in range(3):
        for name in best:
            dry, log = declare(file, params), OpCallLog() if name == "with log" else None
            context, comm = dry_run.dry_run_context(dry, 0, params, log)
            began = time.process_time()
            with use_target(CARD), intercept_launches(lambda s, log=log: bool(log and log.note(s))):
                for n in warm_rows(N_BATCH):
                    comm.n_tokens = n
                    context.begin(Batch.of_one(1, n, n - 1))
                    dry.model.forward(torch.zeros(n, dtype=torch.int64, device="meta"), context)
            best[name] = min(best[name], time.process_time() - began)
    for name, s in best.items():
        say(f"dry run {name}: {s * 1000:.0f} ms")


def checks(file: GGUFFile, params: LoadParams, records: CardRecords) -> None:
    """Check once without verdicts and once with them; the library's products are left out."""
    op_checks.Pair = Agreeing  # type: ignore[misc]
    dequant_gemm.multiply = lambda a, b, out: None
    comparison.SETTINGS = ()
    for name in ("first load", "second load"):
        dry, slots, cache = with_memory(file, params)
        starts: list[object] = []
        counted, began = Operations(), time.process_time()
        with intercept_launches(lambda s, to=starts: bool(to.append(s))), counted:
            n = check_rank(dry, file, slots, cache, CPU, Fallbacks(), Verdicts(records, "a card"))
        took = time.process_time() - began
        kinds = dict(Counter(call.name for call in dry.log.calls))
        say(
            f"{name}: {n} compared of {kinds}; {len(starts)} launches, {counted.n} operations of "
            f"torch, {took * 1000:.0f} ms, {counted.long_s * 1000:.0f} ms of which in long ones"
        )


class Agreeing(Pair):
    """Comparison that is made, but for nothing: no kernel has computed what it compares."""

    @property
    def agrees(self) -> bool:
        _ = super().agrees
        return True


def draws() -> None:
    """Draw tokens of 128256."""
    some = comparison.Drawing(128256, (range(128256),), 4096)
    comparison.SETTINGS = SETTINGS
    began, starts = time.process_time(), list[object]()
    with intercept_launches(lambda s: bool(starts.append(s))):
        comparison.drawn_tokens(some, CPU)
    took = time.process_time() - began
    say(f"drawn tokens: {len(starts)} launches, {took * 1000:.0f} ms, host's part included")


def with_memory(file: GGUFFile, params: LoadParams) -> tuple[DryModel, Any, Cache]:
    """Return a model that ran dry, and one whose weights have memory that nobody writes."""
    dry, log = declare(file, params), OpCallLog()
    dry_run.collect_launches(dry, 0, params, CARD, warm_rows(N_BATCH), log)
    real, n_bytes = declare(file, params), x_bytes(dry.hp)
    dry_run.META, meta = CPU, dry_run.META
    try:
        for slot in real.slots:
            held = dry_run._held(slot, slot_pieces(slot, 0), n_bytes)
            setattr(slot.owner, slot.attribute, held)
    finally:
        dry_run.META = meta
    cache = Cache(real.states, 0, CacheSize.asked(params, params.n_ctx or 1), CPU)
    return DryModel(log, dry, 0, n_bytes), real.slots, cache


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
