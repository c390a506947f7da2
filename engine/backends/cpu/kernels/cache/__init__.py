"""KV cache kernels: writes, and attention over its pages.

`cache_codec` implements the cache types and writes, `attention` and `attention_page` the attention
kernel; `cache_ops` binds both to torch tensors.
"""
