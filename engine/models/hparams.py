"""A model's sizes, under llama.cpp's names, read from a file's metadata and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import InvalidGGUF
from engine.layers.rope import RopeParams, RopeStyle
from engine.parallel.split import BlockDims

if TYPE_CHECKING:
    from engine.gguf import GGUFFile

MAX_LAYERS = 4096
MAX_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class HParams:
    """Sizes of one model; tuples have one entry per layer.

    Attributes:
        n_embd: width of the residual stream.
        head_dim_k: elements of a query or key head.
        head_dim_v: elements of a value head.
        n_ff: columns of the dense FFN.
        n_ff_exp: columns of one routed expert; 0 without experts.
        norm_eps: added to the mean square in every norm.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    n_ff: tuple[int, ...]
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    norm_eps: float
    rope: RopeParams
    tied: bool

    @classmethod
    def read(cls, file: GGUFFile, rope_style: RopeStyle) -> HParams:
        """Read the sizes of a llama-like architecture.

        Raises:
            InvalidGGUF: a key is missing, or sizes contradict each other.
        """
        meta, arch = file.meta, file.meta.architecture
        n_layer = meta.int(f"{arch}.block_count")
        if not 1 <= n_layer <= MAX_LAYERS:
            raise InvalidGGUF(file.path, f"{arch}.block_count is {n_layer}")
        n_embd = meta.int(f"{arch}.embedding_length")
        n_head = meta.int_list(f"{arch}.attention.head_count", n_layer)
        n_head_kv = meta.int_list(f"{arch}.attention.head_count_kv", n_layer, n_head)
        n_ff = meta.int_list(f"{arch}.feed_forward_length", n_layer)
        _check(file, n_embd, n_head, n_head_kv, n_ff)
        head_dim = meta.int(f"{arch}.attention.key_length", n_embd // n_head[0])
        n_expert = meta.int(f"{arch}.expert_count", 0)
        n_ff_exp = meta.int(f"{arch}.expert_feed_forward_length", n_ff[0]) if n_expert else 0
        hp = cls(
            architecture=arch,
            n_layer=n_layer,
            n_embd=n_embd,
            n_vocab=_n_vocab(file),
            n_ctx_train=meta.int(f"{arch}.context_length", 0),
            n_head=tuple(n_head),
            n_head_kv=tuple(n_head_kv),
            head_dim_k=head_dim,
            head_dim_v=meta.int(f"{arch}.attention.value_length", head_dim),
            n_ff=tuple(n_ff),
            n_expert=n_expert,
            n_expert_used=meta.int(f"{arch}.expert_used_count", 0),
            n_ff_exp=n_ff_exp,
            norm_eps=meta.float(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
            rope=RopeParams.read(meta, head_dim, rope_style),
            tied="output.weight" not in file.tensors,
        )
        _check_derived(file, hp)
        return hp

    def block_dims(self) -> list[BlockDims]:
        """The sizes that a split cuts, per layer."""
        return [
            BlockDims(
                n_head=self.n_head[i],
                n_head_kv=self.n_head_kv[i],
                n_ff=0 if self.n_expert else self.n_ff[i],
                n_ff_exp=self.n_ff_exp,
            )
            for i in range(self.n_layer)
        ]


def _n_vocab(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidGGUF(
            file.path,
            "it holds no weights (token_embd.weight is missing)",
            "It may be a vocabulary or a projector; pick the model itself.",
        )
    return embedding.shape[0]


def _check(
    file: GGUFFile, n_embd: int, n_head: list[int], n_head_kv: list[int], n_ff: list[int]
) -> None:
    for n in (n_embd, *n_head, *n_head_kv, *n_ff):
        if not 1 <= n <= MAX_SIZE:
            raise InvalidGGUF(file.path, f"a size in its metadata is {n}")
    for q, kv in zip(n_head, n_head_kv, strict=True):
        if q % kv:
            raise InvalidGGUF(file.path, f"{q} query heads cannot share {kv} key-value heads")


def _check_derived(file: GGUFFile, hp: HParams) -> None:
    rope = hp.rope
    if rope.n_rot % 2 or not 0 < rope.n_rot <= hp.head_dim_k:
        raise InvalidGGUF(file.path, f"it rotates {rope.n_rot} of {hp.head_dim_k} elements")
    if not 0 < rope.base < 1e12 or (rope.yarn and (rope.n_ctx_orig < 1 or rope.base <= 1)):
        raise InvalidGGUF(file.path, "its rope.* values are out of range")
    if hp.n_expert and not 1 <= hp.n_expert_used <= hp.n_expert:
        raise InvalidGGUF(file.path, f"it uses {hp.n_expert_used} of {hp.n_expert} experts")
