"""Settings of loading a model: which one, on which devices, and how it is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from math import isfinite
from typing import Literal, NamedTuple

from engine.errors import EngineError
from engine.util.fields import rejected

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Types in which keys, or values, can be stored."""


class KVTypes(NamedTuple):
    """The types of a KV cache.

    Attributes:
        k: type of the keys, one of `KV_TYPES`.
        v: type of the values, likewise.
    """

    k: str
    v: str

    def __str__(self) -> str:
        """Return the text that `kv_types` reads: one type where both are the same."""
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


@cache
def kv_types(text: str) -> KVTypes:
    """Read a KV type: one type for both, or those of keys and values with a slash between.

    Raises:
        ValueError: it is neither.
    """
    k, _, v = text.partition("/")
    found = KVTypes(k, v or k)
    if not set(found) <= set(KV_TYPES) or text.endswith("/"):
        raise ValueError(text)
    return found


SPLIT_MODES = ("tensor", "layer", "groups")
"""Ways to split a model over ranks, see `LoadParams.split_mode`."""

ROPE_SCALINGS = ("", "none", "linear", "yarn")
"""Ways to stretch positions, see `LoadParams.rope_scaling`; "" is what the file says."""

MOST_ROPE_FACTOR, MOST_ROPE_BASE = 1024.0, 1e12
"""Largest factor and base of RoPE that are accepted."""

MOST_TEMPLATE = 128 << 10
"""Largest number of characters of a chat template."""

PeerMode = Literal["auto", "off", "on"]
"""Setting of direct access between GPUs' memories, see `LoadParams.p2p`."""

PEER_MODES: tuple[PeerMode, ...] = ("auto", "off", "on")
"""All values of `PeerMode`."""

MachineLink = Literal["auto", "nccl", "gloo"]
"""Setting of the way of tensors between machines, see `LoadParams.machine_link`."""

MACHINE_LINKS: tuple[MachineLink, ...] = ("auto", "nccl", "gloo")
"""All values of `MachineLink`."""

MOST_PARALLEL = 16
"""Largest number of requests that run at once, see `LoadParams.parallel`."""

DraftKind = Literal["auto", "off", "ngram", "mtp"]
"""Setting of guesses of the next tokens, see `LoadParams.draft`."""

DRAFT_KINDS: tuple[DraftKind, ...] = ("auto", "off", "ngram", "mtp")
"""All values of `DraftKind`."""

MmprojKind = Literal["auto", "off"]
"""Setting of the file that encodes pictures, see `LoadParams.mmproj`."""

MMPROJ_KINDS: tuple[MmprojKind, ...] = ("auto", "off")
"""All values of `MmprojKind`."""

DEFAULT_DRAFTED = 7
MOST_DRAFTED = 15
"""Default and largest value of `LoadParams.draft_max`."""

LEAST_DRAFT_VOCAB = 256
"""Least number of tokens that can be guessed from, see `LoadParams.draft_vocab`."""

DEFAULT_CONTEXT = 2048
"""Context in tokens where none is asked for."""


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
            raise rejected("scale", "a finite number", self.scale)


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
        parallel: number of requests of full context length for which the KV cache has room; up to
            16 shorter ones share it at once.
        checkpoint_bytes: most bytes of the host's memory for kept recurrent states, from which
            later requests go on; None is a share of what is free.
        kv_type: type of the stored keys and values, one of `KV_TYPES`; or two with a slash between,
            such as "q8_0/q4_0": that of keys and that of values.
        cpu_threads: number of threads of all CPU ranks together; None is one per physical core.
        n_batch: number of prompt tokens to compute at once; None is 2048 or 1024 if GPUs compute
            all and have the memory, else 512.
        control_vectors: directions that steer the model; several add up.
        control_layers: first and last layer to steer; None is all but layer 0.
        p2p: whether GPUs access each other's memory directly: "auto" where a trial shows that it
            works and is faster, "off" nowhere, "on" wherever a trial shows that it works.
        rope_scaling: how positions are stretched beyond the context that the model was trained for:
            "none", "linear" (all frequencies) or "yarn"; "" as the file says. As in llama.cpp, it
            holds for the layers that see the whole context.
        rope_factor: factor by which they are stretched, 1 or more; 0 as the file says.
        rope_base: base of RoPE's frequencies; 0 as the file says.
        chat_template: Jinja source of the chat template to use in place of the file's; "" for that.
        fast_prompts: whether CPUs with BF16 units compute long prompts in BF16, where a measurement
            at the load finds that faster. Answers may then differ in their last digits depending
            on what else is computed at the same time.
        draft: where guesses of the next tokens come from, of which one pass checks several: "ngram"
            from what has followed the last tokens earlier in the text, "mtp" from the block for
            that which some files have (multi-token prediction); "auto" from both, with GPUs from
            the text alone, "off" from nowhere; or the path of a GGUF file: from the text and from
            that smaller model, the draft model, which has the same vocabulary, or from the MTP
            block that is all it holds. A file "mtp-….gguf" beside a model without such a block is
            found. They are left out where they do not pay. The answers are those without guesses.
        draft_vocab: number of tokens, the first of the vocabulary, from which an MTP block guesses;
            0 for all. A vocabulary is in the order in which its tokens were learnt, the frequent
            first, so few guesses are lost, and less of the head is read for each. These rows are
            held once more. The answers are the same.
        mmproj: path of the GGUF file that encodes pictures for the model; "auto" for one beside it
            that fits, where there is memory for it, "off" for none.
        mmproj_device: device on which it lies whole: one of the ranks', or "cpu"; "auto" for the
            GPU with the largest share that has room for it, else for a CPU.
        draft_max: largest number of guesses for an answer that a pass checks. The state behind each
            takes memory in models with recurrent layers, which have room for three where there is
            little of it.
        machines: number of ranks on each machine, of consecutive ones, where several machines
            compute the model together; empty on a single one.
        machine_link: how tensors go from one machine to another: "gloo" through host memory,
            "nccl" from GPU to GPU where a trial shows that it works, or else there is an error;
            "auto" by NCCL where all are NVIDIA's GPUs on Linux, the trial passes and it is faster.

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
    rope_scaling: str = ""
    rope_factor: float = 0.0
    rope_base: float = 0.0
    chat_template: str = ""
    fast_prompts: bool = False
    parallel: int = 1
    checkpoint_bytes: int | None = None
    draft: DraftKind | str = "auto"
    draft_max: int = DEFAULT_DRAFTED
    mmproj: MmprojKind | str = "auto"
    mmproj_device: str = "auto"
    draft_vocab: int = 0
    machines: tuple[int, ...] = ()
    machine_link: MachineLink = "auto"

    def __post_init__(self) -> None:
        if not self.devices:
            raise EngineError("No device was chosen.", "Switch at least one device on.")
        object.__setattr__(self, "kv_type", _kv_type(self.kv_type))
        _one_of("split_mode", self.split_mode, SPLIT_MODES)
        _one_of("p2p", self.p2p, PEER_MODES)
        _one_of("machine_link", self.machine_link, MACHINE_LINKS)
        if not _names_gguf(self.draft):
            _one_of("draft", self.draft, DRAFT_KINDS, " or the path of a GGUF file")
        if not _names_gguf(self.mmproj):
            _one_of("mmproj", self.mmproj, MMPROJ_KINDS, " or the path of a GGUF file")
        _one_of("mmproj_device", self.mmproj_device, ("auto", *dict.fromkeys((*self._own, "cpu"))))
        _count("draft_max", self.draft_max or 0)
        if self.draft_max > MOST_DRAFTED:
            raise rejected("draft_max", f"at most {MOST_DRAFTED}", self.draft_max)
        _count("draft_vocab", self.draft_vocab or LEAST_DRAFT_VOCAB, least=LEAST_DRAFT_VOCAB)
        _one_of("rope_scaling", self.rope_scaling, ROPE_SCALINGS)
        if not isinstance(self.chat_template, str) or len(self.chat_template) > MOST_TEMPLATE:
            most = f"a text of at most {MOST_TEMPLATE} characters"
            raise rejected("chat_template", most, self.chat_template)
        _number("rope_factor", self.rope_factor, MOST_ROPE_FACTOR)
        _number("rope_base", self.rope_base, MOST_ROPE_BASE)
        _count("n_ctx", self.n_ctx)
        _count("checkpoint_bytes", self.checkpoint_bytes, least=0)
        _count("parallel", self.parallel or 0)
        if self.parallel > MOST_PARALLEL:
            raise rejected("parallel", f"at most {MOST_PARALLEL}", self.parallel)
        _count("cpu_threads", self.cpu_threads)
        _count("n_batch", self.n_batch)
        for size in self.groups or ():
            _count("groups", size or 0)
        for size in self.machines:
            _count("machines", size or 0)
        _count("n_cpu_blocks", self.n_cpu_blocks, least=0)
        _count("n_cpu_moe", self.n_cpu_moe, least=0)
        for _, n_bytes in self.reserve:
            _count("reserve", n_bytes, least=0)
        if self.control_layers is not None:
            first, last = self.control_layers
            if not 0 <= first <= last:
                raise rejected("control_layers", "a first and a last layer", self.control_layers)

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Device of each rank: the chosen devices, then others that blocks or overrides go to."""
        takers = ["cpu"] if self.n_cpu_blocks or self.n_cpu_moe else []
        takers += [target for _, target in self.overrides if not target.startswith("#")]
        return self.devices + tuple(dict.fromkeys(d for d in takers if d not in self.devices))

    @property
    def n_draft(self) -> int:
        """Largest number of guesses for an answer that a pass checks; 0 for none."""
        return 0 if self.draft == "off" else self.draft_max

    @property
    def may_leave_mtp(self) -> bool:
        """Whether an MTP block is only loaded where there is memory for it."""
        return self.draft == "auto"

    @property
    def without_mtp(self) -> LoadParams:
        """These settings, without the model's MTP block if it may be left out."""
        return replace(self, draft="ngram", draft_vocab=0) if self.may_leave_mtp else self

    @property
    def without_pictures(self) -> LoadParams:
        """These settings, without an encoder of pictures if it may be left out."""
        return replace(self, mmproj="off") if self.mmproj == "auto" else self

    @property
    def draft_path(self) -> str:
        """Path of the file that guesses, a draft model or an MTP block alone; "" for none."""
        return "" if self.draft in DRAFT_KINDS else self.draft

    @property
    def draft_rank(self) -> int:
        """Rank on whose device a draft model lies: that of the largest share on machine 0."""
        return max(range(len(self._own)), key=self._share)

    def _share(self, rank: int) -> tuple[float, ...]:
        """Return the share of a rank; nothing if the split has too few, which is told later."""
        return (self.split or (1.0,) * len(self.devices))[rank : rank + 1]

    @property
    def _own(self) -> tuple[str, ...]:
        return self.devices[: self.machines[0]] if self.machines else self.devices

    @property
    def draft_device(self) -> str:
        """Device of the draft model."""
        return self.devices[self.draft_rank]

    @property
    def picture_devices(self) -> tuple[str, ...]:
        """Devices on which an encoder of pictures may lie, the best one first."""
        if self.mmproj_device != "auto":
            return (self.mmproj_device,)
        ranked = sorted(
            range(len(self._own)),
            key=lambda rank: (not self.devices[rank].startswith("cpu"), self._share(rank)),
            reverse=True,
        )
        return tuple(dict.fromkeys((*(self.devices[rank] for rank in ranked), "cpu")))

    @property
    def rope(self) -> str:
        """RoPE settings that replace the file's values, as a text; "" for none."""
        found = self.rope_scaling, self.rope_factor, self.rope_base
        return " ".join(map(str, found)) if any(found) else ""

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups, as set or by default; empty in other modes."""
        if self.split_mode != "groups":
            return ()
        if self.groups is None and self.machines:
            return self.machines
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


def _kv_type(value: object) -> str:
    """Return a KV type as it is always written: one type where both are the same."""
    try:
        return str(kv_types(value if isinstance(value, str) else ""))
    except ValueError:
        choices = " or ".join(f"'{choice}'" for choice in KV_TYPES)
        wanted = f"{choices}, or two of these with a slash between"
        raise rejected("kv_type", wanted, value) from None


def _one_of(name: str, value: str, choices: tuple[str, ...], other: str = "") -> None:
    if value not in choices:
        raise rejected(name, " or ".join(f"'{choice}'" for choice in choices) + other, value)


def _names_gguf(value: object) -> bool:
    return isinstance(value, str) and value.lower().endswith(".gguf")


def _number(name: str, value: object, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value == 0 or 1 <= value <= most):  # type: ignore[operator]
        raise rejected(name, f"0 or a number from 1 to {most:g}", value)


def _count(name: str, value: object, least: int = 1) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if value is not None and not is_count:
        raise rejected(name, f"a whole number of at least {least}", value)
