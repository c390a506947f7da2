"""What compiles kernels, calls them, shares their work among threads and replays their calls.

`jit` compiles, `fastcall` calls from Python, `pool` has the threads, `call_log` and `replay` record
a token's calls and repeat them without Python. Imports the language of kernels alone.
"""
