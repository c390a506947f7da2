"""Declares a model (layers, tensors, placements) for the planner and the loader."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from engine.errors import EngineError, InvalidGGUF
from engine.formats.gguf.tensors import quote, split_name
from engine.hardware.devices.types import CPU
from engine.model.architectures.registry import model_class
from engine.model.forward.state import State
from engine.model.layers.hparams import HParams, n_trunk_blocks
from engine.model.layers.keys import Keys, stretched
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.layers.mtp import JOINT, draft_tokens
from engine.model.sharding.placement import requested_shares
from engine.model.sharding.shares import Shares, share_table
from engine.model.sharding.split import BlockDims, ModelSplit, cut_model

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.load_params import LoadParams
    from engine.model.architectures.base import CausalLM


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declared model: its tensors are located in the file but not read.

    Attributes:
        devices: device of each rank; overrides may add devices without a share.
        shares: requested share of each rank.
        dims: sizes in each block that can be split.
        slots: all tensors with their placements.
        states: KV caches and recurrent states of the layers.
    """

    model: CausalLM
    hp: HParams
    split: ModelSplit
    devices: tuple[str, ...]
    shares: Shares
    dims: tuple[BlockDims, ...]
    slots: tuple[Slot, ...]
    states: tuple[State, ...]


def declare(file: GGUFFile, params: LoadParams) -> Declaration:
    """Declare the model in `file`, split as `params` says.

    Raises:
        ModelFileError: the architecture is unknown, or a tensor is missing or misshapen.
        SplitError: the split is impossible.
        EngineError: see `read_sizes`.
    """
    cls, hp = read_sizes(file, params)
    if not hp.n_mtp:
        _refuse_short_head(params)
    hp = with_context(cls, hp, params)
    requested = requested_shares(
        params, hp.n_trunk, tied=hp.tied, tensors=file.tensors.keys(), recurrent=hp.recurrent,
        n_mtp=hp.n_mtp,
    )  # fmt: skip
    dims = block_dims(cls, hp)
    split = cut_model(requested.table, dims, hp.n_vocab, tied=hp.tied)
    model, _, slots = bind_model(file, cls, hp, split)
    devices, shares = requested.devices, requested.shares
    return Declaration(model, hp, split, devices, shares, dims, slots, tuple(model.states()))


def read_sizes(file: GGUFFile, params: LoadParams) -> tuple[type[CausalLM], HParams]:
    """Return the class and the sizes of the model in `file`.

    Raises:
        ModelFileError: the architecture is unknown, or sizes contradict each other.
        EngineError: `params` require an MTP block that the file lacks, or a draft vocabulary larger
            than the model's.
    """
    cls = model_class(file.meta.architecture, str(file.path))
    with_mtp = None
    if params.draft == "mtp" or (params.draft_path and file.companion is not None):
        _require_mtp(file, cls)
        with_mtp = _read_with_mtp(file, cls)
    elif params.draft == "auto" and set(params.all_devices) == {CPU}:
        with_mtp = _with_usable_mtp(file, cls)
    hp = with_mtp or HParams.read(file, cls.traits)
    most = hp.n_own_head or hp.n_vocab
    if params.draft_vocab > most:
        raise EngineError(
            "The draft vocabulary has only {n} tokens, not {wanted}.",
            "Lower --draft-vocab (Draft vocabulary), or omit it to draft from all tokens.",
            n=most, wanted=params.draft_vocab,
        )  # fmt: skip
    if with_mtp is not None and 0 < params.draft_vocab < hp.n_vocab:
        hp = replace(hp, n_guessed=params.draft_vocab)
    elif with_mtp is None and params.draft != "auto":  # with "auto", a search may try other devices
        _refuse_short_head(params)
    if hp.tied and copies_head(params):
        hp = replace(hp, tied=False, copies_head=True)
    return cls, hp


def _refuse_short_head(params: LoadParams) -> None:
    if params.draft_vocab:
        raise EngineError(
            "A draft vocabulary of {n} tokens needs an MTP block, but none is loaded.",
            "Omit --draft-vocab (Draft vocabulary), or load the block with --draft mtp.",
            n=params.draft_vocab,
        )


def copies_head(params: LoadParams) -> bool:
    """Return whether a tied output head is stored as a separate copy.

    Without a copy, the machine with the head would have to send each token's embedding to the
    machine with the first blocks, which would wait for it.
    """
    return len(params.machines) > 1 and params.split_mode != "tensor"


def _with_usable_mtp(file: GGUFFile, cls: type[CausalLM]) -> HParams | None:
    """Return the sizes with MTP blocks if these are usable, else None; MTP blocks are optional."""
    if cls.traits.mtp_hidden is None or not n_mtp_blocks(file):
        return None
    try:
        sizes = _read_with_mtp(file, cls)
        hp = cls.refine(sizes)
        table = share_table("tensor", (1.0,), hp.n_layer, tied=hp.tied)
        bind_model(file, cls, hp, cut_model(table, block_dims(cls, hp), hp.n_vocab, tied=hp.tied))
    except InvalidGGUF:
        return None
    return sizes


def _read_with_mtp(file: GGUFFile, cls: type[CausalLM]) -> HParams:
    hp = HParams.read(file, cls.traits, n_mtp=n_mtp_blocks(file))
    n_own = len(draft_tokens(file, hp.n_vocab))
    return replace(hp, n_guessed=n_own, n_own_head=n_own)


def n_mtp_blocks(file: GGUFFile) -> int:
    """Return the number of MTP blocks after the trunk, up to the first one missing from the file.

    Raises:
        InvalidGGUF: a value in the file is out of bounds.
    """
    keys = Keys(file.meta)
    keys.check_bounds()
    layers = range(n_trunk_blocks(keys), keys.integer("block_count"))
    present = takewhile(lambda layer: f"blk.{layer}.{JOINT}" in file.tensors, layers)
    return sum(1 for _ in present)


def _require_mtp(file: GGUFFile, cls: type[CausalLM]) -> None:
    if not n_mtp_blocks(file):
        raise EngineError(
            "{file} has no MTP block for drafting.",
            "Choose another draft model or a file of this model with MTP, or put its mtp-….gguf"
            " in the same folder.",
            file=file.path.name,
        )
    if cls.traits.mtp_hidden is None:
        raise EngineError(
            "The MTP block of {name} models is not supported yet.",
            "Choose another draft model.",
            name=file.meta.architecture,
        )


def with_context(cls: type[CausalLM], hp: HParams, params: LoadParams) -> HParams:
    """Return the sizes with the requested context and RoPE, refined by the architecture.

    Raises:
        ModelFileError: sizes contradict each other.
    """
    rope = stretched(hp.rope, params)
    return cls.refine(replace(hp, n_ctx=params.context_for(hp.n_ctx_train), rope=rope))


def block_dims(cls: type[CausalLM], hp: HParams) -> tuple[BlockDims, ...]:
    """Return the sizes in each block that can be split."""
    return tuple(cls.block_for(hp, layer).dims(hp, layer) for layer in range(hp.n_layer))


def bind_model(
    file: GGUFFile, cls: type[CausalLM], hp: HParams, split: ModelSplit
) -> tuple[CausalLM, TensorSource, tuple[Slot, ...]]:
    """Declare a model with a given split and locate its tensors.

    Raises:
        InvalidGGUF: a tensor is missing, misshapen, or unknown to the architecture.
    """
    source = TensorSource(str(file.path), file.tensors)
    cls.adapt(source, hp)
    model = cls(hp, split)
    slots = tuple(model.bind(source))
    _check_all_used(file, source, hp)
    _check_alike(file, model, slots)
    return model, source, slots


Place = tuple[str, type[Module]]  # path and class of a module within a block

IGNORED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight"
    r"|.*\.(attn_rot_embd\.weight|input_scale)"
    r"|(cls|cls\.output|dense_[23])\.(weight|bias)"
    r"|(.*\.)?(d2t|t2d)(\.weight)?"
)
"""Tensors that the model may leave unused.

RoPE tables, activation ranges for NVFP4, layers that classifiers and embedding models add after the
final norm, and token lists of shortened heads, which are read elsewhere.
"""


def _check_all_used(file: GGUFFile, source: TensorSource, hp: HParams) -> None:
    """Check that all tensors are used; if parts were missing, answers would be nonsense."""
    blocks = {name: split_name(name) for name in file.tensors}
    mtp_blocks = {block[0] for block in blocks.values() if block and block[1].startswith("nextn.")}
    for name, block in blocks.items():
        is_left_out = block is not None and block[0] >= hp.n_layer and block[0] in mtp_blocks
        if is_left_out or IGNORED.fullmatch(name):
            continue
        if name in source.used and source.is_fully_used(name):
            continue
        problem = "it has the tensor {name}, which {architecture} models do not have"
        if name in source.used:
            problem = "{architecture} models use only some parts of the tensor {name}"
        raise InvalidGGUF(
            file.path,
            problem,
            "It may be a newer variant: check for a Tandem update, or try another file.",
            name=quote(name), architecture=hp.architecture,
        )  # fmt: skip


def _check_alike(file: GGUFFile, model: CausalLM, slots: Sequence[Slot]) -> None:
    """Check that an optional tensor is present in all blocks of a kind or in none.

    Tensors that only MTP blocks have (`nextn.…`) are exempt.
    """
    present: list[set[str]] = [set() for _ in model.blk]
    for name in (slot.tensor.name for slot in slots):
        block = split_name(name)
        if block is None or name.endswith(".scale"):  # only quantised matrices have one
            continue
        if not block[1].startswith("nextn."):
            present[block[0]].add(block[1])
    layouts = [frozenset(_layout(block)) for block in model.blk]
    whole: dict[frozenset[Place], set[str]] = defaultdict(set)
    for layout, names in zip(layouts, present, strict=True):
        whole[layout] |= names
    for layer, (layout, names) in enumerate(zip(layouts, present, strict=True)):
        if missing := whole[layout] - names:
            name = f"blk.{layer}.{min(missing)}"
            raise InvalidGGUF(file.path, "the tensor {name} is missing", name=name)


def _layout(module: Module, name: str = "") -> list[Place]:
    places: list[Place] = []
    for child_name, child in module.children():
        place = f"{name}.{child_name}"
        places += [(place, type(child)), *_layout(child, place)]
    return places
