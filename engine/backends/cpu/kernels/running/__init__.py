"""Compiling, calling and replaying kernels, and the threads that run them.

`jit` compiles, `fastcall` binds kernels to Python, `thread_pool` has the threads, `call_log` and
`replay` record a token's calls and replay them without Python; `compiled` lists the product
kernels.
"""
