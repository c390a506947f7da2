"""Check of one rank at a load: what its dry run has logged, on its own weights and cache.

Each rank checks alone, without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from engine.backends.gpu.checks.calls import OpCallLog
from engine.backends.gpu.checks.comparison import Drawing, StandIns, drawn_tokens
from engine.backends.gpu.checks.products import FileRows
from engine.backends.gpu.checks.weight_check import Verdicts, WeightCheck, report
from engine.backends.gpu.ops import GpuOps
from engine.hardware.card_records import CardRecords, card_key
from engine.hardware.devices.catalog import list_devices

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.hardware.fallbacks import Fallbacks
    from engine.model.architectures.declare import Declaration
    from engine.model.forward.cache import Cache
    from engine.model.layers.module import Slot


@dataclass(frozen=True, slots=True)
class DryModel:
    """A model whose passes ran dry for a rank.

    Attributes:
        log: log of the operations.
        declaration: declaration of the model, whose modules hold tensors without memory.
        rank: number of the rank.
        x_bytes: bytes of a quantised activation, see `engine.planning.footprint.x_bytes`.
    """

    log: OpCallLog
    declaration: Declaration
    rank: int
    x_bytes: int

    @property
    def drawings(self) -> Sequence[Drawing]:
        """Logits from which the ranks sample: their slices, and on one rank all of them."""
        split, hp = self.declaration.split, self.declaration.hp
        slices = tuple(range(*split.output.spans[rank]) for rank in split.holders)
        found = [Drawing(hp.n_vocab, slices, hp.n_embd)]
        if len(slices) > 1 and self.rank == split.last_group[0]:
            found.append(Drawing(hp.n_vocab, (range(hp.n_vocab),), hp.n_embd))
        return found


def check_rank(
    dry: DryModel, file: GGUFFile, slots: Sequence[Slot], cache: Cache, device: torch.device,
    fallbacks: Fallbacks, verdicts: Verdicts,
) -> int:  # fmt: skip
    """Compare a rank's kernels with torch; refuse what differs, and report that.

    Args:
        dry: the model, run dry; its modules hold the rank's weights afterwards.
        file: file of the model.
        slots: tensors of the model, and the attributes that hold the rank's parts of them.
        cache: the rank's cache, which holds nothing yet; it is zero again afterwards.
        device: device of the rank.
        fallbacks: list that gets what is refused.
        verdicts: verdicts of earlier loads.

    Returns:
        The number of operations that were compared; others are known from earlier loads.

    Raises:
        EngineError: no kernel gives the right results.
    """
    n_ctx = max((layer.k.shape[1] for layer in cache.layers), default=0)
    ops = GpuOps(device, dry.x_bytes, n_ctx=n_ctx)
    stand_ins = StandIns(dry.log, dry.declaration.slots, slots, cache.layers, device)
    rows = FileRows(file, slots, dry.rank, device)
    check = WeightCheck(dry.log, stand_ins, rows, ops, verdicts)
    wrong = check.run(
        (drawing.name, partial(partial, drawn_tokens, drawing, device)) for drawing in dry.drawings
    )
    report(wrong, str(device), fallbacks)
    return check.n_made


def verdicts_of(device: torch.device) -> Verdicts:
    """Return the verdicts on a device's card that are kept for this user."""
    key = _key(device)
    return Verdicts(CardRecords.of_user() if key else None, key)


@cache
def _key(device: torch.device) -> str:
    """Return the key of a card's verdicts; "" for a device that is not listed."""
    info = next((info for info in list_devices() if info.id == str(device)), None)
    return "" if info is None or info.kind == "cpu" else card_key(info)
