"""One model's processes on several machines: how they find each other, start and stop together.

After a handshake with a token, torchrun's agents start workers; `engine.distributed` does the
computing. Only `agent` and `worker` import torch.
"""
