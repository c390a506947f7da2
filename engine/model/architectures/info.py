"""Describes a GGUF file from its header, without reading weights or importing torch."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from engine.errors import EngineError, InvalidGGUF
from engine.formats.gguf.companions import MTP_MARK, files_beside
from engine.formats.gguf.reader import GGUFFile
from engine.model.architectures.description import Inspection, ModelInfo, TensorSummary
from engine.model.layers.mtp import JOINT
from engine.model.sharding.split import SplitPart, split_parts
from engine.text.messages import can_think, has_effort, thinking_marks

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""Quantisation names by `general.file_type`, from llama.cpp's `enum llama_ftype`."""

SAMPLING_KEYS = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repeat_last_n": "penalty_last_n", "repeat_penalty": "penalty_repeat",
    "xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold",
}  # fmt: skip
"""Suffixes of "general.sampling." keys by field in `SamplingParams`; in GGUF since 2025."""

UNKNOWN = "unknown"
MAX_NAME = 200  # maximum displayed characters of a model's name
MAX_LIST = 4096  # maximum elements to read from a list of counts
MAX_TEMPLATE = 1 << 17  # maximum characters to read from a chat template


def inspect_model(path: str | Path) -> Inspection:
    """Read the complete header of `path` (any part of a split file).

    Raises:
        ModelFileError: the file is missing or is not GGUF.
    """
    from engine.text.tokenizer import tokenizer_warnings  # slow, and `describe` does not need it

    with GGUFFile.open(path) as file:
        problem, parts = _parts(file)
        return Inspection(
            info=describe(file),
            version=file.version,
            files=tuple(str(part) for part in file.paths),
            metadata=tuple((key, file.meta.describe(key)) for key in list(file.meta.keys())),
            tensors=tuple(
                TensorSummary(t.name, t.type.name, t.shape, t.n_bytes)
                for t in file.tensors.values()
            ),
            warnings=tokenizer_warnings(file.meta),
            problem=problem,
            parts=parts,
        )


def _parts(file: GGUFFile) -> tuple[str, tuple[SplitPart, ...]]:
    from engine.load_params import LoadParams
    from engine.model.architectures.declare import declare

    try:
        declaration = declare(file, LoadParams(str(file.path)))
    except EngineError as error:
        return str(error), ()
    trunk = declaration.dims[: declaration.hp.n_trunk]
    return "", split_parts(trunk, declaration.hp.n_vocab)


def read_model_info(path: str | Path) -> ModelInfo:
    """Read the description of `path` (any part of a split file) from its header.

    Raises:
        ModelFileError: the file is missing or is not GGUF.
    """
    with GGUFFile.open(path) as file:
        return describe(file)


def describe(file: GGUFFile) -> ModelInfo:
    """Return the description of an open file.

    Missing or invalid metadata becomes 0 or "unknown", so that files that cannot run are still
    listed; loading reports their errors.
    """
    from engine.model.architectures.registry import is_supported

    arch = _architecture(file)
    heads = _number(file, f"{arch}.attention.head_count")
    types = Counter(t.type.name for t in file.tensors.values())
    return ModelInfo(
        path=str(file.path),
        name=_name(file),
        architecture=arch,
        supported=is_supported(arch),
        n_layer=_number(file, f"{arch}.block_count"),
        n_embd=_number(file, f"{arch}.embedding_length"),
        n_head=heads,
        n_head_kv=_number(file, f"{arch}.attention.head_count_kv", heads),
        n_vocab=_n_vocab(file),
        n_ctx_train=_number(file, f"{arch}.context_length"),
        n_params=sum(t.n_elements for t in file.tensors.values()),
        n_bytes=file.n_bytes,
        quant=_quant(file, types),
        has_chat_template="tokenizer.chat_template" in file.meta,
        tensor_types=tuple(types.most_common()),
        sampling=_sampling(file),
        can_think=can_think(_template(file)),
        has_effort=has_effort(_template(file)),
        has_thoughts=thinking_marks(_template(file)) is not None,
        has_mtp=_has_mtp(file),
    )


def _has_mtp(file: GGUFFile) -> bool:
    if any(name.endswith(f".{JOINT}") for name in file.tensors):
        return True
    return bool(files_beside(file.path, MTP_MARK, is_first=True))


def _template(file: GGUFFile) -> str:
    source = file.meta.get("tokenizer.chat_template", limit=MAX_TEMPLATE)
    return source if isinstance(source, str) else ""


def _sampling(file: GGUFFile) -> tuple[tuple[str, float], ...]:
    from engine.sampling_params import SamplingParams

    settings: list[tuple[str, float]] = []
    for name, key in SAMPLING_KEYS.items():
        value = file.meta.get(f"general.sampling.{key}", limit=1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        value = round(value, 6) if math.isfinite(value) else value  # 0.6 is stored as F32
        try:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        except EngineError:
            continue
        settings.append((name, value))
    return tuple(settings)


def _architecture(file: GGUFFile) -> str:
    try:
        return file.meta.architecture
    except InvalidGGUF:
        return UNKNOWN


def _name(file: GGUFFile) -> str:
    """Return the model's name in one printable line, or the file's name if it has none."""
    name = file.meta.get("general.name", limit=4 * MAX_NAME)
    if not isinstance(name, str):
        return file.path.stem
    shown = "".join(c if c.isprintable() else " " for c in name[:MAX_NAME])
    return " ".join(shown.split()) or file.path.stem


def _number(file: GGUFFile, key: str, default: int = 0) -> int:
    """Return a count; for a list with one count per layer, the maximum."""
    value = file.meta.get(key, default, limit=MAX_LIST)
    items = value if isinstance(value, list) else [value]
    return max((item for item in items if isinstance(item, int)), default=0)


def _n_vocab(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.n_rows
    return file.meta.array_length("tokenizer.ggml.tokens") or 0


def _quant(file: GGUFFile, types: Counter[str]) -> str:
    file_type = file.meta.get("general.file_type", limit=1)
    if isinstance(file_type, int) and file_type in FILE_TYPES:
        return FILE_TYPES[file_type]
    matrices = Counter(t.type.name for t in file.tensors.values() if len(t.shape) > 1)
    return (matrices or types).most_common(1)[0][0] if types else "none"
