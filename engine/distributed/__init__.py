"""Ranks as processes under torchrun, one each: `torchrun -m engine.distributed`.

Nothing else in the engine imports it.
"""
