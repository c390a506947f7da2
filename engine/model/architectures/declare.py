"""Builds the declared model (layers, tensors, placements) that planner and loader share."""

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
    """A model with its split, whose tensors are found but not read.

    Attributes:
        model: layers of the model.
        hp: sizes and settings of the model.
        split: cut of the model.
        devices: device of each rank; moved parts may have added one without a share.
        shares: wanted share of each rank.
        dims: sizes by which each block is cut.
        slots: all tensors of all layers, with their placements.
        states: states that the layers keep between tokens.
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
    """Declare the model in `file`, split as `params` asks.

    Raises:
        ModelFileError: the architecture is unknown, or a tensor is missing or misshapen.
        SplitError: the split cannot be made.
        EngineError: see `read_sizes`.
    """
    cls, hp = read_sizes(file, params)
    if not hp.n_mtp:
        _refuse_short_head(params)
    hp = with_context(cls, hp, params)
    wanted = requested_shares(
        params, hp.n_trunk, tied=hp.tied, tensors=file.tensors.keys(), recurrent=hp.recurrent,
        n_mtp=hp.n_mtp,
    )  # fmt: skip
    dims = block_dims(cls, hp)
    split = cut_model(wanted.table, dims, hp.n_vocab, tied=hp.tied)
    model, _, slots = bind_model(file, cls, hp, split)
    return Declaration(
        model, hp, split, wanted.devices, wanted.shares, dims, slots, tuple(model.states())
    )


def read_sizes(file: GGUFFile, params: LoadParams) -> tuple[type[CausalLM], HParams]:
    """Return the class of the model in `file`, and its sizes as the file states them.

    Raises:
        ModelFileError: the architecture is unknown, or sizes contradict each other.
        EngineError: an MTP block is asked for that the file does not have, or tokens to guess from
            that the vocabulary does not have.
    """
    cls = model_class(file.meta.architecture, str(file.path))
    found = None
    if params.draft == "mtp" or (params.draft_path and file.companion is not None):
        _require_mtp(file, cls)
        found = _read_with_mtp(file, cls)
    elif params.draft == "auto" and set(params.all_devices) == {CPU}:
        found = _with_usable_mtp(file, cls)
    hp = found or HParams.read(file, cls.traits)
    most = hp.n_own_head or hp.n_vocab
    if params.draft_vocab > most:
        raise EngineError(
            f"There are only {most} tokens to guess from, not {params.draft_vocab}.",
            "Lower --draft-vocab (Guess from), or leave it out to guess from all.",
        )
    if found is not None and 0 < params.draft_vocab < hp.n_vocab:
        hp = replace(hp, n_guessed=params.draft_vocab)
    elif found is None and params.draft != "auto":  # else a search may try other devices
        _refuse_short_head(params)
    if hp.tied and copies_head(params):
        hp = replace(hp, tied=False, copies_head=True)
    return cls, hp


def _refuse_short_head(params: LoadParams) -> None:
    """Refuse to guess from some tokens alone, where nothing is loaded that could.

    Raises:
        EngineError: it is asked for.
    """
    if params.draft_vocab:
        raise EngineError(
            f"Nothing guesses from the first {params.draft_vocab} tokens, as no MTP block is "
            "loaded.",
            "Leave out --draft-vocab (Guess from), or ask for the block with --draft mtp.",
        )


def copies_head(params: LoadParams) -> bool:
    """Return whether an output head that is the embedding is held in a copy of its own.

    Else the machine with the head would send each token's embedding to the one with the first
    blocks, and that one would have to wait for it.
    """
    return len(params.machines) > 1 and params.split_mode != "tensor"


def _with_usable_mtp(file: GGUFFile, cls: type[CausalLM]) -> HParams | None:
    """Return the sizes with MTP blocks, if the file has some that can guess.

    Blocks that are not as expected are left out: without them the model answers as well.
    """
    if cls.traits.mtp_hidden is None or not n_mtp_blocks(file):
        return None
    try:
        found = _read_with_mtp(file, cls)
        hp = cls.refine(found)
        table = share_table("tensor", (1.0,), hp.n_layer, tied=hp.tied)
        bind_model(file, cls, hp, cut_model(table, block_dims(cls, hp), hp.n_vocab, tied=hp.tied))
    except InvalidGGUF:
        return None
    return found


def _read_with_mtp(file: GGUFFile, cls: type[CausalLM]) -> HParams:
    """Return the sizes with MTP blocks, whose heads may have some tokens alone.

    Raises:
        InvalidGGUF: sizes contradict each other, or the heads' tokens are not those of the model.
    """
    hp = HParams.read(file, cls.traits, n_mtp=n_mtp_blocks(file))
    n_own = len(draft_tokens(file, hp.n_vocab))
    return replace(hp, n_guessed=n_own, n_own_head=n_own)


def n_mtp_blocks(file: GGUFFile) -> int:
    """Return the number of MTP blocks behind those that every token goes through.

    Files may lack some of them, and what is behind the first that they lack is of no use.

    Raises:
        InvalidGGUF: a number of the file is out of bounds.
    """
    keys = Keys(file.meta)
    keys.check_bounds()
    layers = range(n_trunk_blocks(keys), keys.integer("block_count"))
    there = takewhile(lambda layer: f"blk.{layer}.{JOINT}" in file.tensors, layers)
    return sum(1 for _ in there)


def _require_mtp(file: GGUFFile, cls: type[CausalLM]) -> None:
    """Check that the file has an MTP block that can be used.

    Raises:
        EngineError: there is none, or its architecture's are not used.
    """
    if not n_mtp_blocks(file):
        raise EngineError(
            f"{file.path.name} has no MTP block to guess with.",
            "Choose another source of guesses, a file of the model with MTP, or put its mtp-….gguf "
            "beside it.",
        )
    if cls.traits.mtp_hidden is None:
        raise EngineError(
            f"The MTP block of {file.meta.architecture} models cannot be used yet.",
            "Choose another source of guesses.",
        )


def with_context(cls: type[CausalLM], hp: HParams, params: LoadParams) -> HParams:
    """Return the sizes with the wanted context and RoPE, and with what the file leaves out.

    Raises:
        ModelFileError: sizes contradict each other.
    """
    rope = stretched(hp.rope, params)
    return cls.refine(replace(hp, n_ctx=params.context_for(hp.n_ctx_train), rope=rope))


def block_dims(cls: type[CausalLM], hp: HParams) -> tuple[BlockDims, ...]:
    """Return the sizes by which each block is cut."""
    return tuple(cls.block_for(hp, layer).dims(hp, layer) for layer in range(hp.n_layer))


def bind_model(
    file: GGUFFile, cls: type[CausalLM], hp: HParams, split: ModelSplit
) -> tuple[CausalLM, TensorSource, tuple[Slot, ...]]:
    """Declare a model of a given cut and find its tensors.

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


Place = tuple[str, type[Module]]
"""Path and class of a module within a block."""

IGNORED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight"
    r"|.*\.(attn_rot_embd\.weight|input_scale)"
    r"|(cls|cls\.output|dense_[23])\.(weight|bias)"
    r"|(.*\.)?(d2t|t2d)(\.weight)?"
)
"""Names of tensors that a model may ignore.

Tables that RoPE computes itself, ranges for rounding activations to NVFP4, what classifiers and
embedding models add after the final norm, and tokens of a shortened head, which are read elsewhere.
"""


def _check_all_used(file: GGUFFile, source: TensorSource, hp: HParams) -> None:
    """Check that the model uses all tensors: half a model would answer nonsense.

    Raises:
        InvalidGGUF: a tensor, or a part of one, is unknown to the architecture; the error names
            the first one.
    """
    for name in file.tensors:
        block = split_name(name)
        if IGNORED.fullmatch(name) or (block is not None and block[0] >= hp.n_layer):
            continue
        if name in source.used and source.is_fully_used(name):
            continue
        problem = f"the tensor {quote(name)}, which {hp.architecture} models do not have"
        if name in source.used:
            problem = f"more in the tensor {quote(name)} than {hp.architecture} models have"
        raise InvalidGGUF(
            file.path,
            f"it has {problem}",
            "It may be of a newer variant; look for an update of Tandem or another file.",
        )


def _check_alike(file: GGUFFile, model: CausalLM, slots: Sequence[Slot]) -> None:
    """Check that an optional tensor is missing in all blocks of a kind or in none.

    What an MTP block has of its own or leaves to the trunk is its own affair.

    Raises:
        InvalidGGUF: a block lacks a tensor that another one has; the error names the first one.
    """
    found: list[set[str]] = [set() for _ in model.blk]
    for name in (slot.tensor.name for slot in slots):
        block = split_name(name)
        if block is None or name.endswith(".scale"):  # only quantised matrices have one
            continue
        if not block[1].startswith("nextn."):
            found[block[0]].add(block[1])
    layouts = [frozenset(_layout(block)) for block in model.blk]
    whole: dict[frozenset[Place], set[str]] = defaultdict(set)
    for layout, names in zip(layouts, found, strict=True):
        whole[layout] |= names
    for layer, (layout, names) in enumerate(zip(layouts, found, strict=True)):
        if missing := whole[layout] - names:
            raise InvalidGGUF(file.path, f"the tensor blk.{layer}.{min(missing)} is missing")


def _layout(module: Module, name: str = "") -> list[Place]:
    """Return all modules below one; blocks with the same ones are of one kind."""
    places: list[Place] = []
    for child_name, child in module.children():
        place = f"{name}.{child_name}"
        places += [(place, type(child)), *_layout(child, place)]
    return places
