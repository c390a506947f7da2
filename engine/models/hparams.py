"""A model's sizes, under llama.cpp's names, read from a file's metadata and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import InvalidGGUF
from engine.layers.rope import RopeParams, RopeStyle
from engine.parallel.split import BlockDims

if TYPE_CHECKING:
    from engine.gguf import GGUFFile

MAX_SIZE = 1 << 24
MAX_CONTEXT = 1 << 32

BOUNDS: dict[str, tuple[int, int]] = {
    "block_count": (1, 4096),
    "context_length": (0, MAX_CONTEXT),
    "embedding_length": (1, MAX_SIZE),
    "feed_forward_length": (1, MAX_SIZE),
    "expert_count": (0, MAX_SIZE),
    "expert_used_count": (0, MAX_SIZE),
    "expert_feed_forward_length": (0, MAX_SIZE),
    "attention.head_count": (1, MAX_SIZE),
    "attention.head_count_kv": (1, MAX_SIZE),
    "attention.key_length": (1, MAX_SIZE),
    "attention.value_length": (1, MAX_SIZE),
    "attention.layer_norm_rms_epsilon": (0, 1),
    "rope.dimension_count": (2, MAX_SIZE),
    "rope.freq_base": (2, 10**12),
    "rope.scale_linear": (0, 10**6),
    "rope.scaling.factor": (0, 10**6),
    "rope.scaling.attn_factor": (0, 1000),
    "rope.scaling.original_context_length": (0, MAX_CONTEXT),
}
"""What a value may be, both ends included: wider than any model is, and safe to compute with."""


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
        _check_bounds(file)
        n_layer = meta.int(f"{arch}.block_count")
        n_embd = meta.int(f"{arch}.embedding_length")
        n_head = meta.int_list(f"{arch}.attention.head_count", n_layer)
        n_head_kv = meta.int_list(f"{arch}.attention.head_count_kv", n_layer, n_head)
        n_ff = meta.int_list(f"{arch}.feed_forward_length", n_layer)
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
    n_rows, n_tokens = embedding.shape[0], file.meta.array_length("tokenizer.ggml.tokens") or 0
    if n_tokens > n_rows:
        raise InvalidGGUF(
            file.path, f"its vocabulary has {n_tokens} tokens but token_embd.weight {n_rows} rows"
        )
    return n_rows


def _check_bounds(file: GGUFFile) -> None:
    """Compare each number of `BOUNDS` that the file has; its type is checked where it is read."""
    for name, (low, high) in BOUNDS.items():
        key = f"{file.meta.architecture}.{name}"
        found = file.meta.get(key)
        for value in found if isinstance(found, list) else [found]:
            if isinstance(value, int | float) and not low <= value <= high:
                raise InvalidGGUF(file.path, f"'{key}' is {value}, not from {low} to {high}")


def _check_derived(file: GGUFFile, hp: HParams) -> None:
    """Check values against each other."""
    rope, surplus = hp.rope, f"blk.{hp.n_layer}."
    if any(name.startswith(surplus) for name in file.tensors):
        raise InvalidGGUF(
            file.path, f"'{hp.architecture}.block_count' is {hp.n_layer}, but it has more blocks"
        )
    for q, kv in zip(hp.n_head, hp.n_head_kv, strict=True):
        if q % kv:
            raise InvalidGGUF(file.path, f"{q} query heads cannot share {kv} key-value heads")
    if rope.n_rot % 2 or not 0 < rope.n_rot <= hp.head_dim_k:
        raise InvalidGGUF(
            file.path, f"it rotates {rope.n_rot} of the {hp.head_dim_k} elements of a head"
        )
    if rope.yarn and rope.n_ctx_orig < 1:
        raise InvalidGGUF(file.path, "it scales positions by YaRN but not from which context")
    if hp.n_expert and not 1 <= hp.n_expert_used <= hp.n_expert:
        raise InvalidGGUF(file.path, f"it uses {hp.n_expert_used} of {hp.n_expert} experts")
    if hp.n_expert and not hp.n_ff_exp:
        raise InvalidGGUF(file.path, "its experts have no columns")
