"""Vision encoders, which files named mmproj hold: declared like models, whole on one device.

An encoder is declared with the layers of `model.layers`, one family per file; `registry` lists
them, and finds and checks files. Like models they never import torch.
"""
