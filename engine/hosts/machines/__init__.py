"""How processes on several machines find each other, start and end together.

A handshake with a token comes first, then torchrun's agents; `engine.distributed` computes. All but
`agent` and `worker` import no torch.
"""
