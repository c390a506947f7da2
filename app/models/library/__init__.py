"""The models on this machine, including other programs' models."""
