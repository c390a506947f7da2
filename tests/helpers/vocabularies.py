"""Small vocabularies in real GGUF files, for tests of the tokenizers."""

import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.formats.gguf.metadata import Metadata
from engine.formats.gguf.reader import GGUFFile
from engine.text.tokenizer import Tokenizer
from tests.helpers import raw_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KEY = "tokenizer.ggml."


def gguf_bytes(values: Mapping[str, Any]) -> bytes:
    """Return a GGUF without tensors; keys without a dot get the tokenizer's prefix."""
    return raw_gguf.gguf(
        [_entry(key if "." in key else KEY + key, value) for key, value in values.items()]
    )


def metadata(values: Mapping[str, Any], name: str = "tiny.gguf") -> Metadata:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(gguf_bytes({"general.architecture": "llama", **values}))
        with GGUFFile.open(path) as file:
            return file.meta


def tokenizer(values: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(values))


def spm(
    scored: Mapping[str, float], special: Mapping[str, int] | None = None, byte_tokens: bool = True
) -> dict[str, Any]:
    """Return an SPM vocabulary: <unk> <s> </s>, the bytes, then the given pieces."""
    special = special or {}
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if byte_tokens else []
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *scored, *special]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * (3 + len(bytes_)) + list(scored.values()) + [0.0] * len(special),
        "token_type": [
            UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(bytes_), *[NORMAL] * len(scored),
            *special.values(),
        ],
    }  # fmt: skip


def byte_characters() -> list[str]:
    """Return the character by which byte-level BPE spells each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def bpe(
    merges: Sequence[str], special: Mapping[str, int] | None = None, pre: str = "qwen2"
) -> dict[str, Any]:
    """Return a byte-level BPE vocabulary: bytes, results of merges, then special tokens."""
    special = special or {}
    made = list(dict.fromkeys(merge.replace(" ", "") for merge in merges))
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*byte_characters(), *made, *special],
        "token_type": [NORMAL] * (256 + len(made)) + list(special.values()),
        "merges": list(merges),
    }


def _entry(key: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return raw_gguf.entry(key, raw_gguf.BOOL, bytes([value]))
    if isinstance(value, int):
        return raw_gguf.entry(key, raw_gguf.U32, raw_gguf.u32(value))
    if isinstance(value, str):
        return raw_gguf.entry(key, raw_gguf.STRING, raw_gguf.string(value))
    if value and isinstance(value[0], float):
        data = struct.pack(f"<{len(value)}f", *value)
        return raw_gguf.array(key, raw_gguf.F32, len(value), data)
    if value and isinstance(value[0], int):
        data = struct.pack(f"<{len(value)}i", *value)
        return raw_gguf.array(key, raw_gguf.I32, len(value), data)
    return raw_gguf.strings(key, value)
