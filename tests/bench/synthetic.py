"""Models of real shapes with random weights, for measuring speed.

    python -m tests.bench.synthetic llama-8b Q4_K_M out.gguf

Blocks are random bytes with scales that make the weights about as large as trained ones, so that a
file is written as fast as the disk takes it. The vocabulary spells text byte by byte; its other
tokens are names that no text is cut into, but that answers are full of.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType

from engine.formats.gguf.tensors import TYPES
from engine.model.architectures.info import FILE_TYPES
from engine.text.encoders import byte_alphabet
from tests.bench.random_blocks import KINDS, PLAIN, Bytes, Shape, encoded, n_bytes
from tests.bench.random_blocks import random_tensor as random_matrix

FIRST_WORD = 257
"""Id of the first token behind the bytes and the only merge."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder-only model.

    Attributes:
        n_ff: number of columns of the FFN, or of each of `n_expert` experts if there are any.
        tied: whether the embedding is the output head, too.
        head_dim: number of elements of a head; 0 if all heads together have `n_embd`.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_expert: int = 0
    n_expert_used: int = 0
    tied: bool = False
    rope_base: float = 500000.0
    n_ctx: int = 131072
    head_dim: int = 0

    @property
    def n_rot(self) -> int:
        """Number of elements of a head, all of which are rotated."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def n_q(self) -> int:
        """Number of elements of a token's queries in a layer."""
        return self.n_rot * self.n_head

    @property
    def n_kv(self) -> int:
        """Number of elements of a token's keys in a layer."""
        return self.n_rot * self.n_head_kv


MODELS = {
    # as Llama 3.2 1B: 1.24 billion weights
    "llama-1b": Sizes("llama", 16, 2048, 32, 8, 8192, 128256, tied=True),
    # as Llama 3.1 8B: 8.03 billion weights
    "llama-8b": Sizes("llama", 32, 4096, 32, 8, 14336, 128256),
    # as OLMoE 1B 7B: 6.92 billion weights, of which a token uses 1.28 billion
    "moe-1b": Sizes("olmoe", 16, 2048, 16, 16, 1024, 50304, 64, 8, rope_base=10000.0, n_ctx=4096),
    # as Qwen 3 30B A3B: 30.5 billion weights, of which a token uses 3.35 billion
    "moe-30b": Sizes(
        "qwen3moe", 48, 2048, 32, 4, 768, 151936, 128, 8, rope_base=1e6, n_ctx=40960, head_dim=128
    ),
}
MODELS["moe-30b-4"] = replace(MODELS["moe-30b"], n_layer=4)  # 4 of its layers


@dataclass(frozen=True)
class Recipe:
    """Choice of a GGML type for each matrix, as llama.cpp's quantiser makes it.

    Attributes:
        base: type of most matrices.
        better: type of `attn_v` and `ffn_down` in about half of the layers.
        head: type of the output head, also where that is the embedding.
    """

    base: int
    better: int
    head: int

    def kind_of(self, name: str, shape: Shape, sizes: Sizes) -> int:
        """Return the type of a tensor; vectors and routers are F32."""
        if len(shape) == 1 or "ffn_gate_inp" in name:
            return Kind.F32
        if name == ("token_embd.weight" if sizes.tied else "output.weight"):
            return self.head
        if "attn_v" in name or "ffn_down" in name:
            layer = int(name.split(".")[1])
            return self.better if has_more_bits(layer, sizes.n_layer) else self.base
        return self.base


def _recipes() -> Iterator[tuple[str, Recipe]]:
    yield "Q4_K_M", Recipe(Kind.Q4_K, Kind.Q6_K, Kind.Q6_K)
    yield "Q5_K_M", Recipe(Kind.Q5_K, Kind.Q6_K, Kind.Q6_K)
    for kind in KINDS:
        head = kind if kind in PLAIN or kind == Kind.Q8_0 else Kind.Q6_K
        yield TYPES[kind].name, Recipe(kind, kind, head)


RECIPES = dict(_recipes())
"""Recipes by name: llama.cpp's mixtures, and each type alone."""


def has_more_bits(layer: int, n_layer: int) -> bool:
    """Return whether a layer gets the better type, as llama.cpp chooses.

    It chooses the first and the last eighth of the layers, and every third one between.
    """
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def write_model(path: Path, sizes: Sizes, recipe_name: str, seed: int = 0) -> Path:
    """Write a model and return `path`.

    The file is the same, byte for byte, for the same arguments.

    Raises:
        ValueError: rows do not fill the blocks of their type.
    """
    writer = write_header(path, sizes, recipe_name)
    rng = np.random.Generator(np.random.SFC64(seed))
    for _, shape, kind in typed(sizes, recipe_name):  # one at a time: memory holds no more
        writer.write_tensor_data(random_tensor(kind, shape, rng))
    writer.close()
    return path


def write_header(
    path: Path, sizes: Sizes, recipe_name: str, words: Sequence[str] = ()
) -> GGUFWriter:
    """Write all but the tensors' data, and return the writer that takes them.

    Args:
        words: tokens from `FIRST_WORD` on, which text is cut into.

    Raises:
        ValueError: rows do not fill the blocks of their type.
    """
    tensors = [(name, shape, kind, n_bytes(kind, shape))
               for name, shape, kind in typed(sizes, recipe_name)]  # fmt: skip
    writer = GGUFWriter(path, sizes.architecture)
    _add_metadata(writer, sizes, recipe_name, words)
    for name, shape, kind, size in tensors:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def typed(sizes: Sizes, recipe_name: str) -> Iterator[tuple[str, Shape, int]]:
    """Yield the name, the shape and the GGML type of each tensor, in the order of the file."""
    recipe = RECIPES[recipe_name]
    for name, shape in shapes(sizes):
        yield name, shape, recipe.kind_of(name, shape, sizes)


def random_tensor(kind: int, shape: Shape, rng: np.random.Generator, factor: float = 1.0) -> Bytes:
    """Return a random tensor: norms near one, matrices that keep the size of their input.

    Args:
        factor: what matrices multiply that size by.
    """
    if len(shape) == 1:
        return encoded(kind, 1 + 0.1 * rng.standard_normal(shape, dtype=np.float32))
    return random_matrix(kind, shape, factor / sqrt(shape[-1]), rng)


def _add_metadata(writer: GGUFWriter, sizes: Sizes, recipe_name: str, words: Sequence[str]) -> None:
    writer.add_name(f"random {sizes.architecture}")
    writer.add_context_length(sizes.n_ctx)
    writer.add_block_count(sizes.n_layer)
    writer.add_embedding_length(sizes.n_embd)
    writer.add_feed_forward_length(sizes.n_ff)
    writer.add_head_count(sizes.n_head)
    writer.add_head_count_kv(sizes.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(sizes.n_rot)
    if sizes.head_dim:
        writer.add_key_length(sizes.head_dim)
        writer.add_value_length(sizes.head_dim)
    writer.add_rope_freq_base(sizes.rope_base)
    writer.add_vocab_size(sizes.n_vocab)
    _add_vocabulary(writer, sizes.n_vocab, words)
    if sizes.n_expert:
        writer.add_expert_count(sizes.n_expert)
        writer.add_expert_used_count(sizes.n_expert_used)
        writer.add_expert_feed_forward_length(sizes.n_ff)
    for number, name in FILE_TYPES.items():
        if name == recipe_name:
            writer.add_file_type(number)


def _add_vocabulary(writer: GGUFWriter, n_vocab: int, words: Sequence[str]) -> None:
    """Add a byte-level BPE of the least that llama.cpp takes, bytes and one merge, and words."""
    spelling = {byte: character for character, byte in byte_alphabet().items()}
    tokens = [*map(spelling.__getitem__, range(256)), "er"]
    assert len(tokens) == FIRST_WORD
    tokens += ["".join(map(spelling.__getitem__, word.encode())) for word in words]
    tokens += [f"_{number}" for number in range(len(tokens), n_vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens[:n_vocab])
    writer.add_token_types([TokenType.NORMAL] * n_vocab)
    writer.add_token_merges(["e r"])
    writer.add_add_bos_token(False)


def shapes(sizes: Sizes) -> Iterator[tuple[str, Shape]]:
    """Yield the name and the shape of each tensor of a model, slowest dimension first."""
    yield "token_embd.weight", (sizes.n_vocab, sizes.n_embd)
    yield "output_norm.weight", (sizes.n_embd,)
    if not sizes.tied:
        yield "output.weight", (sizes.n_vocab, sizes.n_embd)
    block = _block_shapes(sizes)
    for layer in range(sizes.n_layer):
        for name, shape in block.items():
            yield f"blk.{layer}.{name}.weight", shape


def _block_shapes(sizes: Sizes) -> dict[str, Shape]:
    n_embd, n_q, n_kv = sizes.n_embd, sizes.n_q, sizes.n_kv
    n_ff, n_expert = sizes.n_ff, sizes.n_expert
    block: dict[str, Shape] = {
        "attn_norm": (n_embd,),
        "attn_q": (n_q, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_output": (n_embd, n_q),
        "ffn_norm": (n_embd,),
    }
    if sizes.architecture == "olmoe":
        block |= {"attn_q_norm": (n_q,), "attn_k_norm": (n_kv,)}
    if sizes.architecture == "qwen3moe":
        block |= {"attn_q_norm": (sizes.n_rot,), "attn_k_norm": (sizes.n_rot,)}
    ffn: dict[str, Shape] = {
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    if not n_expert:
        return block | ffn
    experts = {f"{name}_exps": (n_expert, *shape) for name, shape in ffn.items()}
    return block | {"ffn_gate_inp": (n_expert, n_embd), **experts}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("recipe", choices=RECIPES, metavar="TYPE", help=", ".join(RECIPES))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    begun = time.perf_counter()
    write_model(args.file, MODELS[args.model], args.recipe, args.seed)
    seconds = time.perf_counter() - begun
    sys.stdout.write(f"{args.file.stat().st_size / 1e9:.2f} GB in {seconds:.1f} s\n")


if __name__ == "__main__":
    main()
