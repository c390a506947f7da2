"""The demo model as a GGUF file: written after training, read back for the evaluation."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from resources.demo.network import HParams, Llama
from resources.demo.text import CHAT_TEMPLATE, SPECIALS, bare_tokenizer


def write(path: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Write weights (matrices as Q8_0, norms as F32), tokenizer and metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, model.hp, "Tandem Demo")
    write_tokenizer(writer, tokenizer)
    write_tensors(writer, model.state_dict())


def write_tensors(writer: gguf.GGUFWriter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the weights, then the whole file, and close it."""
    for name, tensor in tensors.items():
        data = tensor.numpy().astype(np.float32)
        if data.ndim == 1:
            writer.add_tensor(name, data)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer: gguf.GGUFWriter, hp: HParams, name: str) -> None:
    """Write the model's name and sizes."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_description("The small model bundled with Tandem, to try it without a download")
    writer.add_license("MIT")
    writer.add_languages(["en"])
    writer.add_size_label("3M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(hp.n_vocab)
    writer.add_context_length(hp.n_ctx)
    writer.add_embedding_length(hp.n_embd)
    writer.add_block_count(hp.n_layer)
    writer.add_feed_forward_length(hp.n_ff)
    writer.add_head_count(hp.n_head)
    writer.add_head_count_kv(hp.n_head_kv)
    writer.add_layer_norm_rms_eps(hp.norm_eps)
    writer.add_rope_dimension_count(hp.head_dim)
    writer.add_rope_freq_base(hp.rope_base)


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Write the tokenizer and the chat template."""
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) for i in range(size)]
    kinds = [gguf.TokenType.CONTROL if t in SPECIALS else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges(tokenizer)])
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The merge rules of a BPE tokenizer, best first."""
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def read(path: Path) -> tuple[Llama, Tokenizer]:
    """The network with the file's dequantised weights, and the file's tokenizer."""
    reader = gguf.GGUFReader(path)

    def number(key: str) -> int:
        return int(reader.fields[f"llama.{key}"].contents())

    model = Llama(
        HParams(
            n_vocab=number("vocab_size"),
            n_embd=number("embedding_length"),
            n_layer=number("block_count"),
            n_head=number("attention.head_count"),
            n_head_kv=number("attention.head_count_kv"),
            n_ff=number("feed_forward_length"),
            n_ctx=number("context_length"),
        )
    )
    weights = {
        t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy())
        for t in reader.tensors
    }
    model.load_state_dict(weights)
    return model.eval(), _read_tokenizer(reader)


def _read_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    rules = [tuple(m.split(" ")) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    return bare_tokenizer({t: i for i, t in enumerate(tokens)}, rules)
