"""KV cache kernels: writes, and attention over its pages.

`cache_codec` has the cache types and the writes, `attention` and `attention_page` are the attention
kernel, and `cache_ops` binds both to torch tensors.
"""
