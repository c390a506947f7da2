"""Child processes with limits of time and memory, for work on what strangers made.

`child` is the side that asks, `answering` the loop inside the child. Imports nothing of the engine
but `programs`.
"""
