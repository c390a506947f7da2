"""Reads GGUF model files: header, metadata, tensors, split parts, over memory maps.

Imports no torch, and of the engine only `errors`.
"""

from engine.gguf.metadata import Metadata
from engine.gguf.reader import GGUFFile
from engine.gguf.tensors import TensorInfo
from engine.gguf.types import TYPES, TypeInfo, row_bytes

__all__ = ["TYPES", "GGUFFile", "Metadata", "TensorInfo", "TypeInfo", "row_bytes"]
