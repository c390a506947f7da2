"""Settings for loading a model: which model, on which devices, and how to split it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import groupby
from math import inf, isfinite
from typing import Any, Literal, NamedTuple, TypeVar

from engine.errors import EngineError, Sentence, either
from engine.util.fields import rejected

T = TypeVar("T")

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Types in which keys and values can be stored."""


class KVTypes(NamedTuple):
    """The types of a KV cache's keys and values, both in `KV_TYPES`."""

    k: str
    v: str

    def __str__(self) -> str:
        """Return the text that `kv_types` parses: a single type if both are equal."""
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


@cache
def kv_types(text: str) -> KVTypes:
    """Parse KV cache types given as "k" or "k/v"; raise ValueError for anything else."""
    k, _, v = text.partition("/")
    types = KVTypes(k, v or k)
    if not set(types) <= set(KV_TYPES) or text.endswith("/"):
        raise ValueError(text)
    return types


SPLIT_MODES = ("tensor", "layer", "groups")
"""Ways to split a model over ranks; see `LoadParams.split_mode`."""

ROPE_SCALINGS = ("", "none", "linear", "yarn")
"""Ways to stretch positions; see `LoadParams.rope_scaling`. "" uses the file's setting."""

MAX_ROPE_FACTOR, MAX_ROPE_BASE = 1024.0, 1e12

MAX_TEMPLATE = 128 << 10
"""Maximum length of a chat template, in characters."""

PeerMode = Literal["auto", "off", "on"]
"""Peer access between GPUs; see `LoadParams.p2p`."""

PEER_MODES: tuple[PeerMode, ...] = ("auto", "off", "on")

MachineLink = Literal["auto", "nccl", "gloo"]
"""Transport for tensors between machines; see `LoadParams.machine_link`."""

MACHINE_LINKS: tuple[MachineLink, ...] = ("auto", "nccl", "gloo")

MAX_PARALLEL = 16
"""Maximum number of parallel requests; see `LoadParams.parallel`."""

DraftKind = Literal["auto", "off", "ngram", "mtp"]
"""Source of draft tokens; see `LoadParams.draft`."""

DRAFT_KINDS: tuple[DraftKind, ...] = ("auto", "off", "ngram", "mtp")

MmprojKind = Literal["auto", "off"]
"""Vision encoder file; see `LoadParams.mmproj`."""

MMPROJ_KINDS: tuple[MmprojKind, ...] = ("auto", "off")

DEFAULT_DRAFTED = 7
MAX_DRAFTED = 15
"""Default and maximum of `LoadParams.draft_max`."""

MIN_DRAFT_VOCAB = 256
"""Smallest draft vocabulary; see `LoadParams.draft_vocab`."""

DEFAULT_CONTEXT = 2048
"""Default context length in tokens."""


@dataclass(frozen=True, slots=True)
class ControlVector:
    """A direction that steers a model, with its strength.

    Attributes:
        path: path of a GGUF file with the architecture "controlvector".
        scale: factor by which the direction is multiplied; a negative factor reverses it.

    Raises:
        EngineError: the scale is not a finite number.
    """

    path: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isfinite(self.scale):
            raise rejected("scale", Sentence("a finite number"), self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOption:
    """How a load setting is parsed, checked and presented.

    The command line, window, files and `load_model` are derived from it, so a new setting needs
    only a field with a `LoadOption` in `LoadOptions` or `LoadParams`, and the code that uses it.

    Attributes:
        kind: type of the value: int, float, bool or str; object if it has a parser of its own.
        low, high: range of accepted numbers; for strings, `high` is the maximum length. None: any.
        soft_high: largest number that the window offers, if smaller than `high`.
        may_be_zero: whether 0 is accepted below `low`.
        choices: accepted strings; empty if any string is accepted.
        may_be_file: whether the path of a GGUF file is also accepted.
        flags: command-line flags; empty if there are none.
        help: help text on the command line.
        metavar: placeholder for the value in that text.
        place: where its field appears in the window: "common" or "rare"; "" for nowhere.
        title, tip: label and tooltip of that field.
        step, unit: step of the field, and the factor that turns its number into the value.
        suffix, lowest: text after its number, and text shown instead of the smallest number.
        is_kept: whether the value stays the same when a loaded model is re-split.
        of_model: whether the value is for one model only, so that others start with the default.
    """

    kind: type = str
    low: float = 1
    high: float | None = None
    soft_high: float | None = None
    may_be_zero: bool = False
    choices: tuple[str, ...] = ()
    may_be_file: bool = False
    flags: tuple[str, ...] = ()
    help: str = ""
    metavar: str | None = None
    place: Literal["", "common", "rare"] = ""
    title: str = ""
    tip: str = ""
    step: int = 1
    unit: int = 1
    suffix: str = ""
    lowest: str = ""
    is_kept: bool = False
    of_model: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise EngineError if a value is not accepted."""
        if self.kind in (int, float):
            self._check_number(name, value)
        elif self.choices:
            if value not in self.choices and not (self.may_be_file and _names_gguf(value)):
                choices = either([f"'{one}'" for one in self.choices])
                expected = Sentence(
                    "{choices} or the path of a GGUF file" if self.may_be_file else "{choices}",
                    choices=choices,
                )
                raise rejected(name, expected, value)
        elif self.high is not None and (not isinstance(value, str) or len(value) > self.high):
            raise rejected(name, Sentence("a string of at most {n} characters", n=self.high), value)

    def _check_number(self, name: str, value: Any) -> None:
        is_number = isinstance(value, (int, self.kind)) and not isinstance(value, bool)
        if self.kind is float:
            high = inf if self.high is None else self.high
            if not is_number or not (value == 0 or self.low <= value <= high):
                expected = "0 or a number from {low:g} to {high:g}"
                raise rejected(name, Sentence(expected, low=self.low, high=high), value)
        elif not is_number or not (value >= self.low or (self.may_be_zero and value == 0)):
            raise rejected(name, Sentence("a whole number of at least {n}", n=self.low), value)
        elif self.high is not None and value > self.high:
            raise rejected(name, Sentence("at most {n}", n=self.high), value)


def load_option(default: T, **more: Any) -> T:
    """Return the dataclass field for a setting; see `LoadOption`."""
    found: T = field(default=default, metadata={"option": LoadOption(**more)})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Load settings other than the choice of model and split.

    Attributes:
        n_ctx: context length in tokens; None means 2048, or the training context if shorter.
        parallel: number of full-length requests that fit in the KV cache; up to 16 shorter ones
            share it.
        checkpoint_bytes: host memory for state checkpoints of recurrent layers, from which later
            requests can resume; None means a fraction of the free memory.
        kv_type: one of `KV_TYPES` for both keys and values, or two separated by a slash:
            "q8_0/q4_0" stores keys as Q8_0 and values as Q4_0.
        cpu_threads: total threads for all CPU ranks; None means one per physical core.
        reserve: pairs of a device and the number of bytes to keep free on it.
        n_cpu_blocks: number of leading blocks to place entirely on the CPU; the others are split.
        n_cpu_moe: number of leading blocks whose experts are placed on the CPU.
        kv_on_host: whether GPUs keep keys and values in host memory and fetch them when needed.
        p2p: whether GPUs access each other's memory directly: "auto" if a trial shows that this
            works and is faster, "on" if a trial shows that it works, "off" never.
        n_batch: prompt tokens per batch; None means 2048 or 1024 if GPUs compute everything and
            have enough memory, else 512.
        fast_prompts: whether CPUs with BF16 units compute long prompts in BF16 if a measurement
            during loading shows that this is faster. Results may then differ in their last digits,
            depending on the other sequences in the batch.
        draft_vocab: number of tokens that an MTP block drafts from; 0 means all. They are the first
            in the vocabulary, which lists frequent tokens first, so few draft tokens are lost, and
            less of the head is read for each. These rows are stored twice. Answers stay the same.
        mmproj: path of the vision encoder's GGUF file; "auto" uses a matching file next to the
            model if there is memory for it, "off" uses none.
        mmproj_device: device for the whole vision encoder: the device of a rank, or "cpu"; "auto"
            picks the GPU with the largest share that has room for it, or else a CPU.
        rope_scaling: how positions are stretched beyond the training context: "none", "linear" (all
            frequencies) or "yarn"; "" uses the file's setting. As in llama.cpp, this applies to
            layers with full attention.
        rope_factor: factor by which positions are stretched, at least 1; 0 uses the file's factor.
        rope_base: base of the RoPE frequencies; 0 uses the file's base.
        chat_template: Jinja source of the chat template; "" uses the template in the file.
        overrides: pairs of a regular expression for tensor names and a device, or a rank (as in
            "#0"). Matching parts are placed there whole, overriding all else; later pairs win.
    """

    n_ctx: int | None = load_option(
        None, kind=int, soft_high=1 << 24, flags=("--ctx",), metavar="N", is_kept=True,
        help="context length in tokens (default: the model's own, but at most 2048; for serve, as"
            " long as memory remains for other programs)",
        place="common", title="Context length in tokens",
    )  # fmt: skip
    parallel: int = load_option(
        1, kind=int, high=MAX_PARALLEL, flags=("--parallel",), metavar="N", is_kept=True,
        help="room for N parallel requests of the full context length, or for up to 16 shorter ones"
            " (default: 1; for serve, up to 4 as memory allows)",
        place="rare", title="Parallel requests",
        tip="How many requests of the full context length fit in parallel; up to 16 shorter ones"
            " share the memory",
    )  # fmt: skip
    checkpoint_bytes: int | None = load_option(
        None, kind=int, low=0, soft_high=1 << 50, unit=1 << 20, step=512, lowest="auto",
        flags=("--kept-states",), metavar="MIB", is_kept=True,
        help="host memory for state checkpoints of recurrent layers, from which chats continue; 0"
            " keeps none (default: up to 4096, but at most an eighth of the free memory)",
        place="rare", title="State checkpoints",
        tip="Host memory for states of recurrent layers, so that chats continue where they left"
            " off; 0 keeps none",
    )  # fmt: skip
    kv_type: str = load_option(
        "f16", kind=object, flags=("--kv-type", "--cache-type"), is_kept=True,
        help="number type of the KV cache (default: f16)",
        place="common", title="KV cache type",
    )  # fmt: skip
    cpu_threads: int | None = load_option(
        None, kind=int, soft_high=1024, flags=("--threads",), metavar="N", lowest="auto",
        help="number of CPU threads, over all ranks (default: one per physical core)",
        place="common", title="CPU threads",
    )  # fmt: skip
    reserve: tuple[tuple[str, int], ...] = load_option(
        (), kind=object, flags=("--reserve",), metavar="DEVICE=MIB",
        help="keep this much of a device's memory free, for example cuda:0=1024; may be repeated",
    )  # fmt: skip
    n_cpu_blocks: int = load_option(
        0, kind=int, low=0, soft_high=1 << 16, flags=("--n-cpu-blocks",), metavar="N",
        of_model=True, help="place the first N blocks on the CPU",
    )  # fmt: skip
    n_cpu_moe: int = load_option(
        0, kind=int, low=0, soft_high=1 << 16, flags=("--n-cpu-moe",), metavar="N",
        of_model=True, help="place the experts of the first N blocks on the CPU",
    )  # fmt: skip
    kv_on_host: bool = load_option(
        False, kind=bool, flags=("--kv-on-host",), of_model=True,
        help="keep the KV cache of GPUs in host memory",
    )  # fmt: skip
    p2p: PeerMode = load_option(
        "auto", choices=PEER_MODES, flags=("--p2p",),
        help="let GPUs access each other's memory directly; auto: where a test shows that it "
        "works and is faster; on: wherever it works; off: nowhere (default: auto)",
        place="common", title="GPU-to-GPU transfers",
    )  # fmt: skip
    n_batch: int | None = load_option(
        None, kind=int, soft_high=8192, step=128, lowest="auto", flags=("--batch",), metavar="N",
        is_kept=True, help="prompt tokens per batch (default: up to 2048 on GPUs, else 512)",
        place="rare", title="Batch size", tip="Prompt tokens that are processed together",
    )  # fmt: skip
    fast_prompts: bool = load_option(
        False, kind=bool, flags=("--fast-prompts",), is_kept=True,
        help="faster prompt processing on CPUs with BF16 units; answers may then vary slightly"
            " depending on what else runs",
        place="rare", title="Fast prompts (BF16)",
        tip="Faster prompt processing on CPUs with BF16 units; answers may then vary slightly"
            " depending on what else runs",
    )  # fmt: skip
    draft_vocab: int = load_option(
        0, kind=int, low=MIN_DRAFT_VOCAB, may_be_zero=True, soft_high=1 << 20, step=4096,
        lowest="all tokens", suffix=" tokens", flags=("--draft-vocab",), metavar="N", is_kept=True,
        help="let the model's MTP block draft only from the first (most frequent) N tokens of the"
            " vocabulary, so that less of the head is read per draft token; answers stay the same"
            " (default: all)",
        place="rare", title="Draft vocabulary",
        tip="How many of the most frequent tokens the model's MTP block drafts from; with fewer,"
            " less is read for each draft token. Answers stay the same",
    )  # fmt: skip
    mmproj: MmprojKind | str = load_option(
        "auto", choices=MMPROJ_KINDS, may_be_file=True, flags=("--mmproj",),
        metavar="|".join((*MMPROJ_KINDS, "FILE")), is_kept=True,
        help="GGUF file of the vision encoder; auto: a matching one next to the model, if there is"
            " memory for it (default); off: none",
        place="rare", title="Vision encoder",
        tip="The file (mmproj) that lets a model see images: one next to the model, or another that"
            " was published with it",
    )  # fmt: skip
    mmproj_device: str = load_option(
        "auto", kind=object, flags=("--mmproj-device",), metavar="DEVICE",
        help="device for the vision encoder: one of the model's, or cpu (default: the GPU with the"
            " largest share that has room for it)",
        place="rare", title="Vision encoder device",
        tip="The device that holds the mmproj file and encodes images. By default, Tandem picks the"
            " GPU with the largest share that has room, else the CPU",
    )  # fmt: skip
    rope_scaling: str = load_option(
        "", choices=ROPE_SCALINGS, flags=("--rope-scaling",), is_kept=True, of_model=True,
        help="how to stretch positions to a longer context (default: as the file says)",
        place="rare", title="RoPE scaling", tip="How positions are stretched to a longer context",
    )  # fmt: skip
    rope_factor: float = load_option(
        0.0, kind=float, high=MAX_ROPE_FACTOR, flags=("--rope-scale",), metavar="X", is_kept=True,
        of_model=True, help="factor by which positions are stretched",
        place="rare", title="RoPE factor", tip="How many times longer the context becomes",
        lowest="As the file says",
    )  # fmt: skip
    rope_base: float = load_option(
        0.0, kind=float, high=MAX_ROPE_BASE, flags=("--rope-freq-base",), metavar="X",
        is_kept=True, of_model=True, help="base of RoPE's frequencies",
        place="rare", title="RoPE base", tip="Base of the rotation frequencies", step=10_000,
        lowest="As the file says",
    )  # fmt: skip
    chat_template: str = load_option(
        "", high=MAX_TEMPLATE, flags=("--chat-template",), metavar="JINJA", is_kept=True,
        of_model=True,
        help="use this chat template instead of the file's; @FILE reads it from a file",
        place="rare", title="Chat template", tip="How messages become the model's prompt",
    )  # fmt: skip
    overrides: tuple[tuple[str, str], ...] = load_option(
        (), kind=object, flags=("--override",), metavar="REGEX=DEVICE", of_model=True,
        help="place tensors with matching names on one device, or on one rank as in 'attn=#0'; "
        "may be repeated",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadParams(LoadOptions):
    """Settings for loading a model: which model, on which devices, and how to split it.

    Attributes:
        path: path of a GGUF file, or of any part of a split one.
        devices: device of each rank; a device listed several times becomes several virtual ones.
        split: relative share of each rank, for example (3, 1); None splits evenly.
        split_mode: "tensor" cuts every block, "layer" gives whole blocks to ranks, "groups" gives
            whole blocks to groups of ranks and cuts them within each group.
        groups: sizes of the groups of consecutive ranks in the mode "groups", for example (2, 2);
            None groups consecutive ranks on the same kind of device, or makes pairs if all devices
            are of one kind.
        control_vectors: directions that steer the model; several are added together.
        control_layers: first and last layer to steer; None means all but layer 0.
        draft: source of draft tokens for speculative decoding: "ngram" uses what followed the last
            tokens earlier in the text, "mtp" the model's multi-token prediction block, "auto" both
            (on GPUs only the text), "off" neither. With the path of a GGUF file, drafts come from
            the text and from that file: a smaller model with the same vocabulary, or just an MTP
            block. A file "mtp-….gguf" next to a model without an MTP block is used automatically.
            Drafting pauses when it does not pay off. Answers stay the same.
        draft_max: maximum number of draft tokens per sequence and pass. In models with recurrent
            layers, each needs memory for a state; if memory is short, there is room for three.
        machines: number of consecutive ranks on each machine, if several machines run the model
            together; empty if there is only one.
        machine_link: transport for tensors between machines: "gloo" goes through host memory;
            "nccl" from GPU to GPU, with an error if a trial fails; "auto" uses NCCL if all devices
            are NVIDIA GPUs under Linux, the trial succeeds and NCCL is faster.

    Raises:
        EngineError: a value is invalid.
    """

    path: str
    devices: tuple[str, ...] = load_option(
        ("cpu",), kind=object, flags=("--devices",), metavar="LIST",
        help="one device per rank, for example cuda:0,cuda:1 or cpu,cpu (default: the devices"
            " predicted to be fastest, unless another option sets the split)",
    )  # fmt: skip
    split: tuple[float, ...] | None = load_option(
        None, kind=object, flags=("--split",), metavar="LIST",
        help="relative share of each device, for example 3,1 (default: even)",
    )  # fmt: skip
    split_mode: str = load_option(
        "tensor", choices=SPLIT_MODES, flags=("--split-mode",),
        help="tensor: divide each block among all devices; layer: assign whole blocks to devices;"
            " groups: assign blocks to groups of devices and divide them within each group"
            " (default: tensor)",
    )  # fmt: skip
    groups: tuple[int, ...] | None = load_option(
        None, kind=object, flags=("--groups",), metavar="LIST",
        help="sizes of the groups, in device order, for example 2,2 (default: one group per kind of"
            " device, else pairs)",
    )  # fmt: skip
    control_vectors: tuple[ControlVector, ...] = load_option(
        (), kind=object, flags=("--control-vector",), metavar="FILE[=SCALE]", is_kept=True,
        help="apply a control vector, multiplied by SCALE; may be repeated",
    )  # fmt: skip
    control_layers: tuple[int, int] | None = load_option(
        None, kind=object, flags=("--control-layers",), metavar="FIRST-LAST", is_kept=True,
        help="layers to apply control vectors to, for example 10-20 (default: all but layer 0)",
    )  # fmt: skip
    draft: DraftKind | str = load_option(
        "auto", choices=DRAFT_KINDS, may_be_file=True, flags=("--draft",),
        metavar="|".join((*DRAFT_KINDS, "FILE")), is_kept=True,
        help="source of draft tokens for speculative decoding; ngram: the text so far; mtp: the MTP"
            " block that some models have; auto: both (default; on GPUs, only the text); off: none;"
            " or, in addition to the text, a GGUF file of a smaller model with the same vocabulary"
            " or of the model's MTP block (mtp-*.gguf, found next to the model); answers stay the"
            " same",
    )  # fmt: skip
    draft_max: int = load_option(
        DEFAULT_DRAFTED, kind=int, high=MAX_DRAFTED, flags=("--draft-max",), metavar="N",
        is_kept=True,
        help=f"most draft tokens per pass, up to {MAX_DRAFTED} (default: {DEFAULT_DRAFTED})",
    )  # fmt: skip
    machines: tuple[int, ...] = load_option((), kind=object)
    machine_link: MachineLink = load_option("auto", choices=MACHINE_LINKS)

    def __post_init__(self) -> None:
        if not self.devices:
            raise EngineError("No device was chosen.", "Turn on at least one device.")
        object.__setattr__(self, "kv_type", _kv_type(self.kv_type))
        for name, option, default in _CHECKED:
            value = getattr(self, name)
            if value is not None or default is not None:
                option.check(name, value)
        devices = ("auto", *dict.fromkeys((*self._own, "cpu")))
        LoadOption(choices=devices).check("mmproj_device", self.mmproj_device)
        count = LoadOption(kind=int)
        for size in self.groups or ():
            count.check("groups", size)
        for size in self.machines:
            count.check("machines", size)
        for _, n_bytes in self.reserve:
            LoadOption(kind=int, low=0).check("reserve", n_bytes)
        if self.control_layers is not None:
            first, last = self.control_layers
            if not 0 <= first <= last:
                expected = Sentence("a first and a last layer")
                raise rejected("control_layers", expected, self.control_layers)

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Device of each rank: the chosen ones, then any others used by blocks or overrides."""
        takers = ["cpu"] if self.n_cpu_blocks or self.n_cpu_moe else []
        takers += [target for _, target in self.overrides if not target.startswith("#")]
        return self.devices + tuple(dict.fromkeys(d for d in takers if d not in self.devices))

    @property
    def n_draft(self) -> int:
        """Maximum number of draft tokens per sequence and pass; 0 if drafting is off."""
        return 0 if self.draft == "off" else self.draft_max

    @property
    def may_leave_mtp(self) -> bool:
        """Whether an MTP block is loaded only if there is memory for it."""
        return self.draft == "auto"

    @property
    def without_mtp(self) -> LoadParams:
        """These settings without an optional MTP block."""
        return replace(self, draft="ngram", draft_vocab=0) if self.may_leave_mtp else self

    @property
    def without_pictures(self) -> LoadParams:
        """These settings without an optional vision encoder."""
        return replace(self, mmproj="off") if self.mmproj == "auto" else self

    @property
    def draft_path(self) -> str:
        """Path of the file with a draft model or MTP block; "" if none."""
        return "" if self.draft in DRAFT_KINDS else self.draft

    @property
    def draft_rank(self) -> int:
        """Rank whose device holds the draft model: the one with the largest share on machine 0."""
        return max(range(len(self._own)), key=self._share)

    def _share(self, rank: int) -> tuple[float, ...]:
        # empty if the split has too few shares, which is reported later
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
        """Candidate devices for the vision encoder, best first."""
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
        """RoPE settings that override the file's, as text; "" if none."""
        values = self.rope_scaling, self.rope_factor, self.rope_base
        return " ".join(map(str, values)) if any(values) else ""

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes, as set or by default; empty in other split modes."""
        if self.split_mode != "groups":
            return ()
        if self.groups is None and self.machines:
            return self.machines
        return default_groups(self.devices) if self.groups is None else self.groups

    def context_for(self, n_ctx_train: int) -> int:
        """Return the context length to use for a model trained with a context of `n_ctx_train`."""
        if self.n_ctx is not None:
            return self.n_ctx
        return min(DEFAULT_CONTEXT, n_ctx_train or DEFAULT_CONTEXT)


def default_groups(devices: Sequence[str]) -> tuple[int, ...]:
    """Return the default group sizes: one per run of equal devices, or pairs if all are equal."""
    runs = [len(list(run)) for _, run in groupby(devices, lambda device: device.split(":")[0])]
    if len(runs) > 1:
        return tuple(runs)
    return (2,) * (len(devices) // 2) + (1,) * (len(devices) % 2)


def _kv_type(value: object) -> str:
    # normalised to one type if both are equal
    try:
        return str(kv_types(value if isinstance(value, str) else ""))
    except ValueError:
        choices = either([f"'{choice}'" for choice in KV_TYPES])
        expected = "{choices}, or two of these separated by a slash"
        raise rejected("kv_type", Sentence(expected, choices=choices), value) from None


def _names_gguf(value: object) -> bool:
    return isinstance(value, str) and value.lower().endswith(".gguf")


FILE_ORDER = (
    "devices", "split", "split_mode", "n_ctx", "overrides", "kv_type", "cpu_threads", "n_batch",
    "control_vectors", "control_layers", "groups", "n_cpu_blocks", "n_cpu_moe", "kv_on_host",
    "reserve", "p2p", "rope_scaling", "rope_factor", "rope_base", "chat_template", "fast_prompts",
    "parallel", "checkpoint_bytes", "draft", "draft_max", "mmproj", "mmproj_device", "draft_vocab",
    "machines", "machine_link",
)  # fmt: skip
"""Order of the settings in files and JSON; any others come last."""


def _options(kind: type[LoadOptions]) -> dict[str, LoadOption]:
    found = {spec.name: spec.metadata["option"] for spec in fields(kind) if spec.metadata}
    names = [*(name for name in FILE_ORDER if name in found), *found]
    return {name: found[name] for name in dict.fromkeys(names)}


LOAD_OPTIONS: Mapping[str, LoadOption] = _options(LoadParams)
"""All load settings except the model's path, in the order used in files."""

SHARED_LOAD_OPTIONS: Mapping[str, LoadOption] = _options(LoadOptions)

LOAD_DEFAULTS: Mapping[str, Any] = {spec.name: spec.default for spec in fields(LoadParams)}

_CHECKED = [
    (name, option, LOAD_DEFAULTS[name])
    for name, option in LOAD_OPTIONS.items()
    if option.kind is not object
]
