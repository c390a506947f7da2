"""Reference arithmetic in torch, behind the interfaces of `engine.model.forward`.

At run time, imports neither `layers` nor the kernels of `cpu` and `gpu`.
"""
