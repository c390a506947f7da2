"""The placement map of tensors and pins; the only feature package it imports is `split`."""
