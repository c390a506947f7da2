"""Values, names and texts that are likely to break what reads them."""

import random
from typing import Any

from engine.model.architectures.registry import supported_architectures
from engine.model.layers.keys import BOUNDS, SCALING_TYPES, UNPREFIXED
from engine.text.encoders import PRE_TOKENIZERS
from engine.text.vocabulary import ALWAYS_SHOWN, END_NAMES, FILL_IN_NAMES, MODELS

NAN, INF = float("nan"), float("inf")

NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 96, 127, 128, 255, 256, 257, 300, 301, 512,
    4095, 4096, 65535, 65536, 2**20, 2**24, 2**24 + 1, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -3, -64, -(2**31), -(2**63),
    0.0, -0.0, 0.5, -1.0, 1.5, 1e-45, 1e-30, 1e-5, 1e6, 1e12, 1e38, 1e300, NAN, INF, -INF, True,
    False,
)  # fmt: skip

ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask", *FILL_IN_NAMES)

TOKENIZER_KEYS = (
    *(f"tokenizer.ggml.{role}_token_id" for role in ROLES),
    *(
        f"tokenizer.ggml.{key}"
        for key in (
            "model", "pre", "tokens", "scores", "merges", "token_type", "add_bos_token",
            "add_eos_token", "add_space_prefix", "suppress_tokens", "token_type_count",
            "remove_extra_whitespaces", "precompiled_charsmap",
        )
    ),
    "tokenizer.chat_template", "tokenizer.chat_templates", "tokenizer.huggingface.json",
)  # fmt: skip

GENERAL_KEYS = (
    "general.architecture", "general.name", "general.alignment", "general.file_type",
    "general.quantization_version", "general.sampling.temp", "general.sampling.top_k",
    "general.sampling.top_p", "split.no", "split.count", "split.tensors.count",
)  # fmt: skip

ARCHITECTURES = tuple(supported_architectures())

PRE_NAMES = tuple(PRE_TOKENIZERS)

NAMES: tuple[str, ...] = (
    *ARCHITECTURES, *PRE_NAMES, *MODELS, *SCALING_TYPES, *END_NAMES, *ALWAYS_SHOWN,
    *" ".join(FILL_IN_NAMES.values()).split(), "bert", "rwkv", "t5", "plamo2", "none", "no_vocab",
    "clip", "<0x00>", "<0x0A>", "<0xFF>", "<0xGG>", "Phi-3", "phi3",
)  # fmt: skip

TEMPLATES = (
    "{{ messages[0].content }}", "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ raise_exception('no') }}", "{% if", "{{ 1/0 }}", "{{ bos_token }}{{ eos_token }}",
    "{{ missing.name }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 'a' * 10**9 }}",
    "{{ messages | tojson(indent=4) }}", "{% set x = [] %}{{ x.append(x) }}{{ x }}", " ",
)  # fmt: skip

TEXTS: tuple[str | bytes, ...] = (
    "", " ", "▁", "Ġ", "a", "\n", "\x00", "\x1b[2J", "\u202etxt.exe", "\ufeff", "é", "e\u0301",
    "\U0001f600", "<img src=x>", "<b>bold</b>", "'", '"', "\\", "%s%n", "{0}", "../../etc/passwd",
    "a b", " a", "a ", "ab cd ef", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80a",
    "line\nline\r\nline", "\u2028", "x" * 300, "y " * 2000, "\u0301" * 1000, "z" * 70_000,
)  # fmt: skip

TENSOR_NAMES = (
    "token_embd.weight", "output.weight", "output_norm.weight", "output_norm.bias",
    "token_embd_norm.weight", "position_embd.weight", "rope_freqs.weight",
    "rope_factors_long.weight", "rope_factors_short.weight", "per_layer_token_embd.weight",
    "blk.0.attn_q.bias", "blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias", "blk.0.attn_q_norm.weight",
    "blk.0.attn_output.bias", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.weight",
    "blk.0.ffn_gate_up_exps.weight", "blk.0.exp_probs_b.bias", "blk.0.attn_sinks.weight",
    "blk.0.ffn_up.bias", "blk.0.ffn_down.scale", "blk.0.ssm_conv1d.weight", "blk.99.attn_q.weight",
    "blk.-1.attn_q.weight", "blk.999999999.attn_q.weight", "blk.00.attn_q.weight", "blk..weight",
    "blk.0.", ".weight", "",
)  # fmt: skip


def number(rng: random.Random, near: Any = None) -> Any:
    """Return a number that is special, or close to one that was there."""
    is_number = isinstance(near, int | float) and near == near and abs(near) != INF
    if not is_number or rng.random() < 0.5:
        return rng.choice(NUMBERS)
    kind = rng.randrange(6)
    if kind == 0:
        return near + rng.choice((-2, -1, 1, 2))
    if kind == 1:
        return near * rng.choice((2, 3, 10, -1))
    if kind == 2:
        return near // 2 if isinstance(near, int) else near / 2
    if kind == 3:
        return int(near) ^ 1 << rng.randrange(64)
    if kind == 4:
        return rng.randrange(300)
    return rng.uniform(-2, 2) * near


def whole(rng: random.Random, near: int) -> int:
    """Return a whole number that is special, or close to one that was there."""
    value = number(rng, near)
    return int(value) if value == value and abs(value) != INF else 0


def text(rng: random.Random, near: Any = None) -> str | bytes:
    """Return a text that is a known name, odd, or much like one that was there."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NAMES)
    if kind == 3:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice(TEMPLATES)
    if kind == 5:
        return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in "1234")
    known = (
        near.decode("utf-8", "replace") if isinstance(near, bytes) else str(near or "text")[:400]
    )
    cut = rng.randrange(len(known) + 1)
    if kind == 6:
        return known[:cut] + str(rng.choice(("", " ", "x", "\x00", "{{", "%}"))) + known[cut + 1 :]
    return (known * rng.choice((2, 10)))[:100_000]


def key(rng: random.Random, architecture: str) -> str:
    """Return a key that readers look for."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(TOKENIZER_KEYS)
    if kind == 1:
        return rng.choice(GENERAL_KEYS)
    name = rng.choice((*BOUNDS, "rope.scaling.type", "vocab_size", "hidden_activation"))
    return name if name.startswith(UNPREFIXED) else f"{architecture}.{name}"
