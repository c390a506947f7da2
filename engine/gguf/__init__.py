"""Reads GGUF model files: header, metadata, tensors, split parts.

Imports no torch, and of the engine only `errors`.
"""

from engine.gguf.metadata import Metadata
from engine.gguf.reader import GGUFFile
from engine.gguf.tensor_bytes import TensorBytes
from engine.gguf.tensors import TensorInfo
from engine.gguf.types import TYPES, TypeInfo, row_bytes

__all__ = ["TYPES", "GGUFFile", "Metadata", "TensorBytes", "TensorInfo", "TypeInfo", "row_bytes"]
