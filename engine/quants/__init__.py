"""Quantised numbers: what the bytes of each GGML type mean, as torch operations."""

from engine.quants.encode import WRITERS, quantise
from engine.quants.table import QUANTS, Quant, dequantise

__all__ = ["QUANTS", "WRITERS", "Quant", "dequantise", "quantise"]
