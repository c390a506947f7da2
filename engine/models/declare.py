"""From a file and a wish to a declared model: what the planner counts and the loader fills."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.layers.module import Slot, TensorSource
from engine.models.hparams import HParams
from engine.models.registry import model_class
from engine.parallel.shares import Shares, apply_overrides, normalise, share_table
from engine.parallel.split import ModelSplit, cut_model

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.gguf import GGUFFile
    from engine.models.base import CausalLM


@dataclass(frozen=True, slots=True)
class Declaration:
    """A model whose tensors are found but not read.

    Attributes:
        devices: the device of each rank; overrides may have added one without a share.
        shares: the wanted share of each rank.
        slots: every tensor of every layer, with its placement.
    """

    model: CausalLM
    hp: HParams
    split: ModelSplit
    devices: tuple[str, ...]
    shares: Shares
    slots: tuple[Slot, ...]


def declare(file: GGUFFile, params: LoadParams) -> Declaration:
    """Cut the model in `file` as `params` asks.

    Raises:
        ModelFileError: the architecture is unknown, or a tensor is missing or misshapen.
        SplitError: the split cannot be made.
    """
    cls = model_class(file.meta.architecture, str(file.path))
    hp = HParams.read(file, cls.rope_style)
    shares = normalise(params.split, len(params.devices))
    added = tuple(dict.fromkeys(d for _, d in params.overrides if d not in params.devices))
    devices = params.devices + added
    shares += (0.0,) * len(added)
    table = share_table(params.split_mode, shares, hp.n_layer, tied=hp.tied)
    table = apply_overrides(table, params.overrides, devices, file.tensors.keys())
    if hp.tied:
        table = replace(table, output=table.embedding)
    split = cut_model(table, hp.block_dims(), hp.n_vocab, tied=hp.tied)
    source = TensorSource(str(file.path), file.tensors)
    cls.adapt(source, hp)
    model = cls(hp, split)
    return Declaration(model, hp, split, devices, shares, tuple(model.bind(source)))
