"""Reference arithmetic in torch, behind the interfaces of `engine.model.forward`.

Imports neither `layers` at run time nor the kernels of `cpu` and `gpu`.
"""
