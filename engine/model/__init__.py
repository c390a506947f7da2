"""The network: architectures, the layers that they declare, what layers use in a pass, and how
weights are cut."""
