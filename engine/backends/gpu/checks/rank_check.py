"""Check of one rank while a model loads: its dry run's operations, on its weights and cache.

Each rank is checked alone, before its first pass. Only the first operation that launches each
compiled kernel is checked; nested operations count as part of the outermost one. A kernel is
refused if its result differs from torch's.

Verdicts are saved per card, driver and version, so that later loads compare nothing. The wrong
kernel is found by trial and error: the check is repeated with one of the operation's kernels
refused after another, until the results are right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.backends.gpu.checks import op_checks
from engine.backends.gpu.checks.comparison import Drawing, Pair, StandIns, all_agree, drawn_tokens
from engine.backends.gpu.checks.op_checks import FileRows, ProductChecks
from engine.backends.gpu.launch.configs import KernelKey, refuse, refused, watched
from engine.backends.gpu.loading.dry_run import OpCall, OpCallLog
from engine.backends.gpu.ops import GpuOps
from engine.errors import EngineError, Sentence
from engine.formats.gguf.tensors import TYPES
from engine.hardware.card_records import CardRecords, CardVerdict, card_key
from engine.hardware.devices.catalog import list_devices

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.hardware.fallbacks import Fallbacks
    from engine.model.architectures.declare import Declaration
    from engine.model.forward.cache import Cache
    from engine.model.layers.module import Slot


log = logging.getLogger(__name__)

Compare = Callable[[], Sequence[Pair]]
"""Function that computes an operation, with kernels and with torch."""

Prepare = Callable[[], Compare]
"""Function that prepares an operation's arguments, with kernels that have already been checked."""

BY_ROUNDING = ("linears", "matmul", "gated_linears", "per_head")
"""Products that are checked twice: with numbers that rounding does not change, then with others."""

SAMPLING: KernelKey = ("sampling",)

MAX_TRIALS = 8  # max. rounds in which an operation's kernels are refused
MAX_WHY = 180  # max. characters for the kernels' names in a saved verdict

WORDS = {
    "gemv": "products of {1} with {0} weights",
    "gated": "gated products of {1} with {0} weights",
    "tile_gemm": "products of up to {1} with {0} weights",
    "dequant_gemm": "products of many rows with {0} weights",
    "plain": "products of {1} with {0} weights",
    "per_head": "per-head products with {0} weights",
    "look_up": "rows of {0} weights",
    "expert_gemv": "experts' products for few tokens with {0} weights",
    "expert_gemm": "experts' products for many tokens with {0} weights",
    "attention": "attention over keys and values in {0}",
    "kv_write": "writing keys and values in {0}",
    "assign": "expert selection",
}
"""What kernels compute, by their name in keys; for other kernels, that name is shown."""


class Verdicts(NamedTuple):
    """Records of verdicts (None to save nothing), and the card's key (`card_key`)."""

    records: CardRecords | None
    key: str


class WeightCheck:
    """Check of the kernels that a dry run has logged.

    Attributes:
        n_made: number of operations that were compared instead of looked up.
    """

    def __init__(
        self, calls: OpCallLog, stand_ins: StandIns, rows: FileRows, ops: GpuOps, verdicts: Verdicts
    ) -> None:
        self._calls, self._stand_ins, self._ops = calls, stand_ins, ops
        self._products = ProductChecks(rows, ops)
        self._verdicts = verdicts
        self._device = stand_ins.device
        self.n_made = 0

    def run(self, more: Iterable[tuple[str, Prepare]] = ()) -> set[KernelKey]:
        """Run all checks; refuse kernels with wrong results.

        Args:
            more: further checks, each preceded by its name.

        Returns:
            The refused kernels that the rank's passes use.

        Raises:
            EngineError: results are wrong no matter which kernels are refused.
        """
        wanted = set(self._calls.asked)
        new: dict[str, CardVerdict] = {}
        records, key = self._verdicts
        with torch.inference_mode():
            for mark, prepare in (*map(self._named, self._calls.calls), *more):
                what = f"check {mark}"
                known = new.get(what) or (records.find(key, what) if records else None)
                if known is None:
                    known = new[what] = self._tested(mark, prepare())
                wrong = keys_in(known.why) if not known.passed else set()
                refuse(self._device, wrong)
                wanted |= wrong
        if records and new:
            kept = {what: found for what, found in new.items() if len(found.why) <= MAX_WHY}
            records.keep_all(key, kept)
        return wanted & refused(self._device)

    def _named(self, call: OpCall) -> tuple[str, Prepare]:
        return call.mark, lambda: self._prepared(call)

    def _tested(self, mark: str, compare: Compare) -> CardVerdict:
        self.n_made += 1
        keys = wrong_keys(mark, compare)
        if keys:
            log.warning(
                "on %s, %s gave wrong results with %s", self._device, mark, sorted(keys, key=str)
            )
        names = ", ".join(" ".join(map(str, key)) for key in sorted(keys, key=str))
        today = datetime.now(UTC).date().isoformat()
        return CardVerdict("wrong" if keys else "passed", names, today)

    def _prepared(self, call: OpCall) -> Compare:
        """Return a function that computes an operation on the same numbers each time."""
        kinds = (True, False) if call.name in BY_ROUNDING else (False,)
        arguments = self._stand_ins.arguments
        given = [(whole, *arguments(call, self._ops, whole=whole)) for whole in kinds]
        return lambda: [pair for each in given for pair in self._pairs(call.name, *each)]

    def _pairs(
        self, name: str, whole: bool, args: Sequence[Any], named: Mapping[str, Any]
    ) -> list[Pair]:
        if product := getattr(self._products, name, None):
            found = product(whole, *args, **named)
        elif name in op_checks.STATE_AT:
            found = op_checks.on_state(self._ops, name, *args, **named)
        elif special := getattr(op_checks, name, None):
            found = special(self._ops, *args, **named)
        else:
            found = op_checks.in_f32(self._ops, name, *args, **named)
        pairs: list[Pair] = found
        return pairs


def wrong_keys(mark: str, compare: Compare) -> set[KernelKey]:
    """Return the kernels that must be refused for a check to pass; none if it already passes.

    Raises:
        EngineError: the check never passes.
    """
    without: set[KernelKey] = set()
    for _ in range(MAX_TRIALS):
        is_right, asked = _made(compare, without)
        if is_right:
            return without
        others = [key for key in asked if key not in without]
        for key in others:
            if _made(compare, {*without, key})[0]:
                return {*without, key}
        if not others:
            break
        without.update(others)
    raise EngineError(
        "No kernel computes {mark} correctly.",
        "Set TANDEM_BACKEND=reference to run without Tandem's own kernels.",
        mark=mark,
    )


def _made(compare: Compare, without: set[KernelKey]) -> tuple[bool, list[KernelKey]]:
    """Run a check without some kernels; return whether it passes, and the kernels it used."""
    with watched(without) as asked:
        try:
            is_right = all_agree(compare())
        except EngineError:
            if not without:
                raise
            is_right = False  # no kernel is left for the operation
    return is_right, list(asked)


def keys_in(why: str) -> set[KernelKey]:
    """Return the kernels that a verdict names."""
    return {
        tuple(int(word) if word.isdigit() else word for word in name.split())
        for name in why.split(", ")
        if name
    }


def report(keys: Iterable[KernelKey], device: str, fallbacks: Fallbacks) -> None:
    """Report refused kernels as fallbacks."""
    keys = set(keys)
    names = sorted({_in_words(key) for key in keys - {SAMPLING}})
    if SAMPLING in keys:
        why = Sentence("in a check, wrong tokens were sampled there")
        fallbacks.report("sampling", [device], why)
    if names:
        why = Sentence("a check found wrong results for {names}", names=", ".join(names))
        fallbacks.report("wrong", [device], why)


def _in_words(key: KernelKey) -> str:
    name, *facts = key
    words = [str(fact).removeprefix("torch.") for fact in facts]
    first = facts[0] if facts else None
    if isinstance(first, int) and first in TYPES:
        words[0] = TYPES[first].name
    if len(facts) > 1:
        words[1] += " row" if facts[1] == 1 else " rows"
    found = WORDS.get(str(name))
    return found.format(*words) if found else str(name).replace("_", " ")


@dataclass(frozen=True, slots=True)
class DryModel:
    """Result of a rank's dry run; the declared model's modules hold meta tensors."""

    log: OpCallLog
    declaration: Declaration
    rank: int
    x_bytes: int

    @property
    def drawings(self) -> Sequence[Drawing]:
        """Logits from which the ranks sample: each rank's slice, and all logits on one rank."""
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
    """Compare a rank's kernels with torch; refuse and report those that are wrong.

    Args:
        dry: the dry run's model; its modules hold the rank's weights afterwards.
        slots: the model's tensors, and the attributes that hold the rank's parts of them.
        cache: the rank's empty cache; it is zeroed again afterwards.

    Returns:
        The number of operations compared; the others are known from earlier loads.

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
    """Return this user's saved verdicts on a device's card."""
    key = _key(device)
    return Verdicts(CardRecords.of_user() if key else None, key)


@cache
def _key(device: torch.device) -> str:
    """Return the key for a card's verdicts; "" if the device is not listed."""
    info = next((info for info in list_devices() if info.id == str(device)), None)
    return "" if info is None or info.kind == "cpu" else card_key(info)
