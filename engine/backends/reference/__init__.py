"""Reference arithmetic in torch, which implements the interfaces in `engine.model.forward`.

At run time, imports neither `layers` nor the kernels of `cpu` and `gpu`.
"""
