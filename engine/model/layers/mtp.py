"""Multi-token prediction (MTP): the parts of an MTP block other than its mixer and its FFN.

See DeepSeek-V3 (arXiv 2412.19437, section 2.2). Files call these tensors `nextn.…`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import InvalidGGUF
from engine.model.layers.linear import Embedding, Linear
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.sharding.placement import Placement, Replicate, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensors import TensorInfo
    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams
    from engine.model.layers.norm import Norm
    from engine.model.sharding.split import ModelSplit

JOINT = "nextn.eh_proj.weight"  # matrix that every MTP block has
FINAL_NORM = "layer_output_norm.weight"  # alternative name for `nextn.shared_head_norm.weight`
HEAD = "nextn.shared_head_head.weight"  # output head of an MTP block


class MTPInput(Module):
    """Input of an MTP block, from a token's embedding and the previous token's hidden state.

    `eh_proj(concat(enorm(embedding), hnorm(hidden)))`, replicated on all ranks of the block.
    """

    def __init__(self, hp: HParams, norm_type: type[Norm], group: tuple[int, ...]) -> None:
        everyone = Replicate(group)
        self.enorm = norm_type(hp.n_embd, hp.norm_eps, everyone)
        self.hnorm = norm_type(hp.n_embd, hp.norm_eps, everyone)
        self.eh_proj = Linear(2 * hp.n_embd, hp.n_embd, everyone)

    def __call__(self, embedded: Tensor, hidden: Tensor, ctx: Context) -> Tensor:
        """Join embeddings and hidden states, both (T, n_embd), to (T, n_embd)."""
        parts = self.enorm(embedded, ctx), self.hnorm(hidden, ctx)
        return self.eh_proj(ctx.ops.concat(*parts))


class MTPHead(Module):
    """Embedding, norm and output head of an MTP block; each is None if the trunk's is used.

    They are split like the trunk's. If there is a draft vocabulary (`HParams.n_guessed`), its rows
    of the head are stored as a separate copy. A file's own head may have few rows; see
    `draft_tokens`.
    """

    def __init__(self, hp: HParams, split: ModelSplit, layer: int, norm_type: type[Norm]) -> None:
        self._block, self._shape = f"blk.{layer}", (hp.n_own_head or hp.n_vocab, hp.n_embd)
        self.embed_tokens: Embedding | None = None
        self.shared_head_norm: Norm | None = None
        self.shared_head_head: Linear | None = None
        self.short_head: Linear | None = None
        self._whole = "token_embd" if hp.tied or hp.copies_head else "output"

        def has(part: str) -> bool:
            return hp.has(layer, f"nextn.{part}.weight")

        if has("embed_tokens"):
            rows = Shard(0, split.embedding)
            self.embed_tokens = Embedding(hp.n_vocab, hp.n_embd, rows, is_lookup=True)
        self._has_final = not has("shared_head_norm") and hp.has(layer, FINAL_NORM)
        if has("shared_head_norm") or self._has_final:
            everyone: Placement = Replicate(split.last_group)
            self.shared_head_norm = norm_type(hp.n_embd, hp.norm_eps, everyone)
        if has("shared_head_head"):
            self._whole = f"{self._block}.{HEAD.removesuffix('.weight')}"
        if hp.n_guessed:
            rows = Shard(0, split.output.shortened(hp.n_guessed))
            self.short_head = Linear(hp.n_embd, hp.n_guessed, rows)
        elif has("shared_head_head"):
            self.shared_head_head = Linear(hp.n_embd, hp.n_vocab, Shard(0, split.output))

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        if self._has_final:
            norm = source.tensors[f"{self._block}.{FINAL_NORM}"]
            source.add_name(norm, f"{self._block}.nextn.shared_head_norm.weight")
        if self.short_head is not None:
            self._shorten(source, self.short_head.shape[0])
        return super().bind(source, f"{self._block}.nextn")

    def _shorten(self, source: TensorSource, n: int) -> None:
        short = f"{self._block}.nextn.short_head"
        whole = source.get(f"{self._whole}.weight", self._shape)
        source.add_view(whole.rows(0, n, f"{short}.weight"), whole.name)
        if (scale := source.tensors.get(f"{self._whole}.scale")) is not None:
            source.add_name(scale, f"{short}.scale")

    @property
    def output(self) -> Linear | None:
        """The block's own head, complete or reduced."""
        return self.short_head or self.shared_head_head


MAP = "d2t"  # last part of the name of a shortened head's token list; some files add ".weight"
DTYPES = {"I32": "<i4", "I64": "<i8"}  # NumPy names of the types that such a list may have


def draft_map(file: GGUFFile) -> TensorInfo | None:
    """Return the tensor that maps rows of a shortened head to tokens, or None.

    Raises:
        InvalidGGUF: there are several such tensors.
    """
    maps = [tensor for name, tensor in file.tensors.items() if is_named(name, MAP)]
    if len(maps) > 1:
        raise InvalidGGUF(
            file.path,
            "{name} and {other} both list the tokens of its MTP heads",
            name=maps[0].name, other=maps[1].name,
        )  # fmt: skip
    return maps[0] if maps else None


def is_named(name: str, last: str) -> bool:
    """Return whether the last part of a tensor's name, ignoring ".weight", is `last`."""
    return name.removesuffix(".weight").rpartition(".")[-1] == last


def draft_tokens(file: GGUFFile, n_vocab: int) -> Sequence[int]:
    """Return the token for each row of an MTP block's head; () if the rows are all tokens in order.

    Raises:
        InvalidGGUF: an id is not an integer or not a token, or there are several lists.
    """
    tensor = draft_map(file)
    if tensor is None:
        return ()
    dtype = DTYPES.get(tensor.type.name)
    if dtype is None or tensor.n_rows != 1:
        raise InvalidGGUF(file.path, "the tensor {name} is not a list of tokens", name=tensor.name)
    ids: list[int] = file.raw(tensor).read().view(np.dtype(dtype)).tolist()
    if not all(0 <= token < n_vocab for token in ids):
        raise InvalidGGUF(
            file.path, "the tensor {name} lists tokens that do not exist", name=tensor.name
        )
    return ids
