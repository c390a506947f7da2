"""Everything a layer may use during a forward pass: context, cache, and the backends' interfaces.

Imports no layer and no implementation of an interface: neither `ops`, `cpu`, `gpu` nor `parallel`.
"""
