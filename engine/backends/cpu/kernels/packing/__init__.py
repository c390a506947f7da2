"""Packs a file's matrices into planes or int16 while reading them; dequantises planes."""
