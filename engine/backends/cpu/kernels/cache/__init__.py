"""Kernels of the KV cache: writes to it, and attention over its pages.

`cache_codec` knows the types of the cache, `attention` is the kernel, which `attention_page`
computes a page at a time; `cache_ops` has both for torch tensors.
"""
