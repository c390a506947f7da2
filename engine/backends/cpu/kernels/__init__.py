"""CPU kernels: LLVM IR that is generated for this processor and compiled when a model is loaded.

`language` is the code generator; `running` compiles kernels, calls them and shares their work among
threads; the other folders contain the kernels. Imports no GPU code.
"""
