"""Packs the matrices of a file into planes or int16 while reading them; dequantises planes."""
