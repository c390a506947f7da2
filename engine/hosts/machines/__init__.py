"""Processes of one model on several machines: how they find each other, start and end together.

After a handshake with a token, torchrun's agents start workers; `engine.distributed` computes. Only
`agent` and `worker` import torch.
"""
