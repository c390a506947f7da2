"""Quantised weights: what the bytes of each GGML type mean, as torch operations."""

from engine.quants.table import QUANTS, Quant, dequantise

__all__ = ["QUANTS", "Quant", "dequantise"]
