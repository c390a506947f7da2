"""Pictures of formulas in LaTeX, drawn by ziamath in a child process with limits.

A formula that a model writes may take for ever: ziamath's time doubles with each level of
fractions. `program` is the child, which knows no Qt; `pictures` is the window's side.
"""
