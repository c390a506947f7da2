"""One rank per process, under torchrun: `python -m engine.distributed`.

Nothing else in the engine imports it.
"""
