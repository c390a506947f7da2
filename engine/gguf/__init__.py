"""Reading of GGUF model files; imports no torch."""

from engine.gguf.metadata import Metadata
from engine.gguf.reader import GGUFFile
from engine.gguf.tensors import TensorInfo
from engine.gguf.types import TYPES, TypeInfo, row_bytes

__all__ = ["TYPES", "GGUFFile", "Metadata", "TensorInfo", "TypeInfo", "row_bytes"]
