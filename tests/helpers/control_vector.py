"""Files that steer a model, written by the reference writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

from tests.helpers.tiny_gguf import finish


def write_control_vector(
    path: Path, vectors: Mapping[int, Any], arch: str = "controlvector"
) -> Path:
    """Write a direction for each layer and return `path`."""
    writer = GGUFWriter(path, arch)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(vectors))
    for layer, vector in vectors.items():
        writer.add_tensor(f"direction.{layer}", vector)
    finish(writer)
    return path
