"""Small random models, written as GGUF files by the reference writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

BPE_ARCHITECTURES = ("qwen2", "qwen3")  # these get a byte-level BPE vocabulary, all others SPM

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6  # tokenizer.ggml.token_type

FFN_PARTS = ("gate", "up", "down")

WORDS = ("hello", "world", "the", "split", "model", "tensor")


def tiny_gguf(
    path: Path,
    *,
    arch: str = "llama",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    n_expert: int = 0,
    n_vocab: int = 64,
    head_dim: int | None = None,
    quant: str = "F32",
    tied: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    seed: int = 0,
    n_ctx: int = 128,
    rope_freq_base: float = 10000.0,
    extra: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
    chat_template: str | None = None,
) -> Path:
    """Write a model with random weights and return `path`.

    Matrices are N(0, 1/sqrt(fan_in)) and norms near one, so that logits stay of order one.
    A file is the same, byte for byte, for the same arguments.

    Args:
        path: the file to write; an existing one is replaced.
        n_expert: number of experts in place of the FFN, two for each token; 0 for none.
        quant: type of matrices, any that `gguf.quants.quantize` writes; matrices whose rows do not
            fill its blocks are F32.
        extra: metadata to add or replace; `None` drops the key or tensor, an array becomes a
            tensor.
        tokenizer: whether to add a vocabulary that can encode any text; `n_vocab` grows to hold
            it.
    """
    tokens = tiny_vocabulary(arch, n_vocab) if tokenizer else {}
    n_vocab = len(tokens.get("tokenizer.ggml.tokens", range(n_vocab)))
    d = n_embd // n_head if head_dim is None else head_dim
    meta: dict[str, Any] = {
        **_sizes(arch, n_layer, n_ctx, n_embd, n_ff, n_head, n_head_kv, d),
        f"{arch}.rope.freq_base": rope_freq_base,
        f"{arch}.vocab_size": n_vocab,
        **tokens,
        "tokenizer.chat_template": chat_template,
        **(extra or {}),
    }
    head = {} if tied else {"output.weight": (n_vocab, n_embd)}
    shapes = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)} | head
    block = _block_shapes(arch, n_embd, n_head * d, n_head_kv * d, n_ff)
    block |= _extras(block, d, qkv_bias=qkv_bias, qk_norm=qk_norm)
    if n_expert:
        meta |= {f"{arch}.expert_count": n_expert, f"{arch}.expert_used_count": 2}
        block = _with_experts(block, n_expert, n_embd)
    for n in range(n_layer):
        shapes |= {f"blk.{n}.{name}": shape for name, shape in block.items()}
    _write(path, arch, meta, shapes, quant, np.random.default_rng(seed))
    return path


def _sizes(
    arch: str, n_layer: int, n_ctx: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, d: int
) -> dict[str, Any]:
    """Return the metadata with the sizes of a model; `d` is the size of a head."""
    sizes = {
        "block_count": n_layer, "context_length": n_ctx, "embedding_length": n_embd,
        "feed_forward_length": n_ff, "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv, "attention.key_length": d,
        "attention.value_length": d, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": d,
    }  # fmt: skip
    return {"general.name": f"tiny {arch}"} | {f"{arch}.{key}": n for key, n in sizes.items()}


def _extras(
    block: Mapping[str, tuple[int, ...]], d: int, *, qkv_bias: bool, qk_norm: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what only some models have beside the matrices of attention."""
    biases = {f"attn_{p}.bias": block[f"attn_{p}.weight"][:1] for p in "qkv"}
    norms: dict[str, tuple[int, ...]] = {"attn_q_norm.weight": (d,), "attn_k_norm.weight": (d,)}
    return (biases if qkv_bias else {}) | (norms if qk_norm else {})


def _with_experts(
    block: Mapping[str, tuple[int, ...]], n_expert: int, n_embd: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block with experts, and a router, in place of its FFN."""
    shapes = dict(block)
    matrices = {f"ffn_{part}": shapes.pop(f"ffn_{part}.weight") for part in FFN_PARTS}
    shapes["ffn_gate_inp.weight"] = n_expert, n_embd
    return shapes | {f"{name}_exps.weight": (n_expert, *shape) for name, shape in matrices.items()}


def least_gguf(
    path: Path, *, arch: str = "llama", quant: str = "Q8_0", n_layer: int = 1,
    extra: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a model that two or three ranks can share and that takes little time to interpret.

    Triton's interpreter needs a quarter of a second for a token of it. Its vocabulary has one
    letter for each token, so it encodes few texts.
    """
    n_vocab = 64
    letters = [chr(ord("A") + n) for n in range(n_vocab - 3)]
    vocabulary = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *letters],
        "tokenizer.ggml.scores": [0.0] * n_vocab,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * len(letters),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return tiny_gguf(
        path, arch=arch, quant=quant, n_layer=n_layer, n_embd=32, n_head=2, n_head_kv=2, n_ff=64,
        n_vocab=n_vocab, tokenizer=False, extra=vocabulary | dict(extra or {}),
    )  # fmt: skip


def _block_shapes(
    arch: str, n_embd: int, n_q: int, n_kv: int, n_ff: int
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n_embd,),
        "attn_q.weight": (n_q, n_embd),
        "attn_k.weight": (n_kv, n_embd),
        "attn_v.weight": (n_kv, n_embd),
        "attn_output.weight": (n_embd, n_q),
        "ffn_norm.weight": (n_embd,),
        "ffn_gate.weight": (n_ff, n_embd),
        "ffn_up.weight": (n_ff, n_embd),
        "ffn_down.weight": (n_embd, n_ff),
    }
    if arch == "bitnet":
        shapes |= {"attn_sub_norm.weight": (n_q,), "ffn_sub_norm.weight": (n_ff,)}
    return shapes


def _write(
    path: Path,
    arch: str,
    meta: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    quant: str,
    rng: np.random.Generator,
) -> None:
    writer = GGUFWriter(path, arch)
    for key, value in meta.items():
        if value is not None and not isinstance(value, np.ndarray):
            writer.add_key_value(key, value, value_type(value))
    for name, shape in shapes.items():
        if name in meta:
            continue
        _add_tensor(writer, name, _random(name, shape, rng), quant)
    for name, value in meta.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
    finish(writer)


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.1 * noise
    return noise / np.float32(np.sqrt(shape[-1]))


def _add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, quant: str) -> None:
    qtype = GGMLQuantizationType[quant]
    block_size, _ = gguf.GGML_QUANT_SIZES[qtype]
    if values.ndim == 1 or values.shape[-1] % block_size:
        qtype = GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)


def value_type(value: Any) -> GGUFValueType:
    """Return the type under which llama.cpp's converters write a metadata value."""
    if isinstance(value, int) and not isinstance(value, bool):
        return GGUFValueType.INT32 if value < 0 else GGUFValueType.UINT32
    return GGUFValueType.get_type(value)


def finish(writer: GGUFWriter) -> None:
    """Write everything that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_vocabulary(arch: str, n_vocab: int) -> dict[str, Any]:
    """Return metadata of a vocabulary of at least `n_vocab` tokens that can encode any text."""
    meta = _bpe() if arch in BPE_ARCHITECTURES else _spm()
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    n_padding = max(0, n_vocab - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(n_padding)]
    types += [UNUSED] * n_padding
    if "tokenizer.ggml.scores" in meta:
        meta["tokenizer.ggml.scores"] += [-1e4] * n_padding
    return meta


def _merges(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the pairs that build each word from its left end, in rank order, each once."""
    pairs = ((word[:i], word[i]) for word in words for i in range(1, len(word)))
    return list(dict.fromkeys(pairs))


def _spm() -> dict[str, Any]:
    words = tuple("▁" + word for word in WORDS)
    letters = list(dict.fromkeys("".join(words)))
    pieces = list(dict.fromkeys(left + right for left, right in _merges(words)))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": (
            ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + pieces + letters
        ),
        "tokenizer.ggml.scores": (
            [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1e3] * len(letters)
        ),
        "tokenizer.ggml.token_type": (
            [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(pieces) + len(letters))
        ),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def _bpe() -> dict[str, Any]:
    # byte-level BPE writes a space as Ġ, and every byte as one printable character
    merges = _merges(tuple("Ġ" + word for word in WORDS))
    pieces = list(dict.fromkeys(left + right for left, right in merges))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    n_plain = 256 + len(pieces)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": _byte_characters() + pieces + special,
        "tokenizer.ggml.token_type": [NORMAL] * n_plain + [CONTROL] * len(special),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": n_plain,
        "tokenizer.ggml.eos_token_id": n_plain + 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def _byte_characters() -> list[str]:
    """Return the printable stand-in of each byte: itself if it prints, else from U+0100 upwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(stand_ins)) for b in range(256)]


def split_gguf(path: Path, n: int) -> list[Path]:
    """Rewrite a file as `n` parts beside it, as llama-gguf-split does, and return their paths.

    The metadata lies in the first part alone; the tensors are dealt out in file order.
    """
    reader = GGUFReader(path)
    n_tensors = len(reader.tensors)
    bounds = [i * n_tensors // n for i in range(n + 1)]
    parts = [path.with_name(f"{path.stem}-{i + 1:05d}-of-{n:05d}.gguf") for i in range(n)]
    for i, part in enumerate(parts):
        writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
        if i == 0:
            _copy_metadata(reader, writer)
        writer.add_key_value("split.no", i, GGUFValueType.UINT16)
        writer.add_key_value("split.count", n, GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", n_tensors, GGUFValueType.INT32)
        for tensor in reader.tensors[bounds[i] : bounds[i + 1]]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return parts


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type)
