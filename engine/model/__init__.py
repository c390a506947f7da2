"""The network: architectures, their layers, the forward pass, and how weights are sharded."""
