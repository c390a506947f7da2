"""The settings that a person can choose: one frozen dataclass per subject.

Each field carries its title, help, bounds and step in `field(metadata=...)`. Validation reads them
here, and a settings panel can be built from them. This module imports neither torch nor Qt.

Metadata keys: `title` and `help` (texts), `kind` (int, float, bool, str or tuple), `min` and `max`
(accepted range, both ends included), `soft_max` (end of a slider, if smaller), `step`, and
`choices` for a field with a few named values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from engine.errors import EngineError

__all__ = [
    "KV_TYPES", "PEER_MODES", "SPLIT_MODES", "ControlVector", "LoadParams", "Overflow", "PeerMode",
    "SamplingParams", "validate_fields",
]  # fmt: skip

Overflow = Literal["stop", "shift"]
"""Action when the context is full: end the answer, or drop the oldest messages."""

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Types in which keys and values can be stored."""

SPLIT_MODES = ("tensor", "layer", "groups")
"""Ways to split a model over ranks, see `LoadParams.split_mode`."""

PeerMode = Literal["auto", "off", "on"]
"""Setting of direct access between GPUs' memories, see `LoadParams.p2p`."""

PEER_MODES: tuple[PeerMode, ...] = ("auto", "off", "on")
"""All values of `PeerMode`."""

MOST_TOKENS = 2**31 - 1
"""Number of tokens that no answer reaches."""

DEFAULT_CONTEXT = 2048
"""Context in tokens where none is asked for."""

T = TypeVar("T")
NUMBER_NOUNS = {int: "a whole number", float: "a number"}


def _number(
    default: T,
    title: str,
    help: str,  # noqa: A002 - the metadata key of the same name
    *,
    bounds: tuple[float, float],
    step: float,
    soft_max: float | None = None,
    kind: type[int] | type[float] = float,
    lowest: str = "",
) -> T:
    """Return the field of a number.

    Args:
        bounds: smallest and largest value.
        soft_max: largest value that people want, for sliders.
        lowest: what the smallest value means, where it is no amount.
    """
    metadata = {"title": title, "help": help, "kind": kind, "step": step}
    metadata |= {"min": bounds[0], "max": bounds[1]}
    if soft_max is not None:
        metadata["soft_max"] = soft_max
    if lowest:
        metadata["lowest"] = lowest
    result: T = field(default=default, metadata=metadata)
    return result


def validate_fields(settings: Any) -> None:
    """Check every field of a dataclass against its metadata; convert numbers to their kind.

    A numpy number, or an int for a float, is accepted and converted, so that equal settings compare
    equal and serialise alike.

    Raises:
        EngineError: a value is wrong; the error names the field, what it accepts and the value.
    """
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        if value is None and spec.default is None:
            continue
        object.__setattr__(settings, spec.name, _checked(spec.name, value, spec.metadata))


def _checked(name: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    kind = metadata["kind"]
    if kind in NUMBER_NOUNS:
        return _checked_number(name, value, metadata)
    if kind is tuple:
        return _checked_strings(name, value)
    if not isinstance(value, kind):
        expected = "true or false" if kind is bool else "a text"
        raise _rejected(name, expected, value)
    choices = metadata.get("choices")
    if choices and value not in choices:
        raise _rejected(name, " or ".join(f"'{choice}'" for choice in choices), value)
    return value


def _checked_number(name: str, value: Any, metadata: Mapping[str, Any]) -> int | float:
    kind, low, high = metadata["kind"], metadata["min"], metadata["max"]
    is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # false for NaN, too
        raise _rejected(name, f"{NUMBER_NOUNS[kind]} from {low} to {high}", value)
    number: int | float = kind(value)
    return number


def _checked_strings(name: str, value: Any) -> tuple[str, ...]:
    """Check a tuple or list of texts (JSON has no tuple); a lone text is refused."""
    is_list = isinstance(value, tuple | list)
    if not is_list or not all(isinstance(text, str) and text for text in value):
        raise _rejected(name, "a list of texts that are not empty", value)
    return tuple(value)


def _rejected(name: str, expected: str, value: Any) -> EngineError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return EngineError(f"The setting '{name}' must be {expected}, not {shown}.")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of sampling and of the end of answers, with llama.cpp's defaults.

    Raises:
        EngineError: a field is out of bounds or of the wrong kind.
    """

    max_tokens: int = _number(
        -1,
        "Max tokens",
        "The answer ends after this many tokens. -1 sets no limit but the context.",
        bounds=(-1, 2**31 - 1),
        soft_max=8192,
        step=1,
        kind=int,
        lowest="no limit",
    )
    temperature: float = _number(
        0.8,
        "Temperature",
        "Higher is more varied, lower more predictable. 0 always takes the most likely token.",
        bounds=(0.0, 5.0),
        soft_max=2.0,
        step=0.05,
    )
    top_k: int = _number(
        40,
        "Top-k",
        "Only this many of the most likely tokens are considered. 0 considers all.",
        bounds=(0, 2**31 - 1),
        soft_max=200,
        step=1,
        kind=int,
    )
    top_p: float = _number(
        0.95,
        "Top-p",
        "Only the most likely tokens that together reach this probability are considered. "
        "1 considers all.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    min_p: float = _number(
        0.05,
        "Min-p",
        "Tokens less likely than this fraction of the most likely one are left out. 0 keeps all.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    typical_p: float = _number(
        1.0,
        "Typical-p",
        "Only tokens about as surprising as expected, up to this probability, are considered. "
        "1 considers all.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    repeat_penalty: float = _number(
        1.0,
        "Repeat penalty",
        "Above 1, tokens that occurred recently become less likely. 1 is neutral.",
        bounds=(0.1, 10.0),
        soft_max=2.0,
        step=0.01,
    )
    repeat_last_n: int = _number(
        64,
        "Penalty window",
        "How many recent tokens the three penalties look at. -1 is all of them, 0 none.",
        bounds=(-1, 2**31 - 1),
        soft_max=2048,
        step=1,
        kind=int,
        lowest="all",
    )
    frequency_penalty: float = _number(
        0.0,
        "Frequency penalty",
        "Subtracted from a token's score for each time it occurred recently.",
        bounds=(-2.0, 2.0),
        step=0.05,
    )
    presence_penalty: float = _number(
        0.0,
        "Presence penalty",
        "Subtracted from a token's score once if it occurred recently.",
        bounds=(-2.0, 2.0),
        step=0.05,
    )
    seed: int | None = _number(
        None,
        "Seed",
        "The same seed gives the same answer again. Without one, each answer uses a new seed.",
        bounds=(0, 2**64 - 1),
        step=1,
        kind=int,
    )
    stop: tuple[str, ...] = field(
        default=(),
        metadata={
            "title": "Stop strings",
            "help": "The answer ends before any of these strings.",
            "kind": tuple,
        },
    )
    ignore_eos: bool = field(
        default=False,
        metadata={
            "title": "Ignore end-of-text",
            "help": "Continues when the model wants to end, up to the maximum of tokens.",
            "kind": bool,
        },
    )
    on_overflow: Overflow = field(
        default="stop",
        metadata={
            "title": "When the context is full",
            "help": "Stop ends the answer; shift drops the oldest messages and continues.",
            "kind": str,
            "choices": ("stop", "shift"),
        },
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of an answer, a large one where there is no limit."""
        return MOST_TOKENS if self.max_tokens < 0 else self.max_tokens


@dataclass(frozen=True, slots=True)
class ControlVector:
    """A direction that steers a model, with its strength.

    Attributes:
        path: path of a GGUF file of the architecture "controlvector".
        scale: factor on the direction; a negative one reverses it.

    Raises:
        EngineError: the scale is not a finite number.
    """

    path: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isfinite(self.scale):
            raise _rejected("scale", "a finite number", self.scale)


@dataclass(frozen=True, slots=True)
class LoadParams:
    """Settings of loading a model: which one, on which devices, and how it is split.

    Attributes:
        path: path of a GGUF file, or of any part of a split one.
        devices: device of each rank; a repeated device becomes several virtual ones.
        split: relative share of each rank, such as (3, 1); None is even.
        split_mode: "tensor" cuts every block, "layer" gives whole blocks to ranks, "groups" gives
            whole blocks to groups of ranks and cuts them inside.
        groups: sizes of the groups of consecutive ranks, such as (2, 2); None groups consecutive
            ranks on the same kind of device, or makes pairs where all are of one kind. Only for
            the mode "groups".
        n_ctx: context in tokens; None is 2048, or what the model was trained for if that is less.
        n_cpu_blocks: number of blocks, from the first on, that go whole to the CPU; the others are
            split.
        n_cpu_moe: number of blocks, from the first on, whose experts go to the CPU.
        kv_on_host: whether GPUs keep keys and values in the host's memory and fetch them when
            needed.
        overrides: pairs of a regular expression on tensor names and a device, or a rank such as
            "#0": matching parts go there whole, whatever else is set; later ones win.
        reserve: pairs of a device and the bytes to keep free there.
        kv_type: type of the stored keys and values: "f32", "f16", "bf16", "q8_0" or "q4_0".
        cpu_threads: number of threads of all CPU ranks together; None is one per physical core.
        n_batch: number of prompt tokens to compute at once; None is 2048 or 1024 if GPUs compute
            all and have the memory, else 512.
        control_vectors: directions that steer the model; several add up.
        control_layers: first and last layer to steer; None is all but layer 0.
        p2p: whether GPUs access each other's memory directly: "auto" where a trial shows that it
            works and is faster, "off" nowhere, "on" wherever a trial shows that it works.

    Raises:
        EngineError: a value makes no sense.
    """

    path: str
    devices: tuple[str, ...] = ("cpu",)
    split: tuple[float, ...] | None = None
    split_mode: str = "tensor"
    n_ctx: int | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    kv_type: str = "f16"
    cpu_threads: int | None = None
    n_batch: int | None = None
    control_vectors: tuple[ControlVector, ...] = ()
    control_layers: tuple[int, int] | None = None
    groups: tuple[int, ...] | None = None
    n_cpu_blocks: int = 0
    n_cpu_moe: int = 0
    kv_on_host: bool = False
    reserve: tuple[tuple[str, int], ...] = ()
    p2p: PeerMode = "auto"

    def __post_init__(self) -> None:
        if not self.devices:
            raise EngineError("No device was chosen.", "Switch at least one device on.")
        _one_of("kv_type", self.kv_type, KV_TYPES)
        _one_of("split_mode", self.split_mode, SPLIT_MODES)
        _one_of("p2p", self.p2p, PEER_MODES)
        _count("n_ctx", self.n_ctx)
        _count("cpu_threads", self.cpu_threads)
        _count("n_batch", self.n_batch)
        for size in self.groups or ():
            _count("groups", size or 0)
        _count("n_cpu_blocks", self.n_cpu_blocks, least=0)
        _count("n_cpu_moe", self.n_cpu_moe, least=0)
        for _, n_bytes in self.reserve:
            _count("reserve", n_bytes, least=0)
        if self.control_layers is not None:
            first, last = self.control_layers
            if not 0 <= first <= last:
                raise _rejected("control_layers", "a first and a last layer", self.control_layers)

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Device of each rank: the chosen devices, then others that blocks or overrides go to."""
        takers = ["cpu"] if self.n_cpu_blocks or self.n_cpu_moe else []
        takers += [target for _, target in self.overrides if not target.startswith("#")]
        return self.devices + tuple(dict.fromkeys(d for d in takers if d not in self.devices))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups, as set or by default; empty in other modes."""
        if self.split_mode != "groups":
            return ()
        return default_groups(self.devices) if self.groups is None else self.groups

    def context_for(self, n_ctx_train: int) -> int:
        """Return the context length for a model that was trained with `n_ctx_train`."""
        if self.n_ctx is not None:
            return self.n_ctx
        return min(DEFAULT_CONTEXT, n_ctx_train or DEFAULT_CONTEXT)


def default_groups(devices: Sequence[str]) -> tuple[int, ...]:
    """Return the default group sizes for these devices.

    Consecutive devices of the same kind are a group; where all are of one kind, pairs are.
    """
    runs = [len(list(run)) for _, run in groupby(devices, lambda device: device.split(":")[0])]
    if len(runs) > 1:
        return tuple(runs)
    return (2,) * (len(devices) // 2) + (1,) * (len(devices) % 2)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _rejected(name, " or ".join(f"'{choice}'" for choice in choices), value)


def _count(name: str, value: object, least: int = 1) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if value is not None and not is_count:
        raise _rejected(name, f"a whole number of at least {least}", value)
