"""What a layer may use during one forward pass: the context, the cache, and the interfaces to both.

Imports no layer and no implementation of an interface: neither `ops`, `cpu`, `gpu` nor `parallel`.
"""
